"""torch.nn.utils.prune beside sparsefn, round by round on the same weights: the masks
are equal.

Scores are distinct, as ties are unspecified there. Weights are float64, so that the two
ways to sum a norm never disagree about an order.
"""

import functools
import math

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

import sparsefn as sf

live = functools.partial(settings, max_examples=25, deadline=None, derandomize=True)
NORMS = (0.5, 1, 2, 3, math.inf)


class Holder(nn.Module):
    """A module of bare weights."""

    def __init__(self, weights):
        super().__init__()
        for name, w in weights.items():
            self.register_parameter(name, nn.Parameter(w.clone()))

    def forward(self):
        return ()  # their hooks run before it


def normal(shape, seed):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


shapes = st.lists(st.integers(1, 7), min_size=2, max_size=4).map(tuple)
seeds = st.integers(0, 2**31)
fractions = st.sampled_from(
    [0.0, 0.05, 0.1, 0.25, 0.35, 0.45, 0.5, 0.75, 0.9, 1.0]
) | st.floats(0.0, 1.0)


def amounts(most):
    return fractions | st.integers(0, most)


def ours(amount):
    return {"count": amount} if isinstance(amount, int) else {"fraction": amount}


def masks_of(module):
    return {
        name.removesuffix("_mask"): mask != 0 for name, mask in module.named_buffers()
    }


def assert_equal(state, module):
    theirs = masks_of(module)
    assert {path for path, mask in state.masks.items() if mask.ndim} == set(theirs)
    for path, mask in theirs.items():
        assert torch.equal(state.masks[path], mask), path
    for path, w in sf.effective(state).items():
        assert torch.equal(w, getattr(module, path)), path


def remaining(mask, dim=None):
    """The units that a round of theirs still looks at."""
    return int(
        mask.sum() if dim is None else mask.movedim(dim, 0).flatten(1).any(1).sum()
    )


@st.composite
def rounds(draw, kinds):
    """A weight, and rounds of pruning it: (amount, norm, dim), without norm and dim
    where it is unstructured.
    """
    shape, seed = draw(shapes), draw(seeds)
    methods = []
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)):
        if kind == "ln":
            dim = draw(st.integers(-len(shape), len(shape) - 1))
            methods.append((draw(amounts(2)), draw(st.sampled_from(NORMS)), dim))
        else:
            methods.append((draw(amounts(9)), None, None))
    return normal(shape, seed), methods


def pattern_of(norm, dim):
    return (
        sf.patterns.unstructured()
        if norm is None
        else sf.patterns.channel(dim, norm=norm)
    )


def prune_theirs(module, amount, norm, dim, **options):
    if norm is None:
        prune.l1_unstructured(module, "w", amount, **options)
    else:
        prune.ln_structured(module, "w", amount, n=norm, dim=dim, **options)


def play(w, methods, score=sf.scores.magnitude, **options):
    """Every round in both; the states are compared after each."""
    module, params, init = Holder({"w": w}), {"w": w}, "dense"
    for amount, norm, dim in methods:
        algorithm = sf.iterative(
            **ours(amount), pattern=pattern_of(norm, dim), score=score, init=init
        )
        begun = algorithm.init(params)
        left = remaining(begun.masks["w"], dim)
        # theirs raises too, and loses its hook
        if isinstance(amount, int) and amount > left:
            with pytest.raises(
                ValueError, match=f"expected 0 <= count <= {left}, got {amount} at 'w'"
            ):
                algorithm.update(begun, params, 0)
            continue
        state = algorithm.update(begun, params, 0)
        prune_theirs(module, amount, norm, dim, **options)
        assert_equal(state, module)
        params, init = state.params, state.masks


@live()
@given(rounds(["l1"]))
def test_l1_unstructured(case):
    play(*case)


@live()
@given(rounds(["ln"]))
def test_ln_structured(case):
    play(*case)


@live()
@given(rounds(["l1", "ln"]))
def test_structured_and_unstructured_rounds_in_any_order(case):
    play(*case)


@live()
@given(rounds(["l1", "ln"]), seeds)
def test_importance_scores(case, seed):
    w, methods = case
    scores = normal(w.shape, seed)
    play(w, methods, score=lambda *_: {"w": scores.abs()}, importance_scores=scores)


@pytest.mark.parametrize("norm", [-math.inf, 0.5, 1, 1.5, 2, 3, math.inf, "fro"])
@live(max_examples=10)
@given(shape=shapes, seed=seeds, data=st.data())
def test_every_norm_on_fresh_weights(norm, shape, seed, data):
    # theirs has it for two reduced dimensions at most
    shape = shape[:3] if norm == "fro" else shape
    w, dim = normal(shape, seed), data.draw(st.integers(-len(shape), len(shape) - 1))
    amount = data.draw(amounts(shape[dim]))
    module = prune.ln_structured(Holder({"w": w}), "w", amount, n=norm, dim=dim)
    pattern = sf.patterns.channel(dim, norm=2 if norm == "fro" else norm)
    algorithm = sf.iterative(**ours(amount), pattern=pattern)
    assert_equal(algorithm.update(algorithm.init({"w": w}), {"w": w}, 0), module)


@live()
@given(rounds(["l1", "ln"]))
def test_one_algorithm_for_all_rounds(case):
    w, methods = case
    methods = [
        (amount if isinstance(amount, float) else 0.5, norm, dim)
        for amount, norm, dim in methods
    ]
    algorithm = sf.sequence(
        *(
            sf.iterative(f, pattern=pattern_of(*how), when=sf.at([step]))
            for step, (f, *how) in enumerate(methods)
        )
    )
    state, module = algorithm.init({"w": w}), Holder({"w": w})
    for step, (fraction, norm, dim) in enumerate(methods):
        state = algorithm.update(state, {"w": w}, step)
        prune_theirs(module, fraction, norm, dim)
        assert_equal(state, module)


@live()
@given(shapes, seeds, st.lists(fractions, min_size=2, max_size=4))
def test_weights_train_between_rounds(shape, seed, amounts):
    params, init = {"w": normal(shape, seed)}, "dense"
    module = prune.identity(Holder(params), "w")
    for step, amount in enumerate(amounts):
        trained = normal(shape, seed + step + 1)
        with torch.no_grad():
            module.w_orig.copy_(trained)
        module()  # their hook computes the weight afresh
        prune.l1_unstructured(module, "w", amount)
        algorithm = sf.iterative(amount, init=init)
        state = algorithm.update(
            sf.with_params(algorithm.init(params), {"w": trained}), params, 0
        )
        assert_equal(state, module)
        params, init = state.params, state.masks


@live()
@given(
    st.lists(shapes, min_size=1, max_size=3),
    seeds,
    st.lists(amounts(9), min_size=1, max_size=4),
    st.booleans(),
)
def test_global_unstructured(all_shapes, seed, amounts, given_scores):
    weights = {f"w{i}": normal(shape, seed + i) for i, shape in enumerate(all_shapes)}
    scores = {"w0": normal(all_shapes[0], seed - 1)} if given_scores else {}

    def score(state, grads, step):
        return {path: scores.get(path, w).abs() for path, w in state.params.items()}

    module, params, init = Holder(weights), weights, "dense"
    where = [(module, name) for name in weights]
    for amount in amounts:
        algorithm = sf.iterative(
            **ours(amount), distribution=sf.budgets.global_(), score=score, init=init
        )
        begun = algorithm.init(params)
        left = int(sf.masks.n_kept(begun.masks))
        if isinstance(amount, int) and amount > left:
            with pytest.raises(
                ValueError, match=f"expected 0 <= count <= {left}, got {amount} at 'w0'"
            ):
                algorithm.update(begun, params, 0)
            continue
        state = algorithm.update(begun, params, 0)
        importance = {(module, name): value for name, value in scores.items()}
        prune.global_unstructured(
            where, prune.L1Unstructured, importance_scores=importance, amount=amount
        )
        assert_equal(state, module)
        params, init = state.params, state.masks


@live()
@given(shapes, seeds, fractions, st.data())
def test_custom_masks_between_rounds(shape, seed, fraction, data):
    w = normal(shape, seed)
    custom = normal(shape, seed + 1) > data.draw(st.floats(-1, 1))
    module = prune.l1_unstructured(Holder({"w": w}), "w", fraction)
    prune.custom_from_mask(module, "w", custom)
    algorithm = sf.iterative(fraction)
    state = algorithm.update(algorithm.init({"w": w}), {"w": w}, 0)
    state = sf.from_masks(sf.masks.intersect(state.masks, {"w": custom})).init(
        state.params
    )
    assert_equal(state, module)
    prune.l1_unstructured(module, "w", fraction)
    algorithm = sf.iterative(fraction, init=state.masks)
    assert_equal(algorithm.update(algorithm.init(state.params), {"w": w}, 0), module)


@live()
@given(
    shapes,
    seeds,
    st.lists(fractions, min_size=1, max_size=3),
    st.integers(0, 2**30),
    st.data(),
)
def test_random_pruning_has_equal_counts(shape, seed, fractions, key, data):
    w = normal(shape, seed)
    dim = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    pattern = sf.patterns.unstructured() if dim is None else sf.patterns.channel(dim)
    module, params, init = Holder({"w": w}), {"w": w}, "dense"
    for step, fraction in enumerate(fractions):
        algorithm = sf.iterative(
            fraction,
            score=sf.scores.random,
            pattern=pattern,
            key=sf.random.key(key),
            init=init,
        )
        state = algorithm.update(algorithm.init(params), params, step)
        init = state.masks
        if dim is None:
            prune.random_unstructured(module, "w", fraction)
        else:
            prune.random_structured(module, "w", fraction, dim)
        assert remaining(state.masks["w"], dim) == remaining(masks_of(module)["w"], dim)
        assert int(state.masks["w"].sum()) == int(module.w_mask.sum())


@live()
@given(seeds, fractions)
def test_remove_is_bake_and_the_gradient_is_theirs(seed, fraction):
    layer, x = nn.Linear(5, 4, dtype=torch.float64), normal((3, 5), seed)
    algorithm = sf.iterative(fraction)
    params = sf.modules.params_of(layer)
    state = algorithm.update(algorithm.init(params), params, 0)
    grads = torch.func.grad(lambda p: sf.modules.call(layer, p, x).square().sum())(
        sf.effective(state)
    )
    baked = sf.modules.bake(layer, state)
    prune.l1_unstructured(layer, "weight", fraction)
    torch.testing.assert_close(
        sf.modules.call(nn.Linear(5, 4, dtype=torch.float64), state, x), layer(x)
    )
    layer(x).square().sum().backward()
    torch.testing.assert_close(
        algorithm.view.grads(state, grads, 0)["weight"], layer.weight_orig.grad
    )
    prune.remove(layer, "weight")
    assert torch.equal(baked.weight, layer.weight)
    assert (
        dict(baked.named_parameters()).keys() == dict(layer.named_parameters()).keys()
    )
    assert torch.equal(baked(x), layer(x))


def is_pruned(state):
    return any(mask.ndim for mask in optree.tree_leaves(state.masks))


@live()
@given(rounds(["l1", "ln"]))
def test_pruned_modules_and_their_checkpoints_are_taken_over(case):
    w, methods = case
    weights = {"v": torch.ones(2, 2, dtype=torch.float64), "w": w}
    module = Holder(weights)
    for amount, norm, dim in methods:
        prune_theirs(module, amount if isinstance(amount, float) else 0.5, norm, dim)
    fresh = prune.identity(Holder(weights), "w")
    fresh.load_state_dict(module.state_dict())
    plain = Holder(weights)
    for source in (
        (module,),
        (fresh,),
        (plain, module.state_dict()),
        (fresh, module.state_dict()),
    ):
        params, masks = sf.modules.from_pruned(*source)
        assert torch.equal(params["w"], module.w_orig)
        state = sf.from_masks(masks).init(params)
        assert_equal(state, module)
        assert is_pruned(state)
    # They go on alike.
    prune.l1_unstructured(module, "w", 0.3)
    algorithm = sf.iterative(0.3, init=masks)
    assert_equal(algorithm.update(algorithm.init(params), params, 0), module)


def test_is_pruned():
    module = Holder({"w": torch.ones(2, 2)})
    params, masks = sf.modules.from_pruned(module)
    assert not prune.is_pruned(module)
    assert not is_pruned(sf.from_masks(masks).init(params))
    assert not is_pruned(sf.dense().init(params))
    prune.identity(module, "w")
    params, masks = sf.modules.from_pruned(module)
    assert prune.is_pruned(module)
    assert is_pruned(sf.from_masks(masks).init(params))
    assert is_pruned(sf.iterative(count=0).init(params))


def test_a_mask_that_is_not_0_and_1_is_refused_where_theirs_scales_the_weights():
    module = prune.custom_from_mask(
        Holder({"w": torch.ones(2)}), "w", torch.tensor([2.0, 1.0])
    )
    assert module.w.tolist() == [2.0, 1.0]
    with pytest.raises(
        ValueError, match="expected a mask of zeros and ones at 'w_mask'"
    ):
        sf.modules.from_pruned(module)


def test_several_methods_at_once_where_their_container_fails():
    with pytest.raises(AttributeError):
        prune.PruningContainer(prune.L1Unstructured(0.5), prune.L1Unstructured(0.5))
    params = {"w": torch.arange(1.0, 11.0).reshape(2, 5)}
    algorithm = sf.sequence(sf.iterative(0.5), sf.iterative(0.5))
    state = algorithm.update(algorithm.init(params), params, 0)
    assert int(state.masks["w"].sum()) == 3  # 10 - 5 - round(2.5)


def test_a_failed_update_leaves_the_state_where_theirs_loses_the_hook():
    module = prune.l1_unstructured(Holder({"w": torch.ones(4)}), "w", 1)
    with pytest.raises(ValueError, match="should be smaller than"):
        prune.l1_unstructured(module, "w", 9)
    assert not prune.is_pruned(module)
    params = {"w": torch.ones(2, 2)}
    state = sf.iterative(count=1).init(params)
    with pytest.raises(ValueError, match="expected 0 <= count <= 4, got 9 at 'w'"):
        sf.iterative(count=9).update(state, params, 0)
    assert is_pruned(state)


def test_ties_go_to_the_lower_index_where_theirs_says_nothing():
    algorithm = sf.iterative(count=2)
    state = algorithm.update(
        algorithm.init({"w": torch.ones(2, 2)}), {"w": torch.ones(2, 2)}, 0
    )
    assert state.masks["w"].tolist() == [[True, True], [False, False]]


def test_the_nuclear_norm_is_a_score_of_ones_own():
    def nuclear(state, grads, step):
        norms = torch.linalg.matrix_norm(state.params["w"], "nuc")
        return {"w": norms[:, None, None].expand_as(state.params["w"])}

    w = torch.randn(
        6, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    module = prune.ln_structured(Holder({"w": w}), "w", 0.5, n="nuc", dim=0)
    algorithm = sf.iterative(
        0.5, score=nuclear, pattern=sf.patterns.channel(0, norm=math.inf)
    )
    assert_equal(algorithm.update(algorithm.init({"w": w}), {"w": w}, 0), module)
