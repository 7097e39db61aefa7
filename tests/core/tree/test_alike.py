"""Trees beside each other: structure errors, and what a compiled check sees."""

import re
from collections import OrderedDict

import pytest
import torch

import sparsefn as sf
from sparsefn import tree


def test_map_with_path_matches_by_key():
    got = tree.map_with_path(
        lambda path, x, y: (path, x, y), {"a": 1, "b": 2}, {"b": 20, "a": 10}
    )
    assert got == {"a": ("a", 1, 10), "b": ("b", 2, 20)}


@pytest.mark.parametrize(
    "got,text",
    [
        ({"a": 0}, "there is no leaf at 'b.c' in {what}"),
        ({}, "there is no leaf at 'a' in {what} (and at 1 more)"),
        (
            {"a": 0, "b": {"c": 0}, "d": 0},
            "there is an unknown leaf at 'd' in {what}, which {model} lack",
        ),
        (
            {"a": 0, "b": {"c": 0}, "d": 0, "e": [0]},
            "there is an unknown leaf at 'd' in {what} (and at 1 more), which {model} "
            "lack",
        ),
        ({"a": 0, "b": {"c": None}}, "there is no leaf at 'b.c' in {what}, but None"),
        (
            {"a": 0, "b.cc": 0},
            "there is no leaf at 'b.c' in {what}; perhaps it is the one at 'b.cc', "
            "which {model} lack",
        ),
        (
            [0, 1],
            "there is no leaf at 'a' in {what} (and at 1 more); {model} lack the one "
            "at '0'",
        ),
        (OrderedDict(a=0, b={"c": 0}), "the containers differ"),
    ],
)
def test_structure_errors_name_the_path(got, text):
    want = {"a": 0, "b": {"c": 0}}
    told = "expected grads with the structure of params, but " + text.format(
        what="grads", model="params"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        tree.check_like("grads", got, want)
    with pytest.raises(
        ValueError, match=re.escape(text.format(what="tree", model="the other"))
    ):
        tree.leaves_like(got, want)


def test_a_compiled_check_does_not_see_insertion_order():
    params, masks = (
        {"b": torch.ones(2), "a": torch.ones(2)},
        {"a": torch.ones(2) > 0, "b": torch.ones(2) < 0},
    )
    out = torch.compile(sf.apply_masks, fullgraph=True, backend="eager")(params, masks)
    assert out["a"].tolist() == [1, 1] and out["b"].tolist() == [0, 0]
    assert tree.same_structure(params, masks) and not tree.same_structure(
        params, {"a": 0}
    )


def test_check_like_names_shape_dtype_and_kind():
    want = {"w": torch.zeros(2, 3)}
    tree.check_like("grads", {"w": torch.ones(2, 3)}, want)
    tree.check_like("grads", {"w": torch.ones(2, 3).double()}, want, dtype=False)
    with pytest.raises(
        ValueError, match=r"expected grads of shape \(2, 3\) at 'w', got \(3, 2\)"
    ):
        tree.check_like("grads", {"w": torch.ones(3, 2)}, want)
    with pytest.raises(
        TypeError,
        match="expected grads of dtype torch.float32 at 'w', got torch.float64",
    ):
        tree.check_like("grads", {"w": torch.ones(2, 3).double()}, want)
    with pytest.raises(
        TypeError, match="expected grads to be tensors, got float at 'w'"
    ):
        tree.check_like("grads", {"w": 1.0}, want)


def test_a_compiled_error_names_the_leaf_too():
    def masked(params, masks):
        return sf.apply_masks(params, masks)

    params = {"a": torch.ones(2), "bias": torch.ones(2)}
    with pytest.raises(Exception, match="there is no leaf at 'bias' in masks"):
        torch.compile(masked, backend="eager")(
            params, {"a": torch.ones(2) > 0, "bais": torch.ones(2) > 0}
        )
