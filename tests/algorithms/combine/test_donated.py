"""Updates that write over their state: in place where they may, pure elsewhere, and bad
input leaves it alone.
"""

import gc
import tracemalloc

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn._engine.leaves import lists


def params_of(n=80):
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(n, n, generator=generator),
        "b": torch.randn(n, generator=generator),
    }


def made(optimizer=None, **options):
    inner = sf.rigl(0.9, when=sf.every(3), init="magnitude", **options)
    return sf.with_optimizer(inner, optimizer or sf.optimizers.adamw(1e-2))


OPTIMIZERS = [
    sf.optimizers.sgd(0.1),
    sf.optimizers.sgd(0.1, 0.9),
    sf.optimizers.adam(1e-2),
    sf.optimizers.adamw(1e-2),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "inner", [sf.dense(), sf.ste(0.5), sf.rigl(0.9, when=sf.never())], ids=repr
)
def test_weights_and_moments_keep_their_memory(optimizer, inner):
    whole = sf.donated(sf.with_optimizer(inner, optimizer))
    state = whole.init(params_of())
    places = {
        path: x.data_ptr()
        for path, x in sf.checkpoint.state_dict(state).items()
        if x.numel() == 6400 and x.is_floating_point()
    }
    for step in range(3):
        state = whole.update(state, params_of(), step)
    now = sf.checkpoint.state_dict(state)
    assert {path: now[path].data_ptr() for path in places} == places


def presets():
    key = sf.random.key(0)
    return {
        "rigl": sf.rigl(0.9, when=sf.always()),
        "set": sf.set(0.9, when=sf.always(), key=key),
        "snfs": sf.snfs(0.9, when=sf.always()),
        "gmp": sf.gmp(sf.schedules.polynomial(0.0, 0.9, begin=0, end=4)),
        "global": sf.gmp(
            sf.schedules.polynomial(0.0, 0.9, begin=0, end=4),
            distribution=sf.budgets.global_(),
        ),
        "2:4": sf.one_shot(None, pattern=sf.patterns.nm(2, 4), when=sf.at([2])),
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:], ids=repr)
@pytest.mark.parametrize("name", presets())
def test_they_keep_it_where_masks_change_too(name, optimizer):
    whole = sf.donated(sf.with_optimizer(presets()[name], optimizer))
    state = whole.init(params_of())
    places = {
        path: x.data_ptr()
        for path, x in sf.checkpoint.state_dict(state).items()
        if x.is_floating_point()
    }
    places = {path: at for path, at in places.items() if path.endswith("w")}
    changes = 0
    for step in range(4):
        masks = state.masks["w"].clone()
        state = whole.update(state, params_of(), step)
        changes += not torch.equal(masks, state.masks["w"])
        now = sf.checkpoint.state_dict(state)
        assert {path: now[path].data_ptr() for path in places} == places
    assert changes and len(places) == 2 + (not hasattr(state.opt, "momentum")) + (
        name == "snfs"
    )


def test_weights_that_start_anew_are_new_tensors_and_so_are_those_that_others_read():
    for inner in (
        sf.rigl(0.9, when=sf.always(), restart_dropped=True),
        sf.chain(sf.rigl(0.9, when=sf.always()), sf.static(0.5)),
    ):
        pure = sf.with_optimizer(inner, sf.optimizers.sgd(0.1, 0.9))
        whole = sf.donated(pure)
        state, wanted = whole.init(params_of()), pure.init(params_of())
        for step in range(4):
            at = state.params["w"].data_ptr()
            state, wanted = (
                whole.update(state, params_of(), step),
                pure.update(wanted, params_of(), step),
            )
            assert (
                sf.checkpoint.tree_equal(state, wanted)
                and state.params["w"].data_ptr() != at
            )


def peak_of(update, *args):
    """The most bytes that numpy's memory grows by; torch's own is not counted, and
    there is little of it.
    """
    gc.collect()
    tracemalloc.start()
    try:
        result = update(*args)
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["rigl", "set", "gmp", "global", "2:4"])
def test_a_change_takes_new_masks_and_little_more(name, monkeypatch):
    monkeypatch.setattr(lists, "PART_ON_CPU", 1 << 18)
    params = {f"{i}.w": torch.randn(512, 512) for i in range(16)}
    grads = {path: torch.randn(512, 512) for path in params}
    entries = 16 * 512 * 512
    peaks = {}
    for kind in ("pure", "donated"):
        whole = sf.with_optimizer(presets()[name], sf.optimizers.sgd(0.1, 0.9))
        whole = sf.donated(whole) if kind == "donated" else whole
        state = whole.init(params)
        for step in range(2):
            state = whole.update(state, grads, step)
        _, peaks[kind] = peak_of(whole.update, state, grads, 2)
    assert peaks["donated"] < 1.9 * entries < 8 * entries < peaks["pure"], peaks


def test_bad_arguments_leave_the_state():
    whole = sf.donated(made())
    state = whole.init(params_of())
    before = optree.tree_map(torch.clone, state)
    with pytest.raises(
        ValueError, match=r"expected grads of shape \(80,\) at 'b', got \(79,\)"
    ):
        whole.update(state, params_of(79), 0)
    with pytest.raises(TypeError):
        whole.update(state, params_of(), "0")
    assert all(map(torch.equal, optree.tree_leaves(state), optree.tree_leaves(before)))


def test_an_error_inside_gives_the_state_away_if_weights_have_moved():
    def broken(state, grown, step):
        raise RuntimeError("mine")

    whole = sf.donated(made(grown=broken))
    state = whole.init(params_of())
    with pytest.raises(RuntimeError, match="mine"):
        whole.update(state, params_of(), 3)
    with pytest.raises(ValueError, match="given away"):
        state.params["w"].sum()

    alone = sf.donated(sf.rigl(0.9, grown=broken, when=sf.every(3), init="magnitude"))
    state = alone.init(params_of())
    with pytest.raises(RuntimeError, match="mine"):
        alone.update(state, params_of(), 3)
    assert state.params["w"].shape == (80, 80)


def test_code_that_reads_its_old_state_after_an_update_inside_is_told():
    adam = sf.optimizers.adam(1e-2)

    class ByDifferences:
        init = staticmethod(adam.init)

        def update(self, grads, state, *, params=None, inplace=False):
            updates, new = adam.update(grads, state, params=params, inplace=inplace)
            return optree.tree_map(
                torch.add, updates, optree.tree_map(torch.sub, new.mu, state.mu)
            ), new

    inner = sf.with_optimizer(sf.static(0.5), sf.optimizers.sgd(0.1))
    twice = sf.Algorithm(
        inner.init,
        lambda state, grads, step: inner.update(
            state, inner.update(state, grads, step).params, step
        ),
    )
    for pure in (made(ByDifferences()), twice):
        whole = sf.donated(pure)
        pure.update(pure.init(params_of()), params_of(), 1)
        state = whole.init(params_of())
        with pytest.raises(
            ValueError, match="expected a tensor, got <given away: float32 of shape"
        ):
            whole.update(state, params_of(), 1)


def test_a_tensor_that_cannot_be_taken_goes_with_others_that_can():
    whole, pure = sf.donated(made()), made()
    state, wanted = whole.init(params_of()), pure.init(params_of())
    strided = state._replace(
        opt=state.opt._replace(
            mu=optree.tree_map(lambda x: torch.stack([x, x])[0], state.opt.mu)
        )
    )
    at = strided.params["w"].data_ptr()
    state, wanted = (
        whole.update(strided, params_of(), 1),
        pure.update(wanted, params_of(), 1),
    )
    assert (
        sf.checkpoint.tree_equal(state, wanted) and state.params["w"].data_ptr() == at
    )


def test_a_state_cannot_be_updated_twice():
    whole = sf.donated(made())
    state = whole.init(params_of())
    whole.update(state, params_of(), 1)
    with pytest.raises(ValueError, match=r"got <given away: float32 of shape \(80,\)>"):
        whole.update(state, params_of(), 2)


def test_a_copy_made_before_stays():
    whole = sf.donated(made())
    state = whole.init(params_of())
    copy = optree.tree_map(torch.clone, state)
    weights = copy.params["w"].clone()
    whole.update(state, params_of(), 1)
    assert torch.equal(copy.params["w"], weights)


def test_gradients_stay():
    whole = sf.donated(made())
    grads = params_of()
    state = whole.init(params_of())
    for step in range(4):
        state = whole.update(state, grads, step)
    assert all(
        torch.equal(x, y)
        for x, y in zip(grads.values(), params_of().values(), strict=True)
    )


@pytest.mark.deep
def test_under_transforms_it_is_the_pure_update():
    whole = sf.donated(made())
    states = torch.vmap(whole.init)({"w": torch.randn(2, 80, 80)})
    new = torch.vmap(whole.update, in_dims=(0, 0, None))(states, states.params, 1)
    assert states.params["w"].shape == new.params["w"].shape

    state = whole.init(params_of())
    compiled = torch.compile(whole.update, fullgraph=True, backend="eager")
    compiled(state, params_of(), torch.tensor(1))
    assert state.params["w"].shape == (80, 80)

    slopes = torch.func.grad(
        lambda grads: whole.update(state, grads, 1).params["w"].sum()
    )(params_of())
    assert slopes["w"].shape == state.params["w"].shape == (80, 80)


def test_inside_another_algorithm_nothing_is_given_away():
    inner = sf.donated(sf.rigl(0.9, when=sf.every(3), init="magnitude"))
    for whole in (
        sf.with_optimizer(inner, sf.optimizers.sgd(0.1)),
        sf.chain(inner, sf.static(0.5)),
        sf.partition([("w", inner)]),
    ):
        state = whole.init(params_of())
        whole.update(state, params_of(), 3)
        assert state.params["w"].shape == (80, 80)


def test_attach_keeps_its_own_state():
    model = torch.nn.Linear(80, 80)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparse = sf.attach(
        sf.donated(sf.rigl(0.9, when=sf.every(1), init="magnitude")), model, optimizer
    )
    for step in range(3):
        model(torch.randn(2, 80)).square().sum().backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
    assert int((model.weight != 0).sum()) <= 640


def test_donated_twice_is_donated():
    whole = sf.donated(sf.donated(made()))
    state = whole.init(params_of())
    assert whole.update(state, params_of(), 1).params["w"].shape == (80, 80)


def test_only_algorithms():
    with pytest.raises(TypeError, match="donated: expected an Algorithm, got str"):
        sf.donated("rigl")
    assert repr(sf.donated(sf.dense())) == "donated(dense())"


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
def test_a_state_may_come_from_an_algorithm_made_before(optimizer):
    """As in a run that goes on in a new process, which has a state and calls no
    init.
    """
    state, grads = made(optimizer).init(params_of()), params_of()
    wanted = made(optimizer).update(state, grads, 1)
    new = sf.donated(made(optimizer)).update(state, grads, 1)
    assert all(torch.equal(new.params[path], wanted.params[path]) for path in grads)
