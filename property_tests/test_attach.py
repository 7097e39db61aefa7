"""Every algorithm of the registry around torch's optimizers, and bugs that the law must notice."""

from collections.abc import Callable
from typing import Any

import pytest

import sparsefn as sf
from property_tests.laws_attach import PAIRS, check
from property_tests.registry import ROWS
from sparsefn.attached import attached
from sparsefn.testing import Row

BY_NAME = {row.name: row for row in ROWS}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("row", [row for row in ROWS if not row.meta.optimizer], ids=lambda row: row.name)
def test_attach_is_with_optimizer(row: Row, pair: str) -> None:
    check(row, PAIRS[pair])


def dense_gradients(state: Any, grads: Any, step: Any) -> Any:
    return grads


# bug: (row, name in sparsefn.attached.attached, its replacement)
BUGS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "moments of pruned and grown weights are kept": ("rigl", "clear_moments", lambda slot, live: None),
    "moments of grown weights are kept": (
        "power rigl",
        "live_entries",
        lambda support, before, weight, stepped: support,
    ),
    "params are taken to be what the module shows": ("ste", "_hiding", lambda state, masks, params, shown: set()),
    "the module shows params": ("ste", "effective", lambda state: state.params),
    "every gradient is taken not to be finite": ("rigl", "all_finite", lambda grads: False),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_law_notices_the_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, name, replacement = BUGS[bug]
    monkeypatch.setattr(attached, name, replacement)
    with pytest.raises(AssertionError):
        for pair in PAIRS.values():
            check(BY_NAME[row], pair)


def test_the_law_notices_gradients_that_are_not_masked() -> None:
    def unmasked(algorithm: Any, model: Any, optimizer: Any) -> Any:
        return sf.attach(algorithm._replace(view=algorithm.view._replace(grads=dense_gradients)), model, optimizer)

    with pytest.raises(AssertionError):
        check(BY_NAME["static"], PAIRS["sgd"], attach=unmasked)
