"""The laws over every row, and the fuzzers, for as long as you say: a journal of what
was tried and what failed.

    python -m property_tests.million --hours 1 --out out/million.jsonl
    python -m property_tests.million --summary --out out/million.jsonl

`SHARES` says how the time of the processor is divided among the kinds of work: the laws
over every row and method, the law on compiling on drawn trees, the state machine,
random networks that get smaller, the laws of primitives, and short rows of scores. One
line of JSON for each: kind, law, check, row, seed, cases, seconds of the processor, and
the first failure. A run that is ended goes on when it is started again with the same
file. What fails is shown with a line that repeats it: `--only "check row" --seed N`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as start_from
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from property_tests import fuzzers, state_machine, test_methods
from property_tests.registry import ROWS
from sparsefn.testing import Row, byte_trees, check_row, coverage
from sparsefn.testing.harness import mapped
from sparsefn.testing.laws import COMPILE, Check, Law, bound

# What share of the time each kind of work gets.
SHARES = {
    "laws": 0.45,
    "compiled": 0.15,
    "state machine": 0.15,
    "shrinking": 0.15,
    "primitives": 0.08,
    "rows": 0.02,
}
SLOW = {"processes_do_not_matter", "threads_do_not_matter", "order_of_sums_is_fixed"}
EXAMPLES = 40  # that a check with a share of 1 gets at one seed


class Work(NamedTuple):
    """Something to try: `run(seed, counted)` counts its cases and raises at a
    failure.
    """

    kind: str
    law: str
    name: str
    row: str
    run: fuzzers.Run

    @property
    def key(self) -> str:
        return f"{self.name} {self.row}"


def _checked(
    law: Law, check: Check, row: Row, examples: int, seed: int, counted: Counter[str]
) -> None:
    def one(row: Row, case: Any) -> None:
        counted.update(coverage.of_cases([case]))
        check.run(row, case)

    one.__name__ = check.name
    check_row(law, check._replace(run=one), row, max_examples=examples, seed=seed)


def _of_check(law: Law, check: Check, row: Row) -> Work:
    examples = 1 if check.name in SLOW else EXAMPLES
    return Work(
        "laws",
        law.name,
        check.name,
        row.name,
        partial(_checked, law, check, row, examples),
    )


def _compiled(check: Check, row: Row, seed: int, counted: Counter[str]) -> None:
    """One drawn tree for each seed; the check itself takes one that is always the same.

    Gradients of other strides at every step would be compiled anew.
    """
    source = byte_trees.Source(random.Random(seed).randbytes(byte_trees.Source.size))
    palettes = (
        byte_trees.EXACT if row.meta.layout.reduce is not None else byte_trees.EVERY
    )
    case = byte_trees.case(source, row.meta.layout.form, palettes, distinct=False)
    case = mapped(case, lambda tree: optree.tree_map(torch.Tensor.contiguous, tree))
    _checked(
        COMPILE,
        check._replace(examples=lambda meta, like: st.just(case)),
        row,
        1,
        seed,
        counted,
    )


def _machine(name: str, seed: int, counted: Counter[str]) -> None:
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
    with state_machine.one_process():
        run_state_machine_as_test(Counting, settings=options)


def works() -> list[Work]:
    """Everything that there is to try."""
    rows = [
        *ROWS,
        *(row._replace(name=f"methods.{row.name}") for row in test_methods.ROWS),
    ]
    return [
        *(
            Work(
                "compiled",
                law.name,
                check.name,
                row.name,
                partial(_compiled, check, row),
            )
            if law is COMPILE
            else _of_check(law, check, row)
            for row in rows
            for law, check in bound(row.meta)
        ),
        *(
            Work(
                "state machine",
                "state machine",
                "machine",
                name,
                partial(_machine, name),
            )
            for name in state_machine.CHOSEN
        ),
        *(
            Work(
                "shrinking", "shrinking", "small_equals_masked", n, fuzzers.shrinking(n)
            )
            for n in fuzzers.NETWORKS
        ),
        *(Work("primitives", "primitives", *found) for found in fuzzers.primitives()),
        Work("rows", "short rows", "selection", "rows", fuzzers.rows_of_scores),
    ]


def used() -> float:
    """Seconds of the processor, those of other processes that were started included."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def tried(work: Work, seed: int) -> dict[str, Any]:
    """The line of the journal for one seed of one check."""
    counted: Counter[str] = Counter()
    start, error = used(), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work.run(seed, counted)
    except Exception as failure:
        found = failure.exceptions if isinstance(failure, ExceptionGroup) else [failure]
        error = "\n".join(f"{type(one).__name__}: {one}" for one in found)[:2000]
    line = {
        "kind": work.kind,
        "law": work.law,
        "check": work.name,
        "row": work.row,
        "seed": seed,
    }
    return line | {
        "seconds": round(used() - start, 3),
        "counted": dict(counted),
        "error": error,
    }


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal; a last one that a kill cut off is left out."""
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue


def order(chosen: Sequence[Work], seed: int) -> list[Work]:
    """The order of a round, another one for each seed, so that an hour that ends in it
    is spread over all.
    """
    return random.Random(seed).sample(chosen, len(chosen))


def rounds(
    chosen: Sequence[Work], first: int, done: set[tuple[str, int]]
) -> Iterator[tuple[Work, int]]:
    """What is left to try, in rounds of one seed."""
    seed = first
    while True:
        yield from (
            (work, seed) for work in order(chosen, seed) if (work.key, seed) not in done
        )
        seed += 1


def go_on(file: Path, seconds: float, chosen: list[Work], first: int = 1) -> None:
    """Try what the journal does not hold yet, until the time is over; the kind that is
    furthest behind comes first.
    """
    lines = list(read(file))
    done = {(f"{line['check']} {line['row']}", line["seed"]) for line in lines}
    total, failed = sum(map(_cases, lines)), sum(bool(line["error"]) for line in lines)
    spent = Counter[str]()
    for line in lines:
        spent[line["kind"]] += line["seconds"]
    left = {
        kind: rounds([work for work in chosen if work.kind == kind], first, done)
        for kind in dict.fromkeys(work.kind for work in chosen)
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    end, said = time.monotonic() + seconds, time.monotonic()
    with file.open("a", encoding="utf-8") as journal:
        if file.stat().st_size and not file.read_bytes().endswith(b"\n"):
            journal.write("\n")
        while time.monotonic() < end:
            work, seed = next(
                left[min(left, key=lambda kind: spent[kind] / SHARES[kind])]
            )
            line = tried(work, seed)
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            spent[work.kind] += line["seconds"]
            total, failed = total + _cases(line), failed + bool(line["error"])
            if line["error"]:
                print(
                    f'\n--only "{work.key}" --seed {seed}\n{line["error"]}', flush=True
                )
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(
                    f"\rseed {seed}: {total:,} cases, {failed} failed, "
                    f"{end - said:.0f} s left",
                    end="",
                    flush=True,
                )
    print()


def _cases(line: dict[str, Any]) -> int:
    found: int = line["counted"].get(coverage.CASES, 0)
    return found


def summary(file: Path) -> list[str]:
    """Markdown: cases, failures, seconds and seeds by kind and law; the shares of
    traits; every failure.
    """
    lines = sorted(read(file), key=lambda line: list(SHARES).index(line["kind"]))
    found = [
        "| kind | law | cases | failures | seconds | cases a second | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, law in dict.fromkeys((line["kind"], line["law"]) for line in lines):
        found.append(
            _row(
                kind,
                law,
                [line for line in lines if (line["kind"], line["law"]) == (kind, law)],
            )
        )
    found += [
        _row("all", "but rows", [line for line in lines if line["kind"] != "rows"]),
        _row("all", "", lines),
        "",
    ]
    counted: Counter[str] = Counter()
    for line in lines:
        if line["kind"] in ("laws", "compiled"):
            counted.update(line["counted"])
    found += [
        f"{name}: {share:.0%}" for name, share in coverage.trait_shares(counted).items()
    ]
    found += coverage.missing(counted)
    failed = [line for line in lines if line["error"]]
    return found + [
        f'`--only "{x["check"]} {x["row"]}" --seed {x["seed"]}`: {x["error"]}'
        for x in failed
    ]


def _row(kind: str, law: str, lines: Sequence[dict[str, Any]]) -> str:
    cases, failures = (
        sum(map(_cases, lines)),
        sum(bool(line["error"]) for line in lines),
    )
    seconds, seeds = (
        sum(line["seconds"] for line in lines),
        [line["seed"] for line in lines] or [0],
    )
    rate = f"{cases / seconds:,.0f}" if seconds else ""
    return (
        f"| {kind} | {law} | {cases:,} | {failures} | {seconds:.0f} | {rate} | "
        f"{min(seeds)} to {max(seeds)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("out/million.jsonl"))
    parser.add_argument(
        "--only", help="this check of this row alone: 'counts_are_exact gmp'"
    )
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument(
        "--summary",
        action="store_true",
        help="try nothing, and show what a journal holds",
    )
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
