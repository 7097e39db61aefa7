"""The random networks notice every bug that is planted in what makes models narrower
and shorter.
"""

import pytest

from property_tests import mutants_residuals
from property_tests.mutants_residuals import RESIDUALS, ResidualMutant
from property_tests.mutants_shrinking import (
    SHRINKING,
    ShrinkingMutant,
    case_of,
    fault,
    noticed,
    proof_says,
)

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("mutant", SHRINKING, ids=lambda mutant: mutant.bug)
def test_the_networks_notice_the_bug(mutant: ShrinkingMutant) -> None:
    number, _, text = noticed(mutant).partition(": ")
    assert number, f"not noticed: {mutant.bug}"
    case = case_of(mutant.steps, int(number))
    assert not fault(case, (), int(number)), "nothing is planted there"
    # gives other outputs: of what `shrink` runs its example in float64 is enough
    if "the program: " in text:
        says = proof_says(mutant, int(number))
        assert says.startswith(("gives", "fails")) and "on other inputs" not in says


@pytest.mark.parametrize("mutant", RESIDUALS, ids=lambda mutant: mutant.bug)
def test_residual_networks_notice_the_bug(mutant: ResidualMutant) -> None:
    assert mutants_residuals.noticed(mutant), f"not noticed: {mutant.bug}"
