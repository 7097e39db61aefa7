"""Strategies draw what they say."""

import math

import optree
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn.testing import strategies
from sparsefn.testing.byte_trees import EVERY, Source, case
from sparsefn.testing.oracle import computed_layout

FEW = settings(max_examples=15, deadline=None, database=None, derandomize=True)
# Shrinking what was found is not the point here.
MANY = settings(FEW, max_examples=2000, phases=[Phase.generate])


def holds(strategy, condition):
    """Whether an example with the condition is drawn."""
    find(strategy, condition, settings=MANY)


def leaves(tree):
    return optree.tree_leaves(tree)


@pytest.mark.parametrize(
    "condition",
    [
        lambda tree: isinstance(tree, list),
        lambda tree: (
            isinstance(tree, dict)
            and any(isinstance(part, tuple) for part in tree.values())
        ),
        lambda tree: {x.dtype for x in leaves(tree)} >= {torch.float32, torch.bfloat16},
        lambda tree: any(x.dtype == torch.float64 for x in leaves(tree)),
        lambda tree: any(x.ndim > 1 and x.numel() == 0 for x in leaves(tree)),
        lambda tree: any(x.ndim > 1 and x.numel() == 1 for x in leaves(tree)),
        lambda tree: any(x.isnan().any() for x in leaves(tree)),
        lambda tree: any(x.isinf().any() for x in leaves(tree)),
        lambda tree: any(((x == 0) & torch.signbit(x)).any() for x in leaves(tree)),
        lambda tree: any(
            ((x != 0) & (x.abs() < torch.finfo(x.dtype).smallest_normal)).any()
            for x in leaves(tree)
        ),
        lambda tree: any(
            x.numel() > 4 and len(x.unique()) < x.numel() / 2 for x in leaves(tree)
        ),
    ],
    ids=[
        "list",
        "tuple",
        "mixed",
        "float64",
        "empty",
        "single",
        "nan",
        "inf",
        "negative-zero",
        "subnormal",
        "ties",
    ],
)
def test_params_trees_hold_every_hard_case(condition):
    holds(strategies.params_trees(), condition)


@FEW
@given(strategies.params_trees(distinct=True))
def test_distinct_trees_have_no_ties(tree):
    values = torch.cat([x.reshape(-1).double().abs() for x in leaves(tree)])
    assert len(values.unique()) == len(values)


@FEW
@given(strategies.params_trees(sf.testing.Form(rows=2, columns=4, least=2, ndims=(2,))))
def test_forms_are_kept(tree):
    chosen = [
        x for path, x in sf.tree.flatten(tree)[0].items() if sf.default_where(path, x)
    ]
    assert chosen
    assert all(
        x.ndim == 2 and x.shape[0] % 2 == 0 and x.shape[1] % 4 == 0 and x.numel() >= 32
        for x in chosen
    )


@pytest.mark.deep
def test_gradients_are_like_the_params():
    params = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": [torch.ones(4)]}
    grads = find(strategies.grads_like(params), lambda g: bool(g["a"].abs().max() > 0))
    assert optree.tree_structure(grads) == optree.tree_structure(params)
    assert grads["a"].shape == (2, 3)
    assert grads["a"].dtype == torch.bfloat16


def test_steps_and_sparsities():
    holds(
        strategies.steps(),
        lambda step: isinstance(step, torch.Tensor) and int(step) > 1000,
    )
    holds(strategies.steps(), lambda step: step == 0 and isinstance(step, int))
    for value in (0.0, 1.0, 0.5):
        holds(strategies.sparsities(), lambda s, value=value: s == value)
    holds(
        strategies.sparsities(12), lambda s: 0 < s < 1 and math.isclose(s * 12 % 1, 0.5)
    )


@FEW
@given(strategies.schedules(), st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_schedules_stay_in_the_unit_interval(schedule, steps):
    assert all(0.0 <= schedule(step) <= 1.0 for step in steps)


@FEW
@given(strategies.triggers(), st.integers(0, 100))
def test_triggers_answer(trigger, step):
    assert trigger(step) in (True, False)


@FEW
@given(strategies.patterns())
def test_a_layout_is_found_for_every_pattern(pattern):
    layout = computed_layout(pattern)
    run = case(Source(bytes(range(250)) * 4), layout.form, EVERY, False)
    for path, leaf in sf.tree.flatten(run.params)[0].items():
        if sf.default_where(path, leaf) and leaf.numel():
            sf.masks.topk_mask(
                leaf.float(), None if pattern.fixed is not None else 0, pattern=pattern
            )


def test_one_large_run_is_always_the_same():
    assert sf.checkpoint.tree_equal(
        strategies.large().params, strategies.large().params
    )
    assert min(x.numel() for x in [strategies.large(elements=1000).params["a"]]) >= 1000


@pytest.mark.parametrize("build", ["drawn", "large"])
def test_trees_have_three_sparsified_leaves_of_several_dtypes(build):
    tree = strategies.large().params if build == "large" else None

    def counts(tree):
        chosen = [
            leaf.dtype
            for path, leaf in sf.tree.flatten(tree)[0].items()
            if sf.default_where(path, leaf)
        ]
        return len(chosen) >= 3 and len(set(chosen)) >= 2

    assert counts(
        find(strategies.params_trees(), counts, settings=MANY) if tree is None else tree
    )
