"""Each row of the table "Who may write to the weights" in docs/tour.md."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsefn as sf
from tests.nn.attach.test_handle import adam, backward, check_zeros, net, train

WARNS = (
    "other code wrote to pruned entries of '0.weight' between the steps.*"
    "call apply_masks"
)
ALGORITHMS = {
    "static": lambda: sf.static(0.5),
    "rigl": lambda: sf.rigl(0.5, when=sf.every(3), steps=100),
    "ste": lambda: sf.ste(0.5),
    "keep": lambda: sf.rigl(0.5, when=sf.every(3), steps=100, pruned="keep"),
    "joint": lambda: sf.supermask(0.5, mode="joint"),
    "supermask": lambda: sf.supermask(0.5),
    "latents": lambda: sf.reparametrised(sf.reparam.power(2.0), sf.static(0.5)),
}
PLAIN, HIDDEN, FOLLOW = (
    ("static", "rigl"),
    ("ste", "keep", "joint"),
    ("supermask", "latents"),
)
SGD, ADAM = (
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.01, "weight_decay": 0.1},
)
OPTIMIZERS = {"SGD": SGD, "Adam": ADAM, "AdamW": ADAM, "Adafactor": {"lr": 0.01}}


def trio(name="static", optimizer="SGD"):
    model = net()
    optimizer = getattr(torch.optim, optimizer)(
        model.parameters(), **OPTIMIZERS[optimizer]
    )
    sparse = sf.attach(ALGORITHMS[name](), model, optimizer)
    train(sparse, model, optimizer, [0])
    optimizer.zero_grad()
    return model, optimizer, sparse


def dense():
    torch.manual_seed(1)
    return {name: torch.randn_like(p) for name, p in net().named_parameters()}


# ---- ways to write -------------------------------------------------------------------


def load(model):
    model.load_state_dict(dense())


def load_by_swapping(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(dense())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def each(write):
    def run(model):
        with torch.no_grad():
            for name, p in model.named_parameters():
                write(p, dense()[name])

    return run


def other_memory(p, x):
    p.data = x


def swapped(p, x):
    other = nn.Parameter(x)
    other.grad = p.grad
    torch.utils.swap_tensors(p, other)


def vector(model):
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(dense().values()), model.parameters()
    )


def foreach(model):
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), list(dense().values()))


def secret_foreach(model):
    torch._foreach_copy_([p.data for p in model.parameters()], list(dense().values()))


def functional_call(model):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self):
            with torch.no_grad():
                for name, p in self.inner.named_parameters():
                    p.copy_(dense()[name])

    given = {f"inner.{name}": p.data for name, p in model.named_parameters()}
    torch.func.functional_call(Writes(), given, ())


def there_and_back(model):
    load(model)
    model.double().float()


SEEN = {
    "load_state_dict": load,
    "load_state_dict by swapping": load_by_swapping,
    "copy_": each(lambda p, x: p.copy_(x)),
    "set_": each(lambda p, x: p.set_(x)),
    "p.data = x": each(other_memory),
    "swap_tensors": each(swapped),
    "vector_to_parameters": vector,
    "foreach": foreach,
    "module.to": there_and_back,
}
SECRET = {
    "p.data.copy_": each(lambda p, x: p.data.copy_(x)),
    "foreach": secret_foreach,
    "functional_call": functional_call,
}
ALL = {**SEEN, **{f"{name} in secret": write for name, write in SECRET.items()}}
ANY = pytest.mark.parametrize("how", ALL)


def masked(sparse):
    masks = sparse.masks
    return {name: torch.where(masks[name], x, 0.0) for name, x in dense().items()}


def assert_weights(model, wanted):
    for name, p in model.named_parameters():
        assert torch.equal(p, wanted[name]), name


def step(model, optimizer, sparse, number=1):
    train(sparse, model, optimizer, [number])


# ---- the rows ------------------------------------------------------------------------

ROWS = {}


def row(name):
    def mark(test):
        ROWS.setdefault(name, []).append(test)
        return test

    return mark


@pytest.mark.deep(but=["*-AdamW"])
@row("weights between the steps")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", SEEN)
def test_weights_between_the_steps(how, optimizer):
    runs = []
    for applies in (False, True):
        model, optimizer_, sparse = trio("static", optimizer)
        backward(model)
        grads = [p.grad.clone() for p in model.parameters()]
        SEEN[how](model)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        if applies:
            sparse.apply_masks()
            sparse.before_step()
        else:
            with pytest.warns(UserWarning, match=WARNS):
                sparse.before_step()
        assert_weights(model, masked(sparse))
        optimizer_.step()
        sparse.after_step(1)
        check_zeros(sparse, model, optimizer_)
        runs.append([p.detach().clone() for p in model.parameters()])
        if not applies:
            load(model)
            backward(model)
            sparse.before_step()  # the warning comes once
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@row("weights between the steps")
def test_weights_that_keep_their_zeros_are_no_reason_to_warn():
    model, optimizer, sparse = trio()
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.01, 0.01)
    step(model, optimizer, sparse)


@row("writes that torch does not count")
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", SECRET)
def test_the_same_in_secret(how, optimizer, name):
    runs = []
    for write in (SECRET[how], load):
        model, optimizer_, sparse = trio(name, optimizer)
        backward(model)
        write(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if write is not load else "ignore")
            sparse.before_step()
        optimizer_.step()
        sparse.after_step(1)
        sparse.check()
        train(sparse, model, optimizer_, range(2, 5))
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@row("weights, then `apply_masks`")
@pytest.mark.parametrize("name", (*PLAIN, *HIDDEN))
@ANY
def test_weights_then_apply_masks(how, name):
    model, optimizer, sparse = trio(name)
    ALL[how](model)
    sparse.apply_masks()
    assert_weights(model, masked(sparse))
    sparse.check()
    step(model, optimizer, sparse)


@row("weights before a step with a closure")
@pytest.mark.parametrize("name", (*PLAIN, *HIDDEN))
@ANY
def test_weights_before_a_step_with_a_closure(how, name):
    model, optimizer, sparse = trio(name)
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        backward(model)

    wanted = masked(sparse)
    ALL[how](model)
    optimizer.step(closure)
    sparse.after_step(1)
    assert all(torch.equal(x, wanted[n]) for n, x in seen[0].items())
    sparse.check()


@pytest.mark.deep(but=["*-AdamW-*"])
@row("weights between `before_step` and `after_step`")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@ANY
def test_weights_between_the_two_calls(how, optimizer, late):
    model, optimizer_, sparse = trio("static", optimizer)
    other, twin, same = trio("static", optimizer)
    for one in (sparse, same):
        backward(model if one is sparse else other)
        one.before_step()
    assert_weights(other, {n: p.detach() for n, p in model.named_parameters()})
    if late:
        optimizer_.step()
        ALL[how](model)
    else:
        grads = [p.grad for p in model.parameters()]
        ALL[how](model)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad  # which a swap takes along
        each(lambda p, x: p.copy_(x))(other)
        optimizer_.step()
        twin.step()
        same.after_step(1)
    sparse.after_step(1)
    sparse.check()
    assert_weights(
        model,
        masked(sparse)
        if late
        else {n: p.detach() for n, p in other.named_parameters()},
    )
    step(model, optimizer_, sparse, 2)


@row("weights whose pruned entries train or are kept")
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("how", SECRET)
def test_weights_whose_pruned_entries_have_values(how, name):
    runs = []
    for write in (SECRET[how], load):
        model, optimizer, sparse = trio(name)
        backward(model)
        write(model)
        assert all(torch.equal(sparse.state.params[n], x) for n, x in dense().items())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if write is load else "error")
            sparse.before_step()
        optimizer.step()
        sparse.after_step(1)
        sparse.check()
        runs.append(sparse.state)
    assert sf.checkpoint.tree_equal(*runs)


@pytest.mark.deep
@row("weights that follow from latents or learned scores")
@pytest.mark.parametrize(
    "when", ["between the steps", "before the step", "after the step"]
)
@pytest.mark.parametrize("name", FOLLOW)
@ANY
def test_weights_that_follow(how, name, when):
    model, optimizer, sparse = trio(name)
    found = copy.deepcopy(model.state_dict())
    model.load_state_dict(found)  # the same values are no write
    backward(model)
    grads = [p.grad for p in model.parameters()]

    def write():
        ALL[how](model)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad

    what = (
        "its mask follows from scores"
        if name == "supermask"
        else "its values follow from latents"
    )
    mend = (
        r"which the write does not reach: call detach\(\), write, and attach again, or "
        r"load the state_dict\(\) of"
    )
    if when == "between the steps":
        write()
        with pytest.raises(
            RuntimeError,
            match=f"before_step: other code wrote to '0.weight', but {what}, {mend}",
        ):
            sparse.before_step()
        with pytest.raises(
            RuntimeError, match="apply_masks: other code wrote to '0.weight'"
        ):
            sparse.apply_masks()
        model.load_state_dict(found)
        sparse.before_step()
        optimizer.step()
        sparse.after_step(1)
    else:
        sparse.before_step()
        if when == "before the step":
            write()
        optimizer.step()
        if when == "after the step":
            ALL[how](model)
        with pytest.raises(
            RuntimeError,
            match=f"after_step: other code wrote to '0.weight', but {what}, {mend}",
        ):
            sparse.after_step(1)


@row("weights that follow from latents or learned scores")
@pytest.mark.parametrize("name", FOLLOW)
def test_the_mend_of_weights_that_follow(name):
    model, optimizer, sparse = trio(name)
    shown = {n: p.detach().clone() for n, p in model.named_parameters()}
    SECRET["p.data.copy_"](model)
    sparse.detach()
    assert all(
        torch.equal(p, shown[n])
        for n, p in model.named_parameters()
        if n.endswith("weight")
    )
    load(model)
    again = sf.attach(ALGORITHMS[name](), model, optimizer)
    again.check()
    step(model, optimizer, again)


@row("weights before `sparse.load_state_dict`")
@pytest.mark.parametrize("name", (*PLAIN, *HIDDEN))
@ANY
def test_weights_before_load_state_dict(how, name):
    model, optimizer, sparse = trio(name)
    load(model)
    sparse.apply_masks()
    saved, wanted = (
        sparse.state_dict(),
        {n: p.detach().clone() for n, p in model.named_parameters()},
    )
    other = net()
    again = sf.attach(ALGORITHMS[name](), other, adam(other))
    ALL[how](other)
    again.load_state_dict(saved)
    assert_weights(other, wanted)
    del optimizer


@row("other parameters or dtypes")
@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.load_state_dict(dense(), assign=True),
        lambda model: setattr(model[0], "weight", nn.Parameter(dense()["0.weight"])),
        lambda model: model.double(),
    ],
    ids=["assign", "another parameter", "another dtype"],
)
def test_other_parameters(write):
    model, _, sparse = trio()
    backward(model)
    write(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        RuntimeError, match=r"before_step: .*call detach\(\), then attach again"
    ):
        sparse.before_step()


@row("gradients after `before_step`")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_after_before_step(optimizer):
    model, optimizer_, sparse = trio("static", optimizer)
    backward(model)
    sparse.before_step()
    for p in model.parameters():
        p.grad.add_(1.0)
    optimizer_.step()
    for name, p in model.named_parameters():
        assert not p[~sparse.masks[name].expand_as(p)].any()
    sparse.after_step(1)
    check_zeros(sparse, model, optimizer_)


@row("gradients through `.data`, which torch does not see")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", PLAIN)
def test_gradients_in_secret(name, optimizer):
    runs = []
    for secret in (False, True):
        model, optimizer_, sparse = trio(name, optimizer)
        for number in range(1, 6):
            optimizer_.zero_grad()
            backward(model)
            sparse.before_step()
            for p in model.parameters():
                (p.grad.data if secret else p.grad).add_(1.0)
            optimizer_.step()
            sparse.after_step(number)
            sparse.check()
        runs.append(sparse.state)
    assert sf.checkpoint.tree_equal(*runs)


@row("moments")
def test_moments():
    model, optimizer, sparse = trio("static", "Adam")
    found = optimizer.state_dict()
    for moments in found["state"].values():
        moments["exp_avg"] = torch.ones_like(moments["exp_avg"])
    optimizer.load_state_dict(found)
    step(model, optimizer, sparse)
    check_zeros(sparse, model, optimizer)


def test_the_table_has_these_rows():
    page = (Path(__file__).parents[3] / "docs" / "tour.md").read_text()
    section = page.split("### Who may write to the weights")[1].split("## ")[0]
    rows = re.findall(r"^\| (.+?) \|", section, flags=re.MULTILINE)
    assert rows[0] == "you write" and rows[1:] == list(ROWS)
