"""Choices and globs."""

import pytest
import torch

from sparsefn import tree


def test_check_globs():
    tree.check_globs("where", ["a.*"], ["a.b.c", "d"])
    with pytest.raises(ValueError, match="where: no path matches 'A.*'; the paths are 'a.b', 'd'"):
        tree.check_globs("where", ["a*", "A.*"], ["a.b", "d"])


def test_choose_is_lazy_where_the_truth_is_known():
    old = {"a": torch.zeros(2), "b": torch.ones(1)}

    def new(state):
        return {"a": state["a"] + 1, "b": state["b"]}

    assert tree.choose(torch.tensor(False), lambda _: pytest.fail("computed"), old) is old
    assert torch.equal(tree.choose(torch.tensor(True), new, old)["a"], torch.ones(2))
    both = torch.func.vmap(lambda p: tree.choose(p, new, old), out_dims={"a": 0, "b": None})(
        torch.tensor([True, False])
    )
    assert both["a"].tolist() == [[1, 1], [0, 0]] and both["b"] is old["b"]
