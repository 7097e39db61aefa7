import pytest
import torch

from sparsefn.attached.slots import Slot, clear_moments, enter, leave, owned, slots_of, zeros_stay


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_parameters_are_found_by_name_with_their_optimizers():
    model = net()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    slots = owned(model, [first, second])
    assert list(slots) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [slot.optimizer is first for slot in slots.values()] == [True, True, False, False]
    assert slots["1.bias"].parameter is model[1].bias


def test_wrappers_do_not_change_names():
    model = torch.compile(torch.nn.DataParallel(net()), backend="eager")
    assert next(iter(owned(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))) == "0.weight"


def test_frozen_parameters_are_left_out_and_tied_ones_are_there_once():
    model = net()
    model[1] = torch.nn.Linear(3, 2)
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert list(owned(model, [optimizer])) == ["0.weight", "1.bias"]


def test_a_parameter_in_no_optimizer_or_in_two_is_refused():
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"expected one optimizer to have '1.weight', got 0: give it to one, or freeze"
    ):
        owned(model, [first])
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"expected one optimizer to have '0.weight', got 2$"):
        owned(model, [first, both])


def test_the_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match="expected an optimizer of this Sequential, got one that has none of its param"
    ):
        owned(net(), [optimizer])


def test_a_model_without_parameters_that_require_a_gradient_is_refused():
    model = net().requires_grad_(False)
    with pytest.raises(ValueError, match="expected a model with parameters that require a gradient, got a Sequential"):
        owned(model, [torch.optim.SGD(net().parameters(), lr=0.1)])


def test_leaves_that_are_no_params_get_parameters_beside_their_weights():
    model = net()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1.0}], lr=0.1
    )
    weights = owned(model, [optimizer])
    params = {name: slot.parameter.detach() for name, slot in weights.items()}
    scores = {name: torch.rand_like(params[name]) for name in ("0.weight", "1.weight")}
    trained = {"scores": scores, "params": {"0.bias": params["0.bias"]}}
    slots, beside = slots_of(trained, params, weights)
    assert slots[0].parameter is model[0].bias  # optree's order: params before scores
    assert torch.equal(slots[2].parameter, scores["1.weight"]) and slots[2].parameter is not scores["1.weight"]
    assert [slot.parameter for slot in beside] == [model[0].weight, model[1].weight]
    enter(slots[1:], beside, None)
    assert [slot.group["lr"] for slot in slots] == [0.1, 0.1, 1.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]
    leave(slots[1:])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


def test_a_leaf_of_no_weight_goes_to_the_first():
    weight = torch.nn.Parameter(torch.ones(2))
    weights = {"w": Slot(weight, torch.optim.SGD([weight], lr=0.1))}
    assert slots_of({"temperature": torch.ones(())}, {}, weights)[1] == [weights["w"]]


def test_a_group_of_their_own_comes_and_goes():
    weight, score = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    slot = Slot(score, optimizer)
    enter([slot], [Slot(weight, optimizer)], {"lr": 2.0, "weight_decay": 0.5})
    assert (slot.group["lr"], slot.group["weight_decay"], len(optimizer.param_groups)) == (2.0, 0.5, 2)
    optimizer.state[score]["exp_avg"] = torch.ones(2)
    leave([slot])
    assert len(optimizer.param_groups) == 1 and score not in optimizer.state


def test_only_moments_of_the_shape_are_cleared():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {
        "step": torch.tensor(3.0),
        "average": torch.tensor([1.0, torch.nan]),
        "row": torch.ones(1),
    }
    clear_moments(Slot(weight, optimizer), torch.tensor([True, False]))
    state = optimizer.state[weight]
    assert (state["step"].item(), state["average"].tolist(), state["row"].tolist()) == (3.0, [1.0, 0.0], [1.0])


ENTRY_BY_ENTRY = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]


@pytest.mark.parametrize("name", ENTRY_BY_ENTRY)
def test_these_optimizers_leave_zeros_alone(name):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 4, generator=generator) < 0.5
    weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator).where(mask, 0.0))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    assert zeros_stay([optimizer])
    for _ in range(5):
        weight.grad = torch.randn(4, 4, generator=generator).where(mask, 0.0)
        optimizer.step()
        assert not weight[~mask].any()
        assert not torch.signbit(weight[~mask]).any()


def test_other_optimizers_are_not_trusted():
    weight = torch.nn.Parameter(torch.ones(2, 2))

    class Own(torch.optim.SGD):
        pass

    assert not zeros_stay([torch.optim.SGD([weight], lr=0.1), torch.optim.Muon([weight])])
    assert not zeros_stay([Own([weight], lr=0.1)])
