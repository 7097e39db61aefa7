"""Values built from bytes: the same bytes, the same case; zeros are the smallest."""

import torch

import sparsefn as sf
from sparsefn.testing.byte_trees import EVERY, Case, Form, Source, case, shapes


def test_the_same_bytes_give_the_same_case():
    data = bytes(i * 7 % 256 for i in range(Source.size))
    one, two = (case(Source(data), Form(), EVERY, False) for _ in range(2))
    assert sf.checkpoint.tree_equal(one.params, two.params)
    assert (one.sparsity, one.seed) == (two.sparsity, two.seed)
    other = case(Source(bytes(reversed(data))), Form(), EVERY, False)
    assert (other.sparsity, other.seed) != (one.sparsity, one.seed)


def test_no_bytes_are_the_smallest_case():
    smallest = case(Source(bytes(Source.size)), Form(), EVERY, False)
    assert smallest.params["layer1"]["weight"].tolist() == [[0.0] * 3] * 2
    assert smallest.sparsity == 0.5


def test_shapes_of_a_form():
    assert {len(size) for size in shapes(Form())} == {2, 3, 4}
    assert all(size[0] % 2 == 0 and size[-1] % 4 == 0 for size in shapes(Form(2, 4)))
    assert all(0 not in size for size in shapes(Form(least=1)))


def test_a_case_that_is_too_long_to_read_is_cut():
    long = Case({str(i): torch.ones(9, 9) for i in range(50)}, (), 0.5, 3)
    assert len(repr(long)) == 4003
    assert repr(long).startswith("Case(sparsity=0.5, seed=3, params={'0': tensor(")
