"""Which leaves form a tied set: globs, what their wildcards match, and exact names."""

import fnmatch

import pytest

import sparsefn as sf
from sparsefn.patterns.matching import _stem, checked_sets, sets_of


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
        checked_sets(sf.patterns.tied([["*.up.weight", 0]]), [])


def test_a_path_that_is_spelt_as_the_glob_is_that_leaf_alone():
    paths = ("a[0].w", "a0.w", "b*", "bc", "?")
    assert sets_of(("a[0].w", "b*"), paths) == (("a[0].w", "b*"),)
    assert sets_of(("?",), paths) == (("?",),)
    assert sets_of(("a[0].w",), paths[1:]) == (("a0.w",),)
    assert checked_sets(
        sf.patterns.tied([[["a[0].w", 0]], [["b*", 0], ["?", 0]]]), paths
    ) == [
        ("a[0].w",),
        ("b*", "?"),
    ]
