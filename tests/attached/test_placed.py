import pytest
import torch

import sparsefn as sf
from sparsefn.attached.placed import Placed
from sparsefn.attached.records import Record
from sparsefn.state import masked_view


def placed(algorithm):
    weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    made = Placed(algorithm, {"w": Record("w", weight, optimizer)})
    with torch.no_grad():
        made.show(made.state)
    return weight, optimizer, made


@torch.no_grad()
def test_the_state_has_the_memory_of_the_module_where_that_says_all():
    weight, optimizer, one = placed(sf.static(0.5, init="magnitude"))
    assert one.state.params["w"].data_ptr() == weight.data_ptr() and weight.tolist() == [[0, 0, 3, 4]]
    assert one.moved([optimizer]) is one.state
    weight.add_(1.0)
    assert one.moved([optimizer]).params["w"].tolist() == [[0, 0, 4, 5]]
    assert one.now("state").params["w"].tolist() == [[0, 0, 4, 5]]


@torch.no_grad()
def test_the_state_has_the_pruned_weights_that_train():
    weight, optimizer, one = placed(sf.ste(0.5))
    assert weight.tolist() == [[0, 0, 3, 4]] and one.state.params["w"].tolist() == [[1, 2, 3, 4]]
    one.show_trained()
    assert weight.tolist() == [[1, 2, 3, 4]] and one.now("state") is one.state
    weight.add_(1.0)
    one.show(one.moved([optimizer]))
    assert weight.tolist() == [[0, 0, 4, 5]] and one.state.params["w"].tolist() == [[2, 3, 4, 5]]


@torch.no_grad()
def test_optimizers_that_have_not_stepped_are_not_trusted():
    _, optimizer, one = placed(sf.static(0.5, init="magnitude"))
    assert one.moved([]) is not one.state
    assert one.moved([optimizer]) is one.state


@torch.no_grad()
def test_weights_are_known_as_they_were_until_the_first_step():
    weight, _, one = placed(sf.static(0.5, init="magnitude"))
    assert one.unmasked()["w"].tolist() == [[1, 2, 3, 4]]
    weight.fill_(7.0)
    assert one.unmasked()["w"].tolist() == [[7, 7, 7, 7]]
    one.show_trained()
    assert one.weights["w"].found is None


@pytest.mark.parametrize("algorithm", [sf.static(0.5, init="magnitude"), sf.ste(0.5)], ids=["masked", "whole"])
def test_what_is_seen_is_what_the_view_says(algorithm):
    _, _, one = placed(algorithm)
    dense = {"w": torch.ones(1, 4)}
    assert torch.equal(one.seen(dense, 0)[0], masked_view.grads(one.state, dense, 0)["w"])
