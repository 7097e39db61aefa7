"""Scores of the units of tied sets: what they are made of, what is remembered of them,
and who takes them.
"""

import pickle
import re

import pytest
import torch

import sparsefn as sf
from sparsefn.masks.scores.score_types import OfUnits
from sparsefn.masks.scores.unit_values import scored_units

# The kernel b has its columns in the first set and its rows in the second; c has more
# entries for some units.
NET = sf.patterns.tied(
    [[["a", 0], ["b", 1]], [["b", 0], ["c", 1, [0, 1, 2, 2, 1, 0]], ["n", 0]]]
)
SPARSE = ["a", "b", "c", "n"]


def params(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": (4, 3), "b": (3, 4), "c": (2, 6), "n": (3,), "free": (3,)}
    return {
        path: torch.randn(size, generator=generator).to(dtype)
        for path, size in sizes.items()
    }


def by_force(p, fn):
    first = [torch.cat([p["a"][u], p["b"][:, u]]) for u in range(4)]
    columns = [[0, 5], [1, 4], [2, 3]]
    second = [
        torch.cat([p["b"][u], p["c"][:, columns[u]].flatten(), p["n"][u : u + 1]])
        for u in range(3)
    ]
    return {
        "a": torch.stack([fn(row) for row in first]),
        "b": torch.stack([fn(row) for row in second]),
    }


def squared(rows):
    return rows.sum(-1).square()


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_a_unit_has_all_of_its_entries():
    p, algorithm = params(), sf.one_shot(0.5, pattern=NET)
    score = sf.scores.by_unit(lambda state, grads, step: state.params, NET, squared)
    same(score(algorithm.init(p), (), 0), by_force(p, squared))
    same(
        score(algorithm.init(params(dtype=torch.bfloat16)), (), 0),
        by_force(params(dtype=torch.bfloat16), lambda x: squared(x.float())),
    )
    apart = sf.scores.distance(1, NET)(algorithm.init(p), (), 0)
    rows = {
        name: torch.stack(list(by_force(p, lambda row: row)[name])) for name in apart
    }
    same(apart, {name: torch.cdist(x, x, p=1.0).sum(1) for name, x in rows.items()})


def test_sets_that_are_not_sparsified_score_0():
    two = sf.patterns.tied([[["a", 0]], [["n", 0], ["free", 0]]])
    state = sf.one_shot(0.5, pattern=two, where="a").init(params())
    for score in (
        sf.scores.by_unit(sf.scores.magnitude, two, squared),
        sf.scores.distance(pattern=two),
    ):
        found = score(state, (), 0)
        assert found["a"].all() and found["n"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "memory", [sf.scores.sum, sf.scores.mean, lambda score: sf.scores.ema(score, 0.5)]
)
def test_memories_hold_a_number_for_each_unit(memory):
    score = memory(sf.scores.by_unit(sf.scores.movement, NET, squared))
    assert scored_units(score) and scored_units(sf.scores.absolute(score))
    algorithm = sf.one_shot(0.5, score, when=sf.at([1]), pattern=NET)
    state, seen = algorithm.init(params()), []
    shapes = {
        name: tuple(x.shape)
        for name, x in score.value(state.scores["score"], state, (), 0).items()
    }
    assert shapes == {"a": (4,), "b": (3,)}
    for step in range(2):
        grads = params(step + 1)
        seen.append(
            by_force({path: x * grads[path] for path, x in params().items()}, squared)
        )
        state = algorithm.update(state, grads, step)
    weights = {sf.scores.sum: (1, 1), sf.scores.mean: (0.5, 0.5)}.get(
        memory, (0.25, 0.5)
    )
    want = {
        name: weights[0] * seen[0][name] + weights[1] * seen[1][name]
        for name in seen[0]
    }
    same(score.value(state.scores["score"], state, (), 1), want)
    for name, mask in (("a", state.masks["a"][:, 0]), ("b", state.masks["n"])):
        best = want[name].argsort(descending=True)[: len(mask) - round(len(mask) / 2)]
        assert mask.nonzero().flatten().tolist() == sorted(best.tolist())


def test_a_score_with_memory_inside():
    score = sf.scores.by_unit(
        sf.scores.sum(sf.scores.gradient), NET, lambda rows: rows.sum(-1)
    )
    algorithm = sf.one_shot(0.5, score, when=sf.at([1]), pattern=NET)
    state = algorithm.init(params())
    for step in range(2):
        state = algorithm.update(state, params(step), step)
    total = {path: params(0)[path].abs() + params(1)[path].abs() for path in params()}
    same(
        score.value(state.scores["score"], state, (), 1),
        by_force(total, lambda row: row.sum()),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda s, pattern: sf.gmp(
            0.5,
            score=s,
            pattern=pattern,
            distribution=sf.budgets.global_(),
            init="dense",
        ),
        lambda s, pattern: sf.gmp(sf.counts.above(4.0), score=s, pattern=pattern),
        lambda s, pattern: sf.iterative(count=1, score=s, pattern=pattern),
        lambda s, pattern: sf.rigl(
            0.5, drop=s, pattern=pattern, when=sf.always(), drop_fraction=0.5
        ),
        lambda s, pattern: sf.ste(0.5, score=s, pattern=pattern),
    ],
    ids=["global", "by score", "iterative", "rigl", "ste"],
)
def test_algorithms_prune_by_values_as_by_a_pool_of_them(make):
    pooled = sf.patterns.tied(
        [[["a", 0], ["b", 1]], [["b", 0], ["c", 1, [0, 1, 2, 2, 1, 0]], ["n", 0]]],
        "sum",
    )
    states = []
    for score, pattern in (
        (sf.scores.by_unit(sf.scores.magnitude, NET, lambda rows: rows.sum(-1)), NET),
        (sf.scores.magnitude, pooled),
    ):
        algorithm = make(score, pattern)
        states.append(algorithm.update(algorithm.init(params()), params(1), 0))
    for path in SPARSE:
        assert torch.equal(states[0].masks[path], states[1].masks[path])
    assert int(states[0].masks["b"].sum()) < 12


@pytest.mark.deep
def test_vmap_compile_and_pickle():
    algorithm = sf.methods.taylor(2, pattern=NET, when=sf.always(), where=SPARSE)
    grads = [params(seed) for seed in (1, 2)]
    states = [algorithm.init(params(seed)) for seed in (3, 4)]
    want = [
        algorithm.update(state, g, 0) for state, g in zip(states, grads, strict=True)
    ]
    stacked = sf.ensemble.stack(states), sf.ensemble.stack(grads)
    found = sf.ensemble.unstack(
        torch.func.vmap(lambda state, g: algorithm.update(state, g, 0))(*stacked)
    )
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    found.append(compiled(states[0], grads[0], torch.tensor(0)))
    again = pickle.loads(pickle.dumps(algorithm))
    found.append(again.update(states[0], grads[0], 0))
    for one, other in zip(found, [*want, want[0], want[0]], strict=True):
        for path in SPARSE:
            assert torch.equal(one.masks[path], other.masks[path])
        assert torch.equal(
            one.scores["score"]["sum"]["b"], other.scores["score"]["sum"]["b"]
        )
    score = pickle.loads(
        pickle.dumps(sf.scores.by_unit(sf.scores.magnitude, NET, squared))
    )
    assert isinstance(score, OfUnits) and score.pattern == NET


def test_errors():
    score = sf.scores.by_unit(sf.scores.magnitude, NET, lambda rows: rows.sum())
    state = sf.one_shot(0.5, pattern=NET).init(params())
    with pytest.raises(
        ValueError,
        match=r"by_unit: expected .* to give shape \(4,\) of \(4, 6\) at 'a', got "
        r"shape \(\)",
    ):
        score(state, (), 0)
    text = (
        "score: expected the algorithm and its score to have one pattern, but the "
        "score has values of the units of t"
    )
    for pattern in (sf.patterns.channel(0), sf.patterns.tied([["a", 0]])):
        with pytest.raises(ValueError, match=re.escape(text)):
            sf.one_shot(0.5, score, pattern=pattern)
    for name in ("sampled", "ranked"):
        with pytest.raises(
            ValueError,
            match=f"{name}: expected a score with a value for each entry, got by_unit",
        ):
            getattr(sf.scores, name)(score)
    with pytest.raises(
        ValueError,
        match="by_unit: expected a score with a value for each entry, got by_unit",
    ):
        sf.scores.by_unit(score, NET, squared)
    uneven = sf.patterns.tied([["a", 0, [0, 1, 1, 1]], ["n", 0, [0, 1, -1]]])
    text = (
        "distance: expected units that have as many entries in each leaf, but "
        "units of the tied set of 'a' have not"
    )
    with pytest.raises(ValueError, match=text):
        sf.scores.distance(pattern=uneven)(
            sf.one_shot(0.5, pattern=uneven, where="a").init(params()), (), 0
        )
    with pytest.raises(
        TypeError,
        match=r"distance: expected pattern to be one such as sf.patterns.channel\(0\), "
        r"got 0",
    ):
        sf.scores.distance(2, 0)
    with pytest.raises(
        ValueError,
        match=r"distance: expected whole units of block.* got shape \(4, 3\) at 'a'",
    ):
        blocks = sf.patterns.block((2, 2))
        sf.scores.distance(pattern=blocks)(
            sf.one_shot(0.5, pattern=blocks, where="a").init(params()), (), 0
        )


SIZES = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(1)}
LEAVES = sf.patterns.tied([["a", None, 0], ["b", None, 1], ["c", None, 2]])


def test_known_values_decide():
    values = torch.tensor([0.3, torch.nan, 0.2])
    for given in (values, {"a": values}):
        score = sf.scores.of_units(given, LEAVES)
        for sparsity, kept in ((1 / 3, "ac"), (2 / 3, "a")):
            prune = sf.one_shot(sparsity, score, pattern=LEAVES)
            masks = prune.update(prune.init(SIZES), SIZES, 0).masks
            assert [path for path in masks if masks[path].all()] == list(kept)


def test_known_values_are_copied():
    values = torch.tensor([0.3, 0.1, 0.2])
    score = sf.scores.of_units(values, LEAVES)
    values.zero_()
    state = sf.one_shot(1 / 3, score, pattern=LEAVES).init(SIZES)
    assert (
        score(state, SIZES, 0)["a"].tolist() == torch.tensor([0.3, 0.1, 0.2]).tolist()
    )


def test_known_values_that_do_not_fit():
    with pytest.raises(ValueError, match=r"of_units: expected a pattern of tied sets"):
        sf.scores.of_units(torch.ones(3), sf.patterns.channel(0))
    with pytest.raises(TypeError, match=r"of_units: expected a tensor of a number for"):
        sf.scores.of_units([1.0, 2.0, 3.0], LEAVES)
    state = sf.one_shot(0.5, pattern=LEAVES).init(SIZES)
    with pytest.raises(
        ValueError, match=r"of shape \(3,\) for the units of 'a', got \("
    ):
        sf.scores.of_units(torch.ones(2), LEAVES)(state, SIZES, 0)
    with pytest.raises(ValueError, match="expected values of the set 'a', got 'b'"):
        sf.scores.of_units({"b": torch.ones(3)}, LEAVES)(state, SIZES, 0)
    two = sf.patterns.tied([[["a", 0]], [["b", 0]]])
    state = sf.one_shot(0.5, pattern=two).init({"a": SIZES["a"], "b": SIZES["b"]})
    with pytest.raises(ValueError, match="values of the set 'a', got one tensor"):
        sf.scores.of_units(torch.ones(2), two)(state, SIZES, 0)
