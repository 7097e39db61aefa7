"""What there is to a function beside what it returns is a record: `functools.wraps`
copies none to another function.
"""

import functools
import pickle

import pytest
import torch

import sparsefn as sf
from sparsefn.core.checks.factories import described
from sparsefn.core.state import update_of
from sparsefn.masks.scores.score_types import Absolute, Drawn

P = {
    "a": torch.tensor([[4.0, 3.0, 2.0, 1.0]]),
    "b": torch.tensor([[0.5, 8.0, 7.0, 6.0]]),
}


def wrapping(fn, called):
    """A function such as people write: it has the name and the attributes of another,
    and does more.
    """

    @functools.wraps(fn)
    def mine(*args, **kwargs):
        called.append(args)
        return fn(*args, **kwargs)

    return mine


@described
def known(score):
    return score


def test_a_record_is_that_of_one_function():
    for score in (
        sf.scores.magnitude,
        sf.scores.absolute(sf.scores.saliency),
        sf.scores.random,
    ):
        assert isinstance(score, Absolute | Drawn)
        once = wrapping(score, [])
        for copy in (
            once,
            wrapping(once, []),
            functools.partial(score),
            wrapping(known(score), []),
        ):
            assert not isinstance(copy, Absolute | Drawn)
    update = sf.gmp(0.5).update
    for copy in (wrapping(update, []), functools.partial(update)):
        mine = sf.gmp(0.5)._replace(update=copy)
        assert update_of(mine) == (copy, False, None, None)
    assert update_of(sf.gmp(0.5)).overwrites and not update_of(sf.dense()).overwrites


@pytest.mark.parametrize(
    "wrapped",
    [sf.scores.magnitude, sf.scores.gradient, sf.scores.random],
    ids=lambda f: f.__name__,
)
def test_a_wrapped_score_is_called_as_it_is_written(wrapped):
    @functools.wraps(wrapped)
    def mine(state, grads, step):
        return {path: -value for path, value in wrapped(state, grads, step).items()}

    def plain(state, grads, step):
        return mine(state, grads, step)

    def run(make, score):
        algorithm = make(score)
        state = algorithm.init(P)
        return [state := algorithm.update(state, P, step) for step in range(3)][-1]

    makers = {
        "one_shot": lambda score: sf.one_shot(0.5, score, when=sf.always()),
        "drop": lambda score: sf.rigl(0.5, drop=score, when=sf.always()),
        "grow": lambda score: sf.drop_grow(
            0.5, drop=sf.scores.magnitude, grow=score, when=sf.always()
        ),
        "joint": lambda score: sf.one_shot(
            0.5, score, distribution=sf.budgets.global_(), when=sf.always()
        ),
    }
    for make in makers.values():
        assert sf.checkpoint.tree_equal(run(make, mine).masks, run(make, plain).masks)
    kept, other = (run(makers["one_shot"], score).masks for score in (mine, wrapped))
    assert not sf.checkpoint.tree_equal(kept, other)


COMPOSED = {
    "with_optimizer": lambda a: sf.with_optimizer(a, sf.optimizers.sgd(0.1)),
    "chain": lambda a: sf.chain(a, sf.static(0.25)),
    "chain, second": lambda a: sf.chain(sf.static(0.25), a),
    "partition": lambda a: sf.partition([("a", a), ("*", sf.dense())]),
    "sequence": lambda a: sf.sequence(a, sf.rigl("current")),
    "phases": lambda a: sf.phases([(0, a), (5, sf.dense())]),
    "rewinding": lambda a: sf.rewinding(a, to=sf.at([0]), when=sf.at([5])),
    "donated": sf.donated,
    "captured": sf.captured,
    "reparametrised": lambda a: sf.reparametrised(
        sf.reparam.soft_threshold(init=0.0), a
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize(
    "inner",
    [
        lambda: sf.gmp(0.5),
        lambda: sf.donated(sf.gmp(0.5)),
        lambda: sf.captured(sf.gmp(0.5)),
    ],
    ids=["gmp", "donated", "captured"],
)
def test_a_wrapped_update_is_called(name, inner):
    algorithm, called = inner(), []
    mine = algorithm._replace(update=wrapping(algorithm.update, called))
    assert update_of(mine).inner is mine.update and not update_of(mine).overwrites
    whole = COMPOSED[name](mine)
    state = whole.init(P)
    new = whole.update(state, P, 0)
    assert called
    plain = COMPOSED[name](algorithm)
    assert sf.checkpoint.tree_equal(new.masks, plain.update(plain.init(P), P, 0).masks)


@pytest.mark.parametrize(
    "make", [sf.optimizers.sgd, sf.optimizers.adam, sf.optimizers.adamw]
)
def test_a_wrapped_optimizer_is_called(make):
    optimizer, called = make(0.1), []
    assert optimizer.under_masks is not None
    mine = optimizer._replace(update=wrapping(optimizer.update, called))
    assert (
        mine.under_masks is None
        and optimizer._replace(init=optimizer.init).under_masks is not None
    )
    algorithm = sf.with_optimizer(sf.rigl(0.5), mine)
    state = algorithm.init(P)
    before = len(called)
    new = algorithm.update(state, P, 1)
    assert len(called) > before
    other = sf.with_optimizer(sf.rigl(0.5), optimizer)
    assert sf.checkpoint.tree_equal(new, other.update(other.init(P), P, 1))


def made(name, called):
    def wrap(fn):
        return wrapping(fn, called)

    return {
        "schedule": lambda: sf.gmp(wrap(sf.schedules.linear(0.0, 0.25))),
        "trigger": lambda: sf.gmp(0.5, when=wrap(sf.every(1))),
        "distribution": lambda: sf.gmp(0.5, distribution=wrap(sf.budgets.erk())),
        "where": lambda: sf.gmp(0.5, where=wrap(sf.default_where)),
        "term": lambda: sf.with_optimizer(
            sf.with_terms(sf.dense(), wrap(sf.terms.l1(0.1))), sf.optimizers.sgd(0.1)
        ),
        "rate": lambda: sf.with_optimizer(
            sf.dense(), sf.optimizers.sgd(wrap(sf.schedules.constant(0.1)))
        ),
        "memory": lambda: sf.one_shot(
            0.5, sf.scores.ema(wrap(sf.scores.gradient), 0.5)
        ),
        "ranked": lambda: sf.one_shot(0.5, sf.scores.ranked(wrap(sf.scores.magnitude))),
        "solver": lambda: sf.rewrite(
            wrap(lambda path, w, mask, step: (w, mask)), when=sf.at([0])
        ),
        "accumulated": lambda: sf.one_shot(
            0.5, (score := sf.scores.momentum(0.5))._replace(value=wrap(score.value))
        ),
    }[name]()


PARTS = [
    "schedule",
    "trigger",
    "distribution",
    "where",
    "term",
    "rate",
    "memory",
    "ranked",
    "solver",
    "accumulated",
]


@pytest.mark.parametrize("name", PARTS)
def test_other_wrapped_parts_are_called(name):
    called = []
    algorithm = made(name, called)
    state = algorithm.update(algorithm.init(P), P, 0)
    assert called and sf.tree.leaves_of(state)


def test_a_wrapper_is_asked_for_its_own_arguments():
    @functools.wraps(sf.budgets.erk)
    def mine(shapes, sparsity):
        return sf.budgets.erk()(shapes, sparsity)

    kept = sf.masks.n_kept(sf.gmp(0.5, distribution=mine).init(P).masks)
    assert int(kept) == int(sf.masks.n_kept(sf.gmp(0.5).init(P).masks))

    @functools.wraps(sf.budgets.erk())
    def wrong(shapes):
        return {}

    with pytest.raises(
        TypeError,
        match=r"a function of \(shapes, sparsity\), got \w+, one of \(shapes\)",
    ):
        sf.gmp(0.5, distribution=wrong)
    with pytest.raises(
        TypeError,
        match=r"a function of \(shapes, sparsity\), got erk, one of \(power\)",
    ):
        sf.gmp(0.5, distribution=wrapping(sf.budgets.erk, []))


def test_an_algorithm_of_another_update_chooses_by_itself_in_a_chain():
    algorithm = sf.gmp(0.5)
    assert (
        algorithm.within is not None
        and algorithm._replace(view=algorithm.view).within is not None
    )
    assert algorithm._replace(update=algorithm.update).within is None
    assert algorithm._replace(init=algorithm.init, within=len).within is len
    other = sf.optimizers.sgd(0.1)
    assert pickle.loads(pickle.dumps(other)).under_masks is not None
    with pytest.raises((TypeError, ValueError), match="unexpected field names"):
        other._replace(updates=None)
