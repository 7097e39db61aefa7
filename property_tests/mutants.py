"""Planted bugs, and the laws that must notice them.

`python -m property_tests.mutants` prints which checks notice which of them, and counts
them by law, in some minutes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
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


def notices(
    check: Check,
    row: Row,
    bug: str,
    raises: type[Exception] = AssertionError,
    examples: float | None = None,
) -> bool:
    """Whether the check fails on the row, on as many examples as it gets on a few
    rows.
    """
    try:
        hold(
            f"{bug} {check.name}",
            lambda case: check.run(row, case),
            check.examples(row.meta, None),
            tries() if examples is None else examples,
            seed(),
            False,
        )
    except raises:
        return True
    return False


def primitive_notices(law: PrimitiveLaw, mutant: PrimitiveMutant) -> bool:
    try:
        hold(
            mutant.bug,
            lambda x: law.check(mutant.subject, x),
            law.examples,
            law.share * tries(),
            seed(),
            False,
        )
    except AssertionError:
        return True
    return False


def matrix(others: int) -> Iterator[str]:
    """One line a mutant, one column a check: X where the one that must notice does, x
    where another one does.

    The others get so many examples, or the part of them that is theirs.
    """
    columns = [check for law in LAWS for check in law.checks]
    yield from (f"{i:2} {check.name}" for i, check in enumerate(columns))
    yield "\n" + " ".join(f"{i:2}" for i in range(len(columns)))
    caught: Counter[str] = Counter()
    for planted in MUTANTS:
        marks = []
        for check in columns:
            own = check.name == planted.law
            tried = own or (
                others and check not in COMPILE.checks and check.binds(planted.row.meta)
            )
            examples = None if own else check.share * others
            found = tried and notices(
                check, planted.row, planted.bug, Exception, examples
            )
            marks.append(" ." if not found else " X" if own else " x")
            caught[check.name] += bool(own and found)
        yield f"{' '.join(marks)}  {planted.row.name}: {planted.bug}"
    yield ""
    for primitive in PRIMITIVES:
        (known,) = (law for law in laws_primitives.LAWS if law.name == primitive.law)
        found = primitive_notices(known, primitive)
        caught[known.name] += found
        yield f"{' X' if found else ' .'}  {known.name}: {primitive.bug}"
    yield "\n| law | planted bugs | noticed |\n|---|---|---|"
    for law in LAWS:
        names = {check.name for check in law.checks}
        planted = [mutant for mutant in MUTANTS if mutant.law in names]
        yield f"| {law.name} | {len(planted)} | {sum(caught[name] for name in names)} |"
    for primitive_law in laws_primitives.LAWS:
        name = primitive_law.name
        yield (
            f"| {name} | {sum(mutant.law == name for mutant in PRIMITIVES)} | "
            f"{caught[name]} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--others",
        type=int,
        default=3,
        help="examples for checks that need not notice; 0: none",
    )
    start = time.monotonic()
    warnings.simplefilter("ignore")  # what a broken algorithm warns of is not the point
    for line in matrix(parser.parse_args().others):
        print(line, flush=True)
    print(f"\n{time.monotonic() - start:.0f} s")
