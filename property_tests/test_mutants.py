"""The suite has teeth: every law notices the bugs planted for it, and holds on the
healthy counterparts.
"""

import pytest

from property_tests import laws_primitives
from property_tests.effort import tries
from property_tests.mutants import MUTANTS, PRIMITIVES, notices, primitive_notices
from property_tests.mutants_primitives import PrimitiveMutant
from property_tests.planting import Mutant
from sparsefn.testing import LAWS
from sparsefn.testing.laws import COMPILE

CHECKS = {check.name: check for law in LAWS for check in law.checks}
PRIMITIVE_LAWS = {law.name: law for law in laws_primitives.LAWS}


@pytest.mark.deep
@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.law}-{mutant.bug}"
)
def test_the_law_notices_the_bug(mutant: Mutant) -> None:
    check = CHECKS[mutant.law]
    assert check.binds(mutant.row.meta)
    # test_compile.py compiles the healthy ones, which is slow
    if check not in COMPILE.checks:
        assert not notices(check, mutant.healthy, mutant.bug)
    # Which examples come first changes with every constant of the library.
    examples = 4 * tries()
    assert notices(check, mutant.row, mutant.bug, mutant.raises, examples), (
        f"{check.name} does not notice: {mutant.bug}"
    )


@pytest.mark.deep
@pytest.mark.parametrize(
    "mutant", PRIMITIVES, ids=lambda mutant: f"{mutant.law}-{mutant.bug}"
)
def test_the_law_of_a_primitive_notices_the_bug(mutant: PrimitiveMutant) -> None:
    assert primitive_notices(PRIMITIVE_LAWS[mutant.law], mutant), (
        f"{mutant.law} does not notice: {mutant.bug}"
    )


def test_every_law_has_two_bugs_to_notice() -> None:
    for law in LAWS:
        assert (
            sum(mutant.law == check.name for check in law.checks for mutant in MUTANTS)
            >= 2
        ), law.name
    assert {mutant.law for mutant in MUTANTS} == set(CHECKS)
    assert {mutant.law for mutant in PRIMITIVES} == set(PRIMITIVE_LAWS)
