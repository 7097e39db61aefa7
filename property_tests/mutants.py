"""Planted bugs, and the laws that must notice them.

`python -m property_tests.mutants` prints which laws notice which of them, in some minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from property_tests import laws_primitives
from property_tests.effort import seed, tries
from property_tests.laws_primitives import PrimitiveLaw
from property_tests.mutants_masks import MASKS
from property_tests.mutants_primitives import PRIMITIVES, PrimitiveMutant
from property_tests.mutants_states import STATES
from sparsefn.testing import LAWS, Check, Row
from sparsefn.testing.harness import hold
from sparsefn.testing.laws import COMPILE

MUTANTS = MASKS + STATES


def notices(check: Check, row: Row, bug: str, raises: type[Exception] = AssertionError) -> bool:
    """Whether the check fails on the row, on as many examples as it gets on a few rows."""
    try:
        hold(
            f"{bug} {check.name}",
            lambda case: check.run(row, case),
            check.examples(row.meta, None),
            tries(),
            seed(),
            False,
        )
    except raises:
        return True
    return False


def primitive_notices(law: PrimitiveLaw, mutant: PrimitiveMutant) -> bool:
    try:
        hold(mutant.bug, lambda x: law.check(mutant.subject, x), law.examples, law.share * tries(), seed(), False)
    except AssertionError:
        return True
    return False


def matrix() -> Iterator[str]:
    """One line a mutant, one column a law: X where the law that must notice does, x where another one does."""
    columns = [check for law in LAWS if law is not COMPILE for check in law.checks]
    yield from (f"{i:2} {law.name}" for i, law in enumerate(columns))
    yield "\n" + " ".join(f"{i:2}" for i in range(len(columns)))
    for planted in MUTANTS:
        marks = []
        for law in columns:
            found = law.binds(planted.row.meta) and notices(law, planted.row, planted.bug, Exception)
            marks.append(" ." if not found else " X" if law.name == planted.law else " x")
        yield f"{' '.join(marks)}  {planted.row.name}: {planted.bug}"
    yield ""
    for primitive in PRIMITIVES:
        (known,) = (law for law in laws_primitives.LAWS if law.name == primitive.law)
        yield f"{' X' if primitive_notices(known, primitive) else ' .'}  {known.name}: {primitive.bug}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # what a broken algorithm warns of is not the point
    for line in matrix():
        print(line, flush=True)
