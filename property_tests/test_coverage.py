"""The laws' cases are hard enough: a stated share has ties, NaN, empty leaves, halves
of a unit and more.
"""

import pytest
from hypothesis.strategies import SearchStrategy

from property_tests.effort import seed
from property_tests.registry import ROWS
from sparsefn.testing import Case, Form, coverage
from sparsefn.testing.byte_trees import EVERY, EXACT
from sparsefn.testing.harness import hold
from sparsefn.testing.laws import drawn
from sparsefn.testing.strategies import cases

CASES = 400
# What these strategies cannot have, or need not: leaves of a pattern that accepts no
# empty ones, values without ties.
LACKS = {"blocks": {"empty leaf"}, "distinct": {"ties", "nan"}}
STRATEGIES: dict[str, SearchStrategy[Case]] = {
    "every": cases(palettes=EVERY),
    "exact": cases(palettes=EXACT),
    "distinct": cases(distinct=True),
    "blocks": cases(Form(rows=2, columns=2, least=2)),
}


def below(found: list[Case]) -> set[str]:
    """The traits that fewer cases have than the least share says; `coverage.missing`
    leaves room for chance.
    """
    shares = coverage.trait_shares(coverage.of_cases(found))
    return {trait for trait, share in coverage.LEAST.items() if shares[trait] < share}


def short(strategy: SearchStrategy[Case], n: int = CASES) -> set[str]:
    """The traits of which too few cases of a strategy have one."""
    found: list[Case] = []
    hold("coverage", found.append, strategy, n, seed())
    assert len(found) >= 0.9 * n  # Hypothesis ends early where it has seen everything
    return below(found)


@pytest.mark.deep(but=["exact"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_enough_cases_have_each_trait(name: str) -> None:
    assert short(STRATEGIES[name]) == LACKS.get(name, set())


def test_a_run_of_all_rows_has_each_trait() -> None:
    """A few of each row's own cases, together."""
    found: list[Case] = []
    for row in ROWS:
        hold(
            f"coverage {row.name}",
            found.append,
            drawn(row.meta),
            5,
            seed(),
        )
    assert below(found) == set()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("poor", "lacks"),
    [
        (cases(palettes=["exact"]), {"nan"}),
        (cases(Form(least=1)), {"empty leaf"}),
        (cases().map(lambda case: case._replace(sparsity=0.3)), {"half of a unit"}),
    ],
    ids=["values", "shapes", "sparsities"],
)
def test_a_poor_strategy_is_noticed(
    poor: SearchStrategy[Case], lacks: set[str]
) -> None:
    assert short(poor) == lacks
