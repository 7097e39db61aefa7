import pytest
import torch

from sparsefn.nn.attach.gradients import (
    dense_gradient,
    dense_gradients,
    give,
    warn_of_zeros,
)
from sparsefn.nn.attach.records import Record, with_other_gradients


def record(name="w", grad=None, **flags):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = grad
    return Record(name, weight, torch.optim.SGD([weight], lr=0.1), **flags)


def test_a_gradient_is_dense():
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    assert dense_gradient(embedding.weight, embedding.weight).tolist() == [
        [0, 0],
        [1, 1],
        [0, 0],
    ]
    assert dense_gradient(record().parameter, torch.ones(2)).tolist() == [0, 0]


def test_some_parameter_has_a_gradient():
    with pytest.raises(
        RuntimeError,
        match=r"before_step: no parameter has a new gradient: call it after "
        r"backward\(\) and",
    ):
        dense_gradients([record(), record()])
    found = dense_gradients([record("a"), record("b", torch.ones(2))])
    assert found["a"].tolist() == [0, 0] and found["b"].tolist() == [1, 1]


def test_no_two_have_the_same_memory():
    one = record("w", torch.ones(2), trains=True)
    dense = {"w": one.parameter.grad}
    first, second = (record(f"latent.{i}", trains=True, beside=one) for i in range(2))
    give([one], [one, first, second], [dense["w"]] * 3, dense)
    grads = [
        dense["w"],
        one.parameter.grad,
        first.parameter.grad,
        second.parameter.grad,
    ]
    assert len({grad.data_ptr() for grad in grads}) == 4 and all(
        bool((grad == 1).all()) for grad in grads
    )
    assert with_other_gradients([one, first, second]) == []


def test_results_that_share_memory_are_parted():
    first, second = (
        record(f"latent.{i}", trains=True, beside=record()) for i in range(2)
    )
    grad = torch.ones(2)
    give([], [first, second], [grad, grad], {"w": torch.zeros(2)})
    assert first.parameter.grad.data_ptr() != second.parameter.grad.data_ptr()


def test_nothing_is_given_where_there_was_nothing_and_where_a_step_is_left_out():
    without, with_one, frozen = (
        record("a", trains=True),
        record("b", torch.ones(2), trains=True),
        record("c"),
    )
    frozen.parameter.grad = torch.ones(2)
    dense = {
        "a": torch.zeros(2),
        "b": with_one.parameter.grad,
        "c": frozen.parameter.grad,
    }
    give(
        [without, with_one, frozen],
        [without, with_one],
        [torch.zeros(2), torch.zeros(2)],
        dense,
    )
    assert [x.parameter.grad is None for x in (without, with_one, frozen)] == [
        True,
        False,
        True,
    ]
    give([without, with_one, frozen], [without, with_one], [], dense)
    assert with_one.parameter.grad is None and dense["b"].tolist() == [1, 1]


def test_gradients_that_are_all_zero_where_masks_change():
    warn_of_zeros({"a": torch.zeros(2), "b": torch.tensor([0.0, 1e-30])}, 3)
    with pytest.warns(
        UserWarning,
        match=r"after_step: every gradient was zero at step 3, where masks changed: "
        r"call",
    ):
        warn_of_zeros({"a": torch.zeros(2), "b": torch.zeros(1)}, 3)
