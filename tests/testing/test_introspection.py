"""What an algorithm says of itself: by its call, by its state, and by what it takes."""

import re

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing import Meta, Row
from sparsefn.testing.introspection import (
    completed,
    completed_meta,
    first_state,
    learned,
    said_by,
    takes_tensor,
)
from sparsefn.testing.laws import VMAP
from sparsefn.testing.strategies import large

EVEN, GLOBAL = sf.every(2), sf.budgets.global_()
RIGL = sf.rigl(0.5, when=EVEN, distribution=GLOBAL, pruned="keep", where="a")
PLAIN = sf.static(0.5)
OWN = sf.Algorithm(PLAIN.init, lambda state, grads, step: state)


def row(make, meta=Meta()):
    return Row("mine", lambda sparsity, key, params: make(sparsity), meta)


@pytest.mark.parametrize(
    "around",
    [
        lambda algorithm: algorithm,
        lambda algorithm: sf.with_terms(algorithm, sf.terms.l2(0.1)),
        lambda algorithm: sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1)),
        lambda algorithm: sf.rewinding(algorithm, to=sf.at([0]), when=sf.at([3])),
        lambda algorithm: sf.reparametrised(sf.reparam.power(2.0), algorithm),
    ],
    ids=["alone", "with terms", "with an optimizer", "rewinding", "reparametrised"],
)
def test_the_call_fills_what_is_left_open(around):
    meta = completed_meta("mine", Meta(start="random"), around(RIGL))
    assert meta == Meta(
        start="random", when=EVEN, distribution=GLOBAL, pruned="keep", where="a"
    )


def test_a_method_says_what_it_is_made_of():
    said = said_by(sf.methods.snip(0.9))
    assert said["when"] == sf.at([0]) and said["distribution"] == GLOBAL


def test_where_the_call_leaves_the_steps_open_the_algorithm_says_them():
    assert said_by(sf.rigl(0.5))["when"] == sf.every(100)
    assert (
        said_by(sf.with_optimizer(sf.rigl(0.5, steps=100_000), sf.optimizers.sgd(0.1)))[
            "when"
        ](75_000)
        is False
    )
    assert said_by(sf.gmp(0.5), ("score",)) == {"score": sf.scores.magnitude}


def test_a_pattern_is_told_as_a_layout():
    meta = completed(row(lambda s: sf.gmp(s, pattern=sf.patterns.channel(0)))).meta
    assert meta.layout is meta.pattern and meta.layout.pattern == sf.patterns.channel(0)


@pytest.mark.parametrize(
    "algorithm",
    [OWN, PLAIN._replace(update=OWN.update), sf.chain(RIGL, sf.static(0.5))],
    ids=["one's own", "changed", "of two"],
)
def test_what_says_nothing_leaves_all_as_it_is(algorithm):
    meta = Meta(monotone=True)
    assert all(
        old is new
        for old, new in zip(meta, completed_meta("mine", meta, algorithm), strict=True)
    )


def test_where_nothing_is_made_nothing_is_filled():
    def fails(sparsity):
        raise RuntimeError("not written yet")

    assert completed(row(fails)).meta == Meta()


def test_the_params_given_are_those_it_is_made_for():
    mine = Row(
        "mine", lambda s, key, params: sf.gmp(s, when=EVEN, where=[*params]), Meta()
    )
    assert completed(mine, {"fc": torch.ones(2, 2)}).meta.where == ["fc"]


def test_what_is_declared_wins_where_it_says_the_same():
    own = Meta(
        pruned="zero",
        when=lambda step: step % 2 == 0,
        distribution=lambda *given: sf.budgets.uniform()(*given),
    )
    assert completed_meta("mine", own, sf.gmp(0.5, when=EVEN)) == own
    assert (
        completed_meta("mine", Meta(pruned=sf.schedules.constant), sf.ste(0.5)).support
        is sf.schedules.constant
    )


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"when": sf.at([1])},
            "mine: Meta says when=at([1]), but the algorithm was made with "
            "when=every(2); leave it ",
        ),
        (
            {"pruned": "zero"},
            "Meta says pruned='zero', but the algorithm was made with pruned='keep'; "
            "leave it out of Meta",
        ),
        (
            {"distribution": sf.budgets.uniform()},
            "says distribution=uniform(), but the algorithm was made with dist",
        ),
        (
            {"distribution": sf.budgets.global_(floor=0.5)},
            "was made with distribution=global_(); leave it out of Meta",
        ),
    ],
    ids=["when", "pruned", "distribution", "bounds"],
)
def test_a_contradiction_is_an_error(declared, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        completed_meta("mine", Meta(**declared), RIGL)
    with pytest.raises(ValueError, match="leave it out of Meta"):
        sf.testing.check_laws(
            lambda sparsity, key: RIGL, meta=Meta(**declared), laws=[]
        )
    with pytest.raises(ValueError, match="leave it out of Meta"):
        sf.testing.passive(RIGL, meta=Meta(**declared))


def test_counts_of_a_distribution_are_compared():
    with pytest.raises(
        ValueError,
        match=r"says distribution=erk\(\), but the algorithm was made with "
        r"distribution=un",
    ):
        completed_meta(
            "mine",
            Meta(distribution=sf.budgets.erk()),
            sf.gmp(0.5, distribution=sf.budgets.uniform(True)),
        )


def test_a_function_that_reads_the_sparsity_takes_no_tensor():
    case = large()
    assert takes_tensor(row(sf.static), case)
    assert not takes_tensor(row(lambda s: sf.static(float(s))), case)
    assert not takes_tensor(row(lambda s: sf.static(0.5 if s > 0.5 else s)), case)


def test_one_that_reads_it_later_breaks_the_law():
    def late(sparsity, key):
        base = sf.static(0.5)
        return base._replace(
            init=lambda params: sf.static(float(sparsity)).init(params)
        )

    with pytest.raises(
        sf.testing.Broken, match=r"vmap_is_a_loop: RuntimeError: vmap: .*\.item\(\)"
    ):
        sf.testing.check_laws(late, laws=[VMAP], max_examples=4)


def test_what_trains_is_seen_in_the_state():
    params = {"latent": torch.ones(4, 4)}  # a name of a leaf is no role
    latent = sf.reparametrised(sf.reparam.power(2.0), sf.static(0.5))
    assert learned(sf.set(0.5, drop=sf.scores.momentum(0.5)).init(params)) == set()
    assert learned(latent.init(params)) == {"latent"}
    assert learned(sf.partition([("*", sf.supermask(0.5))]).init(params)) == {"learned"}
    assert optree.tree_structure(
        first_state(row(sf.static)).params
    ) == optree.tree_structure(large().params)
