import pytest
import torch

import sparsefn as sf
from sparsefn.core.state import masked_view
from sparsefn.nn.attach.module_state import (
    ModuleState,
    nonzero_pruned,
    seen_in_module,
    set_hidden,
    with_module_values,
)
from sparsefn.nn.attach.parameters import Record, set_gradients


def module(algorithm):
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    made = ModuleState(algorithm, {"w": Record("w", weight, optimizer)})
    with torch.no_grad():
        made.write(made.state)
    return weight, optimizer, made


@torch.no_grad()
def test_the_state_has_the_memory_of_the_module_where_that_says_all():
    weight, _, one = module(sf.static(0.5, init="magnitude"))
    assert one.state.params[
        "w"
    ].data_ptr() == weight.data_ptr() and weight.tolist() == [[0, 0, 3, 4]]
    assert one.read(False) is one.state
    weight.add_(1.0)
    assert one.read(False).params["w"].tolist() == [[0, 0, 4, 5]]
    one.accept_writes("apply_masks")
    assert one.state.params["w"].tolist() == weight.tolist() == [[0, 0, 4, 5]]


@torch.no_grad()
def test_the_state_has_the_pruned_weights_that_train():
    weight, _, one = module(sf.ste(0.5))
    assert weight.tolist() == [[0, 0, 3, 4]] and one.state.params["w"].tolist() == [
        [1, 2, 3, 4]
    ]
    one.write_trained()
    assert weight.tolist() == [[1, 2, 3, 4]]
    weight.add_(1.0)
    one.write(one.read(False))
    assert weight.tolist() == [[0, 0, 4, 5]] and one.state.params["w"].tolist() == [
        [2, 3, 4, 5]
    ]


@torch.no_grad()
def test_pruned_weights_are_zero_whoever_wrote_them():
    weight, _, one = module(sf.static(0.5, init="magnitude"))
    weight.data.add_(1.0)
    assert one.read(False) is one.state
    assert weight.tolist() == one.state.params["w"].tolist() == [[0, 0, 4, 5]]
    assert not one.weights["w"].is_written()  # what is written here is no news


@torch.no_grad()
def test_an_optimizer_that_mixes_entries_sees_masked_weights_and_gradients():
    class Own(torch.optim.SGD):
        pass

    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    optimizer = Own([weight], lr=1.0)
    one = ModuleState(
        sf.static(0.5, init="magnitude"), {"w": Record("w", weight, optimizer)}
    )
    one.write(one.state)
    set_gradients([one.weights["w"]], [torch.zeros(1, 4)])
    weight.grad.data.add_(1.0)
    weight.data.add_(1.0)
    assert one.before_optimizer(optimizer, skipped=False)
    assert weight.tolist() == [[0, 0, 4, 5]] and weight.grad.tolist() == [[0, 0, 1, 1]]


@torch.no_grad()
def test_written_values_of_hidden_weights_are_taken_without_a_version():
    weight, _, one = module(sf.ste(0.5))
    old = one.state
    assert one.begin_step() == () and one.state is old
    weight.data[0, 0] = 7.0
    assert one.begin_step() == () and one.state.params["w"].tolist() == [[7, 2, 3, 4]]
    assert old.params["w"].tolist() == [[1, 2, 3, 4]]


@torch.no_grad()
def test_a_view_that_reads_weights_reads_masked_ones():
    decayed = sf.with_terms(
        sf.static(0.5, init="magnitude"), sf.terms.pruned_decay(0.5)
    )
    weight, _, one = module(decayed)
    weight.data.add_(1.0)
    assert one.begin_step() == () and weight.tolist() == [[0, 0, 4, 5]]


@torch.no_grad()
def test_weights_are_known_as_they_were_until_the_first_step():
    weight, _, one = module(sf.static(0.5, init="magnitude"))
    assert one.unmasked()["w"].tolist() == [[1, 2, 3, 4]]
    weight.fill_(7.0)
    assert one.unmasked()["w"].tolist() == [[7, 7, 7, 7]]
    one.write_trained()
    assert not one.found


@torch.no_grad()
def test_weights_that_were_loaded_in_secret_are_not_those_before():
    weight, _, one = module(sf.static(0.5, init="magnitude"))
    weight.data.fill_(7.0)
    assert one.unmasked()["w"].tolist() == [[7, 7, 7, 7]]


@pytest.mark.parametrize(
    "algorithm",
    [sf.static(0.5, init="magnitude"), sf.ste(0.5)],
    ids=["masked", "whole"],
)
def test_what_is_seen_is_what_the_view_says(algorithm):
    _, _, one = module(algorithm)
    dense = {"w": torch.ones(1, 4)}
    assert torch.equal(
        one.masked_gradients(dense, 0)[0], masked_view.grads(one.state, dense, 0)["w"]
    )


# ---- what other code wrote -----------------------------------------------------------


MASK = torch.tensor([True, True, False, False])


def record(values, **flags):
    weight = torch.nn.Parameter(torch.tensor(values))
    return Record("w", weight, torch.optim.SGD([weight], lr=0.1), **flags)


def state(values, mask=MASK):
    return sf.State({"w": torch.tensor(values)}, {"w": mask})


def test_values_at_kept_entries_are_with_module_values():
    got = with_module_values(
        "state", state([1.0, 2.0, 0.0, 0.0]), [record([5.0, 6.0, 7.0, 8.0])]
    ).params["w"]
    assert got.tolist() == [5.0, 6.0, 0.0, 0.0]


def test_of_hidden_leaves_what_differs_from_the_module_is_with_module_values():
    nan = float("nan")
    old = state([1.0, nan, 3.0, 4.0])
    got = with_module_values(
        "state", old, [record([1.0, nan, 0.0, 9.0], hidden=True)]
    ).params["w"]
    assert got[[0, 2, 3]].tolist() == [1.0, 3.0, 9.0] and got[1].isnan()
    assert old.params["w"][3] == 4.0


@pytest.mark.parametrize(
    ("follows", "text"),
    [
        ("latents", "its values follow from latents, .* the latents"),
        ("scores", "its mask follows from scores, .* scores"),
    ],
)
def test_weights_that_follow_are_not_written(follows, text):
    own = record([1.0, 2.0, 0.0, 0.0], hidden=True, follows=follows)
    old = state([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(
        with_module_values("state", old, [own]).params["w"], old.params["w"]
    )
    with torch.no_grad():
        own.parameter[2] = 1.0
    with pytest.raises(
        RuntimeError, match=f"state: other code wrote to 'w', but {text}"
    ):
        with_module_values("state", old, [own])


def test_a_parameter_of_another_kind_is_named():
    with pytest.raises(
        RuntimeError,
        match=r"state: 'w' was torch.float32 on cpu of shape \(4,\) .* of shape "
        r"\(2,\): call",
    ):
        with_module_values("state", state([1.0, 2.0, 0.0, 0.0]), [record([1.0, 2.0])])


@torch.no_grad()
def test_writes_are_noted_until_the_next_write():
    weight, optimizer, one = module(sf.static(0.5, init="magnitude"))
    assert one.note_writes() == []
    weight.add_(1.0)
    assert one.note_writes() == [one.weights["w"]]
    one.after_optimizer(optimizer, False)  # what an optimizer writes is left out
    assert one.note_writes() == [one.weights["w"]]
    one.write(one.state)
    assert one.note_writes() == []


@torch.no_grad()
def test_nothing_is_held_after_release():
    weight, _, one = module(sf.static(0.5, init="magnitude"))
    one.release()
    assert not (one.weights or one.records or one.found)
    weight.fill_(7.0)
    assert one.state.params["w"].tolist() == [[0, 0, 3, 4]]


@pytest.mark.parametrize(
    ("made", "flags", "hides"),
    [
        (state([1.0, 2.0, 3.0, 4.0]), {}, True),
        (state([1.0, 2.0, 0.0, 0.0]), {}, False),
        (state([1.0, 2.0, 3.0, 4.0], torch.tensor(True)), {}, False),
        (
            state([1.0, 2.0, 0.0, 0.0])._replace(support={"w": torch.tensor(True)}),
            {},
            True,
        ),
        (state([1.0, 2.0, 0.0, 0.0]), {"follows": "latents"}, True),
    ],
)
def test_what_the_module_does_not_show(made, flags, hides):
    own = record([0.0] * 4, **flags)
    set_hidden(made, [own], [sf.effective(made)["w"]])
    assert own.hidden is hides


def test_stains_are_counted_and_shown():
    own, nan = state([1.0, 2.0, 0.0, 0.0]), float("nan")
    assert nonzero_pruned(own, [record([nan, 1.0, 0.0, -0.0])]) == {}
    assert nonzero_pruned(own, [record([1.0, 0.0, 3.0, nan])]) == {"w": 2}
    shown = seen_in_module(own, [record([1.0, 0.0, 3.0, 0.0])])
    assert shown.masks["w"].tolist() == [True, True, True, False]
    assert shown.params["w"].tolist() == [1.0, 0.0, 3.0, 0.0]
