"""Norms and means: fixed, or counted, where they lose entries that are 0 and go on
dividing by the old number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsefn.shrinking.atoms import Label, product
from sparsefn.shrinking.moves import divided
from sparsefn.shrinking.probe import elementwise, tried, with_constants
from sparsefn.shrinking.values import Constants, Step, Value, replaced, values_in


def layer_norm(step: Step) -> Value:
    """Layer norms and RMS norms."""
    x = step.arguments["input"]
    weight = step.arguments.get("weight")
    bias = step.arguments.get("bias")
    labels = list(x.labels)
    made: list[Constants] = [None] * len(x.shape)
    for i in range(1, len(step.arguments["normalized_shape"]) + 1):
        some = [v for v in (weight, bias) if isinstance(v, Value)]
        if x.shape[-i] > 1:
            labels[-i] = step.join(x.labels[-i], *(v.labels[-i] for v in some))
        averaged(step, labels[-i], x, len(x.shape) - i)
        made[-i] = _scaled(weight, bias, i)
    out: Value = step.outs
    return out._replace(labels=tuple(labels), gone=tuple(made))


def _scaled(weight: object, bias: object, i: int) -> Constants:
    # What is left where the scale is 0.
    if not isinstance(weight, Value):
        return None
    shift = bias.gone[-i] if isinstance(bias, Value) else np.zeros(weight.shape[-i])
    return (
        None
        if shift is None
        else np.where(weight.zero(len(weight.shape) - i), shift, np.nan)
    )


def averaged(step: Step, label: Label, x: Value, dim: int) -> None:
    """The entries of a dimension over which a mean is taken stay; if means are counted,
    those that are not 0.
    """
    if not step.book.counted:
        step.freeze(label, "takes its mean")
    else:
        step.freeze(
            label, "takes its mean, and it is not 0 where it is masked", ~x.zero(dim)
        )


def group_norm(step: Step) -> Value:
    x = step.arguments["input"]
    groups = step.arguments["num_groups"]
    weight = step.arguments["weight"]
    bias = step.arguments["bias"]
    for label in x.labels[2:]:
        step.freeze(label, "takes its mean")
    c = step.join(
        x.labels[1], *(v.labels[0] for v in (weight, bias) if isinstance(v, Value))
    )
    group, part = divided(step, c, groups, x.shape[1] // groups, (2, 1))
    step.book.groups[step.node] = group
    if not step.book.counted:
        step.freeze(part, "takes its mean")
    elif x.shape[1] > groups:  # whole groups go without a trace
        zero = x.zero(1).reshape(groups, -1)
        whole = zero.all(1, keepdims=True)
        step.freeze(
            c,
            "takes its mean, and it is not 0 where it is masked",
            ~(zero | whole).reshape(-1),
        )
    out = step.outs
    rest = [None] * (len(x.shape) - 2)
    made: Value = out._replace(
        labels=(x.labels[0], c, *rest), gone=(None, _scaled(weight, bias, 1), *rest)
    )
    return made


def batch_norm(step: Step) -> Any:
    """With the statistics of training a channel goes with its scale, shift and
    statistics.
    """
    x, *others = ins = values_in(step.arguments)
    open_ = [d for d, label in enumerate(x.labels) if label is not None]
    labels = [label for value in others if (label := value.labels[0]) is not None]
    if step.arguments.get("training") or open_ != [1] or len(labels) < len(others):
        return tried(step)
    step.join(
        product(None, len(others), x.labels[1], x.shape[1]), np.concatenate(labels)
    )
    gone = elementwise(step, ins, [1] + [0] * len(others), x.shape[1])
    out, *stats = values_in(step.outs)
    out = out._replace(
        labels=x.labels,
        gone=tuple(gone if d == 1 else None for d in range(len(x.shape))),
    )
    return replaced(step.outs, [out, *stats])


def mean_over(step: Step) -> Value:
    x = step.arguments["self"]
    over = mean_dims(step.arguments.get("dim"), len(x.shape))
    for d in over:
        averaged(step, x.labels[d], x, d)
    labels = [
        None if d in over else label
        for d, label in enumerate(x.labels)
        if step.arguments.get("keepdim") or d not in over
    ]
    return with_constants(step, [x], [step.outs.along(labels, step.outs.gone)])[0]


def mean_dims(dim: object, rank: int) -> list[int]:
    """The dimensions over which a mean is taken.

    >>> mean_dims(None, 2), mean_dims([-1], 3)
    ([0, 1], [2])
    """
    if dim is None or dim == []:
        return list(range(rank))
    return sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim))  # type: ignore[attr-defined]
