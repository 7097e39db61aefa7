"""What layers inside of a model return."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from sparsefn._engine.transforms import without_compiler
from sparsefn.core.checks import is_sequence
from sparsefn.core.state import State
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.nn.modules.calls import call
from sparsefn.nn.modules.wrappers import inner_module


@without_compiler
def outputs(
    module: nn.Module,
    state: State | Tree | None,
    *args: Tree,
    paths: Sequence[str],
    **kwargs: Tree,
) -> tuple[Tree, dict[str, Tensor]]:
    """Run a module, and give what it returns and what some of its layers return.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> params = sf.modules.params_of(model)
    >>> result, hidden = sf.recovery.outputs(
    ...     model, params, torch.ones(5, 2), paths=["0"]
    ... )
    >>> torch.equal(hidden["0"].relu(), result)
    True

    Args:
        module: The model, in its own mode (train or eval).
        state: A State, whose effective weights are used, or params as in
            `sf.modules.call`. None: the module's own parameters, to which gradients
            flow.
        *args: The arguments of the call.
        paths: The paths of layers, as `module.get_submodule` takes them.
        **kwargs: Arguments of the call by name.

    Returns:
        What the module returns, and a dict by path with what each layer returns. It
        has the first floating-point tensor of a tuple or another tree, and the last
        output of a layer that runs several times. Gradients flow through all.

    Raises:
        TypeError: `paths` is no sequence of strings, or an input is in the place of
            `state`. As `sf.modules.call`.
        ValueError: The module has no layer at a path, or does not call it, or the layer
            returns no floating-point tensor. As `sf.modules.call`.

    No hook is left in the module. Works under `vmap` and `torch.func.grad`; where it is
    compiled, the model itself runs uncompiled.
    """
    if not is_sequence(paths):
        mend = f": write paths=[{paths!r}]" if isinstance(paths, str) else ""
        raise TypeError(
            f"outputs: expected paths to be a list of paths of layers, got {paths!r}"
            f"{mend}"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            "outputs: expected a module first, as in outputs(module, None, x, "
            f"paths=[...]), got {type(module).__name__}"
        )
    if isinstance(state, Tensor):
        raise TypeError(
            "outputs: expected a State, params or None second, got a Tensor: for the "
            "module's own parameters write outputs(module, None, x, paths=[...])"
        )
    inner = inner_module(module)
    _check_paths(inner, paths)
    found = dict[str, Tree]()
    with contextlib.ExitStack() as hooks:
        for path in paths:
            hook = partial(_note, found, path)
            hooks.enter_context(inner.get_submodule(path).register_forward_hook(hook))
        if state is None:
            result = module(*args, **kwargs)
        else:
            result = call(module, state, *args, **kwargs)
    return result, {path: _tensor_of(inner, path, found) for path in paths}


def _note(
    found: dict[str, Tree], path: str, part: nn.Module, args: Any, out: Tree
) -> None:
    found[path] = out


def _check_paths(module: nn.Module, paths: Sequence[str]) -> None:
    parts = module.named_modules(remove_duplicate=False)
    known = [path for path, _ in parts if path]
    for path in paths:
        if path not in known:
            near = difflib.get_close_matches(str(path), known, 1) or known[:1]
            example = f", such as {near[0]!r}" if near else ", which has none"
            raise ValueError(
                "outputs: expected the path of a layer of the "
                f"{type(module).__name__}{example}, got {path!r}"
            )


def _tensor_of(module: nn.Module, path: str, found: dict[str, Tree]) -> Tensor:
    if path not in found:
        parts = [name for name, _ in module.get_submodule(path).named_children()]
        around = path.rpartition(".")[0]
        near = [*(f"{path}.{name}" for name in parts[:1]), around]
        mend = ""
        if near[0]:
            mend = f": ask for one that it calls, perhaps {near[0]!r}"
        raise ValueError(
            f"outputs: expected a forward that calls the layer {path!r}, but it did "
            f"not{mend}"
        )
    for leaf in leaves_of(found[path]):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError(
        f"outputs: expected a floating-point tensor from the layer {path!r}, got "
        f"{type(found[path]).__name__}"
    )
