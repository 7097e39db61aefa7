"""Check the laws: one call for one algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from sparsefn.core.state import Algorithm
from sparsefn.core.tree import Tree
from sparsefn.testing.coverage import CASES, ENOUGH, LEAST, missing, trait_shares
from sparsefn.testing.introspection import completed
from sparsefn.testing.laws import LAWS, Check, Law
from sparsefn.testing.meta import Meta, Row, row_of
from sparsefn.testing.report import Report
from sparsefn.testing.suggest import suggested
from sparsefn.testing.trial import Outcome, outcome_of


class Broken(AssertionError):
    """A law does not hold for an algorithm.

    The text begins with a line for each failure, and ends with a test of it. Lines that
    are longer than 200 characters are cut, and stand below in full.

    >>> issubclass(sf.testing.Broken, AssertionError)
    True
    """


def check_laws(
    make_algorithm: Callable[..., Algorithm],
    *,
    meta: Meta = Meta(),
    params: Tree = None,
    max_examples: int = 25,
    laws: Sequence[Law] = LAWS,
    seed: int | None = 0,
    on_fail: Literal["raise", "report"] = "raise",
    suggest: bool = False,
) -> Report:
    """Check every law that binds an algorithm, on examples that Hypothesis draws.

    >>> def halve(sparsity, key):
    ...     return sf.gmp(sparsity, when=sf.every(2))
    >>> meta = sf.testing.Meta(
    ...     when=sf.every(2),
    ...     start="magnitude",
    ...     choose=sf.scores.magnitude,
    ...     monotone=True,
    ... )
    >>> report = sf.testing.check_laws(
    ...     halve, meta=meta, max_examples=5, laws=sf.testing.LAWS[:3]
    ... )
    >>> report.held
    ['counts_are_exact', 'the_best_are_kept', 'masks_only_shrink']

    `make_algorithm(sparsity, key)` gives the algorithm; with a third parameter it gets
    the params, too. The sparsity is a float in [0, 1], or a 0-d tensor under `vmap`
    (unless it reads its value, as `float(sparsity)` does); random draws use the key.
    `meta` says what the algorithm promises, beside what the call that made it says.
    Trees are drawn (nested, of several dtypes, with ties, NaN, empty leaves); with
    `params` they have its structure, shapes and dtypes. The checks that need most
    examples try `max_examples`, other checks fewer: the same ones each time for a
    `seed`, new ones each time for None.

    The first check that fails, or where the algorithm itself raises, raises `Broken`,
    an AssertionError, with a smallest example. With `on_fail="report"` all checks are
    made, and nothing is raised;
    `print(report)` shows them. `suggest` does the same, and looks for the `Meta` that
    would hold: `report.suggestion`. Drawn cases that were too easy are a failure, too,
    where 100 or more were drawn: `sf.testing.coverage` says how many of them must have
    ties, NaN and other hard things. With `params` these shares are only shown. Raises
    TypeError or ValueError for a bad argument, and for a `meta` that the call
    contradicts.
    """
    if on_fail not in ("raise", "report"):
        raise ValueError(f'expected on_fail to be "raise" or "report", got {on_fail!r}')
    row = completed(row_of(make_algorithm, meta), params)
    counted = Counter[str]()

    def made(law: Law, check: Check, row: Row, shrink: bool = False) -> Outcome:
        return outcome_of(
            law,
            check,
            row,
            params,
            max_examples,
            seed,
            shrink,
            counted if shrink and check.hard else None,
        )

    outcomes = []
    for law in laws:
        for check in law.checks:
            if not check.binds(row.meta):
                outcomes.append(Outcome(law.name, check.name, "does not bind"))
                continue
            outcomes.append(made(law, check, row, shrink=True))
            if on_fail == "raise" and not suggest:
                _raise(row, outcomes[-1])
    suggestion = None
    if suggest:
        suggestion = suggested(row, meta, outcomes, laws, made, params)
    easy = None
    if params is None and counted[CASES] >= ENOUGH:
        easy = tuple(missing(counted, _least(row.meta)))
    report = Report(
        row.name,
        tuple(outcomes),
        row.meta,
        seed,
        max_examples,
        suggestion,
        trait_shares(counted),
        counted[CASES],
        easy,
    )
    if easy and on_fail == "raise" and not suggest:
        raise Broken("\n".join(report.failures))
    return report


def _least(meta: Meta) -> Mapping[str, float]:
    """The shares that cases must have, without what no leaf may be that the pattern
    accepts.
    """
    return {
        trait: share
        for trait, share in LEAST.items()
        if trait != "empty leaf" or not meta.layout.form.least
    }


def check_row(
    law: Law,
    check: Check,
    row: Row,
    params: Tree = None,
    max_examples: int = 25,
    seed: int | None = 0,
) -> None:
    """Make one check of one row; `check_laws` makes all that bind it.

    >>> row = sf.testing.Row(
    ...     "dense",
    ...     lambda sparsity, key, params: sf.dense(),
    ...     sf.testing.Meta(exact_count=False),
    ... )
    >>> sf.testing.check_row(
    ...     sf.testing.laws.PURITY,
    ...     sf.testing.laws.PURITY.checks[0],
    ...     row,
    ...     max_examples=5,
    ... )
    """
    row = completed(row, params)
    _raise(row, outcome_of(law, check, row, params, max_examples, seed))


def _raise(row: Row, outcome: Outcome) -> None:
    if outcome.failed:
        text = "\n".join(
            [
                *outcome.lines(row.name),
                *(f"\n{part}" for part in outcome.details(row.name)),
            ]
        )
        # Where a law's own assertion failed, its traceback says nothing more.
        raise Broken(text) from (
            None if isinstance(outcome.cause, AssertionError) else outcome.cause
        )
