"""How the arguments of operations follow entries that go: a table of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sparsefn.shrinking import indices
from sparsefn.shrinking.atoms import Flags
from sparsefn.shrinking.change import Resizing, aten
from sparsefn.shrinking.counted import (
    counted_group_norm,
    counted_layer_norm,
    counted_mean,
    counted_rms_norm,
)
from sparsefn.shrinking.norms import mean_dims

Rule = Callable[[Resizing], None]


def sized(change: Resizing) -> None:
    """Sizes of the output, as arguments."""
    out = change.outs[0]
    key = next(name for name in ("size", "shape", "sizes") if name in change.arguments)
    given = change.arguments[key]
    first = len(out.shape) - len(given)
    if change.name == "unflatten":
        first = change.values["dim"] % len(change.values["self"].shape)
    part = slice(first, first + len(given))
    infer = change.name in ("view", "reshape", "_unsafe_view")
    change.arguments[key] = change.fit(
        given, change.cut.size(out)[part], out.shape[part], infer
    )


def resize_split(change: Resizing) -> None:
    """Parts of a dimension that loses entries, which lose some each."""
    x = change.values["self"]
    dim = change.values["dim"] % len(change.values["self"].shape)
    if dim in change.lost(x):
        sizes = [change.cut.size(out)[dim] for out in change.outs]
        change.become(
            aten.split_with_sizes.default, change.arguments["self"], sizes, dim
        )


def repeat(change: Resizing) -> None:
    """How often dimensions are repeated, of which repeats may go."""
    x = change.values["self"]
    out = change.outs[0]
    key = "repeats" if "repeats" in change.arguments else "dims"
    made = list(change.arguments[key])
    for i in range(1, len(made) + 1):
        inside = x.shape[-i] if i <= len(x.shape) else 1
        made[-i] = _times(
            made[-i], change.kept(out, len(out.shape) - i).reshape(-1, inside)
        )
    change.arguments[key] = made


def repeat_interleave(change: Resizing) -> None:
    x = change.values["self"]
    out = change.outs[0]
    dim = change.values.get("dim")
    if dim is None or not isinstance(change.values.get("repeats"), int):
        change.refuse("it repeats each of them by a number of its own")
    dim = dim % len(x.shape)
    table = change.kept(out, dim).reshape(x.shape[dim], -1).T
    change.arguments["repeats"] = _times(change.arguments["repeats"], table)


def _times(times: Any, table: Flags) -> Any:
    # How many repeats stay, of a table (repeats, indices).
    rows = table.any(1)
    return times if rows.all() else int(rows.sum())


def squeeze(change: Resizing) -> None:
    """Dimensions of size 1, to which others that are left with one index do not
    belong.
    """
    x = change.values["self"]
    asked = change.values.get("dim")
    if asked is None:
        asked = range(len(x.shape))
    dims = [asked] if isinstance(asked, int) else asked
    dims = [d % max(len(x.shape), 1) for d in dims]
    after = change.cut.size(x)
    if any(after[d] == 1 != x.shape[d] for d in dims):
        change.become(
            aten.squeeze.dims,
            change.arguments["self"],
            [d for d in dims if x.shape[d] == 1],
        )


def resize_convolution(change: Resizing) -> None:
    """Groups that go as a whole, and the same entries of each group."""
    x = change.values["input"]
    w = change.values["weight"]
    if change.values["groups"] > 1:
        keep = change.kept(x, len(x.shape) - len(w.shape) + 1)
        change.count("groups", _groups(keep, change.values["groups"]))


def _groups(keep: Flags, groups: int) -> int:
    # How many groups stay.
    return int(keep.reshape(groups, -1).any(1).sum())


def channel_shuffle(change: Resizing) -> None:
    x = change.values["self"]
    groups = change.values["groups"]
    change.count("groups", _groups(change.kept(x, 1), groups))


def resize_layer_norm(change: Resizing) -> None:
    x = change.values["input"]
    some = len(change.arguments["normalized_shape"])
    dims = list(range(len(x.shape) - some, len(x.shape)))
    if set(dims) & set(change.lost(x)):
        count = change.number("input", dims)
        given = change.arguments
        tail = [
            given["weight"],
            *([given["bias"]] if "bias" in given else []),
            given["eps"],
        ]
        change.become(
            counted_layer_norm if "bias" in given else counted_rms_norm,
            given["input"],
            count,
            some,
            *tail,
        )


def resize_group_norm(change: Resizing) -> None:
    x = change.values["input"]
    groups = change.values["num_groups"]
    given = change.arguments
    keep = change.kept(x, 1)
    left = _groups(keep, groups)
    change.count("num_groups", left)
    if keep.sum() * groups != len(keep) * left:
        count = change.number("input", range(2, len(x.shape)), len(keep) // groups)
        tail = [given[name] for name in ("weight", "bias", "eps")]
        change.become(
            counted_group_norm, given["input"], given["num_groups"], count, *tail
        )


def resize_mean(change: Resizing) -> None:
    x = change.values["self"]
    given = change.arguments
    dims = mean_dims(given.get("dim"), len(x.shape))
    if set(dims) & set(change.lost(x)):
        if given["dtype"] is not None:
            change.refuse("it counts them in another dtype")
        change.become(
            counted_mean,
            given["self"],
            change.number("self", dims),
            dims,
            given.get("keepdim", False),
        )


def resize_attention(change: Resizing) -> None:
    """The width of a head is part of the scale."""
    q = change.values["query"]
    if change.arguments["scale"] is None and len(q.shape) - 1 in change.lost(q):
        change.arguments["scale"] = q.shape[-1] ** -0.5


def resize_grouped_mm(change: Resizing) -> None:
    """Products with one matrix of each expert: torch has them for widths of whole 16
    bytes.
    """
    given = change.arguments
    if (
        given["offs"] is None
        or given["bias"] is not None
        or given["out_dtype"] is not None
    ):
        change.refuse("it is of another form")
    change.become(padded_grouped_mm, given["self"], given["mat2"], given["offs"])


def padded_grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The product of rows with the matrix of their expert, of any widths.

    >>> padded_grouped_mm(
    ...     torch.ones(2, 3), torch.ones(1, 3, 5), torch.tensor([2], dtype=torch.int32)
    ... )
    tensor([[3., 3., 3., 3., 3.],
            [3., 3., 3., 3., 3.]])
    """
    inner = -w.shape[1] % 8
    outer = -w.shape[2] % 8
    x = nn.functional.pad(x, (0, inner))
    wide = nn.functional.pad(w, (0, outer, 0, inner))
    made: Tensor = aten._grouped_mm.default(x, wide, offs)[:, : w.shape[2]]
    return made


_SPLITS = (
    "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk "
    "tensor_split"
)
_SIZES = (
    "view reshape _unsafe_view expand broadcast_to unflatten full zeros ones empty "
    "rand randn"
)
_NEW = "new_zeros new_ones new_full new_empty"
# Of other operations no argument speaks of sizes or places: the proof tells where one
# does.
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_SIZES.split(), *_NEW.split()), sized),
    **dict.fromkeys(_SPLITS.split(), resize_split),
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    "squeeze": squeeze,
    **dict.fromkeys(("slice", "narrow"), indices.cut_slice),
    "select": indices.cut_select,
    "index_select": indices.cut_index_select,
    "index": indices.cut_index,
    "roll": indices.cut_roll,
    **dict.fromkeys(("slice_scatter", "select_scatter"), indices.cut_slice_scatter),
    **dict.fromkeys(("constant_pad_nd", "pad"), indices.cut_pad),
    **dict.fromkeys(
        (f"conv{turned}{n}d" for turned in ("", "_transpose") for n in (1, 2, 3)),
        resize_convolution,
    ),
    "convolution": resize_convolution,
    "channel_shuffle": channel_shuffle,
    **dict.fromkeys(("layer_norm", "rms_norm"), resize_layer_norm),
    "group_norm": resize_group_norm,
    "mean": resize_mean,
    "_grouped_mm": resize_grouped_mm,
    "scaled_dot_product_attention": resize_attention,
}
