import math

import pytest
import torch

import sparsefn as sf
from sparsefn.nn.attach.moments import clear_changed, zeros_stay
from sparsefn.nn.attach.optimizer_state import clear_moments
from sparsefn.nn.attach.records import Record


def one(kind="SGD", shape=(2,), dtype=torch.float32, **options):
    weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    return Record(
        "w", weight, getattr(torch.optim, kind)([weight], **{"lr": 0.1, **options})
    )


def test_only_moments_of_the_shape_are_cleared():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {
        "step": torch.tensor(3.0),
        "average": torch.tensor([1.0, torch.nan]),
        "row": torch.ones(1),
    }
    clear_moments(Record("w", weight, optimizer), torch.tensor([True, False]))
    state = optimizer.state[weight]
    assert (state["step"].item(), state["average"].tolist(), state["row"].tolist()) == (
        3.0,
        [1.0, 0.0],
        [1.0],
    )


ENTRY_BY_ENTRY = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
]


@pytest.mark.parametrize("name", ENTRY_BY_ENTRY)
def test_these_optimizers_leave_zeros_alone(name):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 4, generator=generator) < 0.5
    weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator).where(mask, 0.0))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    assert zeros_stay(optimizer, [torch.float32])
    for _ in range(5):
        weight.grad = torch.randn(4, 4, generator=generator).where(mask, 0.0)
        optimizer.step()
        assert not weight[~mask].any()
        assert not torch.signbit(weight[~mask]).any()


def test_other_optimizers_are_not_trusted():
    weight = torch.nn.Parameter(torch.ones(2, 2))

    class Own(torch.optim.SGD):
        pass

    assert not zeros_stay(torch.optim.Muon([weight]), [torch.float32])
    assert not zeros_stay(Own([weight], lr=0.1), [torch.float32])


@pytest.mark.parametrize(
    ("kind", "options", "dtype", "stays"),
    [
        ("Adam", {}, torch.float32, True),
        ("Adam", {}, torch.bfloat16, True),
        ("Adam", {}, torch.float16, False),
        ("Adam", {"eps": 1e-4}, torch.float16, True),
        ("Adam", {"eps": 0.0}, torch.float32, False),
        (
            "Adam",
            {"eps": 1e-40},
            torch.float32,
            False,
        ),  # subnormal: some processors take it for zero
        ("Adam", {"lr": torch.tensor(0.1)}, torch.float32, True),
        ("SGD", {}, torch.float16, True),
        ("SGD", {"lr": math.inf}, torch.float32, False),
        ("SGD", {"lr": 20.0, "weight_decay": 0.1}, torch.float32, False),
        ("ASGD", {"lr": 20.0, "lambd": 0.1}, torch.float32, False),
    ],
)
def test_numbers_under_which_zeros_may_go(kind, options, dtype, stays):
    assert zeros_stay(one(kind, dtype=dtype, **options).optimizer, [dtype]) is stays


def test_numbers_are_read_as_they_are_now():
    optimizer = one("Adam").optimizer
    assert zeros_stay(optimizer, [torch.float32])
    optimizer.param_groups[0]["eps"] = 0.0
    assert not zeros_stay(optimizer, [torch.float32])


@pytest.mark.parametrize(
    ("kind", "options", "name", "first"),
    [
        ("Rprop", {"lr": 0.25}, "step_size", 0.25),
        ("Rprop", {"lr": 0.25}, "prev", 0.0),
        ("Adagrad", {"initial_accumulator_value": 0.5}, "sum", 0.5),
        ("Adam", {}, "exp_avg", 0.0),
        ("ASGD", {}, "ax", 0.0),
    ],
)
def test_moments_start_where_torch_starts_them(kind, options, name, first):
    record = one(kind, **options)
    for _ in range(2):
        record.parameter.grad = torch.tensor([1.0, -2.0])
        record.optimizer.step()
    kept = record.optimizer.state[record.parameter][name][0].item()
    clear_moments(record, torch.tensor([True, False]), torch.zeros(2))
    assert record.optimizer.state[record.parameter][name].tolist() == [kept, first]


def test_moments_of_changed_leaves_alone_are_read():
    record = one("Adam", shape=(2, 2))
    record.optimizer.state[record.parameter]["exp_avg"] = torch.ones(2, 2)
    state = sf.static(0.5, init="magnitude").init({"w": torch.ones(2, 2)})
    mask = state.masks["w"]
    record.support = mask
    clear_changed([(record, state.params["w"], mask)], state.params)
    assert record.optimizer.state[record.parameter]["exp_avg"].all()
    record.support = ~mask
    clear_changed([(record, state.params["w"], mask)], state.params)
    assert not record.optimizer.state[record.parameter]["exp_avg"].any()
