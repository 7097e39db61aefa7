"""Tables: rows that any input may ask for stay, and the other dimensions pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparsefn.shrinking.moves import Reading, read_off
from sparsefn.shrinking.steps import Step
from sparsefn.shrinking.values import Value


def embedding(step: Step) -> Value:
    w = step.arguments["weight"]
    at = step.arguments["indices"]
    step.freeze(w.labels[0], "looks up any of its rows")
    out: Value = step.outs
    rest = [None] * len(at.shape)
    return out._replace(labels=(*at.labels, w.labels[1]), gone=(*rest, w.gone[1]))


def index(step: Step) -> Value:
    """x[indices]: known numbers move data, unknown ones may ask for any entry."""
    x = step.arguments["self"]
    given = step.arguments["indices"]
    at = {d: i for d, i in enumerate(given) if i is not None}
    return _looked_up(step, x, at)


def index_select(step: Step) -> Value:
    x = step.arguments["self"]
    return _looked_up(
        step, x, {step.arguments["dim"] % len(x.shape): step.arguments["index"]}
    )


def _looked_up(step: Step, x: Value, at: dict[int, Value]) -> Value:
    out: Value = step.outs
    labels: list[Any] = [None] * len(out.shape)
    gone: list[Any] = [None] * len(out.shape)
    for i in at.values():
        for label in i.labels:
            step.freeze(label, "is looked up by it")
    (dim, only) = next(iter(at.items()))
    several = len(at) > 1
    if several or only.real is None or only.dtype == torch.bool or len(only.shape) != 1:
        for d in at:
            step.freeze(x.labels[d], "looks up any of its entries")
    else:
        wanted = only.real.numpy() % x.shape[dim]
        rows = x.labels[dim]
        if rows is not None:
            piece = read_off(step, Reading((0,), wanted), rows, x.gone[dim])[0]
            labels[dim] = piece.rows if piece.rows.shape[1] else None
            gone[dim] = piece.gone
    # The indices lie where the first of them is if they are neighbours, else in front.
    dims = sorted(at)
    broadcast = len(np.broadcast_shapes(*(i.shape for i in at.values())))
    if any(i.dtype == torch.bool for i in at.values()):
        for label in x.labels:
            step.freeze(label, "looks up any of its entries")
        return out
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    left = [d for d in range(len(x.shape)) if d not in at]
    places = [*left[:first], *([None] * broadcast), *left[first:]]
    for e, place in enumerate(places):
        if place is not None:
            labels[e] = x.labels[place]
            gone[e] = x.gone[place]
    return out._replace(labels=tuple(labels), gone=tuple(gone))
