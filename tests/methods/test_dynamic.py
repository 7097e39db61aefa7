"""Dynamic methods by name: worked examples and identities; recordings are in
test_golden_dynamic.
"""

import pytest
import torch

import sparsefn as sf

KEY = sf.random.key(0)
PARAMS = {
    "a": torch.randn(10, 20, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(20, 15, generator=torch.Generator().manual_seed(1)),
    "bias": torch.randn(15, generator=torch.Generator().manual_seed(2)),
}


def gradients(step):
    made = torch.Generator().manual_seed(step)
    return {path: torch.randn(w.shape, generator=made) for path, w in PARAMS.items()}


def kept(state):
    return {path: int(mask.sum()) for path, mask in state.masks.items() if mask.ndim}


def run(algorithm, steps, params=None):
    state = algorithm.init(PARAMS if params is None else params)
    for step in range(steps):
        old, state = state, algorithm.update(state, gradients(step), step)
        yield step, old, state


def test_a_name_of_the_top_level_is_one_thing():
    both = {name for name in vars(sf.methods) if name in sf.__all__ or name == "set"}
    assert both == {"gmp", "rigl", "set", "snfs"}
    assert all(getattr(sf.methods, name) is getattr(sf, name) for name in both)


# ---- SET -----------------------------------------------------------------------------


def test_by_sign_equally_many_of_each_sign_go():
    algorithm = sf.methods.set(
        0.5,
        drop=sf.scores.ranked(sf.scores.magnitude),
        drop_fraction=0.4,
        when=sf.always(),
        key=KEY,
        exclude_dropped=True,
    )
    for _, old, new in run(algorithm, 1):
        for path in ("a", "b"):
            gone = old.params[path][old.masks[path] & ~new.masks[path]]
            assert abs(int((gone > 0).sum()) - int((gone < 0).sum())) <= 1


# ---- GraNet --------------------------------------------------------------------------


def test_granet_leaves_each_leaf_the_count_of_its_first_stage():
    when = sf.every(2)
    algorithm = sf.methods.granet(0.9, steps=8, when=when, key=KEY)
    start = sf.static(0.5, distribution=sf.budgets.erk(), key=KEY)
    rising, both = (
        sf.schedules.polynomial(0.5, 0.9, begin=0, end=8),
        {"distribution": sf.budgets.global_()},
    )
    for step, old, new in run(algorithm, 9):
        assert step or kept(old) == kept(start.init(PARAMS))
        first = sf.gmp(rising, when=when, init=old.masks, **both)
        pruned = first.update(first.init(old.params), gradients(step), step)
        assert kept(new) == kept(pruned)
        assert step in (0, 8) or when(step) == any(
            (new.masks[p] & ~pruned.masks[p]).any() for p in kept(new)
        )
    assert sum(kept(new).values()) == 50


def test_granet_may_start_dense_and_rises_as_a_cubic():
    algorithm = sf.methods.granet(0.1, steps=2, initial=0.5, when=sf.always())
    assert sum(kept(algorithm.init(PARAMS)).values()) == 250
    algorithm = sf.methods.granet(0.8, steps=2, initial=0.0, when=sf.at([1, 2]))
    counts = [sum(kept(new).values()) for *_, new in run(algorithm, 3)]
    assert counts == [500, 500 - 350, 100]  # 0.8 * (1 - 0.5^3) = 0.7


def test_a_weight_that_granet_prunes_may_grow_back_at_zero():
    algorithm = sf.methods.granet(
        0.5, steps=1, initial=0.0, drop_fraction=0.5, when=sf.at([0, 1])
    )
    weights = {"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])}
    state = algorithm.init(weights)
    state = algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}, 0)
    # at the start nothing is pruned, and half of it is exchanged
    assert state.masks["w"].all()
    assert sf.methods.granet(0.5, steps=4).init(weights).masks["w"].sum() == 2


# ---- MEST ----------------------------------------------------------------------------


def test_mest_prunes_more_and_grows_back():
    for soft, start, end in ((False, 10, 10), (True, 12, 12)):
        algorithm = sf.methods.mest(
            0.9, extra=0.02, soft=soft, when=sf.always(), key=KEY
        )
        state = algorithm.init({"w": torch.randn(10, 10)})
        assert kept(state) == {"w": start}
        new = algorithm.update(state, state.params, 0)
        assert kept(new) == {"w": end}
        # grown; they may be the ones that went
        assert int((new.masks["w"] & (new.params["w"] == 0)).sum()) == 2


def test_without_an_extra_mest_changes_nothing():
    for soft in (False, True):
        algorithm = sf.methods.mest(
            0.8, extra=0.0, soft=soft, when=sf.always(), key=KEY
        )
        for _, old, new in run(algorithm, 2):
            assert all(
                torch.equal(old.params[p], new.params[p])
                and old.masks[p].equal(new.masks[p])
                for p in PARAMS
            )


def test_mest_weighs_the_gradient():
    weights, grads = (
        {"w": torch.tensor([[0.1, 0.2, 0.0, 0.0]])},
        {"w": torch.tensor([[0.5, 0.0, 0.0, 0.0]])},
    )
    for gradient, dropped in ((0.0, 0), (1.0, 1)):
        algorithm = sf.methods.mest(
            0.5, extra=0.25, gradient=gradient, when=sf.always(), key=KEY
        )
        state = algorithm.init(weights)
        first = {
            "masks": {"w": torch.tensor([[True, True, False, False]])},
            "params": weights,
        }
        new = algorithm.update(state._replace(**first), grads, 0)
        assert (
            new.params["w"][0, dropped] == 0.0
            and new.params["w"][0, 1 - dropped] == weights["w"][0, 1 - dropped]
        )


def test_the_extra_of_mest_falls():
    extra = sf.schedules.piecewise({0: 0.1, 2: 0.05, 4: 0.0})
    algorithm = sf.methods.mest(0.9, extra=extra, soft=True, when=sf.always(), key=KEY)
    counts = [sum(kept(new).values()) for *_, new in run(algorithm, 6)]
    assert counts == [100, 100, 75, 75, 50, 50]


# ---- Top-KAST ------------------------------------------------------------------------


def test_top_kast_trains_a_set_around_the_mask_and_freezes_the_rest():
    when = sf.every(3)
    algorithm = sf.methods.top_kast(0.9, backward=0.6, decay=0.1, when=when)
    trained = sf.with_optimizer(algorithm, sf.optimizers.adam(0.3))
    moved = False
    for step, old, new in run(trained, 9):
        for path, size in (("a", 200), ("b", 300)):
            inside = trained.view.support(old)[path]
            assert (int(new.masks[path].sum()), int(inside.sum())) == (
                size // 10,
                size * 4 // 10,
            )
            assert not (old.masks[path] & ~inside).any()
            assert torch.equal(new.params[path][~inside], old.params[path][~inside])
            after = trained.view.support(new)[path]
            assert not new.opt.mu[path][~after].any()
            assert when(step) or torch.equal(inside, after)
            moved |= bool((new.masks[path] & ~old.masks[path]).any())
    assert moved


def test_top_kast_without_sparsity_is_dense():
    dense = sf.with_terms(sf.dense(), sf.terms.l2(0.01))
    states = []
    for algorithm in (sf.methods.top_kast(0.0, backward=0.0, decay=0.01), dense):
        *_, (_, _, state) = run(
            sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1, momentum=0.9)), 4
        )
        states.append(state)
    assert all(
        torch.equal(states[0].params[path], states[1].params[path]) for path in PARAMS
    )


def test_top_kast_takes_a_tensor():
    first, second = (
        sf.methods.top_kast(s, backward=0.25, decay=0.01)
        for s in (0.75, torch.tensor(0.75))
    )
    state = first.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    grads = {"w": torch.ones(1, 4)}
    expected = torch.tensor([[1.04, 1.12, 1.08, 0.0]])
    assert all(
        torch.allclose(a.view.grads(state, grads, 0)["w"], expected)
        for a in (first, second)
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: sf.methods.top_kast(1.0, backward=0.5),
            ValueError,
            "expected a sparsity below 1.0",
        ),
        (lambda: sf.methods.top_kast(2.0, backward=0.5), ValueError, r"in \[0, 1\]"),
        (
            lambda: sf.methods.mest(0.5, extra=2.0, when=sf.always()),
            ValueError,
            r"expected extra .*in \[0, 1\]",
        ),
        (lambda: sf.methods.granet(0.5, steps=0), ValueError, "expected end > begin"),
        (lambda: sf.methods.granet(1.5, steps=9), ValueError, r"in \[0, 1\]"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
