"""The messages of the laws on dependence for algorithms that break them."""

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing import Case, Meta, Row
from sparsefn.testing import laws_dependence as laws

W = torch.arange(1.0, 13.0).reshape(3, 4)
CASE = Case({"w": W}, ({"w": W.flip(1)}, {"w": W.flip(0)}, {"w": W}), 0.5, 0)


def row(make, **flags):
    return Row("mine", lambda sparsity, key, params: make(sparsity, key), Meta(**flags))


def by_grads(s, key):
    return sf.gmp(s, score=sf.scores.saliency, regrow=True, pruned="keep")


def by_place(s, key):
    def place(state, grads, step):
        return optree.tree_map(
            lambda p: torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape),
            state.params,
        )

    return sf.gmp(s, score=place, init="dense")


def plain(s, key):
    return sf.gmp(s)


@pytest.mark.parametrize(
    ("law", "make", "flags", "message"),
    [
        (laws.gradients_matter_where_declared, by_grads, {}, "masks: differs at w"),
        (
            laws.keys_matter_where_declared,
            lambda s, key: sf.static(s, key=key),
            {},
            "masks: differs at w",
        ),
        (
            laws.declared_dependence_is_real,
            plain,
            {"stochastic": True},
            "the key does not matter",
        ),
        (
            laws.declared_dependence_is_real,
            plain,
            {"needs_grads": True},
            "the gradients do not matter",
        ),
        (
            laws.declared_dependence_is_real,
            lambda s, key: sf.static(s, key=key),
            {"stochastic": "anew"},
            "every step draws the same",
        ),
        (laws.permutations_commute, by_place, {}, "masks: differs at w"),
        (
            laws.scale_does_not_matter,
            lambda s, key: sf.static(None, init=_above_six),
            {},
            "masks: differs at w",
        ),
        (
            laws.names_do_not_matter,
            lambda s, key: sf.static(s, key=key),
            {},
            "masks: differs at w",
        ),
        (
            laws.levels_stay_in_bounds,
            plain,
            {"level": lambda s: lambda step: s + step},
            "the level at step 1 is 1.5",
        ),
        (
            laws.levels_stay_in_bounds,
            plain,
            {"level": lambda s: lambda step: 0.5 if isinstance(step, int) else 0.25},
            "the level at step 0 is 0.5, but 0.25 for a tensor",
        ),
        (
            laws.levels_stay_in_bounds,
            plain,
            {"when": lambda step: isinstance(step, int)},
            "the trigger says True at step 0, but False for a tensor",
        ),
        (
            laws.nothing_happens_between_triggers,
            plain,
            {"when": sf.never()},
            "step 0 ran|state at step 0",
        ),
        (
            laws.nothing_happens_between_triggers,
            lambda s, key: sf.iterative(s),
            {"when": sf.at([0])},
            "masks at step 1: differs at w",
        ),
    ],
)
def test_what_is_said(law, make, flags, message):
    with pytest.raises(AssertionError, match=message):
        law(row(make, **flags), CASE)


def _above_six(params):
    return {path: leaf.abs() > 6 for path, leaf in params.items()}


def test_a_leaf_that_leans_on_another_is_noticed():
    shared = row(lambda s, key: sf.gmp(s, distribution=sf.budgets.global_()))
    with pytest.raises(AssertionError, match="masks: differs at w"):
        laws.leaves_are_independent(shared, CASE._replace(params={"w": W / 100}))
    laws.leaves_are_independent(row(plain), CASE)


def test_new_draws_are_looked_for_where_the_trigger_fires_and_where_nothing_grows():
    def once(score):
        return row(
            lambda s, key: sf.one_shot(s, score, when=later, key=key),
            when=later,
            stochastic="anew",
        )

    later = sf.every(3, start=1)
    run = CASE._replace(
        params={"w": torch.ones(8, 8)}, grads=({"w": torch.ones(8, 8)},) * 3
    )
    laws.declared_dependence_is_real(once(sf.scores.random), run)
    with pytest.raises(AssertionError, match="every step draws the same"):
        laws.declared_dependence_is_real(
            once(lambda state, grads, step: sf.scores.random(state, grads, 0)), run
        )
