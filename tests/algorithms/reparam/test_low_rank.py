"""Low-rank updates of frozen weights: values, slopes, zeros, where they start, and in a
loop of torch.optim.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparsefn as sf

KEY = sf.random.key(0)
BASE = torch.tensor([[1.0, 0.0, -2.0], [0.0, 0.5, 3.0]])


def trained(reparam, leaf, seed=1):
    """Latents of one leaf with a B that is not zero."""
    latents = reparam.init({"w": leaf}, KEY)
    generator = torch.Generator().manual_seed(seed)
    latents["b"]["w"] = torch.randn(
        latents["b"]["w"].shape, generator=generator, dtype=latents["b"]["w"].dtype
    )
    return latents


def net(sparsity=0.5):
    """A pruned network of two layers, with a bias each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return sf.modules.bake(
        model, sf.static(sparsity, init="magnitude").init(sf.modules.params_of(model))
    )


def test_the_first_weights_are_those_of_the_base_and_a_is_kaiming_uniform():
    reparam, leaf = sf.reparam.low_rank(5, 10.0), torch.randn(40, 400)
    latents = reparam.init({"w": leaf}, KEY)
    assert torch.equal(reparam.apply(latents, 0, KEY)[0]["w"], leaf)
    a, bound = latents["a"]["w"], 1 / math.sqrt(400)
    assert (
        a.shape == (5, 400)
        and latents["b"]["w"].shape == (40, 5)
        and not latents["b"]["w"].any()
    )
    assert (
        0.98 * bound < a.abs().amax() <= bound and abs(float(a.mean())) < 0.05 * bound
    )
    torch.testing.assert_close(float(a.std()), bound / math.sqrt(3), rtol=0.05, atol=0)
    assert not torch.equal(a, reparam.init({"w": leaf}, sf.random.key(1))["a"]["w"])
    assert not torch.equal(a, reparam.init({"v": leaf}, KEY)["a"]["v"])


def test_values_and_slopes_are_those_of_the_paper_under_the_mask():
    reparam = sf.reparam.low_rank(2, 6.0)
    latents = trained(reparam, BASE)
    a, b = latents["a"]["w"], latents["b"]["w"]
    grad = torch.tensor([[1.0, 10.0, 2.0], [20.0, -1.0, 0.5]])
    weights, pull, masks = torch.func.vjp(
        lambda t: reparam.apply(latents | t, 0, KEY),
        {"a": {"w": a}, "b": {"w": b}},
        has_aux=True,
    )
    assert torch.equal(masks["w"], BASE != 0)
    torch.testing.assert_close(
        weights["w"], torch.where(BASE != 0, BASE + 3 * b @ a, 0.0)
    )
    (slopes,) = pull({"w": grad})
    kept = torch.where(BASE != 0, grad, 0.0)
    torch.testing.assert_close(slopes["a"]["w"], 3 * b.T @ kept)
    torch.testing.assert_close(slopes["b"]["w"], 3 * kept @ a.T)


def test_without_alpha_the_factor_is_one():
    latents = trained(sf.reparam.low_rank(3), BASE)
    one, same = (
        sf.reparam.low_rank(3, *alpha).apply(latents, 0, KEY)[0]["w"]
        for alpha in ((), (3,))
    )
    assert torch.equal(one, same)


def test_kernels_are_flattened():
    reparam, leaf = sf.reparam.low_rank(2), torch.randn(6, 3, 2, 2)
    latents = trained(reparam, leaf)
    assert latents["a"]["w"].shape == (2, 12)
    expected = leaf + (latents["b"]["w"] @ latents["a"]["w"]).reshape(6, 3, 2, 2)
    torch.testing.assert_close(reparam.apply(latents, 0, KEY)[0]["w"], expected)


def test_each_matrix_of_a_stack_has_its_own_update():
    leaf = torch.randn(4, 6, 5) * (torch.rand(4, 6, 5) < 0.5)
    reparam = sf.reparam.low_rank(2, dropout=0.5, stacked=1)
    latents = trained(reparam, leaf)
    assert latents["a"]["w"].shape == (4, 2, 5) and latents["b"]["w"].shape == (4, 6, 2)
    for weights, masks in (reparam.settled(latents, 0), reparam.apply(latents, 0, KEY)):
        change = weights["w"] - leaf
        assert torch.equal(masks["w"], leaf != 0) and not change[leaf == 0].any()
        assert all(torch.linalg.matrix_rank(c.where(c != 0, 0.0)) > 0 for c in change)
    for i in range(4):
        one = latents["b"]["w"][i] @ latents["a"]["w"][i]
        torch.testing.assert_close(
            reparam.settled(latents, 0)[0]["w"][i],
            torch.where(leaf[i] != 0, leaf[i] + one, 0.0),
        )


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.floats(0.0, 1.0),
    st.integers(0, 99),
)
def test_zeros_are_exactly_those_of_the_base(dtype, density, seed):
    generator = torch.Generator().manual_seed(seed)
    leaf = torch.randn(5, 7, generator=generator).to(dtype)
    leaf[torch.rand(5, 7, generator=generator) >= density] = -0.0
    reparam = sf.reparam.low_rank(2, 100.0, dropout=0.5)
    latents = trained(reparam, leaf, seed)
    # what overflows next to a zero does not reach it
    latents["a"]["w"][0, 0] = math.inf
    for weights, masks in (
        reparam.apply(latents, seed, KEY),
        reparam.settled(latents, seed),
    ):
        assert weights["w"].dtype == dtype and torch.equal(masks["w"], leaf != 0)
        assert (
            not weights["w"][leaf == 0].any()
            and not torch.signbit(weights["w"][leaf == 0]).any()
        )


def test_half_precision_trains_in_float32():
    latents = sf.reparam.low_rank(2).init({"w": BASE.bfloat16()}, KEY)
    assert {name: tree["w"].dtype for name, tree in latents.items()} == {
        "base": torch.bfloat16,
        "a": torch.float32,
        "b": torch.float32,
    }


def test_dropout_leaves_out_inputs_and_is_drawn_by_step():
    reparam, leaf = sf.reparam.low_rank(2, dropout=0.25), torch.ones(3, 4000)
    latents = trained(reparam, leaf)
    full = reparam.settled(latents, 0)[0]["w"] - leaf
    seen = []
    for step in (0, 1):
        change = reparam.apply(latents, step, KEY)[0]["w"] - leaf
        left_out = (change == 0).all(0)
        torch.testing.assert_close(change[:, ~left_out], full[:, ~left_out] / 0.75)
        assert 0.22 < left_out.double().mean() < 0.28
        seen.append(left_out)
    assert not torch.equal(*seen)
    assert torch.equal(reparam.apply(latents, 1, KEY)[0]["w"] - leaf, change)


def train(model, algorithm, steps=6, **options):
    """Adam in a loop, and what attach returned."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **options)
    sparse = sf.attach(algorithm, model, optimizer)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        x = torch.randn(32, 8, generator=generator)
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        sparse.after_step(step)
    return sparse


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attach_trains_a_and_b_and_settled_merges_with_the_zeros_of_the_base(dropout):
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    algorithm = sf.reparametrised(sf.reparam.low_rank(2, 4.0, dropout))
    sparse = train(model, algorithm, weight_decay=0.1)
    latents = sparse.state.scores["latent"]
    assert all(
        torch.equal(latents["base"][path], before[path])
        for path in ("0.weight", "2.weight")
    )
    assert all(
        latents[name][path].any() for name in "ab" for path in ("0.weight", "2.weight")
    )
    merged = sf.modules.bake(model, sf.settled(algorithm, sparse.state))
    for path in ("0.weight", "2.weight"):
        weight, mask = merged.get_parameter(path), before[path] != 0
        change = 2 * latents["b"][path] @ latents["a"][path]
        torch.testing.assert_close(
            weight.detach(), torch.where(mask, before[path] + change, 0.0)
        )
        assert torch.equal(weight != 0, mask) and not torch.equal(weight, before[path])
    # what has no latents trains as it is
    assert not torch.equal(merged[0].bias, before["0.bias"])


def test_frozen_biases_stay():
    model = net()
    model[0].bias.requires_grad_(False)
    before = model[0].bias.clone()
    train(model, sf.reparametrised(sf.reparam.low_rank(2)))
    assert torch.equal(model[0].bias, before)


def test_an_inner_algorithm_prunes_more():
    model = net()
    zeros = {name: p == 0 for name, p in model.named_parameters()}
    inner = sf.gmp(0.75, when=sf.at([3]), init="dense")
    sparse = train(model, sf.reparametrised(sf.reparam.low_rank(2), inner))
    assert (
        sparse.state.masks["0.weight"].sum() == 32
        and not model[0].weight[zeros["0.weight"]].any()
    )


def test_a_run_goes_on_from_its_state_dict():
    algorithm = sf.reparametrised(
        sf.reparam.low_rank(2, dropout=0.5), key=sf.random.key(3)
    )
    sparse = train(net(), algorithm)
    other = net()
    again = sf.attach(algorithm, other, torch.optim.Adam(other.parameters()))
    again.load_state_dict(sparse.state_dict())
    assert sf.checkpoint.tree_equal(again.state.scores, sparse.state.scores)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0,), ValueError, "low_rank: expected rank >= 1, got 0"),
        ((2.0,), TypeError, "low_rank: expected rank to be an int, got float"),
        (
            (2, 0.0),
            ValueError,
            "low_rank: expected alpha to be positive and finite, got 0.0",
        ),
        (
            (2, math.inf),
            ValueError,
            "low_rank: expected alpha to be positive and finite, got inf",
        ),
        (
            (2, "16"),
            ValueError,
            "low_rank: expected alpha to be positive and finite, got '16'",
        ),
        ((2, 16, 1.0), ValueError, "low_rank: expected 0 <= dropout < 1, got 1.0"),
        (
            (2, -0.5),
            ValueError,
            "low_rank: expected alpha to be positive and finite, got -0.5",
        ),
        ((2, 16, True), ValueError, "low_rank: expected 0 <= dropout < 1, got True"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        sf.reparam.low_rank(*arguments)


def test_leaves_that_are_no_matrices_are_refused():
    with pytest.raises(
        ValueError,
        match=r"expected leaves of 2 axes or more, got shape \(3,\) at 'b': leave them "
        r"out",
    ):
        sf.reparametrised(sf.reparam.low_rank(2), where="b").init({"b": torch.ones(3)})
    with pytest.raises(
        ValueError,
        match=r"expected leaves of 3 axes or more, got shape \(3, 4\) at 'w': leave "
        r"them",
    ):
        sf.reparametrised(sf.reparam.low_rank(2, stacked=1)).init(
            {"w": torch.ones(3, 4)}
        )
