"""Tied sets that meet in a leaf, lie anyhow, or are of different members: in every
algorithm.
"""

import pickle

import pytest
import torch

import sparsefn as sf
from sparsefn.core.tree import flatten

# conv0 -> norm -> relu -> conv1 -> linear: the kernel of conv1 is in the set of its
# rows and in that of its columns.
FIRST = [["conv0.weight", 0], ["norm.weight", 0], ["norm.bias", 0], ["conv1.weight", 1]]
SECOND = [["conv1.weight", 0], ["conv1.bias", 0], ["fc.weight", 1, 4]]
NET = sf.patterns.tied([FIRST, SECOND])


def params(seed=0):
    draw = torch.Generator().manual_seed(seed)
    sizes = {
        "conv0.weight": (8, 3, 3, 3),
        "norm.weight": (8,),
        "norm.bias": (8,),
        "conv1.weight": (6, 8, 3, 3),
    }
    sizes |= {"conv1.bias": (6,), "fc.weight": (5, 24), "fc.bias": (5,)}
    return {path: torch.randn(size, generator=draw) for path, size in sizes.items()}


def kept_of(masks):
    """The units that each set keeps, after checking that every mask is where all units
    of an entry are kept.
    """
    first, second = masks["norm.weight"], masks["conv1.bias"]
    assert torch.equal(masks["norm.bias"], first)
    assert torch.equal(
        masks["conv0.weight"], first[:, None, None, None].expand(8, 3, 3, 3)
    )
    assert torch.equal(
        masks["conv1.weight"],
        (second[:, None] & first)[..., None, None].expand(6, 8, 3, 3),
    )
    assert torch.equal(masks["fc.weight"], second.repeat_interleave(4).expand(5, 24))
    assert masks["fc.bias"].ndim == 0
    return int(first.sum()), int(second.sum())


def run(algorithm, steps=4, weights=None):
    state = algorithm.init(params() if weights is None else weights)
    for step in range(steps):
        state = algorithm.update(state, params(step + 1), step)
    return state


SQUARE = sf.patterns.tied([FIRST, SECOND], reduce=lambda rows: rows.sum(-1).square())
ALGORITHMS = {
    "gmp": sf.gmp(0.5, pattern=NET),
    "gmp steps": sf.gmp(0.5, steps=4, pattern=NET),
    "one_shot": sf.one_shot(0.5, pattern=NET),
    "snip": sf.one_shot(0.5, sf.scores.saliency, pattern=NET),
    "taylor": sf.one_shot(0.5, sf.scores.sum(sf.scores.movement), pattern=SQUARE),
    "ste": sf.ste(0.5, pattern=NET),
    "static": sf.static(0.5, pattern=NET),
    "supermask": sf.supermask(0.5, pattern=NET),
    "rigl": sf.rigl(0.5, pattern=NET, when=sf.always(), drop_fraction=0.5),
    "rigl restart": sf.rigl(
        0.5, pattern=NET, when=sf.always(), restart_dropped=True, drop_fraction=1.0
    ),
    "rigl exclude": sf.rigl(
        0.5, pattern=NET, when=sf.always(), exclude_dropped=True, drop_fraction=1.0
    ),
    "set": sf.set(0.5, pattern=NET, when=sf.always(), drop_fraction=0.5),
    "iterative": sf.iterative(0.5, pattern=NET, when=sf.at([0])),
    "optimizer": sf.with_optimizer(
        sf.rigl(0.5, pattern=NET, when=sf.always()), sf.optimizers.adam(0.1)
    ),
    "partition": sf.partition(
        [("*fc.bias", sf.dense()), ("*", sf.one_shot(0.5, pattern=NET))]
    ),
    "phases": sf.phases([(0, sf.dense()), (1, sf.gmp(0.5, pattern=NET))]),
    "by score": sf.gmp(
        sf.counts.above(0.7), pattern=NET, init="dense", score=sf.scores.magnitude
    ),
}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "by score"])
def test_each_set_keeps_exactly_its_count(name):
    assert kept_of(run(ALGORITHMS[name]).masks) == (4, 3)


@pytest.mark.parametrize("init", ["dense", "random", "magnitude"])
def test_counts_are_exact_from_the_start_on(init):
    algorithm = sf.gmp(
        sf.schedules.polynomial(0.25, 0.75, begin=0, end=3), pattern=NET, init=init
    )
    state = algorithm.init(params())
    seen = [kept_of(state.masks)] if init != "dense" else []
    for step in range(4):
        new = algorithm.update(state, params(step), step)
        assert all(
            torch.equal(new.masks[p] & state.masks[p].expand_as(m), m)
            for p, m in new.masks.items()
        )
        state = new
        seen.append(kept_of(state.masks))
    counts = [
        (8 - round(8 * s), 6 - round(6 * s)) for s in (0.25, 0.6019, 0.7315, 0.75)
    ]
    assert seen == counts[:1] * (len(seen) - 3) + counts[1:]


def test_scores_decide_counts_and_each_set_keeps_a_unit():
    assert kept_of(run(ALGORITHMS["by score"], 1).masks) == (8, 5)
    nothing = sf.gmp(
        sf.counts.above(99.0), pattern=NET, init="dense", score=sf.scores.magnitude
    )
    assert kept_of(run(nothing).masks) == (1, 1)


@pytest.mark.parametrize("score", [sf.scores.magnitude, sf.scores.gradient])
def test_the_best_units_are_kept(score):
    weights, grads = params(), params(1)
    state = sf.one_shot(0.5, score, pattern=NET)
    state = state.update(state.init(weights), grads, 0)
    of = {
        path: (weights if score is sf.scores.magnitude else grads)[path].double().abs()
        for path in weights
    }
    first = [
        of["conv0.weight"].flatten(1),
        of["norm.weight"][:, None],
        of["norm.bias"][:, None],
    ]
    rows = torch.cat([*first, of["conv1.weight"].transpose(0, 1).flatten(1)], 1).mean(1)
    assert torch.equal(
        state.masks["norm.bias"].nonzero()[:, 0], rows.topk(4).indices.sort().values
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        sf.one_shot(1.0, pattern=NET),
        sf.gmp(1.0, pattern=NET),
        sf.rigl(1.0, pattern=NET, when=sf.always(), drop_fraction=1.0),
        sf.rigl(
            "current",
            pattern=NET,
            when=sf.always(),
            drop_fraction=1.0,
            grow_count=lambda s, f, n: n * 0,
        ),
        sf.iterative(1.0, pattern=NET, when=sf.at([0])),
        sf.one_shot(1.0, pattern=NET, distribution=sf.budgets.global_()),
        sf.iterative(
            count=14, pattern=NET, distribution=sf.budgets.global_(), when=sf.at([0])
        ),
        sf.rigl(
            1.0,
            pattern=NET,
            when=sf.always(),
            distribution=sf.budgets.global_(),
            drop_fraction=1.0,
        ),
        sf.one_shot(
            torch.tensor(1.0), pattern=NET, distribution=sf.budgets.global_(ceiling=0.1)
        ),
    ],
    ids=repr,
)
def test_where_sets_meet_one_unit_of_each_stays(algorithm):
    assert kept_of(run(algorithm).masks) == (1, 1)


def test_no_set_starves_in_one_competition():
    weights = params()
    for path in ("conv1.bias", "fc.weight"):
        weights[path] *= 1e-6
    weights["conv1.weight"] *= 1e-6
    whole = sf.one_shot(6 / 14, pattern=NET, distribution=sf.budgets.global_())
    assert kept_of(run(whole, 1, weights).masks) == (7, 1)
    bounded = sf.one_shot(
        6 / 14, pattern=NET, distribution=sf.budgets.global_(floor=0.5, ceiling=0.75)
    )
    assert kept_of(run(bounded, 1, weights).masks) == (5, 3)
    grown = sf.rigl(
        6 / 14,
        pattern=NET,
        distribution=sf.budgets.global_(),
        when=sf.always(),
        drop_fraction=0.5,
    )
    assert sum(kept_of(run(grown).masks)) == 8


def test_sets_that_do_not_meet_may_keep_nothing():
    apart = sf.patterns.tied([FIRST[:3], SECOND])
    masks = run(sf.one_shot(1.0, pattern=apart), 1).masks
    assert not any(mask.any() for path, mask in masks.items() if path != "fc.bias")


def test_distributions_see_each_set_by_name():
    seen = {}

    def counts(shapes, sparsity):
        seen.update(shapes)
        return dict.fromkeys(shapes, 2)

    assert kept_of(
        run(sf.one_shot(0.5, pattern=NET, distribution=counts), 1).masks
    ) == (2, 2)
    assert seen == {"conv0.weight": (8,), "conv1.weight": (6,)}
    table = sf.budgets.by_path({"conv1.weight": 0.0})
    assert kept_of(run(sf.one_shot(0.5, pattern=NET, distribution=table), 1).masks) == (
        4,
        6,
    )


def test_sets_that_begin_with_one_leaf_have_names_of_their_own():
    # Rows are heads of widths: both are sets of the same leaves, along the same
    # dimension.
    heads, widths = (
        [["q", 0, numbers], ["o", 1, numbers]]
        for numbers in ([0, 0, 0, 1, 1, 1], [0, 1, 2] * 2)
    )
    pattern = sf.patterns.tied([heads, widths, [["q", 1]]])
    weights = {"q": torch.randn(6, 4), "o": torch.randn(4, 6)}
    assert {name: units.rows for name, units in pattern.sets(weights).items()} == {
        "q": (1, 2),
        "q:1": (1, 3),
        "q:2": (1, 4),
    }
    table = sf.budgets.by_path({"q": 0.5, "q:1": 1 / 3, "q:2": 0.75})
    for algorithm in (
        sf.one_shot(0.5, pattern=pattern, distribution=table),
        sf.static(0.5, pattern=pattern, distribution=table, init="bernoulli"),
    ):
        masks = algorithm.update(algorithm.init(weights), weights, 0).masks
        assert masks["q"].any(1).reshape(2, 3).any(1).sum() <= 2
    masks = sf.gmp(0.5, pattern=pattern, distribution=table).init(weights).masks
    rows = masks["q"].any(1).reshape(2, 3)
    assert (
        int(rows.any(1).sum()),
        int(rows.any(0).sum()),
        int(masks["q"].any(0).sum()),
    ) == (1, 2, 1)
    assert torch.equal(masks["q"], masks["q"].any(1)[:, None] & masks["q"].any(0))
    assert torch.equal(masks["o"], masks["q"].any(1).expand(4, 6))


def test_a_leaf_twice_in_one_set():
    # A residual stream: rows and columns of the kernels between are the same channels.
    stream = sf.patterns.tied([["stem", 0], ["a.w", 0], ["a.w", 1], ["head", 1]])
    weights = {
        "stem": torch.randn(6, 3),
        "a.w": torch.randn(6, 6),
        "head": torch.randn(2, 6),
    }
    algorithm = sf.gmp(0.5, pattern=stream)
    masks = algorithm.update(algorithm.init(weights), weights, 0).masks
    kept = masks["stem"][:, 0]
    assert int(kept.sum()) == 3 and torch.equal(masks["a.w"], kept[:, None] & kept)
    rows = (
        torch.cat(
            [weights["stem"], weights["a.w"], weights["a.w"].T, weights["head"].T], 1
        )
        .double()
        .abs()
        .mean(1)
    )
    assert torch.equal(kept.nonzero()[:, 0], rows.topk(3).indices.sort().values)


def test_given_masks_are_those_of_whole_units():
    masks = sf.static(0.5, pattern=NET).init(params()).masks
    given = sf.static(None, init=masks, pattern=NET)
    assert sf.checkpoint.tree_equal(given.init(params()).masks, masks)
    row, column = (
        int(masks[path].nonzero()[0]) for path in ("conv1.bias", "norm.bias")
    )
    for path, at, text in (
        (
            "conv1.weight",
            (row, column, 1, 1),
            f"unit {column} of the set of 'conv0.weight' is kept at 'conv0.weight'",
        ),
        (
            "conv1.bias",
            row,
            f"unit {row} of the set of 'conv1.weight' is kept at 'conv1.weight', "
            "pruned at 'conv1.bi",
        ),
        (
            "norm.bias",
            column,
            f"unit {column} of the set of 'conv0.weight' is kept at 'conv0.weight', "
            "pruned at 'nor",
        ),
    ):
        other = masks | {path: masks[path].clone()}
        other[path][at] = False
        with pytest.raises(
            ValueError, match="tied: expected masks that prune whole units, but " + text
        ):
            sf.static(None, init=other, pattern=NET).init(params())
    # All units of one set: entries of the other are there in leaves that the two do not
    # share.
    masks |= {
        "conv1.weight": torch.zeros(6, 8, 3, 3) > 0,
        "conv1.bias": torch.zeros(6) > 0,
    }
    NET.check_masks(masks | {"fc.weight": torch.zeros(5, 24) > 0}, params())


def test_where_chooses_sets_whose_leaves_no_other_set_has():
    masks = run(sf.one_shot(0.5, pattern=NET, where="norm.*"), 1).masks
    assert masks["conv1.bias"].ndim == 0 and int(masks["norm.bias"].sum()) == 4
    assert torch.equal(
        masks["conv1.weight"], masks["norm.bias"][:, None, None].expand(6, 8, 3, 3)
    )
    assert kept_of(
        run(sf.one_shot(0.5, pattern=NET, where="conv1.weight"), 1).masks
    ) == (4, 3)
    only = sf.one_shot(
        0.5, pattern=NET, where=lambda path, leaf: path == "conv1.weight"
    )
    masks = run(only, 1).masks
    assert masks["norm.bias"].ndim == 0 and int(masks["conv1.bias"].sum()) == 3
    weights = {f"{i}.w": torch.randn(4, 4) for i in range(4)}
    chain = sf.patterns.tied([[[f"{i}.w", 0], [f"{i + 1}.w", 1]] for i in range(3)])
    with pytest.raises(
        ValueError,
        match="where: expected the tied set of '1.w' to be chosen, too: each of its "
        "leaves",
    ):
        sf.one_shot(0.5, pattern=chain, where=["0.w", "3.w"]).init(weights)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["gmp", "rigl", "supermask", "by score"])
def test_vmapped_and_compiled_masks_have_the_same_bits(name):
    algorithm, weights = ALGORITHMS[name], [params(seed) for seed in range(3)]
    stack = {path: torch.stack([w[path] for w in weights]) for path in weights[0]}
    states = torch.func.vmap(
        lambda w: algorithm.update(algorithm.init(w), w, 1), randomness="different"
    )(stack)
    init, update = (
        torch.compile(fn, fullgraph=True, backend="eager")
        for fn in (algorithm.init, algorithm.update)
    )
    for i, w in enumerate(weights):
        alone = algorithm.update(algorithm.init(w), w, 1)
        assert sf.checkpoint.tree_equal(update(init(w), w, 1).masks, alone.masks)
        assert sf.checkpoint.tree_equal(
            {path: mask[i] for path, mask in states.masks.items()}, alone.masks
        )


NUMBERS = {"a": [2, 0, 0, -1, 1], "b": [0, 1, 2], "c": [1, 2, 2, 0, -1, -1, 0]}
ANYHOW = sf.patterns.tied([["a", 0, NUMBERS["a"]], ["b", -1], ["c", 1, NUMBERS["c"]]])


def anyhow(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        p: torch.randn(s, generator=draw)
        for p, s in {"a": (5, 2), "b": (4, 3), "c": (3, 7)}.items()
    }


@pytest.mark.parametrize(
    "reduce", ["mean", "sum", "max", "min", "l2", lambda rows: rows.sum(-1).square()]
)
def test_units_by_numbers_pool_their_own_entries(reduce):
    weights = anyhow()
    fns = {
        "mean": torch.mean,
        "sum": torch.sum,
        "max": torch.amax,
        "min": torch.amin,
        "l2": torch.norm,
    }
    fn = fns.get(reduce, lambda x: x.sum().square())
    entries = [
        torch.cat(
            [
                weights[p].movedim(d, 0)[torch.tensor(n) == unit].flatten()
                for p, d, n in (
                    ("a", 0, NUMBERS["a"]),
                    ("b", 1, NUMBERS["b"]),
                    ("c", 1, NUMBERS["c"]),
                )
            ]
        )
        for unit in range(3)
    ]
    best = torch.stack([fn(x.double().abs()) for x in entries]).argmax()
    pattern = sf.patterns.tied(
        [["a", 0, NUMBERS["a"]], ["b", -1], ["c", 1, NUMBERS["c"]]], reduce
    )
    algorithm = sf.one_shot(2 / 3, pattern=pattern)
    masks = algorithm.update(algorithm.init(weights), weights, 0).masks
    for path, dim in (("a", 0), ("b", 1), ("c", 1)):
        numbers = torch.tensor(NUMBERS[path])
        line = (numbers == best) | (numbers < 0)
        assert torch.equal(
            masks[path],
            line.reshape([-1 if d == dim else 1 for d in range(2)]).expand_as(
                masks[path]
            ),
        )


@pytest.mark.deep
@pytest.mark.parametrize(
    "make", [sf.gmp, sf.rigl, sf.ste, sf.static], ids=lambda make: make.__name__
)
def test_units_by_numbers_in_algorithms_vmapped_and_compiled(make):
    algorithm = make(1 / 3, pattern=ANYHOW)
    weights = [anyhow(seed) for seed in range(3)]
    stack = {path: torch.stack([w[path] for w in weights]) for path in weights[0]}
    states = torch.func.vmap(lambda w: algorithm.update(algorithm.init(w), w, 0))(stack)
    update = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    for i, w in enumerate(weights):
        masks = algorithm.update(algorithm.init(w), w, 0).masks
        assert (
            int(masks["b"][0].sum()) == 2
            and masks["a"][3].all()
            and masks["c"][:, 4:6].all()
        )
        assert torch.equal(
            masks["a"][[0, 1, 4]], masks["b"][0, [2, 0, 1], None].expand(3, 2)
        )
        assert torch.equal(masks["c"][:, [3, 0, 1]], masks["b"][:3])
        assert sf.checkpoint.tree_equal(update(algorithm.init(w), w, 0).masks, masks)
        assert sf.checkpoint.tree_equal(
            {path: mask[i] for path, mask in states.masks.items()}, masks
        )


def test_regular_numbers_are_blocks_and_parts_to_the_bit():
    weights = {"qkv": torch.randn(5, 12), "o": torch.randn(4, 5), "b": torch.randn(2)}
    regular = [["qkv", 1, 2, 3], ["o", 0, 2], ["b", 0]]
    numbers = [["qkv", 1, [0, 0, 1, 1] * 3], ["o", 0, [0, 0, 1, 1]], ["b", 0, [0, 1]]]
    first, second = (
        sf.patterns.tied(members).sets(weights)["qkv"] for members in (regular, numbers)
    )
    assert torch.equal(
        first.joined(weights), second.read(weights, lambda units, rows: rows[None])[0]
    )
    states = [
        sf.rigl(0.5, pattern=sf.patterns.tied(members, "l2")).init(weights)
        for members in (regular, numbers)
    ]
    assert sf.checkpoint.tree_equal(*[state.masks for state in states])


def test_exact_names_come_before_globs():
    weights = {
        "a[0].w": torch.randn(4, 2),
        "a0.w": torch.randn(3, 2),
        "b*": torch.randn(2, 4),
        "bc": torch.randn(1, 1),
    }
    algorithm = sf.one_shot(0.5, pattern=sf.patterns.tied([["a[0].w", 0], ["b*", 1]]))
    masks = algorithm.update(algorithm.init(weights), weights, 0).masks
    assert (
        torch.equal(masks["a[0].w"][:, 0], masks["b*"][0])
        and int(masks["b*"][0].sum()) == 2
    )
    assert masks["a0.w"].ndim == masks["bc"].ndim == 0


def test_units_that_other_sets_may_take_whole_are_refused():
    weights = {"w": torch.randn(4, 2), "b": torch.randn(4), "c": torch.randn(4)}
    with pytest.raises(
        ValueError,
        match="a leaf of the set of 'w' with entries for all combinations of units of "
        "its",
    ):
        sf.one_shot(
            0.5,
            pattern=sf.patterns.tied([[["w", 0]], [["w", 0, [3, 2, 1, 0]], ["c", 0]]]),
        ).init(weights)
    algorithm = sf.one_shot(
        0.5,
        pattern=sf.patterns.tied(
            [[["w", 0], ["b", 0]], [["w", 0, [3, 2, 1, 0]], ["c", 0]]]
        ),
    )
    masks = algorithm.update(algorithm.init(weights), weights, 0).masks
    assert masks["b"].sum() == masks["c"].sum() == 2
    assert torch.equal(masks["w"][:, 0], masks["b"] & masks["c"].flip(0))


def test_families_share_wildcards_each_for_itself():
    weights = {
        f"{i}.{p}": torch.randn(4, 4)
        for i in range(2)
        for p in ("up", "down", "q", "o")
    }
    pattern = sf.patterns.tied(
        [[["*.up", 0], ["*.down", 1]], [["*.q", 0, 2], ["*.o", 1, 2]]]
    )
    assert list(pattern.sets(weights)) == ["0.up", "1.up", "0.q", "1.q"]
    algorithm = sf.one_shot(0.5, pattern=pattern)
    masks = algorithm.update(algorithm.init(weights), weights, 0).masks
    assert all(int(mask.sum()) == 8 for mask in masks.values())
    with pytest.raises(ValueError, match=r"tied: no path matches '\*\.k'"):
        sf.one_shot(0.5, pattern=sf.patterns.tied([[["*.up", 0]], [["*.k", 0]]])).init(
            weights
        )


def test_it_reads_pickles_and_is_written_as_the_call():
    pattern = sf.patterns.tied([[["a", 0, [1, 0, -1]], ["b", 1]], (("b", 0),)], "l2")
    assert (
        repr(pattern)
        == "tied([[['a', 0, [1, 0, -1]], ['b', 1]], [['b', 0]]], reduce='l2')"
    )
    assert pickle.loads(pickle.dumps(pattern)).members == pattern.members
    assert pattern.members == (
        (("a", 0, (1, 0, -1), 1), ("b", 1, 1, 1)),
        (("b", 0, 1, 1),),
    )
    assert pattern == sf.patterns.tied(
        [[["a", 0, [1, 0, -1]], ["b", 1]], [["b", 0]]], "l2"
    )
    assert pattern != sf.patterns.tied(
        [[["a", 0, [1, 0, 0]], ["b", 1]], [["b", 0]]], "l2"
    )
    made = pickle.loads(pickle.dumps(ALGORITHMS["gmp"]))
    assert sf.checkpoint.tree_equal(run(made).masks, run(ALGORITHMS["gmp"]).masks)


def test_reports_count_the_entries():
    state = run(ALGORITHMS["gmp"])
    rows = {row.path: row for row in sf.report.summary(state).rows}
    assert rows["conv1.weight"].kept == 4 * 3 * 9 and rows["norm.bias"].kept == 4
    assert flatten(state.masks)[0].keys() == rows.keys()


@pytest.mark.parametrize(
    "members,error,text",
    [
        (
            [["a", 0, [0, 2, 0]]],
            ValueError,
            "tied: expected each unit among unit numbers, got none of unit 1",
        ),
        (
            [["a", 0, [-1, -1]]],
            ValueError,
            "tied: expected each unit among unit numbers, got none of unit 0",
        ),
        (
            [["a", 0, []]],
            ValueError,
            "tied: expected each unit among unit numbers, got none of unit 0",
        ),
        (
            [["a", 0, [0, -2]]],
            ValueError,
            "tied: expected unit numbers from 0 on, and -1 for none, got -2",
        ),
        (
            [["a", 0, [0, True]]],
            ValueError,
            "tied: expected unit numbers from 0 on, and -1 for none, got True",
        ),
        (
            [["a", 0, [0, 1.0]]],
            ValueError,
            "tied: expected unit numbers from 0 on, and -1 for none, got 1.0",
        ),
        (
            [["a", 0, [0, 1], 2]],
            TypeError,
            "tied: expected the block of a member to be an int, got list",
        ),
        (
            [[["a", 0]], []],
            TypeError,
            r"tied: expected members such as .*, got \[\['a', 0\]\]",
        ),
        (
            [[["a", 0]], ["b", 0]],
            TypeError,
            r"tied: expected members such as .*, got \[\['a', 0\]\]",
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
            [["a", 0, [0, 1]]],
            "expected a unit number for each of 5 indices along dimension 0 of 'a', "
            "got 2",
        ),
        (
            [["a", 0, [0, 1, 1, 0, -1]], ["b", 1]],
            r"'a' of shape \(5, 2\) has 2 along dimension 0, and 'b' of shape",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(members, text):
    with pytest.raises(ValueError, match=text):
        sf.one_shot(0.5, pattern=sf.patterns.tied(members)).init(anyhow())


def test_names_of_sets_do_not_depend_on_which_are_pruned():
    pattern, sizes = (
        sf.patterns.tied([[["a", 0], ["b", 0]], [["a", 1], ["c", 0]]]),
        {"a": (4, 3), "b": (4,), "c": (3,)},
    )
    weights = {path: torch.randn(size) for path, size in sizes.items()}
    assert list(pattern.sets(weights)) == ["a", "a:1"]
    assert list(pattern.sets({path: weights[path] for path in ("a", "c")})) == ["a:1"]
