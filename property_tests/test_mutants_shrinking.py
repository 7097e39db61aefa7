"""The random networks notice every bug that is planted in what makes models smaller."""

import pytest

from property_tests.mutants_shrinking import (
    SHRINKING,
    ShrinkingMutant,
    noticed,
    proof_says,
)

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("mutant", SHRINKING, ids=lambda mutant: mutant.bug)
def test_the_networks_notice_the_bug(mutant: ShrinkingMutant) -> None:
    number, _, text = noticed(mutant).partition(": ")
    assert number, f"not noticed: {mutant.bug}"
    # gives other outputs: of what `shrink` runs its example in float64 is enough
    if "the program: " in text:
        says = proof_says(mutant, int(number))
        assert says.startswith(("gives", "fails")) and "on other inputs" not in says


@pytest.mark.parametrize(
    "steps", sorted({mutant.steps for mutant in SHRINKING}), ids=str
)
def test_nothing_is_noticed_where_nothing_is_planted(steps: tuple[str, ...]) -> None:
    assert not noticed(ShrinkingMutant("nothing", (), steps))
