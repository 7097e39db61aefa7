"""The benchmarks run as a user would run them, and hold masks against those of the
peers. No time is asserted.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparsefn._engine.backends import BACKENDS, has_backend

pytestmark = pytest.mark.deep

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TARGETS = tomllib.loads((BENCHMARKS / "targets.toml").read_text(encoding="utf-8"))[
    "target"
]
PEERS = {
    "selection": {"torch.topk, scatter", "prune.global_unstructured"},
    "pieces": {"torch.ao WeightNormSparsifier", "torch.rand", "dense"},
    "updates": {
        "torch.topk of each layer, twice",
        "torch.topk and torch.rand of each layer",
    },
    "training": {"TorchOpt's adam, dense", "torch.nn.utils.prune, torch.optim"},
    "ensembles": {"loop", "vmap", "vmap, compiled"},
    "pruning": {"forward alone", "hooks, squares", "hooks, products"}
    | {"Cholesky and products alone", "the authors' formulation, half kept"},
    "depth": {
        "one forward pass and the solver alone",
        "sparsefn.posttraining.calibration.in_order",
    },
    "watching": {"as it is", "in passive"},
    "shrinking": {
        "sparsefn, traced before",
        "torch.export alone",
        "traced and analysed",
        "analysis",
    },
}
# Rows of peers that are installed apart.
APART = {
    "rigl-torch",
    "sparsefn.drop_grow",
    "cerebras_pytorch, masks alone",
    "Torch-Pruning",
}
APART |= {"llm-compressor's oneshot"}
FACTS = {
    "date",
    "cpus",
    "architecture",
    "capability",
    "threads",
    "omp_wait_policy",
    "load",
}
FACTS |= {"python", "torch", "numpy", "sparsefn"}


def module_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"benchmark_{name}", BENCHMARKS / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def timing() -> ModuleType:
    return module_of("_timing")


@pytest.mark.parametrize("name", PEERS)
def test_a_benchmark_runs_and_its_masks_agree(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARKS / f"{name}.py"),
        "--quick",
        "--smoke",
        f"--out={tmp_path}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert written["size"] == "smoke" and written["machine"]["threads"] == 1
    assert written["machine"]["torch"] == torch.__version__
    assert set(written["machine"]) == FACTS  # no name and no path of the machine
    names = set()
    for title, rows in written["tables"].items():
        assert title in done.stdout
        assert rows[0]["ratio"] == 1.0
        for row in rows:
            names.add(row["name"])
            assert row["seconds"] > 0 and row["low"] <= row["ratio"] <= row["high"]
    aims = [target for target in TARGETS if target["script"] == name]
    assert (
        names
        >= PEERS[name]
        | {target[row] for target in aims for row in ("of", "to") if row in target}
        - APART
    )


def test_processes_that_share_rows_have_the_bits_of_one(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARKS / "rows.py"),
        "--smoke",
        f"--out={tmp_path}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr  # it compares the bits itself
    written = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [len(rows) for rows in written["tables"].values()] == [2] * 6
    assert all(
        title in done.stdout and rows[0]["ratio"] == 1.0
        for title, rows in written["tables"].items()
    )


def test_simulated_processes_have_the_mask_of_one_and_few_messages(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARKS / "sharded.py"),
        "--smoke",
        f"--out={tmp_path}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr  # it compares the masks itself
    written = json.loads((tmp_path / "sharded.json").read_text(encoding="utf-8"))
    assert written["size"] == "smoke" and set(written["machine"]) == FACTS
    for title, rows in written["tables"].items():
        assert title in done.stdout
        assert all(2 <= row["collectives"] <= 12 for row in rows), (
            "neither leaves nor processes make more"
        )
        assert all(
            row["percent"]
            == pytest.approx(100 * row["kib"] * 1024 / 4 / row["weights"])
            for row in rows
        )
    for title, row in (
        (target["table"], target["of"])
        for target in TARGETS
        if target["script"] == "sharded"
    ):
        smaller = {"1e7": "1e4", "1.6e7": "1.6e4"}
        for large, small in smaller.items():  # a thousandth in a smoke run
            title, row = title.replace(large, small), row.replace(large, small)
        assert row in {found["name"] for found in written["tables"][title]}


def test_launches_are_counted_and_nothing_waits(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARKS / "launches.py"),
        "--smoke",
        f"--out={tmp_path}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "launches.json").read_text(encoding="utf-8"))
    tables = [
        {row["name"]: row for row in table} for table in written["tables"].values()
    ]
    rows = tables[0] | tables[1]
    assert set(written["machine"]) == FACTS and all(
        row["name"] in done.stdout for row in rows.values()
    )
    solves = tables.pop(2)  # which read whether a factor exists
    assert len(solves) == 4 and all(row["waits"] == 5 for row in solves.values())
    assert not any(row["waits"] for table in tables for row in table.values())
    # Budgets, in launches, of updates of 54 leaves: a change that makes one for each
    # leaf breaks them.
    most = {
        "gmp": 35,
        "rigl": 85,
        "set": 640,
        "snfs": 690,
        "rigl and adam, masks stay": 75,
        "adam under masks": 70,
    }
    assert {
        name: rows[name]["launches"]
        for name in most
        if rows[name]["launches"] > most[name]
    } == {}
    assert (
        rows["rigl"]["bytes_a_weight"] < 350
        and rows["topk_mask"]["bytes_a_weight"] < 100
    )
    # Selection is counted, too, though on this device it knows its results without an
    # operation.
    counts = {
        "topk_mask": 18,
        "topk_mask, a count in a tensor": 24,
        "topk_mask, 2:4": 13,
        "topk_mask, 8:16": 13,
    }
    assert {name: rows[name]["launches"] for name in counts} == counts


@pytest.mark.parametrize("way", [[], ["--device-path"], ["--kernels"]])
def test_overhead_is_counted_every_way(way: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(BENCHMARKS / "overhead.py"), *way]
    done = subprocess.run(
        [*command, "--smoke", f"--out={tmp_path}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "overhead.json").read_text(encoding="utf-8"))
    (rows,) = written["tables"].values()
    assert set(written["machine"]) == FACTS and len(rows) == 11
    assert all(row["milliseconds"] > 0 and row["calls_a_leaf"] > 5 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_its_benchmark_says_so_in_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARKS / "device.py"),
        f"--out={tmp_path}",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "no CUDA device is here: nothing is measured\n" and not list(
        tmp_path.iterdir()
    )


def test_what_a_device_will_run_runs_on_the_cpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARKS / "device.py"),
        "--smoke",
        "--device=cpu",
    ]
    done = subprocess.run(
        [*command, f"--out={tmp_path}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tables = json.loads((tmp_path / "device.json").read_text(encoding="utf-8"))[
        "tables"
    ]
    assert len(tables) == 18
    rows = [row for table in tables.values() for row in table]
    assert [row for row in rows if "Error" in row["note"]] == []
    absent = {row["what"] for row in rows if row["value"] is None}
    assert absent == {"kernels", "memcheck", "racecheck", "capture and replay"}
    compared = tables["exactness: how many cases differ"]
    assert len(compared) == 12 and all(row["value"] == 0.0 for row in compared)
    assert all(re.fullmatch(r"of [1-9]\d* cases", row["note"]) for row in compared)


def test_a_device_whose_bits_differ_is_found_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = module_of("_device")
    bench = device.Bench("cpu", smoke=True, seconds=60.0)
    bench.begin("table")
    ones, zeros = [torch.ones(2)], [torch.zeros(2)]
    bench.equal("same", device.OFF, iter([(ones, ones)]))
    assert bench.wrong == 0
    bench.equal("values", device.OFF, iter([(ones, ones), (ones, zeros)]))
    bench.equal("dtypes", device.OFF, iter([(ones, [torch.ones(2).double()])]))
    bench.equal("raises", device.OFF, (1 / 0 for _ in range(1)))
    bench.time("raises", device.OFF, lambda: 1 / 0)
    bench.end = 0.0
    bench.equal("late", device.OFF, iter([(ones, zeros)]))
    bench.time("late", device.OFF, lambda: None)
    assert bench.wrong == 3  # what differs, and what could not be compared
    noted = [(line.value, line.note) for line in bench.tables["table"]]
    assert noted[:3] == [(0.0, "of 1 cases"), (1.0, "of 2 cases"), (1.0, "of 1 cases")]
    assert (
        noted[3][0] is noted[4][0] is None
        and "ZeroDivisionError" in noted[3][1]
        and "Zero" in noted[4][1]
    )
    assert (
        noted[6] == (None, "no time left") and "no time left" in capsys.readouterr().out
    )


def test_kernels_are_on_where_a_row_says_so_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = module_of("_device")
    monkeypatch.setitem(BACKENDS, ("winners", "meta"), lambda *args: None)
    assert (
        device.Bench("cpu", smoke=True, seconds=60.0).refused
        and not device.Bench("meta", True, 60.0).refused
    )
    for way, on in (
        (device.ON, True),
        (f"{device.ON}, int", True),
        (device.OFF, False),
        ("torch.rand", False),
    ):
        with device.switched(way):
            assert has_backend("winners", "meta") == on
        assert has_backend("winners", "meta")


def test_a_peer_that_is_not_there_is_named_with_what_installs_it() -> None:
    code = """
import importlib.metadata, sys
sys.modules["rigl_torch"] = None
finder = importlib.metadata.MetadataPathFinder
finder.find_distributions = lambda *arguments, **options: iter(())
import updates
assert updates.rigl_torch_cases([]) == updates.cerebras_cases([]) == []
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("rigl-torch", "cerebras_pytorch"):
        assert f"{name} is left out" in done.stdout
    assert (
        done.stdout.count("pip install --no-deps -r benchmarks/requirements-peers.txt")
        == 2
    )


def test_rounds_alternate_and_ratios_are_of_one_round(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that the alternatives move themselves, each call further than the one
    # before.
    clock, order = [0.0], []

    def takes(name: str, share: float) -> None:
        order.append(name)
        clock[0] += share * len(order)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    options = timing.options_of("", ["--rounds=3"])
    cases = [
        timing.Case("a", lambda: takes("a", 1.0)),
        timing.Case("b", lambda x: takes("b", x), lambda: 3.0),
    ]
    rows = timing.compare("title", cases, options)
    assert order == ["a", "b", "a", "b", "a", "b", "b", "a", "a", "b"]
    # Calls 5 to 10 take 5 and 3 * 6, 3 * 7 and 8, 9 and 3 * 10: b over a is 18/5, 21/8
    # and 10/3.
    assert (rows[0].rounds, rows[1].rounds) == ((5.0, 8.0, 9.0), (18.0, 21.0, 30.0))
    assert (rows[0].seconds, rows[1].seconds) == (8.0, 21.0)
    assert rows[1].ratio == pytest.approx(10 / 3)


def test_inputs_are_taken_in_turn(timing: ModuleType) -> None:
    run = timing.in_turn(lambda x: x * x, [1, 2, 3])
    assert [run() for _ in range(4)] == [1, 4, 9, 1]


def test_masks_agree_up_to_the_order_of_ties_only(timing: ModuleType) -> None:
    scores = torch.tensor([3.0, 2.0, 2.0, 1.0])
    first, second = (
        torch.tensor([True, True, False, False]),
        torch.tensor([True, False, True, False]),
    )
    timing.same_up_to_ties(first, second, scores)
    with pytest.raises(AssertionError, match="2 entries of several scores differ"):
        timing.same_up_to_ties(first, torch.tensor([True, False, False, True]), scores)
    with pytest.raises(AssertionError, match="kept 2 of"):
        timing.same_up_to_ties(first, torch.tensor([True, True, True, False]), scores)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of a call is measured on Linux",
)
def test_the_peak_of_a_call_holds_what_it_makes_and_drops() -> None:
    # In a process of its own, so that no test before it leaves memory that is used
    # again.
    code = """
import torch
from _timing import Case, memory_of
n = 2**23
for case in (
    Case("", lambda: torch.ones(n).add(1).sum()),
    Case("", lambda: torch.ones(n).add(1)),
    Case("", torch.sum, lambda: torch.ones(n)),
):
    print(*memory_of(case))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=True,
    )
    (both, dropped), (half, kept), (neither, nothing) = (
        map(float, line.split()) for line in done.stdout.splitlines()
    )
    # two tensors of 32 MiB, one of them the result
    assert 60 < both < 72 and 60 < half < 72 and 28 < kept < 36
    assert max(dropped, neither, nothing) < 8  # what `setup` makes is not counted


def test_targets_are_held_against_what_was_measured(tmp_path: Path) -> None:
    def rows(*seconds: float) -> list[dict[str, object]]:
        return [
            {
                "name": name,
                "rounds": [taken, 2 * taken, 4 * taken],
                "seconds": taken,
                "peak_mib": taken,
                "extra": taken,
            }
            for name, taken in zip(
                ("sparsefn.topk_mask", "torch.topk, scatter"), seconds, strict=True
            )
        ]

    for threads, ours in ((1, 2.0), (2, 4.0)):
        (tmp_path / str(threads)).mkdir()
        content = {
            "machine": {"threads": threads},
            "tables": {"keep 10% of 1e6": rows(ours, 18.0)},
        }
        (tmp_path / str(threads) / "selection.json").write_text(
            json.dumps(content), encoding="utf-8"
        )
    command = [sys.executable, str(BENCHMARKS / "targets.py"), "1", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "| what | target | 1 thread | 2 threads |",
        "|---|---|---|---|",
        "| mask of 1e6 scores, over the floor | ≤ 4 | not measured | not measured |",
        "| the same, against `torch.topk` and a scatter | ≥ 5 | 9.0 | **4.5** |",
    ]


def test_the_docs_have_every_target() -> None:
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    units = {
        "times",
        "faster",
        "peak",
        "extra",
        "milliseconds",
        "percent",
        "collectives",
    }
    for target in TARGETS:
        assert len(units & target.keys()) == 1 and f"| {target['what']} |" in page
