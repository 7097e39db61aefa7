"""Linear layers and convolutions: what reads constants, which outputs are constant."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sparsefn.shrinking.atoms import Flags, Label, product
from sparsefn.shrinking.contractions import contract, shifted
from sparsefn.shrinking.moves import divided
from sparsefn.shrinking.steps import Fold, Step
from sparsefn.shrinking.values import Value

Array = npt.NDArray[np.float64]


class Sides(NamedTuple):
    """The groups of a layer, with the number of outputs and inputs of each, and in
    which dimensions of the weight.
    """

    groups: int
    outputs: int
    inputs: int
    # the weight is (inputs, outputs, ...), as those of transposed convolutions
    turned: bool


def linear_layer(step: Step) -> Value:
    x, w, bias = (step.arguments[name] for name in ("input", "weight", "bias"))
    lead = "abcdefgh"[: len(x.shape) - 1]
    if len(w.shape) != 2:
        return contract(step, [lead + "i", "i"], [x, w], lead, bias)
    label = step.join(x.labels[-1], w.labels[1]) if x.shape[-1] > 1 else None
    return _layer(
        step,
        x,
        len(x.shape) - 1,
        label,
        w.labels[0],
        w,
        bias,
        Sides(1, w.shape[0], w.shape[1], False),
        True,
    )


def addmm(step: Step) -> Value | None:
    """A linear layer that holds its weight transposed.

    It is None for products of other things.
    """
    bias, x, w = (step.arguments[name] for name in ("self", "mat1", "mat2"))
    if (
        w.name is None
        or len(bias.shape) != 1
        or step.arguments["beta"] != 1
        or step.arguments["alpha"] != 1
    ):
        return None
    label = step.join(x.labels[1], w.labels[0]) if x.shape[1] > 1 else None
    return _layer(
        step,
        x,
        1,
        label,
        w.labels[1],
        w,
        bias,
        Sides(1, w.shape[1], w.shape[0], True),
        True,
    )


def convolution(step: Step) -> Value:
    """Convolutions of any rank, grouped, depthwise and transposed."""
    x, w, bias = (step.arguments[name] for name in ("input", "weight", "bias"))
    groups = step.arguments["groups"]
    turned = step.arguments.get("transposed", "transpose" in step.name)
    # without a batch dimension channels come first
    at = len(x.shape) - len(w.shape) + 1
    for label in (*x.labels[at + 1 :], *w.labels[2:]):
        step.freeze(label, "mixes its entries")
    c = x.labels[at]
    o = w.labels[1 if turned else 0]
    i = w.labels[0 if turned else 1]
    inputs = x.shape[at] // groups
    outputs = w.shape[1] if turned else w.shape[0] // groups
    if groups == 1 or turned:
        c = step.join(c, i) if x.shape[at] > 1 else None
    if groups > 1:
        group, part = divided(step, c, groups, inputs, (2, 1))
        if turned:
            o = product(group, groups, o if outputs > 1 else None, outputs)
        else:
            group = step.join(group, divided(step, o, groups, outputs, (2, 1))[0])
            if inputs > 1:
                step.join(part, i)
        step.book.groups[step.node] = group
    padding = step.arguments.get("padding", 0)
    plain = not turned and (
        padding == "valid" or not any(np.atleast_1d(padding).tolist())
        if padding != "same"
        else False
    )
    return _layer(
        step, x, at, c, o, w, bias, Sides(groups, outputs, inputs, turned), plain
    )


def _layer(
    step: Step,
    x: Value,
    at: int,
    c: Label,
    o: Label,
    w: Value,
    bias: Any,
    sides: Sides,
    plain: bool,
) -> Value:
    # `plain`: every output reads every input as often, so that constants give
    # constants.
    size = sides.groups * sides.outputs
    constants = _known(x, at, plain)
    matrix = _matrix(step, w, sides)
    if matrix is None:
        unread, rows = _flags(w, sides)
        made = np.where(rows, 0.0, np.nan)
    else:
        kept, sums = matrix
        unread = ~kept.any(1).reshape(-1)
        inner = constants.reshape(sides.groups, 1, sides.inputs)
        varies = (kept & np.isnan(inner)).any(2).reshape(-1)
        made = np.where(
            varies, np.nan, (sums * np.nan_to_num(inner)).sum(2).reshape(-1)
        )
        if _takes(step, bias, size) and c is not None and np.isfinite(constants).any():
            step.book.folds.append(Fold(bias.name, sums, constants, c))
            constants = np.where(np.isnan(constants), np.nan, 0.0)
    step.sums(c, unread | (constants == 0))
    out: Value = step.outs
    rest = len(out.shape) - at - 1
    labels = (*x.labels[:at], o if size > 1 else None, *([None] * rest))
    gone = (*([None] * at), made if size > 1 else None, *([None] * rest))
    if isinstance(bias, Value) and rest:
        nothing = [None] * rest
        bias = bias._replace(
            shape=(size, *[1] * rest),
            labels=(*bias.labels, *nothing),
            gone=(*bias.gone, *nothing),
        )
    return shifted(step, out._replace(labels=labels, gone=gone), bias)


def _known(x: Value, at: int, plain: bool) -> Array:
    gone = x.gone[at]
    known = np.full(x.shape[at], np.nan) if gone is None else gone
    return known if plain else np.where(known == 0, 0.0, np.nan)


def _matrix(step: Step, w: Value, sides: Sides) -> tuple[Flags, Array] | None:
    # Which weights of (group, output, input) are kept, and their sums over the kernel,
    # where masks are given.
    if step.book.masks is None or w.real is None:
        return None
    shape = (
        (sides.groups, sides.inputs, sides.outputs)
        if sides.turned
        else (sides.groups, sides.outputs, sides.inputs)
    )
    swap = (0, 2, 1) if sides.turned else (0, 1, 2)
    rows = w.real.double().reshape(*shape, -1)
    kept = (
        torch.ones_like(rows, dtype=torch.bool)
        if w.mask is None
        else w.mask.reshape(rows.shape)
    )
    return kept.any(-1).numpy().transpose(swap), rows.sum(-1).numpy().transpose(swap)


def _flags(w: Value, sides: Sides) -> tuple[Flags, Flags]:
    # Which inputs no weight reads, and which outputs no weight makes, as the weight's
    # own dimensions tell.
    if sides.groups == 1:
        return (w.zero(0), w.zero(1)) if sides.turned else (w.zero(1), w.zero(0))
    size = sides.outputs if sides.turned else sides.inputs  # of a group, in dimension 1
    parts = [np.tile(w.zero(1), sides.groups)] if size > 1 else []
    whole = np.all(
        [*parts, np.repeat(w.zero(0).reshape(sides.groups, -1).all(1), size)], 0
    )
    return (w.zero(0), whole) if sides.turned else (whole, w.zero(0))


def _takes(step: Step, bias: Any, size: int) -> bool:
    # Whether a bias may take in what constant inputs give: a vector that is read in
    # this place alone.
    return (
        isinstance(bias, Value)
        and bias.name is not None
        and bias.reads == 1
        and bias.shape == (size,)
    )
