"""Names of a module's tensors without the prefixes of wrappers such as DDP."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparsefn._engine.transforms import at_compile_time
from sparsefn.core.tree import check_not_lazy

# by name: the dotted path in the module, and the tensor
OwnTensors = dict[str, tuple[str, Tensor]]

# The child that holds the wrapped module, and the classes that hold one so. Classes are
# known by name, as importing them would load torch's compiler.
_CHILDREN = {
    "module": {"DistributedDataParallel", "DataParallel"},
    "_orig_mod": {"OptimizedModule"},
    "_checkpoint_wrapped_module": {"ActivationWrapper"},
}


def wrapped_child(module: nn.Module) -> str | None:
    """The name of the child that a wrapper of torch's holds, None for any other module.

    >>> wrapped_child(torch.nn.DataParallel(torch.nn.Linear(1, 1)))
    'module'
    >>> wrapped_child(torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1)}))
    """
    kinds = {
        kind.__name__
        for kind in type(module).__mro__
        if kind.__module__.startswith("torch.")
    }
    return next((child for child, names in _CHILDREN.items() if names & kinds), None)


def inner_module(module: nn.Module) -> nn.Module:
    """The module inside of torch's wrappers.

    >>> sf.modules.inner_module(torch.nn.DataParallel(torch.nn.ReLU()))
    ReLU()

    Args:
        module: Any module. Wrappers are `DistributedDataParallel`, `DataParallel`, the
            result of `torch.compile` and checkpoint wrappers, also one in another.

    Returns:
        The module that they hold, no copy; `module` itself if it is no wrapper.

    Raises:
        TypeError: `module` is none.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a module first, got {type(module).__name__}")
    return _unwrapped(module)[1]


def _unwrapped(module: nn.Module) -> tuple[str, nn.Module]:
    # The path of the module that wrappers hold, with a dot at its end, and the module.
    prefix = ""
    # a checkpointing wrapper renames the tensors that it holds
    while child := wrapped_child(module):
        prefix = f"{prefix}{child}."
        module = module.get_submodule(child)
    return prefix, module


def own_tensors(module: nn.Module, kind: str, *, tied: bool = False) -> OwnTensors:
    """`{name: (dotted path in the module, tensor)}` of the parameters or buffers of a
    module.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.DataParallel(torch.nn.Linear(1, 1, bias=False))
    ... )
    >>> {name: path for name, (path, _) in own_tensors(net, "parameters").items()}
    {'0.weight': '0.module.weight'}

    Names are as in the module without wrappers. `kind` is "parameters" or "buffers"; a
    tied tensor is there once, under its first name, or with `tied` under each. Where a
    forward has left parameters of `torch.distributed.fsdp.fully_shard` gathered, the
    gathered copies are freed first, as the module's own `state_dict()` does: its
    parameters are the shards. Raises TypeError for anything but a module, ValueError
    for lazy layers that have no shape yet.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            "expected a module first, as in call(module, state, x), got "
            f"{type(module).__name__}"
        )
    for _, part in sharded_parts(module):
        part.reshard()
    prefix, inner = _unwrapped(module)
    named = inner.named_parameters if kind == "parameters" else inner.named_buffers
    found = list(named(remove_duplicate=not tied))
    check_not_lazy(f"{kind} of the {type(inner).__name__}", found)
    return {
        _without_wrappers(inner, name): (prefix + name, tensor)
        for name, tensor in found
    }


def tensors_by_name(
    module: nn.Module, kind: str = "parameters", *, tied: bool = False
) -> dict[str, Tensor]:
    """The tensors of `own_tensors` by name.

    >>> list(tensors_by_name(torch.nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    own = own_tensors(module, kind, tied=tied)
    return {name: tensor for name, (_, tensor) in own.items()}


@dataclass(frozen=True)
class Named:
    """A module, or a part of one, and its parameters under the names that a state has
    for them.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 3, bias=False)
    ... )
    >>> part = Named.of(model).parts(["1"])["1"]
    >>> part.module, list(part.own), part.own["1.weight"][0]
    (Linear(in_features=1, out_features=3, bias=False), ['1.weight'], 'weight')

    `own` has the dotted path in the module and the tensor of each, as `own_tensors`.
    """

    module: nn.Module
    own: OwnTensors

    @classmethod
    def of(cls, module: nn.Module) -> Named:
        """The whole of a module."""
        return cls(module, own_tensors(module, "parameters"))

    def parts(self, paths: Iterable[str]) -> dict[str, Named]:
        """The submodules at some paths, with the names of the whole."""
        names = {id(tensor): name for name, (_, tensor) in self.own.items()}
        found: dict[str, Named] = {}
        for path in paths:
            part = self.module.get_submodule(path)
            own = own_tensors(part, "parameters").values()
            found[path] = Named(part, {names[id(x)]: (at, x) for at, x in own})
        return found


def _without_wrappers(root: nn.Module, path: str) -> str:
    if not any(child in path for child in _CHILDREN):
        return path
    parts = path.split(".")
    owner = root
    kept = []
    for part in parts[:-1]:
        if part not in _CHILDREN or wrapped_child(owner) != part:
            kept.append(part)
        owner = owner.get_submodule(part)
    return ".".join([*kept, parts[-1]])


def mend_of_names(unknown: Sequence[str], own: Container[str]) -> str:
    """What to write for names that differ from a module's own ones by what wrappers
    add; "" for other names.

    >>> mend_of_names(["module.weight"], {"weight"})
    "; leave out 'module.', which a wrapper adds: sf.modules.params_of(module) and
    .module.named_parameters() do"
    >>> (
    ...     mend_of_names(["weight"], {"module.weight"}),
    ...     mend_of_names(["wieght"], {"weight"}),
    ... )
    ('; pass .module of the module, which has these names', '')
    """
    if not unknown:
        return ""
    for child in _CHILDREN:
        if all(f"{child}.{name}" in own for name in unknown):
            return f"; pass .{child} of the module, which has these names"
    added = [part for part in unknown[0].split(".") if part in _CHILDREN]
    if added and all(_without_children(name) in own for name in unknown):
        mend = f"sf.modules.params_of(module) and .{added[0]}.named_parameters() do"
        return f"; leave out {f'{added[0]}.'!r}, which a wrapper adds: {mend}"
    if all(name.isdigit() for name in unknown):
        return "; a sequence has no names: write dict(module.named_parameters())"
    return ""


def _without_children(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _CHILDREN)


def without_wrappers(
    module: nn.Module, checkpoint: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A checkpoint of the module by the names of `own_tensors`, with or without
    wrappers in its keys.

    >>> net = torch.nn.DataParallel(torch.nn.Linear(1, 1, bias=False))
    >>> [
    ...     list(without_wrappers(net, checkpoint))
    ...     for checkpoint in (net.state_dict(), net.module.state_dict())
    ... ]
    [['weight'], ['weight']]

    A key that belongs to no parameter is kept. Raises TypeError for one that is no
    string.
    """
    for key in checkpoint:
        if not isinstance(key, str):
            raise TypeError(
                f"expected a checkpoint whose names are strings, got {key!r}, a "
                f"{type(key).__name__}"
            )
    pairs = [
        (path, name) for name, (path, _) in own_tensors(module, "parameters").items()
    ]
    pairs += [
        (path.replace("_checkpoint_wrapped_module.", ""), name) for path, name in pairs
    ]  # as state_dict has it
    layers = {}
    for path, name in pairs:
        layer, _, _ = path.rpartition(".")
        layers[layer] = name.rpartition(".")[0]
    keys = {key: key.rpartition(".") for key in checkpoint}
    named = {
        key: (layers.get(head, head), name) for key, (head, _, name) in keys.items()
    }
    return {
        f"{head}.{name}" if head else name: checkpoint[key]
        for key, (head, name) in named.items()
    }


def sharded_parts(module: nn.Module) -> list[tuple[str, Any]]:
    """The path and the submodule of each part that `fully_shard` has sharded.

    >>> sharded_parts(torch.nn.Linear(1, 1))
    []
    """
    # Importing the module takes a second; without it nothing is sharded, and what is
    # has a class of its own.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not _has_subclasses(fsdp.FSDPModule):
        return []
    return [
        (path, part)
        for path, part in module.named_modules()
        if isinstance(part, fsdp.FSDPModule)
    ]


@at_compile_time
def _has_subclasses(cls: type) -> bool:
    return bool(cls.__subclasses__())  # which the compiler of torch 2.11 does not know


def check_not_sharded(what: str, module: nn.Module) -> None:
    """Raise ValueError for a module that is, or holds, one of `fully_shard`.

    >>> check_not_sharded("sf.modules.call", torch.nn.Linear(1, 1))
    """
    for path, part in sharded_parts(module):
        raise ValueError(
            f"{what}: expected a module that is not sharded, but "
            f"{f'{path!r} in it' if path else 'it'} is a {type(part).__name__} of "
            "fully_shard, which cannot be copied and, after its first backward pass, "
            "ignores the weights that torch.func.functional_call gives it: write "
            "them into it with sf.distributed.commit(model, state), run it as it is, "
            "and take the gradients with sf.distributed.grads_of(model, state)"
        )


def check_not_parallel(module: nn.Module) -> None:
    """Raise ValueError for a module that is, or holds, a wrapper for data parallelism.

    >>> check_not_parallel(torch.nn.DataParallel(torch.nn.Linear(1, 1)))
    Traceback (most recent call last):
        ...
    ValueError: expected a module without data parallelism, as gradients would not be
    reduced over its copies, but it is a DataParallel: to train it use
    sf.distributed.commit(model, state) and sf.distributed.grads_of(model, state), and
    to run it without gradients pass its `.module`
    """
    for path, part in module.named_modules():
        if wrapped_child(part) == "module":
            raise ValueError(
                "expected a module without data parallelism, as gradients would not "
                "be reduced over its copies, but "
                f"{f'{path!r} in it' if path else 'it'} is a {type(part).__name__}: "
                "to train it use sf.distributed.commit(model, state) and "
                "sf.distributed.grads_of(model, state), and to run it without "
                "gradients pass its `.module`"
            )
