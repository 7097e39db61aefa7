"""Paths, and trees taken apart and put together."""

from collections import OrderedDict, namedtuple

import optree
import pytest
import torch

from sparsefn import tree

Pair = namedtuple("Pair", "left right")


def test_paths_are_named_parameters_names():
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.ModuleDict({"x": torch.nn.Linear(2, 2)})
    )
    params = dict(model.named_parameters())
    assert tree.paths(params) == sorted(params)


def test_paths_of_every_container():
    nested = {"b": [0, (1, {"c": 2})], "a": Pair(3, OrderedDict([("z", 4), ("y", 5)]))}
    assert tree.paths(nested) == [
        "a.left",
        "a.right.z",
        "a.right.y",
        "b.0",
        "b.1.0",
        "b.1.1.c",
    ]
    leaves, rebuild = tree.flatten(nested)
    assert rebuild(list(leaves.values())) == nested
    assert tree.paths(torch.ones(2)) == [""]


def test_paths_do_not_depend_on_insertion_order():
    assert tree.paths({"a": 0, "b": {"d": 1, "c": 2}}) == tree.paths(
        {"b": {"c": 2, "d": 1}, "a": 0}
    )


def test_two_leaves_at_one_path():
    with pytest.raises(
        ValueError,
        match=r"expected one leaf a path, but two leaves are at 'a.b'; rename one",
    ):
        tree.flatten({"a": {"b": 0}, "a.b": 1})


EMPTY = [
    {"a": {}, "w": 1},
    {"a": {"b": {}}, "w": 1},
    {"a": [], "b": (), "w": [1, ({}, 2)]},
    [{}, 1, [[], {"x": {}}]],
    ((), 1),
    Pair(1, {}),
    OrderedDict(z={}, y=1),
    {"o": OrderedDict(b={}, a=1), "w": None},
    {"a": {}},
    {},
    1,
]


@pytest.mark.deep
@pytest.mark.parametrize("numbers", EMPTY, ids=str)
def test_compiled_code_goes_through_empty_containers(numbers):
    torch._dynamo.reset()
    params = optree.tree_map(lambda n: torch.full((2,), float(n)), numbers)
    seen = []

    def double(params):
        leaves, rebuild = tree.flatten(params)
        seen.append((tree.paths(params), list(leaves)))
        assert tree.same_structure(params, params)
        return rebuild([2 * leaf for leaf in leaves.values()])

    got = torch.compile(double, fullgraph=True, backend="eager")(params)
    assert optree.tree_structure(got) == optree.tree_structure(params)
    assert [leaf.tolist() for leaf in tree.leaves_of(got)] == [
        [2.0 * n] * 2 for n in tree.leaves_of(numbers)
    ]
    assert seen[0] == (tree.paths(numbers), tree.paths(numbers))


def test_compiled_trees_keep_the_order_in_which_a_dict_was_filled():
    params = {"b": torch.ones(1), "a": torch.zeros(1)}
    again = torch.compile(
        lambda params: tree.opened(params)[1](tree.leaves_of(params)),
        fullgraph=True,
        backend="eager",
    )
    assert list(again(params)) == ["b", "a"] and torch.equal(
        again(params)["b"], params["b"]
    )


def test_tops_name_the_part_of_every_leaf():
    pair = namedtuple("pair", "left right")
    assert tree.tops(pair([1, 2], {"a": 3})) == (
        ["left", "right"],
        ["left", "left", "right"],
    )
    assert tree.tops({"b.c": 0, "b": {"d": 1}}) == (["b", "b.c"], ["b", "b.c"])
    assert tree.tops([(), 1]) == (["0", "1"], ["1"])
    assert tree.tops(torch.ones(1)) == ([""], [""])


def test_compiled_code_opens_named_tuples_as_they_are_registered():
    class Backwards(namedtuple("Backwards", "first last")):
        """A named tuple whose leaves come in another order."""

    everywhere = optree.registry.__GLOBAL_NAMESPACE
    with pytest.warns(UserWarning, match="namedtuple"):
        optree.register_pytree_node(
            Backwards,
            lambda pair: (pair[::-1], None),
            lambda _, new: Backwards(*new[::-1]),
            namespace=everywhere,
        )
    try:
        params = {
            "a": Backwards(torch.ones(1), torch.zeros(1)),
            "b": (torch.ones(2),),
            "c": Pair(torch.ones(3), ()),
        }

        def opened(params):
            leaves, rebuild = tree.opened(params)
            return leaves, rebuild([2 * leaf for leaf in leaves])

        leaves, doubled = torch.compile(opened, fullgraph=True, backend="eager")(params)
        assert [leaf.tolist() for leaf in leaves] == [
            leaf.tolist() for leaf in tree.leaves_of(params)
        ]
        assert (
            doubled["a"].first == 2
            and doubled["a"].last == 0
            and isinstance(doubled["c"], Pair)
        )
    finally:
        optree.unregister_pytree_node(Backwards, namespace=everywhere)
