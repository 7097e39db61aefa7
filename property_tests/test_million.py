"""The journal of a long run: it goes on where it was ended, divides the time, and says
what failed.
"""

import itertools
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import sparsefn as sf
from property_tests import fuzzers, million
from property_tests.million import SHARES, Work, go_on, read, summary, tried, works
from tests.shrinking import compare


def works_of(bad_seed: int) -> list[Work]:
    def good(seed: int, counted: Counter[str]) -> None:
        counted.update(["cases", "ties"])

    def bad(seed: int, counted: Counter[str]) -> None:
        assert seed != bad_seed, "a count is off"

    return [
        Work("laws", "exact_count", "counts", "gmp", good),
        Work("laws", "purity", "pure", "rigl", bad),
    ]


def test_a_run_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ticks = tmp_path / "out" / "journal.jsonl", itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    go_on(file, 12, works_of(2))
    lines = list(read(file))
    file.write_text(file.read_text()[:-20])  # a kill
    go_on(file, 12, works_of(2))
    again = list(read(file))
    keys = [(line["check"], line["seed"]) for line in again]
    assert len(again) > len(lines) and len(set(keys)) == len(keys)
    assert {seed for _, seed in keys} == set(
        range(1, max(seed for _, seed in keys) + 1)
    )
    text = "\n".join(summary(file))
    assert (
        "| laws | purity | 0 | 1 |" in text
        and '`--only "pure rigl" --seed 2`: AssertionError: a count is off' in text
    )
    assert "ties: 100%" in text


def test_each_kind_gets_its_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ticks = [0.0], itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(million, "used", lambda: clock[0])

    def taking(kind: str, seconds: float) -> Work:
        def run(seed: int, counted: Counter[str]) -> None:
            clock[0] += seconds

        return Work(kind, kind, "check", kind, run)

    file = tmp_path / "journal.jsonl"
    for _ in range(2):  # also where a run goes on
        go_on(
            file,
            500,
            [taking("laws", 1.0), taking("compiled", 7.0), taking("rows", 0.25)],
        )
        spent = Counter[str]()
        for line in read(file):
            spent[line["kind"]] += line["seconds"]
        whole = sum(SHARES[kind] for kind in spent)
        for kind, seconds in spent.items():
            assert abs(seconds - spent.total() * SHARES[kind] / whole) <= 7.0
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_there_is_work_of_every_kind() -> None:
    found = works()
    assert len({work.key for work in found}) == len(found) > 3000
    assert {work.kind for work in found} == set(SHARES)
    assert {work.law for work in found} >= {law.name for law in sf.testing.LAWS}
    work = next(work for work in found if work.name == "runs_resume")
    line = tried(work, 3)
    assert (
        line["error"] is None
        and line["counted"]["cases"] == 10
        and line == {**line, "seed": 3}
    )
    assert million.order(found, 1) != million.order(found, 2)


@pytest.mark.deep
def test_a_tree_is_drawn_and_compiled() -> None:
    work = next(
        work
        for work in works()
        if work.key == "one_compiled_update_serves_two_models gmp"
    )
    line = tried(work, 2)
    assert (
        line["error"] is None
        and line["kind"] == "compiled"
        and line["counted"]["cases"] == 1
    )


def test_rows_of_scores_hold_against_a_sort() -> None:
    counted = Counter[str]()
    fuzzers.rows_of_scores(5, counted)
    assert counted == {"cases": 4 * 5 * 4 * fuzzers.ROWS}  # dtypes, palettes, functions
    x = torch.tensor([[0.0, torch.nan, -0.0, 3.0, 3.0]])
    free = torch.tensor([[True, True, True, True, False]])
    assert fuzzers.ranks(x, free).tolist() == [[1, 3, 2, 0, 4]]


@pytest.mark.parametrize("name", ["topk_mask", "drop_lowest", "grow_highest"])
def test_a_tie_that_goes_to_the_last_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(sf.masks, name)

    def turned(scores, *args, exclude=None, **options):  # type: ignore[no-untyped-def]
        *masks, n = args
        options |= {} if exclude is None else {"exclude": exclude.flip(-1)}
        return real(
            scores.flip(-1), *(mask.flip(-1) for mask in masks), n, **options
        ).flip(-1)

    monkeypatch.setattr(sf.masks, name, turned)
    with pytest.raises(AssertionError, match=f"{name} of "):
        fuzzers.rows_of_scores(5, Counter())


@pytest.mark.deep
@pytest.mark.parametrize("name", fuzzers.NETWORKS)
def test_a_network_of_other_outputs_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = compare.check_outputs, []
    monkeypatch.setattr(
        compare,
        "check_outputs",
        lambda wanted, *rest: seen.append(rest) or real(wanted, *rest),
    )
    work = next(
        work for work in works() if work.kind == "shrinking" and work.row == name
    )
    monkeypatch.setattr(fuzzers, "NETS_TRIED", 3)
    line = tried(work, 1)
    assert line["error"] is None and line["counted"]["cases"] == 3 and seen
    monkeypatch.setattr(
        compare,
        "check_outputs",
        lambda wanted, *rest: real([x + 1 for x in wanted], *rest),
    )
    assert "Tensor-likes are not close" in tried(work, 1)["error"]


def test_what_fails_of_a_primitive_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(subject: object, example: object) -> None:
        raise AssertionError(f"{subject} is wrong")

    monkeypatch.setattr(
        fuzzers,
        "LAWS",
        [fuzzers.LAWS[0]._replace(check=check, subjects={"bits": "bits"})],
    )
    (work,) = (work for work in works() if work.kind == "primitives")
    assert (
        tried(work, 1)["error"] == "AssertionError: bits is wrong"
        and work.key == "check bits"
    )
