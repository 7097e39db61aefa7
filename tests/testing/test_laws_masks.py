"""The messages of the laws on counts, selection and exchange for algorithms that break
them.
"""

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing import Case, Exchange, Meta, Row
from sparsefn.testing import laws_masks as laws

W = torch.tensor([[4.0, 3.0], [2.0, 1.0]])
CASE = Case({"w": W}, ({"w": W.flip(0)},) * 3, 0.5, 0)
MAGNITUDE = Meta(start="magnitude", choose=sf.scores.magnitude, monotone=True)
EXCHANGE = Exchange(sf.scores.magnitude, sf.scores.gradient, lambda step: 0.5)
SWAP = Meta(start="magnitude", choose=EXCHANGE, needs_grads=True)


def row(make, meta):
    return Row("mine", lambda sparsity, key, params: make(sparsity), meta)


def swapping(**options):
    return lambda s: sf.rigl(
        s, init="magnitude", **{"when": sf.always(), "drop_fraction": 0.5, **options}
    )


def test_healthy_algorithms_hold():
    healthy = row(sf.gmp, MAGNITUDE)
    for law in (laws.counts_are_exact, laws.the_best_are_kept, laws.masks_only_shrink):
        law(healthy, CASE)
    for law in (
        laws.counts_are_exact,
        laws.the_worst_are_exchanged,
        laws.exchanges_conserve,
    ):
        law(row(swapping(), SWAP), CASE)


@pytest.mark.parametrize(
    ("law", "make", "meta", "message"),
    [
        (
            laws.counts_are_exact,
            lambda s: sf.gmp(0.25),
            MAGNITUDE,
            r"after init: \[3\] kept, expected \[2\]",
        ),
        (
            laws.counts_are_exact,
            lambda s: sf.phases([(0, sf.gmp(s)), (2, sf.dense())]),
            MAGNITUDE,
            r"after step 2: \[4\] kept, expected \[2\]",
        ),
        (
            laws.the_best_are_kept,
            lambda s: sf.gmp(
                s,
                score=lambda state, grads, step: optree.tree_map(
                    torch.neg, state.params
                ),
                init="dense",
            ),
            MAGNITUDE._replace(start="dense"),
            r"kept \[2, 3\], the best are \[0, 1\]",
        ),
        (
            laws.the_worst_are_exchanged,
            swapping(
                drop=lambda state, grads, step: optree.tree_map(torch.neg, state.params)
            ),
            SWAP,
            r"step 0: \[0\] had to stay|step 0: kept",
        ),
        (
            laws.exchanges_conserve,
            swapping(),
            SWAP._replace(choose=EXCHANGE._replace(fraction=lambda step: 0.0)),
            "step 0: 1 went, at most 0 may",
        ),
        (
            laws.exchanges_conserve,
            swapping(
                grown=lambda state, grown, step: optree.tree_map(
                    torch.ones_like, state.params
                )
            ),
            SWAP,
            "w: a grown weight does not start at zero",
        ),
        (
            laws.masks_only_shrink,
            lambda s: sf.gmp(s, regrow=True, pruned="train"),
            MAGNITUDE,
            r"step 0: w gained \[\[1, 0\], \[1, 1\]\]",
        ),
        (
            laws.units_are_whole,
            lambda s: sf.static(s, init="magnitude"),
            Meta(pattern=sf.patterns.channel(1)),
            None,
        ),
        (
            laws.floors_are_respected,
            lambda s: sf.from_masks({"w": W > 9}),
            Meta(distribution=sf.budgets.global_(floor=0.5)),
            "w keeps 0 of 4, not 2 to 4",
        ),
    ],
)
def test_what_is_said(law, make, meta, message):
    if message is None:
        message = "a unit of w is kept in part"
    with pytest.raises(AssertionError, match=message):
        law(row(make, meta), CASE)
