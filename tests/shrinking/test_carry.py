"""Training goes on with the smaller model, from the state and the optimizer of the old
one.
"""

import pytest
import torch
from torch import nn

import sparsefn as sf


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
    ).double()


X = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(2))


def trained(model, optimizer, steps, sparse=None):
    for step in range(steps):
        nn.functional.cross_entropy(model(X), Y).backward()
        if sparse is not None:
            sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        if sparse is not None:
            sparse.after_step(step)


def attached(model, optimizer):
    pattern = sf.shrinking.groups(model.eval(), X).pattern()
    return sf.attach(
        sf.static(0.5, pattern=pattern, init="magnitude"), model, optimizer
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_of_the_smaller_model_are_those_of_the_masked_one(kind):
    options = {"lr": 1e-2} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    model = network()
    optimizer = kind(model.parameters(), **options)
    sparse = attached(model, optimizer)
    trained(model, optimizer, 5, sparse)
    made = sf.shrinking.smaller(model, sparse.state, X)
    after = kind(made.module.parameters(), **options)
    after.load_state_dict(sf.shrinking.carry_optimizer(optimizer, model, made))
    for step in range(5, 10):  # both go on
        for part, its in ((model, optimizer), (made.module, after)):
            nn.functional.cross_entropy(part(X), Y).backward()
            if part is model:
                sparse.before_step()
            its.step()
            its.zero_grad()
            if part is model:
                sparse.after_step(step)
    assert made.form == "class" and [
        layer.out_features for layer in made.module[::2]
    ] == [4, 3, 2]
    torch.testing.assert_close(made.module(X), model(X), rtol=1e-12, atol=1e-12)


def test_what_attach_saves_loads_beside_the_smaller_model():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    sparse = attached(model, optimizer)
    trained(model, optimizer, 2, sparse)
    made = sf.shrinking.smaller(model, sparse.state, X)
    saved = sf.shrinking.carry(sparse.state_dict(), made)
    assert {
        k: tuple(v.shape)
        for k, v in saved["tensors"].items()
        if k.startswith("masks.") and v.ndim
    } == {
        "masks.0.weight": (4, 4),
        "masks.0.bias": (4,),
        "masks.2.weight": (3, 4),
        "masks.2.bias": (3,),
        "masks.4.weight": (2, 3),
    }


def test_a_state_gets_the_params_of_the_smaller_model():
    model = nn.Sequential(nn.Linear(3, 2), nn.Sigmoid(), nn.Linear(2, 2)).eval()
    masks = {name: torch.tensor(True) for name, _ in model.named_parameters()}
    masks["0.weight"] = torch.tensor([[True], [False]]).expand(2, 3)
    state = sf.State(
        sf.modules.params_of(model), masks, {"average": sf.modules.params_of(model)}
    )
    made = sf.shrinking.smaller(model, state, torch.ones(1, 3))
    carried = sf.shrinking.carry(state, made)
    assert torch.equal(carried.params["2.bias"], made.module[2].bias)
    # it took in the constant
    assert not torch.equal(carried.params["2.bias"], state.params["2.bias"])
    assert (
        carried.scores["average"]["0.weight"].shape
        == carried.masks["0.weight"].shape
        == (1, 3)
    )
    assert carried.masks["2.bias"].ndim == 0 and state.params["0.weight"].shape == (
        2,
        3,
    )


def test_other_shapes_and_other_parameters_are_refused():
    model = network().eval()
    made = sf.shrinking.smaller(
        model, sf.static(0.5, where="0.weight").init(sf.modules.params_of(model)), X
    )
    with pytest.raises(
        ValueError,
        match=r"carry: expected a tensor of the old shape \(8, 4\) at 'm.0.weight', "
        r"got \(3,\)",
    ):
        sf.shrinking.carry({"m": {"0.weight": torch.ones(3)}}, made)
    pattern = sf.shrinking.groups(model, X).pattern()
    state = sf.methods.taylor(1, pattern=pattern).init(sf.modules.params_of(model))
    text = (
        r"of the old shape \(8, 4\) at 'scores.score.sum.0.weight', got \(8,\); a "
        r"score of tied units is not cut: start"
    )
    with pytest.raises(ValueError, match=text):
        sf.shrinking.carry(state, made)
    other = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    other.param_groups[0]["params"][0].sum().backward()
    other.step()
    with pytest.raises(
        ValueError, match=r"its parameter 0 of shape \(2,\) is none of them"
    ):
        sf.shrinking.carry_optimizer(other, model, made)
    with pytest.raises(
        ValueError,
        match=r"at 'scores.0.weight:1', got \(4,\); a score of tied units is not cut",
    ):
        sf.shrinking.carry({"scores": {"0.weight:1": torch.ones(4)}}, made)
