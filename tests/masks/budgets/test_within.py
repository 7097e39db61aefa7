"""Counts within a budget: as many as fit, one more of any would pass it, and algorithms
keep exactly so many.
"""

import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsefn as sf
from sparsefn._engine.torch_limits import OLD
from sparsefn.masks.budgets.filling import UnitCosts
from sparsefn.masks.budgets.within import Within, within
from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.plan import weights
from sparsefn.shrinking.shrink import shrink
from tests.shrinking.cost_counts import flops_of
from tests.shrinking.networks import networks
from tests.shrinking.zoo import MODELS

UNITS = "params", "flops", "bytes"


class Given:
    """A model of which the costs are given."""

    def __init__(self, sizes, cost, scores=dict, masks=None):
        self.made = UnitCosts(sizes, cost, scores, masks or {})

    def priced(self, unit, bits, compressed, only):
        return self.made


def net():
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    return nn.Sequential(*layers).eval(), torch.ones(1, 1, 6, 6)


def one_by_one(cost, sizes, shares, limit):
    """Units come one after the other, first where a larger share is lost, and a leaf
    ends at the first too much.
    """
    order = [
        (-Fraction(size - n + 1, size) / share, i)
        for i, (size, share) in enumerate(zip(sizes, shares, strict=True))
        for n in range(2, size + 1)
    ]
    kept, full = [1] * len(sizes), set()
    for _, i in sorted(order):
        if i not in full:
            kept[i] += 1
            if cost(kept) > limit:
                kept[i] -= 1
                full.add(i)
    return kept


def check_most(made: Within):
    counts, priced = made.counts, made.priced
    kept = list(counts.values())
    assert priced.cost(kept) <= made.limit
    assert min(kept) >= 1
    for i, n in enumerate(kept):
        more = [*kept[:i], n + 1, *kept[i + 1 :]]
        assert n == list(priced.sizes.values())[i] or priced.cost(more) > made.limit


@pytest.mark.deep
@settings(max_examples=25, deadline=None)
@given(
    networks(), st.sampled_from(UNITS), st.floats(0.2, 0.9), st.sampled_from([1.0, 2.5])
)
def test_counts_of_random_networks_are_those_of_adding_units_one_by_one(
    drawn, unit, share, weight
):
    found = groups(*drawn)
    priced = found.priced(unit, None, False, None)
    if not priced.sizes:
        return
    sizes, first = list(priced.sizes.values()), next(iter(priced.sizes))
    least, whole = priced.cost([1] * len(sizes)), priced.cost(sizes)
    limit = int(least + share * (whole - least))
    made = within(limit, found, unit, prefer={first: weight})
    shares = [Fraction(weight if name == first else 1) for name in priced.sizes]
    assert list(made.counts.values()) == one_by_one(priced.cost, sizes, shares, limit)
    check_most(made)
    check_most(within(limit, found, unit, prefer="global"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_the_most_of_all_counts_by_brute_force(sizes, data):
    factors = [data.draw(st.integers(0, 9)) for _ in sizes]

    def cost(kept):
        return sum(
            a * n * m for a, n, m in zip(factors, kept, [*kept[1:], 1], strict=True)
        )

    limit = data.draw(st.integers(cost([1] * len(sizes)), cost(sizes)))
    made = within(limit, Given({str(i): n for i, n in enumerate(sizes)}, cost))
    check_most(made)
    assert list(made.counts.values()) == one_by_one(
        cost, sizes, [Fraction(1)] * len(sizes), limit
    )


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("prefer", ["uniform", "global", {"0.*": 0.5}])
def test_algorithms_keep_so_many_and_the_smaller_model_costs_that(unit, prefer):
    model, x = net()
    found = groups(model, x)
    made = within(found.cost(unit=unit) * 0.6, found, unit, prefer=prefer)
    algorithm = sf.gmp(1.0, pattern=found.pattern(), distribution=made)
    state = algorithm.init(sf.modules.params_of(model))
    small = shrink(model, algorithm.update(state, state.params, 0), x)
    kept = small[0].weight.shape[0], small[2].weight.shape[0]
    assert kept == tuple(made.counts.values())
    counted = {
        "params": sum(p.numel() for p in small.parameters()),
        "flops": flops_of(small, (x,)),
    }
    assert (counted | {"bytes": 4 * counted["params"]})[unit] == made.cost <= made.limit


@pytest.mark.parametrize("name", ["mobilenet v2", "grouped queries"])
def test_known_families_at_half_of_their_flops(name):
    model, example = MODELS[name]()
    found = groups(model, example)
    made = within(found.cost(unit="flops") // 2, found, "flops")
    algorithm = sf.one_shot(
        1.0, pattern=found.pattern(), distribution=made, where=lambda path, leaf: True
    )
    state = algorithm.init(sf.modules.params_of(model))
    small = shrink(model, algorithm.update(state, state.params, 0), example)
    assert flops_of(small, example) == made.cost <= found.cost(unit="flops") // 2
    check_most(made)


def test_the_sparsity_is_how_far_it_is_to_the_limit():
    model, x = net()
    found = groups(model, x)
    made = within(200, found)
    whole = found.cost()
    shapes = {"0.weight": (6,), "2.weight": (8,)}
    assert made(shapes, 0.0) == {"0.weight": 6, "2.weight": 8}
    assert made(shapes, 1.0) == made.counts
    half = made(shapes, torch.tensor(0.5))
    assert half == within(whole - (whole - 200) / 2, found).counts
    # the other stays whole
    assert made({"2.weight": (8,)}, 0.5)["2.weight"] < half["2.weight"]
    steps = [sum(made(shapes, k / 10).values()) for k in range(11)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.deep
@pytest.mark.skipif(OLD, reason="the compiler of torch 2.11 takes no such budget")
def test_a_compiled_update_keeps_the_same_units():
    model, x = net()
    found = groups(model, x)
    algorithm = sf.gmp(1.0, pattern=found.pattern(), distribution=within(200, found))
    state = algorithm.init(sf.modules.params_of(model))
    masks = algorithm.update(state, state.params, 0).masks
    compiled = torch.compile(algorithm.update, backend="eager")(
        state, state.params, 0
    ).masks
    assert all(torch.equal(masks[path], compiled[path]) for path in masks)


def test_weights_within_flops_are_those_of_the_report():
    model, x = net()
    made = within(3_000, weights(model, x), "flops")
    state = sf.static(1.0, distribution=made, key=sf.random.key(0)).init(
        sf.modules.params_of(model)
    )
    report = sf.report.flops(model, state, x).total
    assert report.sparse <= 3_000 < report.dense
    shapes = {
        path: tuple(leaf.shape) for path, leaf in state.params.items() if leaf.ndim > 1
    }
    counts = made(shapes, 1.0)
    assert {path: int(state.masks[path].sum()) for path in shapes} == counts
    for path, n in counts.items():
        kept = [
            counts.get(name, size) + (name == path)
            for name, size in made.priced.sizes.items()
        ]
        assert n == made.priced.sizes[path] or made.priced.cost(kept) > 3_000


def test_weights_within_bytes_count_a_bit_for_each_weight_of_sparse_leaves():
    model, x = net()
    made = within(500, weights(model, x), "bytes", bits=8, compressed=True)
    counts = made({"2.weight": (8, 6, 3, 3)}, 1.0)
    others = sum(p.numel() for p in model.parameters()) - 432
    assert counts == {"2.weight": 500 - 432 // 8 - others}
    assert (
        within(10**6, weights(model, x), "bytes", compressed=True).counts
        == made.priced.sizes
    )


def test_scores_decide_who_loses():
    sizes = {"a": 3, "b": 3}
    model = Given(
        sizes,
        sum,
        lambda: {
            "a": torch.tensor([3.0, 1.0, 2.0]).numpy(),
            "b": torch.tensor([9.0, 8.0, 7.0]).numpy(),
        },
    )
    assert within(4, model, prefer="global").counts == {"a": 1, "b": 3}
    assert within(3, model, prefer="global").counts == {"a": 1, "b": 2}
    given = {"a": torch.tensor([[9.0, 8.0, 7.0]]), "b": torch.tensor([1.0, 1.0, 1.0])}
    assert within(4, model, prefer=given).counts == {"a": 3, "b": 1}


def test_weights_of_paths_decide_who_loses():
    model = Given({"a.w": 12, "b.w": 12}, sum)
    assert within(18, model).counts == {"a.w": 9, "b.w": 9}
    assert within(18, model, prefer={"a.*": 2.0}).counts == {"a.w": 8, "b.w": 10}
    assert within(18, model, prefer={"b.*": 0}).counts == {"a.w": 6, "b.w": 12}
    assert within(18, model, prefer={"a.*": 1, "*": 0.5}).counts == {
        "a.w": 8,
        "b.w": 10,
    }


def test_tables_say_what_counts_cost():
    model = Given({"a": 4, "b": 4}, sum)
    table = {"a": [0, 1.0, 2.0, 3.0, 4.0], "b": {2: 1.0, 4: 3.5}}
    made = within(5.0, model, table)
    assert made.counts == {"a": 4, "b": 2}
    assert made.cost == 5.0
    assert within(3.0, model, {"a": [0, 2, 1, 3, 3], "b": [0] * 5}).counts == {
        "a": 4,
        "b": 4,
    }
    assert within(2.0, model, {"a": [0, 2, 1, 3, 3]}).counts == {"a": 2, "b": 4}
    assert repr(made) == "within(5.0, unit='by the table')"
    assert str(made) == "a: 4 of 4\nb: 2 of 4\n5.0 of 5.0 by the table"


def test_what_has_no_costs_is_refused():
    text = (
        "within: expected sf.shrinking.groups(model, example), "
        "sf.shrinking.layers(model, example) for whole layers, or "
        "sf.shrinking.weights(model, example) for single weights, got Linear"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        within(1, torch.nn.Linear(2, 1))


def test_a_table_that_does_not_fit_is_refused():
    model = Given({"a": 4}, sum)
    with pytest.raises(ValueError, match="within: expected a table for 'a', got 'b'"):
        within(1, model, {"b": [1]})
    with pytest.raises(
        ValueError,
        match=r"expected the cost of all 4 units in the table of 'a', got \[0, 1\]",
    ):
        within(1, model, {"a": [0, 1]})


def test_a_limit_that_cannot_be_met_says_the_least_cost():
    model, x = net()
    found = groups(model, x)
    least = found.cost({0: range(1, 6), 1: range(1, 8)})
    text = (
        f"within: expected a limit of {least} params or more, which is what one unit "
        "of each leaf or set that may lose"
    )
    with pytest.raises(ValueError, match=text):
        _ = within(least - 1, found).counts
    assert within(least, found).counts == {"0.weight": 1, "2.weight": 1}
    with pytest.raises(ValueError, match="expected a limit of .* flops or more"):
        within(0, found, "flops")({"0.weight": (6,)}, 1.0)


def test_bad_arguments_are_refused():
    model, x = net()
    found = groups(model, x)
    with pytest.raises(
        TypeError, match="within: expected limit to be a number, got str"
    ):
        within("1M", found)
    with pytest.raises(ValueError, match="within: expected a limit >= 0, got -1"):
        within(-1, found)
    with pytest.raises(
        TypeError,
        match=r"within: expected sf.shrinking.groups\(model, example\), .*, got "
        r"Sequential",
    ):
        within(1, model)
    with pytest.raises(
        ValueError, match="expected unit to be 'params', 'flops' or 'bytes', got 'macs'"
    ):
        within(1, found, "macs")
    wanted = (
        "within: expected prefer to be 'uniform', 'global', a dict of weights >= 0 by "
        "glob, or of scores by path, got"
    )
    for prefer, text in (
        ("erk", "'erk'"),
        ({}, "{}"),
        ({"0.*": -1.0}, r"-1.0 for '0.\*'"),
    ):
        with pytest.raises(ValueError, match=f"{wanted} {text}"):
            within(1, found, prefer=prefer)
    with pytest.raises(ValueError, match="expected 6 scores at '0.weight', got none"):
        within(1, found, prefer={"2.weight": torch.ones(8)})
    with pytest.raises(
        ValueError, match=r"expected 8 scores at '2.weight', got shape \(3,\)"
    ):
        within(1, found, prefer={"0.weight": torch.ones(6), "2.weight": torch.ones(3)})
    with pytest.raises(ValueError, match="no path matches '9.*'|matches no"):
        within(1, found, prefer={"9.*": 2.0})


def test_other_leaves_than_those_of_the_model_are_refused():
    model, x = net()
    made = within(200, groups(model, x))
    text = (
        r"within: expected the leaves or sets of the model that was priced, but "
        r"'0.weight' of shape "
    )
    with pytest.raises(ValueError, match=rf"{text}\(6, 1, 3, 3\) has 6 units there"):
        made({"0.weight": (6, 1, 3, 3)}, 1.0)
    with pytest.raises(
        ValueError, match="but 'w' of shape .* has no such leaf or set there"
    ):
        made({"w": (6,)}, 1.0)
    with pytest.raises(
        ValueError, match="within: expected a sparsity whose value is known"
    ):
        torch.vmap(
            lambda level: torch.as_tensor(made({"0.weight": (6,)}, level)["0.weight"])
        )(torch.ones(2))
