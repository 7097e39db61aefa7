"""`detach` leaves the settled weights: learned masks and gates are hard then."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sparsefn as sf

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 4
SHOWN = {"loss": torch.tensor(0.0)}


def loss_of_step(grads):
    return SHOWN["loss"]


LEARNED = {
    "maskllm": lambda: sf.methods.maskllm(steps=6),
    "prox_sparse": lambda: sf.methods.prox_sparse(0.01),
    "maskpro": lambda: sf.methods.maskpro(loss=loss_of_step),
    "leap": lambda: sf.methods.leap(0.5, steps=6),
}
GATES = {
    "hard_concrete": lambda: sf.reparametrised(sf.reparam.hard_concrete()),
    "inside": lambda: sf.partition(
        [
            ("0.*", sf.methods.maskllm(steps=6)),
            ("*", sf.gmp(0.5, when=sf.at([1]))),
        ]
    ),
    "low_rank": lambda: sf.reparametrised(sf.reparam.low_rank(2, dropout=0.5)),
}
EVERY = LEARNED | GATES


def run(name, steps=range(4), **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = copy.deepcopy(model)
    sparse = sf.attach(EVERY[name](), model, optimizer, **options)
    train(sparse, model, optimizer, steps)
    return first, model, optimizer, sparse


def train(sparse, model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss = cross_entropy(model(X), Y)
        loss.backward()
        SHOWN["loss"] = loss.detach()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return sf.checkpoint.tree_equal(a, b)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("steps", [0, 4])
def test_detach_leaves_first_weights_under_hard_masks(name, steps):
    first, model, _, sparse = run(name, range(steps))
    sparse.detach()
    kept = 0
    for path in ("0.weight", "2.weight"):
        weight = model.get_parameter(path).detach()
        moved = weight != first.get_parameter(path)
        assert not weight[moved].any()
        kept += int(weight.count_nonzero())
        if name != "leap":
            assert ((weight != 0).unflatten(1, (-1, 4)).sum(-1) == 2).all()
    assert kept == 72


@pytest.mark.parametrize("name", EVERY)
def test_what_detach_leaves_is_the_settled_state(name):
    _, model, optimizer, sparse = run(name)
    algorithm, before = EVERY[name](), sparse.state
    sparse.detach()
    assert same(sparse.state, sf.settled(algorithm, before))
    assert same(sparse.state, sf.settled(algorithm, sparse.state))
    assert same(sf.effective(sparse.state), weights(model))
    assert same(sparse.masks, sparse.state.masks)
    assert same(sparse.in_module(), sparse.state)
    text = "this algorithm was detached: attach it again"
    with pytest.raises(RuntimeError, match=text):
        sparse.detach()
    assert same(sf.effective(sparse.state), weights(model))
    # an ordinary module trains on
    left = weights(model)
    optimizer.zero_grad()
    cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert not same(left, weights(model))
    assert same(sf.effective(sparse.state), left)


def test_what_detach_leaves_is_reported():
    _, _, _, sparse = run("maskllm")
    assert sf.masks.sparsity(sparse.masks) == 0
    sparse.detach()
    assert sf.masks.sparsity(sparse.masks) == 0.5
    rows = {row.path: row.kept for row in sf.report.summary(sparse).rows}
    assert (rows["0.weight"], rows["2.weight"]) == (48, 24)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_state_dict_goes_on_with_the_same_bits_after_a_detach(name, when):
    _, whole, optimizer, sparse = run(name, range(6))
    end = sparse.state
    _, model, optimizer, sparse = run(name, range(3))
    if when == "before":
        found = sparse.state_dict()
    shown = weights(model)
    moments = copy.deepcopy(optimizer.state_dict())
    sparse.detach()
    if when == "after":
        found = sparse.state_dict()
    again = sf.attach(EVERY[name](), model, optimizer)
    again.load_state_dict(found)
    optimizer.load_state_dict(moments)
    assert same(weights(model), shown)
    train(again, model, optimizer, range(3, 6))
    assert same(again.state, end)
    assert same(weights(model), weights(whole))


def test_the_state_dict_of_what_was_detached_does_not_read_the_module():
    _, model, _, sparse = run("maskllm")
    sparse.detach()
    before = sparse.state_dict()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    assert same(before["tensors"], sparse.state_dict()["tensors"])


@pytest.mark.parametrize("name", LEARNED)
def test_detach_within_a_step_leaves_hard_masks(name):
    _, model, optimizer, sparse = run(name)
    cross_entropy(model(X), Y).backward()
    sparse.before_step()
    optimizer.step()
    sparse.detach()
    left = sum(int(model[i].weight.count_nonzero()) for i in (0, 2))
    assert left == 72
    assert same(sf.effective(sparse.state), weights(model))


def test_hooks_settle_too():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparse = sf.attach(sf.methods.maskllm(steps=2), model, optimizer, hooks=True)
    for _ in range(2):
        cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    sparse.detach()
    assert ((model.weight != 0).unflatten(1, (-1, 4)).sum(-1) == 2).all()


def test_a_module_of_another_dtype_gets_the_settled_weights():
    first, model, _, sparse = run("maskllm")
    model.bfloat16()
    sparse.detach()
    kept = sparse.masks["0.weight"]
    wanted = torch.where(kept, first[0].weight.detach(), 0.0).bfloat16()
    assert torch.equal(model[0].weight, wanted)
    assert int(kept.sum()) == 48


def test_a_weight_of_another_shape_keeps_its_values_and_is_named():
    _, model, _, sparse = run("maskllm")
    model[0].weight.data = torch.ones(3, 8)
    text = (
        "detach: '0.weight' has another shape than it had, and keeps the weights of "
        "training: the settled ones are in sf.effective(sparse.state)"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        sparse.detach()
    assert torch.equal(model[0].weight, torch.ones(3, 8))
    assert int(model[2].weight.count_nonzero()) == 24


def test_gates_that_all_close_are_named():
    model = nn.Linear(4, 2)
    first = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = sf.methods.continuous_sparsification(steps=5)
    sparse = sf.attach(algorithm, model, optimizer)
    text = (
        "detach: the settled mask of 'weight' keeps none of its weights after 0 "
        "steps, and they are zeros now: to train on, attach again and load the "
        "state_dict(), which has what trained"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        sparse.detach()
    assert not model.weight.any()
    again = sf.attach(algorithm, model, optimizer)
    again.load_state_dict(sparse.state_dict())
    torch.testing.assert_close(model.weight.detach(), first)


def test_a_settling_that_raises_changes_nothing():
    def settled(state):
        raise ValueError("nothing settles today")

    _, model, optimizer, sparse = run("maskllm")
    sparse.detach()
    broken = sf.methods.maskllm(steps=6)._replace(settled=settled)
    sparse = sf.attach(broken, model, optimizer)
    train(sparse, model, optimizer, range(1))
    shown = weights(model)
    state = sparse.state
    with pytest.raises(ValueError, match="nothing settles today"):
        sparse.detach()
    assert sparse.is_attached
    assert same(weights(model), shown)
    assert same(sparse.state, state)
    train(sparse, model, optimizer, range(1, 2))
    assert sparse.state_dict()["tensors"]["scores.step"] == 2


def test_nothing_settles_where_the_state_is_the_one_to_evaluate():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sf.attach(sf.rigl(0.5, steps=9), model, optimizer)
    train(sparse, model, optimizer, range(3))
    before = sparse.state
    version = model.weight._version
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse.detach()
    assert same(sparse.state, before)
    assert model.weight._version <= version + 1
