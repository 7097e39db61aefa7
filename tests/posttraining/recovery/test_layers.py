"""Which layers are compared, and the loss over them."""

import re

import pytest
import torch

import sparsefn as sf

layer_map, over_layers = sf.recovery.layer_map, sf.recovery.over_layers
TEACHER = [f"layers.{i}" for i in range(8)]


def paths(*numbers):
    return [f"layers.{i}" for i in numbers]


def refused(kind, text, call, *args, **kwargs):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call(*args, **kwargs)


def test_layers_are_spread_evenly():
    assert layer_map(TEACHER, TEACHER) == {path: path for path in TEACHER}
    assert list(layer_map(paths(0, 1, 2, 3), TEACHER).values()) == paths(1, 3, 5, 7)
    assert list(layer_map(paths(0, 1, 2), TEACHER).values()) == paths(1, 4, 7)
    assert layer_map(["0"], TEACHER) == {"0": "layers.7"}


def test_a_layer_answers_as_the_last_removed_layer_after_it():
    removed = paths(3, 4, 5)
    found = layer_map(paths(0, 1, 2, 3, 4), TEACHER, removed)
    assert list(found.values()) == paths(0, 1, 5, 6, 7)
    found = layer_map(paths(0, 1, 2, 3, 4, 5), TEACHER, paths(6, 7))
    assert list(found.values()) == paths(0, 1, 2, 3, 4, 7)
    found = layer_map(paths(0, 1, 2, 3, 4, 5, 6), TEACHER, paths(0))
    assert list(found.values()) == paths(1, 2, 3, 4, 5, 6, 7)


def test_removed_layers_that_do_nothing_leave_no_loss():
    # Two layers of the teacher are the identity: the student without them has the
    # teacher's answers at the layers of the map.
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    nothing = torch.nn.Identity()
    teacher = torch.nn.Sequential(layers[0], layers[1], nothing, nothing, layers[2])
    student = torch.nn.Sequential(*layers)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    numbers = list("01234")
    _, theirs = sf.recovery.outputs(teacher, None, x, paths=numbers)
    _, own = sf.recovery.outputs(student, None, x, paths=list("012"))
    pairs = layer_map(list("012"), numbers, removed=["2", "3"])
    assert pairs == {"0": "0", "1": "3", "2": "4"}
    assert over_layers(sf.recovery.mean_square, own, theirs, pairs) == 0.0
    teacher = torch.nn.Sequential(nothing, nothing, *layers)
    _, theirs = sf.recovery.outputs(teacher, None, x, paths=numbers)
    pairs = layer_map(list("012"), numbers, removed=["0", "1"])
    assert over_layers(sf.recovery.mean_square, own, theirs, pairs) == 0.0
    spread = layer_map(list("012"), numbers)
    assert over_layers(sf.recovery.mean_square, own, theirs, spread) > 0.01


def test_the_mean_over_layers():
    own = {"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}
    theirs = {"0": torch.zeros(2, 3), "1": torch.full((2, 3), 2.0)}
    loss = sf.recovery.mean_square
    assert over_layers(loss, own, theirs, {"a": "0", "b": "1"}) == 2.5
    assert over_layers(loss, own, theirs, {"b": "0"}) == 0.0
    own["a"][0] = torch.nan
    tokens = torch.tensor([False, True])
    assert over_layers(loss, own, theirs, {"a": "0", "b": "1"}, tokens) == 2.5


def test_maps_that_do_not_fit():
    text = (
        "layer_map: expected from 1 to 2 layers of the student, as many as the teacher "
        "has, got 3"
    )
    refused(ValueError, text, layer_map, paths(0, 1, 2), paths(0, 1))
    with pytest.raises(ValueError, match="expected from 1 to 8 layers .*, got 0$"):
        layer_map([], TEACHER)
    for student in ([], ["0"]):
        with pytest.raises(ValueError, match="expected a layer of the teacher or more"):
            layer_map(student, [])
    text = (
        "layer_map: expected removed to name layers of the teacher, got ['layers.8']; "
        "the first is 'layers.0'"
    )
    refused(ValueError, text, layer_map, paths(0), TEACHER, paths(8))
    text = "layer_map: expected 7 layers of the student, as 1 of 8 were removed, got 1"
    refused(ValueError, text, layer_map, paths(0), TEACHER, paths(2))
    text = "layer_map: expected teacher to be a list of paths, got 8"
    refused(TypeError, text, layer_map, paths(0), 8)
    text = "layer_map: expected removed to be a list of paths, got 'layers.1'"
    refused(TypeError, text, layer_map, paths(0), TEACHER, "layers.1")
    text = "layer_map: expected student to be a list of paths, got [0, 1]"
    refused(TypeError, text, layer_map, [0, 1], TEACHER)
    text = (
        "layer_map: expected each path of {} once, got 'layers.1' 2 times: leave out "
        "the others"
    )
    twice = paths(0, 1, 1)
    refused(ValueError, text.format("student"), layer_map, twice, TEACHER)
    refused(ValueError, text.format("teacher"), layer_map, paths(0), twice)
    refused(ValueError, text.format("removed"), layer_map, paths(0), TEACHER, twice)


def test_outputs_that_do_not_fit():
    own, theirs = {"a": torch.ones(2, 3)}, {"0": torch.ones(2, 4)}
    loss = sf.recovery.mean_square
    text = (
        "over_layers: expected the student to have outputs of ['b'], got ['a']; ask "
        "for them: outputs(..., paths=['b'])"
    )
    refused(ValueError, text, over_layers, loss, own, theirs, {"b": "0"})
    text = (
        "over_layers: expected the teacher to have outputs of ['1'], got ['0']; ask "
        "for them: outputs(..., paths=['1'])"
    )
    refused(ValueError, text, over_layers, loss, own, theirs, {"a": "1"})
    whole = (torch.ones(1), theirs)
    text = (
        "over_layers: expected {0} to be a dict of tensors by path, got {1}: outputs "
        "gives it second, as in result, {0} = sf.recovery.outputs(model, None, x, "
        "paths=[...])"
    )
    told = text.format("student", "tuple")
    refused(TypeError, told, over_layers, loss, whole, theirs, {"a": "0"})
    told = text.format("teacher", "list")
    refused(TypeError, told, over_layers, loss, own, [*whole], {"a": "0"})
    told = (
        "over_layers: expected layers to be a dict from paths of the student to paths "
        "of the teacher, got list: write sf.recovery.layer_map(student_paths, "
        "teacher_paths)"
    )
    refused(TypeError, told, over_layers, loss, own, theirs, ["0"])
    text = "over_layers: expected pairs of layers, got none"
    refused(ValueError, text, over_layers, loss, own, theirs, {})
    with pytest.raises(ValueError, match=r"^at 'a' and '0', mean_square: expected ten"):
        over_layers(loss, own, theirs, {"a": "0"})
    with pytest.raises(
        TypeError, match=r"^expected loss to be a function of \(student"
    ):
        over_layers(torch.ones(1), own, theirs, {"a": "0"})
