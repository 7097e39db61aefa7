"""Models without layers that masks make zero: shorter lists of modules."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, fx, nn

from sparsefn.shrinking.config_numbers import (
    LAYER_NUMBERS,
    configs_fit,
    layer_numbers,
    set_configs,
)
from sparsefn.shrinking.residuals import (
    Residual,
    are_zero,
    own_leaves,
    passes,
    residuals,
    unread,
    without_branches,
)
from sparsefn.shrinking.trace import with_tensors
from sparsefn.shrinking.values import module_of, named_tensors, opname

Works = Callable[[nn.Module], bool]
_LISTS = (nn.Sequential, nn.ModuleList)
_COUNTED = (nn.TransformerEncoder, nn.TransformerDecoder)  # keep `num_layers`
# They give the entries that they take, in the same order.
_SHAPES = frozenset(
    ["view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"]
)

# What changes for the outputs. A number that is the length of a list may be so by
# chance, such as a number of heads; a list of that length hardly ever is.
_Change = Literal["nothing", "lists", "lists and numbers"]
# of configs: what holds each, by which key, and what it was
_Lists = list[tuple[dict[str, Any], str, Any]]
_CHANGES: tuple[_Change, ...] = ("nothing", "lists", "lists and numbers")


class Shorter(NamedTuple):
    """A model of the same class with shorter lists of modules.

    `names` has the new names of its tensors by their old ones, None where one is gone,
    and `notes` what configs cannot say.
    """

    module: nn.Module
    names: dict[str, str | None]
    notes: tuple[str, ...]


def zero_branches(
    program: fx.GraphModule, masks: Mapping[str, Tensor]
) -> list[Residual]:
    """The residual branches of a program that masks make zero, with all of the
    parameters that they alone read.

    >>> from sparsefn.shrinking.trace import traced
    >>> class Block(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return x + super().forward(x)
    >>> program = traced(
    ...     torch.nn.Sequential(Block(2, 2), Block(2, 2)), torch.ones(3, 2)
    ... )
    >>> gone = {"1.weight": torch.zeros(2, 2) > 0, "1.bias": torch.zeros(2) > 0}
    >>> [one.sum.name for one in zero_branches(program, gone)]
    ['add_1']
    """
    pruned = []
    for one in residuals(program):
        own = [masks[leaf] for leaf in own_leaves(program, one.own) if leaf in masks]
        sparse = [mask for mask in own if mask.ndim and mask.numel()]
        if sparse and not any(bool(mask.any()) for mask in sparse):
            pruned.append(one)
    if not pruned:
        return []
    zero = are_zero(program, [one.branch for one in pruned], masks)
    return [one for one, is_zero in zip(pruned, zero, strict=True) if is_zero]


def items_without(
    model: nn.Module, program: fx.GraphModule, gone: Sequence[Residual]
) -> list[str]:
    """The modules that compute nothing without some branches, and so give what they
    take: items of lists, and other modules that add up such a branch.
    """
    idle = _busy(program) - _busy(without_branches(program, gone))
    adds = {path for one in gone for path in _around(one.sum)}
    found: list[str] = []
    for path, part in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if not path or path not in idle or is_inside:
            continue
        # a list has no forward, and no module can take its place: its items go
        may_be_identity = path in adds and not isinstance(part, nn.ModuleList)
        if may_be_identity or _in_list(model, path):
            found.append(path)
    return found


def _in_list(model: nn.Module, path: str) -> bool:
    return isinstance(model.get_submodule(path.rpartition(".")[0]), _LISTS)


def _busy(program: fx.GraphModule) -> set[str]:
    # The modules in which something is computed, other than a shape, or than what
    # nothing reads and no parameter has a part in.
    idle = unread(program, {one.sum for one in residuals(program)})
    paths = set[str]()
    for node in program.graph.nodes:
        if node.op != "call_function" or opname(node) in _SHAPES or passes(node):
            continue
        reads = any(one.op == "get_attr" for one in node.all_input_nodes)
        if reads or node not in idle:
            paths.update(_around(node))
    return paths


def left_in(
    program: fx.GraphModule, gone: Sequence[Residual], items: Sequence[str]
) -> list[Residual]:
    """The branches that have parameters of their own outside of some modules."""
    starts = tuple(f"{item}." for item in items)
    return [
        one
        for one in gone
        if not all(leaf.startswith(starts) for leaf in own_leaves(program, one.own))
    ]


def _around(node: fx.Node) -> Iterator[str]:
    # The modules in whose forward an operation is, and the modules around these.
    for up in range(len(node.meta.get("nn_module_stack") or {})):
        path = module_of(node, up)
        while path:
            yield path
            path = path.rpartition(".")[0]


def shorter(model: nn.Module, items: Sequence[str], works: Works) -> Shorter | None:
    """A copy of a model without some modules, items of lists; None where `works`
    accepts none.

    Items keep their order and are numbered again, with numbers that each item keeps of
    its place, such as the index into a cache. A module that is no item of a list
    becomes an `nn.Identity`. A number that is the length of a list, in
    a module around it, becomes the new one where the outputs need it, and in configs
    where a new model from them equals the copy. The same holds for the entries of a
    config's list of that length. The tensors are the model's.
    """
    for places, change in itertools.product((True, False), _CHANGES):
        small, names, cut = _without(model, items, places, change)
        if works(small):
            notes = _configs(small, model, items, cut, works)
            return Shorter(small, names, notes)
    return None


def _lists(model: nn.Module, items: Sequence[str]) -> dict[str, list[str]]:
    # The names of the items by the path of their list.
    found: dict[str, list[str]] = defaultdict(list)
    for item in items:
        path, _, name = item.rpartition(".")
        if _in_list(model, item):
            found[path].append(name)
    return found


def _lengths(model: nn.Module, items: Sequence[str]) -> dict[str, tuple[int, int]]:
    # Of each list how long it is, and becomes.
    return {
        path: (n := len(model.get_submodule(path)._modules), n - len(names))
        for path, names in _lists(model, items).items()
    }


def _without(
    model: nn.Module, items: Sequence[str], places: bool, change: _Change
) -> tuple[nn.Module, dict[str, str | None], _Lists]:
    small = with_tensors(model)
    names: dict[str, str | None] = {name: name for name in named_tensors(model)}
    lists = _lists(model, items)
    cut = [] if change == "nothing" else _shorten(small, model, items)
    for path, (before, after) in _lengths(model, items).items():
        part = small.get_submodule(path)
        if places:
            _number(part, lists[path])
        if change == "lists and numbers":
            _count(small, path, before, after)
    for item in items:
        if not _in_list(model, item):
            small.set_submodule(item, nn.Identity())
            for name in names:
                if name.startswith(f"{item}."):
                    names[name] = None
    for path, gone in sorted(lists.items(), reverse=True):  # inner lists first
        part = small.get_submodule(path)
        owner: Any = small.get_submodule(path.rpartition(".")[0])
        _rename(names, path, _cut(part, gone))
        if isinstance(owner, _COUNTED):
            owner.num_layers = len(part._modules)
    return small, names, cut


def _cut(part: nn.Module, gone: Sequence[str]) -> dict[str, str | None]:
    # Removes the items, and says what the others are called then.
    held = dict(part._modules)
    numbered = list(held) == [str(i) for i in range(len(held))]
    kept = [name for name in held if name not in gone]
    new = {name: str(i) if numbered else name for i, name in enumerate(kept)}
    part._modules.clear()
    for name in kept:
        part._modules[new[name]] = held[name]
    return {name: new.get(name) for name in held}


def _rename(
    renamed: dict[str, str | None], path: str, new: Mapping[str, str | None]
) -> None:
    # The tensors in the items of a list, by their names before any list was cut.
    start = f"{path}." if path else ""
    for old, now in renamed.items():
        if now is not None and now.startswith(start):
            item, _, rest = now.removeprefix(start).partition(".")
            if item in new:
                other = new[item]
                renamed[old] = None if other is None else f"{start}{other}.{rest}"


def _number(part: nn.Module, gone: Sequence[str]) -> None:
    # Numbers that are the place of each item become its new place.
    held: dict[tuple[str, str], list[tuple[int, Any]]] = defaultdict(list)
    for i, item in enumerate(part._modules.values()):
        for path, inner in item.named_modules() if item is not None else ():
            for key, value in vars(inner).items():
                if type(value) is int:
                    held[path, key].append((i, inner))
    kept = [i for i, name in enumerate(part._modules) if name not in gone]
    for (_, key), owners in held.items():
        if len(owners) > 1 and all(vars(owner)[key] == i for i, owner in owners):
            for i, owner in owners:
                if i in kept:
                    vars(owner)[key] = kept.index(i)


def _count(small: nn.Module, path: str, before: int, after: int) -> None:
    # Numbers that are the length of a list, in the modules around it and their configs.
    while True:
        path = path.rpartition(".")[0]
        owner = small.get_submodule(path)
        for held in _plain(owner):
            for key, value in held.items():
                if type(value) is int and value == before:
                    held[key] = after
        if not path:
            return


def _plain(owner: nn.Module) -> Iterator[dict[str, Any]]:
    yield vars(owner)
    config = getattr(owner, "config", None)
    if hasattr(config, "__dict__"):
        yield vars(config)


def _shorten(small: nn.Module, model: nn.Module, items: Sequence[str]) -> _Lists:
    # Lists of configs with an entry for each item, such as the kinds of the layers,
    # lose the entries; so do the numbers of layers.
    old: _Lists = []
    seen = set[int]()
    for part in small.modules():
        config: Any = getattr(part, "config", None)
        if not hasattr(config, "__dict__") or id(config) in seen:
            continue
        seen.add(id(config))
        held = vars(config)
        for key, value in list(held.items()):
            left = _entries_without(value, model, items)
            if left is not None:
                old.append((held, key, value))
                held[key] = left
        numbers = layer_numbers(config)
        left = _entries_without(
            [numbers.get(i, {}) for i in range(held.get("num_hidden_layers", 0))],
            model,
            items,
        )
        if numbers and left is not None:
            old.append((held, LAYER_NUMBERS, held[LAYER_NUMBERS]))
            config.per_layer_config = dict(enumerate(left))
    return old


def _entries_without(value: object, model: nn.Module, items: Sequence[str]) -> Any:
    # What is left of the entries of a list that is as long as a list of modules.
    if not isinstance(value, list | tuple):
        return None
    for path, gone in _lists(model, items).items():
        whole = list(model.get_submodule(path)._modules)
        if len(whole) == len(value):
            pairs = zip(whole, value, strict=True)
            return type(value)([entry for name, entry in pairs if name not in gone])
    return None


def _configs(
    small: nn.Module,
    model: nn.Module,
    items: Sequence[str],
    cut: _Lists,
    works: Works,
) -> tuple[str, ...]:
    # The configs become configs of the copy. A list loses the entries of removed items
    # only where a new model or the outputs need that.
    pairs = list(_lengths(model, items).values())
    same_paths, _, _ = _without(model, items, False, "nothing")

    def said() -> tuple[str, ...]:
        reasons = dict(set_configs(small, model, pairs, works, same_paths))
        return tuple(reason for reason in reasons.values() if reason)

    why = said()
    if why and not cut:
        cut = _shorten(small, model, items)
        still = said() if cut else why
        if still:
            for held, key, value in cut:
                held[key] = value
            return why
        why = still
    for held, key, value in () if why else cut:
        left = held[key]
        held[key] = value
        if not (configs_fit(small) and works(small)):
            held[key] = left
    return why
