"""Scores of layers: worked examples, identities, and bad input."""

import math

import pytest
import torch
from torch import nn

import sparsefn as sf
from tests.shrinking.residual_nets import (
    IMAGE,
    TOKENS,
    X,
    convnet,
    mlp,
    nested,
    transformer,
)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def states_of(net, x):
    """What enters each block of a sequence, and what leaves the last one."""
    states = [x]
    for block in net:
        states.append(block(states[-1]))
    return states


def test_influence_is_one_minus_the_mean_cosine():
    net = transformer()
    layers = sf.shrinking.layers(net, TOKENS, by="module")
    batches = [TOKENS, TOKENS.flip(0) * 2 + 1]
    wanted = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x in batches:
            states = states_of(net[:3], x)
            for i in range(3):
                cosine = nn.functional.cosine_similarity(
                    states[i], states[i + 1], dim=-1
                )
                wanted[i] += (1 - cosine).mean() / 2
    got = sf.shrinking.influence(layers, net, batches)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_influence_of_channels():
    net = convnet()
    layers = sf.shrinking.layers(net, IMAGE)
    got = sf.shrinking.influence(layers, net, [IMAGE], dim=1)
    with torch.no_grad():
        before = net[0](IMAGE)
        block = net[1]
        inner = block.norm1(block.conv1(before)).relu()
        after = before + block.norm2(block.conv2(inner))
        cosine = nn.functional.cosine_similarity(before, after, dim=1)
    torch.testing.assert_close(got[0].item(), 1 - cosine.mean().item())


class Flat(nn.Module):
    """Adds what it computes from a list of all tokens, as OPT does."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.up(x)
        rows = x.reshape(-1, 8)
        return (rows + self.down(rows)).reshape(x.shape)


def test_layers_may_flatten_the_tokens():
    net = nn.Sequential(Flat(), Flat()).eval()
    x = torch.randn(2, 3, 8)
    layers = sf.shrinking.layers(net, x, by="module")
    assert len(layers) == 2
    with torch.no_grad():
        states = states_of(net, x)
    influence = sf.shrinking.influence(layers, net, [x])
    angles = sf.shrinking.angular_distance(layers, net, [x], span=2)
    for i in range(2):
        wanted = sf.calibration.influence_of(states[i], states[i + 1])
        torch.testing.assert_close(influence[i], wanted)
    wanted = sf.calibration.angle_of(states[0][:, -1], states[2][:, -1])
    torch.testing.assert_close(angles[0], wanted)


def test_a_layer_that_adds_nothing_has_no_influence():
    net = mlp(3)
    nn.init.zeros_(net[2].down.weight)
    nn.init.zeros_(net[2].down.bias)
    layers = sf.shrinking.layers(net, X)
    values = sf.shrinking.influence(layers, net, [X])
    assert values[1].abs() < 1e-12 and (values[[0, 2]] > 1e-3).all()
    units = layers.pattern()
    prune = sf.one_shot(1 / 3, sf.scores.of_units(values, units), pattern=units)
    params = sf.modules.params_of(net)
    state = prune.update(prune.init(params), params, 0)
    small = sf.shrink(net, state, X, groups=layers)
    torch.testing.assert_close(small(X), net(X))


def test_zeros_have_an_influence():
    net = mlp(2)
    for layer in (net[0], net[1].down):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    nn.init.ones_(net[2].down.bias)
    layers = sf.shrinking.layers(net, X)
    assert sf.shrinking.influence(layers, net, [X]).tolist() == [0, 1]


@pytest.mark.parametrize("span", [1, 2, 3])
def test_angles_of_spans_at_the_last_token(span):
    net = transformer()
    layers = sf.shrinking.layers(net, TOKENS, by="module")
    got = sf.shrinking.angular_distance(layers, net, [TOKENS], span=span)
    every = sf.shrinking.angular_distance(layers, net, [TOKENS], span=span, last=False)
    with torch.no_grad():
        states = states_of(net[:3], TOKENS)
    for i in range(4 - span):
        cosine = nn.functional.cosine_similarity(states[i], states[i + span], dim=-1)
        angle = cosine.arccos() / math.pi
        torch.testing.assert_close(got[i].item(), angle[:, -1].mean().item())
        torch.testing.assert_close(every[i].item(), angle.mean().item())
    assert len(got) == 4 - span


def test_the_loss_is_of_the_masked_model():
    net = nested()
    layers = sf.shrinking.layers(net, X)
    params = sf.modules.params_of(net)

    def loss(params):
        return sf.modules.call(net, params, X).square().mean()

    got = sf.shrinking.loss_without(layers, params, loss)
    for i in range(len(layers)):
        masked = sf.modules.bake(net, sf.State(params, layers.masks([i])))
        wanted = masked(X).square().mean()
        torch.testing.assert_close(got[i].item(), wanted.item())
    assert torch.equal(loss(params), loss(sf.modules.params_of(net)))


def test_taylor_is_the_first_order_of_the_loss():
    net = mlp(3).double()
    layers = sf.shrinking.layers(net, X.double())
    params = sf.modules.params_of(net)

    def loss(params):
        return sf.modules.call(net, params, X.double()).square().mean()

    grads = torch.func.grad(loss)(params)

    def signed(state, grads, step):
        return {path: x * grads[path] for path, x in state.params.items()}

    units = layers.pattern()
    taylor = sf.scores.by_unit(signed, units, lambda rows: rows.sum(-1))
    state = sf.one_shot(1 / 3, taylor, pattern=units).init(params)
    (values,) = taylor(state, grads, 0).values()
    size = 1e-6
    for i, layer in enumerate(layers):
        less = {leaf: params[leaf] * (1 - size) for leaf in layer.leaves}
        slope = (loss(params) - loss({**params, **less})) / size
        torch.testing.assert_close(slope, values[i], atol=1e-6, rtol=1e-4)


def test_bad_input():
    net = mlp(3)
    layers = sf.shrinking.layers(net, X)
    params = sf.modules.params_of(net)
    with pytest.raises(TypeError, match=r"influence: expected layers as sf.shrinking"):
        sf.shrinking.influence(sf.shrinking.groups(net, X), net, [X])
    with pytest.raises(ValueError, match="influence: expected at least one batch, got"):
        sf.shrinking.influence(layers, net, [])
    text = (
        r"^influence: expected batches of the shapes .*: leave out a smaller last "
        r"batch, as DataLoader\(..., drop_last=True\) does, or find the layers on an "
        r"example of this shape$"
    )
    with pytest.raises(ValueError, match=text):
        sf.shrinking.influence(layers, net, [X, X[:2]])
    for wrong in (X, {"x": X}, None):
        with pytest.raises(
            TypeError,
            match="influence: expected a list of batches or a loader, got "
            rf"{type(wrong).__name__}: of one batch x write \[x\]",
        ):
            sf.shrinking.influence(layers, net, wrong)
    with pytest.raises(ValueError, match="expected dim from -.*, got 5$"):
        sf.shrinking.influence(layers, net, [X], dim=5)
    with pytest.raises(ValueError, match="finite hidden states, but layer 0, at '1'"):
        sf.shrinking.influence(layers, net, [X.log()])
    with pytest.raises(ValueError, match="finite hidden states, but layer 0, at '1'"):
        sf.shrinking.angular_distance(layers, net, [X.log()], last=False)
    with pytest.raises(ValueError, match="expected the groups of this model, whose"):
        sf.shrinking.influence(layers, mlp(2), [X])
    with pytest.raises(
        TypeError, match=r"angular_distance: expected span to be an int"
    ):
        sf.shrinking.angular_distance(layers, net, [X], span=1.0)
    with pytest.raises(ValueError, match="expected a span from 1 to the 3 layers, got"):
        sf.shrinking.angular_distance(layers, net, [X], span=4)
    inside = sf.shrinking.layers(nested(), X)
    with pytest.raises(ValueError, match="after another, but layer 0 is inside 1"):
        sf.shrinking.angular_distance(inside, nested(), [X])
    groups = sf.shrinking.groups(net, X, only=["1", "2"])
    parts = sf.shrinking.layers(net, X, widths=groups)
    with pytest.raises(ValueError, match="a whole model, got layers of submodules"):
        sf.shrinking.influence(parts, net, [X])
    with pytest.raises(
        TypeError, match="expected loss to give a 0-d tensor, got float"
    ):
        sf.shrinking.loss_without(layers, params, lambda params: 1.0)
    with pytest.raises(ValueError, match=r"to give a 0-d tensor, got shape \(1,\)"):
        sf.shrinking.loss_without(layers, params, lambda params: torch.ones(1))
    with pytest.raises(ValueError, match=r"with the leaf '1.up.weight' of layer 0"):
        sf.shrinking.loss_without(layers, {}, lambda params: torch.ones(()))


def test_tokens_that_do_not_count_are_left_out():
    net = transformer()[:3]
    layers = sf.shrinking.layers(net, TOKENS, by="module")
    counted = torch.ones(2, 5, dtype=torch.bool)
    counted[1, 3:] = False
    with torch.no_grad():
        states = states_of(net, TOKENS)
    last = torch.tensor([4, 2])
    rows = torch.arange(2)
    for i in range(3):
        before = states[i]
        after = states[i + 1]
        cosine = nn.functional.cosine_similarity(before[counted], after[counted], -1)
        got = sf.shrinking.influence(layers, net, [TOKENS], tokens=[counted])[i]
        torch.testing.assert_close(got.float(), 1 - cosine.mean())
        for chosen, some in (((rows, last), True), (counted, False)):
            cosine = nn.functional.cosine_similarity(before[chosen], after[chosen], -1)
            got = sf.shrinking.angular_distance(
                layers, net, [TOKENS], last=some, tokens=[counted]
            )[i]
            torch.testing.assert_close(got.float(), (cosine.acos() / math.pi).mean())
    every = torch.ones(2, 5, dtype=torch.bool)
    for score in (sf.shrinking.influence, sf.shrinking.angular_distance):
        got = score(layers, net, [TOKENS], tokens=[every])
        torch.testing.assert_close(got, score(layers, net, [TOKENS]))


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        (
            [torch.ones(2, 5)],
            TypeError,
            "expected tokens to be bool tensors, .* got to",
        ),
        ([[True]], TypeError, "for each token that counts, got <class 'list'>: write"),
        ([torch.ones(5) > 0], ValueError, r"tokens of the shape \(2, 5\), .* \(5,\)$"),
        (
            [torch.ones(2, 5) < 0],
            ValueError,
            "tokens that count in each batch, but one",
        ),
        ([], ValueError, "a tensor of tokens for each of 1 batches, got 0"),
        ([torch.ones(2, 5) > 0] * 2, ValueError, "for each of 1 batches, got 2"),
    ],
)
def test_tokens_that_do_not_fit(tokens, error, text):
    net = transformer()
    layers = sf.shrinking.layers(net, TOKENS)
    for score in (sf.shrinking.influence, sf.shrinking.angular_distance):
        with pytest.raises(error, match=f"^{score.__name__}: .*{text}"):
            score(layers, net, [TOKENS], tokens=tokens)
    with pytest.raises(ValueError, match="expected dim=-1 where tokens say .*, got 1"):
        sf.shrinking.influence(layers, net, [TOKENS], dim=1, tokens=tokens)
