"""The suite has teeth: every law notices the bugs planted for it, and holds on the healthy counterparts."""

import pytest

from property_tests import laws, laws_primitives
from property_tests.mutants import MUTANTS, PRIMITIVES, notices, primitive_notices
from property_tests.mutants_primitives import PrimitiveMutant
from property_tests.planting import Mutant

LAWS = {law.name: law for law in [*laws.LAWS, *laws.SLOW]}
PRIMITIVE_LAWS = {law.name: law for law in laws_primitives.LAWS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.law}-{mutant.bug}")
def test_the_law_notices_the_bug(mutant: Mutant) -> None:
    law = LAWS[mutant.law]
    assert law.binds(mutant.row.meta)
    assert not notices(law, mutant.healthy, mutant.bug)
    assert notices(law, mutant.row, mutant.bug, mutant.raises), f"{law.name} does not notice: {mutant.bug}"


@pytest.mark.parametrize("mutant", PRIMITIVES, ids=lambda mutant: f"{mutant.law}-{mutant.bug}")
def test_the_law_of_a_primitive_notices_the_bug(mutant: PrimitiveMutant) -> None:
    assert primitive_notices(PRIMITIVE_LAWS[mutant.law], mutant), f"{mutant.law} does not notice: {mutant.bug}"


def test_every_law_has_a_bug_to_notice() -> None:
    assert {mutant.law for mutant in MUTANTS} == set(LAWS)
    assert {mutant.law for mutant in PRIMITIVES} == set(PRIMITIVE_LAWS)
