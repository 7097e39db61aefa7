"""Masks for activations: recorded and live torch.ao, transforms, a functional model,
errors.
"""

import functools
import warnings

import optree
import pytest
import torch
from golden_data import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsefn as sf
from sparsefn.masks.activations import ActivationState, activation_sparsifier

MAKE = torch.Generator().manual_seed(5)
BATCHES = [torch.randn(4, 6, generator=MAKE) for _ in range(3)]
X = BATCHES[0]


def over_batch(total):
    return total.mean(0)


def large(mean, threshold=0.3):
    return mean.abs() > threshold


def watched(act, batches, state=None):
    state = act.init(batches[0]) if state is None else state
    for x in batches:
        state = act.observe(state, x)
    return act.update(state)


SUM = activation_sparsifier(torch.add, over_batch, large)


def test_recorded_output():
    (case,) = cases("torch_ao", "ActivationSparsifier")
    state = watched(SUM, list(case.inputs.values()))
    assert torch.equal(state.mask, case.outputs["mask"] != 0)


# ---- live ----------------------------------------------------------------------------

AGGREGATES = {
    "sum": torch.add,
    "max": lambda old, x: torch.maximum(old, x.abs()),
    "last": lambda old, x: x,
}
REDUCTIONS = {
    "mean": over_batch,
    "all": lambda total: total,
    "peak": lambda total: total.amax((0, 1), keepdim=True),
}


def theirs(rounds, aggregate, reduce, features, axis, threshold):
    """Masks after every round, and the activation that goes through at the end, from
    torch.ao.pruning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao announces its own end
        from torch.ao.pruning._experimental.activation_sparsifier import (
            activation_sparsifier,
        )

    model = nn.Sequential(nn.Identity())
    peer = activation_sparsifier.ActivationSparsifier(model)
    peer.register_layer(
        model[0],
        aggregate_fn=AGGREGATES[aggregate],
        reduce_fn=REDUCTIONS[reduce],
        mask_fn=lambda data, threshold: (data.abs() > threshold).to(data.dtype),
        features=features,
        feature_dim=axis,
        threshold=threshold,
    )
    masks = []
    for batches in rounds:
        for x in batches:
            model(x)
        peer.step()
        mask = peer.get_mask(name="0")
        masks.append(mask.clone() if features is None else [m.clone() for m in mask])
    peer.squash_mask()
    # cloned: with features it writes into the caller's input
    return masks, model(rounds[-1][-1].clone())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**31),
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4)),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from(list(AGGREGATES)),
    st.sampled_from(list(REDUCTIONS)),
    st.sampled_from([0.0, 0.2, 0.7, 5.0]),
    st.data(),
)
def test_the_same_masks_and_activations_as_torch_ao(
    seed, shape, counts, aggregate, reduce, threshold, data
):
    make = torch.Generator().manual_seed(seed)
    rounds = [
        [torch.randn(shape, generator=make, dtype=torch.float64) for _ in range(n)]
        for n in counts
    ]
    axis = data.draw(st.sampled_from([None, 0, 1, 2, -1]))
    features = None
    if axis is not None:
        features = data.draw(
            st.lists(st.integers(0, shape[axis] - 1), min_size=1, unique=True)
        )
    act = activation_sparsifier(
        AGGREGATES[aggregate],
        REDUCTIONS[reduce],
        functools.partial(large, threshold=threshold),
        features=features,
        axis=axis,
    )
    masks, out = theirs(rounds, aggregate, reduce, features, axis, threshold)
    state = act.init(rounds[0][0])
    for batches, mask in zip(rounds, masks, strict=True):
        state = watched(act, batches, state)
        if features is None:
            assert torch.equal(state.mask, mask != 0)
        else:
            assert [m.tolist() for m in state.mask] == [(m != 0).tolist() for m in mask]
    assert torch.equal(act.apply(state, rounds[-1][-1]), out)


# ---- what each function does ---------------------------------------------------------


def test_the_first_mask_keeps_everything_and_has_its_final_shape():
    state = SUM.init(X)
    assert torch.equal(state.mask, torch.ones(6, dtype=torch.bool))
    assert torch.equal(SUM.apply(state, X), X)
    assert [leaf.shape for leaf in state] == [
        leaf.shape for leaf in watched(SUM, BATCHES)
    ]


def test_update_without_an_observation_keeps_the_mask():
    # The original raises KeyError.
    state = watched(SUM, BATCHES)
    again = SUM.update(state)
    assert torch.equal(again.mask, state.mask) and not state.mask.all()
    assert SUM.update(SUM.init(X)).mask.all()  # of zeros alone it would keep nothing


def test_the_aggregate_starts_over_after_an_update():
    state = watched(SUM, [100 * x for x in BATCHES])
    assert torch.equal(watched(SUM, BATCHES, state).mask, watched(SUM, BATCHES).mask)


def test_nothing_given_is_changed():
    act = activation_sparsifier(torch.add, over_batch, large, features=[1, 3], axis=1)
    x, state = X.clone(), act.init(X)
    kept = [leaf.clone() for leaf in optree.tree_leaves(state)]
    after = act.update(act.observe(state, x))
    out = act.apply(after, x)  # the original writes into x
    out.zero_()
    assert torch.equal(x, X)
    for leaf, before in zip(optree.tree_leaves(state), kept, strict=True):
        assert torch.equal(leaf, before)


def test_apply_selects():
    state = ActivationState(
        torch.tensor([True, False, False, False]), (), torch.tensor(0)
    )
    x = torch.tensor([-0.0, -1.0, float("nan"), float("inf")])
    out = SUM.apply(state, x)
    assert out.tolist() == [0.0] * 4
    assert torch.signbit(out).tolist() == [True, False, False, False]
    act = activation_sparsifier(
        torch.add, over_batch, large, features=[1, 2, 3], axis=0
    )
    state = ActivationState((torch.tensor(False),) * 3, (), torch.tensor(0))
    assert (
        torch.equal(torch.signbit(act.apply(state, x)), torch.signbit(out))
        and not act.apply(state, x).any()
    )


def test_features_have_masks_of_their_own_and_the_rest_passes():
    act = activation_sparsifier(torch.add, over_batch, large, features=[2, 0], axis=-1)
    state = watched(act, [torch.tensor([[0.1, 0.1, 1.0], [0.1, 0.1, 1.0]])])
    assert [m.tolist() for m in state.mask] == [[True], [False]]
    assert act.apply(state, torch.ones(2, 3)).tolist() == [[0.0, 1.0, 1.0]] * 2


def test_batches_of_several_sizes():
    act = activation_sparsifier(
        lambda total, x: total + x.sum(0),
        lambda total: total,
        large,
        start=lambda x: torch.zeros_like(x[0]),
    )
    whole = watched(act, [torch.cat(BATCHES)])
    parts = watched(
        act, [BATCHES[0], BATCHES[1][:1], torch.cat([BATCHES[1][1:], BATCHES[2]])]
    )
    assert torch.equal(whole.mask, parts.mask)


def test_a_running_minimum_starts_where_it_should():
    # From zeros, as the original starts, a minimum of positive numbers is 0 for good.
    act = activation_sparsifier(
        torch.minimum,
        lambda low: low,
        lambda low: low > 1.0,
        start=lambda x: torch.full_like(x, float("inf")),
    )
    state = watched(act, [torch.tensor([3.0, 2.0]), torch.tensor([2.0, 0.5])])
    assert state.mask.tolist() == [True, False]


def test_sums_in_another_precision():
    act = activation_sparsifier(
        torch.add,
        over_batch,
        large,
        start=lambda x: torch.zeros_like(x, dtype=torch.float32),
    )
    state = watched(act, [x.bfloat16() for x in BATCHES])
    assert state.aggregate.dtype == torch.float32
    assert act.apply(state, X.bfloat16()).dtype == torch.bfloat16


# ---- transforms ----------------------------------------------------------------------

VARIANTS = {
    "whole": SUM,
    "features": activation_sparsifier(
        torch.add, over_batch, large, features=[0, 4], axis=1
    ),
}


def run(act, batches, observe):
    """Three observations, of which some may be left out, an update and an
    activation.
    """
    state = act.init(batches[0])
    for x in batches[:observe]:
        state = act.observe(state, x)
    state = act.update(state)
    return state, act.apply(state, batches[-1])


@pytest.mark.parametrize("act", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("observe", [0, 3])
def test_vmap_is_the_loop(act, observe):
    members = [[x, x.flip(0) * 2, -x.roll(1, 1)] for x in BATCHES]
    stacked = [torch.stack(rows) for rows in zip(*members, strict=True)]
    together = torch.func.vmap(lambda *xs: run(act, xs, observe))(*stacked)
    for i, xs in enumerate(members):
        alone = run(act, xs, observe)
        assert sf.checkpoint.tree_equal(sf.ensemble.member(together, i), alone)


@pytest.mark.deep
@pytest.mark.parametrize("act", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("observe", [0, 3])
def test_compiled_is_eager(act, observe):
    compiled = torch.compile(
        lambda xs: run(act, xs, observe), backend="eager", fullgraph=True
    )
    assert sf.checkpoint.tree_equal(compiled(BATCHES), run(act, BATCHES, observe))


def test_one_compiled_step_serves_observed_and_not():
    update = torch.compile(SUM.update, backend="eager", fullgraph=True)
    state = SUM.observe(SUM.init(X), X)
    once = update(state)
    assert sf.checkpoint.tree_equal(once, SUM.update(state))
    assert torch.equal(update(once).mask, once.mask)


def test_the_gradient_is_that_of_what_is_kept():
    state = watched(SUM, BATCHES)
    grads = torch.func.grad(lambda x: SUM.apply(state, x).square().sum())(X)
    assert torch.equal(grads, torch.where(state.mask, 2 * X, 0.0))


def test_what_is_observed_is_detached():
    x = X.clone().requires_grad_()
    state = SUM.update(SUM.observe(SUM.init(x), x * 2))
    assert not any(leaf.requires_grad for leaf in state)
    assert SUM.apply(state, x).requires_grad


# ---- in a functional model -----------------------------------------------------------


def test_named_activations_in_a_functional_model():
    model = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    params = sf.modules.params_of(model)
    acts = {
        "hidden": activation_sparsifier(torch.add, over_batch, lambda mean: mean > 0.2),
        "last": activation_sparsifier(
            torch.add, over_batch, lambda mean: sf.masks.topk_mask(mean, 3)
        ),
    }

    def forward(params, states, x):
        """The output, and the activations by name: pure, so nothing is hooked."""
        seen = {}

        def tap(name, h):
            seen[name] = h
            return acts[name].apply(states[name], h)

        h = tap("hidden", torch.relu(x @ params["0.weight"].T + params["0.bias"]))
        h = tap("last", torch.relu(h @ params["2.weight"].T + params["2.bias"]))
        return h @ params["4.weight"].T + params["4.bias"], seen

    def loss(params, states, x):
        out, seen = forward(params, states, x)
        return out.square().mean(), seen

    states = {name: act.init(torch.zeros(4, 8)) for name, act in acts.items()}
    dense = forward(params, states, X)[0]
    torch.testing.assert_close(dense, model(X).detach())
    for x in BATCHES:
        grads, seen = torch.func.grad(loss, has_aux=True)(params, states, x)
        states = {
            name: act.observe(states[name], seen[name]) for name, act in acts.items()
        }
    states = {name: act.update(states[name]) for name, act in acts.items()}

    out, seen = forward(params, states, X)
    assert int(states["last"].mask.sum()) == 3
    assert not torch.equal(out, dense)
    grads, _ = torch.func.grad(loss, has_aux=True)(params, states, X)
    # columns of what never arrives
    assert not grads["4.weight"][:, ~states["last"].mask].any()

    # Squashed: the masks alone, which is what a checkpoint of the finished model needs.
    masks = {name: state.mask for name, state in states.items()}
    assert sf.checkpoint.state_dict(masks).keys() == {"hidden", "last"}
    squashed = {name: ActivationState(mask, (), ()) for name, mask in masks.items()}
    assert torch.equal(forward(params, squashed, X)[0], out)


def test_an_activation_of_a_module_as_it_is():
    first, second = nn.Linear(6, 8), nn.Linear(8, 2)
    act = activation_sparsifier(torch.add, over_batch, lambda mean: mean > 0)
    state = watched(act, [first(x) for x in BATCHES])
    h = first(X)
    assert torch.equal(
        second(act.apply(state, h)), second(torch.where(state.mask, h, 0.0))
    )


def test_a_state_is_saved_and_loaded():
    act = VARIANTS["features"]
    state = act.observe(watched(act, BATCHES), X)
    saved = sf.checkpoint.state_dict(state)
    assert list(saved) == ["mask.0", "mask.1", "aggregate.0", "aggregate.1", "seen"]
    assert sf.checkpoint.tree_equal(
        sf.checkpoint.load_state_dict(act.init(X), saved), state
    )


# ---- errors --------------------------------------------------------------------------


def make(aggregate=torch.add, reduce=over_batch, mask=large, **kwargs):
    return activation_sparsifier(aggregate, reduce, mask, **kwargs)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: make(features=[0]), ValueError, "features needs axis, got axis=None"),
        (lambda: make(axis=1), ValueError, "axis needs features, got features=None"),
        (
            lambda: make(features=[], axis=1),
            ValueError,
            "expected one feature or more, each once, got []",
        ),
        (
            lambda: make(features=[1, 1], axis=1),
            ValueError,
            "expected one feature or more, each once, got [1, 1]",
        ),
        (
            lambda: make(features=[0, -1], axis=1),
            ValueError,
            "expected features >= 0, got -1",
        ),
        (
            lambda: make(features=[0.0], axis=1),
            TypeError,
            "expected features to be ints, got 0.0",
        ),
        (
            lambda: make(features=[True], axis=1),
            TypeError,
            "expected features to be ints, got True",
        ),
        (
            lambda: make(features=[5, 6], axis=1).init(X),
            ValueError,
            "expected features below 6 along axis 1, got 6",
        ),
        (
            lambda: make(features=[0], axis=2).init(X),
            ValueError,
            "expected an activation with axis 2, got shape (4, 6)",
        ),
        (
            lambda: make(aggregate=None),
            TypeError,
            "expected aggregate to be a function, got NoneType",
        ),
        (
            lambda: make(reduce="mean"),
            TypeError,
            "expected reduce to be a function, got str",
        ),
        (
            lambda: make(mask=0.5),
            TypeError,
            "expected mask to be a function, got float",
        ),
        (lambda: make(start=0), TypeError, "expected start to be a function, got int"),
        (
            lambda: make(start=lambda x: 0).init(X),
            TypeError,
            "expected the start to be a tensor, got int",
        ),
        (
            lambda: make(mask=lambda mean: mean.sign()).init(X),
            TypeError,
            "expected mask to give bools, got torch.float32",
        ),
        (
            lambda: make(mask=lambda mean: True).init(X),
            TypeError,
            "expected the mask to be a tensor, got bool",
        ),
        (
            lambda: SUM.init([1.0]),
            TypeError,
            "expected an activation to be a tensor, got list",
        ),
        (
            lambda: SUM.observe(SUM.init(X), (X,)),
            TypeError,
            "expected an activation to be a tensor, got tuple",
        ),
        (
            lambda: SUM.observe(SUM.init(X), X[:2]),
            ValueError,
            "expected the start of shape (4, 6), got (2, 6)",
        ),
        (
            lambda: SUM.observe(SUM.init(X), X.double()),
            TypeError,
            "expected the start of dtype torch.float32, got torch.float64",
        ),
        (
            lambda: watched(make(aggregate=lambda old, x: x[0]), BATCHES),
            ValueError,
            "expected the aggregate of shape (4, 6), got (6,)",
        ),
        (
            lambda: SUM.apply(watched(SUM, BATCHES), torch.ones(4, 5)),
            ValueError,
            "expected an activation that a mask of shape (6,) broadcasts to, got "
            "shape (4, 5)",
        ),
        (
            lambda: SUM.apply(watched(SUM, BATCHES), torch.tensor(1.0)),
            ValueError,
            "expected an activation that a mask of shape (6,) broadcasts to, got "
            "shape ()",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == f"activation_sparsifier: {text}"
