"""The example runs as a user would run it, and what it reports is consistent."""

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sparsefn as sf

EXAMPLES = Path(__file__).parents[1] / "examples"
SEEDS, STEPS, SPARSITY = 2, 24, 0.95
LAYERS = (300 * 64, 100 * 300, 10 * 100)


class Done:
    """What a short run printed and wrote."""

    def __init__(self, out: Path) -> None:
        arguments = [f"--seeds={SEEDS}", f"--steps={STEPS}", f"--sparsity={SPARSITY}", f"--out={out}"]
        command = [sys.executable, "-W", "error", str(EXAMPLES / "digits.py"), *arguments]
        done = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.out, self.printed, self.bar = out, done.stdout, done.stderr
        self.report: dict[str, Any] = json.loads((out / "digits.json").read_text(encoding="utf-8"))

    def result(self, method: str, distribution: str | None) -> dict[str, Any]:
        """The one result of a method and a distribution."""
        results = self.report["results"]
        (found,) = (r for r in results if (r["method"], r["distribution"]) == (method, distribution))
        return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return Done(tmp_path_factory.mktemp("digits") / "out")


def test_a_progress_bar_counts_every_step(done: Done) -> None:
    ensembles = 1 + 4 * 2  # one-shot prunes the dense run
    assert f"{ensembles * STEPS}/{ensembles * STEPS}" in done.bar


def test_the_table_is_aligned_and_says_what_the_json_says(done: Done) -> None:
    lines = done.printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("method"))
    rows = lines[start + 2 : start + 2 + 11]
    assert {len(line) for line in [lines[start], lines[start + 1], *rows]} == {len(lines[start])}
    assert not lines[start + 2 + 11]
    for row, result in zip(rows, done.report["results"], strict=True):
        cells = row.split()
        assert cells[:2] == [result["method"], result["distribution"] or "-"]
        expected = [result[name] for name in ("reached", "mean", "standard_error", "exploration", "seconds")]
        for cell, number in zip(cells[2:], expected, strict=True):
            assert cell == f"{number:.{len(cell.split('.')[1])}f}"


def test_accuracies_are_one_a_seed_with_their_mean_and_standard_error(done: Done) -> None:
    for result in done.report["results"]:
        a, b = result["accuracy"]
        assert 0 <= min(a, b) <= max(a, b) <= 100
        assert result["mean"] == pytest.approx((a + b) / 2)
        assert result["standard_error"] == pytest.approx(abs(a - b) / math.sqrt(2) / math.sqrt(SEEDS))
        assert result["seconds"] > 0
    assert done.result("dense", None)["mean"] > 70  # it learns: chance is 10


def test_the_sparsity_that_was_asked_for_is_reached(done: Done) -> None:
    total = sum(LAYERS)
    uniform = sum(sf.budgets.n_kept(n, SPARSITY) for n in LAYERS)
    erk = sf.budgets.n_kept(total, SPARSITY)
    assert done.result("dense", None)["reached"] == 0
    for method in ("static", "SET", "RigL", "GMP", "one-shot"):
        assert done.result(method, "uniform")["reached"] == pytest.approx(1 - uniform / total, abs=1e-12)
        assert done.result(method, "ERK")["reached"] == pytest.approx(1 - erk / total, abs=1e-12)


def test_exploration_counts_weights_that_were_ever_active(done: Done) -> None:
    for distribution in ("uniform", "ERK"):
        static = done.result("static", distribution)
        assert static["exploration"] == pytest.approx(1 - static["reached"], abs=1e-12)
        for method in ("SET", "RigL"):
            assert static["exploration"] < done.result(method, distribution)["exploration"] < 1
        for method in ("GMP", "one-shot"):
            assert done.result(method, distribution)["exploration"] == 1
    assert done.result("dense", None)["exploration"] == 1


def test_first_layer_connections_are_counted_for_each_pixel(done: Done) -> None:
    kept = sf.budgets.n_kept(LAYERS[0], SPARSITY)
    for method, before in {"static": kept, "SET": kept, "RigL": kept, "GMP": LAYERS[0], "one-shot": LAYERS[0]}.items():
        result = done.result(method, "uniform")
        for name, count in (("connections_before", before), ("connections_after", kept)):
            assert [len(row) for row in result[name]] == [8] * 8
            assert sum(map(sum, result[name])) == pytest.approx(count)
        moved = result["connections_before"] != result["connections_after"]
        assert moved == (method != "static")


def test_orderings_are_counted_seed_by_seed(done: Done) -> None:
    found = {o["claim"]: o for o in done.report["orderings"]}
    assert len(found) == 7
    ours = done.result("RigL", "uniform")["accuracy"]
    theirs = done.result("SET", "uniform")["accuracy"]
    counted = found["RigL > SET (uniform)"]
    assert counted["wins"] == sum(a > b for a, b in zip(ours, theirs, strict=True))
    assert counted["ties"] == sum(a == b for a, b in zip(ours, theirs, strict=True))
    for claim, o in found.items():
        assert f"sparsity {SPARSITY}: {claim} in {o['wins']} of {SEEDS} seeds" in done.printed


def test_the_figure_is_a_png_of_some_size(done: Done) -> None:
    content = (done.out / "digits.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20]) >= 1000  # width in pixels


# ---- options, in this process --------------------------------------------------------------------


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("digits")


def test_the_defaults_are_those_of_the_committed_picture(digits: ModuleType, tmp_path: Path) -> None:
    chosen = digits.options([f"--out={tmp_path / 'new' / 'out'}"])
    assert (chosen.seeds, chosen.steps, chosen.sparsity) == (6, 1000, [0.9, 0.98])
    assert chosen.methods == ["static", "set", "rigl", "gmp", "one-shot"]
    assert chosen.out.is_dir()


def test_sparsities_are_sorted_and_taken_once(digits: ModuleType, tmp_path: Path) -> None:
    chosen = digits.options([f"--out={tmp_path}", "--sparsity", "0.9", "0.5", "0.9"])
    assert chosen.sparsity == [0.5, 0.9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds=0"], "argument --seeds: expected 1 or more, got 0"),
        (["--steps=2"], "argument --steps: expected 3 or more, got 2"),
        (["--steps=many"], "argument --steps: invalid integer value: 'many'"),
        (["--sparsity", "0.9", "1.0"], "argument --sparsity: expected a fraction of zeros between 0 and 1, got 1.0"),
        (["--sparsity=nan"], "argument --sparsity: expected a fraction of zeros between 0 and 1, got nan"),
        (["--methods", "rigl", "snip"], "argument --methods: invalid choice: 'snip'"),
        ([f"--out={__file__}"], "argument --out: "),
    ],
)
def test_a_bad_option_is_refused_before_training(
    digits: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        digits.options(arguments)
    assert stop.value.code == 2
    assert re.search(re.escape(message), capsys.readouterr().err)


@pytest.mark.parametrize("method", ["static", "set", "rigl", "gmp"])
@pytest.mark.parametrize("steps", [3, 4, 70])
def test_the_shortest_runs_reach_their_sparsity_too(digits: ModuleType, method: str, steps: int) -> None:
    params = digits.he_init(sf.random.key(0))
    algorithm = digits.method(method, 0.9, "ERK", steps)(sf.random.key(1))
    state = algorithm.init(params)
    for step in range(steps):
        state = algorithm.update(state, params, step)
    assert sf.masks.n_kept(state.masks) == sf.budgets.n_kept(sum(LAYERS), 0.9)
