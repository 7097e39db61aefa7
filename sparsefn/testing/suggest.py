"""Which promises an algorithm keeps: declarations are tried, and the strongest that hold are suggested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sparsefn.engine.checks import call_of
from sparsefn.scores import magnitude, saliency
from sparsefn.testing.harness import algorithm_of, sparse
from sparsefn.testing.laws import COMPILE, Check, Declared, Law
from sparsefn.testing.meta import Meta, Row
from sparsefn.testing.strategies import large
from sparsefn.testing.trial import Outcome
from sparsefn.testing.written import declarations, same
from sparsefn.timing.triggers import at, every, never

Made = Callable[[Law, Check, Row], Outcome]

# These take long, and read no promise.
_ALIKE = {*(check.name for check in COMPILE.checks), "processes_do_not_matter", "threads_do_not_matter"}
# What to promise where the check of that name then holds, too.
_TRIGGERS: Sequence[tuple[Declared, str]] = [
    ({"when": when}, "nothing_happens_between_triggers") for when in (never(), at([0]), at([1]), at([2]), every(2))
]
_PROMISES: Sequence[tuple[Declared, str]] = [
    ({"monotone": True}, "masks_only_shrink"),
    ({"start": "magnitude"}, "the_best_are_kept"),
    ({"choose": magnitude}, "the_best_are_kept"),
    ({"choose": saliency}, "the_best_are_kept"),
    ({"redraws": True}, "declared_dependence_is_real"),
]
_FROM_CALL = ("when", "pattern", "distribution", "where", "pruned")


class Suggestion(NamedTuple):
    """A `Meta` that an algorithm keeps, found by trying.

    >>> sf.testing.Suggestion(sf.testing.Meta(), "sf.testing.Meta()").broken
    ()

    `text` is `meta` as code, `held` are the checks that hold with it, and `broken` has a line for each that fails
    whatever is declared: a bug, or something that `Meta` cannot say.
    """

    meta: Meta
    text: str
    held: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()


def suggested(row: Row, outcomes: Sequence[Outcome], laws: Sequence[Law], made: Made) -> Suggestion:
    """The `Meta` that would hold for a row with these outcomes; `made(law, check, row)` makes a check.

    >>> from sparsefn.testing.trial import outcome_of
    >>> laws = sf.testing.LAWS[:1]
    >>> row = sf.testing.Row("none", lambda s, key, params: sf.static(1.0), sf.testing.Meta())
    >>> print(suggested(row, [outcome_of(laws[0], laws[0].checks[0], row)], laws, outcome_of).text)
    sf.testing.Meta(
        exact_count=False,  # gives up counts_are_exact: after init: [0] kept, expected [3]
    )
    """
    checks = {check.name: (law, check) for law in laws for check in law.checks}
    seen = _seen(row)
    meta, why = (
        row.meta._replace(**{name: value for name, (value, _) in seen.items()}),
        {n: w for n, (_, w) in seen.items()},
    )
    known = {outcome.check: (row.meta, outcome) for outcome in outcomes if outcome.status != "does not bind"}
    shrunk = {outcome.check: outcome for outcome in outcomes}

    def tried(name: str, meta: Meta) -> Outcome:
        return made(*checks[name], row._replace(meta=meta))

    def promised(meta: Meta, promises: Sequence[tuple[Declared, str]], reason: str) -> Meta:
        for flags, name in promises:
            (field, value), other = *flags.items(), meta._replace(**flags)
            undecided = getattr(meta, field) == getattr(Meta(), field) != value and field not in why
            if undecided and name in checks and checks[name][1].binds(other) and tried(name, other).status == "passed":
                meta, why[field] = other, reason
        return meta

    if meta.when is Meta().when:
        meta = promised(meta, _TRIGGERS, "at other steps of 0, 1 and 2 nothing happens")
    for _ in range(4):  # one declaration may bring another check in
        before = meta
        for name, (_, check) in checks.items():
            if not check.binds(meta):
                known.pop(name, None)
                continue
            if name not in known or (known[name][0] != meta and name not in _ALIKE):
                known[name] = meta, tried(name, meta)
            if known[name][1].status == "failed":
                meta = _mended(meta, check, known[name][1], partial(tried, name), why)
        meta = promised(meta, _PROMISES, "holds")
        if meta == before:
            break
    failed = [name for name, (_, outcome) in known.items() if outcome.failed]
    told = [shrunk[name] if shrunk[name].failed else known[name][1] for name in failed]
    lines = [line for outcome in told for line in outcome._replace(declare="").lines(row.name)]
    held = tuple(name for name in known if name not in failed)
    return Suggestion(meta, _text(meta, row.meta, why), held, tuple(dict.fromkeys(lines)))


def _mended(meta: Meta, check: Check, broken: Outcome, tried: Callable[[Meta], Outcome], why: dict[str, str]) -> Meta:
    """The promises with another declaration, under which the check holds or, where it never does, does not bind."""
    given_up: Declared | None = None
    for flags in check.declare:
        other = meta._replace(**flags)
        if other == meta:
            continue
        if not check.binds(other):
            given_up = given_up or flags
        elif not tried(other).failed:
            why.update(dict.fromkeys(flags, f"else {check.name} fails: {_first(broken)}"))
            return other
    if given_up is None:
        return meta
    why.update(dict.fromkeys(given_up, f"gives up {check.name}: {_first(broken)}"))
    return meta._replace(**given_up)


def _first(broken: Outcome) -> str:
    return broken.said[0].splitlines()[0]


def _seen(row: Row) -> dict[str, tuple[Any, str]]:
    """What the call that made the algorithm and its first masks say of fields that the promises leave open, and why."""
    run = large(row.meta.layout.form)
    found: dict[str, tuple[Any, str]] = {}
    named: dict[str, Any] = {}
    try:
        algorithm = algorithm_of(row, run)
        call = call_of(algorithm)
        named = {} if call is None else call.arguments()
        masks = sparse(algorithm.init(run.params))
        if masks and all(bool(mask.all()) for mask in masks.values()):
            found["start"] = "dense", "after init all weights are kept"
    except Exception:  # the checks tell of it
        pass
    found |= {name: (named[name], "as its call says") for name in _FROM_CALL if named.get(name) is not None}
    plain = Meta()
    return {
        name: pair
        for name, pair in found.items()
        if same(getattr(row.meta, name), getattr(plain, name)) and not same(pair[0], getattr(plain, name))
    }


def _text(meta: Meta, base: Meta, why: Mapping[str, str]) -> str:
    head, codes = declarations(meta, base)
    lines = [f"    {name}={code},{f'  # {why[name]}' if name in why else ''}" for name, code in codes.items()]
    return "\n".join([f"{head}(", *lines, ")"]) if lines else f"{head}()"
