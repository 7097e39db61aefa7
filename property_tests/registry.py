"""One row per algorithm. The laws read the flags of a row and never its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
import torchopt
from torch import Tensor

import sparsefn as sf
from property_tests.layouts import (
    BAND,
    BLOCK,
    CHANNEL,
    GATES,
    HOLES,
    KERNEL,
    LARGE,
    NM,
    OUT_GROUPS,
    ROW_BALANCED,
    TILES,
)
from sparsefn.core.checks.factories import described
from sparsefn.core.state import Schedule
from sparsefn.core.tree import Tree
from sparsefn.testing import Exchange, Meta, Row
from sparsefn.testing.harness import leaves
from sparsefn.testing.introspection import completed

EVEN, ALWAYS, NEVER = sf.every(2), sf.always(), sf.never()
FADING = sf.schedules.cosine_decay(0.6, 2)  # exactly 0 from step 2 on
MAGNITUDE, GRADIENT, SALIENCY = (
    sf.scores.magnitude,
    sf.scores.gradient,
    sf.scores.saliency,
)
RANDOM, MOVED = sf.scores.random, sf.scores.sum(sf.scores.movement)
GLOBAL, ERK, FLOOR = (
    sf.budgets.global_(),
    sf.budgets.erk(),
    sf.budgets.global_(floor=0.45),
)
PAIRS = sf.budgets.in_multiples(sf.budgets.uniform(), 2)


def quadratic(params: Tree, x: torch.Tensor) -> torch.Tensor:
    """A loss whose second derivatives are the same everywhere: no sum rounds in the
    derivatives of an element.
    """
    return x.mean() * sum((leaf * leaf).sum() for leaf in leaves(params).values()) / 2


def neighbours(params: Tree) -> torch.Tensor:
    """A loss whose Hessian has its entries beside the diagonal: an estimate of the
    diagonal is all noise.
    """
    flat = [leaf.reshape(-1) for leaf in leaves(params).values()]
    return torch.stack([(leaf * leaf.roll(1)).sum().double() for leaf in flat]).sum()


def weighed(params: Tree, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x * leaf).sum() for leaf in leaves(params).values()])


EXAMPLES = torch.tensor([2.0, -1.0, 0.5])
FISHER = sf.curvature.fisher(quadratic, (EXAMPLES,), chunk_size=2)
OBD = sf.curvature.obd(FISHER)
HUTCHINSON = sf.curvature.hessian_diagonal(neighbours, (), samples=2)
# The example is small, as w * Hg of weights up to 200 would be infinite in float16, and
# infinite scores are ties.
GRASP = sf.curvature.grasp(quadratic, lambda step: (EXAMPLES[2:],), temperature=None)
SYNFLOW = sf.curvature.synflow(weighed, (1,))


BY_MOMENTUM = sf.redistribute.Redistribute(
    sf.redistribute.mean_active,
    score=sf.scores.momentum(0.5),
    most=0.75,
    rate=sf.redistribute.careful(below=0.9),
)


def ramp(sparsity: Any) -> Schedule:
    return sf.schedules.polynomial(0.5 * sparsity, sparsity, begin=0, end=2)


def wave(sparsity: Any) -> Schedule:
    return sf.schedules.cosine(sparsity, 2)


def then_dense(sparsity: Any) -> Schedule:
    return sf.schedules.piecewise({0: sparsity, 2: 0.0})


def chosen(params: Tree) -> list[str]:
    return [
        path for path, leaf in leaves(params).items() if sf.default_where(path, leaf)
    ]


def checkerboards(sparsity: Any, params: Tree) -> sf.Algorithm:
    paths, true = chosen(params), torch.ones((), dtype=torch.bool, device="cpu")
    masks = [
        sf.masks.checkerboard(x.shape, sparsity) if p in paths else true
        for p, x in leaves(params).items()
    ]
    return sf.from_masks(optree.tree_unflatten(optree.tree_structure(params), masks))


def board(sparsity: Any) -> Callable[[Tree], Tree]:
    """Masks in a pattern, as an `init`."""
    return lambda params: checkerboards(sparsity, params).init(params).masks


def lopsided(state: sf.State, grads: Tree, step: Any) -> Tree:
    """Magnitudes, but leaves of more columns lose to all others."""
    return optree.tree_map(
        lambda x: (x.abs() + 1) / 8.0 ** sum(x.shape[1:]), state.params
    )


def halves_of(params: Tree, first: Any, rest: Any) -> list[Any]:
    """(paths, one thing for leaves of an even number of rows and another for the rest):
    others do not matter.
    """
    rows, paths = (
        {path: leaf.shape[:1] for path, leaf in leaves(params).items()},
        chosen(params),
    )
    halves = [
        ([path for path in paths if rows[path][0] % 2 == odd], one)
        for odd, one in enumerate((first, rest))
    ]
    return [half for half in halves if half[0]] or halves[:1]


def split(params: Tree, first: sf.Algorithm, rest: sf.Algorithm) -> sf.Algorithm:
    return sf.partition(halves_of(params, first, rest))


def gmp_keep(s: Any, key: torch.Tensor, where: list[str]) -> sf.Algorithm:
    return sf.gmp(ramp(s), where=where, pruned="keep")


def rigl_on(s: Any, key: torch.Tensor, where: list[str]) -> sf.Algorithm:
    return sf.rigl(s, key=key, where=where, **swap)


def adam(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.with_optimizer(algorithm, sf.optimizers.adam(0.1))


def sgd(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.with_optimizer(
        algorithm,
        sf.optimizers.sgd(0.25, momentum=0.5),
        skip=sf.at([1]),
        reset=sf.at([2]),
    )


def two_rates(algorithm: sf.Algorithm) -> sf.Algorithm:
    rates = {
        "params": sf.optimizers.adam(0.1),
        "scores": sf.optimizers.sgd(0.5, momentum=0.5),
    }
    return sf.with_optimizer(algorithm, sf.optimizers.parts(rates))


def torchopt_sgd(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.with_optimizer(algorithm, torchopt.sgd(0.25, momentum=0.5))


def decayed(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.with_terms(algorithm, sf.terms.l2(0.5))


def rewound(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.rewinding(algorithm, to=sf.at([0]), when=sf.at([2]))


STATIC = Meta(when=NEVER, start="magnitude", monotone=True)
PRUNE = Meta(level=ramp, when=EVEN, start="magnitude", choose=MAGNITUDE, monotone=True)
ITERATIVE = PRUNE._replace(
    level=sf.schedules.constant, exact_count="relative", start="dense"
)
SHOT = Meta(start="dense", choose=MAGNITUDE, monotone=True)
EXCHANGE = Exchange(MAGNITUDE, GRADIENT, FADING)
AT_RANDOM, BY_AVERAGE = (
    EXCHANGE._replace(grow=None),
    EXCHANGE._replace(grow=sf.scores.momentum(0.5)),
)
# An exchange of weights that starts at random: permuted weights do not have permuted
# masks.
SWAP = Meta(
    start="random",
    choose=EXCHANGE,
    needs_grads=True,
    stochastic=True,
    permutes=False,
)
swap: dict[str, Any] = {"when": ALWAYS, "drop_fraction": FADING}
# The pattern says the sparsity: it has no ends, and may not be a tensor.
FIXED: dict[str, Any] = {"pattern": NM, "baseline": None}


def first_entry(grads: Tree) -> Tensor:
    """A loss for algorithms that read one beside the gradients."""
    return optree.tree_leaves(grads)[0].reshape(-1)[:1].sum()


# The scores say how many are kept: neither the sparsity nor the scale does.
COUNTED: dict[str, Any] = {
    "exact_count": False,
    "start": "other",
    "choose": None,
    "scale_free": False,
    "baseline": None,
}
# An optimizer of its own: weights are stepped before they are scored.
OWN: dict[str, Any] = {
    "scale_free": False,
    "permutes": False,
    "choose": None,
}
LEARNED: dict[str, Any] = {"scale_free": False, "permutes": False}


def halves(params: Tree) -> Tree:
    return optree.tree_map(lambda leaf: torch.full_like(leaf, 0.5), params)


@described
def best_of(s: Any, scale: float) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The largest weights, scaled: what `rewrite` takes, of which kept weights may
    change.
    """

    def fn(
        path: str, weight: torch.Tensor, mask: torch.Tensor, step: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = sf.masks.topk_mask(weight.abs(), sf.budgets.n_kept(weight.numel(), s))
        return torch.where(kept, weight * scale, 0.0), kept

    return fn


ROWS = [
    # one mask for good
    Row(
        "dense",
        lambda s, key, _: sf.dense(),
        STATIC._replace(exact_count=False, start="other", baseline=None),
    ),
    Row(
        "static",
        lambda s, key, _: sf.static(s, key=key),
        STATIC._replace(start="random", stochastic=True, permutes=False),
    ),
    Row(
        "static magnitude keep",
        lambda s, key, _: sf.static(s, init="magnitude", pruned="keep"),
        STATIC,
    ),
    Row(
        "static erk",
        lambda s, key, _: sf.static(s, key=key, distribution=ERK),
        STATIC._replace(start="random", stochastic=True, permutes=False),
    ),
    Row(
        "static in multiples",
        lambda s, key, _: sf.static(
            float(0.5 * s), init="magnitude", distribution=PAIRS
        ),
        STATIC._replace(
            pattern=LARGE,
            level=lambda s: lambda step: 0.5 * s,
            permutes=False,  # large leaves of 16 bits have ties
        ),
    ),
    Row(
        "static global",
        lambda s, key, _: sf.static(s, init="magnitude", distribution=GLOBAL),
        STATIC,
    ),
    Row(
        "static channel random",
        lambda s, key, _: sf.static(s, key=key, pattern=CHANNEL.pattern),
        STATIC._replace(
            start="random", stochastic=True, permutes=False, pattern=CHANNEL
        ),
    ),
    Row(
        "static checkerboard",
        lambda s, key, _: sf.static(float(s), init="checkerboard"),
        STATIC._replace(exact_count=False, start="other", permutes=False),
    ),
    Row(
        "static bernoulli",
        lambda s, key, _: sf.static(s, key=key, init="bernoulli"),
        STATIC._replace(
            exact_count=False, start="other", stochastic=True, permutes=False
        ),
    ),
    Row(
        "from_masks",
        lambda s, key, params: checkerboards(s, params),
        STATIC._replace(exact_count=False, start="other", permutes=False),
    ),
    # masks and weights together
    # at sparsity 0 it still scales
    Row(
        "rewrite",
        lambda s, key, _: sf.rewrite(best_of(s, 0.5), when=sf.at([1])),
        SHOT._replace(baseline=None),
    ),
    Row(
        "rewrite train",
        lambda s, key, _: sf.rewrite(best_of(s, 1.0), when=EVEN, pruned="train"),
        Meta(start="dense", choose=MAGNITUDE),
    ),
    # pruning once
    Row("one_shot", lambda s, key, _: sf.one_shot(s, when=sf.at([1])), SHOT),
    Row(
        "one_shot saliency keep",
        lambda s, key, _: sf.one_shot(s, SALIENCY, pruned="keep"),
        SHOT._replace(choose=SALIENCY, needs_grads=True, permutes=False),
    ),
    Row(
        "one_shot global saliency",
        lambda s, key, _: sf.one_shot(s, SALIENCY, distribution=GLOBAL),
        SHOT._replace(
            choose=SALIENCY,
            needs_grads=True,
            permutes=False,
        ),
    ),
    Row(
        "one_shot summed movement",
        lambda s, key, _: sf.one_shot(s, MOVED, when=sf.at([2])),
        SHOT._replace(choose=MOVED, needs_grads=True, permutes=False, idle=False),
    ),
    Row(
        "one_shot random",
        lambda s, key, _: sf.one_shot(s, RANDOM, when=sf.at([1]), key=key),
        SHOT._replace(choose=None, stochastic=True, permutes=False),
    ),
    # by derivatives that the score takes itself
    Row(
        "one_shot fisher",
        lambda s, key, _: sf.one_shot(s, FISHER, when=sf.at([1])),
        SHOT._replace(choose=FISHER),
    ),
    Row(
        "iterative obd",
        lambda s, key, _: sf.iterative(s, when=EVEN, score=OBD),
        ITERATIVE._replace(choose=OBD),
    ),
    Row(
        "one_shot hutchinson",
        lambda s, key, _: sf.one_shot(s, HUTCHINSON, when=sf.at([1]), key=key),
        SHOT._replace(choose=None, stochastic=True, permutes=False),
    ),
    Row(
        "one_shot global grasp",
        lambda s, key, _: sf.one_shot(s, GRASP, distribution=GLOBAL, pruned="keep"),
        SHOT._replace(choose=GRASP),
    ),
    Row(
        "gmp synflow",
        lambda s, key, _: sf.gmp(ramp(s), when=EVEN, score=SYNFLOW, init="dense"),
        PRUNE._replace(start="dense", choose=SYNFLOW),
    ),
    # as many as the scores say
    Row(
        "one_shot above",
        lambda s, key, _: sf.one_shot(sf.counts.above(0.5), when=sf.at([1])),
        SHOT._replace(**COUNTED),
    ),
    Row(
        "gmp mass of channels",
        lambda s, key, _: sf.gmp(
            sf.counts.mass(0.8), when=EVEN, pattern=CHANNEL.pattern
        ),
        PRUNE._replace(pattern=CHANNEL, **COUNTED),
    ),
    Row(
        "gmp above global",
        lambda s, key, _: sf.gmp(
            sf.counts.above(0.5, at_least=3),
            when=EVEN,
            distribution=GLOBAL,
            pruned="keep",
        ),
        PRUNE._replace(**COUNTED | {"pruned": "keep"}),
    ),
    # by scores that are made of others
    Row(
        "one_shot lamp",
        lambda s, key, _: sf.one_shot(
            s, sf.scores.lamp, when=sf.at([1]), distribution=GLOBAL
        ),
        SHOT._replace(choose=sf.scores.lamp, scale_free=False),
    ),
    Row(
        "one_shot sampled",
        lambda s, key, _: sf.one_shot(
            s, sf.scores.sampled(MAGNITUDE, 2.0), when=sf.at([1]), key=key
        ),
        SHOT._replace(choose=None, stochastic=True, permutes=False, scale_free=False),
    ),
    Row(
        "one_shot ranked",
        lambda s, key, _: sf.one_shot(s, sf.scores.ranked(MAGNITUDE), when=sf.at([1])),
        SHOT._replace(choose=sf.scores.ranked(MAGNITUDE), permutes=False),
    ),
    # pruning by and by
    Row("gmp", lambda s, key, _: sf.gmp(ramp(s), when=EVEN), PRUNE),
    Row(
        "gmp erk",
        lambda s, key, _: sf.gmp(ramp(s), when=EVEN, distribution=ERK),
        PRUNE,
    ),
    Row(
        "gmp regrow keep",
        lambda s, key, _: sf.gmp(wave(s), when=EVEN, regrow=True, pruned="keep"),
        PRUNE._replace(level=wave, monotone=False, baseline=None),
    ),
    Row(
        "gmp nm",
        lambda s, key, _: sf.gmp(0.5, when=EVEN, pattern=NM.pattern),
        PRUNE._replace(**FIXED),
    ),
    Row(
        "gmp block global",
        lambda s, key, _: sf.gmp(
            ramp(s), when=EVEN, pattern=BLOCK.pattern, distribution=GLOBAL
        ),
        PRUNE._replace(pattern=BLOCK),
    ),
    Row(
        "gmp global floor",
        lambda s, key, _: sf.gmp(
            ramp(0.5 * s), when=EVEN, score=lopsided, distribution=FLOOR
        ),
        PRUNE._replace(
            pattern=LARGE,
            level=lambda s: ramp(0.5 * s),
            choose=None,
            start="other",
            scale_free=False,
            permutes=False,
        ),
    ),
    Row(
        "gmp channel",
        lambda s, key, _: sf.gmp(ramp(s), when=EVEN, pattern=CHANNEL.pattern),
        PRUNE._replace(pattern=CHANNEL),
    ),
    # Each leaf is a tied set by itself, and its units are what channels are.
    Row(
        "gmp tied",
        lambda s, key, _: sf.gmp(
            ramp(s), when=EVEN, pattern=sf.patterns.tied([["*", 0]], reduce="sum")
        ),
        PRUNE._replace(pattern=CHANNEL),
    ),
    Row(
        "gmp gates",
        lambda s, key, _: sf.gmp(ramp(s), when=EVEN, pattern=GATES.pattern),
        PRUNE._replace(pattern=GATES),
    ),
    Row(
        "gmp zeros in blocks",
        lambda s, key, _: sf.gmp(ramp(s), when=EVEN, pattern=HOLES.pattern),
        PRUNE._replace(pattern=HOLES, baseline=None, permutes=False),
    ),
    Row(
        "gmp transposable",
        lambda s, key, _: sf.gmp(None, when=EVEN, pattern=TILES.pattern),
        PRUNE._replace(
            **FIXED | {"pattern": TILES},
            choose=None,
            start="other",
            monotone=False,
            permutes=False,
        ),
    ),
    Row(
        "static band",
        lambda s, key, _: sf.static(None, pattern=BAND.pattern, key=key),
        STATIC._replace(pattern=BAND, start="other", baseline=None, permutes=False),
    ),
    Row(
        "gmp out_groups",
        lambda s, key, _: sf.gmp(ramp(s), when=EVEN, pattern=OUT_GROUPS.pattern),
        PRUNE._replace(pattern=OUT_GROUPS),
    ),
    Row(
        "iterative",
        lambda s, key, _: sf.iterative(s, when=EVEN),
        ITERATIVE,
    ),
    Row(
        "iterative global",
        lambda s, key, _: sf.iterative(s, when=EVEN, distribution=GLOBAL),
        ITERATIVE,
    ),
    Row(
        "rewinding iterative",
        lambda s, key, _: rewound(sf.iterative(s, when=EVEN)),
        ITERATIVE._replace(baseline=lambda: rewound(sf.dense())),
    ),
    Row("ste", lambda s, key, _: sf.ste(s), Meta(start="magnitude", choose=MAGNITUDE)),
    Row(
        "ste nm",
        lambda s, key, _: sf.ste(0.5, pattern=NM.pattern),
        Meta(start="magnitude", choose=MAGNITUDE, **FIXED),
    ),
    Row(
        "chain keep ste",
        lambda s, key, _: sf.chain(
            sf.gmp(0.5 * s, regrow=True, pruned="keep", when=EVEN), sf.ste(s, when=EVEN)
        ),
        Meta(
            start="magnitude",
            choose=MAGNITUDE,
            when=EVEN,
            pruned=lambda s: sf.schedules.constant(0.5 * s),
            # weights off the support stay, and may tie with those that came later
            permutes=False,
        ),
    ),
    # exchanging weights
    Row(
        "set",
        lambda s, key, _: sf.set(s, key=key, **swap),
        SWAP._replace(choose=AT_RANDOM, needs_grads=False, stochastic="anew"),
    ),
    Row("rigl", lambda s, key, _: sf.rigl(s, key=key, **swap), SWAP),
    Row(
        "rigl below",
        lambda s, key, _: sf.rigl(
            s, key=key, when=ALWAYS, drop_fraction=sf.counts.below(0.5, spare=2)
        ),
        SWAP._replace(choose=None, scale_free=False, baseline=None),
    ),
    Row(
        "rigl even magnitude",
        lambda s, key, _: sf.rigl(s, init="magnitude", when=EVEN, drop_fraction=0.5),
        SWAP._replace(
            start="magnitude",
            choose=EXCHANGE._replace(fraction=lambda step: 0.5),
            stochastic=False,
            permutes=True,
        ),
    ),
    Row(
        "rigl erk",
        lambda s, key, _: sf.rigl(s, key=key, distribution=ERK, **swap),
        SWAP,
    ),
    Row(
        "rigl global",
        lambda s, key, _: sf.rigl(s, key=key, distribution=GLOBAL, **swap),
        SWAP,
    ),
    Row(
        "rigl block",
        lambda s, key, _: sf.rigl(s, key=key, pattern=BLOCK.pattern, **swap),
        SWAP._replace(pattern=BLOCK),
    ),
    Row(
        "rigl kernel",
        lambda s, key, _: sf.rigl(s, key=key, pattern=KERNEL.pattern, **swap),
        SWAP._replace(pattern=KERNEL),
    ),
    Row(
        "rigl row_balanced",
        lambda s, key, _: sf.rigl(s, key=key, pattern=ROW_BALANCED.pattern, **swap),
        SWAP._replace(pattern=ROW_BALANCED),
    ),
    Row(
        "rigl tied",
        lambda s, key, _: sf.rigl(
            s, key=key, pattern=sf.patterns.tied([["*", 0]], reduce="sum"), **swap
        ),
        SWAP._replace(pattern=CHANNEL),
    ),
    Row(
        "rigl nm",
        lambda s, key, _: sf.rigl(0.5, key=key, pattern=NM.pattern, **swap),
        SWAP._replace(**FIXED),
    ),
    Row(
        "rigl from dense",
        lambda s, key, _: sf.rigl(
            ramp(s), init="dense", drop_fraction=0.6, when=ALWAYS
        ),
        SWAP._replace(
            level=ramp,
            start="dense",
            choose=EXCHANGE._replace(fraction=lambda step: 0.6, conserves=False),
            stochastic=False,
            permutes=True,
        ),
    ),
    Row(
        "drop_grow exclude keep",
        lambda s, key, _: sf.drop_grow(
            s,
            drop=SALIENCY,
            grow=GRADIENT,
            key=key,
            exclude_dropped=True,
            pruned="keep",
            **swap,
        ),
        SWAP._replace(choose=EXCHANGE._replace(drop=SALIENCY, exclude=True)),
    ),
    Row(
        "snfs",
        lambda s, key, _: sf.snfs(s, grow=sf.scores.momentum(0.5), key=key, **swap),
        SWAP._replace(choose=BY_AVERAGE, exact_count="total", idle=False),
    ),
    Row(
        "rigl channel",
        lambda s, key, _: sf.rigl(s, key=key, pattern=CHANNEL.pattern, **swap),
        SWAP._replace(pattern=CHANNEL),
    ),
    Row(
        "rigl train",
        lambda s, key, _: sf.rigl(s, key=key, pruned="train", **swap),
        SWAP,
    ),
    Row(
        "snfs exclude keep",
        lambda s, key, _: sf.snfs(
            s,
            grow=sf.scores.momentum(0.5),
            key=key,
            exclude_dropped=True,
            pruned="keep",
            **swap,
        ),
        SWAP._replace(
            choose=BY_AVERAGE._replace(exclude=True), exact_count="total", idle=False
        ),
    ),
    Row(
        "rigl by momentum with rates",
        lambda s, key, _: sf.rigl(
            s, key=key, redistribute=BY_MOMENTUM, restart_dropped=True, **swap
        ),
        SWAP._replace(choose=None, exact_count="total", idle=False, baseline=None),
    ),
    Row(
        "set by chance",
        lambda s, key, _: sf.set(
            s, key=key, grow_count=sf.redistribute.independently, **swap
        ),
        SWAP._replace(
            choose=AT_RANDOM._replace(conserves=False),
            exact_count=False,
            needs_grads=False,
            stochastic="anew",
        ),
    ),
    Row(
        "drop_grow current",
        lambda s, key, params: sf.drop_grow(
            "current", drop=MAGNITUDE, grow=RANDOM, key=key, init=board(s), **swap
        ),
        SWAP._replace(
            choose=AT_RANDOM,
            needs_grads=False,
            stochastic="anew",
            start="other",
            exact_count=False,
        ),
    ),
    # learned
    Row(
        "power rigl",
        lambda s, key, _: sf.reparametrised(
            sf.reparam.power(2.0), sf.rigl(s, key=key, **swap)
        ),
        SWAP._replace(choose=None, baseline=None, **LEARNED),
    ),
    Row(
        "soft_threshold",
        lambda s, key, _: sf.reparametrised(sf.reparam.soft_threshold(init=0.0)),
        Meta(exact_count=False, when=NEVER, start="other", baseline=None, **LEARNED),
    ),
    Row(
        "hard_concrete",
        lambda s, key, _: sf.reparametrised(sf.reparam.hard_concrete(), key=key),
        Meta(
            exact_count=False,
            start="other",
            stochastic="anew",
            baseline=None,
            **LEARNED,
        ),
    ),
    Row(
        "gumbel_gate",
        lambda s, key, _: sf.reparametrised(
            sf.reparam.gumbel_gate(s, scale=10.0), key=key
        ),
        Meta(exact_count=False, when=NEVER, start="other", baseline=None, **LEARNED),
    ),
    Row(
        "sigmoid_gate in rounds",
        lambda s, key, _: sf.reparametrised(
            sf.reparam.sigmoid_gate(ramp(0.5), round_end=EVEN)
        ),
        Meta(exact_count=False, when=NEVER, start="other", baseline=None, **LEARNED),
    ),
    Row(
        "faded nm",
        lambda s, key, _: sf.reparametrised(
            sf.reparam.faded(NM.pattern, 0.0, slope=0.5)
        ),
        Meta(start="magnitude", **LEARNED, **FIXED),
    ),
    Row(
        "soft_topk",
        lambda s, key, _: sf.reparametrised(sf.reparam.soft_topk(s, 2.0)),
        Meta(exact_count=False, when=NEVER, start="other", baseline=None, **LEARNED),
    ),
    Row(
        "low_rank",
        lambda s, key, _: sf.reparametrised(
            sf.reparam.low_rank(2, 4.0, dropout=0.25), key=key
        ),
        Meta(exact_count=False, when=NEVER, start="other", baseline=None, **LEARNED),
    ),
    Row(
        "mask_choices",
        lambda s, key, _: sf.reparametrised(
            sf.reparam.mask_choices(NM.pattern, scale=10.0), key=key
        ),
        Meta(exact_count=False, when=NEVER, start="other", **LEARNED, **FIXED),
    ),
    Row(
        "nm_prox",
        lambda s, key, _: sf.reparametrised(sf.reparam.nm_prox(1.0, NM.pattern)),
        Meta(exact_count=False, when=NEVER, start="other", **LEARNED, **FIXED),
    ),
    Row(
        "policy_masks",
        lambda s, key, _: sf.policy_masks(
            NM.pattern, loss=first_entry, scale=0.5, key=key
        ),
        Meta(
            start="magnitude",
            stochastic="anew",
            pruned="keep",
            scale_free=False,
            permutes=False,
            **FIXED,
        ),
    ),
    Row(
        "supermask",
        lambda s, key, _: sf.supermask(s, key=key),
        Meta(
            start="random",
            stochastic=True,
            pruned="train",
            baseline=None,
            permutes=False,
        ),
    ),
    Row(
        "supermask joint ramp",
        lambda s, key, _: sf.supermask(
            ramp(s), mode="joint", init="magnitude", when=EVEN, distribution=ERK
        ),
        Meta(level=ramp, start="magnitude", pruned="train"),
    ),
    Row(
        "supermask bernoulli",
        lambda s, key, _: sf.supermask("bernoulli", init=halves, key=key),
        Meta(
            exact_count=False,
            start="other",
            stochastic="anew",
            pruned="train",
            baseline=None,
            permutes=False,
        ),
    ),
    # made of others
    Row(
        "chain",
        lambda s, key, _: sf.chain(
            sf.gmp(ramp(s), when=EVEN, pattern=CHANNEL.pattern),
            sf.one_shot(s, when=sf.at([2])),
        ),
        PRUNE._replace(exact_count=False, choose=None, start="other", permutes=False),
    ),
    Row(
        "sequence",
        lambda s, key, _: sf.sequence(sf.gmp(ramp(s)), sf.rigl("current", **swap)),
        SWAP._replace(
            level=ramp, start="magnitude", choose=None, stochastic=False, permutes=True
        ),
    ),
    Row(
        "phases to dense",
        lambda s, key, _: sf.phases(
            [(0, sf.static(s, init="magnitude")), (2, sf.dense())]
        ),
        Meta(level=then_dense, when=sf.at([2]), start="magnitude"),
    ),
    Row(
        "phases to rigl",
        lambda s, key, _: sf.phases(
            [
                (0, sf.gmp(ramp(s), when=EVEN)),
                (2, sf.rigl(s, key=key, when=ALWAYS, drop_fraction=0.5)),
            ]
        ),
        PRUNE._replace(
            when=ALWAYS,
            exact_count=False,
            choose=None,
            monotone=False,
            needs_grads=True,
            stochastic=True,
            permutes=False,
        ),
    ),
    Row(
        "partition",
        lambda s, key, params: split(
            params, sf.rigl(s, key=key, **swap), sf.static(s, key=key)
        ),
        SWAP._replace(choose=None),
    ),
    Row(
        "partition of everything",
        lambda s, key, _: sf.partition([("*", sf.rigl(s, key=key, **swap))]),
        SWAP,
    ),
    Row(
        "with_terms",
        lambda s, key, _: decayed(sf.rigl(s, key=key, **swap)),
        SWAP._replace(baseline=lambda: decayed(sf.dense())),
    ),
    Row(
        "chain of exchanges",
        lambda s, key, _: sf.chain(
            sf.rigl(s, key=key, pattern=CHANNEL.pattern, **swap),
            sf.static(s, key=key),
            sf.set(s, key=key, **swap),
        ),
        SWAP._replace(exact_count=False, choose=None, start="other"),
    ),
    Row(
        "sequence of halves",
        lambda s, key, params: sf.sequence(
            *(make(s, key, on) for on, make in halves_of(params, gmp_keep, rigl_on))
        ),
        SWAP._replace(
            exact_count=False,
            choose=None,
            start="other",
            pruned="keep",
        ),
    ),
    Row(
        "phases to ste",
        lambda s, key, _: sf.phases(
            [
                (0, sf.rigl(s, key=key, **swap)),
                (1, sf.ste(s)),
                (2, sf.iterative(s, when=EVEN)),
            ]
        ),
        SWAP._replace(exact_count=False, choose=None, pruned="train"),
    ),
    # with an optimizer of their own
    Row(
        "adam supermask",
        lambda s, key, _: adam(sf.supermask(s, mode="joint", init="zeros")),
        Meta(
            start="other",
            needs_grads=True,
            pruned="train",
            baseline=lambda: adam(sf.dense()),
            **OWN,
        ),
    ),
    Row(
        "parts supermask",
        lambda s, key, _: two_rates(sf.supermask(s, mode="joint", init="zeros")),
        Meta(
            start="other",
            needs_grads=True,
            pruned="train",
            baseline=lambda: adam(sf.dense()),
            **OWN,
        ),
    ),
    Row(
        "adam rigl",
        lambda s, key, _: adam(sf.rigl(s, key=key, **swap)),
        SWAP._replace(**OWN, baseline=lambda: adam(sf.dense())),
    ),
    Row(
        "sgd with_terms",
        lambda s, key, _: sgd(decayed(sf.rigl(s, key=key, **swap))),
        SWAP._replace(**OWN, baseline=lambda: sgd(decayed(sf.dense()))),
    ),
    Row(
        "sgd ste",
        lambda s, key, _: sgd(sf.ste(s)),
        Meta(
            start="magnitude",
            pruned="train",
            needs_grads=True,
            baseline=lambda: sgd(sf.dense()),
            **OWN,
        ),
    ),
    Row(
        "torchopt gmp",
        lambda s, key, _: torchopt_sgd(sf.gmp(ramp(s), when=EVEN)),
        PRUNE._replace(
            **OWN, needs_grads=True, baseline=lambda: torchopt_sgd(sf.dense())
        ),
    ),
    Row(
        "adam power",
        lambda s, key, _: adam(
            sf.reparametrised(sf.reparam.power(2.0), sf.static(s, key=key))
        ),
        STATIC._replace(start="random", stochastic=True, baseline=None, **OWN),
    ),
    Row(
        "partition of optimizers",
        lambda s, key, params: split(
            params,
            adam(sf.rigl(s, key=key, grow=sf.scores.momentum(0.5), **swap)),
            sgd(sf.static(s, key=key)),
        ),
        SWAP._replace(**OWN, baseline=None),
    ),
    Row(
        "adam chain",
        lambda s, key, _: adam(
            sf.chain(
                sf.static(s, key=key, pattern=CHANNEL.pattern),
                sf.rigl(s, key=key, **swap),
            )
        ),
        SWAP._replace(
            **OWN, exact_count=False, start="other", baseline=lambda: adam(sf.dense())
        ),
    ),
    Row(
        "sgd phases",
        lambda s, key, _: sgd(
            sf.phases([(0, sf.ste(s)), (2, sf.static(s, init="magnitude"))])
        ),
        SWAP._replace(
            **OWN,
            start="magnitude",
            stochastic=False,
            pruned="train",
            baseline=lambda: sgd(sf.dense()),
        ),
    ),
    Row(
        "sgd soft_threshold set",
        lambda s, key, _: sgd(
            sf.reparametrised(
                sf.reparam.soft_threshold(init=-1.0), sf.set(s, key=key, **swap)
            )
        ),
        SWAP._replace(**OWN, exact_count=False, baseline=None),
    ),
]
# What the calls say is not said again, and a planted bug is held against what the
# healthy call says.
ROWS = [completed(row) for row in ROWS]

# One or more of a kind: with these `make test` runs the laws.
QUICK_ROWS = [
    "chain",
    "drop_grow current",
    "faded nm",
    "from_masks",
    "gmp",
    "gmp channel",
    "gmp erk",
    "gmp global floor",
    "gmp nm",
    "gmp tied",
    "hard_concrete",
    "iterative",
    "low_rank",
    "one_shot",
    "one_shot fisher",
    "one_shot random",
    "partition",
    "phases to rigl",
    "rewinding iterative",
    "rewrite",
    "rigl",
    "rigl block",
    "rigl nm",
    "sequence",
    "set",
    "sgd ste",
    "snfs",
    "soft_threshold",
    "static",
    "static erk",
    "ste",
    "supermask",
    "with_terms",
]
