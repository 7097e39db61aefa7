"""The examples run as a user would run them, and what they report is consistent."""

import importlib
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import sparsefn as sf

pytestmark = pytest.mark.deep

EXAMPLES = Path(__file__).parents[1] / "examples"
SEEDS, STEPS, SPARSITY = 2, 24, 0.95
LAYERS = (300 * 64, 100 * 300, 10 * 100)


class Done:
    """The output and files of a short run."""

    def __init__(self, out: Path) -> None:
        arguments = [
            f"--seeds={SEEDS}",
            f"--steps={STEPS}",
            f"--sparsity={SPARSITY}",
            f"--out={out}",
        ]
        command = [
            sys.executable,
            "-W",
            "error",
            str(EXAMPLES / "digits.py"),
            *arguments,
        ]
        done = subprocess.run(
            command, cwd=out.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        self.out, self.printed, self.bar = out, done.stdout, done.stderr
        self.report: dict[str, Any] = json.loads(
            (out / "digits.json").read_text(encoding="utf-8")
        )

    def result(self, method: str, distribution: str | None) -> dict[str, Any]:
        """The one result of a method and a distribution."""
        results = self.report["results"]
        (found,) = (
            r
            for r in results
            if (r["method"], r["distribution"]) == (method, distribution)
        )
        return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return Done(tmp_path_factory.mktemp("digits") / "out")


def test_a_progress_bar_counts_every_step(done: Done) -> None:
    ensembles = 1 + 4 * 2  # one-shot prunes the dense run
    assert f"{ensembles * STEPS}/{ensembles * STEPS}" in done.bar
    # A line for each run and a few more: 216 steps of milliseconds are not 216 lines.
    assert "\r" not in done.bar and len(done.bar.splitlines()) < 60


def test_the_table_is_aligned_and_says_what_the_json_says(done: Done) -> None:
    lines = done.printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("method"))
    rows = lines[start + 2 : start + 2 + 11]
    assert {len(line) for line in [lines[start], lines[start + 1], *rows]} == {
        len(lines[start])
    }
    assert not lines[start + 2 + 11]
    for row, result in zip(rows, done.report["results"], strict=True):
        cells = row.split()
        assert cells[:2] == [result["method"], result["distribution"] or "-"]
        expected = [
            result[name]
            for name in ("reached", "mean", "standard_error", "exploration", "seconds")
        ]
        for cell, number in zip(cells[2:], expected, strict=True):
            assert cell == f"{number:.{len(cell.split('.')[1])}f}"


def test_accuracies_are_one_a_seed_with_their_mean_and_standard_error(
    done: Done,
) -> None:
    for result in done.report["results"]:
        a, b = result["accuracy"]
        assert 0 <= min(a, b) <= max(a, b) <= 100
        assert result["mean"] == pytest.approx((a + b) / 2)
        assert result["standard_error"] == pytest.approx(
            abs(a - b) / math.sqrt(2) / math.sqrt(SEEDS)
        )
        assert result["seconds"] > 0
    assert done.result("dense", None)["mean"] > 70  # it learns: chance is 10


def test_the_sparsity_that_was_asked_for_is_reached(done: Done) -> None:
    total = sum(LAYERS)
    uniform = sum(sf.budgets.n_kept(n, SPARSITY) for n in LAYERS)
    erk = sf.budgets.n_kept(total, SPARSITY)
    assert done.result("dense", None)["reached"] == 0
    for method in ("static", "SET", "RigL", "GMP", "one-shot"):
        assert done.result(method, "uniform")["reached"] == pytest.approx(
            1 - uniform / total, abs=1e-12
        )
        assert done.result(method, "ERK")["reached"] == pytest.approx(
            1 - erk / total, abs=1e-12
        )


def test_exploration_counts_weights_that_were_ever_active(done: Done) -> None:
    for distribution in ("uniform", "ERK"):
        static = done.result("static", distribution)
        assert static["exploration"] == pytest.approx(1 - static["reached"], abs=1e-12)
        for method in ("SET", "RigL"):
            assert (
                static["exploration"]
                < done.result(method, distribution)["exploration"]
                < 1
            )
        for method in ("GMP", "one-shot"):
            assert done.result(method, distribution)["exploration"] == 1
    assert done.result("dense", None)["exploration"] == 1


def test_first_layer_connections_are_counted_for_each_pixel(done: Done) -> None:
    kept = sf.budgets.n_kept(LAYERS[0], SPARSITY)
    for method, before in {
        "static": kept,
        "SET": kept,
        "RigL": kept,
        "GMP": LAYERS[0],
        "one-shot": LAYERS[0],
    }.items():
        result = done.result(method, "uniform")
        for name, count in (
            ("connections_before", before),
            ("connections_after", kept),
        ):
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
        assert (
            f"sparsity {SPARSITY}: {claim} in {o['wins']} of {SEEDS} seeds"
            in done.printed
        )


def test_the_figure_is_a_png_of_some_size(done: Done) -> None:
    content = (done.out / "digits.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20]) >= 1000  # width in pixels


# ---- options, in this process --------------------------------------------------------


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("digits")


def test_the_defaults_are_those_of_the_committed_picture(
    digits: ModuleType, tmp_path: Path
) -> None:
    chosen = digits.options([f"--out={tmp_path / 'new' / 'out'}"])
    assert (chosen.seeds, chosen.steps, chosen.sparsity) == (6, 1000, [0.9, 0.98])
    assert chosen.methods == ["static", "set", "rigl", "gmp", "one-shot"]
    assert chosen.out.is_dir()


def test_sparsities_are_sorted_and_taken_once(
    digits: ModuleType, tmp_path: Path
) -> None:
    chosen = digits.options([f"--out={tmp_path}", "--sparsity", "0.9", "0.5", "0.9"])
    assert chosen.sparsity == [0.5, 0.9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds=0"], "argument --seeds: expected 1 or more, got 0"),
        (["--steps=2"], "argument --steps: expected 3 or more, got 2"),
        (["--steps=many"], "argument --steps: invalid integer value: 'many'"),
        (
            ["--sparsity", "0.9", "1.0"],
            "argument --sparsity: expected a fraction between 0 and 1, got 1.0",
        ),
        (
            ["--sparsity=nan"],
            "argument --sparsity: expected a fraction between 0 and 1, got nan",
        ),
        (["--methods", "rigl", "snip"], "argument --methods: invalid choice: 'snip'"),
        ([f"--out={__file__}"], "argument --out: "),
    ],
)
def test_a_bad_option_is_refused_before_training(
    digits: ModuleType,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stop:
        digits.options(arguments)
    assert stop.value.code == 2
    assert re.search(re.escape(message), capsys.readouterr().err)


@pytest.mark.parametrize("method", ["static", "set", "rigl", "gmp"])
@pytest.mark.parametrize("steps", [3, 4, 70])
def test_the_shortest_runs_reach_their_sparsity_too(
    digits: ModuleType, method: str, steps: int
) -> None:
    params = digits.he_init(sf.random.key(0))
    algorithm = digits.method(method, 0.9, "ERK", steps)(sf.random.key(1))
    state = algorithm.init(params)
    for step in range(steps):
        state = algorithm.update(state, params, step)
    assert sf.masks.n_kept(state.masks) == sf.budgets.n_kept(sum(LAYERS), 0.9)


class Stream(io.StringIO):
    """A standard error that is a terminal or is not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_a_line_now_and_then_elsewhere(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("_progress")
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal))
    with module.progress(1000, "RigL", seconds=3600.0) as bar:
        for _ in range(1000):
            bar.update()
    shown = stream.getvalue()
    assert "1000/1000" in shown and "RigL" in shown
    assert ("\r" in shown) == terminal
    if not terminal:
        assert len(shown.split("\n")) <= 4  # the start and the end


# ---- the ensemble --------------------------------------------------------------------


class Together:
    """The output and files of a quick run of the ensemble."""

    def __init__(self, out: Path) -> None:
        command = [
            sys.executable,
            "-W",
            "error",
            str(EXAMPLES / "ensemble.py"),
            "--quick",
            "--steps=30",
            f"--out={out}",
        ]
        done = subprocess.run(
            command, cwd=out.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        self.out, self.printed, self.bar = out, done.stdout, done.stderr
        self.report: dict[str, Any] = json.loads(
            (out / "ensemble.json").read_text(encoding="utf-8")
        )


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    return Together(tmp_path_factory.mktemp("ensemble") / "out")


def test_an_ensemble_has_members_of_exact_sparsities_and_their_prediction(
    together: Together,
) -> None:
    assert "30/30" in together.bar and "6 networks" in together.bar
    assert [r["sparsity"] for r in together.report["results"]] == [0.5, 0.95, 0.985]
    for r in together.report["results"]:
        assert r["kept"] == [sf.budgets.n_kept(sum(LAYERS), r["sparsity"])] * 2
        assert r["mean"] == pytest.approx(sum(r["accuracy"]) / 2)
        assert 0 <= r["together"] <= 100
    assert together.report["results"][0]["mean"] > 70  # it learns: chance is 10


def test_masks_of_an_ensemble_start_as_random_ones(together: Together) -> None:
    for r in together.report["results"]:
        whole = r["overlap"]["all layers"]
        assert 0 < whole["chance"] < 1 and 0 <= whole["after"] < 1
    whole = together.report["results"][0]["overlap"]["all layers"]
    # 25,100 weights each
    assert whole["before"] == pytest.approx(whole["chance"], rel=0.02)


def test_the_ensemble_prints_what_it_wrote(together: Together) -> None:
    lines = together.printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["sparsity"])
    for line, r in zip(
        lines[start + 2 : start + 5], together.report["results"], strict=True
    ):
        assert line.split()[:3] == [
            f"{r['sparsity']:g}",
            f"{r['kept'][0]:,}",
            f"{r['mean']:.2f}",
        ]
    wins = sum(r["together"] > r["mean"] for r in together.report["results"])
    assert f"beats the mean member at {wins} of 3 sparsities" in together.printed
    times = together.report["speed"]
    assert f"one by one: {times['ratio']:.1f} times faster" in together.printed
    assert min(times["ensemble_seconds"], times["loop_seconds"]) > 0
    assert "sparsified" in together.printed  # the summary of the members
    content = (together.out / "ensemble.png").read_bytes()
    assert (
        content.startswith(b"\x89PNG\r\n\x1a\n")
        and int.from_bytes(content[16:20]) >= 1000
    )


@pytest.fixture
def ensemble(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("ensemble")


def test_the_ensemble_is_64_networks_unless_quick(
    ensemble: ModuleType, tmp_path: Path
) -> None:
    chosen = ensemble.options([f"--out={tmp_path}"])
    assert (chosen.seeds * len(chosen.sparsities), chosen.steps, chosen.compile) == (
        64,
        500,
        False,
    )
    quick = ensemble.options([f"--out={tmp_path}", "--quick", "--compile"])
    assert (quick.seeds * len(quick.sparsities), quick.steps, quick.compile) == (
        6,
        60,
        True,
    )
    with pytest.raises(SystemExit):
        ensemble.options([f"--out={tmp_path}", "--steps=19"])
    with pytest.raises(SystemExit):
        ensemble.options([f"--out={__file__}"])


def test_a_step_that_rests_is_the_step_of_rigl(ensemble: ModuleType) -> None:
    data, _ = ensemble.load()
    members = ensemble.Members(
        sf.random.split(sf.random.key(0), 2),
        torch.tensor([0.5, 0.9], dtype=torch.float64),
    )
    state = torch.vmap(lambda key, sparsity: ensemble.start(key, sparsity, 40))(
        *members
    )
    x, y = ensemble.batches(data, members.keys, 1)
    moved = torch.vmap(ensemble.moving(40), in_dims=(0, 0, 0, 0, 0, None))(
        *members, state, x, y, 1
    )
    assert sf.checkpoint.tree_equal(
        ensemble.resting(40, compiled=False)(state, x, y), moved
    )


# ---- the transformer -----------------------------------------------------------------

IN_BLOCKS = 3 * 12 * 128 * 128
KEPT = {
    "dense": IN_BLOCKS,
    "small dense": 3 * 12 * 48 * 48,
    **dict.fromkeys(
        ("static", "SET", "RigL", "GMP", "STE"), sf.budgets.n_kept(IN_BLOCKS, 0.95)
    ),
    "SR-STE 2:4": IN_BLOCKS // 2,
}


class Written:
    """The output and files of a few steps of the transformer."""

    def __init__(self, out: Path) -> None:
        arguments = ["--quick", "--steps=12", "--sparsity=0.95", f"--out={out}"]
        command = [sys.executable, "-W", "error", str(EXAMPLES / "lm.py"), *arguments]
        done = subprocess.run(
            command, cwd=out.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        self.out, self.printed, self.bar = out, done.stdout, done.stderr
        self.report: dict[str, Any] = json.loads(
            (out / "lm.json").read_text(encoding="utf-8")
        )
        self.results: list[dict[str, Any]] = self.report["results"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("lm") / "out")


def test_every_transformer_keeps_exactly_what_was_asked_for(written: Written) -> None:
    assert "96/96" in written.bar
    assert {r["method"]: r["kept"] for r in written.results} == KEPT
    dense, *others = written.results
    for r in others:
        if r["method"] != "small dense":
            assert r["total"] - r["kept"] == dense["all_kept"] - r["all_kept"]


def test_the_held_out_loss_of_transformers_falls(written: Written) -> None:
    for r in written.results:
        assert [step for step, _ in r["curve"]] == list(range(1, 13))
        assert r["bits"] == r["curve"][-1][1] < r["curve"][0][1] < math.log2(95) + 2
        assert r["seconds"] > 0
    assert 2 < written.report["pair_bits"] < 4


def test_the_transformers_print_what_they_wrote(written: Written) -> None:
    lines = written.printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("method"))
    rows = lines[start + 2 : start + 2 + len(KEPT)]
    assert {len(line) for line in rows} == {len(lines[start])}
    for row, r in zip(rows, written.results, strict=True):
        assert (
            row.startswith(f"{r['method']}  ")
            and f" {r['kept']:,} of {r['total']:,} " in row
        )
        assert f" {r['bits']:.3f} " in row
    sparse = sorted(
        (r for r in written.results if KEPT[r["method"]] == KEPT["RigL"]),
        key=lambda r: r["bits"],
    )
    assert (
        "best first: " + ", ".join(f"{r['method']} {r['bits']:.3f}" for r in sparse)
        in written.printed
    )
    assert f"\n{sparse[0]['method']} writes:\n    | The " in written.printed
    for name in ("lm.png", "lm_run.png", "lm_masks.png"):
        content = (written.out / name).read_bytes()
        assert (
            content.startswith(b"\x89PNG\r\n\x1a\n")
            and int.from_bytes(content[16:20]) >= 1000
        )


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("lm")


def test_held_out_paragraphs_are_not_among_those_trained_on(lm: ModuleType) -> None:
    text = lm.load()
    train, held = (
        "".join(text.characters[i] for i in part.tolist())
        for part in (text.train, text.held)
    )
    # A long paragraph is prose, not a heading of the same name; the first held out may
    # begin in the other part.
    prose = [part for part in held.split("\n\n")[1:] if len(part) > 100]
    assert len(prose) > 30 and not any(part in train for part in prose)
    assert torch.equal(lm.load(100).train, text.train) and len(lm.load(100).held) == 100


@pytest.mark.parametrize("name", ["static", "set", "rigl", "gmp", "ste", "2:4"])
def test_pruned_weights_of_a_transformer_are_zero_and_the_rest_is_dense(
    lm: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(lm, "WIDTH", 16)
    model, state, _, result = lm.train(
        name, 0.9, lm.load(200), 12, 0, SimpleNamespace(update=lambda: None)
    )
    blocks = {
        path: p
        for path, p in model.named_parameters()
        if path.startswith("blocks.") and p.ndim == 2
    }
    n = sum(p.numel() for p in blocks.values())
    kept = n // 2 if name == "2:4" else sf.budgets.n_kept(n, 0.9)
    assert (
        sum(int(p.count_nonzero()) for p in blocks.values()) <= result["kept"] == kept
    )
    assert sf.masks.n_kept(state.masks) == kept
    assert all(
        p.all()
        for path, p in model.named_parameters()
        if path not in blocks and "bias" not in path
    )


def test_labels_are_moved_apart_in_their_order(lm: ModuleType) -> None:
    report = importlib.import_module("_lm_report")
    placed = report.apart([2.5, 1.0, 2.52, 2.51], 0.1)
    assert placed[1] == 1.0
    assert placed[2] - placed[3] == pytest.approx(0.1, abs=1e-3)
    assert placed[3] - placed[0] == pytest.approx(0.1, abs=1e-3)
    assert sum(placed) == pytest.approx(8.53)


def test_the_options_of_the_transformer(lm: ModuleType, tmp_path: Path) -> None:
    chosen = lm.options([f"--out={tmp_path}"])
    assert (chosen.steps, chosen.sparsity, chosen.seed, chosen.methods) == (
        400,
        0.9,
        0,
        list(lm.METHODS),
    )
    assert lm.options([f"--out={tmp_path}", "--quick"]).steps == 24
    for wrong in ("--steps=11", "--sparsity=1", "--seed=-1", "--methods=snip"):
        with pytest.raises(SystemExit):
            lm.options([f"--out={tmp_path}", wrong])


# ---- pruning with data ---------------------------------------------------------------


@pytest.fixture
def prune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("prune")
    monkeypatch.setattr(module.lm, "WIDTH", 16)
    return module


def test_a_trained_transformer_is_pruned_and_reported(
    prune: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--quick",
        "--seeds=2",
        "--steps=12",
        "--windows=4",
        "--levels",
        "0.7",
        "2:4",
        f"--out={tmp_path}",
    ]
    monkeypatch.setattr(sys, "argv", ["prune.py", *arguments])
    prune.main()
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "prune.json").read_text(encoding="utf-8"))
    by_level = {
        level: [r for r in report["results"] if r["level"] == level]
        for level in ("70%", "2:4")
    }
    blocks = 3 * 12 * 16 * 16
    for level, kept in {
        "70%": 3 * sum(sf.budgets.n_kept(n * 256, 0.7) for n in (3, 1, 4, 4)),
        "2:4": blocks // 2,
    }.items():
        assert [r["method"] for r in by_level[level]] == 2 * list(
            prune.METHODS.values()
        )
        assert [(r["kept"], r["total"]) for r in by_level[level]] == [
            (kept, blocks)
        ] * 12
    for seed in (0, 1):
        assert len({r["before"] for r in report["results"] if r["seed"] == seed}) == 1
    assert all(0 < r["bits"] < 9 and r["seconds"] > 0 for r in report["results"])
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("zeros"))
    assert (
        len({len(line) for line in lines[start : start + 14]}) == 1
        and not lines[start + 14]
    )
    for results in by_level.values():
        bits = {
            name: [r["bits"] for r in results if r["method"] == name]
            for name in prune.METHODS.values()
        }
        held = sum(
            a < b < c
            for a, b, c in zip(
                bits["SparseGPT"], bits["Wanda"], bits["magnitude"], strict=True
            )
        )
        assert f"SparseGPT < Wanda < magnitude in {held} of 2 seeds" in printed
        assert f"{bits['RIA'][0]:.3f} {bits['RIA'][1]:.3f}" in printed
    content = (tmp_path / "prune.png").read_bytes()
    assert (
        content.startswith(b"\x89PNG\r\n\x1a\n")
        and int.from_bytes(content[16:20]) >= 1000
    )


@pytest.mark.parametrize(
    "name", ["magnitude", "wanda", "swaps", "ria", "sparsegpt", "woodfisher"]
)
def test_pruning_with_data_changes_the_weights_that_it_may(
    prune: ModuleType, name: str
) -> None:
    torch.manual_seed(0)
    text = prune.lm.load(100)
    model = prune.lm.GPT(len(text.characters), 16)
    state = prune.prune(name, model, prune.calibration(text, 4, 0), prune.level("2:4"))
    before = sf.modules.params_of(model)
    for path, mask in state.masks.items():
        if mask.ndim == 0:
            assert torch.equal(state.params[path], before[path])
            continue
        assert (
            path.startswith("blocks.")
            and (mask.unflatten(1, (-1, 4)).sum(-1) == 2).all()
        )
        assert not state.params[path][~mask].any()
        same = torch.equal(state.params[path][mask], before[path][mask])
        assert same == (name not in ("sparsegpt", "woodfisher"))


def test_woodfisher_is_the_surgeon_of_each_row(prune: ModuleType) -> None:
    torch.manual_seed(0)
    text = prune.lm.load(100)
    model, windows = (
        prune.lm.GPT(len(text.characters), 16),
        prune.calibration(text, 4, 0),
    )
    path = "blocks.1.out.weight"
    state = prune.woodfisher(model, windows, prune.level("0.5"))
    params = sf.modules.params_of(model)
    rows = [
        torch.func.grad(lambda p, w=w: prune.loss(model, p, w[None]))(params)[path][3]
        for w in windows
    ]
    g = torch.stack(rows).double()
    inverse = torch.linalg.inv(
        prune.DAMP * torch.eye(16, dtype=torch.float64) + g.T @ g / 4
    )
    weight, mask = params[path][3].double(), state.masks[path][3]
    expected = weight - sum(
        weight[q] / inverse[q, q] * inverse[q] for q in (~mask).nonzero()[:, 0]
    )
    torch.testing.assert_close(
        state.params[path][3].double()[mask], expected[mask], rtol=1e-2, atol=1e-3
    )


def test_the_options_of_pruning(
    prune: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = prune.options([f"--out={tmp_path}"])
    assert (chosen.seeds, chosen.steps, chosen.windows) == (3, 400, 128)
    assert [kept.name for kept in chosen.levels] == ["50%", "70%", "2:4"]
    assert chosen.methods == list(prune.METHODS)
    assert prune.options(["--quick", f"--out={tmp_path}"]).windows == 8
    assert prune.options(
        ["--methods", "ria", "wanda", f"--out={tmp_path}"]
    ).methods == ["wanda", "ria"]
    for wrong, message in {
        "--levels=1": "between 0 and 1",
        "--levels=5:4": "5",
        "--methods=snip": "snip",
    }.items():
        with pytest.raises(SystemExit):
            prune.options([wrong, f"--out={tmp_path}"])
        assert message in capsys.readouterr().err


# ---- low-rank updates of a pruned model ----------------------------------------------


def test_low_rank_updates_keep_the_zeros_where_they_are_masked(
    prune: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lora = importlib.import_module("lora")
    arguments = [
        "--quick",
        "--steps=12",
        "--tune=3",
        "--windows=4",
        "--level=2:4",
        "--rank=2",
        f"--out={tmp_path}",
    ]
    monkeypatch.setattr(sys, "argv", ["lora.py", *arguments])
    lora.main()
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "lora.json").read_text(encoding="utf-8"))
    results = {r["way"]: r for r in report["results"]}
    half = report["total"] // 2
    assert report["total"] == 3 * 12 * 16 * 16
    assert {way: r["zeros"] for way, r in results.items() if way != lora.CARELESS} == {
        "dense": 0,
        lora.PRUNED: half,
        lora.MASKED: half,
        lora.KEPT: half,
        lora.FULL: half,
    }
    assert results[lora.CARELESS]["zeros"] < half // 10
    few = 2 * 3 * (4 + 2 + 5 + 5) * 16  # rank times the sides of the matrices
    assert {
        results[way]["trained"] for way in (lora.CARELESS, lora.MASKED, lora.KEPT)
    } == {few}
    assert len({r["bits"] for r in results.values()}) == 6
    assert "50.00%" in printed and f"{results[lora.KEPT]['bits']:.3f}" in printed


# ---- smaller networks ----------------------------------------------------------------


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("smaller")


def test_two_networks_get_smaller_while_they_train(
    smaller: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["smaller.py", "--quick", "--steps=20", f"--out={tmp_path}"]
    )
    smaller.main()
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "smaller.json").read_text(encoding="utf-8"))[
        "results"
    ]
    assert [r["network"] for r in results] == list(smaller.TITLES.values())
    for r in results:
        assert r["form"] == "class" and r["difference"] < 1e-4
        share = r["small"]["flops"] / r["dense"]["flops"]
        assert (
            0.2 < share <= 1 / 3 and r["small"]["params"] < 0.5 * r["dense"]["params"]
        )
        assert all(r[model]["torch_ms"] > 0 for model in ("dense", "small"))
        assert (
            f"{r['small']['params']:,}" in printed
            and f"{r['small']['flops']:,}" in printed
        )
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("network"))
    assert (
        len({len(line) for line in lines[start : start + 6]}) == 1
        and not lines[start + 6]
    )
    content = (tmp_path / "smaller.png").read_bytes()
    assert (
        content.startswith(b"\x89PNG\r\n\x1a\n")
        and int.from_bytes(content[16:20]) >= 1000
    )


def test_the_options_of_smaller_networks(
    smaller: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = smaller.options([f"--out={tmp_path}"])
    assert (chosen.seeds, chosen.steps, chosen.share, chosen.networks) == (
        2,
        600,
        1 / 3,
        ["convnet", "vit"],
    )
    for wrong, message in {
        "--share=1": "between 0 and 1",
        "--steps=19": "20 or more",
        "--networks=gpt": "gpt",
    }.items():
        with pytest.raises(SystemExit):
            smaller.options([wrong, f"--out={tmp_path}"])
        assert message in capsys.readouterr().err


# ---- the gallery ---------------------------------------------------------------------


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("gallery")


def test_every_method_of_the_gallery_is_drawn(
    gallery: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {"set", "rigl", "snfs", "gmp"} <= {*gallery.CARDS} <= {*dir(sf.methods)}
    monkeypatch.setattr(sys, "argv", ["gallery.py", "--steps=40", f"--out={tmp_path}"])
    monkeypatch.setattr(
        gallery,
        "draw",
        lambda card, file, draw=gallery.draw: (drawn.append(card), draw(card, file)),
    )
    drawn: list[Any] = []
    gallery.main()
    assert [card.name for card in drawn] == [*gallery.CARDS]
    printed = capsys.readouterr().out
    for card in drawn:
        assert len(card.masks) == 5 and len(card.kept) == 41
        assert re.search(
            rf"^{card.name} +keeps {card.kept[-1]:.3f}", printed, re.MULTILINE
        )
        content = (tmp_path / f"{card.name}.png").read_bytes()
        assert (
            content.startswith(b"\x89PNG\r\n\x1a\n")
            and int.from_bytes(content[16:20]) == 720
        )
    rigl = next(card for card in drawn if card.name == "rigl")
    assert all(mask.sum() == sf.budgets.n_kept(1024, 0.8) for mask in rigl.masks)
    assert rigl.masks[0].tolist() != rigl.masks[-1].tolist() and rigl.inside > 0.5


def test_the_drawing_is_about_as_large_as_the_masks(gallery: ModuleType) -> None:
    drawing = gallery.drawing()
    assert 0.2 <= drawing.float().mean() <= 0.23
    assert torch.equal(gallery.target(0) != 0, drawing) and not torch.equal(
        gallery.target(0), gallery.target(1)
    )


def test_the_committed_pictures_are_those_of_the_gallery_and_of_modest_size(
    gallery: ModuleType,
) -> None:
    files = {
        file.stem: file.stat().st_size
        for file in (EXAMPLES.parent / "docs" / "gallery").iterdir()
    }
    assert {*files} == {*gallery.CARDS} and sum(files.values()) < 400_000


# ---- four processes ------------------------------------------------------------------


def test_processes_train_as_one_and_others_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-W",
        "error",
        str(EXAMPLES / "distributed.py"),
        "--steps=4",
        f"--out={out}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    start = next(i for i, line in enumerate(lines) if line[:1] == ["processes"])
    four, two = lines[start + 2 : start + 7], lines[start + 7 : start + 10]
    for ranks, rows in ((4, four), (2, two)):
        assert rows[0][0] == str(ranks) and rows[-1][0] == "all"
        parts = [
            [int(cell.replace(",", "")) for cell in row[-4 if i == 0 else -3 :][:3]]
            for i, row in enumerate(rows)
        ]
        assert [sum(column) for column in zip(*parts[:-1], strict=True)] == parts[-1]
    assert four[-1][2] == two[-1][2]
    assert (
        "after each of 4 steps masks, weights and moments of all processes together "
        "had the bits" in done.stdout
    )
    content = (out / "distributed.png").read_bytes()
    assert (
        content.startswith(b"\x89PNG\r\n\x1a\n")
        and int.from_bytes(content[16:20]) >= 1000
    )


# ---- learned masks -------------------------------------------------------------------


def test_learned_masks_are_compared_with_masks_of_one_pass(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "learned_masks.py")]
    done = subprocess.run(
        [*command, "--quick", f"--out={tmp_path}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "learned_masks.json").read_text("utf-8"))
    methods = [row["method"] for row in results]
    assert methods[:4] == ["magnitude", "wanda", "ria", "sparsegpt"]
    assert methods[4:] == ["maskllm", "prox_sparse", "maskpro"]
    assert len({row["before"] for row in results}) == 1
    assert all(math.isfinite(row["bits"]) for row in results)
