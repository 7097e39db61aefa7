"""Products: dimensions of one letter are joined, and sums need 0 where indices go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsefn.shrinking.atoms import Flags, Label, product
from sparsefn.shrinking.steps import Step
from sparsefn.shrinking.values import Value, values_in


def contract(
    step: Step, words: Sequence[str], ins: Sequence[Value], out: str, shift: Any = None
) -> Value:
    """An einsum plus a shift: of the letters that are summed over an index may go where
    one of the sides is 0.
    """
    labels: dict[str, Label] = {}
    zeros: dict[str, Flags] = {}
    for letter in dict.fromkeys("".join(words)):
        sides = zip(ins, words, strict=True)
        at = [
            (v, d)
            for v, word in sides
            for d, x in enumerate(word)
            if x == letter and v.shape[d] > 1
        ]
        labels[letter] = step.join(*(v.labels[d] for v, d in at)) if at else None
        if at:
            zeros[letter] = np.any([v.zero(d) for v, d in at], 0)
            if letter not in out:
                step.sums(labels[letter], zeros[letter])
    made: Value = step.outs
    gone = [np.where(zeros[c], 0.0, np.nan) if c in zeros else None for c in out]
    return shifted(
        step,
        made._replace(labels=tuple(labels.get(c) for c in out), gone=tuple(gone)),
        shift,
    )


def shifted(step: Step, out: Value, shift: Any) -> Value:
    """A result with what is added to it, aligned from the right: a bias leaves the
    constants that it has.
    """
    if not isinstance(shift, Value):
        return out
    labels = list(out.labels)
    gone = list(out.gone)
    for i in range(1, len(out.shape) + 1):
        has = i <= len(shift.shape) and shift.shape[-i] == out.shape[-i] > 1
        if has:
            labels[-i] = step.join(labels[-i], shift.labels[-i])
        a = gone[-i]
        b = shift.gone[-i] if has else None
        gone[-i] = None if a is None or b is None else a + b
    return out._replace(labels=tuple(labels), gone=tuple(gone))


def matmul(step: Step) -> Value:
    """Products of matrices and vectors: matmul, mm, bmm, mv, dot, and those to which
    something is added.
    """
    added = step.arguments["self"] if "add" in step.name else None
    x, y = values_in(
        {k: v for k, v in step.arguments.items() if added is None or k != "self"}
    )
    lead = [list("abcdefgh"[8 - max(len(v.shape) - 2, 0) :]) for v in (x, y)]
    words = [
        lead[0] + ["i", "k"][-len(x.shape) :],
        lead[1] + ["k", "j"][: len(y.shape)],
    ]
    out = max(lead, key=len)
    if len(x.shape) > 1:
        out = [*out, "i"]
    if len(y.shape) > 1:
        out = [*out, "j"]
    scaled = [step.arguments.get(name, 1) for name in ("beta", "alpha")]
    made = contract(
        step, ["".join(word) for word in words], [x, y], "".join(out), added
    )
    return (
        made
        if scaled == [1, 1] or added is None
        else made._replace(gone=(None,) * len(made.gone))
    )


def einsum(step: Step) -> Value:
    return contract(step, *parsed(step.arguments))


def parsed(arguments: dict[str, Any]) -> tuple[list[str], list[Value], str]:
    """The letters of the dimensions of an einsum's tensors, these, and the letters of
    the result, without dots.
    """
    ins = list(arguments["tensors"])
    left, arrow, out = arguments["equation"].replace(" ", "").partition("->")
    words = left.split(",")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        out = "..." * ("..." in left) + "".join(
            c for c in letters if left.count(c) == 1
        )
    dots = [
        len(v.shape) - len(word.replace("...", ""))
        for v, word in zip(ins, words, strict=True)
    ]
    words = [
        word.replace("...", "0123456789"[10 - n :])
        for n, word in zip(dots, words, strict=True)
    ]
    return words, ins, out.replace("...", "0123456789"[10 - max(dots) :])


def bilinear(step: Step) -> Value:
    x, y, w, bias = (
        step.arguments[name] for name in ("input1", "input2", "weight", "bias")
    )
    lead = "abcdefgh"[: len(x.shape) - 1]
    return contract(step, [lead + "i", lead + "j", "oij"], [x, y, w], lead + "o", bias)


def grouped_mm(step: Step) -> Value:
    """The rows of x are those of one expert after another: which expert's depends on
    values.
    """
    x, w = values_in(step.arguments)[:2]
    step.freeze(w.labels[0], "looks up any of its entries")
    made: Value = step.outs
    if len(w.shape) != 3 or len(x.shape) != 2:
        step.mixes(x, w)
        return made
    return contract(
        step,
        ["tk", "ekn"],
        [x, w._replace(gone=(np.zeros(w.shape[0]), *w.gone[1:]))],
        "tn",
    )


def attention(step: Step) -> Value:
    """Scaled dot-product attention.

    With grouped queries each head of keys and values is repeated.
    """
    q, k, v, mask = (
        step.arguments[name] for name in ("query", "key", "value", "attn_mask")
    )
    lead = "abcdefgh"[: len(q.shape) - 2]
    if step.arguments["enable_gqa"] and (times := q.shape[-3] // k.shape[-3]) > 1:
        readers = step.atoms.new(times, rank=2)
        k, v = (_repeated(u, readers, times) for u in (k, v))
    scores = contract(step, [lead + "sd", lead + "td"], [q, k], lead + "st")
    if isinstance(mask, Value):
        for i in range(1, len(mask.shape) + 1):
            if mask.shape[-i] > 1:
                step.join(scores.labels[-i], mask.labels[-i])
    step.freeze(scores.labels[-1], "has a softmax over it")
    out = contract(
        step,
        [lead + "s", lead + "tv"],
        [q._replace(shape=q.shape[:-1]), v],
        lead + "sv",
    )
    return out._replace(gone=(*v.gone[:-2], None, v.gone[-1]))


def _repeated(value: Value, readers: Label, times: int) -> Value:
    heads = value.labels[-3]
    size = value.shape[-3]
    gone = value.gone[-3]
    return value._replace(
        shape=(*value.shape[:-3], size * times, *value.shape[-2:]),
        labels=(
            *value.labels[:-3],
            product(heads, size, readers, times),
            *value.labels[-2:],
        ),
        gone=(
            *value.gone[:-3],
            None if gone is None else np.repeat(gone, times),
            *value.gone[-2:],
        ),
    )
