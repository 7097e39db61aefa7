"""Maps from latents to weights: values, slopes, and where they start."""

import math

import numpy as np
import pytest
import torch

import sparsefn as sf

KEY = sf.random.key(0)


def pulled(reparam, latents, grads):
    """Weights, masks and the gradient of the latents."""
    weights, pull, masks = torch.func.vjp(
        lambda tree: reparam.apply(tree, 0, KEY), latents, has_aux=True
    )
    return weights["w"], masks["w"], pull({"w": torch.tensor(grads)})[0]


def test_soft_threshold_has_the_values_and_slopes_of_the_paper():
    # Kusupati et al. 2020: w = [.5, -.3, .1] at a threshold of .2, gradient [1, -2, 5].
    reparam = sf.reparam.soft_threshold(torch.sigmoid, init=math.log(0.25))
    latents = reparam.init({"w": torch.tensor([0.5, -0.3, 0.1])}, KEY)
    weights, mask, slopes = pulled(reparam, latents, [1.0, -2.0, 5.0])
    torch.testing.assert_close(weights, torch.tensor([0.3, -0.1, 0.0]))
    assert mask.tolist() == [True, True, False]
    torch.testing.assert_close(slopes["latent"]["w"], torch.tensor([1.0, -2.0, 0.0]))
    # ds = -sigmoid'(s) * sum(g * sign(w)) over the active = -.16 * 3.
    torch.testing.assert_close(slopes["threshold"]["w"], torch.tensor(-0.48))


def test_the_slope_of_a_threshold_has_the_same_bits_on_any_number_of_threads():
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    latent, grads = (torch.randn(300, 300, generator=generator) for _ in range(2))
    reparam = sf.reparam.soft_threshold(init=-1.0)
    latents, slopes = reparam.init({"w": latent}, KEY), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            _, pull, _ = torch.func.vjp(
                lambda tree: reparam.apply(tree, 0, KEY), latents, has_aux=True
            )
            slopes.append(float(pull({"w": grads})[0]["threshold"]["w"]))
    finally:
        torch.set_num_threads(before)
    assert len(set(slopes)) == 1


def test_soft_threshold_starts_dense_and_without_a_slope_at_its_default():
    reparam = sf.reparam.soft_threshold()
    latents = reparam.init({"w": torch.tensor([0.5, -1e-30])}, KEY)
    weights, mask, slopes = pulled(reparam, latents, [1.0, -2.0])
    assert weights.tolist() == latents["latent"]["w"].tolist()
    assert mask.all()
    assert slopes["threshold"]["w"] == 0.0


def test_soft_threshold_takes_any_function_and_the_dtype_of_the_leaf():
    reparam = sf.reparam.soft_threshold(torch.exp, init=math.log(0.5))
    latents = reparam.init({"w": torch.tensor([1.0, -0.25], dtype=torch.float64)}, KEY)
    assert latents["threshold"]["w"].dtype == torch.float64
    weights, masks = reparam.apply(latents, 0, KEY)
    torch.testing.assert_close(
        weights["w"], torch.tensor([0.5, 0.0], dtype=torch.float64)
    )
    assert masks["w"].tolist() == [True, False]


def test_power_has_the_values_and_slopes_of_the_paper():
    # Schwarz et al. 2021: alpha 2, latents [.5, -2, 0]: weights [.25, -4, 0], slopes
    # [1, 4, 0].
    weights, mask, slopes = pulled(
        sf.reparam.power(2.0),
        {"latent": {"w": torch.tensor([0.5, -2.0, 0.0])}},
        [1.0, 1.0, 1.0],
    )
    assert weights.tolist() == [0.25, -4.0, 0.0]
    assert mask.ndim == 0
    assert slopes["latent"]["w"].tolist() == [1.0, 4.0, 0.0]


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 4.0])
def test_power_leaves_the_first_weights_what_they_were(alpha):
    start = {"w": torch.tensor([4.0, -0.3, 0.0, 1e-3])}
    reparam = sf.reparam.power(alpha)
    weights = reparam.apply(reparam.init(start, KEY), 0, KEY)[0]
    torch.testing.assert_close(weights, start)
    if alpha == 1.0:
        assert torch.equal(weights["w"], start["w"])


def test_the_slope_of_power_is_finite_at_0():
    slopes = pulled(
        sf.reparam.power(1.5), {"latent": {"w": torch.tensor([0.0, 4.0])}}, [1.0, 1.0]
    )[2]
    assert slopes["latent"]["w"].tolist() == [0.0, 3.0]


@pytest.mark.parametrize("alpha", [0.5, float("nan")])
def test_power_refuses_exponents_that_blow_up_at_0(alpha):
    with pytest.raises(ValueError, match=f"power: expected alpha >= 1, got {alpha}"):
        sf.reparam.power(alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_batch_of_slopes_has_the_bits_of_single_ones(dtype):
    algorithm = sf.with_optimizer(
        sf.reparametrised(
            sf.reparam.soft_threshold(init=0.3, slope=sf.schedules.cosine_decay(0.7, 7))
        ),
        sf.optimizers.sgd(0.1),
    )
    params = {"w": sf.random.normal(sf.random.key(0), (8, 8)).to(dtype)}
    state = algorithm.init(params)
    both = sf.ensemble.stack([state, state])
    batch = torch.vmap(algorithm.update, in_dims=(0, None, 0))(
        both, params, torch.tensor([1, 2])
    )
    for i, member in enumerate(sf.ensemble.unstack(batch)):
        assert sf.checkpoint.tree_equal(member, algorithm.update(state, params, 1 + i))


def test_power_starts_at_roots_that_are_rounded_correctly():
    weights = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    made = sf.reparam.power(2.0).init({"w": weights}, sf.random.key(0))
    want = torch.from_numpy(np.sqrt(weights.numpy()))
    assert torch.equal(made["latent"]["w"], want)
