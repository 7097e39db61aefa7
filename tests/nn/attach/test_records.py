import pytest
import torch

import sparsefn as sf
from sparsefn.core.state import everywhere, masked_view
from sparsefn.nn.attach.records import (
    Record,
    check_unowned,
    owned_parameters,
    put_in,
    set_gradients,
    take_out,
    trained_records,
    with_other_gradients,
)


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_parameters_are_found_by_name_with_their_optimizers():
    model = net()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    records = owned_parameters(model, [first, second])
    assert list(records) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [record.optimizer is first for record in records.values()] == [
        True,
        True,
        False,
        False,
    ]
    assert records["1.bias"].parameter is model[1].bias


def test_wrappers_do_not_change_names():
    model = torch.compile(torch.nn.DataParallel(net()), backend="eager")
    assert (
        next(
            iter(owned_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
        )
        == "0.weight"
    )


def test_frozen_parameters_are_left_out_and_tied_ones_are_there_once():
    model = net()
    model[1] = torch.nn.Linear(3, 2)
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert list(owned_parameters(model, [optimizer])) == ["0.weight", "1.bias"]


def test_parameters_in_two_optimizers_are_refused_all_at_once():
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    told = (
        "expected one optimizer to have '0.weight', '0.bias', got several: take it "
        "out of all but one"
    )
    with pytest.raises(ValueError, match=told):
        owned_parameters(model, [first, both])


@pytest.mark.parametrize(
    "algorithm",
    [
        sf.rigl(0.5),
        sf.one_shot(0.5, when=sf.at([100])),  # dense until then
        sf.phases([(0, sf.dense()), (100, sf.one_shot(0.5, when=sf.at([100])))]),
        sf.supermask(0.5),
        sf.reparametrised(sf.reparam.power(2.0)),  # whose weights follow from latents
        sf.partition([("*.bias", sf.dense()), ("*", sf.rigl(0.5))]),
    ],
    ids=repr,
)
def test_parameters_that_stay_dense_need_no_optimizer(algorithm):
    model = net()
    weights = owned_parameters(
        model, [torch.optim.SGD([model[0].weight, model[1].weight], lr=0.1)]
    )
    assert list(weights) == ["0.weight", "1.weight"]
    check_unowned(algorithm, model, weights)
    biases = owned_parameters(
        model, [torch.optim.SGD([model[0].bias, model[1].bias], lr=0.1)]
    )
    told = (
        "expected an optimizer to have '0.weight', '1.weight', which the algorithm "
        "sparsifies: give it to one, freeze"
    )
    with pytest.raises(ValueError, match=told):
        check_unowned(algorithm, model, biases)


def test_nothing_is_made_where_each_parameter_has_an_optimizer():
    def refused(params):
        raise AssertionError(params)

    model = net()
    weights = owned_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    check_unowned(sf.Algorithm(refused, refused), model, weights)


def test_the_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(
        ValueError,
        match="expected an optimizer of this Sequential, got one that has none of its "
        "param",
    ):
        owned_parameters(net(), [optimizer])


def test_a_model_without_parameters_that_require_a_gradient_is_refused():
    model = net().requires_grad_(False)
    with pytest.raises(
        ValueError,
        match="expected a model with parameters that require a gradient, got a "
        "Sequential",
    ):
        owned_parameters(model, [torch.optim.SGD(net().parameters(), lr=0.1)])


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
    assert [bool(record.beside) for record in records] == [True, True, False]
    assert records[2].parameter is model[0].bias and all(
        record.trains for record in records
    )
    assert (
        torch.equal(records[1].parameter, scores["1.weight"])
        and records[1].parameter is not scores["1.weight"]
    )
    assert [record.beside.parameter for record in records[:2]] == [
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
        record.beside is weights["w"]
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
