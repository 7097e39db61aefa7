"""Members of tied sets that are whole leaves."""

import itertools

import pytest
import torch

import sparsefn as sf
from sparsefn.masks.patterns.members import family_of

PARAMS = {
    "a": torch.tensor([[3.0, 1.0], [1.0, 1.0]]),
    "b": torch.tensor([5.0]),
    "c": torch.tensor([[1.0, 1.0, 4.0]]),
    "d": torch.tensor([7.0, 0.0, 0.0]),
}
MEMBERS = [["a", None, 0], ["b", None, 0], ["c", None, 1], ["d", None, 2]]


def kept(algorithm, params=PARAMS):
    state = algorithm.update(algorithm.init(params), params, 0)
    for mask in state.masks.values():
        assert not mask.ndim or mask.all() or not mask.any()
    return [path for path, mask in state.masks.items() if mask.all()]


def test_the_best_leaves_stay():
    # means 11 / 5, 2 and 7 / 3
    pattern = sf.patterns.tied(MEMBERS)
    assert kept(sf.one_shot(1 / 3, pattern=pattern)) == ["a", "b", "d"]
    assert kept(sf.one_shot(2 / 3, pattern=pattern)) == ["d"]
    assert kept(sf.one_shot(1.0, pattern=pattern)) == ["d"]
    largest = sf.patterns.tied(MEMBERS, reduce="sum")
    assert kept(sf.one_shot(2 / 3, pattern=largest)) == ["a", "b"]


def test_ties_go_to_the_first_and_nan_never_wins():
    same = {path: torch.ones_like(x) for path, x in PARAMS.items()}
    pattern = sf.patterns.tied(MEMBERS)
    assert kept(sf.one_shot(2 / 3, pattern=pattern), same) == ["a", "b"]
    same["a"] = same["a"] * torch.nan
    assert kept(sf.one_shot(2 / 3, pattern=pattern), same) == ["c"]


def test_one_leaf_in_several_units_stays_with_all_of_them():
    pattern = sf.patterns.tied([*MEMBERS, ["d", None, 1]])
    params = {path: x.clone() for path, x in PARAMS.items()}
    for order in itertools.permutations([1.0, 2.0, 3.0]):
        score = dict(zip(["a", "c", "d"], order, strict=True))
        values = {"a": torch.tensor([score["a"], score["c"], score["d"]])}
        alone = sf.one_shot(1 / 3, sf.scores.of_units(values, pattern), pattern=pattern)
        worst = min(score, key=score.__getitem__)
        stays = {"a": ["c", "d"], "c": ["a", "b"], "d": ["a", "b", "c"]}[worst]
        assert kept(alone, params) == stays


def test_they_drop_and_grow():
    key = sf.random.key(0)
    pattern = sf.patterns.tied(MEMBERS)
    algorithm = sf.rigl(2 / 3, key=key, pattern=pattern, when=sf.every(1))
    state = algorithm.init(PARAMS)
    for step in range(3):
        state = algorithm.update(state, PARAMS, step)
        assert sum(bool(state.masks[path].any()) for path in "acd") == 1
        assert bool(state.masks["a"].any()) == bool(state.masks["b"].any())


def test_where_they_lie():
    members = sf.patterns.tied_members(sf.patterns.tied(MEMBERS), PARAMS)
    assert [(path, dim, units.tolist()) for path, dim, units in members["a"]] == [
        ("a", 0, [0, 0]),
        ("b", 0, [0]),
        ("c", 0, [1]),
        ("d", 0, [2, 2, 2]),
    ]


def test_beside_rows_of_the_same_leaves():
    rows = [["a", 1], ["c2", 0]]
    params = {**PARAMS, "c2": torch.ones(2, 2)}
    pattern = sf.patterns.tied([rows, MEMBERS])
    algorithm = sf.one_shot(0.4, pattern=pattern)
    masks = algorithm.update(algorithm.init(params), params, 0).masks
    assert masks["a"].tolist() == [[True, False]] * 2 and masks["d"].all()
    assert not masks["c"].any() and masks["c2"].sum() == 2


@pytest.mark.parametrize(
    ("members", "error", "text"),
    [
        (
            [["a", None, 0], ["b", 0]],
            ValueError,
            r"all members of a set to be whole leaves, \[glob, None, unit\], or none, "
            "got 'b' beside whole ones",
        ),
        (
            [["a", None, 0], ["b", None, 2]],
            ValueError,
            "whole leaves of each unit from 0 to 2, got none of unit 1",
        ),
        (
            [["a", None]],
            TypeError,
            r"a whole leaf has one unit, \['\*.bias', None, 0\]",
        ),
        ([["a", None, 0, 1]], TypeError, "a whole leaf has one unit"),
        ([["a", None, True]], TypeError, "the unit of a whole leaf to be an int"),
        ([["a", None, -1]], ValueError, "the unit of a whole leaf >= 0, got -1"),
    ],
)
def test_bad_members(members, error, text):
    with pytest.raises(error, match=text):
        sf.patterns.tied(members)


def test_a_leaf_without_dimensions_is_refused():
    pattern = sf.patterns.tied([["a", None, 0], ["b", None, 1]])
    params = {"a": torch.ones(2, 2), "b": torch.tensor(1.0)}
    with pytest.raises(ValueError, match=r"one dimension at 'b', got shape \("):
        sf.one_shot(0.5, pattern=pattern).init(params)


def test_families():
    assert family_of([["a", 0], ["b", -1, 2]]) == (("a", 0, 1, 1), ("b", -1, 2, 1))
    assert family_of([["a", None, 1], ["b", None, 0]]) == (
        ("a", None, 1, 2),
        ("b", None, 0, 2),
    )
