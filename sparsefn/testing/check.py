"""Check the laws: one call for one algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from sparsefn.testing.harness import hold
from sparsefn.testing.laws import LAWS, Check, Law, bound
from sparsefn.testing.meta import Meta, Row
from sparsefn.testing.processes import reference
from sparsefn.tree import Tree
from sparsefn.types import Algorithm


class Broken(AssertionError):
    """A law does not hold for an algorithm; the text says which, on what, and what could be declared instead.

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
) -> list[str]:
    """Check every law that binds an algorithm, on examples that Hypothesis draws.

    >>> def halve(sparsity, key):
    ...     return sf.gmp(sparsity, when=sf.every(2))
    >>> meta = sf.testing.Meta(when=sf.every(2), start="magnitude", choose=sf.scores.magnitude, monotone=True)
    >>> names = sf.testing.check_laws(halve, meta=meta, max_examples=5, laws=sf.testing.LAWS[:3])
    >>> names
    ['counts_are_exact', 'the_best_are_kept', 'masks_only_shrink']

    `make_algorithm(sparsity, key)` gives the algorithm; with a third argument it gets the params, too. The
    sparsity is a float in [0, 1], or a 0-d tensor under `vmap` (unless `meta.tensor_sparsity` is False); the
    key is for what is drawn. `meta` says what the algorithm promises. Trees are drawn (nested, of several
    dtypes, with ties, NaN, empty leaves); with `params` they have its structure, shapes and dtypes.
    `max_examples` are tried for the checks that need most and a part of them for others; the same ones each
    time, where the profile of Hypothesis derandomizes. Returns the names of the checks that were made. Raises
    `Broken`, an AssertionError, at the first that fails, with a smallest example; TypeError for a bad argument.
    """
    row = row_of(make_algorithm, meta)
    made = []
    for law, check in bound(meta, laws):
        check_row(law, check, row, params, max_examples)
        made.append(check.name)
    return made


def row_of(make_algorithm: Callable[..., Algorithm], meta: Meta = Meta()) -> Row:
    """The row of an algorithm as `check_laws` takes it.

    >>> sf.testing.check.row_of(lambda sparsity, key: sf.static(sparsity)).name
    '<lambda>'
    """
    if not isinstance(meta, Meta):
        raise TypeError(f"expected meta to be a sf.testing.Meta, got {type(meta).__name__}")
    return Row(_name(make_algorithm), _with_params(make_algorithm), meta, reference(make_algorithm))


def check_row(law: Law, check: Check, row: Row, params: Tree = None, max_examples: int = 25) -> None:
    """One check of one row; `check_laws` makes all that bind it.

    >>> row = sf.testing.Row("dense", lambda sparsity, key, params: sf.dense(), sf.testing.Meta(exact_count=False))
    >>> sf.testing.check_row(sf.testing.laws.PURITY, sf.testing.laws.PURITY.checks[0], row, max_examples=5)
    """
    try:
        hold(
            f"{check.name} {row.name}",
            lambda case: check.run(row, case),
            check.examples(row.meta, params),
            check.share * max_examples,
        )
    except AssertionError as error:
        hint = f"; if it is not meant to, declare Meta({check.hint})" if "=" in check.hint else ""
        raise Broken(f"{row.name} breaks {law.name}, {check.name}: {error}{hint}") from error


def _name(make: Any) -> str:
    return str(getattr(make, "__name__", type(make).__name__))


def _with_params(make: Callable[..., Algorithm]) -> Callable[[Any, Any, Tree], Algorithm]:
    if not callable(make):
        raise TypeError(f"expected make_algorithm(sparsity, key), got {type(make).__name__}")
    signature = inspect.signature(make)
    free = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in free if p.default is p.empty]
    if len(needed) > 3 or len(free) < 2:
        expected = "expected make_algorithm to take (sparsity, key) or (sparsity, key, params)"
        raise TypeError(f"{expected}, got {_name(make)}{signature}")
    return make if len(needed) == 3 else lambda sparsity, key, params: make(sparsity, key)
