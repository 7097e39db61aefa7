"""A long call says on stderr what it does, and a short one nothing."""

import re

import torch
from torch import nn

import sparsefn as sf
from sparsefn.shrinking import progress
from sparsefn.shrinking.progress import Progress


def test_a_line_every_ten_seconds(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    tell = Progress("shrink")
    for seconds, doing in [(9.0, "a"), (2.0, "b"), (8.0, "c"), (30.0, "d")]:
        clock[0] += seconds
        tell(doing)
    assert capsys.readouterr().err == "shrink: 11 s so far, b\nshrink: 49 s so far, d\n"


def test_shrink_tells(capsys, monkeypatch):
    net, x = (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(),
        torch.ones(2, 3),
    )
    groups = sf.shrinking.groups(net, x)
    state = sf.State(sf.modules.params_of(net), groups.masks({0: [1]}))
    sf.shrink(net, state, x)
    assert not capsys.readouterr().err
    monkeypatch.setattr(progress, "EVERY", 0.0)
    doing = {}
    for form in ("class", "program"):
        sf.shrink(net, state, x, form=form)
        lines = capsys.readouterr().err.splitlines()
        assert all(re.match(r"shrink: \d+ s so far, ", line) for line in lines)
        doing[form] = [line.partition(", ")[2] for line in lines]
    runs = [
        "runs a smaller model",
        "runs the masked model in float64",
        "runs the masked model",
    ]
    assert doing["class"] == ["traces the model", *runs]
    assert doing["program"] == [
        "traces the model",
        "traces the model with sizes that may change",
        *runs,
    ]
