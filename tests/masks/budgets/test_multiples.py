"""Counts in multiples, and equal in some leaves: limits met, by brute force."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks.budgets.test_within import Given, net, one_by_one

import sparsefn as sf
from sparsefn._engine.torch_limits import OLD
from sparsefn.masks.budgets.count_steps import Steps

B = sf.budgets
LEAVES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def levels(size, of):
    """The widths that a leaf may have."""
    return sorted({*range(of, size + 1, of), size})


def leaves(sizes):
    return {f"{i}.w": (size,) for i, size in enumerate(sizes)}


@settings(deadline=None, max_examples=150)
@given(LEAVES, st.floats(0.0, 1.0), st.integers(1, 5), st.booleans())
def test_counts_are_the_nearest_multiples_whose_total_is_no_higher(
    sizes, sparsity, of, alike
):
    if alike:
        sizes = [sizes[0]] * len(sizes)
    shapes = leaves(sizes)
    asked = B.uniform()(shapes, sparsity)
    total = sum(asked.values())
    globs = ["*.w"] if alike else []
    made = B.in_multiples(B.uniform(), of, equal_across=globs)
    if total < sum(min(of, size) for size in sizes):
        with pytest.raises(ValueError, match="in_multiples: expected .* units or more"):
            made(shapes, sparsity)
        return
    counts = made(shapes, sparsity)
    assert list(counts) == list(shapes)
    kept = list(counts.values())
    every = [
        widths
        for widths in itertools.product(*(levels(size, of) for size in sizes))
        if sum(widths) <= total and (not alike or len({*widths}) == 1)
    ]
    assert tuple(kept) in every
    if sparsity == 0.0:
        assert kept == sizes
    if alike:
        assert sum(kept) == max(map(sum, every))
    elif all(size % of == 0 for size in sizes) and min(asked.values()) >= of:
        # with steps of one length: the highest total, and as near to it as can be
        highest = max(map(sum, every))
        assert sum(kept) == highest

        def distance(widths):
            return sum(abs(n - m) for n, m in zip(widths, asked.values(), strict=True))

        near = [distance(widths) for widths in every if sum(widths) == highest]
        assert distance(kept) == min(near)


def test_remainders_decide_and_ties_go_to_the_first_name():
    shapes = {"b": (8,), "a": (8,), "c": (8,)}
    made = B.in_multiples(B.uniform(), 4)
    assert made(shapes, 0.25) == {"b": 4, "a": 8, "c": 4}  # 6 of 8 each
    asked = B.by_path({"a": 0.5, "b": 0.125, "c": 0.5})
    assert B.in_multiples(asked, 4)(shapes, 0.0) == {"b": 4, "a": 4, "c": 4}
    assert B.in_multiples(B.uniform(), 4)({"a": (10,)}, 0.1) == {"a": 8}
    assert B.in_multiples(B.uniform(), 16)({"a": (10,)}, 0.0) == {"a": 10}


def test_multiples_may_differ_by_path_and_equal_leaves_have_all_of_them():
    shapes = {"a": (12,), "b": (12,), "c": (12,)}

    def counts(of, sparsity, across=()):
        made = B.in_multiples(B.uniform(), of, equal_across=across)
        return list(made(shapes, sparsity).values())

    assert counts({"a": 4, "[ab]": 3}, 0.4) == [8, 6, 7]
    assert counts({"a": 4, "[ab]": 3}, 0.6) == [4, 6, 5]
    assert counts({"a": 4, "b": 6}, 0.0, "[ab]") == [12, 12, 12]
    # multiples of 4 and of 6 are multiples of 12
    with pytest.raises(ValueError, match="expected 25 units or more, which is a mult"):
        counts({"a": 4, "b": 6}, 0.6, "[ab]")


def stepwise(cost, sizes, of, alike, limit):
    """Steps come one after the other, as units do in the test of `within`."""
    steps = Steps.among(leaves_sizes(sizes), of, ["*"] if alike else [])
    kept = one_by_one(
        lambda n: cost(steps.counts(n)),
        steps.sizes,
        [Fraction(1)] * len(steps.sizes),
        limit,
    )
    return steps.counts(kept)


def leaves_sizes(sizes):
    return {str(i): size for i, size in enumerate(sizes)}


@settings(deadline=None, max_examples=100)
@given(LEAVES, st.integers(1, 5), st.booleans(), st.data())
def test_within_adds_steps_until_none_fits(sizes, of, alike, data):
    if alike:
        sizes = [sizes[0]] * len(sizes)
    factors = [data.draw(st.integers(0, 9)) for _ in sizes]

    def cost(kept):
        return sum(
            a * n * m for a, n, m in zip(factors, kept, [*kept[1:], 1], strict=True)
        )

    least = cost([min(of, size) for size in sizes])
    limit = data.draw(st.integers(least, cost(sizes)))
    made = B.in_multiples(
        B.within(limit, Given(leaves_sizes(sizes), cost)),
        of,
        equal_across="*" if alike else (),
    )
    kept = list(made.counts.values())
    assert made.cost == cost(kept) <= limit
    assert kept == stepwise(cost, sizes, of, alike, limit)
    for i, (n, size) in enumerate(zip(kept, sizes, strict=True)):
        assert n in levels(size, of)
        more = [min(n + of, size)] * len(kept) if alike else list(kept)
        more[i] = min(n + of, size)
        assert n == size or cost(more) > limit
    if alike:
        best = max(w for w in levels(sizes[0], of) if cost([w] * len(sizes)) <= limit)
        assert kept[0] == best


def test_scores_of_steps_decide_within_a_limit():
    scores = {
        "a": torch.tensor([9.0, 1.0, 8.0, 2.0]),  # steps of 8.5 and 1.5
        "b": torch.tensor([7.0, 3.0, 6.0, 4.0]),  # 6.5 and 3.5
        "c": torch.tensor([5.0, 5.0, 5.0]),  # 5 and 5, the last of one unit
    }
    model = Given({"a": 4, "b": 4, "c": 3}, sum)

    def counts(limit, across=()):
        within = B.within(limit, model, prefer=scores)
        return list(B.in_multiples(within, 2, equal_across=across).counts.values())

    assert counts(6) == [2, 2, 2]
    assert counts(7) == [2, 2, 3]
    assert counts(9) == [2, 4, 3]
    assert counts(11) == [4, 4, 3]
    assert counts(10, ["[ab]"]) == [2, 2, 3]  # the next step is 4 units


@pytest.mark.skipif(OLD, reason="the compiler of torch 2.11 takes no such budget")
def test_algorithms_keep_multiples_and_the_smaller_model_costs_no_more():
    model, x = net()
    found = sf.shrinking.groups(model, x)
    limit = found.cost(unit="flops") // 2
    budget = B.in_multiples(B.within(limit, found, "flops"), 4)
    algorithm = sf.gmp(1.0, pattern=found.pattern(), distribution=budget)
    state = algorithm.init(sf.modules.params_of(model))
    small = sf.shrink(model, state, x)
    assert small[0].out_channels % 2 == 0 and small[2].out_channels in (4, 8)
    assert sf.shrinking.groups(small, x).cost(unit="flops") == budget.cost <= limit
    compiled = torch.compile(algorithm.init, backend="eager", fullgraph=True)
    again = compiled(sf.modules.params_of(model))
    assert sf.checkpoint.tree_equal(again.masks, state.masks)


def test_it_says_what_it_is():
    model = Given({"a": 4, "b": 4}, sum)
    within = B.within(6, model)
    made = B.in_multiples(within, 2, equal_across="*")
    assert repr(made) == (
        "in_multiples(within(6, unit='params'), 2, equal_across=['*'])"
    )
    assert repr(B.in_multiples(within, 2)) == (
        "in_multiples(within(6, unit='params'), 2)"
    )
    assert repr(within) == "within(6, unit='params')"
    assert made.counts == {"a": 2, "b": 2} and within.counts == {"a": 3, "b": 3}


def test_bad_arguments_are_refused():
    uniform = B.uniform()
    shapes = {"a": (8,), "b": (6,)}
    for wrong in (B.global_(), 0.5):
        with pytest.raises(
            TypeError,
            match=r"in_multiples: expected a distribution like uniform\(\) or within",
        ):
            B.in_multiples(wrong, 8)
    with pytest.raises(ValueError, match="in_multiples: expected of >= 1, got 0"):
        B.in_multiples(uniform, 0)
    with pytest.raises(TypeError, match="in_multiples: expected of to be an int, got"):
        B.in_multiples(uniform, 8.0)
    with pytest.raises(
        ValueError, match=r"in_multiples: expected of for '\*' >= 1, got 0"
    ):
        B.in_multiples(uniform, {"*": 0})
    with pytest.raises(ValueError, match="in_multiples: expected of to have a glob or"):
        B.in_multiples(uniform, {})
    with pytest.raises(ValueError, match="in_multiples: no path matches 'c'; the path"):
        B.in_multiples(uniform, {"c": 2})(shapes, 0.5)
    for wrong in (3, ["a", 3]):
        with pytest.raises(
            TypeError, match="expected equal_across to be a glob or a list of globs"
        ):
            B.in_multiples(uniform, 8, equal_across=wrong)
    unlike = (
        "in_multiples: expected leaves of equal numbers of units in equal_across, got "
        "8 at 'a' and 6 at 'b'"
    )
    with pytest.raises(ValueError, match=unlike):
        B.in_multiples(uniform, 2, equal_across="*")(shapes, 0.5)
    model = Given({path: math.prod(shape) for path, shape in shapes.items()}, sum)
    with pytest.raises(ValueError, match=unlike):
        B.in_multiples(B.within(6, model), 2, equal_across="*")
    with pytest.raises(ValueError, match="in_multiples: no path matches 'c'; the path"):
        B.in_multiples(uniform, 2, equal_across=["c"])(shapes, 0.5)
    with pytest.raises(
        ValueError,
        match="in_multiples: expected 10 units or more, which is a multiple of 4 for "
        "each leaf, got 9: 'c' has 2, no more than one multiple, and stays whole: "
        r"write {'c': 1, '\*': 4}, or a lower sparsity$",
    ):
        B.in_multiples(uniform, 4)({**shapes, "c": (2,)}, 0.42)
    with pytest.raises(  # less than a single unit of it would free
        ValueError, match="got 0: a lower sparsity keeps more$"
    ):
        B.in_multiples(uniform, 4)({**shapes, "c": (2,)}, 1.0)
    with pytest.raises(
        ValueError,
        match=r"in_multiples: expected within\(...\), got in_multiples\(within\(6, .*"
        r"give all numbers and globs in one call",
    ):
        B.in_multiples(B.in_multiples(B.within(6, model), 2), 4)
    with pytest.raises(
        ValueError,
        match="within: expected a limit of 8 params or more, which is what a multiple "
        "of 4 units of each leaf or set",
    ):
        _ = B.in_multiples(B.within(6, model), 4).counts
    with pytest.raises(
        ValueError, match="in_multiples: expected a sparsity whose value is known, got"
    ):
        torch.func.vmap(
            lambda s: torch.tensor(B.in_multiples(uniform, 4)(shapes, s)["a"])
        )(torch.tensor([0.5]))


def test_more_than_there_are_is_all():
    shapes = {"a": (4, 4), "b": (3, 3)}
    many = B.in_multiples(lambda shapes, sparsity: {"a": 2, "b": 100}, 2)
    assert many(shapes, 0.5) == {"a": 2, "b": 9}
