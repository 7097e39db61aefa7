"""The laws of the primitives over the functions that the library ships."""

from typing import Any

import pytest

from property_tests.effort import seed, tries
from property_tests.laws_primitives import LAWS, PrimitiveLaw
from sparsefn.testing.harness import hold

BOUND = [
    pytest.param(law, name, id=f"{law.name}-{name}")
    for law in LAWS
    for name in law.subjects
]


@pytest.mark.parametrize(("law", "name"), BOUND)
def test_laws_hold(law: PrimitiveLaw, name: str) -> None:
    subject: Any = law.subjects[name]
    hold(
        f"{law.name} {name}",
        lambda example: law.check(subject, example),
        law.examples,
        law.share * tries(),
        seed(),
    )
