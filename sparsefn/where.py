"""Which leaves are sparsified."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from sparsefn.calls import check_call
from sparsefn.tree import Tree, check_globs, flatten, glob_match
from sparsefn.types import Where

_DENSE = ("embedding", "norm", "lm_head", "pe_helper")


def default_where(path: str, leaf: Tensor) -> bool:
    """Whether a leaf is sparsified unless the caller says otherwise.

    >>> sf.default_where("encoder.0.weight", torch.zeros(4, 4)), sf.default_where("encoder.0.bias", torch.zeros(4))
    (True, False)
    >>> sf.default_where("LayerNorm.weight", torch.zeros(4, 4))
    False

    True for a leaf of two dimensions or more whose lower-cased path has none of `embedding`,
    `norm`, `lm_head` and `pe_helper` in it.
    """
    return leaf.ndim >= 2 and not any(word in path.lower() for word in _DENSE)


def select_leaves(params: Tree, where: Where = default_where) -> dict[str, Tensor]:
    """`{path: leaf}` of the leaves to sparsify, in optree's order.

    >>> params = {"a": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, "b": torch.zeros(3, 3)}
    >>> list(select_leaves(params))
    ['a.weight', 'b']
    >>> list(select_leaves(params, ["*.bias", "b"]))
    ['a.bias', 'b']
    >>> list(select_leaves(params, lambda path, leaf: leaf.numel() == 4))
    ['a.weight']

    `where` is a function of (path, leaf), a glob or a sequence of globs of which any may match.
    A glob matches the whole path, tells case apart, and its `*` crosses dots. A 0-d leaf is
    never selected. Warns (UserWarning) where nothing is selected. Raises ValueError for a glob
    that matches no path, and TypeError for a leaf that is not a floating-point tensor or another
    kind of `where`.
    """
    leaves = float_leaves(params)
    chosen = {path: leaf for path, leaf in matching("where", where, leaves).items() if leaf.ndim}
    if not chosen:
        known = ", ".join(map(repr, leaves)) or "none"
        warnings.warn(f"no leaf is sparsified: where selects none of the paths ({known})", UserWarning, stacklevel=3)
    return chosen


def matching(what: str, where: Where, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The leaves that a function of (path, leaf), a glob or a sequence of globs chooses.

    >>> matching("where", "*.bias", {"0.bias": torch.zeros(2), "0.weight": torch.zeros(2, 2)})
    {'0.bias': tensor([0., 0.])}

    Raises ValueError for a glob that matches no path, TypeError for another kind of `where`.
    """
    if callable(where):
        check_call(what, where, "path", "leaf")
        return {path: leaf for path, leaf in leaves.items() if where(path, leaf)}
    globs = as_globs(where)
    check_globs(what, globs, list(leaves))
    return {path: leaf for path, leaf in leaves.items() if any(glob_match(path, glob) for glob in globs)}


def float_leaves(params: Tree) -> dict[str, Tensor]:
    """`{path: leaf}` of params, all of which must be floating-point tensors.

    >>> float_leaves({"w": torch.zeros(1, dtype=torch.int64)})
    Traceback (most recent call last):
        ...
    TypeError: expected floating-point params, got torch.int64 at 'w'
    """
    leaves = flatten(params)[0]
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"expected floating-point params, got {got} at {path!r}")
    return leaves


def as_globs(where: object) -> list[str]:
    """One glob or a sequence of them as a list; TypeError for anything else.

    >>> as_globs("head.*"), as_globs(("a", "b"))
    (['head.*'], ['a', 'b'])
    """
    if isinstance(where, str):
        return [where]
    if not isinstance(where, Sequence):
        raise TypeError(f"expected where to be a function, a glob or a sequence of globs, got {type(where).__name__}")
    for glob in where:
        if not isinstance(glob, str):
            raise TypeError(f"expected where to hold globs, got {type(glob).__name__}")
    return list(where)
