import pytest
import torch

import sparsefn as sf
from sparsefn.core.state import masked_view
from sparsefn.nn.attach.placed import Placed
from sparsefn.nn.attach.records import Record, set_gradients


def placed(algorithm):
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    made = Placed(algorithm, {"w": Record("w", weight, optimizer)})
    with torch.no_grad():
        made.show(made.state)
    return weight, optimizer, made


@torch.no_grad()
def test_the_state_has_the_memory_of_the_module_where_that_says_all():
    weight, _, one = placed(sf.static(0.5, init="magnitude"))
    assert one.state.params[
        "w"
    ].data_ptr() == weight.data_ptr() and weight.tolist() == [[0, 0, 3, 4]]
    assert one.moved() is one.state
    weight.add_(1.0)
    assert one.moved().params["w"].tolist() == [[0, 0, 4, 5]]
    one.take_over("apply_masks")
    assert one.state.params["w"].tolist() == weight.tolist() == [[0, 0, 4, 5]]


@torch.no_grad()
def test_the_state_has_the_pruned_weights_that_train():
    weight, _, one = placed(sf.ste(0.5))
    assert weight.tolist() == [[0, 0, 3, 4]] and one.state.params["w"].tolist() == [
        [1, 2, 3, 4]
    ]
    one.show_trained()
    assert weight.tolist() == [[1, 2, 3, 4]]
    weight.add_(1.0)
    one.show(one.moved())
    assert weight.tolist() == [[0, 0, 4, 5]] and one.state.params["w"].tolist() == [
        [2, 3, 4, 5]
    ]


@torch.no_grad()
def test_pruned_weights_are_zero_whoever_wrote_them():
    weight, _, one = placed(sf.static(0.5, init="magnitude"))
    weight.data.add_(1.0)
    assert one.moved() is one.state
    assert weight.tolist() == one.state.params["w"].tolist() == [[0, 0, 4, 5]]
    assert not one.weights["w"].is_written()  # what is written here is no news


@torch.no_grad()
def test_an_optimizer_that_mixes_entries_sees_masked_weights_and_gradients():
    class Own(torch.optim.SGD):
        pass

    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    optimizer = Own([weight], lr=1.0)
    one = Placed(
        sf.static(0.5, init="magnitude"), {"w": Record("w", weight, optimizer)}
    )
    one.show(one.state)
    set_gradients([one.weights["w"]], [torch.zeros(1, 4)])
    weight.grad.data.add_(1.0)
    weight.data.add_(1.0)
    one.settle(optimizer, skipped=False)
    assert weight.tolist() == [[0, 0, 4, 5]] and weight.grad.tolist() == [[0, 0, 1, 1]]


@torch.no_grad()
def test_written_values_of_hidden_weights_are_taken_without_a_version():
    weight, _, one = placed(sf.ste(0.5))
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
    weight, _, one = placed(decayed)
    weight.data.add_(1.0)
    assert one.begin_step() == () and weight.tolist() == [[0, 0, 4, 5]]


@torch.no_grad()
def test_weights_are_known_as_they_were_until_the_first_step():
    weight, _, one = placed(sf.static(0.5, init="magnitude"))
    assert one.unmasked()["w"].tolist() == [[1, 2, 3, 4]]
    weight.fill_(7.0)
    assert one.unmasked()["w"].tolist() == [[7, 7, 7, 7]]
    one.show_trained()
    assert one.weights["w"].found is None


@torch.no_grad()
def test_weights_that_were_loaded_in_secret_are_not_those_before():
    weight, _, one = placed(sf.static(0.5, init="magnitude"))
    weight.data.fill_(7.0)
    assert one.unmasked()["w"].tolist() == [[7, 7, 7, 7]]


@pytest.mark.parametrize(
    "algorithm",
    [sf.static(0.5, init="magnitude"), sf.ste(0.5)],
    ids=["masked", "whole"],
)
def test_what_is_seen_is_what_the_view_says(algorithm):
    _, _, one = placed(algorithm)
    dense = {"w": torch.ones(1, 4)}
    assert torch.equal(
        one.masked_gradients(dense, 0)[0], masked_view.grads(one.state, dense, 0)["w"]
    )
