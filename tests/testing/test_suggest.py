"""The `Meta` that would hold is found in one call, with what it gives up and what no declaration mends."""

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing.laws import COMPILE, LAWS
from tests.testing.broken import by, draws, one_more

FAST = [law for law in LAWS if law is not COMPILE]


def suggestion(make, meta=sf.testing.Meta(), laws=FAST):
    return sf.testing.check_laws(make, meta=meta, laws=laws, max_examples=8, suggest=True).suggestion


def noisy(sparsity, key):
    """The algorithm of the page on writing one's own."""

    def init(params):
        params = sf.tree.copied(params)

        def mask(path, x):
            full = sf.default_where(path, x)
            return torch.ones(x.shape if full else (), dtype=torch.bool, device=x.device)

        return sf.State(params, sf.tree.map_with_path(mask, params), key=key)

    def prune(state, step):
        def mask(weight, draw, old):
            if not old.ndim:
                return old
            return sf.topk_mask(weight.abs() * (1 + draw), sf.budgets.n_kept(weight.numel(), sparsity))

        drawn = sf.scores.random(state, (), step)
        return state._replace(masks=optree.tree_map(mask, state.params, drawn, state.masks))

    def update(state, grads, step):
        step = sf.triggers.check_step(step)
        return sf.tree.choose(sf.every(2)(step), lambda now: prune(now, step), state)

    return sf.Algorithm(init, update)


@pytest.fixture(scope="module")
def of_noisy():
    return suggestion(noisy)


def test_a_first_algorithm_gets_all_it_needs_in_one_call(of_noisy):
    meta = of_noisy.meta
    assert (meta.when, meta.start, meta.pruned, meta.stochastic) == (sf.every(2), "dense", "keep", True)
    assert of_noisy.broken == () and "counts_are_exact" in of_noisy.held
    report = sf.testing.check_laws(noisy, meta=meta, laws=FAST, max_examples=8, on_fail="report")
    assert report.ok and set(report.held) == set(of_noisy.held)


def test_the_text_is_code_that_says_why(of_noisy):
    assert eval(of_noisy.text, {"sf": sf, "torch": torch}) == of_noisy.meta
    assert 'start="dense",  # after init all weights are kept' in of_noisy.text
    assert "when=sf.every(2),  # at other steps of 0, 1 and 2 nothing happens" in of_noisy.text
    assert 'pruned="keep",  # else pruned_weights_are_zero fails: ' in of_noisy.text


def test_what_is_given_up_is_said():
    found = suggestion(by(one_more), sf.testing.Meta(start="magnitude", pruned="train"), laws=LAWS[:2])
    assert "exact_count=False,  # gives up counts_are_exact: after init: " in found.text
    assert not found.meta.exact_count and "counts_are_exact" not in found.held


def test_a_bug_that_no_declaration_mends_is_told_as_one():
    found = suggestion(draws, laws=[sf.testing.laws.PURITY])
    assert [line.partition(": ")[0] for line in found.broken] == ["draws breaks purity, functions_are_pure"]
    assert "functions_are_pure" not in found.held


def test_the_call_that_made_it_is_read():
    found = suggestion(lambda s, key: sf.gmp(0.5, when=sf.every(2), pattern=sf.patterns.nm(2, 4)), laws=LAWS[4:5])
    assert "when=sf.every(2),  # as its call says" in found.text
    assert found.meta.layout.pattern == sf.patterns.nm(2, 4)


def test_what_is_declared_stays_where_it_holds():
    given = sf.testing.Meta(when=sf.every(2), start="magnitude", choose=sf.scores.magnitude, monotone=True)
    found = suggestion(lambda s, key: sf.gmp(s, when=sf.every(2)), given, laws=LAWS[:4])
    assert found.meta == given and found.broken == ()


def test_where_nothing_runs_nothing_is_promised():
    def fails(sparsity, key):
        raise RuntimeError("not written yet")

    found = suggestion(fails, laws=LAWS[:1])
    assert found.text == "sf.testing.Meta()"
    assert found.broken == ("fails: make raises RuntimeError: not written yet; w of shape (2, 3), torch.float32",)
