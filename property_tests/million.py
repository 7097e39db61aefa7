"""The laws over every row, and the fuzzers, for as long as you say: a journal of what was tried and what failed.

    python -m property_tests.million --hours 1 --out out/million.jsonl
    python -m property_tests.million --summary --out out/million.jsonl

One line of JSON for each check of a row: law, check, row, seed, cases, seconds, and the first failure. A run that is
ended goes on with the next seed when it is started again with the same file. What fails is shown with a line that
repeats it: `--only "check row" --seed N`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as start_from
from hypothesis.stateful import run_state_machine_as_test

from property_tests import state_machine, test_methods
from property_tests.registry import ROWS
from sparsefn.testing import LAWS, Row, check_row, coverage
from sparsefn.testing.laws import COMPILE, Check, Law

SLOW = {"processes_do_not_matter", "threads_do_not_matter", "order_of_sums_is_fixed"}
EXAMPLES = 40  # that a check with a share of 1 gets at one seed


class Work(NamedTuple):
    """Something to try: `run(seed)` counts the cases in `counted` and raises at a failure."""

    law: str
    name: str
    row: str
    run: Callable[[int, Counter[str]], None]

    @property
    def key(self) -> str:
        return f"{self.name} {self.row}"


def _of_check(law: Law, check: Check, row: Row) -> Work:
    def run(seed: int, counted: Counter[str]) -> None:
        def one(row: Row, case: Any) -> None:
            counted.update(coverage.of_cases([case]))
            check.run(row, case)

        watched = check._replace(run=one)
        one.__name__ = check.name
        check_row(law, watched, row, max_examples=1 if check.name in SLOW else EXAMPLES, seed=seed)

    return Work(law.name, check.name, row.name, run)


def _of_machine(name: str) -> Work:
    def run(seed: int, counted: Counter[str]) -> None:
        class Counting(state_machine.Machine):
            names = (name,)

            def same(self) -> None:
                counted.update([coverage.CASES])
                super().same()

        options = settings(
            max_examples=20,
            stateful_step_count=30,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        start_from(seed)(Counting)
        run_state_machine_as_test(Counting, settings=options)

    return Work("state machine", "machine", name, run)


def works() -> list[Work]:
    """Every check that binds a row or a method, but those that compile, and the machine on each of its rows."""
    rows = [*ROWS, *(row._replace(name=f"methods.{row.name}") for row in test_methods.ROWS)]
    checks = [(law, check) for law in LAWS if law is not COMPILE for check in law.checks]
    found = [_of_check(law, check, row) for row in rows for law, check in checks if check.binds(row.meta)]
    return [*found, *(_of_machine(name) for name in state_machine.CHOSEN)]


def tried(work: Work, seed: int) -> dict[str, Any]:
    """The line of the journal for one seed of one check."""
    counted: Counter[str] = Counter()
    start, error = time.perf_counter(), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work.run(seed, counted)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:2000]
    seconds = round(time.perf_counter() - start, 3)
    line = {"law": work.law, "check": work.name, "row": work.row, "seed": seed, "seconds": seconds}
    return line | {"counted": dict(counted), "error": error}


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; a last one that a kill cut off is left out."""
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue


def order(chosen: list[Work], seed: int) -> list[Work]:
    """The order of a round, another one for each seed, so that an hour that ends in it is spread over all."""
    return random.Random(seed).sample(chosen, len(chosen))


def go_on(file: Path, seconds: float, chosen: list[Work], first: int = 1) -> None:
    """Try what the journal does not hold yet, until the time is over."""
    done, end, total, failed = set(), time.monotonic() + seconds, 0, 0
    for line in read(file):
        done.add((f"{line['check']} {line['row']}", line["seed"]))
        total, failed = total + line["counted"].get(coverage.CASES, 0), failed + bool(line["error"])
    file.parent.mkdir(parents=True, exist_ok=True)
    seed, said = first, time.monotonic()
    with file.open("a", encoding="utf-8") as journal:
        if file.stat().st_size and not file.read_bytes().endswith(b"\n"):
            journal.write("\n")
        while time.monotonic() < end:
            for work in order(chosen, seed):
                if time.monotonic() >= end:
                    break
                if (work.key, seed) in done:
                    continue
                line = tried(work, seed)
                journal.write(json.dumps(line) + "\n")
                journal.flush()
                total, failed = total + line["counted"].get(coverage.CASES, 0), failed + bool(line["error"])
                if line["error"]:
                    print(f'\n--only "{work.key}" --seed {seed}\n{line["error"]}', flush=True)
                if time.monotonic() - said > 10:
                    said = time.monotonic()
                    print(
                        f"\rseed {seed}: {total:,} cases, {failed} failed, {end - said:.0f} s left", end="", flush=True
                    )
            seed += 1
    print()


def summary(file: Path) -> list[str]:
    """A Markdown table: cases, failures and seconds by law; the shares of traits; every failure."""
    cases: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    errors = []
    for line in read(file):
        cases[line["law"]] += line["counted"].get(coverage.CASES, 0)
        failed[line["law"]] += bool(line["error"])
        seconds[line["law"]] += line["seconds"]
        if line["law"] != "state machine":
            counted.update(line["counted"])
        if line["error"]:
            errors.append(f'`--only "{line["check"]} {line["row"]}" --seed {line["seed"]}`: {line["error"]}')
    lines = ["| law | cases | failures | seconds |", "|---|---|---|---|"]
    lines += [f"| {law} | {cases[law]:,} | {failed[law]} | {seconds[law]:.0f} |" for law in cases]
    lines += [f"| all | {cases.total():,} | {failed.total()} | {seconds.total():.0f} |", ""]
    return [*lines, *(f"{name}: {share:.0%}" for name, share in coverage.trait_shares(counted).items()), *errors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("out/million.jsonl"))
    parser.add_argument("--only", help="this check of this row alone: 'counts_are_exact gmp'")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--summary", action="store_true", help="try nothing, and show what a journal holds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.summary:
        print("\n".join(summary(options.out)))
        return
    chosen = [work for work in works() if options.only in (None, work.key)]
    if not chosen:
        parser.error(f"no check of a row is called {options.only!r}")
    if options.only:
        print(json.dumps(tried(chosen[0], options.seed), indent=1))
        return
    go_on(options.out, options.hours * 3600, chosen, options.seed)


if __name__ == "__main__":
    main()
