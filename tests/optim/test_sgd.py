"""A step of SGD or Adam under masks in one pass has the bits of a masked gradient, an
update and a sum on the mask.
"""

import math

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn._engine import transforms
from sparsefn._engine.leaves import blockwise, donation, leafwise, lists
from sparsefn.nn.checkpoint import tree_equal
from sparsefn.testing.harness import bits_of

ODD = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, math.inf, -math.inf, math.nan, 1.0]
)
sgd, adam, adamw = sf.optimizers.sgd, sf.optimizers.adam, sf.optimizers.adamw
MADE = {
    "plain": sgd(0.1),
    "decay": sgd(0.1, weight_decay=0.1),
    "momentum": sgd(0.1, momentum=0.9),
    "heavy": sgd(0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": adam(0.1),
    "adam without memory": adam(
        lambda step: 0.1 / (1 + step), betas=(0.0, 0.5), eps=0.0
    ),
    "adam decay": adam(0.1, weight_decay=0.1),
    "adamw": adamw(0.1, weight_decay=0.1),
}


def trees():
    draw = torch.Generator().manual_seed(0)
    params = {
        "large": torch.randn(1100, 1000, generator=draw),
        "odd": torch.randn(70, 101, generator=draw),
        "turned": torch.randn(80, 70, generator=draw).T,
        "small": torch.randn(3, 4, generator=draw),
        "double": torch.randn(70, 70, generator=draw, dtype=torch.float64),
        "half": torch.randn(70, 70, generator=draw).bfloat16(),
        "bias": torch.randn(5000, generator=draw),
    }
    grads = {path: leaf.roll(1, 0) * 2 for path, leaf in params.items()}
    grads["odd"] = ODD[torch.randint(0, len(ODD), (70, 101), generator=draw)]
    return params, grads


def by_parts(optimizer):
    return optimizer._replace(under_masks=None)


def comparable(state):
    """NaN is no value to compare, and may have any sign; zeros have theirs."""
    leaves = [leaf for leaf in optree.tree_leaves(state) if leaf.is_floating_point()]
    numbers = [leaf.double().nan_to_num(7.0, math.inf, -math.inf) for leaf in leaves]
    return (
        [leaf.isnan() for leaf in leaves],
        numbers,
        [leaf.signbit() for leaf in numbers],
        [x.dtype for x in leaves],
    )


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.deep(but=["1-momentum-keep", "1-adam-keep", "1-adamw-keep"])
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("pruned", ["zero", "keep", "train"])
@pytest.mark.parametrize("name", MADE)
def test_bits_are_those_of_the_parts(name, pruned):
    params, grads = trees()
    optimizer = MADE[name]
    rigl = sf.rigl(0.8, when=sf.at([1]), init="magnitude", pruned=pruned)
    one, parts = (
        sf.with_optimizer(rigl, each) for each in (optimizer, by_parts(optimizer))
    )
    state, want = one.init(params), parts.init(params)
    kept = [leaf.clone() for leaf in optree.tree_leaves((params, grads))]
    for step in range(3):
        # The gradients that are not numbers come last: weights are compared by rank
        # before.
        now = (
            grads
            if step == 2
            else optree.tree_map(lambda g: g.nan_to_num(1.0, 1.0, 1.0), grads)
        )
        state, want = one.update(state, now, step), parts.update(want, now, step)
        assert tree_equal(state.masks, want.masks)
        assert optree.tree_structure(state) == optree.tree_structure(want)
        for got, expected in zip(comparable(state), comparable(want), strict=True):
            for a, b in zip(got, expected, strict=True):
                assert a == b if isinstance(a, torch.dtype) else torch.equal(a, b)
    assert all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(optree.tree_leaves((params, grads)), kept, strict=True)
    )


@pytest.mark.parametrize("name", MADE)
def test_the_way_of_a_device_has_the_same_bits(name, monkeypatch):
    params, grads = trees()
    algorithm = sf.with_optimizer(
        sf.rigl(0.8, when=sf.at([1]), init="magnitude"), by_parts(MADE[name])
    )
    now = optree.tree_map(lambda g: g.nan_to_num(1.0, 1.0, 1.0), grads)

    def run():
        state = algorithm.init(params)
        for step in range(3):
            state = algorithm.update(state, grads if step == 2 else now, step)
        return comparable(state)

    want, seen = run(), []
    sums = transforms.foreach_add
    monkeypatch.setattr(
        lists, "foreach_add", lambda *lists: seen.append(1) or sums(*lists)
    )
    monkeypatch.setattr(lists, "pays", lambda tensors: True)
    for module, what in ((leafwise, "_words"), (blockwise, "flat_memory")):
        monkeypatch.setattr(module, what, lambda *tensors, **least: None)
    for got, expected in zip(run(), want, strict=True):
        for a, b in zip(got, expected, strict=True):
            assert a == b if isinstance(a, torch.dtype) else torch.equal(a, b)
    assert seen


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_it_is_used_and_only_where_the_optimizer_sees_masked_gradients(name):
    params, grads = trees()
    calls = []

    def spy(*trees_and_clear):
        calls.append(len(trees_and_clear))
        return MADE[name].under_masks(*trees_and_clear)

    optimizer = MADE[name]._replace(under_masks=spy)
    for algorithm, used in (
        (sf.static(0.5), True),
        (sf.static(0.5, pruned="train"), True),
        (sf.with_dense_gradients(sf.static(0.5)), False),
        (sf.with_terms(sf.static(0.5), sf.terms.l2(0.1)), False),
    ):
        whole = sf.with_optimizer(algorithm, optimizer)
        whole.update(whole.init(params), grads, 0)
        assert calls == ([5] if used else []), algorithm
        calls.clear()


@pytest.mark.parametrize("skip", [None, sf.at([1]), lambda step: torch.tensor(False)])
@pytest.mark.parametrize("reset_grown", [False, True])
@pytest.mark.parametrize("name", ["nesterov", "adam"])
def test_moments_that_somebody_left_off_the_masks_go(name, reset_grown, skip):
    params, grads = trees()
    grads = optree.tree_map(lambda g: g.nan_to_num(1.0, 1.0, 1.0), grads)
    states = []
    for optimizer in (MADE[name], by_parts(MADE[name])):
        algorithm = sf.with_optimizer(
            sf.rigl(0.8, when=sf.at([3]), init="magnitude"),
            optimizer,
            skip=skip,
            reset_grown=reset_grown,
        )
        state = algorithm.init(params)
        dirty = optree.tree_map(torch.ones_like, state.opt)
        state = state._replace(opt=dirty)
        for step in range(5):
            state = algorithm.update(state, grads, step)
            states.append(state)
            moments = [x for x in state.opt if isinstance(x, dict)]
            for tree in moments:
                for path, mask in state.masks.items():
                    off = tree[path][~mask.expand(tree[path].shape)]
                    assert not off.any() and not off.signbit().any()
    for got, want in zip(states[:5], states[5:], strict=True):
        assert tree_equal(got, want)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_under_transforms_it_leaves_the_step_to_the_parts(name):
    params, grads = ({path: tree[path] for path in ("odd", "bias")} for tree in trees())
    grads = optree.tree_map(lambda g: g.nan_to_num(1.0, 1.0, 1.0), grads)
    algorithm = sf.with_optimizer(sf.static(0.5, init="magnitude"), MADE[name])
    state = algorithm.init(params)
    state = algorithm.update(state, grads, 0)
    want = algorithm.update(state, grads, 1)
    stacked = optree.tree_map(lambda x: torch.stack([x, x]), (state, grads))
    batched = torch.vmap(lambda state, grads: algorithm.update(state, grads, 1))(
        *stacked
    )
    half = torch.vmap(lambda grads: algorithm.update(state, grads, 1))(stacked[1])
    for i in range(2):
        assert tree_equal(optree.tree_map(lambda x, i=i: x[i], batched), want)
        assert tree_equal(optree.tree_map(lambda x, i=i: x[i], half), want)
    compiled = torch.compile(algorithm.update, backend="aot_eager", fullgraph=True)
    assert tree_equal(compiled(state, grads, torch.tensor(1)), want)
    if name == "adam":
        return
    slope = torch.func.grad(
        lambda g: algorithm.update(state, g, 1).params["odd"].sum()
    )(grads)["odd"]
    torch.testing.assert_close(slope, torch.where(state.masks["odd"], -0.1, 0.0))


def test_a_rate_whose_gradient_is_wanted_is_left_to_torch():
    params, grads = (
        {path: tree[path] for path in ("turned", "bias")} for tree in trees()
    )
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    algorithm = sf.with_optimizer(
        sf.static(0.5, init="magnitude"), sf.optimizers.sgd(rate)
    )
    state = algorithm.update(algorithm.init(params), grads, 0)
    state.params["bias"].sum().backward()
    assert rate.grad.item() == pytest.approx(
        -grads["bias"].double().sum().item(), rel=1e-3
    )


@pytest.mark.parametrize("name", ["plain", "adam"])
def test_it_refuses_what_update_refuses(name):
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(3)}
    optimizer = MADE[name]
    with pytest.raises(
        ValueError, match=r"expected grads of shape \(2,\) at 'w', got \(3,\)"
    ):
        optimizer.under_masks(
            grads,
            optimizer.init(params),
            params,
            {"w": torch.ones(2, dtype=torch.bool)},
        )


@pytest.mark.parametrize(
    "lr", [0.1, 0.0, torch.tensor(-0.1), torch.tensor(math.inf), torch.tensor(math.nan)]
)
@pytest.mark.parametrize("donate", [False, True])
def test_without_momentum_weights_off_the_mask_keep_their_bits(lr, donate):
    n = len(ODD) ** 2 * 128
    p, g = ODD.repeat(n // len(ODD)), ODD.repeat_interleave(n // len(ODD))
    mask = torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.5
    optimizer = sf.optimizers.sgd(lr)
    updates, _ = optimizer.update(torch.where(mask, g, 0.0), optimizer.init(p))
    wanted = torch.where(mask, p + updates, p)
    own = p.clone()
    with donation.donating([own] if donate else []):
        moved, _ = optimizer.under_masks(
            {"w": g}, optimizer.init({"w": p}), {"w": own}, {"w": mask}
        )
    assert torch.equal(bits_of(moved["w"]), bits_of(wanted))
