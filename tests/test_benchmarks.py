"""The benchmarks run as a user would run them, and hold masks against those of the peers. No time is asserted."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PEERS = {
    "selection": ["torch.topk, scatter", "prune.global_unstructured", "torch.ao WeightNormSparsifier"],
    "updates": ["torch.topk of each layer, twice", "TorchOpt's adam, dense", "torch.nn.utils.prune, torch.optim"],
    "ensembles": ["loop", "vmap"],
}
FACTS = {"date", "cpus", "architecture", "capability", "threads", "load", "python", "torch", "sparsefn"}


@pytest.fixture(scope="module")
def timing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_timing", BENCHMARKS / "_timing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PEERS)
def test_a_benchmark_runs_and_its_masks_agree(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(BENCHMARKS / f"{name}.py"), "--quick", "--smoke", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
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
    assert names.issuperset(PEERS[name])


def test_a_peer_that_is_not_there_is_named_with_what_installs_it() -> None:
    code = """
import importlib.metadata, sys
sys.modules["rigl_torch"] = None
importlib.metadata.MetadataPathFinder.find_distributions = lambda *arguments, **options: iter(())
import updates
assert updates.rigl_torch_cases([]) == updates.cerebras_cases([]) == []
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    for name in ("rigl-torch", "cerebras_pytorch"):
        assert f"{name} is left out" in done.stdout
    assert done.stdout.count("pip install --no-deps -r benchmarks/requirements-peers.txt") == 2


def test_rounds_alternate_and_ratios_are_of_one_round(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that the alternatives move themselves, each call further than the one before.
    clock, order = [0.0], []

    def takes(name: str, share: float) -> None:
        order.append(name)
        clock[0] += share * len(order)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    options = timing.options_of("", ["--rounds=3"])
    cases = [timing.Case("a", lambda: takes("a", 1.0)), timing.Case("b", lambda x: takes("b", x), lambda: 3.0)]
    rows = timing.compare("title", cases, options)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    # Calls 3 to 8 take 3 and 3 * 4, 3 * 5 and 6, 7 and 3 * 8: b over a is 4, 5/2 and 24/7.
    assert (rows[0].seconds, rows[1].seconds) == (6.0, 15.0)
    assert rows[1].ratio == pytest.approx(24 / 7)


def test_masks_agree_up_to_the_order_of_ties_only(timing: ModuleType) -> None:
    scores = torch.tensor([3.0, 2.0, 2.0, 1.0])
    first, second = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    timing.same_up_to_ties(first, second, scores)
    with pytest.raises(AssertionError, match="2 entries of several scores differ"):
        timing.same_up_to_ties(first, torch.tensor([True, False, False, True]), scores)
    with pytest.raises(AssertionError, match="kept 2 of"):
        timing.same_up_to_ties(first, torch.tensor([True, True, True, False]), scores)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a call is measured on Linux")
def test_the_peak_of_a_call_holds_what_it_makes_and_drops() -> None:
    # In a process of its own: forking one with threads warns from Python 3.12 on.
    code = """
import torch
from _timing import Case, peak_mib
n = 2**23
print(peak_mib(Case("", lambda: torch.ones(n).add(1).sum())), peak_mib(Case("", torch.sum, lambda: torch.ones(n))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    both, neither = map(float, done.stdout.split())
    assert 60 < both < 72 and neither < 8  # two tensors of 32 MiB; what `setup` makes is not counted
