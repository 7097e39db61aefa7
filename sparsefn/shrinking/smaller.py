"""Physically smaller modules: without channels that hold a constant, which biases take in, and pruned tied units."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsefn.modules.params import bake
from sparsefn.modules.weights import CONVOLUTIONS, TRANSPOSED, is_conv1d
from sparsefn.patterns.kinds import Pattern
from sparsefn.shrinking.channels import Channels, Plan
from sparsefn.shrinking.example import Example, as_call, check_example
from sparsefn.shrinking.follow import follow, trace
from sparsefn.shrinking.layers import GATES, LAYERS
from sparsefn.shrinking.sets import cut_sets
from sparsefn.state import State, check_masks
from sparsefn.tree import Tree, check_globs, flatten, glob_match

_CONV1D = "a Conv1D is not followed, so cut its units as a tied set, only=sf.tied(...)"


def shrink(
    module: nn.Module,
    state: State,
    *,
    only: str | Pattern | Sequence[str | Pattern] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    example: Example | None = None,
) -> nn.Module:
    """A copy of the module with smaller layers and the outputs of the masked one.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> state = sf.static(0.5, where="0.weight", pattern=sf.patterns.channel(0)).init(sf.modules.params_of(net))
    >>> small, x = sf.shrink(net, state), torch.ones(1, 3)
    >>> small
    Sequential(
      (0): Linear(in_features=3, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=2, bias=True)
    )
    >>> torch.allclose(small(x), sf.modules.call(net, state, x), atol=1e-6)
    True

    A channel is removed when no layer that reads it needs it: its value is one constant, which is folded into their
    biases, or they keep no weight on it. An output is constant when its row of the mask keeps no weight on inputs
    that vary; kept weights that happen to be 0 count as weights. Constants are followed through activations, pooling,
    batch norm, sums, products and concatenations. Channels that are combined are removed together or not at all. A
    channel is not removed where a layer without a bias, or a convolution that pads with zeros, reads a constant other
    than 0: no parameter is added, and the border would differ. So prune biases along with the rows
    (`sf.prune_biases`), and the norm in between. Nor is it removed where an operation not handled here reads it: a
    layer norm, an attention, a view of fixed sizes. A hidden unit of an LSTM, GRU or RNN (one layer, one direction, no
    initial state given) is removed when it is always 0: its candidate gate, the cell's in an LSTM, keeps no weight and
    no bias. The module's outputs keep their shape, and every layer keeps at least one channel. Names in `state_dict`
    stay; pruned weights that cannot be removed are 0.

    A UserWarning names each layer that keeps a pruned row, and says why. `buffers` are those of the copy, by name
    (the batch norm's of `sf.modules.call_with_buffers`), the module's own by default.

    With `only`, parts of the module get smaller inside, and `torch.fx` need not follow the whole of it. It holds globs
    of submodules, such as "model.layers.*.mlp", each of which is followed by itself, and tied sets, whose units are
    cut out of all their members without following anything. A unit is cut if the members that read it, by a dimension
    of their inputs, keep no weight on it. Members are weights and biases of `nn.Linear` and of the `Conv1D` of
    transformers; a bias that is no member is cut along with its weight. A tied set says that nothing else reads its
    units, and that the code between the members takes sizes from tensors, as the attentions of transformers do
    (`split_size` of GPT-2's is set). A config keeps the old sizes. No dimension of a leaf may be in two sets. Where
    nothing at all is removed, a UserWarning says what is at the given paths.

    >>> widths = sf.tied([["0.weight", 0], ["2.weight", 1]])
    >>> state = sf.static(0.5, pattern=widths).init(sf.modules.params_of(net))
    >>> [tuple(p.shape) for p in sf.shrink(net, state, only=widths).parameters()]
    [(2, 3), (2,), (2, 2), (2,)]

    `example` is what the module is called with: a tensor, a tuple of arguments or a dict of keyword arguments. On it
    the smaller module is compared with the masked one, in eval mode and without gradients, and a difference beyond
    rounding is a ValueError that says how large it is: more than ten times what a change of all weights by the
    precision of their dtype makes. That is 0.0003 % in float32 and 20 % in bfloat16, so compare in float32 or float64.
    Tied sets whose units are blocks of rows, such as heads, need an example: an attention that keeps the number of its
    heads in an attribute takes the rest for heads of another width, and gives other outputs without an error. So take
    inputs as the model will see them, of several positions.

    >>> sf.shrink(net, state, only=widths, example=x)[0]
    Linear(in_features=3, out_features=2, bias=True)

    `torch.fx` traces the forward, with its optional arguments at their defaults, for batched inputs: images (N, C, H,
    W), features of a batch norm (N, C). Raises TypeError for anything but a State, and ValueError for a module that
    `torch.fx` cannot follow, for batch norm or dropout in train mode, for a forward that computes with the sizes of
    its layers, and as `sf.modules.bake` does. With `only`, TypeError for anything but globs and tied sets, ValueError
    for a glob or member that matches nothing, for parts that share a parameter with others, for members of other
    layers, for a tied set without a member that makes its units or without one that reads them, and for one of blocks
    without an example. With `example`, TypeError for anything but the above, ValueError for outputs that differ.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"expected a State, got {type(state).__name__}; of zeros in params make one by "
            "sf.State(params, sf.masks.from_zeros(params))"
        )
    chosen = _parts(only, example)
    small, masks = bake(module, state, buffers=buffers), dict(flatten(state.masks)[0])
    size = _size(small)
    notes = cut_sets(small, masks, [one for one in chosen if isinstance(one, Pattern)])
    paths = [""] if only is None else matched(small, [one for one in chosen if isinstance(one, str)])
    for path in paths:
        notes += _followed(small.get_submodule(path), path + "." if path else "", masks)
    if notes:
        warnings.warn("shrink could not remove all that is pruned:\n  " + "\n  ".join(notes), stacklevel=2)
    elif chosen and _size(small) == size:
        notes = [f"no unit of {one} is pruned" for one in chosen if isinstance(one, Pattern)]
        notes += _nothing(small, masks, paths)
        warnings.warn("shrink removed nothing:\n  " + "\n  ".join(notes), stacklevel=2)
    if example is not None:
        check_example(lambda: bake(module, state, buffers=buffers), small, example)
    return small


def _parts(only: str | Pattern | Sequence[str | Pattern] | None, example: Example | None) -> list[str | Pattern]:
    # The parts in only=, checked.
    if example is not None:
        as_call(example)
    given = [only] if isinstance(only, str | Pattern) else () if only is None else only
    chosen = list(given) if isinstance(given, Sequence) else [given]
    for one in chosen:
        if not (isinstance(one, str) or (isinstance(one, Pattern) and one.members)):
            raise TypeError(f"expected only to be globs of submodules, or tied sets such as sf.tied(...), got {one!r}")
        blocks = isinstance(one, Pattern) and any(m[2:] != (1, 1) for family in one.members for m in family)
        if blocks and example is None:
            raise ValueError(
                f"shrink: expected example= for {one}, whose units are blocks of rows, such as heads: code that keeps "
                "their number in an attribute gives other outputs without an error. Pass what the module is called "
                "with (a tensor, a tuple of arguments or a dict of keyword arguments), and the outputs are compared"
            )
    return chosen


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _nothing(small: nn.Module, masks: Mapping[str, Tensor], paths: Sequence[str]) -> list[str]:
    # Why nothing is removed from the modules at these paths.
    lines = []
    for path in paths:
        sparse = [name for name, mask in masks.items() if name.startswith(f"{path}.") and mask.ndim]
        names = f"{', '.join(map(repr, sparse[:3]))}{', ...' if sparse[3:] else ''}"
        why = f"the masks of {names} prune no whole output of a layer" if sparse else "no leaf in it has a mask"
        lines.append(f"{path!r} ({type(small.get_submodule(path)).__name__}) stays as it is: {why}")
    return lines


def matched(module: nn.Module, globs: Sequence[str]) -> list[str]:
    """The paths of the submodules that globs match, none of which is inside another.

    >>> net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.ReLU())
    >>> matched(net, ["0*", "1"])
    ['0', '1']

    Raises ValueError for a glob that matches none, and for a submodule that shares a parameter with the rest.
    """
    names = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    check_globs("only", globs, names)
    found: list[str] = []
    for path in names:  # a module comes before what is in it
        if any(glob_match(path, glob) for glob in globs) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    for path in found:
        inside = {id(param) for param in module.get_submodule(path).parameters()}
        for name, param in module.named_parameters(remove_duplicate=False):
            if id(param) in inside and not name.startswith(f"{path}."):
                raise ValueError(f"shrink: expected {path!r} to have its parameters alone, but it shares {name!r}")
    return found


def _followed(small: nn.Module, prefix: str, masks: Mapping[str, Tensor]) -> list[str]:
    # Shrinks a module in place; the pruned channels of its layers that stay, and why.
    own = {name.removeprefix(prefix): mask for name, mask in masks.items() if name.startswith(prefix)}
    if fx.Tracer().is_leaf_module(small, "") or "forward" in vars(small):
        return _left(small, prefix, own, Plan(refused={"": "they are outputs of the module"}))
    root, graph = trace(small)
    plan = follow(root, graph, own)
    removed = plan.removed()
    left = _left(small, prefix, own, plan)
    for path, (inputs, outputs) in plan.sizes.items():
        layer = small.get_submodule(path)
        LAYERS[type(layer)].cut(layer, inputs, outputs, removed)
    if removed.any():
        _check_same((root, graph), trace(small))
    return left


def prune_biases(module: nn.Module, masks: Tree) -> Tree:
    """The masks with each bias pruned whose output channel keeps no weight.

    >>> layer = torch.nn.Linear(2, 2)
    >>> rows = {"weight": torch.tensor([[True, False], [False, False]]), "bias": torch.tensor(True)}
    >>> sf.prune_biases(layer, rows)["bias"]
    tensor([ True, False])

    A bias is a parameter beside one of the same name with `weight` for `bias`. The module says which weights
    make an output: a row of the weight (an index of its first dimension), but a column in transformers' Conv1D, and
    the output channel of a transposed convolution, in its group. A bias whose length is not the number of outputs
    stays as it is. Entries of a bias that are pruned already stay pruned. Raises TypeError for a mask that is not
    bool and ValueError for one that belongs to no parameter of the module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected the module whose masks these are, got {type(module).__name__}")
    check_masks(masks, masks)
    named, rebuild = flatten(masks)
    params = dict(module.named_parameters(remove_duplicate=False))

    def mask_of(path: str, mask: Tensor) -> Tensor:
        if path not in params:
            raise ValueError(f"expected masks of parameters of the {type(module).__name__}, but {path!r} is none")
        head, dot, name = path.rpartition(".")
        weight = named.get(head + dot + name.replace("bias", "weight"), mask)
        if "bias" not in name or not weight.ndim:
            return mask
        kept = _kept_outputs(module.get_submodule(head), weight)
        return mask & kept if kept.shape == params[path].shape else mask

    return rebuild([mask_of(path, mask) for path, mask in named.items()])


def _kept_outputs(layer: nn.Module, mask: Tensor) -> Tensor:
    # Which outputs keep a weight.
    if isinstance(layer, TRANSPOSED):  # (inputs, outputs of a group, ...), the groups one after another
        grouped = mask.reshape(layer.groups, -1, *mask.shape[1:])
        return grouped.flatten(3).any(3).any(1).flatten()
    return mask.any(0) if type(layer).__name__ == "Conv1D" else mask[..., None].flatten(1).any(1)


def _left(small: nn.Module, prefix: str, masks: Mapping[str, Tensor], plan: Plan) -> list[str]:
    # Before anything is cut: which pruned channels of each layer stay, and why.
    lines = []
    for path, layer in small.named_modules():
        pruned = _pruned(path, layer, masks)
        if pruned is not None and pruned.any():
            inside = plan.sizes.get(path, (None, None))[1]
            unseen = _CONV1D if is_conv1d(layer) else "the layer is not called on its own"
            whole = plan.refused.get(path, unseen)
            every = plan.reasons(inside.ids) if isinstance(inside, Channels) else [whole] * len(pruned)
            reasons = Counter(why for why, gone in zip(every, pruned.tolist(), strict=True) if gone and why)
            of, name = f"of {int(pruned.sum())} pruned channels", f"{prefix}{path}" if path else prefix[:-1]
            lines += [f"{name!r} keeps {n} {of}: {why}" for why, n in reasons.items()]
    return lines


def _pruned(path: str, layer: nn.Module, masks: Mapping[str, Tensor]) -> Tensor | None:
    # Which output channels keep no weight; None for a layer without output channels, such as an embedding.
    known = isinstance(layer, (nn.Linear, nn.Bilinear, *CONVOLUTIONS)) or type(layer).__name__ == "Conv1D"
    if not known and type(layer) not in GATES:
        return None
    names = ("weight_ih_l0", "weight_hh_l0") if type(layer) in GATES else ("weight",)
    found = [masks.get(f"{path}.{name}".lstrip(".")) for name in names]
    if any(mask is None or not mask.ndim for mask in found):
        return None
    pruned = ~torch.stack([_kept_outputs(layer, mask).cpu() for mask in found if mask is not None]).any(0)
    if type(layer) in GATES:
        gates, candidate = GATES[type(layer)]
        return pruned.reshape(gates, -1)[candidate]
    return pruned


def _check_same(before: tuple[nn.Module, fx.Graph], after: tuple[nn.Module, fx.Graph]) -> None:
    # Numbers and tensors that the forward makes of a layer's size are in the graph; shrinking may not change them.
    for (old, a), (new, b) in zip(_steps(*before), _steps(*after), strict=False):  # one output ends each
        if old != new or not (a is b or _equal(a, b)):
            raise ValueError(
                "expected a forward that does not compute with the sizes of its layers, but shrinking them turns "
                f"{old!r} into {new if old != new else 'another tensor'!r}; take sizes from tensors"
            )


def _steps(root: nn.Module, graph: fx.Graph) -> Iterator[tuple[str, Any]]:
    for node in graph.nodes:
        yield str(node.format_node()), operator.attrgetter(str(node.target))(root) if node.op == "get_attr" else None


def _equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
