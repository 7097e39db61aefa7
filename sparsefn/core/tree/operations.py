"""Operations on the leaves of trees: copies, selections, globs of their paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence

import optree
import torch
from torch import Tensor

from sparsefn._engine.leaves import brought
from sparsefn._engine.processes import agreed, any_sharded, full_tensors
from sparsefn._engine.transforms import at_compile_time, host_number
from sparsefn.core.tree.leaves import Tree, flatten, leaves_of


def copied(tree: Tree) -> Tree:
    """Contiguous copies of the leaves, for a new state; nn.Parameters are detached.

    >>> params = {"w": torch.ones(2)}
    >>> state = sf.State(sf.tree.copied(params), {"w": torch.tensor(True)})
    >>> params["w"].zero_(), state.params["w"]
    (tensor([0., 0.]), tensor([1., 1.]))

    Args:
        tree: Tree of tensors.

    Returns:
        A tree of tensors that share no memory with `tree`.
    """

    def copy(leaf: Tensor) -> Tensor:
        own = leaf.detach() if isinstance(leaf, torch.nn.Parameter) else leaf
        return own.clone(memory_format=torch.contiguous_format)

    return optree.tree_map(copy, tree)


def fix_sizes(tree: Tree) -> None:
    """Let compiled code know every size of the leaves as a number.

    It does nothing elsewhere.

    >>> fix_sizes({"w": torch.zeros(2)})

    Counts are exact integers of sizes, worked out with Python numbers, so a graph
    serves one model: a model of other shapes gets another graph.
    """
    if torch.compiler.is_compiling():
        for leaf in leaves_of(tree):
            for size in leaf.shape:
                range(size)  # the compiler must know its value


@at_compile_time
def glob_match(path: str, glob: str) -> bool:
    """Whether the whole dotted path matches the shell-style glob (`*` crosses dots).

    >>> glob_match("encoder.0.weight", "*.weight")
    True
    """
    return fnmatch.fnmatchcase(path, glob)


def first_match(path: str, globs: Iterable[str]) -> str | None:
    """The first glob that matches a path.

    >>> first_match("0.weight", ["1.*", "0.*", "*"])
    '0.*'
    """
    return next((glob for glob in globs if glob_match(path, glob)), None)


def check_globs(what: str, globs: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError for a glob that matches none of the paths.

    >>> check_globs("where", ["*.wieght"], ["0.weight", "0.bias"])
    Traceback (most recent call last):
        ...
    ValueError: where: no path matches '*.wieght'; the paths are '0.weight', '0.bias'
    """
    lost = []
    for glob in globs:
        if not any(glob_match(name, glob) for name in names):
            lost.append(repr(glob))
    if lost:
        known = ", ".join(map(repr, names))
        raise ValueError(
            f"{what}: no path matches {', nor '.join(lost)}; the paths are {known}"
        )


def wide(leaf: Tensor) -> Tensor:
    """The leaf in float32, or unchanged if its dtype is as wide.

    >>> wide(torch.ones((), dtype=torch.bfloat16)).dtype
    torch.float32

    Torch rounds a Python number to 16 bits in a product with a 0-d half-precision
    tensor, and not in a product with a larger one; compiled code keeps such products in
    float32. In float32 all of them agree.
    """
    return leaf.to(torch.promote_types(leaf.dtype, torch.float32))


def choose(pred: bool | Tensor, new: Callable[[Tree], Tree], old: Tree) -> Tree:
    """`new(old)` if `pred` holds, else `old`.

    >>> sf.tree.choose(False, lambda tree: 1 / 0, {"a": 1})
    {'a': 1}

    Args:
        pred: A bool, or a 0-d bool tensor.
        new: Function of `old` that returns a tree of its structure.
        old: Tree of tensors.

    Returns:
        One of the two trees. It is an `if` where the value of `pred` is known in
        Python, else a `torch.where` of each leaf.
    """
    holds = host_number(pred) if isinstance(pred, Tensor) else pred
    if isinstance(pred, Tensor) and holds is None:
        return where_leaves(pred, new(old), old)
    return new(old) if holds else old


def where_leaves(pred: Tensor, new: Tree, old: Tree) -> Tree:
    """Leafwise `torch.where`; a leaf that is the same object in both trees is passed
    on, and other CPU leaves go to the device of `pred`.

    >>> where_leaves(torch.tensor(True), {"a": torch.tensor(1)}, {"a": torch.tensor(2)})
    {'a': tensor(1)}
    """

    # a key or a count on the CPU depends on the device from now on
    def there(x: Tensor) -> Tensor:
        return brought(x, pred.device) if x.device.type == "cpu" else x

    return optree.tree_map(
        lambda a, b: a if a is b else torch.where(pred, there(a), there(b)), new, old
    )


def all_finite(tree: Tree) -> Tensor:
    """Whether no leaf of a tree of floats has a NaN or an infinity: 0-d bool.

    >>> sf.tree.all_finite(
    ...     {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor(torch.inf)}
    ... )
    tensor(False)
    """
    leaves = leaves_of(tree)
    if any_sharded(leaves):  # in one message for any number of leaves
        odd = [(~leaf.detach().isfinite()).sum() for leaf in leaves]
        counts = agreed(
            {"call": "all_finite"},
            {"leaves": flatten(tree)[0]},
            lambda: full_tensors(odd),
        )
        return torch.stack([count.to(counts[0].device) for count in counts]).sum() == 0
    ends = [
        end for leaf in leaves if leaf.numel() for end in torch.aminmax(leaf.detach())
    ]  # NaN is both
    return (
        torch.stack(
            [end.to(ends[0].device) for end in ends] or [torch.zeros((), device="cpu")]
        )
        .isfinite()
        .all()
    )
