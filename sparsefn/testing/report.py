"""What `check_laws` found: a table, the failures before it in plain words, and JSON."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

import torch

from sparsefn.testing.coverage import ENOUGH
from sparsefn.testing.meta import Meta
from sparsefn.testing.suggest import Suggestion
from sparsefn.testing.trial import Outcome


@dataclass(frozen=True)
class Report:
    """The outcomes of all checks of one algorithm.

    >>> report = sf.testing.check_laws(
    ...     lambda sparsity, key: sf.gmp(sparsity), laws=[sf.testing.laws.PURITY]
    ... )
    >>> report.ok, report.held[0]
    (True, 'states_keep_their_structure')

    Attributes:
        name: Name of the algorithm.
        rows: Outcomes in the order of the laws; checks that do not bind the algorithm
            are there, too.
        meta: What the algorithm promises.
        seed: As in `check_laws`.
        max_examples: As in `check_laws`.
        suggestion: The `Meta` that would hold, with `suggest=True`.
        coverage: Shares of the drawn cases, by trait.
        cases: Number of drawn cases.
        easy: A line for each share that is too small. None where that is not judged.

    `str(report)` is a table, after the failures in plain words.
    """

    name: str
    rows: tuple[Outcome, ...]
    meta: Meta
    seed: int | None
    max_examples: int
    suggestion: Suggestion | None = None
    coverage: Mapping[str, float] = field(default_factory=dict)
    cases: int = 0
    easy: tuple[str, ...] | None = None

    @property
    def ok(self) -> bool:
        """Whether all checks that bind hold, on cases that were hard enough."""
        return not self.easy and not any(row.failed for row in self.rows)

    @property
    def held(self) -> list[str]:
        """The names of the checks that were made and hold."""
        return [row.check for row in self.rows if row.status == "passed"]

    @property
    def failures(self) -> list[str]:
        """A line for each distinct failure, with the checks that ran into an error, and
        for each share too small.
        """
        lines: dict[str, list[str]] = {}
        for row in self.rows:
            for line in row.lines(self.name):
                lines.setdefault(line, []).append(row.check)
        texts = [
            line if len(checks) == 1 else f"{line} (in {len(checks)} checks)"
            for line, checks in lines.items()
        ]
        return texts + [
            f"{self.name} was tried on cases that are too easy: {line}"
            for line in self.easy or ()
        ]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_json(self) -> str:
        """Everything as JSON, with the versions that it was found with.

        >>> report = sf.testing.check_laws(lambda sparsity, key: sf.dense(), laws=[])
        >>> import json
        >>> sorted(json.loads(report.to_json())["versions"])
        ['hypothesis', 'python', 'sparsefn', 'torch']

        Returns:
            Text of a JSON object.
        """
        made = {
            "hypothesis": version("hypothesis"),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        rows = [row._replace(case=None, cause=None)._asdict() for row in self.rows]
        for found, row in zip(rows, self.rows, strict=True):
            found["example"] = None if row.case is None else repr(row.case)
            del found["case"], found["cause"]
        suggestion = self.suggestion and {
            **self.suggestion._asdict(),
            "meta": self.suggestion.text,
        }
        made["sparsefn"] = sys.modules["sparsefn"].__version__
        return json.dumps(
            {
                "name": self.name,
                "ok": self.ok,
                "meta": repr(self.meta),
                "seed": self.seed,
                "max_examples": self.max_examples,
                "versions": made,
                "rows": rows,
                "suggestion": suggestion,
                "coverage": dict(self.coverage),
                "cases": self.cases,
                "easy": self.easy,
            },
            indent=2,
        )


def _lines(report: Report) -> Iterator[str]:
    made = [row for row in report.rows if row.status != "does not bind"]
    failed = sum(row.failed for row in made)
    seconds = sum(row.seconds for row in made)
    if failed:
        said = f"{failed} of {len(made)} checks fail"
    else:
        said = f"all {len(made)} checks hold" + ", on too easy cases" * bool(
            report.easy
        )
    yield (
        f"{report.name}: {said} (seed {report.seed}, {report.max_examples} examples, "
        f"{seconds:.0f} s)"
    )
    yield from report.failures
    if report.suggestion is not None:
        yield from ("", "What would hold:", report.suggestion.text)
        if report.suggestion.broken:
            yield from ("Whatever is declared, this fails:", *report.suggestion.broken)
    yield f"\n{'law':21}{'check':39}{'status':15}{'examples':>8}{'seconds':>9}"
    for row in report.rows:
        if row.status == "does not bind":
            numbers = ""
        else:
            numbers = f"{row.examples:8}{row.seconds:9.1f}"
        yield f"{row.law:21}{row.check:39}{row.status:15}{numbers}".rstrip()
    if report.coverage:
        if report.easy is not None:
            judged = ""
        else:
            judged = f" (only shown: with params=, or fewer than {ENOUGH})"
        shares = ", ".join(
            f"{share:.0%} {trait}" for trait, share in report.coverage.items()
        )
        yield f"{report.cases} drawn cases: {shares}{judged}"
    details = [line for row in report.rows for line in row.details(report.name)]
    yield from (f"\n{line}" for line in dict.fromkeys(details))
