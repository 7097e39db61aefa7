"""Measured times: medians, of all calls of a module, and nothing of the module
changes.
"""

import time

import pytest
import torch
from torch import nn

import sparsefn as sf


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x, times=1):
        time.sleep(self.seconds * times)
        return x


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.slow, self.fast, self.unused = Slow(0.01), Slow(0.0), nn.Linear(2, 2)

    def forward(self, x, times=1):
        return self.slow(self.fast(self.slow(x)), times)


def test_times_are_of_all_calls_of_a_module():
    model = Twice().eval()
    found = sf.report.latency(model, torch.ones(1, 2), repeats=3, warmup=0)
    assert list(found.rows) == ["slow", "fast"]
    assert 20 <= found.rows["slow"] < 200
    assert found.rows["fast"] < 10
    assert found.total >= 20
    assert not any(
        part._forward_hooks or part._forward_pre_hooks for part in model.modules()
    )
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["module", "slow", "fast", "total"]


def test_examples_have_every_form():
    model = Twice().eval()
    x = torch.ones(1, 2)
    for example in ((x, 3), {"x": x, "times": 3}):
        assert sf.report.latency(model, example, repeats=1, warmup=0).total >= 40


def test_hooks_go_where_a_call_fails():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        sf.report.latency(model, torch.ones(1, 2), repeats=1)
    assert not any(part._forward_hooks for part in model.modules())


def test_bad_numbers_are_refused():
    for name in ("repeats", "warmup"):
        with pytest.raises(ValueError, match=f"latency: expected {name} >= "):
            sf.report.latency(nn.Linear(2, 2), torch.ones(1, 2), **{name: -1})


def test_buffers_and_tables_with_max_norm_stay_as_they_were():
    module = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.BatchNorm1d(4)).train()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    sf.report.latency(module, torch.arange(8), repeats=2)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
