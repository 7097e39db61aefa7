"""Which promises an algorithm keeps: the strongest that hold are suggested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sparsefn.core.checks import shown
from sparsefn.core.schedules import constant
from sparsefn.core.state import Algorithm, with_params
from sparsefn.core.triggers import at, every, never
from sparsefn.masks.budgets.counts import Counted
from sparsefn.masks.scores import magnitude, random, saliency
from sparsefn.nn.checkpoint import tree_equal
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.harness import algorithm_of, sparse
from sparsefn.testing.introspection import learned, run_of, said_by
from sparsefn.testing.laws import COMPILE, Check, Declared, Law
from sparsefn.testing.meta import Exchange, Meta, Row, declared
from sparsefn.testing.trial import Outcome, shortened
from sparsefn.typing import Tree, Trigger

Made = Callable[[Law, Check, Row], Outcome]

# These take long, and read no promise.
_ALIKE = {
    *(check.name for check in COMPILE.checks),
    "processes_do_not_matter",
    "threads_do_not_matter",
}
_LOOKED_AT = 12  # steps, for the triggers that fit
_EVERY = [
    every(n, start=start) if start else every(n)
    for n in range(2, 7)
    for start in range(n)
]
_TRIGGERS: Sequence[Trigger] = [never(), *(at([step]) for step in range(6)), *_EVERY]
# What to promise where the check of that name then holds, too.
_PROMISES: Sequence[tuple[Declared, str]] = [
    ({"monotone": True}, "masks_only_shrink"),
    ({"start": "magnitude"}, "the_best_are_kept"),
    ({"choose": magnitude}, "the_best_are_kept"),
    ({"choose": saliency}, "the_best_are_kept"),
    ({"stochastic": "anew"}, "declared_dependence_is_real"),
]


class Suggestion(NamedTuple):
    """A `Meta` that an algorithm keeps, found by trying.

    >>> sf.testing.Suggestion(sf.testing.Meta(), "Meta()").broken
    ()

    Attributes:
        meta: The promises.
        text: `meta` with a reason beside each field.
        held: Names of the checks that hold with it.
        broken: A line for each check that fails whatever is declared: a bug, or
            something that `Meta` cannot say.
    """

    meta: Meta
    text: str
    held: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()


def suggested(
    row: Row,
    given: Meta,
    outcomes: Sequence[Outcome],
    laws: Sequence[Law],
    made: Made,
    params: Tree = None,
) -> Suggestion:
    """The `Meta` that would hold for a row with these outcomes, beside what its call
    says of the one that was given.

    >>> from sparsefn.testing.trial import outcome_of
    >>> laws = sf.testing.LAWS[:1]
    >>> row = sf.testing.Row(
    ...     "none", lambda s, key, params: sf.static(1.0), sf.testing.Meta()
    ... )
    >>> print(
    ...     suggested(
    ...         row,
    ...         row.meta,
    ...         [outcome_of(laws[0], laws[0].checks[0], row)],
    ...         laws,
    ...         outcome_of,
    ...     ).text
    ... )
    Meta(
        when=never(),  # of the first 12 steps masks change at these
        exact_count=False,  # gives up counts_are_exact: after init: [0] kept, expected
                            [3]
    )

    `made(law, check, row)` makes a check.
    """
    checks = {check.name: (law, check) for law in laws for check in law.checks}
    seen, promises = _seen(row, run_of(row, params))
    meta = row.meta._replace(**seen)
    why = {
        name: _SEEN[name]
        for name, value in seen.items()
        if value != Meta._field_defaults[name]
    }
    known = {
        outcome.check: (row.meta, outcome)
        for outcome in outcomes
        if outcome.status != "does not bind"
    }
    shrunk = {outcome.check: outcome for outcome in outcomes}

    def tried(name: str, meta: Meta) -> Outcome:
        return made(*checks[name], row._replace(meta=meta))

    def promised(meta: Meta) -> Meta:
        for flags, name in promises:
            (field, value), other = *flags.items(), meta._replace(**flags)
            weaker = True if value == "anew" else Meta._field_defaults[field]
            undecided = getattr(meta, field) is weaker and (
                field not in why or value == "anew"
            )
            if (
                undecided
                and name in checks
                and checks[name][1].binds(other)
                and tried(name, other).status == "passed"
            ):
                meta = other
                why[field] = "holds"
        return meta

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
        meta = promised(meta)
        if meta == before:
            break
    failed = [name for name, (_, outcome) in known.items() if outcome.failed]
    outcomes = [
        shrunk[name] if shrunk[name].failed else known[name][1] for name in failed
    ]
    lines = [
        line
        for outcome in outcomes
        for line in outcome._replace(declare="").lines(row.name)
    ]
    held = tuple(name for name in known if name not in failed)
    same = [
        name for name in Meta._fields if getattr(meta, name) is getattr(row.meta, name)
    ]
    meta = meta._replace(**{name: getattr(given, name) for name in same})
    return Suggestion(meta, _text(meta, why), held, tuple(dict.fromkeys(lines)))


def _mended(
    meta: Meta,
    check: Check,
    broken: Outcome,
    tried: Callable[[Meta], Outcome],
    why: dict[str, str],
) -> Meta:
    """The promises with another declaration, under which the check holds or, where it
    never does, does not bind.
    """
    given_up: Declared | None = None
    for flags in check.declare(meta):
        other = meta._replace(**flags)
        if other == meta:
            continue
        if not check.binds(other):
            given_up = given_up or flags
        elif not tried(other).failed:
            why.update(
                dict.fromkeys(flags, f"else {check.name} fails: {_first(broken)}")
            )
            return other
    if given_up is None:
        return meta
    why.update(dict.fromkeys(given_up, f"gives up {check.name}: {_first(broken)}"))
    return meta._replace(**given_up)


def _first(broken: Outcome) -> str:
    return shortened(broken.said[0].splitlines()[0])


_SEEN = {
    "start": "after init all weights are kept",
    "when": f"of the first {_LOOKED_AT} steps masks change at these",
}


def _seen(row: Row, run: Case) -> tuple[dict[str, Any], list[tuple[Declared, str]]]:
    """What the first masks and the steps of change say of fields that are left open or
    wrong; and promises to try.
    """
    found: dict[str, Any] = {}
    wrong: set[str] = set()
    promises = [*_PROMISES]
    try:
        algorithm = algorithm_of(row, run)
        promises[1:1] = _by_call(algorithm)
        state = algorithm.init(run.params)
        masks = sparse(state)
        if masks:
            is_dense = all(bool(mask.all()) for mask in masks.values())
            found["start"] = "dense" if is_dense else "other"
            wrong |= {"start"} if not is_dense and row.meta.start == "dense" else set()
        if learned(state):
            moved = state
        else:
            moved = with_params(state, run.grads[0])
        new = [
            algorithm.update(moved, run.grads[1], step).masks
            for step in range(_LOOKED_AT)
        ]
        fires = [not tree_equal(masks, state.masks) for masks in new]
        fits = [when for when in _TRIGGERS if _fires(when) == fires]
        if fits:
            found["when"] = fits[0]
            missed = any(
                fired and not row.meta.when(step) for step, fired in enumerate(fires)
            )
            wrong |= {"when"} if missed else set()
    except Exception:  # the checks tell of it
        pass
    left_open = {
        name for name in found if getattr(row.meta, name) is Meta._field_defaults[name]
    }
    return {name: x for name, x in found.items() if name in left_open | wrong}, promises


def _fires(when: Trigger) -> list[bool]:
    return [bool(when(step)) for step in range(_LOOKED_AT)]


def _by_call(algorithm: Algorithm) -> list[tuple[Declared, str]]:
    """How masks are chosen by the call of an algorithm of this library."""
    said = said_by(
        algorithm,
        ("score", "drop", "grow", "drop_fraction", "exclude_dropped", "steps"),
    )
    if "score" in said:
        return [({"choose": said["score"]}, "the_best_are_kept")]
    share = said.get("drop_fraction", None if "steps" in said else 0.3)
    if "drop" not in said or share is None or isinstance(share, Counted):
        return []
    grow = None if said["grow"] is random else said["grow"]
    fraction = share if callable(share) else constant(share)
    return [
        (
            {"choose": Exchange(said["drop"], grow, fraction, said["exclude_dropped"])},
            "the_worst_are_exchanged",
        )
    ]


def _text(meta: Meta, why: Mapping[str, str]) -> str:
    lines = [
        f"    {name}={shown(value)},{f'  # {why[name]}' if name in why else ''}"
        for name, value in declared(meta).items()
    ]
    if lines:
        return "\n".join(["Meta(", *lines, ")"])
    return "Meta()"
