"""Functions that write weights and masks: `rewrite`."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import softshrink

import sparsefn as sf

W = torch.tensor([[4.0, -3.0, 0.5, 1.0], [-0.5, 0.6, 0.7, -0.2]])
PARAMS = {"a": {"w": W}, "b": torch.ones(2)}


def largest(k):
    def fn(path, weight, mask, step):
        kept = sf.masks.topk_mask(weight.abs(), k)
        return torch.where(kept, weight, 0.0), kept

    return fn


def test_it_starts_dense_and_calls_the_function_at_triggers_for_the_chosen_leaves():
    calls = []

    def fn(path, weight, mask, step):
        calls.append((path, tuple(weight.shape), int(mask.sum()), step))
        return 2 * weight, weight > 0

    algorithm = sf.rewrite(fn, when=sf.every(2, start=1))
    state = algorithm.init(PARAMS)
    assert (
        state.masks["a"]["w"].all()
        and state.masks["a"]["w"].shape == (2, 4)
        and state.masks["b"].ndim == 0
    )
    assert algorithm.update(state, PARAMS, 0) is state
    state = algorithm.update(state, PARAMS, 1)
    assert torch.equal(state.params["a"]["w"], torch.where(W > 0, 2 * W, 0.0))
    assert torch.equal(state.masks["a"]["w"], W > 0)
    algorithm.update(state, PARAMS, 3)
    assert calls == [("a.w", (2, 4), 8, 1), ("a.w", (2, 4), 5, 3)]


def test_pruned_says_what_becomes_of_weights_off_the_mask():
    after = {}
    for pruned in ("zero", "keep", "train"):
        algorithm = sf.rewrite(
            lambda path, w, m, t: (w + 1, m & (W > 0)), when=sf.at([0]), pruned=pruned
        )
        algorithm = sf.with_optimizer(algorithm, sf.optimizers.sgd(1.0))
        state = algorithm.init(PARAMS)
        for step in range(2):
            state = algorithm.update(
                state, {"a": {"w": torch.ones(2, 4)}, "b": torch.zeros(2)}, step
            )
        after[pruned] = state.params["a"]["w"]
        torch.testing.assert_close(
            sf.effective(state)["a"]["w"], torch.where(W > 0, W - 1, 0.0)
        )
    torch.testing.assert_close(after["zero"], torch.where(W > 0, W - 1, 0.0))
    torch.testing.assert_close(after["keep"], torch.where(W > 0, W - 1, W))
    torch.testing.assert_close(after["train"], W - 1)


def test_sparsegpt_and_exact_obs():
    x = torch.randn(20, 4)
    grams = {"a.w": x.T @ x}
    for solve, kept in (
        (lambda p, w, m, t: sf.solve.obs(w, grams[p], pattern=sf.patterns.nm(2, 4)), 4),
        (lambda p, w, m, t: sf.solve.obs_exact(w, grams[p], 5), 3),
        (lambda p, w, m, t: (sf.solve.refit(w, grams[p], W > 0), W > 0), 5),
    ):
        algorithm = sf.rewrite(solve, when=sf.at([0]))
        state = algorithm.update(algorithm.init(PARAMS), PARAMS, 0)
        assert int(state.masks["a"]["w"].sum()) == kept
        expected, _ = solve("a.w", W, torch.ones(2, 4, dtype=torch.bool), 0)
        assert torch.equal(state.params["a"]["w"], expected)


def test_proximal_gradient_steps_solve_a_lasso():
    # Soft thresholding after each step of gradient descent (ISTA): the fixed point
    # meets the optimality conditions.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[3.0, 0, 0, -2.0, 0, 0, 0, 1.0]]).T.double() + torch.randn(
        50, 1, generator=generator
    )
    rate, lam = 0.1, 0.3

    def prox(path, weight, mask, step):
        new = softshrink(weight, rate * lam)
        return new, new != 0

    def gradient(params):
        return {"w": (params["w"] @ x.T - y.T) @ x / 50}

    algorithm = sf.with_optimizer(
        sf.rewrite(prox, pruned="train"), sf.optimizers.sgd(rate)
    )
    state = algorithm.init({"w": torch.zeros(1, 8, dtype=torch.float64)})
    for step in range(500):
        state = algorithm.update(state, gradient(sf.effective(state)), step)
    slope, weight, mask = (
        gradient(sf.effective(state))["w"],
        state.params["w"],
        state.masks["w"],
    )
    assert 3 <= int(mask.sum()) < 8
    torch.testing.assert_close(slope[mask], -lam * weight[mask].sign())
    assert (slope[~mask].abs() <= lam + 1e-9).all()


def test_group_thresholding_zeroes_whole_rows():
    def prox(path, weight, mask, step):
        scale = (1 - 2.0 / weight.norm(dim=1, keepdim=True)).clamp(min=0.0)
        return weight * scale, (scale > 0).expand_as(weight)

    algorithm = sf.rewrite(prox)
    state = algorithm.update(algorithm.init(PARAMS), PARAMS, 0)
    new = state.params["a"]["w"]
    assert (
        state.masks["a"]["w"].tolist() == [[True] * 4, [False] * 4] and not new[1].any()
    )
    torch.testing.assert_close(new[0].norm(), W[0].norm() - 2.0)


def test_iterative_hard_thresholding_lets_weights_come_back():
    algorithm = sf.with_optimizer(
        sf.rewrite(largest(2), pruned="train"), sf.optimizers.sgd(1.0)
    )
    state = algorithm.update(
        algorithm.init(PARAMS), {"a": {"w": torch.zeros(2, 4)}, "b": torch.zeros(2)}, 0
    )
    assert state.masks["a"]["w"].nonzero().tolist() == [[0, 0], [0, 1]]
    grads = {
        "a": {"w": torch.zeros(2, 4).index_fill(1, torch.tensor([2]), -5.0)},
        "b": torch.zeros(2),
    }
    state = algorithm.update(state, grads, 1)
    assert state.masks["a"]["w"].nonzero().tolist() == [[0, 2], [1, 2]]


def test_results_are_not_shared_with_the_function():
    mine = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)
    algorithm = sf.rewrite(lambda path, w, m, t: mine, pruned="keep")
    state = algorithm.update(algorithm.init(PARAMS), PARAMS, 0)
    mine[0].zero_(), mine[1].zero_()
    assert state.params["a"]["w"].all() and state.masks["a"]["w"].all()
    algorithm = sf.rewrite(lambda path, w, m, t: (w, m))
    old = algorithm.init(PARAMS)
    assert (
        algorithm.update(old, PARAMS, 0).params["a"]["w"].data_ptr()
        != old.params["a"]["w"].data_ptr()
    )


def test_under_vmap_and_with_a_tensor_step():
    algorithm = sf.rewrite(largest(3), when=sf.every(2))
    weights = torch.stack([W, W.flip(1), -W])
    states = torch.vmap(algorithm.init)({"w": weights})
    states = torch.vmap(algorithm.update, (0, 0, None))(
        states, {"w": weights}, torch.tensor(2)
    )
    for i in range(3):
        alone = algorithm.update(
            algorithm.init({"w": weights[i]}), {"w": weights[i]}, 2
        )
        assert torch.equal(states.masks["w"][i], alone.masks["w"])
        assert torch.equal(states.params["w"][i], alone.params["w"])
    grams = torch.stack([torch.eye(4) + 0.1 * i for i in range(3)])

    def pruned(weight, gram):
        sparsegpt = sf.rewrite(lambda p, w, m, t: sf.solve.obs(w, gram, keep=0.5))
        return sparsegpt.update(sparsegpt.init({"w": weight}), {"w": weight}, 0)

    many = torch.vmap(pruned)(weights, grams)
    for i in range(3):
        one = pruned(weights[i], grams[i])
        assert torch.equal(many.masks["w"][i], one.masks["w"])
        torch.testing.assert_close(many.params["w"][i], one.params["w"])


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (
            W,
            TypeError,
            "rewrite: expected fn to return a tuple (weight, mask) for 'a.w', got "
            "Tensor",
        ),
        (
            (W, None),
            TypeError,
            "expected fn to return a tuple (weight, mask) for 'a.w', got (Tensor, "
            "NoneType)",
        ),
        (
            (W, W),
            TypeError,
            "rewrite: expected mask of torch.bool at 'a.w', got torch.float32",
        ),
        (
            (W.double(), W > 0),
            TypeError,
            "rewrite: expected weight of torch.float32 at 'a.w', got torch.float64",
        ),
        (
            (W[0], W > 0),
            ValueError,
            "rewrite: expected weight of shape (2, 4) at 'a.w', got (4,)",
        ),
        (
            (W, W[:1] > 0),
            ValueError,
            "rewrite: expected mask of shape (2, 4) at 'a.w', got (1, 4)",
        ),
        (
            (W.to("meta"), W > 0),
            ValueError,
            "rewrite: expected weight on cpu at 'a.w', got meta",
        ),
    ],
)
def test_bad_results(result, kind, text):
    algorithm = sf.rewrite(lambda path, weight, mask, step: result)
    with pytest.raises(kind, match=re.escape(text)):
        algorithm.update(algorithm.init(PARAMS), PARAMS, 0)


def test_bad_arguments():
    with pytest.raises(
        TypeError,
        match=re.escape(
            "expected fn to be a function of (path, weight, mask, step), got"
        ),
    ):
        sf.rewrite(lambda weight, mask: (weight, mask))
    with pytest.raises(TypeError, match="expected when to be a trigger"):
        sf.rewrite(largest(1), when=3)
    with pytest.raises(ValueError, match="expected pruned to be"):
        sf.rewrite(largest(1), pruned="drop")


@pytest.fixture
def mesh(tmp_path):
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_distributed_tensors_are_refused_by_path(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(W, mesh, [Shard(0)])
    with pytest.raises(
        ValueError,
        match="rewrite: expected plain tensors, got a DTensor at 'a.w'; gather the "
        "leaf",
    ):
        sf.rewrite(largest(1)).init({"a": {"w": x}})
    with pytest.raises(
        ValueError, match="obs: expected plain tensors, got a DTensor at 'weight'"
    ):
        sf.solve.obs(x, torch.eye(4), keep=0.5)
