"""The laws of `sf.methods`: each method is held to all that bind it, on a few examples a check.

The parts that methods are made of have rows in `registry.py`, where every check gets its full number of examples.
"""

from typing import Any

import pytest

import sparsefn as sf
from property_tests.registry import (
    EXAMPLES,
    GRASP,
    ITERATIVE,
    PRUNE,
    SALIENCY,
    SHOT,
    SYNFLOW,
    quadratic,
    weighed,
)
from sparsefn.state import Schedule
from sparsefn.testing import LAWS, Row, check_laws
from sparsefn.testing.laws import COMPILE

EVEN, FIRST = sf.every(2), sf.at([0])
GLOBAL: dict[str, Any] = {"distribution": sf.budgets.global_(), "global_budget": True, "independent": False}
STARTED = SHOT._replace(when=FIRST, needs_grads=True, permutes=False, **GLOBAL)
SUMMED = sf.scores.absolute(sf.scores.sum(sf.scores.movement))
TWO = sf.every(1, stop=2)


def in_two(sparsity: Any) -> Schedule:
    return sf.schedules.geometric(sparsity, 2)


def turning(sparsity: Any) -> Schedule:
    return lambda step: sparsity if step == 0 else 0.0


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
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_laws_hold(row: Row) -> None:
    laws = [law for law in LAWS if law is not COMPILE]
    assert len(check_laws(row.make, meta=row.meta, max_examples=5, laws=laws)) >= 6
