"""The laws of `sf.methods`: each method is held to all that bind it, on a few examples a check.

The parts that methods are made of have rows in `registry.py`, where every check gets its full number of examples.
"""

from typing import Any

import pytest

import sparsefn as sf
from property_tests.layouts import ROW_BALANCED
from property_tests.registry import (
    EXAMPLES,
    FADING,
    GRASP,
    ITERATIVE,
    MAGNITUDE,
    PRUNE,
    SALIENCY,
    SHOT,
    SYNFLOW,
    quadratic,
    swap,
    weighed,
)
from sparsefn.state import Schedule
from sparsefn.testing import LAWS, Meta, Row, check_laws
from sparsefn.testing.laws import COMPILE

EVEN, FIRST = sf.every(2), sf.at([0])
GLOBAL: dict[str, Any] = {"distribution": sf.budgets.global_(), "global_budget": True, "independent": False}
STARTED = SHOT._replace(when=FIRST, needs_grads=True, permutes=False, **GLOBAL)
SUMMED = sf.scores.absolute(sf.scores.sum(sf.scores.movement))
DRAWN = Meta(when=EVEN, start="random", stochastic=True, redraws=True, permutes=False)
TWO = sf.every(1, stop=2)


def in_two(sparsity: Any) -> Schedule:
    return lambda step: 1.0 - (1.0 - sparsity) ** 0.5 if step == 0 else sparsity


def turning(sparsity: Any) -> Schedule:
    return lambda step: sparsity if step == 0 else 0.0


def rising(sparsity: Any) -> Schedule:
    return sf.schedules.polynomial(0.0, sparsity, begin=0, end=4)


def lower(sparsity: Any) -> Schedule:
    return lambda step: max(sparsity - 0.25, 0.0)


def even_rows(shapes: Any, sparsity: Any) -> Any:
    """As many in every row, rounded down."""
    counts = sf.budgets.uniform()(shapes, sparsity)
    return {path: counts[path] // max(shape[0], 1) * shape[0] for path, shape in shapes.items()}


ROWS = [
    # at the start
    Row("snip", lambda s, key, _: sf.methods.snip(s), STARTED._replace(choose=SALIENCY)),
    Row(
        "snip of two batches",
        lambda s, key, _: sf.methods.snip(s, batches=2),
        STARTED._replace(when=sf.at([1]), choose=SUMMED, idle=False),
    ),
    Row(
        "force",
        lambda s, key, _: sf.methods.force(s, rounds=2),
        STARTED._replace(when=TWO, level=in_two, choose=SALIENCY, pruned="keep", monotone=False),
    ),
    Row(
        "force without a way back",
        lambda s, key, _: sf.methods.force(s, rounds=2, recover=False),
        STARTED._replace(when=TWO, level=in_two, choose=SALIENCY),
    ),
    Row(
        "grasp",
        lambda s, key, _: sf.methods.grasp(s, quadratic, lambda step: (EXAMPLES[:1],)),
        SHOT._replace(when=FIRST, choose=GRASP, **GLOBAL),
    ),
    Row(
        "synflow",
        lambda s, key, _: sf.methods.synflow(s, weighed, (1,), rounds=2),
        SHOT._replace(when=TWO, level=in_two, choose=SYNFLOW, **GLOBAL),
    ),
    # lottery tickets
    Row(
        "imp",
        lambda s, key, _: sf.methods.imp(s, when=EVEN, to=FIRST),
        ITERATIVE._replace(baseline=lambda: sf.methods.imp(0.0, when=EVEN, to=FIRST), **GLOBAL),
    ),
    # by turns
    Row(
        "ac_dc",
        lambda s, key, _: sf.methods.ac_dc(s, sparse=FIRST, dense=sf.at([2])),
        PRUNE._replace(when=EVEN, level=turning, start="dense", monotone=False, **GLOBAL),
    ),
    # masks that move
    Row(
        "set by sign",
        lambda s, key, _: sf.methods.set(s, key=key, by_sign=True, **swap),
        DRAWN._replace(when=sf.always(), drop=sf.scores.ranked(MAGNITUDE), fraction=FADING, conserves_count=True),
    ),
    Row(
        "granet",
        lambda s, key, _: sf.methods.granet(s, steps=4, initial=0.0, when=EVEN),
        Meta(level=rising, when=EVEN, start="dense", needs_grads=True, permutes=False, **GLOBAL),
    ),
    Row(
        "mest",
        lambda s, key, _: sf.methods.mest(s, extra=0.25, when=EVEN, key=key),
        DRAWN._replace(baseline=None),
    ),
    Row(
        "mest with a soft bound",
        lambda s, key, _: sf.methods.mest(s, extra=0.25, soft=True, gradient=0.5, when=EVEN, key=key),
        DRAWN._replace(level=lower, needs_grads=True, baseline=None),
    ),
    Row(
        "top_kast",
        lambda s, key, _: sf.methods.top_kast(0.5 * s, backward=0.25 * s, decay=0.5, when=EVEN),
        Meta(
            level=lambda s: sf.schedules.constant(0.5 * s),
            support=lambda s: sf.schedules.constant(0.25 * s),
            when=EVEN,
            start="magnitude",
            choose=MAGNITUDE,
            pruned="train",
            baseline=lambda: sf.with_terms(sf.dense(), sf.terms.l2(0.5)),
        ),
    ),
    Row(
        "srigl without ablation",
        lambda s, key, _: sf.methods.srigl(s, steps=9, ablation=0.0, drop_fraction=0.4, when=EVEN, key=key),
        DRAWN._replace(pattern=ROW_BALANCED, distribution=even_rows, needs_grads=True, redraws=False),
    ),
    Row(
        "srigl",
        lambda s, key, _: sf.methods.srigl(s, steps=9, drop_fraction=0.4, when=EVEN, key=key),
        DRAWN._replace(exact_count=False, needs_grads=True, redraws=False, baseline=None),
    ),
    Row(
        "deep_rewiring",
        lambda s, key, _: sf.methods.deep_rewiring(s, key=key),
        DRAWN._replace(when=sf.always(), redraws=False, scale_free=False, baseline=None),
    ),
    Row(
        "dsr",
        lambda s, key, _: sf.methods.dsr(s, when=EVEN, target=2, tau=1.0, key=key),
        DRAWN._replace(global_budget=True, independent=False, scale_free=False),
    ),
    Row(
        "chts",
        lambda s, key, _: sf.methods.chts(s, steps=4, when=EVEN, key=key),
        DRAWN._replace(scale_free=False, baseline=None),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_laws_hold(row: Row) -> None:
    laws = [law for law in LAWS if law is not COMPILE]
    assert len(check_laws(row.make, meta=row.meta, max_examples=5, laws=laws)) >= 6
