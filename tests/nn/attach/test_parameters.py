import pytest
import torch

import sparsefn as sf
from sparsefn.core.state import everywhere, masked_view
from sparsefn.nn.attach.attach import owned_parameters
from sparsefn.nn.attach.parameters import (
    Record,
    dense_gradient,
    dense_gradients,
    give,
    put_in,
    set_gradients,
    take_out,
    trained_records,
    warn_of_zeros,
    with_other_gradients,
)


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def view_of(trained, support=None):
    masks = everywhere(trained) if support is None else support
    return masked_view._replace(get=lambda state: trained, support=lambda state: masks)


def test_leaves_that_are_no_params_get_parameters_beside_their_weights():
    model = net()
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters()},
            {"params": model[1].parameters(), "lr": 1.0},
        ],
        lr=0.1,
    )
    weights = owned_parameters(model, [optimizer])
    params = {name: record.parameter.detach() for name, record in weights.items()}
    scores = {name: torch.rand_like(params[name]) for name in ("0.weight", "1.weight")}
    trained = {"latent": scores, "params": {"0.bias": params["0.bias"]}}
    records = trained_records(
        view_of(trained), sf.State(params, everywhere(params)), weights
    )
    # optree's order: latent before params
    assert [bool(record.added_for) for record in records] == [True, True, False]
    assert records[2].parameter is model[0].bias and all(
        record.trains for record in records
    )
    assert (
        torch.equal(records[1].parameter, scores["1.weight"])
        and records[1].parameter is not scores["1.weight"]
    )
    assert [record.added_for.parameter for record in records[:2]] == [
        model[0].weight,
        model[1].weight,
    ]
    assert {
        name: r.follows for name, r in weights.items() if r.follows
    } == dict.fromkeys(scores, "latents")
    put_in(records[:2], None)
    assert [record.group["lr"] for record in records] == [0.1, 1.0, 0.1]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]
    take_out(records[:2])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


def one(optimizer=torch.optim.SGD):
    weight = torch.nn.Parameter(torch.ones(2))
    return Record("w", weight, optimizer([weight], lr=0.1))


def test_a_leaf_of_no_weight_goes_to_the_first():
    weights = {"w": one()}
    state = sf.State({"w": torch.ones(2)}, {"w": torch.tensor(True)})
    (record,) = trained_records(
        view_of({"temperature": torch.ones(())}), state, weights
    )
    assert (
        record.added_for is weights["w"]
        and not weights["w"].follows
        and record.name == "temperature"
    )


@pytest.mark.parametrize(
    ("mode", "follows"), [("supermask", "scores"), ("joint", ""), ("ste", "")]
)
def test_weights_that_do_not_train_follow_from_scores(mode, follows):
    algorithm, weights = sf.supermask(0.5, mode=mode), {"w": one()}
    weights["w"].parameter.data = torch.ones(2, 2)
    trained_records(algorithm.view, algorithm.init({"w": torch.ones(2, 2)}), weights)
    assert weights["w"].follows == follows


def test_sparse_adam_is_refused_on_masked_leaves_alone():
    params = {"w": torch.ones(2)}
    for mask, refused in (
        (torch.tensor(True), False),
        (torch.tensor([True, False]), True),
    ):
        state = sf.State(params, {"w": mask})
        weights = {"w": one(torch.optim.SparseAdam)}
        if not refused:
            trained_records(masked_view, state, weights)
            continue
        with pytest.raises(
            ValueError,
            match="attach: SparseAdam takes no masks: leave 'w' out of `where`, or use "
            "Adam",
        ):
            trained_records(masked_view, state, weights)


def test_who_wrote_is_read_off_versions():
    record = one()
    record.note()
    assert not record.is_written()
    with torch.no_grad():
        record.parameter.mul_(2)
    assert record.is_written()
    record.note()
    record.parameter.data = record.parameter.data.clone()
    assert record.is_written()


def test_who_wrote_gradients_is_read_off_versions():
    record = one()
    set_gradients([record], [torch.ones(2)])
    assert with_other_gradients([record]) == []
    record.parameter.grad.mul_(2)
    assert with_other_gradients([record]) == [record]
    set_gradients([record], [None])
    assert record.parameter.grad is None and with_other_gradients([record]) == []
    record.parameter.grad = torch.ones(2)
    assert with_other_gradients([record]) == [record]


def test_a_group_of_their_own_comes_and_goes():
    weight, score = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    record = Record("s", score, optimizer, Record("w", weight, optimizer))
    put_in([record], {"lr": 2.0, "weight_decay": 0.5})
    assert (
        record.group["lr"],
        record.group["weight_decay"],
        len(optimizer.param_groups),
    ) == (2.0, 0.5, 2)
    optimizer.state[score]["exp_avg"] = torch.ones(2)
    take_out([record])
    assert len(optimizer.param_groups) == 1 and score not in optimizer.state


# ---- gradients -----------------------------------------------------------------------


def graded(name="w", grad=None, **flags):
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
    assert dense_gradient(graded().parameter, torch.ones(2)).tolist() == [0, 0]


def test_some_parameter_has_a_gradient():
    with pytest.raises(
        RuntimeError,
        match=r"before_step: no parameter has a new gradient: call it after "
        r"backward\(\) and",
    ):
        dense_gradients([graded(), graded()])
    found = dense_gradients([graded("a"), graded("b", torch.ones(2))])
    assert found["a"].tolist() == [0, 0] and found["b"].tolist() == [1, 1]


def test_no_two_have_the_same_memory():
    one = graded("w", torch.ones(2), trains=True)
    dense = {"w": one.parameter.grad}
    first, second = (
        graded(f"latent.{i}", trains=True, added_for=one) for i in range(2)
    )
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
        graded(f"latent.{i}", trains=True, added_for=graded()) for i in range(2)
    )
    grad = torch.ones(2)
    give([], [first, second], [grad, grad], {"w": torch.zeros(2)})
    assert first.parameter.grad.data_ptr() != second.parameter.grad.data_ptr()


def test_nothing_is_given_where_there_was_nothing_and_where_a_step_is_left_out():
    without, with_one, frozen = (
        graded("a", trains=True),
        graded("b", torch.ones(2), trains=True),
        graded("c"),
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
