"""`make results`: a tiny run of every claim, that is killed and goes on; its
statistics, page and figures.
"""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from results import data, figures, learned, lenet, page, runner, store, summary, tuning
from results.claims import CLAIMS, SECTIONS, Claim
from results.jobs import TINY, WARMUP, Job, Key, Plan, Row, Task, learning_rate

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "results" / "numbers"
CHANGES = {"cpu", "seconds", "ms", "narrow_ms"}  # times
needs_data = pytest.mark.skipif(
    bool(data.missing()), reason="needs the wheels of results/requirements.txt"
)


# ---- runs ----------------------------------------------------------------------------


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "results", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.deep
@needs_data
def test_a_tiny_run_of_everything_is_killed_and_goes_on(tmp_path: Path) -> None:
    options = ("--tiny", "--numbers", tmp_path / "numbers", "--docs", tmp_path / "docs")
    run, file, before = started(*options), tmp_path / "numbers" / "lenet.jsonl", ""
    while run.poll() is None and len(before.splitlines()) < 3:
        time.sleep(0.2)
        before = file.read_text() if file.exists() else ""
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    with file.open("a") as out:
        out.write('{"group": "lenet", "ver')  # killed as it wrote

    run = started(*options)
    _, progress = run.communicate()
    assert run.returncode == 0, progress
    assert "min left; last: " in progress
    assert file.read_text().startswith(before)  # nothing is run again
    files = (tmp_path / "numbers").glob("*.jsonl")
    lines = [
        json.loads(line) for file in files for line in file.read_text().splitlines()
    ]
    assert len({store.key(row) for row in lines}) == len(lines)
    rows = store.read(tmp_path / "numbers", runner.VERSIONS)
    wanted = {
        key
        for job in [*tuning.jobs(TINY, rows), *runner.all_jobs(TINY)]
        for key in job.makes()
    }
    assert rows.keys() == wanted
    assert all(row["cpu"] > 0 for row in rows.values())

    found = json.loads((tmp_path / "numbers" / "summary.json").read_text())
    assert len(found["claims"]) == len(CLAIMS) and not found["missing"]
    assert (tmp_path / "docs" / "results.md").read_text() == page.text(found)
    assert {file.name for file in (tmp_path / "docs").glob("*.png")} == {
        "results-methods.png",
        "results-claims.png",
    }

    # This process gets the same numbers as the two of the run.
    rates = tuning.chosen(rows, TINY)
    again = {
        "lenet": "RigL",
        "small": "ASP",
        "conv": "filters pruned",
        "collapse": "SynFlow",
        "text": "all",
        "learned": "all",
    }
    for group, name in again.items():
        job = next(
            job
            for job in runner.all_jobs(TINY)
            if (job.group, job.name) == (group, name)
        )
        for row in runner.done(job, TINY, rates):
            mine, theirs = (
                {k: v for k, v in r.items() if k not in CHANGES}
                for r in (row, rows[store.key(row)])
            )
            assert mine == theirs


def test_every_claim_has_its_runs_and_what_was_published() -> None:
    arms = {
        (key[0], key[1], key[2])
        for job in runner.all_jobs(Plan())
        for key in job.makes()
    }
    arms |= {
        ("collapse", arm, "reach") for group, arm, _ in arms if group == "collapse"
    }
    assert {side for claim in CLAIMS for side in (*claim.better, *claim.worse)} <= arms
    numbered = {claim.number for claim in CLAIMS} - {""}
    assert numbered == set(summary.PUBLISHED)
    assert {claim.section for claim in CLAIMS} == set(SECTIONS)
    assert [
        claim.text
        for claim in CLAIMS
        if bool(claim.says) != bool(claim.number or claim.source)
    ] == []
    assert [
        claim.text
        for claim in CLAIMS
        if bool(claim.says) != bool(claim.words and claim.case)
    ] == []
    named = [(claim.words, claim.case) for claim in CLAIMS if claim.says]
    assert len(set(named)) == len(named)
    assert len({(claim.section, claim.text) for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        if claim.number:
            assert (summary.gain(summary.PUBLISHED[claim.number]) > 0) == (
                claim.says == ">"
            )


def test_the_first_seeds_of_all_claims_come_first() -> None:
    jobs = runner.all_jobs(Plan())
    assert [job.seeds[0] for job in jobs] == sorted(job.seeds[0] for job in jobs)
    keys = [key for job in jobs for key in job.makes()]
    assert len(set(keys)) == len(keys)
    assert {key[3] for key in keys} == set(range(10))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (
            ["--tiny", "--numbers", "elsewhere"],
            "--tiny needs other folders: --numbers FOLDER --docs FOLDER",
        ),
    ],
)
def test_bad_options_are_told(options: list[str], message: str) -> None:
    run = started(*options)
    _, told = run.communicate()
    assert run.returncode == 2 and message in told


# ---- data ----------------------------------------------------------------------------


def test_folds_share_nothing_and_what_is_tuned_on_is_never_tested_on() -> None:
    x, y = torch.arange(100.0)[:, None], torch.arange(100)
    splits = [data.split(x, y, seed) for seed in range(10)]
    held = set(data.split(x, y, 3, tuning=True).test_y.tolist())
    assert len(held) == 10
    for seed, split in enumerate(splits):
        train, test = set(split.y.tolist()), set(split.test_y.tolist())
        assert (
            train | test | held == set(range(100))
            and len(train) == 72
            and len(test) == 18
        )
        assert split.test_y.tolist() == splits[seed % 5].test_y.tolist()
        assert data.split(x, y, seed, tuning=True).y.tolist() == split.y.tolist()
    assert (
        set().union(*(split.test_y.tolist() for split in splits))
        == set(range(100)) - held
    )


def test_other_data_is_refused() -> None:
    with pytest.raises(
        ValueError, match="expected the data of name with digest no, got [0-9a-f]{16}"
    ):
        data.same("name", torch.zeros(3).numpy(), "no")


@pytest.mark.deep
def test_the_text_of_a_seed_is_not_in_what_it_trains_on() -> None:
    text, other = data.text(0), data.text(1)
    assert len(text.test) == data.HELD and not torch.equal(text.test, other.test)
    assert not any(
        torch.equal(text.test[:200], window)
        for window in text.train.unfold(0, 200, 1)[:: 1 << 10]
    )
    assert int(text.train.max()) < len(text.characters)


# ---- rows ----------------------------------------------------------------------------


def row(group: str, arm: str, level: str, seed: int, **numbers: Any) -> Row:
    return {
        "group": group,
        "arm": arm,
        "level": level,
        "seed": seed,
        "version": "1",
        "cpu": 1.0,
        **numbers,
    }


def test_a_line_that_was_cut_is_dropped_and_other_versions_are_not_read(
    tmp_path: Path,
) -> None:
    store.add(tmp_path, [row("g", "a", "1", 0), row("g", "b", "1", 0)])
    with (tmp_path / "g.jsonl").open("a") as out:
        out.write('{"group": "g", "a')
    assert set(store.read(tmp_path, {"g": "1"})) == {
        ("g", "a", "1", 0),
        ("g", "b", "1", 0),
    }
    store.add(tmp_path, [row("g", "a", "1", 1)])
    assert len((tmp_path / "g.jsonl").read_text().splitlines()) == 3
    assert store.read(tmp_path, {"g": "2"}) == {}


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with (
        store.alone(tmp_path),
        pytest.raises(SystemExit, match="another run is writing to "),
        store.alone(tmp_path),
    ):
        pass
    with store.alone(tmp_path):
        pass


@pytest.mark.deep(but=["0.03"])
@pytest.mark.parametrize("best", [0.003, 0.03, 0.3, 3.0, 30.0])
def test_rates_are_tried_until_the_best_one_is_inside(best: float) -> None:
    plan = Plan()
    rows: dict[Key, Row] = {}
    while (
        missing := {key for job in tuning.jobs(plan, rows) for key in job.makes()}
        - rows.keys()
    ):
        away = {key: abs(math.log(float(key[2]) / best)) for key in missing}
        rows |= {
            key: row(*key, errors={"1": 0.1 * key[3] + far, "10": 1 + far})
            for key, far in away.items()
        }
    assert rows.keys() == {
        key for job in tuning.jobs(plan, rows) for key in job.makes()
    }
    for name, task in tuning.tasks(plan).items():
        chosen, tried = tuning.chosen(rows, plan)[name], tuning.tried(task, rows)
        if not task.grows:
            assert tried == sorted(task.rates) and chosen in tried
            continue
        assert best / 1.5 < chosen < best * 1.5 and tried[0] < chosen < tried[-1]
        assert chosen == min(tried, key=lambda rate: abs(math.log(rate / best)))
        assert {*task.rates} <= {*tried} and all(
            b == 2 * a for a, b in itertools.pairwise(tried)
        )


def test_equal_errors_choose_the_least_rate() -> None:
    plan = Plan()
    rows = {
        key: row(*key, errors={"1": 1.0})
        for job in tuning.jobs(plan, {})
        for key in job.makes()
    }
    (task, *_) = tuning.tasks(plan).values()
    assert tuning.tried(task, rows) == [0.1, 0.2, 0.4, 0.8]  # the first is tried next


def test_one_diverged_run_in_tuning_rules_a_rate_out_and_nan_never_wins() -> None:
    task = Task("lenet", "SET", ("1", "10"), (0.4, 0.2, 0.8))
    errors = {0.2: (14.0, 7.0), 0.4: (13.0, 6.5), 0.8: (12.0, 6.0)}
    rows = {
        ("tuning", task.name, str(rate), seed): {"errors": {"1": sparse, "10": less}}
        for rate, (sparse, less) in errors.items()
        for seed in task.seeds
    }
    assert tuning.best_rate(task, [*errors], rows) == 0.8
    for lost in (90.0, math.nan):
        rows["tuning", task.name, "0.8", 102] = {"errors": {"1": 12.0, "10": lost}}
        assert tuning.best_rate(task, [*errors], rows) == 0.4
    assert tuning.best_rate(task, [0.2, 0.4, 1.6], rows) is None  # not all are run


def test_a_rate_is_chosen_over_the_levels_that_it_serves() -> None:
    served: dict[str, set[str]] = {}
    for job in runner.all_jobs(Plan()):
        if job.group == "lenet" and job.name != "tickets":
            served.setdefault(job.name.split(", ")[0], set()).add(job.arms[0][1])
    for method, levels in served.items():
        task = tuning.tasks(Plan())[f"lenet {method}"]
        assert {float(min(levels, key=float)), float(max(levels, key=float))} == {
            *map(float, task.levels)
        }
    # no seed of a result
    for task in tuning.tasks(Plan()).values():
        assert min(task.seeds) >= Plan().seeds
        assert len(task.seeds) >= 3 or task.group == "learned"


def test_the_learning_rate_rises_over_a_tenth_and_falls_to_zero() -> None:
    rates = [learning_rate(0.8, 600)(step) for step in range(601)]
    rise = round(WARMUP * 600)
    assert rates[0] == pytest.approx(0.8 / rise) and rates[600] == pytest.approx(0)
    assert all(a < b for a, b in itertools.pairwise(rates[:rise]))
    assert all(a > b for a, b in itertools.pairwise(rates[rise:]))
    assert rates[300] == pytest.approx(0.4)
    # a step in a vmapped run
    assert learning_rate(0.8, 600)(torch.tensor(300)).item() == pytest.approx(0.4)


@pytest.mark.deep
@needs_data
def test_a_run_of_grasp_at_ten_per_cent_learns() -> None:
    # Without a rise of the rate it ended at 11 % after 600 steps, as units died in the
    # first ones.
    found = lenet.one("GraSP", "10", 0, Plan(), 0.2)
    assert found["error"] < 9


@needs_data
def test_an_error_in_a_job_names_it() -> None:
    with pytest.raises(ValueError, match="no method nothing") as caught:
        runner._work(
            (
                Job("lenet", "nothing", (0,), (("nothing", "3"),)),
                TINY,
                {"lenet nothing": 0.1},
            )
        )
    assert caught.value.__notes__ == [
        "in Job(group='lenet', name='nothing', seeds=(0,), arms=(('nothing', '3'),))"
    ]


def test_what_is_left_takes_as_long_as_jobs_of_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = [
        Job("g", name, (seed,), ((name, "1"),))
        for seed in range(2)
        for name in ("slow", "fast")
    ]
    progress = runner.Progress(jobs)
    progress.tick(jobs[0], 30.0)
    progress.tick(jobs[1], 10.0)
    # 40 seconds took 2 minutes, and 40 are left
    assert progress.rest(2.0) == pytest.approx(2.0)
    progress.tick(jobs[2], 30.0)
    assert progress.rest(7.0) == pytest.approx(1.0)
    progress.tick(jobs[3], 10.0)
    assert "4/4 jobs, " in capsys.readouterr().err


def test_a_task_with_a_grid_of_its_own_tries_no_more_rates() -> None:
    task = Task("learned", "MaskPro", ("2:4",), (2.0, 1.0, 4.0), (100,), grows=False)
    rows = {
        ("tuning", task.name, str(rate), 100): {"errors": {"2:4": error}}
        for rate, error in {1.0: 3.3, 2.0: 3.2, 4.0: 3.1}.items()
    }
    assert tuning.tried(task, rows) == [1.0, 2.0, 4.0]
    assert tuning.best_rate(task, [1.0, 2.0, 4.0], rows) == 4.0


def test_rates_are_known_of_tasks_whose_runs_have_ended() -> None:
    plan = Plan()
    task = tuning.tasks(plan)["learned MaskPro"]
    rows = {
        ("tuning", task.name, str(rate), seed): {"errors": {"2:4": 3.0 + rate}}
        for rate in task.rates
        for seed in task.seeds
    }
    assert tuning.known(rows, plan) == {task.name: min(task.rates)}
    with pytest.raises(AssertionError, match="lenet dense is not tuned"):
        tuning.chosen(rows, plan)


def test_counts_of_masks_are_exact_or_not() -> None:
    rows = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 0], [1, 0, 0, 1, 1, 1, 0, 0]]) > 0
    assert learned.is_exact([rows], "2:4") and learned.is_exact([rows], "50")
    moved = torch.tensor([[1, 1, 1, 0, 0, 1, 0, 0]]) > 0
    assert not learned.is_exact([rows, moved], "2:4")
    assert learned.is_exact([rows, moved], "50")
    every = torch.ones(1, 4) > 0
    assert not learned.is_exact([rows, every], "50")
    assert learned.is_exact([every, ~every], "50")


@pytest.mark.deep
def test_masks_are_learned_for_weights_that_stay() -> None:
    setting = learned.setting_of(0, TINY)
    weights = dict(setting.net.named_parameters())
    before = {path: weights[path].detach().clone() for path in setting.where}
    for method, rates in learned.RATES.items():
        level = learned.LEARNED[method]
        prior = learned.one_pass("Wanda", level, setting)
        state = learned.learn(method, setting, prior, 4, rates[0], 0)
        assert learned.is_exact([state.masks[path] for path in setting.where], level)
        for path in setting.where:
            mask = state.masks[path]
            expected = torch.where(mask, before[path], 0.0)
            assert torch.equal(state.params[path], expected)
            assert torch.equal(weights[path], before[path])


# ---- statistics ----------------------------------------------------------------------


def test_an_interval_is_from_the_second_least_to_the_second_greatest_of_ten() -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0, 5.0, 3.5, 8.0]
    assert summary.interval(values) == {
        "median": 3.75,
        "low": 1.5,
        "high": 8.0,
        "mean": 4.3,
        "n": 10,
    }
    assert summary.interval([2.0]) == {
        "median": 2.0,
        "low": None,
        "high": None,
        "mean": 2.0,
        "n": 1,
    }
    # five values have no interval of 95 %
    assert summary.interval([1.0] * 5)["low"] is None
    assert summary.interval([False, True] * 3) == {
        "median": 0.5,
        "low": 0.0,
        "high": 1.0,
        "mean": 0.5,
        "n": 6,
    }


@pytest.mark.parametrize("n", range(6, 41))
def test_intervals_cover_the_median_with_95_per_cent_and_no_closer_ones_do(
    n: int,
) -> None:
    found = summary.interval([float(i) for i in range(1, n + 1)])
    least = int(found["low"])
    assert found["high"] == n + 1 - least

    # the k-th least to the k-th greatest: between k and n - k are below the median
    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    assert coverage(least) >= 0.95 > coverage(least + 1)


@pytest.mark.parametrize("bad", [-90.0, 90.0, math.inf])
def test_one_bad_run_of_ten_does_not_decide_a_claim(bad: float) -> None:
    for sign, expected in ((1.0, summary.HOLDS), (-1.0, summary.FAILS)):
        found = summary.interval(
            [
                *(
                    sign * value
                    for value in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
                ),
                bad,
            ]
        )
        assert summary.verdict(">", found["low"], found["high"]) == expected
        assert 0.4 <= abs(found["low"]) <= 1.2 and 0.4 <= abs(found["high"]) <= 1.2


@pytest.mark.parametrize(
    ("says", "low", "high", "verdict"),
    [
        (">", 0.1, 0.2, summary.HOLDS),
        (">", -0.1, 0.2, summary.OPEN),
        (">", -0.2, -0.1, summary.FAILS),
        (">", 0.0, 0.0, summary.OPEN),
        (">", 0.0, 0.2, summary.OPEN),
        (">=", 0.0, 0.0, summary.HOLDS),
        (">=", -0.4, -0.1, summary.HOLDS),  # within the margin
        (">=", -0.6, 0.9, summary.OPEN),
        (">=", -0.9, -0.6, summary.FAILS),
        ("<", -0.2, -0.1, summary.HOLDS),
        ("<", 0.1, 0.2, summary.FAILS),
        ("<=", 0.1, 0.4, summary.HOLDS),
        ("<=", 0.6, 0.9, summary.FAILS),
        ("", 0.1, 0.2, summary.CONTROL),
        (">", None, None, summary.OPEN),
    ],
)
def test_verdicts(
    says: str, low: float | None, high: float | None, verdict: str
) -> None:
    assert summary.verdict(says, low, high) == verdict


def test_differences_are_paired_and_positive_where_the_first_is_better() -> None:
    a, b = ("lenet", "a", "1"), ("lenet", "b", "1")
    rows = {(*a, s): row(*a, s, error=5.0 + s) for s in range(3)} | {
        (*b, s): row(*b, s, error=7.0) for s in (1, 2, 3)
    }
    claim = Claim("methods", "a - b", (a,), (b,), ">", source="somewhere")
    assert summary.differences(rows, claim, 10) == [1.0, 0.0]
    found = summary.of_claim(rows, claim, 10)
    assert found is not None
    assert (
        found["median"],
        found["mean"],
        found["n"],
        found["better"],
        found["equal"],
    ) == (0.5, 0.5, 2, 1, 1)
    assert summary.of_claim({}, claim, 10) is None


def test_bits_more_than_dense_have_a_standard_error() -> None:
    rows: dict[Key, Row] = {}
    for seed, more in enumerate((0.1, 0.3)):
        key = ("learned", "dense", "0", seed)
        rows[key] = row(*key, bits=3.0 + seed)
        key = ("learned", "MaskLLM", "2:4", seed)
        rows[key] = row(*key, bits=3.0 + seed + more, exact=seed == 0)
    key = ("learned", "Wanda", "50", 1)
    rows[key] = row(*key, bits=4.5, exact=True)
    assert summary.lost(rows) == [
        {
            "arm": "MaskLLM",
            "level": "2:4",
            "mean": 0.2,
            "error": 0.1,
            "n": 2,
            "exact": 1,
        },
        {
            "arm": "Wanda",
            "level": "50",
            "mean": 0.5,
            "error": None,
            "n": 1,
            "exact": 1,
        },
    ]
    shown = page.Page({"learned": summary.lost(rows)}).more("learned")
    assert "| MaskLLM | 2:4 | +0.200 | 0.100 | 1 of 2 |" in shown
    assert "| Wanda | 50 | +0.500 |  | 1 of 1 |" in shown


def test_zeros_are_compared_with_the_pruned_model_of_the_seed() -> None:
    rows: dict[Key, Row] = {}
    for seed, zeros in enumerate((70, 60)):
        for way, found in (("dense", 0), ("pruned", 70 + seed), ("logits", zeros)):
            key = ("recovery", f"LLaMA, {way}", "70", seed)
            rows[key] = row(*key, zeros=found)
    kept = {found["arm"]: found["kept"] for found in summary.zeros_kept(rows)}
    assert kept == {"LLaMA, dense": 0, "LLaMA, pruned": 2, "LLaMA, logits": 1}


def test_recovery_of_a_convnet_shows_its_loss_beside_its_error() -> None:
    row = {"loss": 0.25, "error": 5.0, "zeros": 3}
    arms = ("convnet, pruned", "convnet, logits")
    rows = {("recovery", arm, "90", 0): row for arm in arms}
    recovered = {what: summary.arms(rows, "recovery", what) for what in row}
    found = {"recovered": recovered, "zeros": summary.zeros_kept(rows)}
    assert page.Page(found).more("recovery_convnet")[:3] == [
        "|  | test loss, nats | test error, % | seeds with the pruned model's zeros |",
        "| --- | --- | --- | --- |",
        "| convnet, logits | 0.250 | 5.00 | 1 of 1 |",
    ]


def test_a_published_difference_of_perplexities_is_in_bits() -> None:
    assert summary.gain({"a": 4.0, "b": 16.0, "perplexity": True}) == 2.0
    assert summary.gain({"a": 92.9, "b": 91.5}) == 1.4


def test_the_reach_is_the_last_compression_before_the_first_that_cuts() -> None:
    paths = {
        "3": True,
        "10": True,
        "30": False,
        "100": True,
        "300": False,
        "1000": False,
    }
    rows = {
        ("collapse", "m", k, 0): row("collapse", "m", k, 0, connected=v)
        for k, v in paths.items()
    }
    assert summary.reach(rows, "m", 0) == pytest.approx(1.0)
    assert summary.reach(rows, "m", 1) is None


# ---- page ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (NUMBERS / "summary.json").read_text(encoding="utf-8")
    )
    return found


def test_the_page_is_made_of_the_summary_and_that_of_the_rows(
    shown: dict[str, Any],
) -> None:
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page.text(
        shown
    )
    made = summary.summarised(store.read(NUMBERS, runner.VERSIONS), Plan())
    assert json.loads(json.dumps(made)) == shown


def test_the_page_that_says_how_to_choose_has_these_numbers(
    shown: dict[str, Any],
) -> None:
    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    errors = {
        (row["arm"], row["level"]): f"{row['median']:.1f}"
        for row in shown["errors"]["lenet"]
    }
    arms = {
        "`sf.methods.imp`": "IMP",
        "`sf.gmp(0.97, steps=steps)`": "GMP",
        "`sf.rigl(0.97, steps=steps)`": "RigL",
        "`sf.set(0.97, steps=steps)`": "SET",
        "`sf.methods.snip(0.97)`": "SNIP",
        "`sf.static(0.97)`": "static",
        "each layer divided by the root of its density": "static, scaled start",
    }
    for use, arm in arms.items():
        cells = " | ".join(errors[arm, level] for level in ("10", "3", "1"))
        assert f"| {use} | {cells} |" in text
    assert f"| `sf.dense()` | {errors['dense', '100']} |" in text
    bits = {row["text"]: f"{row['median']:.2f}" for row in shown["claims"]}
    half, two, more = (
        bits[f"SparseGPT - Wanda, {how}"]
        for how in ("50 % pruned", "2:4", "70 % pruned")
    )
    assert f"{half} bits at 50%, {two} at 2:4 and {more} at 70%" in " ".join(
        text.split()
    )


def test_runs_that_diverged_are_told() -> None:
    losses = {
        ("lenet", "SET", "5", 0): 2.303,
        ("lenet", "SET", "5", 1): 0.4,
        ("conv", "dense", "100", 0): math.nan,
    }
    rows = {key: row(*key, loss=loss, error=9.0) for key, loss in losses.items()}
    found = summary.diverged(rows)
    assert [
        (each["group"], each["arm"], each["level"], each["runs"], each["n"])
        for each in found
    ] == [
        ("conv", "dense", "100", 1, 1),
        ("lenet", "SET", "5", 1, 2),
    ]
    text = page.text({**summary.summarised({}, Plan()), "diverged": found})
    assert "count as they are: 1 of 1 of conv dense 100; 1 of 2 of lenet SET 5." in text


def test_the_page_opens_with_what_holds_in_words_and_one_figure() -> None:
    errors = {"holds": 1.0, "fails": 4.0, "is open": 2.0}
    rows: dict[Key, Row] = {}
    for arm, error in {**errors, "other": 2.0}.items():
        rows |= {
            ("lenet", arm, "1", seed): row(
                "lenet", arm, "1", seed, error=error + seed % 3
            )
            for seed in range(6)
        }
    claims = []
    for arm in errors:
        a, b = ("lenet", arm, "1"), ("lenet", "other", "1")
        for case in ("1 %", "2 %"):
            claim = Claim(
                "methods",
                f"{arm}, {case}",
                (a,),
                (b,),
                ">",
                "rigl-static-10",
                "",
                f"The claim {arm}",
                case,
            )
            claims.append(summary.of_claim(rows, claim, 10))
    made = page.text({**summary.summarised({}, Plan()), "claims": claims})
    assert "Of 6 claims 2 hold, 2 do not hold, 2 are open." in made
    assert (
        "The runs are not complete: 6 of these have fewer seeds, the least 6." in made
    )
    order = [
        "**What holds**\n\n- The claim holds: 1 %; 2 %\n",
        "**What does not hold**\n\n- The claim fails: 1 %; 2 %\n",
        "(results-methods.png)",
        "**What is open**, as the seeds do not agree\n\n- The claim is open: 1 %; 2 "
        "%\n",
        "## How a claim is decided",
        "(results-claims.png)",
        "| **does not hold** | fails, 1 % | -2.00 [-2.00, -2.00] | -2.00 | 0 of 6; 4 "
        "to run | +1.40, WRN",
        "| open | is open, 1 % | +0.00 [+0.00, +0.00] | +0.00 | 0 of 6, equal in 6; 4 "
        "to run | ",
        "| holds | holds, 1 % | +1.00 [+1.00, +1.00] | +1.00 | 6 of 6; 4 to run | ",
        "1. [1911.11134](https://arxiv.org/abs/1911.11134): the numbers behind figure "
        "4",
    ]
    places = [made.index(part) for part in order]
    assert places == sorted(places)


def test_a_page_before_the_first_run_says_so(tmp_path: Path) -> None:
    empty = summary.summarised({}, Plan())
    text = page.text(empty)
    assert (
        text.count("Not run yet.") == len(SECTIONS)
        and "| lenet | 0 of 690 | 0 |" in text
        and ".png" not in text
    )
    figures.draw(empty, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_labels_keep_their_order_and_a_gap() -> None:
    places = figures.spread([5.0, 0.0, 0.1, 0.2, 9.9], 1.0, 0.0, 10.0)
    order = sorted(places)
    assert places.index(order[0]) == 1 and order[-1] <= 10.0 and order[0] >= 0.0
    assert all(b - a >= 1.0 - 1e-9 for a, b in itertools.pairwise(order))
    assert figures.spread([9.0, 9.5], 1.0, 0.0, 9.5) == [8.5, 9.5]
