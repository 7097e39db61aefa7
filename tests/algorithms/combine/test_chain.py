"""Chains: masks of several algorithms at one time intersect."""

import optree
import pytest
import torch
from composed_runs import PARTS, RANDOM, kept, run, slopes

import sparsefn as sf


def test_a_later_part_selects_among_what_the_earlier_kept():
    # Rows first: the second row has the larger sum. Then 2 of 8 elements, both inside
    # it.
    params = {"w": torch.tensor([[9.0, 1.0, 1.0, 1.0], [4.0, 5.0, 6.0, 7.0]])}
    algorithm = sf.chain(
        sf.one_shot(0.5, pattern=sf.patterns.channel(0)), sf.one_shot(0.75)
    )
    state = algorithm.update(algorithm.init(params), params, 0)
    assert kept(state) == {6, 7}
    assert kept(sf.one_shot(0.75).update(algorithm.init(params), params, 0)) == {0, 7}


def test_where_fewer_are_left_than_asked_for_all_of_them_stay():
    params = {"w": torch.tensor([[9.0, 1.0], [4.0, 5.0]])}
    algorithm = sf.chain(sf.gmp(0.75), sf.gmp(0.25))
    assert kept(algorithm.init(params)) == {0}


def test_random_growth_in_a_chain_stays_inside_the_first_mask():
    rows = sf.static(0.5, pattern=sf.patterns.channel(0), key=sf.random.key(1))
    algorithm = sf.chain(
        rows, sf.set(0.75, drop_fraction=0.5, key=sf.random.key(2), when=sf.always())
    )
    params = {"w": torch.randn(8, 8)}
    state = algorithm.init(params)
    allowed, seen = rows.init(params).masks["w"], set()
    for step in range(5):
        state = algorithm.update(state, params, step)
        assert int(state.masks["w"].sum()) == 16
        assert not (state.masks["w"] & ~allowed).any()
        assert not state.params["w"][~state.masks["w"]].any()
        seen.add(frozenset(kept(state)))
    assert len(seen) == 5


def test_the_mask_of_an_earlier_part_moves_on():
    level = sf.schedules.piecewise({0: 0.0, 1: 0.5})
    algorithm = sf.chain(sf.gmp(level, pattern=sf.patterns.channel(0)), sf.ste(0.5))
    params = {"w": torch.tensor([[4.0, 3.0], [1.0, 5.0]])}
    state = algorithm.init(params)
    assert kept(state) == {0, 3}
    state = algorithm.update(state, params, 1)
    assert kept(state) == {0, 1}


def test_a_chain_of_one_is_the_algorithm():
    optimizer = sf.optimizers.adam(0.05)
    for name, make in PARTS.items():
        chained, alone = (
            run(sf.with_optimizer(a, optimizer)) for a in (sf.chain(make()), make())
        )
        assert sf.checkpoint.tree_equal(
            (chained.params, chained.masks), (alone.params, alone.masks)
        ), name


def test_dense_in_a_chain_changes_nothing():
    optimizer = sf.optimizers.sgd(0.1, momentum=0.9)
    alone = run(sf.with_optimizer(PARTS["rigl"](), optimizer))
    every = sf.from_masks(
        optree.tree_map(
            lambda p: (
                torch.ones_like(p, dtype=torch.bool) if p.ndim > 1 else p[0] == p[0]
            ),
            RANDOM,
        )
    )
    for parts in (
        (sf.dense(), PARTS["rigl"]()),
        (PARTS["rigl"](), sf.dense()),
        (PARTS["rigl"](), every),
    ):
        state = run(sf.with_optimizer(sf.chain(*parts), optimizer))
        assert sf.checkpoint.tree_equal(
            (state.params, state.masks), (alone.params, alone.masks)
        )


def test_given_masks_hold_while_the_part_before_moves():
    given = {path: torch.ones((), dtype=torch.bool) for path in RANDOM} | {
        "a": RANDOM["b"].reshape(4, 8) > 0
    }
    given["a"] = torch.cat([given["a"], given["a"][:2]])
    algorithm = sf.chain(PARTS["rigl"](), sf.from_masks(given))
    state, rigl = algorithm.init(RANDOM), PARTS["rigl"]().init(RANDOM)
    masks = set()
    for step in range(6):
        rigl = PARTS["rigl"]().update(
            sf.with_params(rigl, state.params), slopes(RANDOM), step
        )
        state = algorithm.update(state, slopes(RANDOM), step)
        assert torch.equal(state.masks["a"], rigl.masks["a"] & given["a"])
        masks.add(frozenset(kept(state, "a")))
    assert len(masks) > 1


def test_algorithms_that_cannot_be_narrowed_are_intersected():
    # `phases` chooses among all weights; the chain then intersects.
    params = {"w": torch.tensor([[9.0, 1.0, 8.0, 7.0], [4.0, 5.0, 6.0, 0.5]])}
    rows = sf.static(
        0.5, pattern=sf.patterns.channel(0), init="magnitude", pruned="keep"
    )
    assert kept(sf.chain(rows, sf.phases([(0, sf.gmp(0.5))])).init(params)) == {0, 2, 3}
    assert kept(sf.chain(rows, sf.sequence(sf.gmp(0.5))).init(params)) == {0, 1, 2, 3}


def test_chains_nest():
    params = {"w": torch.randn(4, 4)}
    parts = [
        sf.gmp(0.25, pattern=sf.patterns.channel(0)),
        sf.gmp(0.5, pattern=sf.patterns.channel(1)),
        sf.gmp(0.75),
    ]
    flat = sf.chain(*parts).init(params)
    assert int(flat.masks["w"].sum()) == 4
    assert torch.equal(
        sf.chain(parts[0], sf.chain(*parts[1:])).init(params).masks["w"].sum(),
        torch.tensor(4),
    )
    assert torch.equal(
        sf.chain(sf.chain(*parts[:2]), parts[2]).init(params).masks["w"],
        flat.masks["w"],
    )


@pytest.mark.parametrize(
    "second,want",
    [
        (sf.dense(), [2, 1, 4]),
        (sf.from_masks({"w": torch.tensor([[True, True, True, False]])}), [2, 1, 3]),
        (
            sf.static(0.0, init="dense"),
            [2, 1, 2],
        ),  # chosen in init, among what was kept then
    ],
)
def test_a_chain_shows_again_what_a_part_hid(second, want):
    # The first part keeps 2, then 1, then all of 4.
    level = sf.schedules.piecewise({0: 0.5, 1: 0.75, 2: 0.0})
    algorithm = sf.chain(sf.gmp(level, regrow=True, pruned="keep"), second)
    state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    counts = []
    for step in range(3):
        state = algorithm.update(state, {"w": torch.zeros(1, 4)}, step)
        counts.append(int(state.masks["w"].sum()))
    assert counts == want


def test_only_the_last_part_of_a_chain_may_train_pruned_weights():
    sf.chain(sf.dense(), sf.ste(0.5)).init({"w": torch.ones(2, 2)})
    with pytest.raises(
        ValueError,
        match="chain: pruned weights of the algorithm at position 0 train on; put it "
        "last",
    ):
        sf.chain(sf.ste(0.5), sf.dense()).init({"w": torch.ones(2, 2)})


class TestRoom:
    """Groups without open units leave their part of a leaf's count to the other
    groups.
    """

    ROWS = sf.patterns.row_balanced()

    def masks_after(self, algorithm, w):
        return algorithm.update(algorithm.init({"w": w}), {"w": w}, 0).masks["w"]

    def test_a_count_is_spread_over_the_rows_that_are_left(self):
        w = torch.arange(1.0, 25.0).reshape(4, 6)
        rows = sf.one_shot(0.5, pattern=sf.patterns.channel(0))
        inside = [
            sf.one_shot(0.75, pattern=self.ROWS),
            sf.rigl(0.75, pattern=self.ROWS, drop_fraction=0.3, when=sf.always()),
            sf.static(0.75, init="magnitude", pattern=self.ROWS),
        ]
        assert self.masks_after(sf.chain(rows, inside[0]), w).sum(1).tolist() == [
            0,
            0,
            3,
            3,
        ]
        always = sf.static(0.5, init="magnitude", pattern=sf.patterns.channel(0))
        for algorithm in inside[1:]:
            assert sf.chain(always, algorithm).init({"w": w}).masks["w"].sum(
                1
            ).tolist() == [0, 0, 3, 3]
            assert self.masks_after(sf.chain(always, algorithm), w).sum(1).tolist() == [
                0,
                0,
                3,
                3,
            ]

    def test_no_row_gets_more_than_is_open(self):
        w = torch.arange(1.0, 25.0).reshape(4, 6)
        open_ = torch.zeros(4, 6, dtype=torch.bool)
        open_[0, :1], open_[1], open_[3, 2:5] = True, True, True
        found = self.masks_after(
            sf.chain(
                sf.from_masks({"w": open_}), sf.one_shot(1 / 3, pattern=self.ROWS)
            ),
            w,
        )
        assert torch.equal(found, open_)  # 16 are asked for, 10 are open
        found = self.masks_after(
            sf.chain(
                sf.from_masks({"w": open_}), sf.one_shot(0.625, pattern=self.ROWS)
            ),
            w,
        )
        assert found.sum(1).tolist() == [1, 5, 0, 3]

    def test_under_vmap(self):
        w = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
        algorithm = sf.chain(
            sf.one_shot(0.5, pattern=sf.patterns.channel(0)),
            sf.one_shot(0.7, pattern=self.ROWS),
        )
        found = torch.vmap(lambda w: self.masks_after(algorithm, w))(w)
        assert torch.equal(
            found, torch.stack([self.masks_after(algorithm, x) for x in w])
        )
        assert found.sum((1, 2)).tolist() == [7, 7, 7]

    def test_a_pattern_that_fixes_its_count_keeps_it(self):
        w = torch.arange(1.0, 17.0).reshape(2, 8)
        rows = sf.one_shot(0.5, pattern=sf.patterns.channel(0))
        found = self.masks_after(
            sf.chain(rows, sf.one_shot(None, pattern=sf.patterns.nm(1, 4))), w
        )
        assert found.sum(1).tolist() == [0, 2]
