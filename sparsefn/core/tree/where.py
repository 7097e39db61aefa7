"""Which leaves are sparsified."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn._engine.numbers import check_float
from sparsefn._engine.transforms import at_compile_time
from sparsefn.core.checks import check_call
from sparsefn.core.state import Where
from sparsefn.core.tree import (
    Leaves,
    Tree,
    check_globs,
    check_not_lazy,
    check_tree,
    flatten,
    glob_match,
)
from sparsefn.core.tree.originals import (
    Computed,
    check_weights,
    computed_by_name,
    computed_name,
    is_magnitude,
)

__all__ = ["default_where"]
__dir__ = __all__.copy

_ANYWHERE = ("embed", "norm", "lm_head", "pe_helper", "rel_pos")
_WORDS = {"emb", "wte", "wpe", "ln", "bias"}
_LAST_WORDS = {"token", "tokens", "scale", "position", "positional"}


def default_where(path: str, leaf: Tensor) -> bool:
    """Whether a leaf is sparsified by default, as the weights of layers are.

    >>> sizes = {
    ...     "wte.weight": (9, 4),
    ...     "ln.weight": (4, 4),
    ...     "fc.weight": (4, 4),
    ...     "fc.bias": (4,),
    ...     "head.weight": (9, 4),
    ... }
    >>> [
    ...     path
    ...     for path, shape in sizes.items()
    ...     if sf.default_where(path, torch.zeros(shape))
    ... ]
    ['fc.weight', 'head.weight']

    Args:
        path: Dotted path of the leaf.
        leaf: The leaf, of which only the shape is read.

    Returns:
        Whether the leaf is sparsified.

    True for a leaf of two dimensions or more, unless its lower-cased path

    - has `embed`, `norm`, `lm_head`, `rel_pos` or `pe_helper` anywhere in it,
    - has one of the words `emb`, `wte`, `wpe`, `ln` and `bias`, where words are
      separated by dots and underscores, and digits at their end are ignored,
    - has one of the words `token`, `tokens`, `scale`, `position` and `positional` after
      its last dot, as `cls_token`,
    - ends in `shared.weight`, the embedding of T5 and BART,
    - goes through `parametrizations`, as `0.parametrizations.weight.original`: a weight
      is computed from it,
    - ends in `_g`, as `weight_g`, and one dimension at most is longer than 1: the
      magnitudes of weight norm.

    So embeddings (of patches, too), positions, class tokens, norms, biases and scales
    stay dense under their usual names. A path cannot tell an output head named
    `classifier`, `score`, `fc` or `head` from an inner layer of that name: name it in
    your own `where`, or in `sf.partition`, to leave it dense. `lm_head` is most often
    the embedding itself. Algorithms also leave dense what the older
    `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` compute a weight from:
    `weight_v` beside `weight_g`, and `weight_orig`. For a module
    `sf.modules.weights_of` chooses by the types of layers.
    """
    return not why_dense(path, leaf)


def why_dense(path: str, leaf: Tensor) -> str:
    """Why `default_where` leaves a leaf dense; empty where it does not.

    >>> why_dense("0.bias", torch.zeros(2)), why_dense("wte.weight", torch.zeros(9, 4))
    ('fewer than 2 dimensions', "'wte' in its name")
    """
    if leaf.ndim < 2:
        return "fewer than 2 dimensions"
    if part := _dense_name(path):
        return f"{part!r} in its name"
    if computed := computed_name(path):
        return f"{computed!r} is computed from it"
    return "magnitudes of weight norm" if is_magnitude(path, leaf) else ""


@at_compile_time
def _dense_name(path: str) -> str:
    # The first part of a path for which the leaf stays dense; empty if there is none.
    path = path.lower()
    last = path.rpartition(".")[2]
    parts = [part for part in _ANYWHERE if part in path]
    parts += [word for word in _words_of(path) if word in _WORDS]
    parts += [word for word in _words_of(last) if word in _LAST_WORDS]
    if path.split(".")[-2:] == ["shared", "weight"]:
        parts.append("shared.weight")
    return parts[0] if parts else ""


def _words_of(path: str) -> list[str]:
    # Without the numbers at their ends.
    return [word.rstrip("0123456789") for word in re.split("[._]", path)]


def select_leaves(params: Tree, where: Where = default_where) -> dict[str, Tensor]:
    """`{path: leaf}` of the leaves to sparsify, in optree's order.

    >>> params = {
    ...     "a": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)},
    ...     "b": torch.zeros(3, 3),
    ... }
    >>> list(select_leaves(params))
    ['a.weight', 'b']
    >>> list(select_leaves(params, ["*.bias", "b"]))
    ['a.bias', 'b']
    >>> list(select_leaves(params, lambda path, leaf: leaf.numel() == 4))
    ['a.weight']

    `where` is a function of (path, leaf), a glob or a sequence of globs of which any
    may match.
    A glob matches the whole path, is case-sensitive, and its `*` crosses dots. A 0-d
    leaf is never selected. Warns (UserWarning) where nothing is selected, and where
    `default_where` leaves out a weight that a parametrization computes, though not in
    compiled code. Raises ValueError for a glob that matches no path and for a leaf that
    a weight is computed from, and TypeError for a leaf that is not a floating-point
    tensor or another kind of `where`.
    """
    leaves = float_leaves(params)
    chosen = {
        path: leaf
        for path, leaf in matching("where", where, leaves).items()
        if leaf.ndim
    }
    if where is default_where:
        chosen = {
            path: leaf
            for path, leaf in chosen.items()
            if not computed_by_name(path, leaves)
        }
    check_weights("where", chosen, leaves)
    if torch.compiler.is_compiling():
        return chosen
    if where is default_where and (dense := _computed_weights(leaves)):
        others = f" (so are {len(dense) - 1} others)" if len(dense) > 1 else ""
        quiet = "A `where` of your own leaves it dense without this warning"
        warnings.warn(f"{dense[0].dense()}{others}. {quiet}", UserWarning, stacklevel=3)
    elif not chosen:
        known = ", ".join(map(repr, leaves)) or "none"
        warnings.warn(
            f"no leaf is sparsified: where selects none of the paths ({known})",
            UserWarning,
            stacklevel=3,
        )
    return chosen


def _computed_weights(leaves: dict[str, Tensor]) -> list[Computed]:
    # The computed weights that default_where would choose if they were parameters.
    found = {}
    for path, leaf in leaves.items():
        computed = computed_by_name(path, leaves)
        if computed is not None and default_where(computed.path, leaf):
            found[computed.path] = computed
    return list(found.values())


def matching(what: str, where: Where, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The leaves that a function of (path, leaf), a glob or several globs choose.

    >>> matching(
    ...     "where", "*.bias", {"0.bias": torch.zeros(2), "0.weight": torch.zeros(2, 2)}
    ... )
    {'0.bias': tensor([0., 0.])}

    Raises ValueError for a glob that matches no path, TypeError for another kind of
    `where`.
    """
    if callable(where):
        check_call(what, where, "path", "leaf")
        return {path: leaf for path, leaf in leaves.items() if where(path, leaf)}
    globs = as_globs(where)
    check_globs(what, globs, list(leaves))
    return {path: leaf for path, leaf in leaves.items() if _fits_any(path, globs)}


def _fits_any(path: str, globs: Sequence[str]) -> bool:
    return any(glob_match(path, glob) for glob in globs)


def shares(what: str, wheres: Sequence[Where], tree: Tree, like: Tree) -> list[Leaves]:
    """The leaves of a tree, split: each goes to the first `where` that chooses it in
    `like`, the rest comes last.

    >>> tree = {"0.bias": 1, "0.weight": 2, "1.bias": 3}
    >>> shares("partition", ["1.*", "*.bias"], tree, tree)
    [{'1.bias': 3}, {'0.bias': 1}, {'0.weight': 2}]

    Raises what `matching` raises.
    """
    leaves = flatten(tree)[0]
    known = flatten(like)[0]
    left = list(leaves)
    rows = []
    for where in wheres:
        hits = matching(what, where, known)
        rows.append({path: leaves[path] for path in left if path in hits})
        left = [path for path in left if path not in hits]
    return [*rows, {path: leaves[path] for path in left}]


def from_shares(rows: Sequence[Tree], like: Tree) -> Tree:
    """The tree, of the structure of another, whose leaves were split: of dicts by path,
    and of () for no leaves.

    >>> from_shares([{"b": 1}, (), {"a": 2}], {"a": 0, "b": 0})
    {'a': 2, 'b': 1}
    """
    leaves = {path: leaf for row in rows for path, leaf in dict(row).items()}
    known, rebuild = flatten(like)
    return rebuild([leaves[path] for path in known])


def float_leaves(params: Tree) -> dict[str, Tensor]:
    """`{path: leaf}` of params, all of which must be tensors of float16, bfloat16,
    float32 or float64.

    >>> float_leaves({"w": torch.zeros(1, dtype=torch.int64)})
    Traceback (most recent call last):
        ...
    TypeError: expected floating-point params, got torch.int64 at 'w'

    Raises TypeError for a module in the place of its parameters, ValueError for
    parameters of lazy layers.
    """
    check_tree("params", params)
    leaves = flatten(params)[0]
    check_not_lazy("params", leaves.items())
    for path, leaf in leaves.items():
        try:
            check_float("params", leaf, path)
        except TypeError as error:
            raise TypeError(f"{error}{_of_buffer(path)}") from None
    return leaves


def _of_buffer(path: str) -> str:
    # The one integer that a state_dict() of most modules has.
    counts = path.endswith("num_batches_tracked")
    return (
        ", a buffer, which a state_dict() has, too; write "
        "dict(module.named_parameters())"
        if counts
        else ""
    )


def as_globs(
    globs: object,
    what: str = "where",
    kinds: str = "a function, a glob or a sequence of globs",
) -> list[str]:
    """One glob or a sequence of them as a list; TypeError for anything else.

    >>> as_globs("head.*"), as_globs(("a", "b"))
    (['head.*'], ['a', 'b'])
    """
    if isinstance(globs, str):
        return [globs]
    if not isinstance(globs, Sequence):
        raise TypeError(f"expected {what} to be {kinds}, got {type(globs).__name__}")
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(f"expected {what} to hold globs, got {type(glob).__name__}")
    return list(globs)
