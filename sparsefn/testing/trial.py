"""One check of one algorithm: whether it holds, and what failed in plain words."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import Literal, NamedTuple

from sparsefn.core.checks import shown
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.coverage import of_cases
from sparsefn.testing.harness import algorithm_of, hold, leaves, mapped, updates
from sparsefn.testing.laws import Check, Declared, Law
from sparsefn.testing.meta import Meta, Row
from sparsefn.typing import Tree

_MOST = 200  # characters of a line
Status = Literal["passed", "failed", "error", "does not bind"]


class Outcome(NamedTuple):
    """What became of one check: a row of a `Report`.

    >>> sf.testing.Outcome("purity", "functions_are_pure", "passed", examples=5).failed
    False

    Attributes:
        law: Name of the law.
        check: Name of the check.
        status: "passed", "failed", "error" (the algorithm itself raises) or "does not
            bind".
        said: A sentence for each distinct failure.
        declare: What to declare in `Meta` if that is meant, or "".
        case: The smallest example of a failure.
        seconds: How long the check took.
        examples: Number of examples tried until it failed.
        cause: What was raised.
    """

    law: str
    check: str
    status: Status
    said: tuple[str, ...] = ()
    declare: str = ""
    case: Case | None = None
    seconds: float = 0.0
    examples: int = 0
    cause: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether it was tried and does not hold."""
        return self.status in ("failed", "error")

    def lines(self, name: str) -> list[str]:
        """Say what failed, in short.

        Args:
            name: Name of the algorithm.

        Returns:
            A line of at most 200 characters for each failure.
        """
        hint = self._hint
        return [shortened(text, hint) for text in self._texts(name)]

    def details(self, name: str) -> list[str]:
        """Say what failed, where `lines` are too short for it.

        Args:
            name: Name of the algorithm.

        Returns:
            The lines that are longer, in full, and the example.
        """
        whole = [text + self._hint for text in self._texts(name)]
        if self.failed and self.case is not None:
            example = [f"{self.check} on {self.case}"]
        else:
            example = []
        return [*(line for line in whole if len(line) > _MOST), *example]

    @property
    def _hint(self) -> str:
        meant = self.declare and self.status == "failed"
        return f"; if it is not meant to, declare {self.declare}" if meant else ""

    def _texts(self, name: str) -> list[str]:
        first = []
        for said in self.said:
            if said:
                first.append(said.splitlines()[0].rstrip(":"))
            else:
                first.append("")
        if self.status == "error":
            return [f"{name}: {line}" for line in first]
        return [f"{name} breaks {self.law}, {self.check}: {line}" for line in first]


def shortened(text: str, end: str = "", most: int = _MOST) -> str:
    """A text and its end in so many characters: cut before the end, or without it where
    the end is most of it.

    >>> (
    ...     shortened("step 0 ran many operations", "; declare it", 30),
    ...     shortened("x" * 20, "; declare it", 12),
    ... )
    ('step 0 ran man ...; declare it', 'xxxxxxxx ...')
    """
    if len(text) + len(end) <= most:
        return text + end
    if not (2 * len(end) <= most):
        end = ""
    if len(text) > most - len(end):
        return f"{text[: most - len(end) - 4]} ...{end}"
    return text


def outcome_of(
    law: Law,
    check: Check,
    row: Row,
    params: Tree = None,
    max_examples: float = 25,
    seed: int | None = 0,
    shrink: bool = True,
    counted: Counter[str] | None = None,
) -> Outcome:
    """Make one check of one row.

    >>> from sparsefn.testing.laws import PURITY
    >>> row = sf.testing.Row(
    ...     "dense", lambda sparsity, key, params: sf.dense(), sf.testing.Meta()
    ... )
    >>> outcome_of(PURITY, PURITY.checks[0], row, max_examples=8)[:3]
    ('purity', 'states_keep_their_structure', 'passed')

    Without `shrink` the first failure is reported as it comes. `counted` takes the
    traits of the cases that were drawn until it failed.
    """
    # by where it was raised; the smallest comes last
    found: dict[tuple[object, ...], tuple[Case, Exception]] = {}
    tried = 0
    begin = time.perf_counter()

    def run(case: Case) -> None:
        nonlocal tried
        tried += not found
        if counted is not None and not found:
            counted.update(of_cases([case]))
        try:
            check.run(row, case)
        except Exception as error:
            found[_origin(error)] = case, error
            raise

    raised: list[Exception] = []
    try:
        examples = check.examples(row.meta, params)
        hold(
            f"{check.name} {row.name}",
            run,
            examples,
            check.share * max_examples,
            seed,
            shrink,
        )
    except Exception as error:
        raised = _unfolded(error)
    if not raised:
        return Outcome(
            law.name,
            check.name,
            "passed",
            seconds=time.perf_counter() - begin,
            examples=tried,
        )
    # Other cases failed on the way to a smaller example; an algorithm that draws from a
    # global generator may not fail on it again.
    raised_ids = {id(error) for error in raised}
    last = [(case, one) for case, one in found.values() if id(one) in raised_ids]
    last = last or [*found.values()]
    outcomes = [_told(row, check, case, one, shrink) for case, one in last] or [
        _Told(_named(raised[0]), None, raised[0])
    ]
    (_, case, cause, own) = outcomes[0]
    said = tuple(dict.fromkeys(one.said for one in outcomes))
    cause.__notes__ = []  # of Hypothesis, which has the example, too
    declare = "" if own else what_to_declare(check, row.meta)
    status: Status = "error" if own else "failed"
    seconds = time.perf_counter() - begin
    return Outcome(
        law.name, check.name, status, said, declare, case, seconds, tried, cause
    )


class _Told(NamedTuple):
    """A failure in words, its run, what was raised, and whether the algorithm itself
    raised it.
    """

    said: str
    case: Case | None
    cause: Exception
    own: bool = False


def _told(row: Row, check: Check, case: Case, error: Exception, shrink: bool) -> _Told:
    if shrink:
        case, error = _of_one_leaf(row, check, case, error)
    own = _own_error(row, case, error)
    if own is not None:
        return _Told(*own, error, True)
    return _Told(
        str(error) if isinstance(error, AssertionError) else _named(error), case, error
    )


def what_to_declare(check: Check, meta: Meta) -> str:
    """What of the declarations that a check takes is not made, or "".

    >>> from sparsefn.testing.laws import EXACT_COUNT
    >>> what_to_declare(
    ...     EXACT_COUNT.checks[0], sf.testing.Meta(start="dense", exact_count="total")
    ... )
    'Meta(exact_count=False)'
    """

    def is_new(flags: Declared) -> bool:
        return any(getattr(meta, name) != value for name, value in flags.items())

    single = [flags for flags in check.declare(meta) if len(flags) == 1]
    wanted = [flags for flags in single if is_new(flags)]
    return " or ".join(
        f"Meta({name}={shown(value)})"
        for flags in wanted
        for name, value in flags.items()
    )


def _origin(error: Exception) -> tuple[object, ...]:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return type(error), trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _unfolded(error: Exception) -> list[Exception]:
    """The errors of a group of groups, or the error itself."""
    if isinstance(error, ExceptionGroup):
        return [one for part in error.exceptions for one in _unfolded(part)]
    return [error]


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _of_one_leaf(
    row: Row, check: Check, case: Case, error: Exception
) -> tuple[Case, Exception]:
    """The run of one leaf alone, where the check fails on that in the same way."""
    for path, leaf in leaves(case.params).items():
        alone = mapped(case, partial(_leaf_of, path))
        if leaf.numel() < 100:  # more is not written down
            try:
                check.run(row, alone)
            except Exception as other:
                if type(other) is type(error):
                    return alone, other
    return case, error


def _leaf_of(path: str, tree: Tree) -> Tree:
    return {"w": leaves(tree)[path]}


def _own_error(row: Row, case: Case, error: Exception) -> tuple[str, Case] | None:
    """What a plain run of the algorithm raises, where it is what a check ran into; with
    the run that does.
    """
    for run in (case, case._replace(sparsity=0.0), case._replace(sparsity=1.0)):
        raised = _plain_error(row, run)
        if raised is not None and type(raised[0]) is type(error):
            at = [
                f"{path} of shape {tuple(x.shape)}, {x.dtype}"
                for path, x in leaves(case.params).items()
            ]
            return f"{raised[1]} raises {_named(raised[0])}" + (
                f"; {at[0]}" if len(at) == 1 else ""
            ), run
    return None


def _plain_error(row: Row, case: Case) -> tuple[Exception, str] | None:
    at = "make"
    try:
        algorithm = algorithm_of(row, case)
        at = "init"
        for step, _ in enumerate(updates(algorithm, case)):
            at = f"update at step {step}"
    except Exception as error:
        return error, at
    return None
