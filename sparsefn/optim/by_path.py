"""Several optimizers for one tree: by the paths of leaves, or by top-level parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparsefn.core.checks import check_pairs, described, listed, shown
from sparsefn.core.state import Where
from sparsefn.core.tree import Leaves, Tree, check_like, flatten, tops
from sparsefn.core.tree.where import from_shares, shares
from sparsefn.optim.base import Optimizer

# tree, a tree like it whose leaves are chosen from -> the leaves of each optimizer by
# path, in order
Split = Callable[[Tree, Tree], list[Leaves]]


@described
def by_path(rules: Sequence[tuple[Where, Optimizer]]) -> Optimizer:
    """Different optimizers for different leaves of the trained tree.

    >>> optimizer = sf.optimizers.by_path(
    ...     [("*.bias", sf.optimizers.sgd(1.0)), ("*", sf.optimizers.sgd(0.5))]
    ... )
    >>> params = {"0.bias": torch.ones(1), "0.weight": torch.ones(1)}
    >>> optimizer.update(params, optimizer.init(params))[0]
    {'0.bias': tensor([-1.]), '0.weight': tensor([-0.5000])}

    Args:
        rules: Pairs of a `where` as in `partition` (a glob, a sequence of globs or a
            function of (path, leaf)) and an optimizer: one of this module, or
            `Optimizer(init, update)` of another library's pair. The first match wins.

    Returns:
        The optimizer. Each of its optimizers sees its leaves as a flat dict by path and
        has a count of its own; the state is the tuple of their states.

    Raises:
        TypeError: A rule is not a pair of a `where` and an optimizer.
        ValueError: There is no rule; in `init` and in every update, no rule matches a
            leaf, a glob matches no path, or all leaves of a rule go to earlier rules.

    A function may go by the path and the number of dimensions, as for no weight decay
    on biases and norms, but not by sizes: `with_optimizer` looks for moments with
    leaves of other sizes.
    """
    pairs = list(rules)
    if not pairs:
        raise ValueError(
            "by_path: expected at least one (where, optimizer) pair, got none"
        )
    check_pairs("by_path", pairs)
    for i, (_, optimizer) in enumerate(pairs):
        _check_optimizer("by_path", f"at position {i}", optimizer)
    wheres = [where for where, _ in pairs]

    def split(tree: Tree, like: Tree) -> list[Leaves]:
        *rows, rest = shares("by_path", wheres, tree, like)
        if rest:
            left = ", ".join(map(repr, rest))
            raise ValueError(
                f"by_path: no rule matches {left}; add ('*', an optimizer) as the last"
            )
        for i, row in enumerate(rows):
            if not row:
                raise ValueError(
                    f"by_path: no leaf is left for rule {i}, {shown(wheres[i])}"
                )
        return rows

    return _split(split, [optimizer for _, optimizer in pairs])


@described
def parts(optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """One optimizer for each top-level part of the trained tree.

    >>> movement = sf.supermask(0.5, mode="joint", init="zeros")
    >>> optimizer = sf.optimizers.parts(
    ...     {"params": sf.optimizers.adamw(1e-3), "scores": sf.optimizers.sgd(0.1)}
    ... )
    >>> state = sf.with_optimizer(movement, optimizer).init({"w": torch.ones(1, 2)})
    >>> state.opt["scores"]
    SgdState(count=tensor(0), momentum=())

    Args:
        optimizers: Optimizers by part, for algorithms that train more than params:
            `supermask(mode="joint")` trains "params" and "scores", `reparametrised`
            "latent" and "rest". A part without leaves may be left out.

    Returns:
        The optimizer, whose state is a dict by part. It is `by_path` with a name in
        place of a glob.

    Raises:
        TypeError: `optimizers` is not a dict of optimizers.
        ValueError: `optimizers` is empty; in `init` and in every update, a part is
            unknown, or has no optimizer.
    """
    if not isinstance(optimizers, Mapping):
        raise TypeError(
            "parts: expected a dict of optimizers by part, got "
            f"{type(optimizers).__name__}"
        )
    if not optimizers:
        raise ValueError(
            "parts: expected at least one part with its optimizer, got none"
        )
    for name, optimizer in optimizers.items():
        _check_optimizer("parts", f"for {name!r}", optimizer)
    names = list(optimizers)

    def split(tree: Tree, like: Tree) -> list[Leaves]:
        known, owners = tops(like)
        if not set(owners) <= set(names) <= set(known):
            raise ValueError(
                "parts: expected one optimizer for each of the parts "
                f"{listed(known) or 'none'} of the trained tree, got optimizers for "
                f"{listed(names)}"
            )
        leaves: dict[str, Leaves] = {name: {} for name in names}
        for owner, (path, leaf) in zip(owners, flatten(tree)[0].items(), strict=True):
            leaves[owner][path] = leaf
        return list(leaves.values())

    return _split(split, optimizers)


def _check_optimizer(call: str, place: str, optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        got = type(optimizer).__name__
        raise TypeError(
            f"{call}: expected an optimizer such as sf.optimizers.sgd(0.1), got {got} "
            f"{place}; a pair init, update of another library is "
            "sf.optimizers.Optimizer(init, update)"
        )


def _split(
    split: Split, optimizers: Mapping[str, Optimizer] | Sequence[Optimizer]
) -> Optimizer:
    named = isinstance(optimizers, Mapping)
    keys: list[Any] = list(optimizers) if named else list(range(len(optimizers)))
    each: list[Optimizer] = [optimizers[key] for key in keys]

    def packed(states: Sequence[Tree]) -> Tree:
        return dict(zip(keys, states, strict=True)) if named else tuple(states)

    def share(tree: Tree, like: Tree) -> list[Tree]:
        # An empty share is (), as in a state: compiled code cannot flatten an empty
        # dict inside another.
        return [row or () for row in split(tree, like)]

    def init(params: Tree) -> Tree:
        rows = zip(each, share(params, params), strict=True)
        return packed([optimizer.init(row) for optimizer, row in rows])

    def update(
        grads: Tree, state: Tree, *, params: Tree = None, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        like = grads
        given: list[Tree] = [None] * len(keys)
        if params is not None:
            check_like("grads", grads, params)
            like = params
            given = share(params, params)
        rows = zip(each, keys, share(grads, like), given, strict=True)
        stepped = [
            optimizer.update(g, state[key], params=p, inplace=inplace)
            for optimizer, key, g, p in rows
        ]
        updates, new = zip(*stepped, strict=True)
        return from_shares(updates, grads), packed(new)

    def under_masks(
        grads: Tree, state: Tree, params: Tree, masks: Tree, clear: bool = False
    ) -> tuple[Tree, Tree]:
        check_like("grads", grads, params)
        shared = [share(tree, params) for tree in (grads, params, masks)]
        stepped = []
        for optimizer, key, g, p, m in zip(each, keys, *shared, strict=True):
            assert optimizer.under_masks is not None
            stepped.append(optimizer.under_masks(g, state[key], p, m, clear))
        moved, new = zip(*stepped, strict=True)
        return from_shares(moved, params), packed(new)

    whole = all(optimizer.under_masks is not None for optimizer in each)
    return Optimizer(init, update, under_masks if whole else None)
