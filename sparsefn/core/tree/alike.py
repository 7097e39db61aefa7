"""Trees beside each other: whether they have one structure, and where they differ."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

import optree
import torch
from torch import Tensor

from sparsefn._engine.processes import is_spread, words_of
from sparsefn.core.tree.leaves import Tree, flatten, leaves_of, none_paths, paths
from sparsefn.core.tree.mends import no_tree


def same_structure(tree: Tree, like: Tree) -> bool:
    """Whether two trees have the same structure.

    The order in which dicts were filled does not matter.

    >>> same_structure({"a": 0, "b": 0}, {"b": 1, "a": 1})
    True
    """
    # a traced treedef remembers the insertion order of dicts
    if torch.compiler.is_compiling():
        return paths(tree) == paths(like)
    return optree.tree_structure(tree) == optree.tree_structure(like)


def leaves_like(tree: Tree, like: Tree) -> list[Tree]:
    """Leaves of `tree` in the order of `like`, whose structure it must have.

    >>> leaves_like({"b": 1, "a": 2}, {"a": 0, "b": 0})
    [2, 1]
    """
    both = _leaves_of_both(tree, like)
    if both is None:
        raise ValueError(structure_error("tree", tree, like, "the other"))
    return both[0]


def _leaves_of_both(tree: Tree, like: Tree) -> tuple[list[Tree], list[Tree]] | None:
    # None for two structures.
    if torch.compiler.is_compiling():
        if not same_structure(tree, like):
            return None
        return leaves_of(tree), leaves_of(like)
    leaves, structure = optree.tree_flatten(tree)
    wanted, known = optree.tree_flatten(like)
    return (leaves, wanted) if structure == known else None


def structure_error(what: str, tree: Tree, like: Tree, model: str = "params") -> str:
    """One sentence that says where `tree` differs from the structure of `like`.

    >>> structure_error("grads", {"a": 0}, {"a": 0, "b": 0})
    "expected grads with the structure of params, but there is no leaf at 'b' in grads"
    >>> print(
    ...     structure_error("grads", {"a": 0, "bais": 0}, {"a": 0, "bias": 0}).split(
    ...         ", but "
    ...     )[1]
    ... )
    there is no leaf at 'bias' in grads; perhaps it is the one at 'bais', which params
    lack

    It names a leaf and the side that lacks it, and counts the other such leaves.
    """
    if error := no_tree(what, tree) or no_tree(model, like):
        return error
    got = paths(tree)
    want = paths(like)
    missing = [path for path in want if path not in got]
    unknown = [path for path in got if path not in want]
    head = f"expected {what} with the structure of {model}, but "
    if missing:
        text = f"{head}there is no leaf at {missing[0]!r} in {what}{_others(missing)}"
        return (
            text + _why(tree, missing[0], unknown, model) + _without_names(tree, like)
        )
    if unknown:
        return (
            f"{head}there is an unknown leaf at {unknown[0]!r} in "
            f"{what}{_others(unknown)}, which {model} lack"
        )
    return f"{head}the containers differ{_kinds(tree, like, what, model)}"


def _others(found: Sequence[str]) -> str:
    return f" (and at {len(found) - 1} more)" if len(found) > 1 else ""


def _kinds(tree: Tree, like: Tree, what: str, model: str) -> str:
    if torch.compiler.is_compiling():
        return ""
    if type(tree) is not type(like):  # such as a state_dict(), which is an OrderedDict
        kinds = (
            f"{what} are of type {type(tree).__name__} and {model} of type "
            f"{type(like).__name__}"
        )
        return (
            f": {kinds}; write dict(...) around both"
            if isinstance(tree, dict)
            else f": {kinds}"
        )
    return f": {optree.tree_structure(tree)} is not {optree.tree_structure(like)}"


def _without_names(tree: Tree, like: Tree) -> str:
    # torch.autograd.grad returns a tuple.
    if (
        type(tree) in (list, tuple)
        and isinstance(like, dict)
        and len(tree) == len(like)
    ):
        return (
            ": a sequence has no names; write dict(zip(params, ...)) where the order "
            "is theirs"
        )
    return ""


def _why(tree: Tree, path: str, unknown: Sequence[str], model: str) -> str:
    # What stands in the place of a missing leaf: None, or a leaf of nearly that name.
    if torch.compiler.is_compiling():
        return ""
    if path in none_paths(tree):
        return ", but None"
    close = difflib.get_close_matches(path, unknown, 1, cutoff=0.75)
    if close:
        return f"; perhaps it is the one at {close[0]!r}, which {model} lack"
    return f"; {model} lack the one at {unknown[0]!r}" if unknown else ""


def check_like(
    what: str, tree: Tree, *likes: Tree, dtype: bool = True, layout: bool = True
) -> None:
    """Raise unless `tree` has the structure, shapes and (on demand) dtypes and
    placements of each of `likes`.

    >>> check_like("grads", {"w": torch.zeros(2)}, {"w": torch.zeros(3)})
    Traceback (most recent call last):
        ...
    ValueError: expected grads of shape (3,) at 'w', got (2,)
    """
    for like in likes:
        _check_like(what, tree, like, dtype, layout)


def _check_like(what: str, tree: Tree, like: Tree, dtype: bool, layout: bool) -> None:
    both = _leaves_of_both(tree, like)
    if both is None:
        raise ValueError(structure_error(what, tree, like))
    for i, (leaf, want) in enumerate(zip(*both, strict=True)):
        plain = type(want) is Tensor and type(leaf) is Tensor
        if not plain and not isinstance(leaf, Tensor):
            raise TypeError(
                f"expected {what} to be tensors, got {type(leaf).__name__} at "
                f"{paths(like)[i]!r}"
            )
        if leaf.shape != want.shape:
            at = paths(like)[i]
            raise ValueError(
                f"expected {what} of shape {tuple(want.shape)} at {at!r}, got "
                f"{tuple(leaf.shape)}"
            )
        if (
            not plain
            and (layout or not is_spread(leaf, want))
            and words_of(leaf) != words_of(want)
        ):
            at = paths(like)[i]
            raise ValueError(
                f"expected {what} to be {words_of(want)} at {at!r}, got one that is "
                f"{words_of(leaf)}"
            )
        if dtype and leaf.dtype != want.dtype:
            raise TypeError(
                f"expected {what} of dtype {want.dtype} at {paths(like)[i]!r}, got "
                f"{leaf.dtype}"
            )


def check_grads(grads: Tree, params: Tree, *, layout: bool = True) -> None:
    """Raise for gradients that do not fit the params.

    Without `layout`, DTensors may be laid out otherwise.
    """
    if grads is None:
        return
    try:
        check_like("grads", grads, params, layout=layout)
    except ValueError:
        for path in () if same_structure(grads, params) else none_paths(grads):
            raise ValueError(
                f"expected a gradient for every param, got None at {path!r}: a frozen "
                "param, or one that the loss does not use, has none; give zeros, or "
                "leave it out of params"
            ) from None
        raise


def map_with_path(fn: Callable[..., Tree], tree: Tree, *rest: Tree) -> Tree:
    """`optree.tree_map` whose function gets the dotted path first.

    >>> sf.tree.map_with_path(lambda path, leaf: path, {"a": [0, 1]})
    {'a': ['a.0', 'a.1']}

    Args:
        fn: Function of (path, leaf, ...): a leaf of `tree`, and one of each tree of
            `rest`.
        tree: Tree whose structure the result has.
        *rest: Trees of the structure of `tree`.

    Returns:
        A tree of what `fn` returns.

    Raises:
        ValueError: A tree of `rest` has another structure, or two leaves share a dotted
            path.
    """
    leaves, rebuild = flatten(tree)
    others = [leaves_like(other, tree) for other in rest]
    return rebuild(
        [fn(*row) for row in zip(leaves, leaves.values(), *others, strict=True)]
    )
