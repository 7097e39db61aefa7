"""Layers and products: which dimensions are joined, which sums need 0 where indices go,
and which outputs are constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sparsefn.shrinking.channels import ChannelMap, Flags, Rank, product
from sparsefn.shrinking.reindexing import GROUPS, divided
from sparsefn.shrinking.values import (
    BiasFold,
    Constants,
    Step,
    Value,
    replaced,
    values_in,
)


def contract(
    step: Step,
    words: Sequence[str],
    ins: Sequence[Value],
    out: str,
    shift: Any = None,
) -> Value:
    """An einsum plus a shift. Of a dimension that it sums over, indices may go at which
    one of the factors is 0.
    """
    labels: dict[str, ChannelMap] = {}
    zeros: dict[str, Flags] = {}
    for letter in dict.fromkeys("".join(words)):
        factors: list[ChannelMap] = []
        flags: list[Flags] = []
        for value, word in zip(ins, words, strict=True):
            for d, one in enumerate(word):
                if one == letter and value.shape[d] > 1:
                    factors.append(value.labels[d])
                    flags.append(value.zero(d))
        if not factors:
            continue
        label = step.join(*factors)
        zero = np.any(flags, 0)
        labels[letter] = label
        zeros[letter] = zero
        if letter not in out:
            step.sums(label, zero)
    made = []
    constants: list[Constants] = []
    for letter in out:
        made.append(labels.get(letter))
        slices = None
        if letter in zeros:
            slices = np.where(zeros[letter], 0.0, np.nan)
        constants.append(slices)
    summed = step.outs.along(made, constants)
    return shifted(step, summed, shift)


def shifted(step: Step, out: Value, shift: Any) -> Value:
    """A result with what is added to it, aligned from the right: a bias leaves the
    constants that it has.
    """
    if not isinstance(shift, Value):
        return out
    labels = list(out.labels)
    constants = list(out.constants)
    for i in range(1, out.ndim + 1):
        a = constants[-i]
        constants[-i] = None
        if i <= shift.ndim and shift.shape[-i] == out.shape[-i] > 1:
            labels[-i] = step.join(labels[-i], shift.labels[-i])
            b = shift.constants[-i]
            if a is not None and b is not None:
                constants[-i] = a + b
    return out.along(labels, constants)


def matmul(step: Step) -> Value:
    """Products of matrices and vectors, and products to which something is added."""
    added = None
    if "add" in step.name:
        added = step.arguments["self"]
    x, y = values_in(step.arguments)[-2:]
    rows = "ik"[-x.ndim :]
    columns = "kj"[: y.ndim]
    batch_x = _leading(x.ndim - 2)
    batch_y = _leading(y.ndim - 2)
    words = [batch_x + rows, batch_y + columns]
    out = max(batch_x, batch_y, key=len) + rows[:-1] + columns[1:]
    made = contract(step, words, [x, y], out, added)
    step.multiplies(made.dims + x.dims[-1:], x, y)
    if added is None:
        return made
    if step.arguments["beta"] == step.arguments["alpha"] == 1:
        return made
    unknown = [None] * len(out)
    return made.along(made.labels, unknown)


def _leading(count: int) -> str:
    # Letters of the dimensions in front, which are aligned from the right.
    return "abcdefgh"[8 - max(count, 0) :]


def einsum(step: Step) -> Value:
    words, ins, out = _parsed(step.arguments)
    _multiply_pairs(step, words, ins, out)
    return contract(step, words, ins, out)


def _parsed(arguments: dict[str, Any]) -> tuple[list[str], list[Value], str]:
    # The letters of the dimensions of an einsum's tensors, these, and the letters of
    # the result, without dots.
    ins = list(arguments["tensors"])
    equation = arguments["equation"].replace(" ", "")
    left, arrow, out = equation.partition("->")
    if not arrow:
        once = [c for c in left if left.count(c) == 1]
        letters = sorted(c for c in once if c not in ",.")
        dots = "..." if "..." in left else ""
        out = dots + "".join(letters)
    words = []
    longest = 0
    for value, word in zip(ins, left.split(","), strict=True):
        count = value.ndim - len(word.replace("...", ""))
        longest = max(longest, count)
        words.append(word.replace("...", _digits(count)))
    return words, ins, out.replace("...", _digits(longest))


def _digits(count: int) -> str:
    # Letters in place of dots, which are aligned from the right.
    return "0123456789"[10 - count :]


def _multiply_pairs(
    step: Step,
    words: Sequence[str],
    ins: Sequence[Value],
    out: str,
) -> None:
    # Two factors at a time, by the path or from the left; what only one of them has is
    # summed before.
    dims: dict[str, tuple[int, ChannelMap]] = {}
    for value, word in zip(ins, words, strict=True):
        for letter, dim in zip(word, value.dims, strict=True):
            if letter not in dims or dim[0] > 1:
                dims[letter] = dim
    path = list(step.arguments["path"] or ())
    by_path = bool(path)
    left: list[tuple[str, Value | None]] = list(zip(words, ins, strict=True))
    while len(left) > 1:
        i = 0
        j = 1
        if path:
            i, j = sorted(path[:2])
            del path[:2]
        b, y = left.pop(j)
        a, x = left.pop(i)
        needed = set(out).union(*(word for word, _ in left))
        stays = needed | (set(a) & set(b))
        letters = [c for c in dict.fromkeys(a + b) if c in stays]
        summed = [c for c in letters if c not in needed]
        # else it is no product of matrices
        if any(dims[c][0] > 1 for c in summed):
            factors = []
            for word, factor in ((a, x), (b, y)):
                if factor is not None and set(word) <= set(letters):
                    factors.append(factor)
            step.multiplies(tuple(dims[c] for c in letters), *factors)
        word = "".join(c for c in letters if c in needed)
        place = len(left) if by_path else 0
        left.insert(place, (word, None))


def bilinear(step: Step) -> Value:
    x = step.arguments["input1"]
    y = step.arguments["input2"]
    w = step.arguments["weight"]
    bias = step.arguments["bias"]
    batch = x.dims[:-1]
    step.multiplies(batch + w.dims, w)
    step.multiplies(batch + w.dims[:1] + y.dims[-1:])
    lead = _leading(x.ndim - 1)
    words = [lead + "i", lead + "j", "oij"]
    return contract(step, words, [x, y, w], lead + "o", bias)


def grouped_mm(step: Step) -> Value:
    """The rows of x belong to one expert after another: which of them depends on
    values.
    """
    x, w = values_in(step.arguments)[:2]
    rows = x.dims
    if x.ndim > w.ndim:
        rows = rows[1:]
    step.multiplies(rows + w.dims[-1:])
    step.freeze(w.labels[0], "looks up any of its entries")
    made: Value = step.outs
    if w.ndim != 3 or x.ndim != 2:
        step.freeze_all([x, w], "mixes its entries")
        return made
    no_expert = np.zeros(w.shape[0])
    any_expert = w._replace(constants=(no_expert, *w.constants[1:]))
    return contract(step, ["tk", "ekn"], [x, any_expert], "tn")


def attention(step: Step) -> Value:
    """Scaled dot-product attention.

    With grouped queries each head of keys and values is repeated.
    """
    q = step.arguments["query"]
    k = step.arguments["key"]
    v = step.arguments["value"]
    mask = step.arguments["attn_mask"]
    tokens = k.dims[-2]
    step.multiplies((*q.dims, tokens))
    step.multiplies((*q.dims[:-1], tokens, v.dims[-1]))
    lead = _leading(q.ndim - 2)
    if step.arguments["enable_gqa"]:
        times = q.shape[-3] // k.shape[-3]
        if times > 1:
            readers = step.channels.new(times, Rank.REPEATS)
            k = _repeated(k, readers, times)
            v = _repeated(v, readers, times)
    words = [lead + "sd", lead + "td"]
    scores = contract(step, words, [q, k], lead + "st")
    if isinstance(mask, Value):
        for i in range(1, mask.ndim + 1):
            if mask.shape[-i] > 1:
                step.join(scores.labels[-i], mask.labels[-i])
    step.freeze(scores.labels[-1], "has a softmax over it")
    rows = q._replace(shape=q.shape[:-1])
    words = [lead + "s", lead + "tv"]
    out = contract(step, words, [rows, v], lead + "sv")
    constants = list(v.constants)
    constants[-2] = None
    return out.along(out.labels, constants)


def _repeated(value: Value, readers: ChannelMap, times: int) -> Value:
    shape = list(value.shape)
    labels = list(value.labels)
    constants = list(value.constants)
    shape[-3] *= times
    labels[-3] = product(labels[-3], value.shape[-3], readers, times)
    if constants[-3] is not None:
        constants[-3] = np.repeat(constants[-3], times)
    repeated = value._replace(shape=tuple(shape))
    return repeated.along(labels, constants)


Array = npt.NDArray[np.float64]


class Layer(NamedTuple):
    """A linear layer or a convolution, which may have groups."""

    x: Value
    weight: Value
    bias: Any
    at: int  # the dimension of x that it sums over
    read: ChannelMap  # of that dimension
    made: ChannelMap  # of the outputs in its place
    groups: int
    outputs: int  # of each group
    inputs: int
    # the weight is (inputs, outputs, ...), as transposed convolutions have it
    turned: bool
    # every output reads every input as often, so that constants give constants
    plain: bool

    @property
    def size(self) -> int:
        """How many outputs it has."""
        return self.groups * self.outputs

    def takes_constants(self) -> bool:
        """Whether its bias may take in what constant inputs give: a vector that is read
        in this place alone.
        """
        bias = self.bias
        if not isinstance(bias, Value) or bias.name is None:
            return False
        return bias.reads == 1 and bias.shape == (self.size,)


def linear_layer(step: Step) -> Value:
    x = step.arguments["input"]
    w = step.arguments["weight"]
    bias = step.arguments["bias"]
    if w.ndim != 2:
        lead = _leading(x.ndim - 1)
        step.multiplies(x.dims, x, w)
        return contract(step, [lead + "i", "i"], [x, w], lead, bias)
    return _linear(step, x, w, bias, turned=False)


def addmm(step: Step) -> Value:
    """A linear layer that holds its weight transposed, or a product of other things."""
    bias = step.arguments["self"]
    x = step.arguments["mat1"]
    w = step.arguments["mat2"]
    scaled = step.arguments["beta"] != 1 or step.arguments["alpha"] != 1
    if w.name is None or bias.ndim != 1 or scaled:
        return matmul(step)
    return _linear(step, x, w, bias, turned=True)


def _linear(step: Step, x: Value, w: Value, bias: Value | None, turned: bool) -> Value:
    # A linear layer, whose weight is (inputs, outputs) where it is turned.
    outputs, inputs = (1, 0) if turned else (0, 1)
    read = None
    if x.shape[-1] > 1:
        read = step.join(x.labels[-1], w.labels[inputs])
    layer = Layer(
        x,
        w,
        bias,
        at=x.ndim - 1,
        read=read,
        made=w.labels[outputs],
        groups=1,
        outputs=w.shape[outputs],
        inputs=w.shape[inputs],
        turned=turned,
        plain=True,
    )
    return _output(step, layer)


def convolution(step: Step) -> Value:
    """Convolutions of any rank, grouped, depthwise and transposed."""
    x = step.arguments["input"]
    w = step.arguments["weight"]
    bias = step.arguments["bias"]
    groups = step.arguments["groups"]
    turned = step.arguments.get("transposed", "transpose" in step.name)
    # without a batch dimension channels come first
    at = x.ndim - w.ndim + 1
    for label in (*x.labels[at + 1 :], *w.labels[2:]):
        step.freeze(label, "mixes its entries")
    read = x.labels[at]
    inputs = x.shape[at] // groups
    outputs = w.shape[0] // groups
    made = w.labels[0]
    own = w.labels[1]
    if turned:
        outputs = w.shape[1]
        made = w.labels[1]
        own = w.labels[0]
    if groups == 1 or turned:
        if x.shape[at] > 1:
            read = step.join(read, own)
        else:
            read = None
    if groups > 1:
        group, part = divided(step, read, groups, inputs, GROUPS)
        if turned:
            if outputs == 1:
                made = None
            made = product(group, groups, made, outputs)
        else:
            group_made, _ = divided(step, made, groups, outputs, GROUPS)
            group = step.join(group, group_made)
            if inputs > 1:
                step.join(part, own)
        step.log.groups[step.node] = group
    padding = step.arguments.get("padding", 0)
    unpadded = padding == "valid" or (padding != "same" and not np.any(padding))
    layer = Layer(
        x,
        w,
        bias,
        at,
        read,
        made,
        groups,
        outputs,
        inputs,
        turned,
        plain=unpadded and not turned,
    )
    return _output(step, layer)


def _output(step: Step, layer: Layer) -> Value:
    x = layer.x
    w = layer.weight
    bias = layer.bias
    at = layer.at
    out: Value = step.outs
    moved = x if layer.turned else out  # over which the weights move
    places = tuple((n, None) for n in moved.shape[at + 1 :])
    step.multiplies(x.dims[:at] + places + w.dims, x, w)
    constants = _known(x, at, layer.plain)
    if step.log.masks is None or w.real is None:
        unread, zero = _flags(layer)
        made = np.where(zero, 0.0, np.nan)
    else:
        kept, sums = _matrix(layer)
        unread = ~kept.any(1).reshape(-1)
        inner = constants.reshape(layer.groups, 1, layer.inputs)
        unknown = np.isnan(inner)
        products = sums * np.nan_to_num(inner)
        varies = (kept & unknown).any(2)
        made = np.where(varies, np.nan, products.sum(2)).reshape(-1)
        some = layer.read is not None and np.isfinite(constants).any()
        if some and layer.takes_constants():
            fold = BiasFold(bias.name, sums, constants, layer.read)
            step.log.folds.append(fold)
            constants = np.where(np.isnan(constants), np.nan, 0.0)
    step.sums(layer.read, unread | (constants == 0))
    labels = [*x.labels[:at], *out.labels[at:]]
    of_out = list(out.constants)
    if layer.size > 1:
        labels[at] = layer.made
        of_out[at] = made
    out = out.along(labels, of_out)
    if isinstance(bias, Value):  # beside the dimensions behind the channels
        rest = [None] * len(places)
        ones = (1,) * len(places)
        bias = bias._replace(shape=bias.shape + ones)
        bias = bias.along((*bias.labels, *rest), (*bias.constants, *rest))
    return shifted(step, out, bias)


def _known(x: Value, at: int, plain: bool) -> Array:
    known = x.constants[at]
    if known is None:
        return np.full(x.shape[at], np.nan)
    if plain:
        return known
    return np.where(known == 0, 0.0, np.nan)


def _matrix(layer: Layer) -> tuple[Flags, Array]:
    # Which weights of (group, output, input) are kept, and their sums over the kernel.
    w = layer.weight
    assert w.real is not None
    shape = (layer.groups, layer.outputs, layer.inputs)
    if layer.turned:
        shape = (layer.groups, layer.inputs, layer.outputs)
    rows = w.real.double().reshape(*shape, -1)
    kept = torch.ones_like(rows, dtype=torch.bool)
    if w.mask is not None:
        kept = w.mask.reshape(rows.shape)
    some = kept.any(-1).numpy()
    sums = rows.sum(-1).numpy()
    if layer.turned:
        return some.swapaxes(1, 2), sums.swapaxes(1, 2)
    return some, sums


def _flags(layer: Layer) -> tuple[Flags, Flags]:
    # Which inputs no weight reads, and which outputs no weight makes, as the weight's
    # own dimensions tell.
    first = layer.weight.zero(0)
    second = layer.weight.zero(1)
    if layer.groups > 1:
        # dimension 1 has the size of a single group
        size = layer.outputs if layer.turned else layer.inputs
        own = second
        whole_groups = first.reshape(layer.groups, -1).all(1)
        second = np.repeat(whole_groups, size)
        if size > 1:
            second = second & np.tile(own, layer.groups)
    if layer.turned:
        return first, second
    return second, first


# how many, and which is the candidate
_GATES = {
    "lstm": (4, 2),
    "gru": (3, 2),
    "rnn_tanh": (1, 0),
    "rnn_relu": (1, 0),
}


def recurrent(step: Step) -> Any:
    """A hidden unit is 0 at all times where its candidate gate, the cell's in an LSTM,
    and its first state are.
    """
    gates, candidate = _GATES[step.name]
    x = step.arguments["input"]
    params = step.arguments["params"]
    for w in params:
        if w.ndim == 2:
            step.multiplies(x.dims[:-1] + w.dims, w)
    outs = values_in(step.outs)
    states = values_in(step.arguments["hx"])
    per = 4 if step.arguments["has_biases"] else 2
    sides = 2 if step.arguments["bidirectional"] else 1
    size = outs[1].shape[-1]
    # projections of the state
    if any(value.shape[0] != gates * size for value in params):
        step.freeze_all([x, *states, *params], "mixes its entries")
        return step.outs
    for state in states:
        for label in state.labels[:-1]:
            step.freeze(label, "has a state for each layer and sequence")
    hidden = step.join(*(state.labels[-1] for state in states))
    zeros = [state.zero(state.ndim - 1) for state in states]
    zero = np.all(zeros, 0)
    below = x.labels[-1]
    below_zero = x.zero(x.ndim - 1)
    above = []
    for start in range(0, len(params), per):
        w_in, w_state, *biases = params[start : start + per]
        own = (w_in, w_state, *biases)
        unit = step.join(*(value.labels[0] for value in own))
        gate = None
        if gates > 1:
            gate, unit = divided(step, unit, gates, size)
        step.freeze(gate, "has a gate of each kind")
        hidden = step.join(hidden, unit, w_state.labels[1])
        silent = zero
        for value in own:
            by_gate = value.zero(0).reshape(gates, size)
            silent = silent & by_gate[candidate]
        written = ~silent & ~w_state.zero(1)
        step.freeze(
            hidden,
            "keeps its state in it, and it is not 0 where it is masked",
            written,
        )
        if w_in.shape[1] > 1:
            read = step.join(below, w_in.labels[1])
            step.sums(read, below_zero | w_in.zero(1))
        above.append(silent)
        if len(above) % sides == 0:
            below = product(None, sides, hidden, size)
            below_zero = np.concatenate(above[-sides:])
    made = []
    for out in outs:
        labels = list(out.labels)
        constants = list(out.constants)
        if out is outs[0] and out.shape[-1] == size * sides:
            labels[-1] = below
            silent = below_zero
        else:
            labels[-1] = hidden
            silent = np.all(above, 0)
        constants[-1] = np.where(silent, 0.0, np.nan)
        made.append(out.along(labels, constants))
    return replaced(step.outs, made)
