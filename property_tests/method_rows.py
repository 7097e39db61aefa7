"""One row per method of `sf.methods`. The parts that they are made of have rows in
`registry.py`.
"""

import math
from typing import Any

import optree
import torch

import sparsefn as sf
from property_tests.layouts import NM, ROW_BALANCED
from property_tests.registry import (
    EXAMPLES,
    FADING,
    GRASP,
    ITERATIVE,
    MAGNITUDE,
    PRUNE,
    SALIENCY,
    SHOT,
    SYNFLOW,
    first_entry,
    quadratic,
    swap,
    weighed,
)
from sparsefn.core.state import Schedule
from sparsefn.core.tree import Tree
from sparsefn.testing import Exchange, Meta, Row
from sparsefn.testing.harness import leaves
from sparsefn.testing.introspection import completed

EVEN, FIRST = sf.every(2), sf.at([0])
STARTED = SHOT._replace(needs_grads=True, permutes=False)
SUMMED = sf.scores.absolute(sf.scores.sum(sf.scores.movement))
DRAWN = Meta(start="random", stochastic="anew", permutes=False)
TWO = sf.every(1, stop=2)


def in_two(sparsity: Any) -> Schedule:
    return lambda step: 1.0 - (1.0 - sparsity) ** 0.5 if step == 0 else sparsity


def turning(sparsity: Any) -> Schedule:
    return lambda step: sparsity if step == 0 else 0.0


def rising(sparsity: Any) -> Schedule:
    return sf.schedules.polynomial(0.0, sparsity, begin=0, end=4)


def lower(sparsity: Any) -> Schedule:
    return lambda step: max(sparsity - 0.25, 0.0)


def even_rows(shapes: Any, sparsity: Any) -> Any:
    """As many in every row, rounded down."""
    counts = sf.budgets.uniform()(shapes, sparsity)
    return {
        path: counts[path] // max(shape[0], 1) * shape[0]
        for path, shape in shapes.items()
    }


ROWS = [
    # at the start
    Row(
        "snip", lambda s, key, _: sf.methods.snip(s), STARTED._replace(choose=SALIENCY)
    ),
    Row(
        "snip of two batches",
        lambda s, key, _: sf.methods.snip(s, batches=2),
        STARTED._replace(choose=SUMMED, idle=False),
    ),
    Row(
        "force",
        lambda s, key, _: sf.methods.force(s, rounds=2),
        STARTED._replace(level=in_two, choose=SALIENCY, pruned="keep", monotone=False),
    ),
    Row(
        "force without a way back",
        lambda s, key, _: sf.methods.force(s, rounds=2, recover=False),
        STARTED._replace(level=in_two, choose=SALIENCY),
    ),
    Row(
        "grasp",
        lambda s, key, _: sf.methods.grasp(
            s, quadratic, lambda step: (EXAMPLES[2:],), temperature=None
        ),
        SHOT._replace(choose=GRASP),
    ),
    Row(
        "synflow",
        lambda s, key, _: sf.methods.synflow(s, weighed, (1,), rounds=2),
        SHOT._replace(level=in_two, choose=SYNFLOW),
    ),
    # lottery tickets
    Row(
        "imp",
        lambda s, key, _: sf.methods.imp(s, when=EVEN, to=FIRST),
        ITERATIVE._replace(baseline=lambda: sf.methods.imp(0.0, when=EVEN, to=FIRST)),
    ),
    # by turns
    Row(
        "ac_dc",
        lambda s, key, _: sf.methods.ac_dc(s, sparse=FIRST, dense=sf.at([2])),
        PRUNE._replace(
            when=sf.at([0, 2]), level=turning, start="dense", monotone=False
        ),
    ),
    # masks that move
    Row(
        "set by sign",
        lambda s, key, _: sf.methods.set(
            s, key=key, drop=sf.scores.ranked(sf.scores.magnitude), **swap
        ),
        DRAWN._replace(choose=Exchange(sf.scores.ranked(MAGNITUDE), None, FADING)),
    ),
    Row(
        "granet",
        lambda s, key, _: sf.methods.granet(s, steps=4, initial=0.0, when=EVEN),
        Meta(
            level=rising,
            distribution=sf.budgets.global_(),
            start="dense",
            needs_grads=True,
            permutes=False,
        ),
    ),
    Row(
        "mest",
        lambda s, key, _: sf.methods.mest(s, extra=0.25, when=EVEN, key=key),
        DRAWN._replace(baseline=None),
    ),
    Row(
        "mest with a soft bound",
        lambda s, key, _: sf.methods.mest(
            s, extra=0.25, soft=True, gradient=0.5, when=EVEN, key=key
        ),
        DRAWN._replace(
            level=lower, needs_grads=True, baseline=None, scale_free=False
        ),  # weights plus gradients
    ),
    Row(
        "top_kast",
        lambda s, key, _: sf.methods.top_kast(
            0.5 * s, backward=0.25 * s, decay=0.5, when=EVEN
        ),
        Meta(
            level=lambda s: sf.schedules.constant(0.5 * s),
            start="magnitude",
            choose=MAGNITUDE,
            pruned=lambda s: sf.schedules.constant(0.25 * s),
            permutes=False,  # as of "chain keep ste"
            baseline=lambda: sf.with_terms(sf.dense(), sf.terms.l2(0.5)),
        ),
    ),
    Row(
        "srigl without ablation",
        lambda s, key, _: sf.methods.srigl(
            s, steps=9, ablation=0.0, drop_fraction=0.4, when=EVEN, key=key
        ),
        DRAWN._replace(
            pattern=ROW_BALANCED,
            distribution=even_rows,
            needs_grads=True,
            stochastic=True,
        ),
    ),
    Row(
        "srigl",
        lambda s, key, _: sf.methods.srigl(
            s, steps=9, drop_fraction=0.4, when=EVEN, key=key
        ),
        DRAWN._replace(
            exact_count=False, needs_grads=True, stochastic=True, baseline=None
        ),
    ),
    Row(
        "deep_rewiring",
        lambda s, key, _: sf.methods.deep_rewiring(s, key=key),
        DRAWN._replace(stochastic=True, scale_free=False, baseline=None),
    ),
    Row(
        "dsr",
        lambda s, key, _: sf.methods.dsr(s, when=EVEN, target=2, tau=1.0, key=key),
        DRAWN._replace(exact_count="total", scale_free=False),
    ),
    Row(
        "chts",
        lambda s, key, _: sf.methods.chts(s, steps=4, when=EVEN, key=key),
        DRAWN._replace(scale_free=False, baseline=None),
    ),
]

LEARNED = Meta(scale_free=False, permutes=False, exact_count=False, baseline=None)
GATES = LEARNED._replace(when=sf.never())
# 2 of 4 are kept, whatever the sparsity is.
HALF: dict[str, Any] = {
    "pattern": NM,
    "baseline": None,
}
TRAINED = Meta(start="dense", monotone=True, permutes=False)


def calibrated(params: Tree) -> dict[str, dict[str, torch.Tensor]]:
    """Statistics of four inputs for each leaf of two dimensions or more."""
    stats = {}
    for path, leaf in leaves(params).items():
        if leaf.ndim > 1:
            width = math.prod(leaf.shape[1:])
            square = (
                1.0 + torch.arange(width, dtype=torch.float64, device=leaf.device) % 3
            )
            stats[path] = {
                "count": torch.full((), 4, device=leaf.device),
                "square": square,
            }
    return stats


def examples_of(params: Tree) -> Tree:
    """Gradients of two examples."""
    return optree.tree_map(
        lambda leaf: torch.stack([torch.ones_like(leaf), torch.full_like(leaf, -0.5)]),
        params,
    )


ROWS += [
    Row(
        "edge_popup",
        lambda s, key, _: sf.methods.edge_popup(s, key=key),
        Meta(
            start="random",
            stochastic=True,
            pruned="train",
            baseline=None,
            permutes=False,
        ),
    ),
    Row(
        "movement",
        lambda s, key, _: sf.methods.movement(s, steps=4, cooldown=0.5),
        Meta(
            level=lambda s: sf.schedules.polynomial(0.0, s, begin=0.1 * 4, end=0.5 * 4),
            start="other",
            pruned="train",
            baseline=None,
            permutes=False,
        ),
    ),
    Row(
        "soft_movement",
        lambda s, key, _: sf.methods.soft_movement(
            0.6, steps=4, strength=7.8, cooldown=0.5
        ),
        Meta(
            exact_count=False,
            pruned="train",
            scale_free=False,
            permutes=False,
            baseline=None,
        ),
    ),
    Row("str_", lambda s, key, _: sf.methods.str_(init=0.0), GATES),
    Row(
        "powerprop",
        lambda s, key, _: sf.methods.powerprop(sf.gmp(s, when=EVEN)),
        LEARNED._replace(
            exact_count=True, start="magnitude", choose=None, monotone=True
        ),
    ),
    Row(
        "hard_concrete",
        lambda s, key, _: sf.methods.hard_concrete(0.1, weight_decay=0.5, key=key),
        LEARNED._replace(stochastic="anew"),
    ),
    Row(
        "leap",
        lambda s, key, _: sf.methods.leap(s, steps=4, key=key),
        GATES,
    ),
    Row(
        "continuous_sparsification",
        lambda s, key, _: sf.methods.continuous_sparsification(
            steps=3, strength=0.1, init=0.5
        ),
        GATES,
    ),
    Row(
        "sr_ste",
        lambda s, key, _: sf.methods.sr_ste(axis=-1, decay=0.1),
        Meta(start="magnitude", choose=sf.scores.magnitude, pruned="train", **HALF),
    ),
    Row(
        "asp",
        lambda s, key, _: sf.methods.asp(axis=-1, when=sf.at([1])),
        Meta(start="dense", choose=sf.scores.magnitude, monotone=True, **HALF),
    ),
    Row(
        "maskllm",
        lambda s, key, _: sf.methods.maskllm(axis=-1, steps=4, norm=0.1, key=key),
        GATES._replace(pattern=NM),
    ),
    Row(
        "maskpro",
        lambda s, key, _: sf.methods.maskpro(
            axis=-1, loss=first_entry, scale=0.5, key=key
        ),
        Meta(
            start="magnitude",
            stochastic="anew",
            pruned="keep",
            scale_free=False,
            permutes=False,
            **HALF,
        ),
    ),
    Row(
        "prox_sparse",
        lambda s, key, _: sf.methods.prox_sparse(1.0, axis=-1, frozen=0.1),
        GATES._replace(pattern=NM),
    ),
    Row(
        "wanda",
        lambda s, key, params: sf.methods.wanda(s, calibrated(params)),
        TRAINED._replace(pattern=ROW_BALANCED),
    ),
    Row("ria", lambda s, key, params: sf.methods.ria(s, calibrated(params)), TRAINED),
    # sparsegpt and obs refuse weights that are not finite, which the laws try.
    Row(
        "woodfisher",
        lambda s, key, params: sf.methods.woodfisher(
            float(s), examples_of(params), damp=0.5, block=3
        ),
        TRAINED._replace(scale_free=False),
    ),
    Row(
        "obd",
        lambda s, key, _: sf.methods.obd(s, quadratic, (EXAMPLES,)),
        TRAINED._replace(
            choose=sf.curvature.obd(sf.curvature.fisher(quadratic, (EXAMPLES,))),
        ),
    ),
    Row(
        "taylor",
        lambda s, key, _: sf.methods.taylor(torch.tensor(1), when=EVEN),
        TRAINED._replace(
            pattern=sf.patterns.channel(0, norm=math.inf),
            exact_count=False,
            needs_grads=True,
            idle=False,
            scale_free=False,
            baseline=None,
        ),
    ),
    Row(
        "slimming",
        lambda s, key, _: sf.methods.slimming(
            s, sf.default_where, steps=2, strength=0.5
        ),
        TRAINED._replace(
            choose=sf.scores.magnitude,
            baseline=lambda: sf.methods.slimming(
                0.0, sf.default_where, steps=2, strength=0.5
            ),
        ),
    ),
    Row(
        "fpgm",
        lambda s, key, _: sf.methods.fpgm(s, epoch=2, steps=2),
        TRAINED._replace(pattern=sf.patterns.channel(0, norm=math.inf)),
    ),
    Row(
        "proximal",
        lambda s, key, _: sf.methods.proximal(0.5, rate=0.5, when=EVEN),
        Meta(
            exact_count=False,
            start="dense",
            pruned="train",
            scale_free=False,
            baseline=None,
        ),
    ),
]
# What the calls say is not said again, and a planted bug is held against what the
# healthy call says.
ROWS = [completed(row) for row in ROWS]
