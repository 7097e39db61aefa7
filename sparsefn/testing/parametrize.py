"""One pytest test for each check of each algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sparsefn.core.state import Algorithm
from sparsefn.testing.introspection import completed
from sparsefn.testing.laws import LAWS, Law, bound
from sparsefn.testing.meta import Meta, Row, row_of

F = TypeVar("F", bound=Callable[..., Any])


def parametrize_laws(
    rows: Sequence[Row | tuple[Callable[..., Algorithm], Meta]],
    *,
    expected_failures: Mapping[str, str] = {},
    strict: bool = True,
    laws: Sequence[Law] = LAWS,
) -> Callable[[F], F]:
    """Decorate a test of (law, check, row), which pytest then runs for each row.

    >>> def halve(sparsity, key):
    ...     return sf.gmp(sparsity, when=sf.every(2))
    >>> @sf.testing.parametrize_laws(
    ...     [(halve, sf.testing.Meta(when=sf.every(2), start="magnitude"))]
    ... )
    ... def test_laws(law, check, row):
    ...     sf.testing.check_row(law, check, row)

    Args:
        rows: The algorithms: each a `Row`, or a function as `check_laws` takes it with
            its `Meta`.
        expected_failures: Reasons by the name of a check, or by `check-row` for one row
            alone.
        strict: Whether an expected failure that passes all the same fails.
        laws: The laws to check. Default: all.

    Returns:
        A decorator. There is a test for each check that binds a row, named `check-row`.

    Raises:
        ValueError: No test has a name of `expected_failures`.
        TypeError: A row is something else.
        ModuleNotFoundError: pytest is not installed.
    """
    import pytest

    made = [
        completed(row if isinstance(row, Row) else row_of(*_pair(row))) for row in rows
    ]
    tests = [
        (law, check, row, f"{check.name}-{row.name}")
        for row in made
        for law, check in bound(row.meta, laws)
    ]
    unknown = set(expected_failures) - {
        name for _, check, _, test in tests for name in (check.name, test)
    }
    if unknown:
        raise ValueError(
            f"expected_failures: no check is named {', '.join(sorted(unknown))}"
        )

    def marks(*names: str) -> list[Any]:
        from sparsefn.testing.check import Broken

        reasons = [
            expected_failures[name] for name in names if name in expected_failures
        ]
        return [
            pytest.mark.xfail(reason=reason, strict=strict, raises=Broken)
            for reason in reasons[:1]
        ]

    params = [
        pytest.param(*test[:3], id=test[3], marks=marks(test[3], test[1].name))
        for test in tests
    ]
    return pytest.mark.parametrize(("law", "check", "row"), params)


def _pair(row: object) -> tuple[Callable[..., Algorithm], Meta]:
    if not (isinstance(row, tuple) and len(row) == 2):
        raise TypeError(
            "expected rows of sf.testing.Row, or of (make_algorithm, meta), got "
            f"{type(row).__name__}"
        )
    return row
