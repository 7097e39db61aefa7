"""Choices and globs."""

import math

import pytest
import torch

from sparsefn import tree


def test_check_globs():
    tree.check_globs("where", ["a.*"], ["a.b.c", "d"])
    with pytest.raises(
        ValueError, match="where: no path matches 'A.*'; the paths are 'a.b', 'd'"
    ):
        tree.check_globs("where", ["a*", "A.*"], ["a.b", "d"])


def test_choose_is_lazy_where_the_truth_is_known():
    old = {"a": torch.zeros(2), "b": torch.ones(1)}

    def new(state):
        return {"a": state["a"] + 1, "b": state["b"]}

    assert (
        tree.choose(torch.tensor(False), lambda _: pytest.fail("computed"), old) is old
    )
    assert torch.equal(tree.choose(torch.tensor(True), new, old)["a"], torch.ones(2))
    both = torch.func.vmap(
        lambda p: tree.choose(p, new, old), out_dims={"a": 0, "b": None}
    )(torch.tensor([True, False]))
    assert both["a"].tolist() == [[1, 1], [0, 0]] and both["b"] is old["b"]


@pytest.mark.deep
def test_all_finite_sees_every_entry_of_every_dtype_and_shape():
    fine = {
        "half": torch.tensor([65504.0, -65504.0], dtype=torch.float16),
        "brain": torch.ones(3, 4, dtype=torch.bfloat16).T,
        "double": torch.tensor(-1e300, dtype=torch.float64),
        "none": torch.zeros(0, 3),
    }
    assert (
        tree.all_finite(fine)
        and tree.all_finite({})
        and tree.all_finite({"none": torch.zeros(0)})
    )
    for name, at in (("half", 1), ("brain", (2, 1)), ("double", ())):
        for bad in (math.nan, math.inf, -math.inf):
            spoiled = fine[name].clone()
            spoiled[at] = bad
            assert not tree.all_finite({**fine, name: spoiled})
    rows = torch.tensor([[1.0, 2.0], [math.nan, 3.0], [4.0, math.inf]])
    assert torch.vmap(lambda x: tree.all_finite([x, x[0]]))(rows).tolist() == [
        True,
        False,
        False,
    ]
    compiled = torch.compile(tree.all_finite, fullgraph=True, backend="eager")
    assert compiled(fine) and not compiled({"x": rows})
