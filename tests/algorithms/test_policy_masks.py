"""Masks of n of m that are drawn, and train by policy gradients: `policy_masks`."""

import re
from itertools import combinations, permutations
from math import comb

import pytest
import torch
from golden_data import cases

import sparsefn as sf
from sparsefn.algorithms.policy_masks import log_chance

policy_masks, nm = sf.policy_masks, sf.patterns.nm
SIZES = [(1, 2), (1, 4), (2, 4), (3, 4), (2, 5), (4, 6)]


def all_masks(n, m):
    """Every mask of n of m, (masks, m)."""
    return torch.tensor(
        [[i in kept for i in range(m)] for kept in combinations(range(m), n)]
    )


def by_definition(logits, mask):
    """The chance of a mask: the sum over all orders in which it can be drawn."""
    p = torch.softmax(logits, -1)
    total = torch.zeros((), dtype=logits.dtype)
    for order in permutations(mask.nonzero()[:, 0].tolist()):
        left, chance = torch.ones((), dtype=logits.dtype), 1.0
        for i in order:
            chance = chance * p[i] / left
            left = left - p[i]
        total = total + chance
    return total


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_chances_are_sums_over_all_orders_and_add_up_to_one(n, m):
    torch.manual_seed(0)
    logits = torch.randn(m, dtype=torch.float64)
    masks = all_masks(n, m)
    found = log_chance(logits.expand(len(masks), m), masks, n).exp()
    expected = torch.stack([by_definition(logits, mask) for mask in masks])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(), torch.ones((), dtype=torch.float64))


def by_sets(logits, masks):
    """The log of the same chance of each row, by the sets that can be drawn first."""
    p = torch.softmax(logits, -1).clamp_min(1e-8)
    kept = p[masks].view(len(p), -1).T
    others = p.masked_fill(masks, 0.0).sum(-1)
    chances = {(): torch.ones_like(others)}
    for size in range(1, len(kept) + 1):
        for drawn in combinations(range(len(kept)), size):
            chances[drawn] = 0.0
            for i in drawn:
                before = tuple(k for k in drawn if k != i)
                left = [k for k in range(len(kept)) if k not in before]
                share = kept[i] / (others + kept[left].sum(0))
                chances[drawn] = chances[drawn] + chances[before] * share
    return chances[tuple(range(len(kept)))].log()


@pytest.mark.parametrize(("n", "m"), [(8, 9), (8, 16), (9, 12)])
@pytest.mark.parametrize("size", [1.0, 10.0])
def test_the_chance_of_many_kept_is_that_sum(n, m, size):
    torch.manual_seed(2)
    rows = size * (2 * torch.rand(3, m, dtype=torch.float64) - 1)
    ranked = torch.stack([rows[0], -rows[1], torch.rand(m)])
    masks = sf.masks.topk_mask(ranked, None, pattern=nm(n, m))
    found = log_chance(rows, masks, n)
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(found, by_sets(rows, masks), **close)
    slopes, expected = (
        torch.func.grad(lambda x, log=log: log(x).sum())(rows)
        for log in (
            lambda x: log_chance(x, masks, n),
            lambda x: by_sets(x, masks),
        )
    )
    torch.testing.assert_close(slopes, expected, **close)


@pytest.mark.parametrize(("n", "m"), [(16, 32), (31, 32), (100, 128), (32, 32)])
def test_equal_logits_make_all_masks_equally_likely(n, m):
    rows = torch.zeros(2, m, dtype=torch.float64)
    kept = (torch.arange(m) < n).expand(2, m)
    expected = torch.tensor(1 / comb(m, n), dtype=torch.float64).log().expand(2)
    torch.testing.assert_close(log_chance(rows, kept, n), expected, rtol=1e-11, atol=0)
    slopes = torch.func.grad(lambda x: log_chance(x, kept, n).sum())(rows)
    assert slopes.isfinite().all() and bool(slopes.any()) == (n < m)
    many = torch.vmap(lambda x: log_chance(x, kept, n))(torch.stack([rows, rows]))
    torch.testing.assert_close(many, expected.expand(2, 2), rtol=1e-11, atol=0)


@pytest.mark.deep
def test_the_chance_of_many_kept_is_compiled():
    torch.manual_seed(4)
    rows = torch.randn(4, 16, dtype=torch.float64)
    kept = sf.masks.topk_mask(rows, None, pattern=nm(8, 16))
    slopes = torch.func.grad(lambda x: log_chance(x, kept, 8).sum())
    torch.testing.assert_close(torch.compile(slopes)(rows), slopes(rows))


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_the_expected_gradient_is_the_gradient_of_the_expected_loss(n, m):
    torch.manual_seed(1)
    logits = torch.randn(m, dtype=torch.float64)
    masks = all_masks(n, m)
    losses = torch.randn(len(masks), dtype=torch.float64)
    pattern = nm(n, m)
    # a baseline that stays at 0, so that the advantage is the loss
    algorithm = policy_masks(pattern, decay=1.0)
    params = {"w": torch.ones(1, m, dtype=torch.float64), "loss": torch.zeros(())}
    state = algorithm.init(params)
    latents = {"latent": {"logit": {"w": logits[None]}}}
    state = state._replace(scores={**state.scores, **latents})

    expected_gradient = torch.zeros(1, m, dtype=torch.float64)
    for mask, loss in zip(masks, losses, strict=True):
        drawn = state._replace(masks={**state.masks, "w": mask[None]})
        grads = {"w": torch.zeros(1, m, dtype=torch.float64), "loss": loss.float()}
        slope = algorithm.view.grads(drawn, grads, 0)["logit"]["w"]
        expected_gradient += by_definition(logits, mask) * slope

    def expected_loss(x):
        chances = torch.stack([by_definition(x, mask) for mask in masks])
        return (chances * losses.float()).sum()

    exact = torch.func.grad(expected_loss)(logits)[None]
    torch.testing.assert_close(expected_gradient, exact)


def test_masks_are_drawn_with_their_chances():
    groups = 20_000
    logits = torch.tensor([1.0, 0.0, -0.5, 0.5])
    algorithm = policy_masks(nm(2, 4), key=sf.random.key(5))
    params = {"w": torch.ones(groups, 4), "loss": torch.tensor(0.0)}
    state = algorithm.init(params)
    latents = {"latent": {"logit": {"w": logits.repeat(groups, 1)}}}
    state = state._replace(scores={**state.scores, **latents})
    drawn = algorithm.update(state, params, 0).masks["w"]
    assert (drawn.sum(1) == 2).all()
    for mask in all_masks(2, 4):
        chance = by_definition(logits.double(), mask)
        share = (drawn == mask).all(1).double().mean()
        assert abs(share - chance) < 4 * (chance * (1 - chance) / groups).sqrt()


def test_draws_depend_on_the_key_the_path_and_the_step():
    params = {"a": torch.ones(8, 16), "b": torch.ones(8, 16), "loss": torch.tensor(0.0)}
    one = policy_masks(scale=0.0)
    other = policy_masks(scale=0.0, key=sf.random.key(1))
    state = one.init(params)
    masks = one.update(state, params, 3).masks
    assert torch.equal(masks["a"], one.update(state, params, 3).masks["a"])
    assert not torch.equal(masks["a"], masks["b"])
    assert not torch.equal(masks["a"], one.update(state, params, 4).masks["a"])
    elsewhere = other.update(other.init(params), params, 3).masks
    assert not torch.equal(masks["a"], elsewhere["a"])


@pytest.mark.parametrize("case", cases("learned_masks", "policy"), ids=lambda c: c.id)
def test_the_updates_of_the_authors(case):
    rate = case.args["lr"]
    algorithm = sf.with_optimizer(policy_masks(), sf.optimizers.sgd(rate))
    logits = case.inputs["logits"]
    zero = torch.zeros((), dtype=torch.float64)
    state = algorithm.init({"w": torch.ones_like(logits), "loss": zero})
    latents = {"latent": {"logit": {"w": logits}}}
    state = state._replace(scores={**state.scores, **latents})
    for step, (loss, first_loss) in enumerate(case.args["losses"]):
        masks = {**state.masks, "w": case.inputs[f"mask{step}"]}
        residual = torch.tensor(loss - first_loss, dtype=torch.float64)
        grads = {"w": torch.zeros_like(logits), "loss": residual}
        state = algorithm.update(state._replace(masks=masks), grads, step)
        found = state.scores["latent"]["logit"]["w"]
        expected = case.outputs[f"logits{step}"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        delta = case.outputs[f"delta{step}"][0]
        torch.testing.assert_close(
            state.scores["baseline"], delta, rtol=1e-5, atol=1e-8
        )


def test_it_starts_from_its_prior_and_settles_on_the_largest_logits():
    weight = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    params = {"w": weight, "loss": torch.tensor(0.0)}
    assert policy_masks().init(params).masks["w"].tolist() == [
        [True, True, False, False]
    ]
    prior = {
        "w": torch.tensor([[False, True, False, True]]),
        "loss": torch.tensor(True),
    }
    algorithm = policy_masks(prior=prior, scale=2.0)
    state = algorithm.init(params)
    assert torch.equal(state.masks["w"], prior["w"])
    assert state.scores["latent"]["logit"]["w"].tolist() == [[0.0, 2.0, 0.0, 2.0]]
    nan = float("nan")
    latents = {"latent": {"logit": {"w": torch.tensor([[nan, 1.0, 1.0, 1.0]])}}}
    state = state._replace(scores={**state.scores, **latents})
    settled = sf.settled(algorithm, state)
    assert settled.masks["w"].tolist() == [[False, True, True, False]]
    assert torch.equal(settled.params["w"], weight)


def test_nothing_but_logits_trains():
    params = {
        "w": torch.randn(4, 8),
        "bias": torch.randn(4),
        "loss": torch.tensor(0.0),
    }
    algorithm = sf.with_optimizer(policy_masks(scale=1.0), sf.optimizers.sgd(5.0))
    state = algorithm.init(params)
    grads = {**params, "loss": torch.tensor(2.0)}
    new = algorithm.update(state, grads, 0)
    for path, leaf in params.items():
        assert torch.equal(new.params[path], leaf)
    before, after = (s.scores["latent"]["logit"]["w"] for s in (state, new))
    assert not torch.equal(before, after)


def test_a_module_trains_by_the_losses_of_a_list():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4, bias=False)
    weight = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    algorithm = policy_masks(scale=1.0, loss=lambda grads: losses[-1])
    sparse = sf.attach(algorithm, model, optimizer)
    first = sparse.state.scores["latent"]["logit"]["weight"].clone()
    for step in range(3):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        sparse.after_step(step)
    assert not torch.equal(sparse.state.scores["latent"]["logit"]["weight"], first)
    sparse.detach()
    kept = sparse.masks["weight"]
    assert (kept.unflatten(1, (-1, 4)).sum(-1) == 2).all()
    assert torch.equal(model.weight, torch.where(kept, weight, 0.0))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: policy_masks(2),
            TypeError,
            "policy_masks: expected a pattern such as sf.patterns.nm(2, 4), got 2",
        ),
        (
            lambda: policy_masks(sf.patterns.row_balanced()),
            ValueError,
            "expected a pattern that keeps a fixed number of single weights of a group",
        ),
        (
            lambda: policy_masks(scale="large"),
            TypeError,
            "expected scale of policy_masks to be a number or a 0-d float tensor",
        ),
        (
            lambda: policy_masks(prior={"v": torch.ones(2, 4) > 0}).init(
                {"w": torch.ones(2, 4)}
            ),
            ValueError,
            "expected a prior mask of shape (2, 4) at 'w', got none",
        ),
        (
            lambda: policy_masks().update(
                policy_masks().init({"w": torch.ones(2, 4)}), {"w": torch.ones(2, 4)}, 0
            ),
            ValueError,
            "policy_masks: expected a loss in the gradients, got none at 'loss': give "
            "the params a 0-d leaf of that name, or pass loss=; in the loop of a "
            "module append each loss to a list and pass loss=lambda grads: losses[-1]",
        ),
        (
            lambda: policy_masks(loss=lambda grads: grads["w"]).update(
                policy_masks().init({"w": torch.ones(2, 4)}), {"w": torch.ones(2, 4)}, 0
            ),
            ValueError,
            "policy_masks: expected a loss that is a 0-d tensor, got shape (2, 4)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
