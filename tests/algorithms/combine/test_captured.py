"""Captured updates: where they are, where they are the algorithm itself, and misuse."""

import copy
import importlib
import pickle
import threading

import optree
import pytest
import torch

import sparsefn as sf
from property_tests.tape import Tape, TapeElsewhere
from sparsefn._engine.transforms import Onlooker, TorchDispatchMode
from sparsefn.algorithms.combine import cuda_graphs, replays
from sparsefn.testing.harness import assert_same

KEY = sf.random.key(0)


def tree_of(seed, n=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(n, n, generator=generator).to(dtype),
        "b": torch.randn(n, generator=generator).to(dtype),
    }


@pytest.fixture
def tapes(monkeypatch):
    """Tapes for graphs on the CPU; returns how many were made, and replayed."""
    monkeypatch.setitem(cuda_graphs.GRAPHS, "cpu", lambda device: Tape)
    begin = Tape.captures, Tape.replays
    return lambda: (Tape.captures - begin[0], Tape.replays - begin[1])


RIGL = sf.rigl(0.5, when=sf.every(3), init="magnitude")
TRAINED = sf.with_optimizer(RIGL, sf.optimizers.adamw(1e-2))


def compare(algorithm, steps=9, captured=None, n=8, dtype=torch.float32, step=int):
    captured = captured or sf.captured(algorithm)
    eager = replayed = algorithm.init(tree_of(0, n, dtype))
    for i in range(steps):
        grads = tree_of(i + 1, n, dtype)
        eager = algorithm.update(eager, grads, i)
        replayed = captured.update(replayed, grads, step(i))
        assert_same(f"step {i}", replayed, eager)
    return captured


# ---- how many graphs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "graphs"),
    [
        (sf.dense(), 1),
        (sf.rigl(0.5, when=sf.never()), 1),
        (sf.rigl(0.5, when=sf.always()), 1),
        (TRAINED, 2),
        (sf.with_optimizer(RIGL, sf.optimizers.sgd(0.1), reset=sf.at([3])), 3),
        (sf.sequence(sf.gmp(0.5, when=sf.at([4])), RIGL), 3),
        # the first phase at a trigger and not, the begin of the second, and after it
        (sf.phases([(0, RIGL), (5, sf.dense())]), 4),
        (sf.partition([("w", RIGL), ("*", sf.dense())]), 2),
        (sf.gmp(sf.schedules.polynomial(0.0, 0.9, 0, 9), when=sf.always()), 1),
    ],
    ids=repr,
)
def test_there_is_a_graph_for_each_set_of_triggers_that_fire(algorithm, graphs, tapes):
    compare(algorithm)
    assert tapes()[0] == graphs


def test_a_step_in_a_cpu_tensor_is_an_int(tapes):
    compare(TRAINED, step=torch.tensor)
    assert tapes() == (2, 9)


def test_a_step_on_the_device_decides_nothing_in_python(monkeypatch):
    monkeypatch.setitem(cuda_graphs.GRAPHS, "cpu", lambda device: Tape)
    monkeypatch.setattr(replays, "host_number", lambda step: None)  # as on a device
    before = Tape.captures
    compare(TRAINED, step=torch.tensor)
    assert Tape.captures == before + 1


def test_structures_have_graphs_of_their_own(tapes):
    captured = sf.captured(TRAINED)
    for _ in range(2):
        compare(TRAINED, captured=captured)
        compare(TRAINED, captured=captured, n=6)
        compare(TRAINED, captured=captured, dtype=torch.float64)
    assert tapes() == (6, 54)


def test_strides_are_those_of_the_eager_update(tapes):
    algorithm = sf.with_optimizer(sf.dense(), sf.optimizers.sgd(0.1))
    captured = sf.captured(algorithm)
    for form in (torch.contiguous_format, torch.channels_last):
        params = {"w": torch.ones(2, 3, 4, 5).to(memory_format=form)}
        state = algorithm.init(params)
        wanted = algorithm.update(state, params, 0)
        got = captured.update(state, params, 0)
        assert got.params["w"].stride() == wanted.params["w"].stride()
    assert tapes()[0] in (1, 2)


@pytest.mark.parametrize("name", ["_MOST_STRUCTURES", "_MOST_GRAPHS"])
def test_graphs_that_were_not_used_for_long_make_room(name, monkeypatch, tapes):
    monkeypatch.setattr(replays, name, 1)
    captured = sf.captured(TRAINED)
    compare(TRAINED, captured=captured)
    compare(TRAINED, captured=captured, n=6)
    compare(TRAINED, captured=captured)
    # of 9 steps 6 fire where the one before did not, or the other way round
    assert tapes() == ({"_MOST_STRUCTURES": 6, "_MOST_GRAPHS": 18}[name], 27)


# ---- states --------------------------------------------------------------------------


def test_what_an_update_leaves_as_it_is_is_handed_on(tapes):
    state = RIGL.init(tree_of(0))
    new = sf.captured(RIGL).update(state, tree_of(1), 1)
    assert new.masks["w"] is state.masks["w"]
    assert new.key is state.key
    assert new.params["w"] is state.params["w"]
    assert tapes() == (1, 0)  # there was nothing to replay


def test_gradients_may_be_tensors_of_the_state(tapes):
    captured = sf.captured(TRAINED)
    eager = replayed = TRAINED.init(tree_of(0))
    for step in range(4):
        eager = TRAINED.update(eager, eager.params, step)
        replayed = captured.update(replayed, replayed.params, step)
        assert_same(f"step {step}", replayed, eager)


def test_inputs_are_not_written_to(tapes):
    captured = sf.captured(TRAINED)
    state, grads = TRAINED.init(tree_of(0)), tree_of(1)
    before = optree.tree_map(torch.clone, (state, grads))
    for step in (0, 1, 3):
        captured.update(state, grads, step)
    assert_same("state and gradients", (state, grads), before)


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_begin_and_end_between_updates(first, tapes):
    captured = sf.captured(TRAINED)
    eager = replayed = TRAINED.init(tree_of(0))
    for step in range(4):
        with torch.inference_mode(first == (step < 2)):
            grads = tree_of(step)
            eager = TRAINED.update(eager, grads, step)
            replayed = captured.update(replayed, grads, step)
        assert_same(f"step {step}", replayed, eager)
        params = replayed.params["w"], eager.params["w"]
        assert params[0].is_inference() == params[1].is_inference()
    assert tapes() == (2, 4)


def test_threads_take_turns(tapes):
    captured = sf.captured(TRAINED)
    wanted = {}
    for seed in range(4):
        state = TRAINED.init(tree_of(seed))
        for step in range(6):
            state = TRAINED.update(state, tree_of(seed + step), step)
        wanted[seed] = state
    found = {}

    def train(seed):
        state = captured.init(tree_of(seed))
        for step in range(6):
            state = captured.update(state, tree_of(seed + step), step)
        found[seed] = state

    threads = [threading.Thread(target=train, args=(seed,)) for seed in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, state in wanted.items():
        assert_same(f"thread {seed}", found[seed], state)
    assert tapes()[0] == 2


# ---- where it is the algorithm itself ------------------------------------------------


def test_on_a_cpu_it_is_the_algorithm_itself():
    before = Tape.captures
    compare(TRAINED)
    assert Tape.captures == before


def update(algorithm, state=None):
    state = algorithm.init(tree_of(0)) if state is None else state
    return algorithm.update(state, tree_of(1), 0)


def vmapped(algorithm):
    states = sf.ensemble.stack([algorithm.init(tree_of(i)) for i in range(2)])
    grads = sf.ensemble.stack([tree_of(2), tree_of(3)])
    return torch.vmap(algorithm.update, in_dims=(0, 0, None))(states, grads, 0)


def differentiated(algorithm):
    def loss(params):
        state = algorithm.init(params)
        return update(algorithm, state).params["w"].sum()

    return torch.func.grad(loss)(tree_of(0))


def with_gradients_wanted(algorithm):
    state = algorithm.init(tree_of(0))
    grads = optree.tree_map(lambda x: x.requires_grad_(), tree_of(1))
    return algorithm.update(state, grads, 0).params["w"].sum()


def compiled(algorithm):
    whole = torch.compile(algorithm.update, backend="eager", fullgraph=True)
    return whole(algorithm.init(tree_of(0)), tree_of(1), 0)


def in_autocast(algorithm):
    with torch.autocast("cpu"):
        return update(algorithm)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Looking(Mode, Onlooker):
    """One that says of itself that it only looks on."""


def in_a_mode(algorithm):
    state = algorithm.init(tree_of(0))
    with Mode():
        return update(algorithm, state)


def inside_another(algorithm):
    return update(sf.partition([("*", sf.with_terms(algorithm, sf.terms.l2(0.1)))]))


def inside_a_chain(algorithm):
    return update(sf.chain(sf.static(0.25, init="magnitude"), algorithm))


ITSELF = [
    vmapped,
    differentiated,
    with_gradients_wanted,
    compiled,
    in_autocast,
    in_a_mode,
    inside_another,
    inside_a_chain,
]


@pytest.mark.parametrize("call", ITSELF, ids=lambda call: call.__name__)
def test_elsewhere_it_is_the_algorithm_itself(call, tapes):
    wanted = call(RIGL)
    assert_same(call.__name__, {"x": call(sf.captured(RIGL))}, {"x": wanted})
    assert tapes() == (0, 0)


def test_one_that_only_looks_on_changes_nothing(tapes):
    captured = sf.captured(TRAINED)
    state = captured.init(tree_of(0))
    grads = tree_of(1)
    with Looking():
        captured.update(state, grads, 0)
    assert tapes() == (1, 1)


def test_on_several_devices_it_is_the_algorithm_itself(monkeypatch):
    monkeypatch.setitem(cuda_graphs.GRAPHS, "meta", lambda device: TapeElsewhere)
    monkeypatch.setitem(cuda_graphs.GRAPHS, "cpu", lambda device: Tape)
    before = Tape.captures
    params = tree_of(0) | {"m": torch.ones(4, 4, device="meta")}
    algorithm = sf.with_optimizer(sf.dense(), sf.optimizers.sgd(0.1))
    sf.captured(algorithm).update(algorithm.init(params), params, 0)
    assert Tape.captures == before


def test_where_a_user_captures_it_is_the_algorithm_itself(monkeypatch, tapes):
    module = importlib.import_module("sparsefn.algorithms.combine.captured")
    monkeypatch.setattr(module, "stream_of", lambda device: None)
    compare(TRAINED)
    assert tapes() == (0, 0)


def test_captured_inside_a_score_of_captured_is_the_algorithm_itself(tapes):
    inner = sf.captured(TRAINED)

    def score(state, grads, step):
        return inner.update(inner.init(grads), grads, step).params

    algorithm = sf.captured(sf.gmp(0.5, score=score, when=sf.every(2)))
    state = algorithm.init(tree_of(0))
    for step in range(4):
        state = algorithm.update(state, tree_of(step), step)
    # at step 0 both triggers fire, at step 2 that of `gmp` alone, at others none
    assert tapes() == (3, 2)


# ---- with others ---------------------------------------------------------------------


def test_a_donated_state_is_written_over(tapes):
    algorithm = sf.donated(sf.captured(TRAINED))
    old = algorithm.init(tree_of(0))
    places = [x.data_ptr() for x in (old.params["w"], old.masks["w"])]
    new = algorithm.update(old, tree_of(1), 0)
    assert [x.data_ptr() for x in (new.params["w"], new.masks["w"])] == places
    with pytest.raises(ValueError, match="a donated algorithm has updated the state"):
        algorithm.update(old, tree_of(1), 1)
    again = TRAINED.init(tree_of(0))
    assert_same("donated", new, TRAINED.update(again, tree_of(1), 0))
    assert tapes() == (1, 1)


def test_around_donated_the_old_state_stays(tapes):
    compare(sf.donated(TRAINED)._replace(update=TRAINED.update))
    algorithm = sf.captured(sf.donated(TRAINED))
    old = algorithm.init(tree_of(0))
    kept = optree.tree_map(torch.clone, old)
    algorithm.update(old, tree_of(1), 0)
    assert_same("the old state", old, kept)


def test_other_fields_are_those_of_the_algorithm():
    algorithm = sf.reparametrised(sf.reparam.power(2.0), sf.static(0.5))
    captured = sf.captured(algorithm)
    assert captured.view is algorithm.view
    assert captured.settled is algorithm.settled
    assert captured.within is algorithm.within
    assert sf.captured(RIGL).within is RIGL.within
    state = captured.init(tree_of(0))
    assert_same("settled", sf.settled(captured, state), sf.settled(algorithm, state))


def test_copies_hold_no_graphs_and_read_like_the_call(tapes):
    captured = compare(TRAINED)
    assert repr(captured) == f"captured({TRAINED!r})"
    compare(TRAINED, captured=pickle.loads(pickle.dumps(captured)))
    compare(TRAINED, captured=copy.deepcopy(captured))
    assert tapes() == (6, 27)


def test_an_algorithm_of_a_user_is_captured(tapes):
    def step_down(state, grads, step):
        new = optree.tree_map(lambda p, g: p - g / (1 + step), state.params, grads)
        return state._replace(params=new)

    mine = sf.Algorithm(sf.dense().init, step_down)
    captured = sf.captured(mine)
    eager = replayed = mine.init(tree_of(0))
    for i in range(3):
        eager = mine.update(eager, tree_of(i), torch.tensor(i))
        replayed = captured.update(replayed, tree_of(i), i)
        assert_same(f"step {i}", replayed, eager)
    assert tapes() == (1, 3)


# ---- misuse --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (sf.rigl, r"captured: expected an Algorithm, got rigl itself; call it: rigl"),
        (3, "captured: expected an Algorithm, got int"),
    ],
    ids=["a factory", "an int"],
)
def test_something_else_is_refused(given, text):
    with pytest.raises(TypeError, match=text):
        sf.captured(given)


def even(step):
    return int(step) % 2 == 0


def scaled(state, grads, step):
    size = float(grads["w"].abs().max())
    return optree.tree_map(lambda g: g / size, grads)


def chosen(state, grads, step):
    return grads if grads["w"].sum() > 0 else state.params


@pytest.mark.parametrize(
    "algorithm",
    [
        sf.gmp(0.5, when=even),
        sf.gmp(0.5, score=scaled, when=sf.always()),
        sf.gmp(0.5, score=chosen, when=sf.always()),
    ],
    ids=["a trigger", "a float", "an if"],
)
def test_what_waits_is_refused_with_its_line(algorithm, tapes):
    captured = sf.captured(algorithm)
    state = captured.init(tree_of(0))
    text = (
        r"captured: expected an update that never waits for the device, as a graph "
        r"cannot wait, but the one of gmp\(0.5, .*\) does, at line \d+ of "
        r".*test_captured\.py: .*; compute with tensors on the device, let sf\.every "
        r"or sf\.at say when masks change, or leave sf\.captured out"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            captured.update(state, tree_of(1), 0)


def test_errors_of_a_score_are_its_own(tapes):
    def broken(state, grads, step):
        raise ZeroDivisionError("mine")

    captured = sf.captured(sf.gmp(0.5, score=broken, when=sf.always()))
    with pytest.raises(ZeroDivisionError, match="mine"):
        captured.update(captured.init(tree_of(0)), tree_of(1), 0)


def test_bad_arguments_are_refused_as_without(tapes):
    captured = sf.captured(TRAINED)
    state = captured.init(tree_of(0))
    with pytest.raises(ValueError, match="step >= 0"):
        captured.update(state, tree_of(1), -1)
    with pytest.raises(ValueError, match="shape"):
        captured.update(state, tree_of(1, n=6), 0)
    assert tapes() == (0, 0)


def test_within_a_budget_the_sparsity_is_a_number(tapes):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    params = sf.modules.params_of(model)
    groups = sf.shrinking.groups(model, torch.ones(1, 8))
    budget = sf.budgets.within(groups.cost() * 0.9, groups)

    def first(level):
        made = sf.gmp(level, pattern=groups.pattern(), distribution=budget)
        captured = sf.captured(made)
        state = captured.init(params)
        wanted = made.update(state, params, 0)
        assert_same("captured", captured.update(state, params, 0), wanted)

    first(1.0)
    text = "a schedule inside sf.captured; leave these out"
    with pytest.raises(ValueError, match=text):
        first(sf.schedules.linear(0.1, 0.1))


def test_a_key_that_an_update_moves_is_refused(monkeypatch):
    monkeypatch.setitem(cuda_graphs.GRAPHS, "meta", lambda device: TapeElsewhere)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    params = {"w": torch.ones(4, 4, device="meta")}
    inner = sf.set(0.5, key=KEY)

    def drawing(state, grads, step):
        return state._replace(key=state.key + 1)

    captured = sf.captured(sf.Algorithm(inner.init, drawing))
    state = captured.init(params)._replace(key=KEY)
    text = (
        "captured: expected an update that leaves 'key' of the state on cpu, got it on "
        r"meta; move it there before the update: x\.to\('meta'\)"
    )
    with pytest.raises(ValueError, match=text):
        captured.update(state, params, 0)
