"""Every algorithm of the registry with its updates replayed from a tape, and bugs that
the law must notice.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsefn as sf
from property_tests import laws_donated
from property_tests.laws_captured import check, check_elsewhere
from property_tests.registry import ROWS
from property_tests.tape import Tape, TapeElsewhere
from property_tests.test_devices import OWN, there
from property_tests.transforms import METHODS
from sparsefn.algorithms.combine import cuda_graphs, replays
from sparsefn.testing import Row

BY_NAME = {row.name: row for row in [*ROWS, *METHODS]}
# their scores read data, which lie on the CPU here
READ_DATA = {"methods: wanda", "methods: ria", "methods: obd"}
QUICK = [
    "gmp",
    "rigl",
    "set",
    "ste",
    "supermask",
    "sequence",
    "phases to rigl",
    "partition",
    "one_shot hutchinson",
    "adam rigl",
    "methods: granet",
]


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_graphs.GRAPHS, "cpu", lambda device: Tape)
    monkeypatch.setitem(cuda_graphs.GRAPHS, "meta", lambda device: TapeElsewhere)
    # torch knows no autocast for "meta"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)


@pytest.mark.deep(
    but=[f"{name}-{way}" for name in QUICK for way in ("bare", "trained")]
)
@pytest.mark.parametrize("trained", [False, True], ids=["bare", "trained"])
@pytest.mark.parametrize("row", [*ROWS, *METHODS], ids=lambda row: row.name)
def test_captured_has_the_bits_of_eager(row: Row, trained: bool) -> None:
    check(row, trained=trained)


@pytest.mark.deep(but=QUICK)
@pytest.mark.parametrize(
    "row",
    [row for row in [*ROWS, *METHODS] if row.name not in READ_DATA],
    ids=lambda row: row.name,
)
def test_every_update_can_be_captured_on_a_device(row: Row) -> None:
    make = OWN.get(row.name, row.make)
    check_elsewhere(row._replace(make=make), there)


@pytest.mark.parametrize("name", ["rigl", "one_shot saliency keep", "methods: imp"])
def test_replays_write_to_a_state_that_is_donated(name: str) -> None:
    laws_donated.check(
        BY_NAME[name], "adamw", lambda algorithm: sf.donated(sf.captured(algorithm))
    )


# ---- bugs ----------------------------------------------------------------------------

STRUCTURE, CAPTURED = replays._Structure, replays._Captured
WRITE, CAPTURE = STRUCTURE.write, STRUCTURE.capture


def write_no_step(self: Any, given: Any, step: Any) -> None:
    WRITE(self, given, 0)


def write_once(self: Any, given: Any, step: Any) -> None:
    if not self._all:
        WRITE(self, given, step)


def write_no_key(self: Any, given: Any, step: Any) -> None:
    pairs = zip(self._inputs, given, strict=True)
    kept = [old if old.dtype == torch.int64 and self._all else x for old, x in pairs]
    WRITE(self, kept, step)


def capture_with_an_int(self: Any, inner: Any, state: Any, number: Any) -> Any:
    return CAPTURE(self, lambda old, grads, step: inner(old, grads, 2), state, number)


def results_without_copies(self: Any, given: Any) -> Any:
    made = [given[x] if isinstance(x, int) else x for x in self.made]
    return self.rebuild(made)


# bug: (row, class, method, its replacement)
BUGS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "the step is that of the capture": ("gmp", STRUCTURE, "write", write_no_step),
    "a number of Python is in the graph": (
        "gmp",
        STRUCTURE,
        "capture",
        capture_with_an_int,
    ),
    "inputs are those of the capture": ("rigl", STRUCTURE, "write", write_once),
    "the key is that of the capture": ("set", STRUCTURE, "write", write_no_key),
    "results are where the next replay writes": (
        "rigl",
        CAPTURED,
        "results",
        results_without_copies,
    ),
    "one graph serves all triggers": (
        "gmp",
        CAPTURED,
        "serves",
        lambda self, number: True,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_law_notices_the_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, of, name, replacement = BUGS[bug]
    check(BY_NAME[row])
    monkeypatch.setattr(of, name, replacement)
    with pytest.raises(AssertionError, match="differs at"):
        check(BY_NAME[row])
