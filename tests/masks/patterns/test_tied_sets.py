"""Tied sets: one unit of rows and columns of several leaves, in every algorithm."""

import math
import pickle

import pytest
import torch

import sparsefn as sf

MLP = sf.patterns.tied([["*.up.weight", 0], ["*.up.bias", 0], ["*.down.weight", 1]])
N = 6  # units of each set


def params(seed=0, layers=2, n=N):
    draw = torch.Generator().manual_seed(seed)
    sizes = {
        "up.weight": (n, 3),
        "up.bias": (n,),
        "down.weight": (4, n),
        "down.bias": (4,),
    }
    return {
        f"{i}.{name}": torch.randn(shape, generator=draw)
        for i in range(layers)
        for name, shape in sizes.items()
    } | {"head.weight": torch.randn(5, 4, generator=draw)}


def units(masks, i=0):
    """The units of a set that are kept, after checking that its leaves agree on
    them.
    """
    up, bias, down = (
        masks[f"{i}.{name}"] for name in ("up.weight", "up.bias", "down.weight")
    )
    assert torch.equal(up, bias[:, None].expand(up.shape)) and torch.equal(
        down, bias.expand(down.shape)
    )
    return bias


def shot(algorithm, weights, step=0):
    return algorithm.update(algorithm.init(weights), weights, step)


ALGORITHMS = {
    "one_shot": sf.one_shot(0.5, pattern=MLP),
    "snip": sf.one_shot(0.5, sf.scores.saliency, pattern=MLP),
    "taylor": sf.one_shot(0.5, sf.scores.sum(sf.scores.movement), pattern=MLP),
    "l2": sf.one_shot(
        0.5,
        pattern=sf.patterns.tied(
            [["*.up.weight", 0], ["*.up.bias", 0], ["*.down.weight", 1]], reduce="l2"
        ),
    ),
    "gmp": sf.gmp(sf.schedules.polynomial(0.0, 0.5, begin=0, end=2), pattern=MLP),
    "iterative": sf.iterative(count=1, pattern=MLP),
    "ste": sf.ste(0.5, pattern=MLP),
    "static": sf.static(0.5, pattern=MLP, key=sf.random.key(1)),
    "supermask": sf.supermask(0.5, pattern=MLP),
    "set": sf.set(0.5, pattern=MLP, when=sf.always(), drop_fraction=0.5),
    "rigl": sf.rigl(0.5, pattern=MLP, when=sf.always(), drop_fraction=0.5),
    "optimizer": sf.with_optimizer(
        sf.rigl(0.5, pattern=MLP, when=sf.always()), sf.optimizers.adam(0.1)
    ),
    "partition": sf.partition(
        [("head.*", sf.dense()), ("*", sf.one_shot(0.5, pattern=MLP))]
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_leaves_of_a_set_agree_and_keep_exactly_the_count(name):
    algorithm, weights = ALGORITHMS[name], params()
    state = algorithm.init(weights)
    for step in range(3):
        state = algorithm.update(state, params(seed=step + 1), step)
    for i in range(2):
        assert int(units(state.masks, i).sum()) == N // 2
    assert state.masks["head.weight"].ndim == state.masks["0.down.bias"].ndim == 0


def test_the_score_of_a_unit_is_that_of_all_its_entries():
    weights = params()
    for reduce, fn in {
        "mean": lambda x: x.mean(1),
        "max": lambda x: x.amax(1),
        "l2": lambda x: x.norm(dim=1),
    }.items():
        algorithm = sf.one_shot(
            0.5,
            pattern=sf.patterns.tied(
                [["*.up.weight", 0], ["*.down.weight", 1]], reduce
            ),
        )
        state = shot(algorithm, weights)
        for i in range(2):
            rows = (
                torch.cat([weights[f"{i}.up.weight"], weights[f"{i}.down.weight"].T], 1)
                .double()
                .abs()
            )
            best = fn(rows).topk(N // 2).indices.sort().values
            assert torch.equal(
                state.masks[f"{i}.up.weight"][:, 0].nonzero()[:, 0], best
            )


def test_ties_go_to_the_lowest_unit_and_nan_never_wins():
    weights = {path: torch.ones_like(leaf) for path, leaf in params(layers=1).items()}
    assert (
        units(shot(sf.one_shot(0.5, pattern=MLP), weights).masks).tolist()
        == [True] * 3 + [False] * 3
    )
    weights["0.down.weight"][2, 0] = math.nan
    assert units(shot(sf.one_shot(0.5, pattern=MLP), weights).masks).tolist() == [
        False,
        *[True] * 3,
        *[False] * 2,
    ]


def test_heads_are_blocks_and_a_fused_leaf_has_parts():
    width, readers = 2, 3
    pattern = sf.patterns.tied(
        [
            ["q", 0, width * readers],
            ["k", 0, width],
            ["qkv", 1, width, 3],
            ["o", -1, width * readers],
        ]
    )
    weights = {
        "q": torch.ones(12, 5),
        "k": torch.ones(4, 5),
        "qkv": torch.ones(5, 12),
        "o": torch.ones(5, 12),
    }
    weights["k"][3] = 2.0  # of the second head
    masks = shot(sf.one_shot(0.5, pattern=pattern), weights).masks
    assert (
        masks["q"][:, 0].tolist() == masks["o"][0].tolist() == [False] * 6 + [True] * 6
    )
    assert masks["k"][:, 0].tolist() == [False] * 2 + [True] * 2
    assert masks["qkv"][0].tolist() == [False, False, True, True] * 3


def test_rows_and_back():
    weights = {"a": torch.randn(4, 6, 2), "b": torch.randn(3)}
    grids = sf.patterns.tied([["a", 1, 1, 2], ["b", 0]]).grids(weights)
    (made,) = grids.sets
    rows = made.joined(weights)
    assert rows.shape == (3, 4 * 2 * 2 + 1) and torch.equal(rows[:, -1], weights["b"])
    for unit in range(3):
        assert torch.equal(
            rows[unit, :-1], weights["a"][:, [unit, unit + 3]].reshape(-1)
        )
        mask = grids.masks([torch.arange(3)[None] == unit], weights, {}, {})["a"]
        assert mask.is_contiguous() and torch.equal(weights["a"][mask], rows[unit, :-1])


def test_a_set_counts_once_in_budgets_under_its_first_path():
    seen = {}

    def counts(shapes, sparsity):
        seen.update(shapes)
        return dict.fromkeys(shapes, 2)

    state = shot(sf.one_shot(0.5, pattern=MLP, distribution=counts), params())
    assert (
        seen == {"0.up.weight": (N,), "1.up.weight": (N,)}
        and int(units(state.masks, 1).sum()) == 2
    )
    weights = params() | {"1.up.weight": params()["1.up.weight"] + 9}
    table = sf.one_shot(0.5, pattern=MLP, distribution=sf.budgets.by_path({"1.*": 0.0}))
    assert (
        units(shot(table, weights).masks, 1).all()
        and int(units(shot(table, weights).masks).sum()) == 3
    )
    whole = shot(
        sf.one_shot(0.5, pattern=MLP, distribution=sf.budgets.global_()), weights
    ).masks
    assert units(whole, 1).all() and not units(whole).any()


def test_where_is_asked_about_the_first_leaf_and_answers_for_the_set():
    masks = shot(sf.one_shot(0.5, pattern=MLP, where="1.up.*"), params()).masks
    assert int(units(masks, 1).sum()) == 3 and masks["0.up.weight"].ndim == 0
    with pytest.warns(UserWarning, match="no leaf is sparsified"):
        sf.one_shot(0.5, pattern=MLP, where=lambda path, leaf: "down" in path).init(
            params()
        )


@pytest.mark.parametrize(
    "where", ["1.down.weight", ["1.up.*"], ["1.down.w*", "1.up.bias"], "1.*"]
)
def test_globs_choose_the_sets_of_all_leaves_that_they_match(where):
    masks = shot(sf.one_shot(0.5, pattern=MLP, where=where), params()).masks
    assert int(units(masks, 1).sum()) == 3 and masks["0.down.weight"].ndim == 0
    with pytest.raises(
        ValueError,
        match="where: no path matches 'head.*'; the paths are '0.down.weight', '0.up",
    ):
        sf.one_shot(0.5, pattern=MLP, where="head.*").init(params())


@pytest.mark.parametrize(
    "as_init",
    [
        lambda masks: masks,
        lambda masks: sf.from_masks(masks),
        lambda masks: lambda _: masks,
    ],
)
def test_given_masks_keep_or_prune_whole_units(as_init):
    weights = params()
    masks = sf.static(0.5, pattern=MLP).init(weights).masks
    given = sf.static(None, init=as_init(masks), pattern=MLP)
    assert sf.checkpoint.tree_equal(given.init(weights).masks, masks)
    dense = {path: torch.tensor(True) for path in masks}
    assert all(
        mask.ndim == 0
        for mask in sf.static(None, init=as_init(dense), pattern=MLP)
        .init(weights)
        .masks.values()
    )
    kept = int(masks["1.up.bias"].nonzero()[0])
    for path, part, kept_at in (
        ("1.down.weight", (2, kept), "1.up.weight"),
        ("1.up.bias", kept, "1.up.weight"),
        ("1.up.weight", (kept, slice(None)), "1.up.bias"),
        ("1.up.weight", (kept, 1), "1.up.weight"),
    ):
        other = masks | {path: masks[path].clone()}
        other[path][part] = False
        text = (
            f"whole units, but unit {kept} of the set of '1.up.weight' is kept at "
            f"'{kept_at}', pruned at '{path}'"
        )
        with pytest.raises(ValueError, match=text.replace(".", r"\.")):
            sf.static(None, init=as_init(other), pattern=MLP).init(weights)
    with pytest.raises(
        ValueError, match="is kept at '0.up.weight', pruned at '0.up.bias'"
    ):
        sf.static(
            None, init=as_init(dense | {"0.up.bias": torch.arange(N) > 0}), pattern=MLP
        ).init(weights)


def test_masks_from_zeros_prune_whole_units_or_are_refused():
    weights = params()
    zeros = sf.static(None, pattern=MLP, init="from_zeros")
    (
        weights["0.up.weight"][2],
        weights["0.up.bias"][2],
        weights["0.down.weight"][:, 2],
    ) = 0, 0, 0
    assert units(zeros.init(weights).masks).tolist() == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]
    weights["1.up.bias"][:] = 0
    with pytest.raises(
        ValueError,
        match="unit 0 of the set of '1.up.weight' is kept at '1.up.weight', pruned at "
        "'1.up",
    ):
        zeros.init(weights)
    with pytest.raises(
        ValueError, match="tied: expected masks that prune whole units, but unit 0"
    ):
        sf.static(0.5, pattern=MLP, init="checkerboard").init(weights)


@pytest.mark.deep
def test_given_masks_under_vmap_and_compile():
    weights = params()
    (
        weights["0.up.weight"][2],
        weights["0.up.bias"][2],
        weights["0.down.weight"][:, 2],
    ) = 0, 0, 0
    algorithm = sf.static(None, init="from_zeros", pattern=MLP)
    compiled = torch.compile(algorithm.init, fullgraph=True, backend="eager")
    masks = algorithm.init(weights).masks
    assert sf.checkpoint.tree_equal(compiled(weights).masks, masks)
    stack = {path: torch.stack([leaf, leaf]) for path, leaf in weights.items()}
    stacked = torch.func.vmap(lambda w: algorithm.init(w).masks["0.up.bias"])(stack)
    assert torch.equal(stacked, torch.stack([masks["0.up.bias"]] * 2))
    given = sf.static(None, init=masks, pattern=MLP)
    stacked = torch.func.vmap(lambda w: given.init(w).params["0.up.bias"])(stack)
    assert torch.equal(
        stacked, torch.stack([given.init(weights).params["0.up.bias"]] * 2)
    )


def test_a_text_for_which_a_member_has_no_leaf_makes_no_set():
    weights = params()
    del weights["0.up.bias"]
    masks = shot(sf.one_shot(0.5, pattern=MLP), weights).masks
    assert masks["0.up.weight"].ndim == 0 and int(units(masks, 1).sum()) == 3


def test_it_selects_among_what_was_kept_before_and_others_among_its_own():
    halves = sf.chain(
        sf.one_shot(0.5, pattern=MLP), sf.one_shot(0.75, where="*.up.weight")
    )
    masks = shot(halves, params()).masks
    assert (
        int(masks["0.up.weight"].sum()) == round(N * 3 / 4)
        and int(masks["0.up.bias"].sum()) == N // 2
    )
    kept = torch.zeros(N, 3, dtype=torch.bool)
    kept[1], kept[4, 0] = True, True
    given = {path: torch.tensor(True) for path in params()} | {"0.up.weight": kept}
    within = sf.chain(sf.from_masks(given), sf.rigl(0.5, pattern=MLP, when=sf.always()))
    masks = shot(within, params()).masks
    assert not (masks["0.up.weight"] & ~kept).any()


@pytest.mark.deep
def test_vmapped_and_compiled_masks_have_the_same_bits():
    algorithm = sf.gmp(0.5, pattern=MLP, init="dense")
    weights = [params(seed) for seed in range(3)]
    stack = {path: torch.stack([w[path] for w in weights]) for path in weights[0]}
    states = torch.func.vmap(lambda w: algorithm.update(algorithm.init(w), w, 1))(stack)
    init, update = (
        torch.compile(fn, fullgraph=True, backend="eager")
        for fn in (algorithm.init, algorithm.update)
    )
    for i, w in enumerate(weights):
        alone = shot(algorithm, w, 1)
        assert sf.checkpoint.tree_equal(update(init(w), w, 1).masks, alone.masks)
        assert sf.checkpoint.tree_equal(
            {path: mask[i] for path, mask in states.masks.items()}, alone.masks
        )


def test_each_leaf_may_be_a_set_of_its_own_as_channels_are():
    weights = {"a": torch.randn(8, 3), "b": torch.randn(4, 5)}
    alone = sf.one_shot(0.5, pattern=sf.patterns.tied([["*", 0]], reduce="sum"))
    assert sf.checkpoint.tree_equal(
        shot(alone, weights).masks,
        shot(sf.one_shot(0.5, pattern=sf.patterns.channel(0)), weights).masks,
    )


def test_leaves_of_several_dtypes_and_without_entries():
    weights = params() | {"0.down.weight": params()["0.down.weight"].bfloat16()}
    assert int(units(shot(sf.one_shot(0.5, pattern=MLP), weights).masks).sum()) == 3
    assert units(shot(sf.one_shot(0.5, pattern=MLP), params(n=0)).masks).shape == (0,)
    empty = sf.patterns.tied([["a", 0], ["b", 1]])
    assert (
        shot(
            sf.one_shot(0.5, pattern=empty),
            {"a": torch.ones(2, 0), "b": torch.ones(0, 2)},
        )
        .masks["a"]
        .ndim
        == 2
    )


def test_it_reads_and_pickles_as_the_call():
    assert (
        repr(sf.patterns.tied([["*.q", 0, 4], ["*.o", 1, 4]], "l2"))
        == "tied([['*.q', 0, 4], ['*.o', 1, 4]], reduce='l2')"
    )
    members = (
        ("*.up.weight", 0, 1, 1),
        ("*.up.bias", 0, 1, 1),
        ("*.down.weight", 1, 1, 1),
    )
    assert pickle.loads(pickle.dumps(MLP)).members == MLP.members == (members,)


@pytest.mark.parametrize(
    "members,error,text",
    [
        (None, TypeError, r"tied: expected a list of members \[glob, dim\], got None"),
        (
            "*.w",
            TypeError,
            r"tied: expected a list of members \[glob, dim\], got '\*\.w'",
        ),
        ([], ValueError, r"tied: expected at least one member \[glob, dim\], got none"),
        (
            ["*.w"],
            TypeError,
            r"tied: expected members such as \['\*\.up_proj\.weight', 0\], got "
            r"'\*\.w': a glob, a dim",
        ),
        (
            [["*.w"]],
            TypeError,
            r"got \['\*\.w'\]: a glob, a dimension, and perhaps a block and the "
            r"number of parts",
        ),
        ([[0, "*.w"]], TypeError, r"got \[0, '\*\.w'\], whose first entry is no glob"),
        (
            [["*.w", "0"]],
            TypeError,
            r"tied: expected the dimension of a member to be an int, got str",
        ),
        (
            [["*.w", 0, 0]],
            ValueError,
            r"tied: expected the block of a member >= 1, got 0",
        ),
        (
            [["*.w", 0, 1, 0]],
            ValueError,
            r"tied: expected the parts of a member >= 1, got 0",
        ),
    ],
)
def test_members_of_another_form_are_refused(members, error, text):
    with pytest.raises(error, match=text):
        sf.patterns.tied(members)


@pytest.mark.parametrize(
    "members,text",
    [
        (
            [["*.upp.weight", 0]],
            r"tied: no path matches '\*\.upp\.weight'; the nearest are '1\.up\.weight'",
        ),
        (
            [["0.up.weight", 0], ["*.down.weight", 1]],
            r"same text in every member, but '0\.up\.weight' has ''; '\*\.down",
        ),
        (
            [["*.up.weight", 2]],
            r"tied: no dimension 2 in shape \(6, 3\) at '0\.up\.weight'",
        ),
        (
            [["*.up.weight", 0, 4]],
            r"expected dimension 0 divisible into blocks of 4, got shape \(6, 3\) at "
            r"'0\.up",
        ),
        (
            [["*.up.weight", 0, 2, 2]],
            r"expected dimension 0 divisible into 2 parts of blocks of 2, got shape "
            r"\(6, 3\)",
        ),
        (
            [["*.up.weight", 0], ["*.up.weight", 1]],
            r"same number of units, but '0\.up\.weight' of shape \(6, 3\) has 6 along "
            r"dimension 0, "
            r"and '0\.up\.weight' of shape \(6, 3\) has 3 along dimension 1",
        ),
        (
            [["*.up.weight", 0], ["*.down.weight", 0]],
            r"same number of units, but '0\.up\.weight' of shape \(6, 3\) has 6 along "
            r"dimension 0, "
            r"and '0\.down\.weight' of shape \(4, 6\) has 4 along dimension 0",
        ),
    ],
)
def test_sets_that_do_not_fit_are_refused(members, text):
    with pytest.raises(ValueError, match=text):
        sf.one_shot(0.5, pattern=sf.patterns.tied(members)).init(params())


def test_a_mask_of_one_tensor_has_no_tied_sets():
    with pytest.raises(
        ValueError,
        match="its units lie in several leaves; give it to an algorithm, as pattern=",
    ):
        sf.masks.topk_mask(torch.ones(3, 3), 1, pattern=MLP)


@pytest.mark.parametrize(
    "make",
    [lambda: sf.snfs(0.5, pattern=MLP), lambda: sf.supermask("bernoulli", pattern=MLP)],
)
def test_what_moves_or_draws_single_entries_refuses_it(make):
    with pytest.raises(
        ValueError,
        match=r"needs unstructured\(\)|needs an unstructured pattern|without pattern",
    ):
        make()


def test_sparse_leaves_outside_of_the_sets_are_refused():
    whole = {path: torch.tensor(True) for path in params()} | {
        "0.down.weight": torch.ones(4, N, dtype=torch.bool)
    }
    algorithm = sf.gmp(0.5, pattern=MLP, init=whole)
    with pytest.raises(
        ValueError,
        match="every sparse leaf to be in a tied set whose leaves are all sparse, but "
        "'0.down",
    ):
        shot(algorithm, params())


def test_dense_phases_may_come_first():
    algorithm = sf.phases([(0, sf.dense()), (1, sf.gmp(0.5, pattern=MLP))])
    state = algorithm.init(params())
    for step in range(3):
        state = algorithm.update(state, params(), step)
    assert int(units(state.masks).sum()) == 3


def test_members_say_where_the_units_of_each_set_lie():
    pattern = sf.patterns.tied([["*.v", -1, 2, 2], ["*.o", 0, [1, -1, 0]]])
    params = {"0.v": torch.ones(3, 8), "0.o": torch.ones(3), "b": torch.ones(2)}
    found = sf.patterns.tied_members(pattern, params)
    members = [(leaf, dim, units.tolist()) for leaf, dim, units in found["0.v"]]
    assert list(found) == ["0.v"]
    assert members == [
        ("0.v", 1, [0, 0, 1, 1, 0, 0, 1, 1]),
        ("0.o", 0, [1, -1, 0]),
    ]
    again = [[leaf, dim, units.tolist()] for leaf, dim, units in found["0.v"]]
    assert sf.patterns.tied_members(sf.patterns.tied(again), params).keys() == {"0.v"}
    assert sf.patterns.tied_members(sf.patterns.block((2,)), params) == {}
    with pytest.raises(TypeError, match=r"tied_members: expected a pattern .*, got 3"):
        sf.patterns.tied_members(3, params)
    with pytest.raises(ValueError, match="members with the same number of units"):
        sf.patterns.tied_members(pattern, params | {"0.v": torch.ones(3, 4)})


def test_members_are_copies():
    pattern = sf.patterns.tied([["a", 0, [0, 1]], ["b", 0, [1, 0]]])
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    for _ in range(2):
        (members,) = sf.patterns.tied_members(pattern, params).values()
        _, _, units = members[0]
        assert units.tolist() == [0, 1]
        units.zero_()
