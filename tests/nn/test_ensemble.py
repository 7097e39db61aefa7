"""Stacks of states: there and back, member by member under vmap, frozen, summed up, and
what is refused.
"""

import math
import re

import optree
import pytest
import torch

import sparsefn as sf
import sparsefn.optim as O
from sparsefn import ensemble as E
from sparsefn._engine.torch_limits import OLD
from sparsefn.core.state import State, effective
from sparsefn.nn.checkpoint import tree_equal


def make_state(seed):
    generator = torch.Generator().manual_seed(seed)
    params = {
        "w": torch.randn(3, 2, generator=generator),
        "b": [torch.randn(3, generator=generator)],
    }
    masks = {"w": params["w"] > 0, "b": [torch.tensor(True)]}
    return State(
        params, masks, key=torch.tensor([seed, seed]), opt=O.adam(0.1).init(params)
    )


def test_round_trip():
    states = [make_state(seed) for seed in range(4)]
    stacked = E.stack(states)
    assert type(stacked) is State
    assert stacked.params["w"].shape == (4, 3, 2)
    assert stacked.masks["b"][0].shape == (4,)
    assert stacked.opt.count.shape == (4,)
    assert stacked.scores == ()
    assert E.size(stacked) == 4
    assert all(map(tree_equal, E.unstack(stacked), states))
    assert all(tree_equal(E.member(stacked, i), states[i]) for i in range(-4, 4))
    assert tree_equal(E.stack(E.unstack(stacked)), stacked)


def test_nothing_is_mutated_or_shared():
    states = [make_state(seed) for seed in range(2)]
    stacked = E.stack(states)
    for tree in (E.member(stacked, 0), *E.unstack(stacked)):
        tree.params["w"].zero_()
    assert tree_equal(stacked, E.stack([make_state(seed) for seed in range(2)]))
    stacked.params["w"].zero_()
    assert tree_equal(states, [make_state(seed) for seed in range(2)])


def test_masks_of_a_stack_are_applied_inside_vmap():
    states = [make_state(seed) for seed in range(3)]
    batched = torch.vmap(effective)(E.stack(states))
    assert all(tree_equal(E.member(batched, i), effective(states[i])) for i in range(3))


def test_a_stack_of_stacks_and_any_tree():
    stack = E.stack(
        [E.stack([torch.tensor(i * 10 + j) for j in range(2)]) for i in range(3)]
    )
    assert stack.tolist() == [[0, 1], [10, 11], [20, 21]]
    assert E.stack([(torch.ones(1),)])[0].shape == (1, 1)
    assert (
        E.stack(
            (
                {"a": torch.ones(1), "b": torch.ones(1)},
                {"b": torch.ones(1), "a": torch.ones(1)},
            )
        )["a"].shape[0]
        == 2
    )


@pytest.mark.deep
def test_inside_compile():
    states = [make_state(seed) for seed in range(2)]
    compiled = torch.compile(
        lambda states: E.member(E.stack(states), 1), fullgraph=True, backend="eager"
    )
    assert tree_equal(compiled(states), states[1])


def test_stack_refuses():
    state = make_state(0)
    with pytest.raises(
        ValueError, match="expected one state or more to stack, got none"
    ):
        E.stack([])
    with pytest.raises(TypeError, match="expected a sequence of states, got one State"):
        E.stack(state)
    with pytest.raises(TypeError, match="expected a sequence of states, got one dict"):
        E.stack({"w": torch.ones(1)})
    with pytest.raises(
        ValueError, match=r"expected member 2 .* but there is no leaf at 'params.b.0'"
    ):
        E.stack(
            [state, state, state._replace(params={"w": state.params["w"], "b": []})]
        )
    with pytest.raises(
        ValueError, match=r"expected member 1 of shape \(3, 2\) at 'masks.w', got \(\)"
    ):
        E.stack(
            [
                state,
                state._replace(
                    masks={"w": torch.tensor(True), "b": [torch.tensor(True)]}
                ),
            ]
        )
    with pytest.raises(
        TypeError,
        match=r"expected member 1 of dtype torch.int64 at 'key', got torch.int32",
    ):
        E.stack([state, state._replace(key=state.key.int())])
    with pytest.raises(
        TypeError, match="expected member 0 to be tensors, got float at 'a'"
    ):
        E.stack([{"a": 1.0}])


def test_members_out_of_range_are_refused():
    stacked = E.stack([make_state(0), make_state(1)])
    for i in (2, -3):
        with pytest.raises(
            IndexError, match=f"expected a member from -2 to 1, got {i}"
        ):
            E.member(stacked, i)
    for i in (1.0, True, torch.tensor(1)):
        with pytest.raises(
            TypeError, match="expected the index of a member to be an int, got"
        ):
            E.member(stacked, i)


@pytest.mark.parametrize("use", [E.size, E.unstack, lambda tree: E.member(tree, 0)])
def test_what_is_no_stack_is_refused(use):
    with pytest.raises(
        ValueError, match=r"expected a stack, but the leaf at 'masks.b.0' is 0-d"
    ):
        use(make_state(0))
    with pytest.raises(
        ValueError, match="expected a stack of states, got a tree without leaves"
    ):
        use({})
    with pytest.raises(ValueError, match="expected 2 members at 'b' as at 'a', got 3"):
        use({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(TypeError, match="expected a stack of tensors, got int at 'a'"):
        use({"a": 1})


# ---- member i of an ensemble is run i, bit for bit -----------------------------------

KEYS = sf.random.split(sf.random.key(3), 4)
MODEL = {
    name: sf.random.normal(sf.random.fold_in(sf.random.key(5), name), shape)
    for name, shape in {"a": (8, 12), "b": (6, 8), "bias": (6,)}.items()
}
STEPS = 12


def slopes(state, step):
    """Gradients that follow from the weights one by one: no sum whose order a batch
    could change.
    """
    return optree.tree_map(
        lambda w: (w - 0.25) * (1 + step % 3) * (w + 0.5), sf.effective(state)
    )


def trained(algorithm, params, steps=range(STEPS)):
    state = algorithm.init(params)
    for step in steps:
        state = algorithm.update(state, slopes(state, step), step)
    return state


def sgd(algorithm):
    return sf.with_optimizer(algorithm, O.sgd(0.125, momentum=0.5))


def gradual(final, power=3):
    return sgd(
        sf.gmp(
            sf.schedules.polynomial(0.0, final, begin=0, end=9, power=power),
            when=sf.every(2),
        )
    )


def decayed(steps):
    return sgd(
        sf.rigl(
            0.5,
            drop_fraction=sf.schedules.cosine_decay(0.4, steps),
            key=KEYS[0],
            when=sf.always(),
        )
    )


def cycled(low, n):
    schedule = sf.schedules.cycling([low, 0.75], sf.every(n))
    return sgd(sf.gmp(schedule, when=sf.every(2), init="dense", regrow=True))


# How an algorithm comes of one member's numbers, and the numbers: one tuple a member.
MEMBERS = {
    "seed": (
        lambda key: sgd(sf.set(0.75, key=key, when=sf.always())),
        [(key,) for key in KEYS],
    ),
    "sparsity of static": (
        lambda s: sgd(sf.static(s, key=KEYS[0])),
        [(0.0,), (0.5,), (0.9,), (1.0,)],
    ),
    "sparsity of rigl": (
        lambda s: sgd(sf.rigl(s, key=KEYS[0], when=sf.always())),
        [(0.25,), (0.5,), (0.9,)],
    ),
    "sparsity of snfs": (
        lambda s: sgd(sf.snfs(s, key=KEYS[0], when=sf.always())),
        [(0.25,), (0.5,), (0.9,)],
    ),
    "sparsity by global_": (
        lambda s: sgd(
            sf.rigl(s, distribution=sf.budgets.global_(), key=KEYS[0], when=sf.always())
        ),
        [(0.25,), (0.5,), (0.9,)],
    ),
    "sparsity of rows": (
        lambda s: sgd(
            sf.rigl(
                s, pattern=sf.patterns.row_balanced(), key=KEYS[0], when=sf.always()
            )
        ),
        [(0.25,), (0.5,), (0.9,)],
    ),
    "drop fraction": (
        lambda f: sgd(sf.rigl(0.5, drop_fraction=f, key=KEYS[0], when=sf.always())),
        [(0.0,), (0.1,), (0.5,), (1.0,)],
    ),
    "seed and sparsity": (
        lambda key, s: sgd(sf.set(s, key=key, when=sf.always())),
        [(KEYS[0], 0.5), (KEYS[1], 0.9), (KEYS[2], 0.75)],
    ),
    "end of a schedule": (gradual, [(0.5,), (0.75,), (0.95,)]),
    "end and power of a schedule": (gradual, [(0.5, 1.0), (0.75, 3.0), (0.95, 2.0)]),
    "length of a schedule": (decayed, [(4.0,), (8.0,), (11.0,)]),
    "values and period of a cycle": (cycled, [(0.25, 3), (0.5, 4), (0.5, 1)]),
    "steps of a schedule": (
        lambda n: sgd(
            sf.gmp(sf.schedules.piecewise([(0, 0.25), (n, 0.75)]), when=sf.every(2))
        ),
        [(2,), (5,), (100,)],
    ),
    "period": (
        lambda n: sgd(sf.rigl(0.75, when=sf.every(n), key=KEYS[0])),
        [(1,), (3,), (5,), (100,)],
    ),
    "start and stop": (
        lambda a, b: sgd(sf.rigl(0.75, when=sf.every(2, start=a, stop=b), key=KEYS[0])),
        [(0, 3), (1, 100), (5, 8)],
    ),
    "listed steps": (
        lambda a, b: sgd(sf.set(0.75, when=sf.at([a, b]), key=KEYS[0])),
        [(0, 3), (7, 7), (50, 11)],
    ),
    "when pruned": (
        lambda step: sgd(sf.one_shot(0.75, when=sf.at([step]))),
        [(0,), (5,), (11,), (12,)],
    ),
    "skipped steps": (
        lambda n: sf.with_optimizer(
            sf.set(0.75, key=KEYS[0], when=sf.always()),
            O.adam(0.1),
            skip=sf.every(n, start=1),
        ),
        [(1,), (2,), (5,)],
    ),
    "reset steps": (
        lambda n: sf.with_optimizer(
            sf.set(0.75, key=KEYS[0], when=sf.always()), O.adam(0.1), reset=sf.every(n)
        ),
        [(1,), (4,), (50,)],
    ),
    "rate of sgd": (
        lambda lr: sf.with_optimizer(
            sf.set(0.75, key=KEYS[0], when=sf.always()), O.sgd(lr, momentum=0.5)
        ),
        [(0.0,), (0.0625,), (0.1,)],
    ),
    "rate of adam": (
        lambda lr: sf.with_optimizer(
            sf.set(0.75, key=KEYS[0], when=sf.always()), O.adam(lr)
        ),
        [(0.001,), (0.0625,), (0.1,)],
    ),
    "rate of adamw on a schedule": (
        lambda lr: sf.with_optimizer(
            sf.set(0.75, key=KEYS[0], when=sf.always()),
            O.adamw(sf.schedules.linear_decay(lr, 9.0), weight_decay=0.25),
        ),
        [(0.001,), (0.0625,), (0.1,)],
    ),
    "fraction of iterative": (
        lambda f: sgd(sf.iterative(f, when=sf.every(3))),
        [(0.1,), (0.2,), (0.5,)],
    ),
    "count of iterative": (
        lambda n: sgd(sf.iterative(count=n, when=sf.every(5))),
        [(0,), (1,), (15,)],
    ),
    "count of n:m, fixed": (
        lambda n: sgd(sf.static(None, pattern=sf.patterns.nm(n, 4))),
        [(0,), (1,), (3,), (4,)],
    ),
    "count of n:m, moving": (
        lambda n: sgd(
            sf.rigl(None, pattern=sf.patterns.nm(n, 4), key=KEYS[0], when=sf.always())
        ),
        [(0,), (1,), (2,), (4,)],
    ),
    "count of n:m, straight through": (
        lambda n: sgd(sf.ste(None, pattern=sf.patterns.nm(n, 4))),
        [(1,), (2,), (3,)],
    ),
    "sparsity of a supermask": (
        lambda s: sgd(sf.supermask(s, key=KEYS[0])),
        [(0.25,), (0.5,), (0.9,)],
    ),
}


def stacked_arguments(rows):
    return [
        torch.stack([x if isinstance(x, torch.Tensor) else scalar(x) for x in column])
        for column in zip(*rows, strict=True)
    ]


def scalar(value):
    # A float in float64: in float32 it would be another number, and may give another
    # count.
    return torch.tensor(
        value, dtype=torch.float64 if isinstance(value, float) else torch.int64
    )


def assert_members(stack, states):
    assert E.size(stack) == len(states)
    for i, (mine, alone) in enumerate(zip(E.unstack(stack), states, strict=True)):
        assert tree_equal(mine, alone), f"member {i} is not run {i}"


@pytest.mark.deep(
    but=[
        "seed",
        "sparsity*",
        "drop fraction",
        "period",
        "steps of a schedule",
        "reset steps",
        "skipped steps",
    ]
)
@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_is_a_run_bit_for_bit(name):
    make, rows = MEMBERS[name]
    alone = [trained(make(*row), MODEL) for row in rows]
    # members do differ
    assert not all(tree_equal(alone[0], other) for other in alone[1:])
    batch = torch.vmap(lambda *row: trained(make(*row), MODEL))(
        *stacked_arguments(rows)
    )
    assert_members(batch, alone)


@pytest.mark.parametrize(
    "name",
    [
        "sparsity of rigl",
        "period",
        "count of n:m, moving",
        "values and period of a cycle",
    ],
)
def test_a_member_whose_step_is_a_tensor_is_a_run_too(name):
    make, rows = MEMBERS[name]
    arguments = stacked_arguments(rows)
    batch = torch.vmap(lambda *row: make(*row).init(MODEL))(*arguments)

    def advance(state, step, *row):
        return make(*row).update(state, slopes(state, step), step)

    for step in range(STEPS):
        steps = torch.full((len(rows),), step)
        batch = torch.vmap(advance)(batch, steps, *arguments)
    assert_members(batch, [trained(make(*row), MODEL) for row in rows])


def test_members_in_chunks_are_the_same_members():
    make, rows = MEMBERS["seed"]
    (keys,) = stacked_arguments(rows)
    whole = torch.vmap(lambda key: trained(make(key), MODEL))(keys)
    assert tree_equal(
        torch.vmap(lambda key: trained(make(key), MODEL), chunk_size=3)(keys), whole
    )


def test_the_initial_model_is_shared_or_one_a_member():
    make = MEMBERS["seed"][0]
    models = [optree.tree_map(lambda w, i=i: w + 0.125 * i, MODEL) for i in range(4)]
    run = torch.vmap(lambda key, params: trained(make(key), params), in_dims=(0, None))
    assert_members(run(KEYS, MODEL), [trained(make(key), MODEL) for key in KEYS])
    run = torch.vmap(lambda key, params: trained(make(key), params))
    assert_members(
        run(KEYS, E.stack(models)),
        [trained(make(key), m) for key, m in zip(KEYS, models, strict=True)],
    )
    run = torch.vmap(lambda params: trained(make(KEYS[0]), params))
    assert_members(
        run(E.stack(models)), [trained(make(KEYS[0]), model) for model in models]
    )


def test_an_ensemble_of_ensembles():
    levels, make = [0.5, 0.9], MEMBERS["seed and sparsity"][0]
    batch = torch.vmap(
        lambda s: torch.vmap(lambda key: trained(make(key, s), MODEL))(KEYS)
    )(torch.tensor(levels, dtype=torch.float64))
    assert batch.masks["a"].shape == (2, 4, 8, 12)
    for inner, level in zip(E.unstack(batch), levels, strict=True):
        assert_members(inner, [trained(make(key, level), MODEL) for key in KEYS])
        assert set(E.summary(inner).sparsified.kept) == {
            sf.budgets.n_kept(96, level) + sf.budgets.n_kept(48, level)
        }
    frozen = torch.tensor([[True] * 4, [False] * 4])
    mixed = E.freeze(batch, optree.tree_map(torch.zeros_like, batch), frozen)
    assert tree_equal(E.member(mixed, 0), E.member(batch, 0))
    assert not any(leaf.any() for leaf in optree.tree_leaves(E.member(mixed, 1)))


def test_one_count_a_member_outside_algorithms():
    scores, counts = MODEL["a"], torch.tensor([0, 1, 50, 96, 1000])
    batch = torch.vmap(lambda n: sf.masks.topk_mask(scores, n))(counts)
    assert torch.equal(
        batch,
        torch.stack([sf.masks.topk_mask(scores, min(int(n), 96)) for n in counts]),
    )
    rows = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [12, 0, 0, 1, 0, 0, 0, 12]])
    batch = torch.vmap(
        lambda n: sf.masks.topk_mask(scores, n, pattern=sf.patterns.row_balanced())
    )(rows)
    assert torch.equal(batch.sum(-1), rows)
    counts = torch.tensor([0, 1, 3, 4, 9, -2])
    batch = torch.vmap(
        lambda n: sf.masks.topk_mask(scores, None, pattern=sf.patterns.nm(n, 4))
    )(counts)
    alone = [
        sf.masks.topk_mask(scores, None, pattern=sf.patterns.nm(n, 4))
        for n in (0, 1, 3, 4, 4, 0)
    ]
    assert torch.equal(batch, torch.stack(alone))


# ---- frozen members ------------------------------------------------------------------

ODD = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45]


def bits(tree):
    return optree.tree_map(
        lambda x: (
            x.view(torch.int32).tolist() if x.dtype == torch.float32 else x.tolist()
        ),
        tree,
    )


def test_frozen_members_keep_their_bits():
    # NaNs of two kinds
    payload = torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    old = {
        "w": torch.stack(
            [torch.tensor(ODD), torch.cat([payload, torch.tensor(ODD[:4])])]
        ),
        "n": torch.arange(2),
    }
    new = {
        "w": torch.tensor([[1.0] * 6, [float("nan")] * 6]),
        "n": torch.tensor([7, 8]),
    }
    for frozen in ([True, True], [True, False], [False, True], [False, False]):
        mixed = E.freeze(old, new, torch.tensor(frozen))
        for i, kept in enumerate(frozen):
            assert bits(E.member(mixed, i)) == bits(E.member(old if kept else new, i))


@pytest.mark.deep
@pytest.mark.skipif(
    OLD, reason="the compiler of torch 2.11 calls no trigger that it has made"
)
def test_members_frozen_early_end_as_they_were():
    rows = [(KEYS[0], 1, 2), (KEYS[1], 3, 1), (KEYS[2], 2, 3)]
    arguments, last = stacked_arguments(rows), torch.tensor([3, 12, 7])

    def make(key, n, count):
        return sgd(
            sf.rigl(None, pattern=sf.patterns.nm(count, 4), when=sf.every(n), key=key)
        )

    def advance(state, step, *row):
        return make(*row).update(state, slopes(state, step), step)

    def within(state, step, last, *row):
        return E.freeze(state, advance(state, step, *row), last <= step)

    batched = torch.vmap(advance, in_dims=(0, None, 0, 0, 0))
    nested = torch.vmap(within, in_dims=(0, None, 0, 0, 0, 0))
    compiled = torch.compile(nested, fullgraph=True, backend="aot_eager")
    params = {"a": MODEL["a"]}
    outside = inside = graph = torch.vmap(lambda *row: make(*row).init(params))(
        *arguments
    )
    for step in range(STEPS):
        outside = E.freeze(outside, batched(outside, step, *arguments), last <= step)
        inside = nested(inside, step, last, *arguments)
        graph = compiled(graph, torch.tensor(step), last, *arguments)
    alone = [
        trained(make(*row), params, range(n))
        for row, n in zip(rows, last.tolist(), strict=True)
    ]
    for batch in (outside, inside, graph):
        assert_members(batch, alone)


def test_freeze_refuses():
    old = {"b": torch.zeros(2), "w": torch.zeros(2, 3)}
    with pytest.raises(
        TypeError, match="expected frozen to be a bool tensor, got torch.int64"
    ):
        E.freeze(old, old, torch.tensor([0, 1]))
    with pytest.raises(
        TypeError, match="expected frozen to be a bool tensor, got list"
    ):
        E.freeze(old, old, [True, False])
    with pytest.raises(
        ValueError,
        match=r"expected a stack of shape \(3, Ellipsis\) at 'b', got \(2,\)",
    ):
        E.freeze(old, old, torch.ones(3, dtype=torch.bool))
    with pytest.raises(
        ValueError,
        match=r"expected the new states of shape \(2, 3\) at 'w', got \(2, 4\)",
    ):
        E.freeze(old, {**old, "w": torch.zeros(2, 4)}, torch.ones(2, dtype=torch.bool))
    with pytest.raises(
        ValueError, match="expected the new states .* but there is no leaf at 'w'"
    ):
        E.freeze(old, {"b": old["b"]}, torch.ones(2, dtype=torch.bool))
    with pytest.raises(
        TypeError,
        match="expected the new states of dtype torch.float32 at 'b', got "
        "torch.float64",
    ):
        E.freeze(old, {**old, "b": old["b"].double()}, torch.ones(2, dtype=torch.bool))


# ---- summary -------------------------------------------------------------------------


def drawn(shares, shape=(7, 11)):
    """Members with random masks, and these."""
    masks = [
        {
            "w": sf.random.bernoulli(sf.random.key(i), torch.full(shape, share)),
            "b": torch.tensor(True),
        }
        for i, share in enumerate(shares)
    ]
    states = [
        State({"w": torch.ones(shape), "b": torch.ones(shape[0])}, m) for m in masks
    ]
    return E.stack(states), [m["w"].flatten() for m in masks]


def test_summary_counts_what_sets_count():
    stack, masks = drawn([0.5, 0.5, 0.1, 0.0, 0.0, 1.0])
    sets = [{i for i, kept in enumerate(mask.tolist()) if kept} for mask in masks]
    summary = E.summary(stack)
    dense, row = summary.rows
    assert (row.path, row.shape, row.total, row.shared.dtype) == (
        "w",
        (7, 11),
        77,
        torch.int64,
    )
    assert row.shared.tolist() == [[len(a & b) for b in sets] for a in sets]
    assert row.kept == tuple(map(len, sets))
    assert row.sparsity == tuple((77 - len(a)) / 77 for a in sets)
    assert row.mean == (77 * 6 - sum(map(len, sets))) / (77 * 6)
    want = [[len(a & b) / len(a | b) if a | b else 1.0 for b in sets] for a in sets]
    assert row.overlap.tolist() == summary.overlap.tolist() == want
    assert (
        summary.dense == ("b",) and dense.kept == (7,) * 6 and dense.overlap.eq(1).all()
    )
    assert summary.total.kept == tuple(7 + len(a) for a in sets)


def test_summary_adds_leaves_and_counts_beyond_one_part():
    stack, (a, b) = drawn([0.3, 0.6], shape=(1 << 9, 1 << 8))  # 131072 weights
    row = E.summary(stack).rows[1]
    assert row.shared.tolist() == [
        [int(a.sum()), int((a & b).sum())],
        [int((a & b).sum()), int(b.sum())],
    ]
    both = E.summary(
        State(
            {"x": stack.params, "y": stack.params}, {"x": stack.masks, "y": stack.masks}
        )
    )
    assert (
        torch.equal(both.sparsified.shared, 2 * row.shared)
        and both.sparsified.total == 1 << 18
    )


def test_summary_agrees_with_the_reports_of_members():
    make, rows = MEMBERS["seed and sparsity"]
    states = [trained(make(*row), MODEL) for row in rows]
    summary = E.summary(E.stack(states))
    for i, state in enumerate(states):
        alone = sf.report.summary(state)
        assert [
            (r.path, r.shape, r.total, r.kept[i], r.sparsity[i]) for r in summary.rows
        ] == [(r.path, r.shape, r.total, r.kept, r.sparsity) for r in alone.rows]
        assert (
            summary.sparsified.kept[i] == alone.sparsified.kept
            and summary.dense == alone.dense
        )
    total = sf.report.changed(states[0], states[1]).total
    assert summary.overlap[0, 1] == total.overlap


def test_the_table_of_a_summary():
    masks = [
        [True, True, False, False],
        [True, False, True, False],
        [False, False, False, True],
    ]
    states = [
        State(
            {"w": torch.ones(4), "b": torch.ones(())},
            {"w": torch.tensor(m), "b": torch.tensor(True)},
        )
        for m in masks
    ]
    assert str(E.summary(E.stack(states))) == "\n".join(
        [
            "path        shape  total    mean     min     max  overlap",
            "b           ()         1   dense",
            "w           (4,)       4  0.5833  0.5000  0.7500   0.1111",
            "sparsified             4  0.5833  0.5000  0.7500   0.1111",
            "all                    5  0.4667  0.4000  0.6000   0.3333",
        ]
    )
    assert "0.5000        -" in str(E.summary(E.stack(states[:1])))


def test_summary_of_an_ensemble_without_masks():
    stack = E.stack([sf.dense().init(MODEL)] * 2)
    summary = E.summary(stack)
    assert (
        summary.sparsified.total == 0
        and summary.sparsified.mean == 0.0
        and summary.total.mean == 0.0
    )
    assert summary.overlap.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_summary_refuses():
    stack, _ = drawn([0.5, 0.5])
    with pytest.raises(
        TypeError, match="expected a bool mask at 'w', got torch.float32"
    ):
        E.summary(stack._replace(masks={**stack.masks, "w": stack.params["w"]}))
    with pytest.raises(
        ValueError,
        match=r"expected a mask of shape \(2, 7, 11\) or \(2,\) at 'w', got \(2, 7\)",
    ):
        E.summary(stack._replace(masks={**stack.masks, "w": stack.masks["w"][:, :, 0]}))
    with pytest.raises(
        ValueError, match="expected a stack of one member or more, got none"
    ):
        E.summary(optree.tree_map(lambda x: x[:0], stack))
    with pytest.raises(
        ValueError, match="expected a stack, but the leaf at 'masks.b' is 0-d"
    ):
        E.summary(
            E.member(stack, 0)._replace(
                params={"w": torch.ones(7, 11), "b": torch.ones(7)}
            )
        )


@pytest.mark.parametrize("key", [(), sf.random.key(0)], ids=["no key", "key"])
def test_reports_of_one_state_name_what_counts_a_stack(key):
    state = (
        sf.static(0.5)
        .init({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
        ._replace(key=key)
    )
    states, layer = sf.ensemble.stack([state] * 3), torch.nn.Linear(4, 4)
    text = (
        "expected one state, got a stack of 3: sf.ensemble.summary counts the members "
        "of a stack, and sf.ensemble.member(states, i) gives one"
    )
    for report in (
        sf.report.summary,
        sf.report.observe,
        lambda states: sf.report.changed(states, states),
        lambda states: sf.report.changed(state, states),
        lambda states: sf.report.flops(layer, states, torch.ones(1, 4)),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            report(states)
    # Nor is one state a stack, whatever its shapes.
    for shape in ((3,), (3, 3), ()):
        one = sf.static(0.5, where="*", init="dense").init(
            {"a": torch.ones(2, 3), "b": torch.ones(3)}
        )
        one = one._replace(
            params={**one.params, "c": torch.ones(shape)},
            masks={**one.masks, "c": torch.tensor(True)},
        )
        assert sf.report.summary(one._replace(key=key)).total.kept == 9 + math.prod(
            shape
        )


def test_the_best_of_each_member_is_kept():
    torch.manual_seed(0)
    states = [{"w": torch.full((3, 2), float(step))} for step in range(6)]
    losses = torch.rand(6, 3)
    best, lowest = states[0], losses[0]
    for now, loss in zip(states, losses, strict=True):
        best, lowest = (
            sf.ensemble.freeze(best, now, loss >= lowest),
            torch.minimum(lowest, loss),
        )
    assert best["w"][:, 0].tolist() == losses.argmin(0).tolist() and torch.equal(
        lowest, losses.amin(0)
    )
