"""The messages of the laws on extremes for algorithms that break them."""

import pytest
import torch

import sparsefn as sf
from sparsefn.testing import Case, Meta, Row
from sparsefn.testing import laws_ends as laws

W = torch.arange(1.0, 13.0).reshape(3, 4)
CASE = Case({"w": W}, ({"w": W.flip(1)}, {"w": W.flip(0)}, {"w": W}), 0.5, 0)


def row(make, **flags):
    return Row("mine", lambda sparsity, key, params: make(sparsity), Meta(**flags))


def scaled(change):
    base = sf.gmp(0.5)
    return lambda s: sf.Algorithm(
        base.init, lambda state, grads, step: change(base.update(state, grads, step))
    )


@pytest.mark.parametrize(
    ("law", "broken", "message"),
    [
        (
            laws.sparsity_zero_is_dense,
            row(lambda s: sf.gmp(0.5)),
            "state 0: something is pruned",
        ),
        (
            laws.sparsity_zero_is_dense,
            row(lambda s: sf.with_terms(sf.gmp(s), sf.terms.l2(0.5))),
            "weights in state 1: differs at w",
        ),
        (laws.sparsity_one_is_empty, row(lambda s: sf.gmp(0.5)), "something is kept"),
        (
            laws.pruned_weights_are_zero,
            row(lambda s: sf.gmp(s, pruned="keep")),
            "w is not zero off its mask",
        ),
        (
            laws.outside_optimizers_cannot_revive,
            row(lambda s: sf.gmp(s, pruned="train")),
            "with_params at step 0: differs at params.w",
        ),
        (
            laws.nothing_to_sparsify_is_dense,
            row(lambda s: sf.gmp(s, where=lambda path, leaf: leaf.ndim > 1)),
            "'norm'. is sparsified",
        ),
        (
            laws.nothing_to_sparsify_is_dense,
            row(
                scaled(
                    lambda state: state._replace(
                        params={path: 2 * x for path, x in state.params.items()}
                    )
                )
            ),
            "weights: differs at bias",
        ),
    ],
)
def test_what_is_said(law, broken, message):
    with pytest.raises(AssertionError, match=message):
        law(broken, CASE)


def test_a_stale_moment_is_noticed():
    def make(s):
        rigl = sf.rigl(s, init="magnitude", drop_fraction=0.5, when=sf.always())
        return sf.with_optimizer(rigl, sf.optimizers.adam(0.1), mask_moments=False)

    with pytest.raises(
        AssertionError, match="the moment .* is not zero where nothing trains"
    ):
        laws.pruned_weights_are_zero(row(make), CASE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: sf.ste(s), r"state 0: \[\] have a support"),
        (
            lambda s: sf.chain(sf.gmp(0.5, regrow=True, pruned="keep"), sf.ste(s)),
            r"state 0: \[6\] weights may move",
        ),
        (
            lambda s: chained_and(
                lambda state: state._replace(masks={"w": state.masks["w"] | True})
            ),
            "w is kept where",
        ),
        (
            lambda s: chained_and(
                lambda state: state._replace(params={"w": state.params["w"] / 2})
            ),
            "w has changed",
        ),
    ],
)
def test_a_weight_that_moves_off_its_support_is_noticed(make, message):
    promised = {"pruned": lambda s: lambda step: 0.25}
    with pytest.raises(AssertionError, match=message):
        laws.nothing_moves_off_the_support(row(make, **promised), CASE)
    laws.nothing_moves_off_the_support(
        row(lambda s: chained_and(lambda state: state), **promised), CASE
    )


@pytest.mark.parametrize("trained", ["latent", "learned"])
def test_weights_that_are_taken_where_others_train_are_noticed(trained, monkeypatch):
    made = {
        "latent": lambda s: sf.reparametrised(sf.reparam.power(2.0), sf.static(s)),
        "learned": lambda s: sf.supermask(s),
    }
    laws.outside_optimizers_cannot_revive(row(made[trained]), CASE)
    monkeypatch.setattr(
        laws, "with_params", lambda state, params: state._replace(params=params)
    )
    with pytest.raises(
        AssertionError, match=f"with_params takes weights, but .'{trained}'. train"
    ):
        laws.outside_optimizers_cannot_revive(row(made[trained]), CASE)


def chained_and(change):
    base = sf.chain(sf.gmp(0.25, regrow=True, pruned="keep"), sf.ste(0.5))
    return base._replace(
        update=lambda state, grads, step: change(base.update(state, grads, step))
    )
