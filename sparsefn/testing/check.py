"""Check the laws: one call for one algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from sparsefn.core.state import Algorithm
from sparsefn.testing.coverage import CASES, ENOUGH, LEAST, missing, trait_shares
from sparsefn.testing.introspection import completed
from sparsefn.testing.laws import LAWS, Check, Law
from sparsefn.testing.meta import Meta, Row, row_of
from sparsefn.testing.report import Report
from sparsefn.testing.suggest import suggested
from sparsefn.testing.trial import Outcome, outcome_of
from sparsefn.typing import Tree


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

    Args:
        make_algorithm: Function of (sparsity, key), or of (sparsity, key, params), that
            gives the algorithm. The sparsity is a float in [0, 1], or a 0-d tensor
            under `vmap` (unless the function reads its value, as `float(sparsity)`
            does); random draws use the key.
        meta: What the algorithm promises, beside what the call that made it says.
        params: A tree whose structure, shapes and dtypes all drawn trees have. Default:
            trees of drawn structure (nested, of several dtypes, with ties, NaN, empty
            leaves).
        max_examples: How many examples the checks try that need most; other checks try
            fewer.
        laws: The laws to check. Default: all.
        seed: Number from which examples are drawn: the same ones each time. None draws
            new ones each time.
        on_fail: "raise" stops at the first failure; "report" makes all checks and
            raises nothing: `print(report)` shows them.
        suggest: Whether to do as "report" does, and look for the `Meta` that would
            hold: `report.suggestion`.

    Returns:
        The `Report`, with the outcome of every check.

    Raises:
        Broken: A check fails, or the algorithm itself raises in it; it is an
            AssertionError with a smallest example. Drawn cases that were too easy are a
            failure, too, where 100 or more were drawn: `sf.testing.coverage` says how
            many of them must have ties, NaN and other hard things. With `params` these
            shares are only shown.
        TypeError: `make_algorithm` takes other arguments or gives no Algorithm, or
            `meta` is no `Meta`.
        ValueError: `on_fail` is another word, or `meta` contradicts the call that made
            the algorithm.
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

    Args:
        law: The law that the check belongs to.
        check: The check.
        row: The algorithm.
        params: As in `check_laws`.
        max_examples: As in `check_laws`.
        seed: As in `check_laws`.

    Raises:
        Broken: The check fails, or the algorithm itself raises in it.
        TypeError: As in `check_laws`.
        ValueError: As in `check_laws`.
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
