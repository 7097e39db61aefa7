"""When masks change in a run of known length, and what of an algorithm has not happened
when the run ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sparsefn._engine.transforms import read_number
from sparsefn.core import schedules
from sparsefn.core.checks import Call, call_of, check_int, is_int, parts_of, shown
from sparsefn.core.state import Trigger
from sparsefn.core.triggers import At, Every, every

# arguments of algorithms that count steps of the run
_LENGTHS = ("steps", "rounds", "batches")
_SCHEDULES = [getattr(schedules, name) for name in schedules.__all__]
UNTIMED = every(100)  # where `drop_grow` changes masks without `steps` and `when`


def pace(call: str, steps: int) -> tuple[int, int]:
    """Every how many steps the masks of a run change, and before which step they do so:
    RigL's numbers.

    >>> pace("rigl", 10_000), pace("rigl", 500)
    ((100, 7500), (5, 375))

    TypeError or ValueError unless `steps` is an int and at least 1.
    """
    check_int(call, "steps", steps, 1)
    return min(100, max(1, steps // 100)), max(1, 3 * steps // 4)


class _Run(NamedTuple):
    """The steps in which a part of an algorithm runs: from `first` to before `end`."""

    first: int
    end: int
    words: str


def unfinished(
    made: object, steps: int, words: str = "the run of {} steps"
) -> list[str]:
    """A sentence for each schedule that has not ended and each trigger still to fire
    after steps 0 to `steps - 1`.

    >>> gmp = sf.gmp(sf.schedules.polynomial(0.0, 0.9, 0, 1000))
    >>> for sentence in unfinished(gmp, 200):
    ...     print(sentence)
    polynomial(0.0, 0.9, 0, 1000) ends at step 1000, after the run of 200 steps: its
    last value there is 0.437, not 0.9
    >>> unfinished(sf.rigl(0.9, steps=10_000), 200)
    ['rigl(0.9, steps=10000) takes 10000 steps, more than the run of 200 steps']
    >>> unfinished(gmp, 1001)
    []

    It also tells what `changes_once` tells:

    >>> unfinished(sf.rigl(0.9), 50)
    ['rigl(0.9) changes masks once in the run of 50 steps, at step 0: give it steps=50,
    the length of the run']

    `made` is an algorithm, or any other object that a function of this library made:
    the check reads the calls that made it and its parts. Of functions of your own, and
    of tensors that a transform hides, it knows nothing. A polynomial or piecewise
    schedule beside a trigger `when` must have ended where `when` fires last. `words`
    say which steps these are. TypeError or ValueError unless `steps` is an int and at
    least 1.
    """
    check_int("unfinished", "steps", steps, 1)
    return list(dict.fromkeys(_found(made, _Run(0, steps, words.format(steps)), None)))


def _found(made: Any, run: _Run, when: Trigger | None) -> Iterator[str]:
    if isinstance(made, Every | At):
        yield from _of_trigger(made, run)
    elif isinstance(made, Mapping):
        yield from _found(list(made.values()), run, when)
    elif type(made) in (list, tuple):
        for part in made:
            yield from _found(part, run, when)
    elif call := call_of(made):
        yield from _of_call(made, call, run, when)


def _of_call(
    made: object, call: Call, run: _Run, when: Trigger | None
) -> Iterator[str]:
    given = call.arguments()
    if call.make in _SCHEDULES:
        yield from _of_schedule(made, call, given, run, when)
        yield from _found(given, run, None)
    elif "schedule" in given:  # phases
        yield from _of_phases(given["schedule"], run)
    else:
        for name in _LENGTHS:
            if is_int(given.get(name)) and given[name] > run.end:
                yield f"{made!r} takes {given[name]} {name}, more than {run.words}"
        yield from _of_default(made, call, given, run)
        yield from _found(given, run, given.get("when"))


def changes_once(made: object, steps: int, words: str) -> list[str]:
    """A sentence for each algorithm whose masks change once in a run, as its trigger
    was not given.

    >>> changes_once(sf.rigl(0.9), 50, "the run of 50 steps")
    ['rigl(0.9) changes masks once in the run of 50 steps, at step 0: give it steps=50,
    the length of the run']
    >>> changes_once(sf.rigl(0.9, when=sf.every(100)), 50, "the run of 50 steps")
    []
    """
    run = _Run(0, steps, words)
    calls = [
        (part, call) for part in parts_of(made) if (call := call_of(part)) is not None
    ]
    return [
        told
        for part, call in calls
        for told in _of_default(part, call, call.arguments(), run)
    ]


def _of_default(
    made: object,
    call: Call,
    given: Mapping[str, Any],
    run: _Run,
) -> Iterator[str]:
    # Of a trigger that repeats, and fires once in the run, though nobody chose it.
    when = given.get("when")
    untimed = given.get("steps", 0) is None
    chosen = when is not None and any(
        when is one for one in (*call.args, *call.kwargs.values())
    )
    if when is None and untimed and "drop_fraction" in given:
        when = UNTIMED
    if (
        chosen
        or not isinstance(when, Every)
        or (once := _only_firing(when, run)) is None
    ):
        return
    by_length = untimed and not run.first
    if by_length:
        mend = f"steps={run.end}, the length of the run"
    else:
        mend = f"`when` in the place of {when!r}"
    yield f"{made!r} changes masks once in {run.words}, at step {once}: give it {mend}"


def _only_firing(when: Every, run: _Run) -> int | None:
    """The step at which a trigger fires in a run of several steps, if it fires at no
    other.
    """
    n = read_number(when.n)
    fires = _last(when, run.end)
    if n is None or fires is None or run.end - run.first == 1:
        return None
    return fires if fires - n < run.first <= fires else None


def _of_phases(parts: list[tuple[int, object]], run: _Run) -> Iterator[str]:
    ends = [begin for begin, _ in parts[1:]] + [run.end]
    for (begin, algorithm), end in zip(parts, ends, strict=True):
        if begin >= run.end:
            yield (
                f"the phase {shown(algorithm)} begins at step {begin}, after "
                f"{run.words}"
            )
        elif end < run.end or begin:
            end = min(end, run.end)
            yield from _found(
                algorithm,
                _Run(begin, end, f"its phase, steps {begin} to {end - 1}"),
                None,
            )
        else:
            yield from _found(algorithm, run, None)


def _of_trigger(made: Every | At, run: _Run) -> Iterator[str]:
    fires = _last(made, run.end)
    if fires is not None and fires < run.first and made != At(()):
        yield f"{made!r} never fires in {run.words}"
    elif isinstance(made, At):
        late = [
            step
            for step in map(read_number, made.steps)
            if step is not None and step >= run.end
        ]
        if late:
            yield f"{made!r} fires at step {min(late)}, after {run.words}"
    elif (
        (stop := read_number(made.stop)) is not None
        and stop > run.end
        and _last(made, stop) != fires
    ):
        yield f"{made!r} fires until step {stop}, after {run.words}"


def _last(when: object, end: int) -> int | None:
    """The last step below `end` at which a trigger fires, -1 if there is none; None
    where that is not known.
    """
    if isinstance(when, At):
        steps = [read_number(step) for step in when.steps]
        if None in steps:
            return None
        return max([step for step in steps if step < end], default=-1)
    if isinstance(when, Every):
        n, start, fired = map(read_number, (when.n, when.start, when.count(end - 1)))
        if None in (n, start, fired):
            return None
        return start + (fired - 1) * n if fired else -1
    return None


def _of_schedule(
    made: Any,
    call: Call,
    given: Mapping[str, Any],
    run: _Run,
    when: Trigger | None,
) -> Iterator[str]:
    if call.make is schedules.piecewise:
        end, final = _last_value(given["values"])
    else:  # a polynomial, a decay or one without an end
        end = read_number(given.get("end", given.get("steps")))
        final = read_number(given.get("final"))
    decays = "steps" in given  # at a run's end it may be a step short of its own
    fires = None if decays else _last(when, run.end)
    last = run.end - 1 if fires is None or fires < run.first else fires
    if end is None or end - decays <= last:
        return
    text = f"{made!r} ends at step {end:g}, "
    value = read_number(made(last))
    if last == run.end - 1 or end >= run.end:
        text += f"after {run.words}"
    else:
        text += f"but {shown(when)} fires last at step {last} in {run.words}"
    known = value is not None and final is not None
    yield f"{text}: its last value there is {_apart(value, final)}" if known else text


def _last_value(values: Any) -> tuple[int | None, Any]:
    pairs = values
    if isinstance(values, Mapping):
        pairs = values.items()
    known = [(read_number(begin), read_number(value)) for begin, value in pairs]
    if any(begin is None for begin, _ in known):
        return (None, None)
    return max(known, key=lambda pair: pair[0])


def _apart(value: float, other: float) -> str:
    # As few digits as tell the two apart.
    for digits in (3, 6, 12):
        short = f"{value:.{digits}g}"
        other_short = f"{other:.{digits}g}"
        if short != other_short:
            return f"{short}, not {other_short}"
    return f"{value!r}, not {other!r}"
