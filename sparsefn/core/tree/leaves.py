"""Leaves of optree pytrees by dotted path, and trees put together again from leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn._engine.transforms import at_compile_time

Tree = Any  # any optree pytree of tensors
Leaves = dict[str, Tensor]  # some leaves by dotted path


def paths(tree: Tree) -> list[str]:
    """Dotted paths of the leaves, in optree's order.

    >>> paths({"layer": {"weight": torch.zeros(2), "bias": torch.zeros(2)}})
    ['layer.bias', 'layer.weight']
    """
    if torch.compiler.is_compiling():
        return [name for name, _ in _walk(tree)]
    return [*_paths_of(optree.tree_structure(tree))]


def none_paths(tree: Tree) -> list[str]:
    """Dotted paths of the Nones, which optree treats as containers without leaves.

    >>> none_paths({"weight": torch.zeros(2), "bias": None})
    ['bias']
    """
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    pairs = zip(_paths_of(structure), leaves, strict=True)
    return [path for path, leaf in pairs if leaf is None]


@functools.lru_cache(maxsize=256)  # an update asks again and again
def _paths_of(structure: optree.PyTreeSpec) -> tuple[str, ...]:
    paths = []
    for accessor in structure.accessors():
        paths.append(".".join(_name(entry.type, entry.entry) for entry in accessor))
    return tuple(paths)


def _name(kind: type, entry: Any) -> str:
    # optree's entry of a named tuple is the index; users write the field's name.
    fields = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return str(entry if fields is None else fields[entry])


def leaves_of(tree: Tree) -> list[Tree]:
    """The leaves, in optree's order, also in compiled code.

    >>> sf.tree.leaves_of({"b": 1, "a": [2, {}]})
    [2, 1]

    Args:
        tree: Any tree.

    Returns:
        A new list. In compiled code optree itself refuses a dict without tensors.
    """
    return opened(tree)[0]


def opened(tree: Tree) -> tuple[list[Tree], Callable[[Sequence[Tree]], Tree]]:
    """The leaves and the function that puts a sequence of leaves back in their place.

    >>> leaves, rebuild = sf.tree.opened({"b": 1, "a": [2, {}]})
    >>> rebuild([leaf + 1 for leaf in leaves])
    {'b': 2, 'a': [3, {}]}

    Args:
        tree: Any tree.

    Returns:
        A list of the leaves in optree's order, and a function that makes a tree of the
        same structure from as many values.
    """
    if torch.compiler.is_compiling():
        return [leaf for _, leaf in _walk(tree)], lambda values: _refilled(
            tree, iter(values)
        )
    leaves, treedef = optree.tree_flatten(tree)
    return leaves, treedef.unflatten


def zipped(
    tree: Tree, *others: Tree
) -> tuple[list[tuple[Tree, ...]], Callable[[Sequence[Tree]], Tree]]:
    """The leaves of some trees side by side, and the function that puts a sequence in
    the place of the first tree's.

    >>> rows, rebuild = zipped({"b": 1, "a": 2}, {"a": 20, "b": 10})
    >>> rows, rebuild([a + b for a, b in rows])
    ([(2, 20), (1, 10)], {'b': 11, 'a': 22})

    Raises ValueError for trees with another number of leaves.
    """
    leaves, rebuild = opened(tree)
    return list(zip(leaves, *map(leaves_of, others), strict=True)), rebuild


def identical(a: Tree, b: Tree) -> bool:
    """Whether two trees hold the same tensors, not only equal ones.

    >>> w = torch.ones(1)
    >>> identical({"w": w}, {"w": w}), identical({"w": w}, {"w": w.clone()})
    (True, False)
    """
    xs = leaves_of(a)
    ys = leaves_of(b)
    return len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))


def _children(
    node: Tree,
) -> tuple[Sequence[Tree], Sequence[object], Callable[[Sequence[Tree]], Tree]]:
    # The children of a container, their entries in a path, and the function that makes
    # a container like it. The compiler works out the flattening of a dict without
    # tensors beforehand, and cannot hold what optree returns. What it traces of optree
    # is checked again at every call, so that a state, which is made of tuples, is
    # opened here.
    if type(node) is dict:
        keys = optree.utils.total_order_sorted(node)
        return (
            [node[key] for key in keys],
            keys,
            lambda new: {**node, **dict(zip(keys, new, strict=True))},
        )
    if _is_plain(type(node)):
        return (
            node,
            range(len(node)),
            lambda new: tuple(new) if type(node) is tuple else type(node)(*new),
        )
    children, metadata, entries, unflatten = optree.tree_flatten_one_level(node)
    return children, entries, lambda new: unflatten(metadata, new)


@at_compile_time
def _is_plain(kind: type) -> bool:
    # Whether optree takes it for a tuple or a named tuple: classes may be registered as
    # something else.
    entry = optree.register_pytree_node.get(kind)
    return entry is not None and entry.kind in (
        optree.PyTreeKind.TUPLE,
        optree.PyTreeKind.NAMEDTUPLE,
    )


def tops(tree: Tree) -> tuple[list[str], list[str]]:
    """The names of a tree's top-level parts, and for each leaf the name of the part
    that it is in.

    >>> tops({"scores": {"w": 0}, "params": {"b": 1, "w": 2}, "rest": ()})
    (['params', 'rest', 'scores'], ['params', 'params', 'scores'])

    The only part of a bare leaf is "".
    """
    if optree.tree_is_leaf(tree):
        return [""], [""]
    children, entries, _ = _children(tree)
    names = [_name(type(tree), entry) for entry in entries]
    return names, [
        name
        for name, child in zip(names, children, strict=True)
        for _ in leaves_of(child)
    ]


def _walk(node: Tree, path: tuple[str, ...] = ()) -> list[tuple[str, Tree]]:
    # (dotted path, leaf) of every leaf: optree's own, for compiled code. Most children
    # are tensors, and a call for each of them would double the time of a trace.
    if _is_leaf(node):
        return [(".".join(path), node)]
    found: list[tuple[str, Tree]] = []
    children, entries, _ = _children(node)
    for child, entry in zip(children, entries, strict=True):
        here = (*path, _name(type(node), entry))
        found += (
            [(".".join(here), child)]
            if isinstance(child, Tensor)
            else _walk(child, here)
        )
    return found


def _refilled(node: Tree, values: Iterator[Tree]) -> Tree:
    if _is_leaf(node):
        return next(values)
    children, _, rebuild = _children(node)
    return rebuild(
        [
            next(values) if isinstance(child, Tensor) else _refilled(child, values)
            for child in children
        ]
    )


def _is_leaf(node: Tree) -> bool:
    # What optree says. Its registry is asked last: the compiler traces that.
    if isinstance(node, Tensor):
        return True
    return (
        type(node) is not dict
        and not _is_plain(type(node))
        and optree.tree_is_leaf(node)
    )


def flatten(tree: Tree) -> tuple[dict[str, Tensor], Callable[[Sequence[Tree]], Tree]]:
    """`{path: leaf}`, and the function that puts a sequence of leaves back.

    >>> leaves, rebuild = sf.tree.flatten([torch.zeros(1), (torch.ones(2),)])
    >>> list(leaves)
    ['0', '1.0']
    >>> rebuild([1, 2])
    [1, (2,)]

    Args:
        tree: Any tree.

    Returns:
        A dict of the leaves by dotted path, in optree's order, and a function that
        makes a tree of the same structure from as many values.

    Raises:
        ValueError: Two leaves share a dotted path.
    """
    if torch.compiler.is_compiling():  # one walk, as each is traced
        rows = _walk(tree)

        def refill(values: Sequence[Tree]) -> Tree:
            return _refilled(tree, iter(values))

        rebuild: Callable[[Sequence[Tree]], Tree] = refill

    else:
        leaves, structure = optree.tree_flatten(tree)
        rows = list(zip(_paths_of(structure), leaves, strict=True))
        rebuild = structure.unflatten
    named: dict[str, Tensor] = dict(rows)
    if len(named) < len(rows):
        names = [name for name, _ in rows]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"expected one leaf a path, but two leaves are at {twice!r}; rename one"
        )
    return named, rebuild


def leaves_at(tree: Tree, paths: Iterable[str]) -> dict[str, Tensor]:
    """The leaves at some paths of a tree.

    >>> leaves_at({"a": torch.zeros(1), "b": torch.ones(1)}, ["b"])
    {'b': tensor([1.])}
    """
    leaves = flatten(tree)[0]
    return {path: leaves[path] for path in paths}


def with_leaves(tree: Tree, leaves: Mapping[str, Tree]) -> Tree:
    """The tree with other leaves at some paths.

    >>> with_leaves({"a": 1, "b": 2}, {"b": 3})
    {'a': 1, 'b': 3}
    """
    if not leaves:
        return tree
    old, rebuild = flatten(tree)
    return rebuild([*{**old, **leaves}.values()])
