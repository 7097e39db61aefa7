"""Norms and means: fixed, or counted, where they lose entries that are 0 and go on
dividing by the old number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsefn.shrinking.channels import ChannelMap, product
from sparsefn.shrinking.probe import elementwise, probed, with_constants
from sparsefn.shrinking.reindexing import GROUPS, divided
from sparsefn.shrinking.values import Constants, Step, Value, replaced, values_in

_NOT_ZERO = "takes its mean, and it is not 0 where it is masked"


def layer_norm(step: Step) -> Value:
    """Layer norms and RMS norms."""
    x = step.arguments["input"]
    weight = step.arguments.get("weight")
    bias = step.arguments.get("bias")
    own = [value for value in (weight, bias) if isinstance(value, Value)]
    out: Value = step.outs
    labels = list(x.labels)
    constants = list(out.constants)
    for i in range(1, len(step.arguments["normalized_shape"]) + 1):
        if x.shape[-i] > 1:
            scales = [value.labels[-i] for value in own]
            labels[-i] = step.join(x.labels[-i], *scales)
        averaged(step, labels[-i], x, x.ndim - i)
        constants[-i] = _scaled(weight, bias, i)
    return out.along(labels, constants)


def _scaled(weight: object, bias: object, i: int) -> Constants:
    # What is left where the scale is 0.
    if not isinstance(weight, Value):
        return None
    shift: Constants = np.zeros(weight.shape[-i])
    if isinstance(bias, Value):
        shift = bias.constants[-i]
    if shift is None:
        return None
    scaled_to_zero = weight.zero(weight.ndim - i)
    return np.where(scaled_to_zero, shift, np.nan)


def averaged(step: Step, label: ChannelMap, x: Value, dim: int) -> None:
    """The entries of a dimension over which a mean is taken stay; if means are counted,
    the entries that are not 0 do.
    """
    if step.log.counted:
        step.freeze(label, _NOT_ZERO, ~x.zero(dim))
    else:
        step.freeze(label, "takes its mean")


def group_norm(step: Step) -> Value:
    x = step.arguments["input"]
    groups = step.arguments["num_groups"]
    weight = step.arguments["weight"]
    bias = step.arguments["bias"]
    own = [value for value in (weight, bias) if isinstance(value, Value)]
    channels = x.shape[1]
    for label in x.labels[2:]:
        step.freeze(label, "takes its mean")
    scales = [value.labels[0] for value in own]
    label = step.join(x.labels[1], *scales)
    group, part = divided(step, label, groups, channels // groups, GROUPS)
    step.log.groups[step.node] = group
    if not step.log.counted:
        step.freeze(part, "takes its mean")
    elif channels > groups:  # whole groups go without a trace
        zero = x.zero(1).reshape(groups, -1)
        goes = zero | zero.all(1, keepdims=True)
        step.freeze(label, _NOT_ZERO, ~goes.reshape(-1))
    out: Value = step.outs
    labels = list(out.labels)
    constants = list(out.constants)
    labels[0] = x.labels[0]
    labels[1] = label
    constants[1] = _scaled(weight, bias, 1)
    return out.along(labels, constants)


def batch_norm(step: Step) -> Any:
    """With the statistics of training a channel goes with its scale, shift and
    statistics.
    """
    ins = values_in(step.arguments)
    x, *others = ins
    open_ = [d for d, label in enumerate(x.labels) if label is not None]
    labels = []
    for value in others:
        label = value.labels[0]
        if label is not None:
            labels.append(label)
    trains = step.arguments.get("training")
    if trains or open_ != [1] or len(labels) < len(others):
        return probed(step)
    size = x.shape[1]
    channels = product(None, len(others), x.labels[1], size)
    step.join(channels, np.concatenate(labels))
    out, *stats = values_in(step.outs)
    constants = list(out.constants)
    at = [1] + [0] * len(others)
    constants[1] = elementwise(step, ins, at, size)
    normed = out.along(x.labels, constants)
    return replaced(step.outs, [normed, *stats])


def mean_over(step: Step) -> Value:
    x = step.arguments["self"]
    over = mean_dims(step.arguments.get("dim"), x.ndim)
    labels = []
    for d, label in enumerate(x.labels):
        if d not in over:
            labels.append(label)
            continue
        averaged(step, label, x, d)
        if step.arguments.get("keepdim"):
            labels.append(None)
    out = step.outs.along(labels, step.outs.constants)
    (out,) = with_constants(step, [x], [out])
    return out


def mean_dims(dim: object, rank: int) -> list[int]:
    """The dimensions over which a mean is taken.

    >>> mean_dims(None, 2), mean_dims([-1], 3)
    ([0, 1], [2])
    """
    if dim is None or dim == []:
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else dim
    return sorted(d % rank for d in dims)  # type: ignore[attr-defined]
