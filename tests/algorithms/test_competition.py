"""Counts and competitions across leaves and groups, through the public API."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn._engine.selection.dispatch import Entry
from sparsefn.algorithms.competition import bounded_winners
from sparsefn.masks.patterns.units import to_rows, units_of


def rows_of(pattern, x, *reduce):
    return to_rows(units_of(pattern, tuple(x.shape)), x, *reduce)


P = sf.patterns


def kept(algorithm, params, grads=None, step=0):
    state = algorithm.update(
        algorithm.init(params), params if grads is None else grads, step
    )
    return {path: mask for path, mask in state.masks.items() if mask.ndim}


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.55, 0.9, 1.0])
@pytest.mark.parametrize(
    "pattern", [P.out_groups(2), P.in_groups(4), P.row_balanced()], ids=repr
)
def test_groups_split_the_count_of_the_leaf_evenly(pattern, sparsity):
    params = {"w": torch.rand(6, 8, generator=torch.Generator().manual_seed(0))}
    mask = kept(sf.one_shot(sparsity, pattern=pattern), params)["w"]
    blocks = {
        2: mask.reshape(2, 24),
        4: mask.reshape(6, 4, 2).transpose(0, 1).reshape(4, 12),
    }
    groups = (
        blocks[2]
        if "out" in repr(pattern)
        else blocks[4]
        if "in_" in repr(pattern)
        else mask
    )
    counts = groups.sum(1).tolist()
    assert sum(counts) == sf.budgets.n_kept(48, sparsity)
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    "pattern,units",
    [(P.block((2, 2)), 6), (P.channel(0), 3), (P.channel(1), 4), (P.kernel(), 12)],
    ids=repr,
)
def test_counts_are_of_units(pattern, units):
    params = {
        "w": torch.rand(3, 4, 2, 2) if "kernel" in repr(pattern) else torch.rand(3, 4)
    }
    if "block" in repr(pattern):
        params = {"w": torch.rand(3, 6)}
    for sparsity in (0.25, 0.5, 0.8):
        mask = kept(sf.one_shot(sparsity, pattern=pattern), params)["w"]
        assert int(
            rows_of(pattern, mask, lambda unit: unit.any(-1)).sum()
        ) == sf.budgets.n_kept(units, sparsity)


def test_global_competition_of_units_and_dtypes():
    params = {
        "a": torch.tensor([[3.0, 3.0], [1.0, 1.0]]),
        "b": torch.tensor([[2.0], [4.0]], dtype=torch.float64),
    }
    masks = kept(
        sf.one_shot(
            0.5,
            pattern=P.channel(0, norm=float("inf")),
            distribution=sf.budgets.global_(),
        ),
        params,
    )
    assert masks["a"].tolist() == [[True, True], [False, False]] and masks[
        "b"
    ].tolist() == [[False], [True]]


def test_global_drop_and_grow_keep_the_total_and_the_bounds():
    generator = torch.Generator().manual_seed(0)
    params = {
        path: torch.randn(4, 5, generator=generator) * scale
        for path, scale in (("a", 9.0), ("b", 1.0), ("c", 0.1))
    }
    grads = {
        path: torch.randn(4, 5, generator=generator) / p.abs().mean()
        for path, p in params.items()
    }
    algorithm = sf.rigl(
        0.5,
        drop_fraction=0.4,
        distribution=sf.budgets.global_(floor=0.2, ceiling=0.7),
        init="magnitude",
        when=sf.always(),
    )
    state = algorithm.init(params)
    for step in range(6):
        counts = [int(mask.sum()) for mask in state.masks.values()]
        assert sum(counts) == 30 and all(4 <= n <= 14 for n in counts)
        state = algorithm.update(
            state, {path: g * (-1) ** step for path, g in grads.items()}, step
        )


def test_nm_fixes_the_sparsity():
    params = {"w": torch.rand(2, 8)}
    assert int(kept(sf.one_shot(0.5, pattern=P.nm(2, 4)), params)["w"].sum()) == 8
    for make in (sf.static, sf.one_shot, sf.rigl, sf.gmp):
        with pytest.raises(
            ValueError, match=r"nm\(2, 4, axis=-1\) fixes the sparsity at 0.5, got 0.9"
        ):
            make(0.9, pattern=P.nm(2, 4)).init(params)


def test_a_group_pattern_under_vmapped_sparsities():
    params = {"w": torch.rand(4, 6, generator=torch.Generator().manual_seed(1))}
    sparsities = torch.tensor([0.0, 0.4, 0.75, 1.0], dtype=torch.float64)

    def masks(sparsity):
        algorithm = sf.one_shot(sparsity, pattern=P.row_balanced())
        return algorithm.update(algorithm.init(params), params, 0).masks["w"]

    want = torch.stack([masks(float(s)) for s in sparsities])
    assert torch.equal(torch.func.vmap(masks)(sparsities), want)


def blocks_of(mask):
    """Kept elements in each (1, 4) block."""
    return mask.reshape(-1, 4).sum(1)


@pytest.mark.parametrize("regrow", [False, True])
@pytest.mark.parametrize("pruned", ["zero", "keep"])
def test_partial_zeros_over_a_schedule(pruned, regrow):
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(6, 8, generator=generator)}
    algorithm = sf.gmp(
        sf.schedules.polynomial(0.0, 1.0, begin=0, end=5),
        score=sf.scores.gradient,  # pruned elements score as well as kept ones
        pattern=P.block((1, 4), zeros=3),
        pruned=pruned,
        regrow=regrow,
    )
    state = algorithm.init(params)
    for step in range(6):
        before = state.masks["w"]
        state = algorithm.update(
            state, {"w": torch.randn(6, 8, generator=generator)}, step
        )
        whole = sf.budgets.n_kept(
            12, sf.schedules.polynomial(0.0, 1.0, begin=0, end=5)(step)
        )
        assert blocks_of(state.masks["w"]).sort(descending=True).values.tolist() == [
            4
        ] * whole + [1] * (12 - whole)
        assert regrow or not (state.masks["w"] & ~before).any()
    assert state.masks["w"].sum() == 12


def test_partial_zeros_are_dropped_and_grown_block_by_block():
    generator = torch.Generator().manual_seed(0)
    params = {path: torch.randn(4, 8, generator=generator) for path in "ab"}
    for distribution in (sf.budgets.uniform(), sf.budgets.global_()):
        algorithm = sf.rigl(
            0.5,
            drop_fraction=0.5,
            pattern=P.block((1, 4), zeros=2),
            distribution=distribution,
            init="magnitude",
            when=sf.always(),
        )
        state, moved = algorithm.init(params), 0
        for step in range(4):
            grads = {path: torch.randn(4, 8, generator=generator) for path in "ab"}
            new = algorithm.update(state, grads, step)
            counts = torch.cat([blocks_of(mask) for mask in new.masks.values()])
            assert sorted(counts.tolist()) == [2] * 8 + [4] * 8
            moved += sf.masks.hamming(new.masks, state.masks)
            state = new
        assert moved > 0


def test_a_fraction_of_the_whole_blocks_is_pruned_each_time():
    params = {"w": torch.rand(6, 8, generator=torch.Generator().manual_seed(0))}
    algorithm, counts = sf.iterative(0.5, pattern=P.block((1, 4), zeros=1)), []
    state = algorithm.init(params)
    for step in range(4):
        state = algorithm.update(state, params, step)
        counts.append(int((blocks_of(state.masks["w"]) == 4).sum()))
        assert blocks_of(state.masks["w"]).min() == 3
    # half of 3 is 1.5, which rounds to 2; half of 1 rounds to 0
    assert counts == [6, 3, 1, 1]


def test_a_chain_keeps_what_both_parts_keep_of_a_block():
    w = torch.tensor([[8.0, 7.0, 6.0, 5.0], [4.0, 3.0, 2.0, 1.0]])
    first = {"w": torch.tensor([[True, True, False, True], [True, True, True, True]])}
    algorithm = sf.chain(
        sf.from_masks(first), sf.one_shot(1.0, pattern=P.block((1, 4), zeros=2))
    )
    masks = algorithm.update(algorithm.init({"w": w}), {"w": w}, 0).masks["w"]
    assert masks.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


BAND = P.nearly_diagonal(3)
SHAPES = {"a": (5, 5), "b": (3, 6)}


def test_a_band_needs_no_sparsity():
    params = {path: torch.full(shape, float("nan")) for path, shape in SHAPES.items()}
    band = {
        path: sf.masks.topk_mask(w, None, pattern=BAND) for path, w in params.items()
    }
    for algorithm in (
        sf.static(None, pattern=BAND),
        sf.static(None, pattern=BAND, init="magnitude"),
        sf.one_shot(None, pattern=BAND),
        sf.gmp(None, pattern=BAND, regrow=True),
        sf.ste(None, pattern=BAND),
        sf.rigl(None, pattern=BAND, when=sf.always()),
        sf.rigl(None, pattern=BAND, init="dense", when=sf.always()),
    ):
        masks = kept(algorithm, params)
        assert all(torch.equal(masks[path], band[path]) for path in SHAPES)
    assert (
        int(
            kept(sf.one_shot(None, pattern=P.nm(1, 4)), {"w": torch.rand(3, 8)})[
                "w"
            ].sum()
        )
        == 6
    )
    with pytest.raises(
        TypeError,
        match="expected sparsity to be a float in .0, 1., a schedule or a 0-d tensor, "
        "got None",
    ):
        sf.gmp(None)
    with pytest.raises(
        TypeError, match="expected sparsity to be .* or 'current', got None"
    ):
        sf.rigl(None, when=sf.always())
    with pytest.raises(ValueError, match="init='random' needs a sparsity, got None"):
        sf.static(None).init(params)
    with pytest.raises(
        ValueError, match="init='checkerboard' needs a sparsity, got None"
    ):
        sf.static(None, pattern=BAND, init="checkerboard").init(params)


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("init", ["random", "dense"])
def test_a_band_stays_while_weights_are_dropped_and_grown(init, exclude):
    params = {"w": torch.rand(5, 5, generator=torch.Generator().manual_seed(0))}
    band = sf.masks.topk_mask(params["w"], None, pattern=BAND)
    algorithm = sf.rigl(
        1 - 13 / 25,
        pattern=BAND,
        drop_fraction=0.5,
        init=init,
        exclude_dropped=exclude,
        when=sf.always(),
    )
    state = algorithm.init(params)
    for step in range(3):
        state = algorithm.update(state, {"w": -params["w"]}, step)
        assert torch.equal(state.masks["w"], band)


def test_a_band_is_checked_against_a_sparsity_and_other_parts():
    params = {"w": torch.rand(5, 5)}
    with pytest.raises(
        ValueError,
        match=r"nearly_diagonal\(3\) fixes the sparsity at 0.6875, got 0.48 at 'v'",
    ):
        sf.static(0.48, pattern=BAND).init({**params, "v": torch.rand(2, 8)})
    assert int(sf.static(0.48, pattern=BAND).init(params).masks["w"].sum()) == 13
    with pytest.raises(
        ValueError,
        match=r"global_ needs a pattern that leaves the count open, got "
        r"nearly_diagonal\(3\)",
    ):
        sf.static(None, pattern=BAND, distribution=sf.budgets.global_()).init(params)
    with pytest.raises(
        ValueError,
        match=r"nearly_diagonal\(11\): expected nearliness // 2 < 5.* at 'w'",
    ):
        sf.static(None, pattern=P.nearly_diagonal(11)).init(params)
    with pytest.raises(
        ValueError,
        match=r"iterative: expected a pattern that leaves the count open, got "
        r"nearly_diag",
    ):
        sf.iterative(0.5, pattern=BAND)


def test_gates_share_the_count_of_a_leaf():
    params = {"w": torch.rand(24, 5, generator=torch.Generator().manual_seed(0))}
    for sparsity in (0.0, 0.3, 0.5, 0.9):
        mask = kept(sf.one_shot(sparsity, pattern=P.channel(0, groups=4)), params)["w"]
        counts = mask.all(1).reshape(4, 6).sum(1).tolist()
        assert sum(counts) == sf.budgets.n_kept(24, sparsity)
        assert max(counts) - min(counts) <= 1
        assert torch.equal(mask.all(1), mask.any(1))


def test_partial_zeros_under_vmapped_sparsities():
    params = {"w": torch.rand(4, 8, generator=torch.Generator().manual_seed(1))}
    sparsities = torch.tensor([0.0, 0.4, 0.75, 1.0], dtype=torch.float64)

    def masks(sparsity):
        algorithm = sf.one_shot(sparsity, pattern=P.block((1, 3), zeros=2))
        return algorithm.update(algorithm.init(params), params, 0).masks["w"]

    want = torch.stack([masks(float(s)) for s in sparsities])
    assert torch.equal(torch.func.vmap(masks)(sparsities), want)


# ---- bounds of the leaves in one competition, against a choice by hand ---------------


def by_hand(scores, limits, held, count):
    """One unit after the other: the least of every leaf first, then the best that its
    leaf still takes.
    """
    order = sorted(
        itertools.chain(
            *([(-s, i, j) for j, s in enumerate(row)] for i, row in enumerate(scores))
        )
    )
    room = [
        [low - had, high - had] for (low, high), had in zip(limits, held, strict=True)
    ]
    first, taken = [], []
    for entry in order:
        if room[entry[1]][1] > 0:
            room[entry[1]][1] -= 1
            taken.append(entry)
    for entry in taken:
        if room[entry[1]][0] > 0:
            room[entry[1]][0] -= 1
            first.append(entry)
    first.sort(key=lambda entry: entry[1:])
    rest = [entry for entry in taken if entry not in first]
    return {entry[1:] for entry in [*first, *rest][: max(count, 0)]}


@given(st.data())
def test_leaves_keep_what_their_bounds_allow(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    scores = [
        data.draw(
            st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=n, max_size=n)
        )
        for n in sizes
    ]
    floor, ceiling = data.draw(
        st.sampled_from([(0.0, 1.0), (0.25, 1.0), (0.0, 0.5), (0.25, 0.75)])
    )
    distribution = sf.budgets.global_(floor=floor, ceiling=ceiling)
    named = {str(i): n for i, n in enumerate(sizes)}
    limits = list(
        distribution.bounds(
            {path: (n,) for path, n in named.items()}, torch.zeros(())
        ).values()
    )
    count = data.draw(st.integers(sum(low for low, _ in limits), sum(sizes)))
    won = bounded_winners(
        distribution,
        named,
        [Entry(torch.tensor([row])) for row in scores],
        count,
        None,
    )
    found = {
        (i, j)
        for i, mask in enumerate(won)
        for j, kept in enumerate(mask[0].tolist())
        if kept
    }
    assert found == by_hand(scores, limits, [0] * len(sizes), count)


@pytest.mark.parametrize(
    "held", [None, [torch.tensor([[True, False, False, False]])] * 2]
)
def test_units_held_already_count_towards_the_bounds(held):
    entries = [
        Entry(torch.arange(4.0)[None], deny=flags) for flags in held or [None] * 2
    ]
    won = bounded_winners(
        sf.budgets.global_(floor=0.5), {"a": 4, "b": 4}, entries, 2, held
    )
    assert sum(int(mask.sum()) for mask in won) == 2
    assert [int(mask.sum()) for mask in won] == ([2, 0] if held is None else [1, 1])
