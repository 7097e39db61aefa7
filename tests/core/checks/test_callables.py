"""Functions that are not what was asked for, and keywords that do not exist."""

import functools
import re

import pytest
import torch

import sparsefn as sf
from sparsefn.core.checks.callables import check_call, check_keywords

WRONG = {
    # An uncalled factory, or a part in the place of another, says what it should have
    # been.
    "distribution": (
        lambda: sf.static(0.5, distribution=sf.budgets.erk),
        "expected distribution to be a function of (shapes, sparsity), got erk "
        "itself; call it: erk()",
    ),
    "when": (
        lambda: sf.gmp(0.5, when=sf.always),
        "expected when to be a function of (step), got always itself; call it: "
        "always()",
    ),
    "sparsity": (
        lambda: sf.gmp(sf.scores.magnitude),
        "expected sparsity to be a function of (step), got magnitude, one of (state, "
        "grads, step)",
    ),
    "fraction": (
        lambda: sf.iterative(sf.schedules.cosine_decay),
        "expected fraction to be a function of (step), got cosine_decay itself; call "
        "it: cosine_decay(init, steps)",
    ),
    "score": (
        lambda: sf.one_shot(0.5, sf.scores.momentum),
        "expected score to be a function of (state, grads, step), got momentum "
        "itself; call it: momentum(decay)",
    ),
    "drop": (
        lambda: sf.rigl(0.5, drop=sf.always()),
        "expected drop to be a function of (state, grads, step), got always(), one of "
        "(step)",
    ),
    "where": (
        lambda: sf.static(0.5, where=lambda path: True).init({"w": torch.ones(2, 2)}),
        "expected where to be a function of (path, leaf), got <lambda>, one of (path)",
    ),
    "init": (
        lambda: sf.static(0.5, init=lambda: None).init({"w": torch.ones(2, 2)}),
        "expected init to be a function of (params), got <lambda>, one of ()",
    ),
    "init of scores": (
        lambda: sf.supermask(0.5, init=lambda: None).init({"w": torch.ones(2, 2)}),
        "expected init to be a function of (params), got <lambda>, one of ()",
    ),
    "link": (
        lambda: sf.supermask(0.5, link=lambda: 0),
        "expected link to be a function of (score), got <lambda>, one of ()",
    ),
    "count": (
        lambda: sf.rigl(0.5, count=lambda n: n),
        "expected count to be a function of (fraction, active), got <lambda>, one of "
        "(n)",
    ),
    "count of iterative": (
        lambda: sf.iterative(0.5, count=lambda n: n),
        "expected count to be a function of (fraction, active), got <lambda>, one of "
        "(n)",
    ),
    "grown": (
        lambda: sf.rigl(0.5, grown=lambda state: state),
        "expected grown to be a function of (state, grown, step), got <lambda>, one "
        "of (state)",
    ),
    "grow_count": (
        lambda: sf.rigl(0.5, grow_count=lambda n: n),
        "expected grow_count to be a function of (scores, free, wanted), got "
        "<lambda>, one of (n)",
    ),
    "redistribute": (
        lambda: sf.rigl(0.5, redistribute=lambda n: n),
        "expected redistribute to be a function of (scores, before, after), got "
        "<lambda>, one of (n)",
    ),
    "no function": (
        lambda: sf.rigl(0.5, count=3),
        "expected count to be a function of (fraction, active), got 3",
    ),
    "grown values": (
        lambda: sf.rigl(0.5, grown="zeros"),
        "expected grown to be a function of (state, grown, step), got 'zeros'",
    ),
    "a name as a link": (
        lambda: sf.supermask(0.5, link="abs"),
        "expected link to be a function of (score), got 'abs'",
    ),
    "term": (
        lambda: sf.with_terms(sf.dense(), sf.terms.l2),
        "expected the term at position 0 to be a function of (state, step), got l2 "
        "itself; call it: l2(strength)",
    ),
    "skip": (
        lambda: sf.with_optimizer(sf.dense(), sf.optimizers.sgd(0.1), skip=sf.never),
        "expected skip to be a function of (step), got never itself; call it: never()",
    ),
    # These could be called as what was meant, and would give nonsense.
    "global_": (
        lambda: sf.static(0.5, distribution=sf.budgets.global_),
        "expected distribution to be a function of (shapes, sparsity), got global_ "
        "itself; call it: global_()",
    ),
    "owl": (
        lambda: sf.static(0.5, distribution=sf.budgets.owl),
        "expected distribution to be a function of (shapes, sparsity), got owl "
        "itself; call it: owl(ratios)",
    ),
    "constant": (
        lambda: sf.gmp(sf.schedules.constant),
        "expected sparsity to be a function of (step), got constant itself; call it: "
        "constant(value)",
    ),
    "every": (
        lambda: sf.with_optimizer(sf.dense(), sf.optimizers.sgd(0.1), skip=sf.every),
        "expected skip to be a function of (step), got every itself; call it: every(n)",
    ),
    "at": (
        lambda: sf.rigl(0.5, when=sf.at),
        "expected when to be a function of (step), got at itself; call it: at(",
    ),
    "grasp": (
        lambda: sf.one_shot(0.5, sf.curvature.grasp),
        "expected score to be a function of (state, grads, step), got grasp itself; "
        "call it: grasp(loss, batch)",
    ),
    "count by scores": (
        lambda: sf.one_shot(sf.counts.above),
        "expected sparsity to be a function of (step), got above itself; call it: "
        "above(tau)",
    ),
    "lr": (
        lambda: sf.optimizers.sgd(sf.schedules.cosine_decay),
        "expected lr to be a number or a schedule, got cosine_decay itself; call it: "
        "cosine_decay(init, steps)",
    ),
    "heat": (
        lambda: sf.schedules.as_schedule(sf.schedules.constant),
        "expected a float or a schedule, got constant itself; call it: constant(value)",
    ),
    # What is no function has checks of its own.
    "pattern": (
        lambda: sf.static(0.5, pattern=sf.patterns.nm),
        "expected pattern to be one such as sf.patterns.nm(2, 4), got nm itself; call "
        "it: nm(n, m)",
    ),
    "optimizer": (
        lambda: sf.with_optimizer(sf.dense(), sf.optimizers.adamw),
        "such as sf.optimizers.sgd(0.1), adam(1e-3) or adamw(1e-3), got adamw itself; "
        "call it: adamw(lr)",
    ),
    "reparam": (
        lambda: sf.reparametrised(sf.reparam.soft_threshold),
        "such as sf.reparam.power(2.0), got soft_threshold itself; call it: "
        "soft_threshold(); a sparsity belongs to",
    ),
    "inner": (
        lambda: sf.reparametrised(sf.reparam.power(2.0), sf.dense),
        "reparametrised: expected an inner Algorithm, got dense itself; call it: "
        "dense()",
    ),
    "algorithm": (
        lambda: sf.with_optimizer(sf.rigl, sf.optimizers.sgd(0.1)),
        "with_optimizer: expected an Algorithm, got rigl itself; call it: "
        "rigl(sparsity)",
    ),
    "part of a chain": (
        lambda: sf.chain(sf.dense(), sf.dense),
        "chain: expected an Algorithm at position 1, got dense itself; call it: "
        "dense()",
    ),
    "part": (
        lambda: sf.partition([("*", sf.dense)]),
        "partition: expected an Algorithm at position 0, got dense itself; call it: "
        "dense()",
    ),
    "phase": (
        lambda: sf.phases([(0, sf.dense)]),
        "phases: expected an Algorithm at position 0, got dense itself; call it: "
        "dense()",
    ),
    "planned": (
        lambda: sf.report.plan(sf.dense, {}),
        "plan: expected an algorithm such as sf.rigl(0.9), got dense itself; call it: "
        "dense()",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_function_than_was_meant(name):
    make, message = WRONG[name]
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


def test_what_can_be_called_passes():
    check_call("score", lambda *args: args, "state", "grads", "step")
    check_call("where", functools.partial(sf.default_where), "path", "leaf")
    check_call("link", torch.abs, "score")  # written in C: its signature is not known
    check_call("count", lambda fraction, active, extra=1: active, "fraction", "active")


def test_misspelt_keywords_name_the_preset_and_the_closest():
    for make, options, message in (
        (
            sf.rigl,
            {"drop_fractoin": 0.1},
            "rigl() got an unexpected keyword argument 'drop_fractoin'; did you mean",
        ),
        (
            sf.set,
            {"steps_": 1},
            "set() got an unexpected keyword argument 'steps_'; did you mean 'steps'?",
        ),
        (
            sf.snfs,
            {"grwo": 0.5},
            "snfs() got an unexpected keyword argument 'grwo'; did you mean 'grow'?",
        ),
        (
            sf.rigl,
            {"xyz": 0},
            "rigl() got an unexpected keyword argument 'xyz'; expected one of "
            "sparsity, drop, grow, drop_f",
        ),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            make(0.5, **options)
    check_keywords("snfs", ["when", "decay"], ["decay", "when"])


@pytest.mark.deep
def test_algorithms_are_made_inside_compiled_code():
    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def masks(params):
        algorithm = sf.rigl(
            0.5, init="magnitude", distribution=sf.budgets.erk(), when=sf.every(2)
        )
        return algorithm.init(params).masks

    params = {"w": torch.randn(4, 4)}
    assert sf.checkpoint.tree_equal(
        masks(params), sf.rigl(0.5, init="magnitude").init(params).masks
    )
