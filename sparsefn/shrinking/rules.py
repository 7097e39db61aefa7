"""Layers and products: which dimensions are joined, which sums need 0 where indices go,
and which outputs are constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sparsefn.shrinking.atoms import Flags, Label, Rank, product
from sparsefn.shrinking.moves import GROUPS, divided
from sparsefn.shrinking.values import Constants, Fold, Step, Value, replaced, values_in


def contract(
    step: Step, words: Sequence[str], ins: Sequence[Value], out: str, shift: Any = None
) -> Value:
    """An einsum plus a shift: of the letters that are summed over an index may go where
    one of the sides is 0.
    """
    labels: dict[str, Label] = {}
    zeros: dict[str, Flags] = {}
    for letter in dict.fromkeys("".join(words)):
        at = [
            (v, d)
            for v, word in zip(ins, words, strict=True)
            for d, x in enumerate(word)
            if x == letter and v.shape[d] > 1
        ]
        if at:
            labels[letter] = step.join(*(v.labels[d] for v, d in at))
            zeros[letter] = np.any([v.zero(d) for v, d in at], 0)
            if letter not in out:
                step.sums(labels[letter], zeros[letter])
    made = []
    gone: list[Constants] = []
    for letter in out:
        made.append(labels.get(letter))
        zero = zeros.get(letter)
        gone.append(None if zero is None else np.where(zero, 0.0, np.nan))
    return shifted(step, step.outs.along(made, gone), shift)


def shifted(step: Step, out: Value, shift: Any) -> Value:
    """A result with what is added to it, aligned from the right: a bias leaves the
    constants that it has.
    """
    if not isinstance(shift, Value):
        return out
    labels = list(out.labels)
    gone = list(out.gone)
    for i in range(1, out.ndim + 1):
        a = gone[-i]
        gone[-i] = None
        if i <= shift.ndim and shift.shape[-i] == out.shape[-i] > 1:
            labels[-i] = step.join(labels[-i], shift.labels[-i])
            b = shift.gone[-i]
            gone[-i] = None if a is None or b is None else a + b
    return out.along(labels, gone)


def matmul(step: Step) -> Value:
    """Products of matrices and vectors, and those to which something is added."""
    added = step.arguments["self"] if "add" in step.name else None
    x, y = values_in(step.arguments)[-2:]
    rows = "ik"[-x.ndim :]
    columns = "kj"[: y.ndim]
    lead = [_leading(v.ndim - 2) for v in (x, y)]
    words = [lead[0] + rows, lead[1] + columns]
    out = max(lead, key=len) + rows[:-1] + columns[1:]
    made = contract(step, words, [x, y], out, added)
    step.multiplies(made.dims + x.dims[-1:], x, y)
    if added is None or step.arguments["beta"] == step.arguments["alpha"] == 1:
        return made
    return made.along(made.labels, [None] * len(out))


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
    left, arrow, out = arguments["equation"].replace(" ", "").partition("->")
    words = left.split(",")
    if not arrow:
        letters = sorted(c for c in left if left.count(c) == 1 and c not in ",.")
        out = "".join(["..." if "..." in left else "", *letters])
    dots = [
        v.ndim - len(word.replace("...", ""))
        for v, word in zip(ins, words, strict=True)
    ]
    words = [
        word.replace("...", "0123456789"[10 - n :])
        for n, word in zip(dots, words, strict=True)
    ]
    return words, ins, out.replace("...", "0123456789"[10 - max(dots) :])


def _multiply_pairs(
    step: Step, words: Sequence[str], ins: Sequence[Value], out: str
) -> None:
    # Two factors at a time, by the path or from the left; what only one of them has is
    # summed before.
    dims: dict[str, tuple[int, Label]] = {}
    for value, word in zip(ins, words, strict=True):
        for letter, dim in zip(word, value.dims, strict=True):
            if letter not in dims or dim[0] > 1:
                dims[letter] = dim
    path = list(step.arguments["path"] or ())
    left: list[tuple[str, Value | None]] = list(zip(words, ins, strict=True))
    while len(left) > 1:
        i, j = sorted((path.pop(0), path.pop(0))) if path else (0, 1)
        b, y = left.pop(j)
        a, x = left.pop(i)
        needed = set(out).union(*(word for word, _ in left))
        stays = needed | (set(a) & set(b))
        letters = [c for c in dict.fromkeys(a + b) if c in stays]
        # else it is no product of matrices
        if any(c not in needed and dims[c][0] > 1 for c in letters):
            factors = [
                value
                for word, value in ((a, x), (b, y))
                if value is not None and set(word) <= set(letters)
            ]
            step.multiplies(tuple(dims[c] for c in letters), *factors)
        word = "".join(c for c in letters if c in needed)
        left.insert(len(left) if step.arguments["path"] else 0, (word, None))


def bilinear(step: Step) -> Value:
    x, y, w, bias = (
        step.arguments[name] for name in ("input1", "input2", "weight", "bias")
    )
    step.multiplies(x.dims[:-1] + w.dims, w)
    step.multiplies(x.dims[:-1] + w.dims[:1] + y.dims[-1:])
    lead = _leading(x.ndim - 1)
    words = [lead + "i", lead + "j", "oij"]
    return contract(step, words, [x, y, w], lead + "o", bias)


def grouped_mm(step: Step) -> Value:
    """The rows of x are those of one expert after another: which expert's depends on
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
    any_expert = w._replace(gone=(np.zeros(w.shape[0]), *w.gone[1:]))
    return contract(step, ["tk", "ekn"], [x, any_expert], "tn")


def attention(step: Step) -> Value:
    """Scaled dot-product attention.

    With grouped queries each head of keys and values is repeated.
    """
    q, k, v, mask = (
        step.arguments[name] for name in ("query", "key", "value", "attn_mask")
    )
    step.multiplies((*q.dims, k.dims[-2]))
    step.multiplies((*q.dims[:-1], k.dims[-2], v.dims[-1]))
    lead = _leading(q.ndim - 2)
    if step.arguments["enable_gqa"] and (times := q.shape[-3] // k.shape[-3]) > 1:
        readers = step.atoms.new(times, Rank.REPEATS)
        k, v = (_repeated(u, readers, times) for u in (k, v))
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
    gone = list(v.gone)
    gone[-2] = None
    return out.along(out.labels, gone)


def _repeated(value: Value, readers: Label, times: int) -> Value:
    shape = list(value.shape)
    labels = list(value.labels)
    gone = list(value.gone)
    shape[-3] *= times
    labels[-3] = product(labels[-3], value.shape[-3], readers, times)
    gone[-3] = None if gone[-3] is None else np.repeat(gone[-3], times)
    return value._replace(shape=tuple(shape)).along(labels, gone)


Array = npt.NDArray[np.float64]


class Layer(NamedTuple):
    """A linear layer or a convolution, which may have groups."""

    x: Value
    weight: Value
    bias: Any
    at: int  # the dimension of x that it sums over
    read: Label  # of that dimension
    made: Label  # of the outputs in its place
    groups: int
    outputs: int  # of each group
    inputs: int
    # the weight is (inputs, outputs, ...), as those of transposed convolutions
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
    x, w, bias = (step.arguments[name] for name in ("input", "weight", "bias"))
    if w.ndim != 2:
        lead = _leading(x.ndim - 1)
        step.multiplies(x.dims, x, w)
        return contract(step, [lead + "i", "i"], [x, w], lead, bias)
    return _linear(step, x, w, bias, turned=False)


def addmm(step: Step) -> Value:
    """A linear layer that holds its weight transposed, or a product of other things."""
    bias, x, w = (step.arguments[name] for name in ("self", "mat1", "mat2"))
    scaled = step.arguments["beta"] != 1 or step.arguments["alpha"] != 1
    if w.name is None or bias.ndim != 1 or scaled:
        return matmul(step)
    return _linear(step, x, w, bias, turned=True)


def _linear(step: Step, x: Value, w: Value, bias: Value | None, turned: bool) -> Value:
    # A linear layer, whose weight is (inputs, outputs) where it is turned.
    outputs, inputs = (1, 0) if turned else (0, 1)
    layer = Layer(
        x,
        w,
        bias,
        at=x.ndim - 1,
        read=step.join(x.labels[-1], w.labels[inputs]) if x.shape[-1] > 1 else None,
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
    x, w, bias = (step.arguments[name] for name in ("input", "weight", "bias"))
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
        read = step.join(read, own) if x.shape[at] > 1 else None
    if groups > 1:
        group, part = divided(step, read, groups, inputs, GROUPS)
        if turned:
            made = product(group, groups, made if outputs > 1 else None, outputs)
        else:
            group = step.join(group, divided(step, made, groups, outputs, GROUPS)[0])
            if inputs > 1:
                step.join(part, own)
        step.book.groups[step.node] = group
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
    x, w, bias, at, *_ = layer
    out: Value = step.outs
    moved = x if layer.turned else out  # over which the weights move
    places = tuple((n, None) for n in moved.shape[at + 1 :])
    step.multiplies(x.dims[:at] + places + w.dims, x, w)
    constants = _known(x, at, layer.plain)
    if step.book.masks is None or w.real is None:
        unread, zero = _flags(layer)
        made = np.where(zero, 0.0, np.nan)
    else:
        kept, sums = _matrix(layer)
        unread = ~kept.any(1).reshape(-1)
        inner = constants.reshape(layer.groups, 1, layer.inputs)
        varies = (kept & np.isnan(inner)).any(2)
        made = (sums * np.nan_to_num(inner)).sum(2)
        made = np.where(varies, np.nan, made).reshape(-1)
        some = layer.read is not None and np.isfinite(constants).any()
        if some and layer.takes_constants():
            step.book.folds.append(Fold(bias.name, sums, constants, layer.read))
            constants = np.where(np.isnan(constants), np.nan, 0.0)
    step.sums(layer.read, unread | (constants == 0))
    labels = [*x.labels[:at], *out.labels[at:]]
    gone = list(out.gone)
    if layer.size > 1:
        labels[at] = layer.made
        gone[at] = made
    out = out.along(labels, gone)
    if isinstance(bias, Value):  # beside the dimensions behind the channels
        rest = [None] * len(places)
        bias = bias._replace(shape=bias.shape + (1,) * len(places))
        bias = bias.along((*bias.labels, *rest), (*bias.gone, *rest))
    return shifted(step, out, bias)


def _known(x: Value, at: int, plain: bool) -> Array:
    gone = x.gone[at]
    known = np.full(x.shape[at], np.nan) if gone is None else gone
    return known if plain else np.where(known == 0, 0.0, np.nan)


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
        # dimension 1 is that of one group
        size = layer.outputs if layer.turned else layer.inputs
        own = second
        second = np.repeat(first.reshape(layer.groups, -1).all(1), size)
        if size > 1:
            second = second & np.tile(own, layer.groups)
    return (first, second) if layer.turned else (second, first)


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
    for label in (label for state in states for label in state.labels[:-1]):
        step.freeze(label, "has a state for each layer and sequence")
    hidden = step.join(*(state.labels[-1] for state in states))
    zero = np.all([state.zero(state.ndim - 1) for state in states], 0)
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
            silent = silent & value.zero(0).reshape(gates, size)[candidate]
        step.freeze(
            hidden,
            "keeps its state in it, and it is not 0 where it is masked",
            ~silent & ~w_state.zero(1),
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
        wide = out.shape[-1] == size * sides and out is outs[0]
        silent = below_zero if wide else np.all(above, 0)
        labels = list(out.labels)
        gone = list(out.gone)
        labels[-1] = below if wide else hidden
        gone[-1] = np.where(silent, 0.0, np.nan)
        made.append(out.along(labels, gone))
    return replaced(step.outs, made)
