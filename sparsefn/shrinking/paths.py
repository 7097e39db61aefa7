"""Parts of a module: which submodules globs match, and what these are called with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import optree
from torch import Tensor, nn

from sparsefn.nn.modules import as_call, bake
from sparsefn.shrinking.trace import Example, run_once, where_it_lies


def matched(module: nn.Module, globs: Sequence[str]) -> list[str]:
    """The paths of the submodules that globs match, none of which is inside another.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.ReLU()
    ... )
    >>> matched(net, ["0*", "1"])
    ['0', '1']

    Raises TypeError for anything but globs, and ValueError for a glob that matches
    none, and for a submodule that shares a parameter with the rest.
    """
    wanted = "expected only to be globs of submodules such as 'layers.*.mlp'"
    if not isinstance(globs, Sequence) or any(
        not isinstance(glob, str) for glob in globs
    ):
        raise TypeError(
            f"{wanted}, got {globs!r}; which units go is what the masks say"
        )
    if not globs:
        raise ValueError(f"{wanted}, got none")
    names = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    lost = []
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            lost.append(repr(glob))
    if lost:
        raise ValueError(
            f"only: no path matches {', nor '.join(lost)}; the paths are "
            f"{', '.join(map(repr, names))}"
        )
    found: list[str] = []
    for path in names:  # a module comes before what is in it
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if not is_inside and any(fnmatchcase(path, glob) for glob in globs):
            found.append(path)
    for path in found:
        inside = {id(param) for param in module.get_submodule(path).parameters()}
        for name, param in module.named_parameters(remove_duplicate=False):
            if id(param) in inside and not name.startswith(f"{path}."):
                raise ValueError(
                    f"expected {path!r} to have its parameters alone, but it shares "
                    f"{name!r}"
                )
    return found


class Parts(nn.Module):
    """A module that runs some submodules instead of itself, each on its own call.

    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU()).eval()
    >>> Parts(net, ["0"])(torch.ones(3, 1))[0].shape
    torch.Size([3, 2])
    """

    def __init__(self, module: nn.Module, paths: Sequence[str]) -> None:
        super().__init__()
        self._called = list(paths)
        self._modules = module._modules
        self._parameters = module._parameters
        self._buffers = module._buffers

    def _get_name(self) -> str:
        return f"submodules {', '.join(map(repr, self._called))}"

    def forward(self, *calls: Example) -> list[Any]:
        """What each submodule gives for its call."""
        outs = []
        for path, example in zip(self._called, calls, strict=True):
            args, kwargs = as_call(example)
            outs.append(self.get_submodule(path)(*args, **kwargs))
        return outs


def calls_of(
    module: nn.Module, paths: Sequence[str], example: Example
) -> dict[str, Example]:
    """What each submodule is first called with when the module runs on an example.

    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU()).eval()
    >>> calls_of(net, ["1"], torch.ones(3, 1))["1"][0].shape
    torch.Size([3, 2])

    Raises ValueError for a submodule that is not called, and for arguments without a
    name beside arguments with one.
    """
    own = bake(module, {}, partial=True)  # a copy
    made: dict[str, Any] = {}
    for path in paths:

        def note(
            part: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            path: str = path,
        ) -> None:
            given: Any = (args, kwargs)
            if path not in made:
                made[path] = optree.tree_map(_cloned, given)

        own.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
    run_once(own, own, where_it_lies(module, as_call(example)))
    calls: dict[str, Example] = {}
    for path in paths:
        if path not in made:
            raise ValueError(
                f"expected the module to call {path!r} on the example, but it does not"
            )
        args, kwargs = made[path]
        calls[path] = args
        if kwargs:
            part = module.get_submodule(path)
            calls[path] = _by_name(part, path, args, kwargs)
    return calls


def _cloned(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _by_name(
    part: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    bound = inspect.signature(part.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind in (kind.VAR_POSITIONAL, kind.POSITIONAL_ONLY):
            raise ValueError(
                f"expected a forward of {path!r} all of whose arguments have names"
            )
        if kind is kind.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named
