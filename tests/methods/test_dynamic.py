"""Dynamic methods, by name."""

import sparsefn as sf


def test_three_are_the_algorithms_of_the_top_level():
    assert (sf.methods.set, sf.methods.rigl, sf.methods.snfs) == (sf.set, sf.rigl, sf.snfs)
