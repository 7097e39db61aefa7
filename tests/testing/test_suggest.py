"""The `Meta` that would hold is found in one call, with what it gives up and what no
declaration mends.
"""

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing.laws import COMPILE, LAWS
from tests.testing.broken import by, draws, one_more

FAST = [law for law in LAWS if law is not COMPILE]


def suggestion(make, meta=sf.testing.Meta(), laws=FAST):
    return sf.testing.check_laws(
        make, meta=meta, laws=laws, max_examples=8, suggest=True
    ).suggestion


def noisy(sparsity, key):
    """The algorithm of the page on writing one's own."""

    def init(params):
        params = sf.tree.copied(params)

        def mask(path, x):
            full = sf.default_where(path, x)
            return torch.ones(
                x.shape if full else (), dtype=torch.bool, device=x.device
            )

        return sf.State(params, sf.tree.map_with_path(mask, params), key=key)

    def prune(state, step):
        def mask(weight, draw, old):
            if not old.ndim:
                return old
            return sf.masks.topk_mask(
                weight.abs() * (1 + draw), sf.budgets.n_kept(weight.numel(), sparsity)
            )

        drawn = sf.scores.random(state, (), step)
        return state._replace(
            masks=optree.tree_map(mask, state.params, drawn, state.masks)
        )

    def update(state, grads, step):
        step = sf.triggers.check_step(step)
        return sf.tree.choose(sf.every(2)(step), lambda now: prune(now, step), state)

    return sf.Algorithm(init, update)


@pytest.fixture(scope="module")
def of_noisy():
    return suggestion(noisy)


@pytest.mark.deep
def test_a_first_algorithm_gets_all_it_needs_in_one_call(of_noisy):
    meta = of_noisy.meta
    assert (meta.when, meta.start, meta.pruned, meta.stochastic) == (
        sf.every(2),
        "dense",
        "keep",
        "anew",
    )
    assert of_noisy.broken == () and "counts_are_exact" in of_noisy.held
    report = sf.testing.check_laws(
        noisy, meta=meta, laws=FAST, max_examples=8, on_fail="report"
    )
    assert report.ok and set(report.held) == set(of_noisy.held)


@pytest.mark.deep
def test_the_text_says_why(of_noisy):
    assert "start='dense',  # after init all weights are kept" in of_noisy.text
    assert (
        "when=every(2),  # of the first 12 steps masks change at these" in of_noisy.text
    )
    assert "pruned='keep',  # else pruned_weights_are_zero fails: " in of_noisy.text


def test_what_is_given_up_is_said():
    found = suggestion(
        by(one_more), sf.testing.Meta(start="magnitude", pruned="train"), laws=LAWS[:2]
    )
    assert "exact_count=False,  # gives up counts_are_exact: after init: " in found.text
    assert not found.meta.exact_count and "counts_are_exact" not in found.held


def test_a_bug_that_no_declaration_mends_is_told_as_one():
    found = suggestion(draws, laws=[sf.testing.laws.PURITY])
    assert [line.partition(": ")[0] for line in found.broken] == [
        "draws breaks purity, functions_are_pure"
    ]
    assert "functions_are_pure" not in found.held


def test_what_the_call_says_is_not_said_again():
    made = {
        "when": sf.every(2),
        "distribution": sf.budgets.erk(),
        "pruned": "keep",
        "score": sf.scores.saliency,
    }
    found = suggestion(lambda s, key: sf.gmp(s, **made), laws=LAWS[:3])
    assert found.broken == () and "counts_are_exact" in found.held
    assert found.meta == sf.testing.Meta(
        start="magnitude", choose=sf.scores.saliency, monotone=True
    )


def test_what_the_call_says_is_not_looked_for():
    # masks that change at no step, though they may
    found = suggestion(lambda s, key: sf.gmp(s), laws=LAWS[9:10])
    assert found.meta == sf.testing.Meta()


@pytest.mark.deep
def test_an_exchange_is_read_from_the_call():
    exchange = sf.testing.Exchange(
        sf.scores.magnitude, sf.scores.gradient, sf.schedules.constant(0.3)
    )
    found = suggestion(
        lambda s, key: sf.rigl(s, when=sf.every(2), key=key), laws=LAWS[:4]
    )
    assert repr(found.meta.choose) == repr(exchange)
    assert {"the_worst_are_exchanged", "exchanges_conserve", "counts_are_exact"} <= set(
        found.held
    )
    code = "drop=magnitude, grow=gradient, fraction=constant(0.3)"
    assert f"choose=Exchange({code}),  # holds" in found.text
    drawn = suggestion(
        lambda s, key: sf.set(s, drop_fraction=0.5, key=key), laws=LAWS[:4]
    ).meta.choose
    assert drawn.grow is None and drawn.fraction(0) == 0.5
    assert (
        suggestion(
            lambda s, key: sf.rigl(s, steps=1000, key=key), laws=LAWS[:2]
        ).meta.choose
        is None
    )


@pytest.mark.deep(but=["at*"])
@pytest.mark.parametrize(
    "when", [sf.every(3), sf.every(4, start=1), sf.at([2]), sf.never()], ids=repr
)
def test_the_trigger_is_seen_over_more_steps_than_a_run_has(when):
    def mine(sparsity, key):
        base = sf.gmp(sparsity, when=when, init="dense")
        return sf.Algorithm(base.init, lambda *given: base.update(*given))

    assert suggestion(mine, laws=LAWS[9:10]).meta.when == when


@pytest.mark.parametrize(
    "given",
    [sf.testing.Meta(start="dense"), sf.testing.Meta(start="dense", when=sf.every(2))],
)
def test_a_wrong_start_is_mended_before_counts_are_given_up(given):
    found = suggestion(lambda s, key: sf.gmp(s, when=sf.every(2)), given, laws=LAWS[:4])
    assert (found.meta.start, found.meta.exact_count) == (
        "magnitude",
        True,
    ) and found.broken == ()
    assert {"counts_are_exact", "the_best_are_kept"} <= set(found.held)
    assert "start='magnitude',  # holds" in found.text


def test_a_wrong_start_that_no_magnitude_mends_is_another_one():
    found = suggestion(
        lambda s, key: sf.static(s, key=key),
        sf.testing.Meta(start="dense"),
        laws=LAWS[:2],
    )
    assert (found.meta.start, found.meta.exact_count) == (
        "other",
        True,
    ) and "counts_are_exact" in found.held


@pytest.mark.deep
def test_a_wrong_trigger_is_mended_before_idleness_is_given_up():
    def mine(sparsity, key):
        base = sf.set(sparsity, when=sf.every(2), key=key)
        return sf.Algorithm(base.init, lambda *given: base.update(*given))

    found = suggestion(mine, sf.testing.Meta(when=sf.every(3)), laws=LAWS[9:10])
    assert found.meta.when == sf.every(2) and found.meta.idle and found.broken == ()


def test_what_is_declared_stays_where_it_holds():
    given = sf.testing.Meta(
        when=sf.every(2), start="magnitude", choose=sf.scores.magnitude, monotone=True
    )
    found = suggestion(lambda s, key: sf.gmp(s, when=sf.every(2)), given, laws=LAWS[:4])
    assert found.meta == given and found.broken == ()


def test_where_nothing_runs_nothing_is_promised():
    def fails(sparsity, key):
        raise RuntimeError("not written yet")

    found = suggestion(fails, laws=LAWS[:1])
    assert found.text == "Meta()"
    assert found.broken == (
        "fails: make raises RuntimeError: not written yet; w of shape (2, 3), "
        "torch.float32",
    )
