"""Check the laws: one call for one algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sparsefn.state import Algorithm
from sparsefn.testing.harness import hold
from sparsefn.testing.laws import LAWS, Check, Law, bound
from sparsefn.testing.meta import Meta, Row, row_of
from sparsefn.tree import Tree


class Broken(AssertionError):
    """A law does not hold for an algorithm; the text names the law, the example, and what to declare instead.

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
) -> list[str]:
    """Check every law that binds an algorithm, on examples that Hypothesis draws.

    >>> def halve(sparsity, key):
    ...     return sf.gmp(sparsity, when=sf.every(2))
    >>> meta = sf.testing.Meta(when=sf.every(2), start="magnitude", choose=sf.scores.magnitude, monotone=True)
    >>> names = sf.testing.check_laws(halve, meta=meta, max_examples=5, laws=sf.testing.LAWS[:3])
    >>> names
    ['counts_are_exact', 'the_best_are_kept', 'masks_only_shrink']

    `make_algorithm(sparsity, key)` gives the algorithm; with a third parameter it gets the params, too. The sparsity
    is a float in [0, 1], or a 0-d tensor under `vmap` (unless `meta.tensor_sparsity` is False); random draws use the
    key. `meta` says what the algorithm promises. Trees are drawn (nested, of several dtypes, with ties, NaN, empty
    leaves); with `params` they have its structure, shapes and dtypes. The checks that need most examples try
    `max_examples`, others fewer: the same ones each time for a `seed`, new ones each time for None. Returns the names
    of the checks that were made. Raises `Broken`, an AssertionError, at the first that fails or where the algorithm
    itself raises, with a smallest example; TypeError for a bad argument.
    """
    row = row_of(make_algorithm, meta)
    made = []
    for law, check in bound(meta, laws):
        check_row(law, check, row, params, max_examples, seed)
        made.append(check.name)
    return made


def check_row(
    law: Law, check: Check, row: Row, params: Tree = None, max_examples: int = 25, seed: int | None = 0
) -> None:
    """Make one check of one row; `check_laws` makes all that bind it.

    >>> row = sf.testing.Row("dense", lambda sparsity, key, params: sf.dense(), sf.testing.Meta(exact_count=False))
    >>> sf.testing.check_row(sf.testing.laws.PURITY, sf.testing.laws.PURITY.checks[0], row, max_examples=5)
    """
    try:
        examples = check.examples(row.meta, params)
        hold(f"{check.name} {row.name}", partial(check.run, row), examples, check.share * max_examples, seed)
    except Exception as error:
        said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        hint = f"; if it is not meant to, declare Meta({check.hint})" if "=" in check.hint else ""
        raise Broken(f"{row.name} breaks {law.name}, {check.name}: {said}{hint}") from error
