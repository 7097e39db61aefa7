"""Which leaves form a tied set, by globs and exact names, and where their units lie:
blocks and parts, unit numbers, classes of units, and sets that meet.
"""

import fnmatch

import numpy as np
import pytest
import torch

import sparsefn as sf
from sparsefn.masks.patterns.places import (
    Place,
    TiedSet,
    _stem,
    check_units_meet,
    classed,
    place_of,
    sets_of,
)


@pytest.mark.parametrize(
    "block,parts,numbers",
    [
        (1, 1, (0, 1, 2)),
        (2, 1, (0, 0, 1, 1)),
        (1, 3, (0, 1, 0, 1, 0, 1)),
        (2, 2, (0, 0, 1, 1, 0, 0, 1, 1)),
        (3, 1, (0, 0, 0)),
    ],
)
def test_blocks_and_parts_have_numbers(block, parts, numbers):
    given, found = (
        place_of("w", (2, len(numbers)), -1, *form)
        for form in ((numbers, 1), (block, parts))
    )
    assert given.dim == found.dim == 1
    assert given.units == found.units == max(numbers) + 1
    assert found.unit_numbers().tolist() == given.unit_numbers().tolist()
    assert found.unit_numbers().tolist() == list(numbers)


def test_numbers_along_the_dimension():
    place = place_of("w", (5,), 0, (2, -1, 0, 0, 1), 1)
    assert place.along(torch.tensor([False, True, False])).tolist() == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert torch.func.vmap(place.along)(torch.eye(3) > 0)[:, 1].all()


def test_units_of_as_many_indices_in_each_leaf_are_together():
    places = [
        place_of("a", (6, 2), 0, (0, 1, 1, 2, 3, 3), 1),
        place_of("b", (4,), 0, 1, 1),
    ]
    made = classed("a", places)
    taken = [
        [(place.units, place.block, place.taken.tolist()) for place in some]
        for some in made.classes
    ]
    assert taken == [
        [(2, 1, [0, 3]), (2, 1, [0, 2])],
        [(2, 2, [1, 2, 4, 5]), (2, 1, [1, 3])],
    ]
    assert [place.shape for place in made.classes[1]] == [
        (4, 2),
        (2,),
    ] and made.order.tolist() == [0, 2, 1, 3]
    assert classed("b", places[1:]) == TiedSet("b", tuple(places[1:]))


def meeting(*numbers, dim=0):
    return [
        TiedSet(f"w:{i}", (place_of("w", (len(each), 2), dim, each, 1),))
        for i, each in enumerate(numbers)
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        [(0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2)],  # a product
        [(0, 1, -1, -1), (-1, -1, 1, 0)],  # one after the other
        [(0, 0, 1, 1, -1), (0, 1, 0, 1, 0)],  # a product, and more of one
        [(0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 0, 0, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1)],
        [(0, 1, 2)],
    ],
)
def test_sets_that_leave_each_other_an_index(numbers):
    check_units_meet(meeting(*numbers))


@pytest.mark.parametrize(
    "numbers",
    [
        [(0, 1), (0, 1)],
        [(0, 0, 1, 1, 2), (0, 1, 0, 1, 0)],
        [
            (0, 0, 1, 1),
            (0, 1, 0, 1),
            (0, 1, 1, 0),
        ],  # two by two a product, but not all three
    ],
)
def test_sets_that_may_leave_no_index_are_refused(numbers):
    sets = meeting(*numbers)
    with pytest.raises(
        ValueError,
        match="a leaf of the set of 'w:0' with entries for all combinations of",
    ):
        check_units_meet(sets)
    own = [
        one._replace(places=(*one.places, Place(f"b{i}", (9,), 0, 9)))
        for i, one in enumerate(sets)
    ]
    check_units_meet(own)
    with pytest.raises(
        ValueError,
        match="a leaf of the set of 'w:1' with entries .* of its sets, got 'w'",
    ):
        check_units_meet([own[0], *sets[1:]])


def test_along_different_dimensions_there_is_always_an_entry():
    check_units_meet([*meeting((0, 1, 2)), TiedSet("w:9", (Place("w", (3, 2), 1, 2),))])


def test_an_entry_where_a_unit_meets_itself():
    place = Place("w", (3, 3), 0, 3)
    check_units_meet([TiedSet("w", (place, place._replace(dim=1)))])
    numbers = np.arange(3).repeat(3)
    outer = [
        place_of("w", (9,), 0, tuple(each.tolist()), 1)
        for each in (numbers, np.tile(np.arange(3), 3))
    ]
    check_units_meet([TiedSet("w", tuple(outer))])


@pytest.mark.parametrize(
    "glob",
    [
        *(
            "*.w",
            "a.?.w",
            "a.[0-9].w",
            "a.[!0-9].w",
            "a.[]x].w",
            "a.\\d.w",
            "a[.w",
            "*",
            "a.(0).w",
            "**w",
            "",
        ),
        # What fnmatch reads otherwise than re: no set, an empty range, a caret.
        *(
            "a.[!].w",
            "a.[].w",
            "a.[[].w",
            "a.[9-0].w",
            "a.[0--].w",
            "a.[^x].w",
            "a.[x&&^].w",
        ),
    ],
)
def test_globs_match_as_everywhere(glob):
    paths = [
        "a.0.w",
        "a.1.w",
        "a.x.w",
        "a.].w",
        "a.\\d.w",
        "a[.w",
        "w",
        "a.(0).w",
        "a.\n.w",
        "a.^.w",
        "a.[!].w",
        "",
    ]
    for path in paths:
        assert (_stem(glob, path) is not None) == fnmatch.fnmatchcase(path, glob)


def test_check_names_nothing_where_there_is_nothing():
    with pytest.raises(
        ValueError, match=r"no path matches '\*\.up\.weight'; the nearest are none"
    ):
        sf.patterns.tied([["*.up.weight", 0]]).paths_among([])


def test_a_path_that_is_spelt_as_the_glob_is_that_leaf_alone():
    paths = ("a[0].w", "a0.w", "b*", "bc", "?")
    assert sets_of(("a[0].w", "b*"), paths) == (("a[0].w", "b*"),)
    assert sets_of(("?",), paths) == (("?",),)
    assert sets_of(("a[0].w",), paths[1:]) == (("a0.w",),)
    two = sf.patterns.tied([[["a[0].w", 0]], [["b*", 0], ["?", 0]]])
    assert two.paths_among(paths) == [
        ("a[0].w",),
        ("b*", "?"),
    ]
