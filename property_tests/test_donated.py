"""Every algorithm of the registry with its state given away, and bugs that the law must
notice.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from _pytest.outcomes import Failed

from property_tests.laws_donated import OPTIMIZERS, check
from property_tests.registry import ROWS
from sparsefn._engine.leaves import blockwise, lists, steps
from sparsefn.algorithms import frame
from sparsefn.core.state import has_optimizer, update_of
from sparsefn.core.tree import leaves_of
from sparsefn.testing import Row
from sparsefn.testing.introspection import first_state

# the package hands out the function
donated = importlib.import_module("sparsefn.algorithms.combine.donated")
with_optimizer = importlib.import_module("sparsefn.algorithms.combine.with_optimizer")
BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(autouse=True)
def small_leaves_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small leaves are otherwise left to torch, which writes nothing in place.
    monkeypatch.setattr(blockwise, "SMALL", 1)
    monkeypatch.setattr(lists, "PART_ON_CPU", 100)  # a part is a leaf


@pytest.mark.deep(
    but=[
        "gmp-adamw",
        "rigl-adamw",
        "ste-adamw",
        "supermask-adamw",
        "rigl block-adamw",
        "set-adamw",
    ]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if not has_optimizer(first_state(row))],
    ids=lambda row: row.name,
)
def test_donated_has_the_bits_of_the_pure_update(row: Row, optimizer: str) -> None:
    check(row, optimizer)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if has_optimizer(first_state(row))],
    ids=lambda row: row.name,
)
def test_so_has_an_algorithm_with_an_optimizer_of_its_own(row: Row) -> None:
    check(row, "sgd")


WRITE_ADAM, ZEROED = steps.write_adam, frame._zeroed


def _written_early(block: blockwise.Row) -> blockwise.Row:
    block[-1].fill(0)  # the new second moment
    return block


# bug: (module, name, its replacement)
BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "results are written over inputs that are read again": (
        steps,
        "write_adam",
        lambda step, sign, blocks: WRITE_ADAM(step, sign, map(_written_early, blocks)),
    ),
    "the old state stays": (donated, "empty", lambda tensors: None),
    "memory that others share is given away": (
        donated,
        "unshared_memory",
        lambda tensors, others: tensors,
    ),
    "no memory is given away": (donated, "unshared_memory", lambda tensors, others: []),
    "a tensor that the update hands on is emptied": (
        donated,
        "opened",
        lambda tree: (leaves_of(tree), lambda _: tree),
    ),
    "weights that are read again are offered": (
        with_optimizer,
        "update_of",
        lambda algorithm: update_of(algorithm)._replace(overwrites=True),
    ),
    "weights that start anew are written over": (
        frame,
        "_zeroed",
        lambda masks, leaves, overwrite: ZEROED(masks, leaves, True),
    ),
}
ROW_OF = {
    "unshared_memory": "one_shot saliency keep",
    "update_of": "sequence",
    "_zeroed": "rigl by momentum with rates",
}  # or "rigl"


@pytest.mark.parametrize("bug", BUGS)
def test_the_law_notices_the_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, replacement = BUGS[bug]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises((AssertionError, ValueError, Failed)):
        check(BY_NAME[ROW_OF.get(name, "rigl")], "adamw")
