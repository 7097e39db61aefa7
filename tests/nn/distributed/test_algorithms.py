"""Every factory with every distribution, on two ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchopt

import sparsefn as sf
from tests.nn.distributed.harness import Cases, on_ranks
from tests.nn.distributed.sharded import (
    SHAPES,
    compared,
    layouts,
    parts_lie_right,
    values,
)

KEY = sf.random.key(3)
SWAP = {"drop_fraction": 0.3, "when": sf.always(), "key": KEY}
MOMENTUM, SALIENCY = sf.scores.momentum(0.9), sf.scores.saliency

DISTRIBUTIONS = {
    "uniform": sf.budgets.uniform(),
    "erk": sf.budgets.erk(),
    "global": sf.budgets.global_(),
    "floor": sf.budgets.global_(floor=0.3, ceiling=0.9),
}

FACTORIES: dict[str, Callable[[sf.budgets.Distribution], sf.Algorithm]] = {
    "static": lambda d: sf.static(0.5, key=KEY, distribution=d),
    "static magnitude": lambda d: sf.static(0.5, init="magnitude", distribution=d),
    "one_shot": lambda d: sf.one_shot(0.5, distribution=d),
    "one_shot saliency keep": lambda d: sf.one_shot(
        0.5, SALIENCY, distribution=d, pruned="keep"
    ),
    "gmp": lambda d: sf.gmp(
        sf.schedules.polynomial(0.2, 0.6, begin=0, end=2), distribution=d
    ),
    "gmp momentum regrow": lambda d: sf.gmp(
        0.5, score=MOMENTUM, init="dense", regrow=True, distribution=d
    ),
    "iterative": lambda d: sf.iterative(0.2, distribution=d),
    "set": lambda d: sf.set(0.5, distribution=d, **SWAP),
    "rigl": lambda d: sf.rigl(0.6, distribution=d, **SWAP),
    "rigl exclude restart": lambda d: sf.rigl(
        0.5,
        distribution=d,
        exclude_dropped=True,
        restart_dropped=True,
        pruned="keep",
        **SWAP,
    ),
    "snfs": lambda d: sf.snfs(0.5, distribution=d, **SWAP),
    "ste": lambda d: sf.ste(0.5, distribution=d),
    "supermask": lambda d: sf.supermask(0.5, distribution=d, key=KEY),
    "power rigl": lambda d: sf.reparametrised(
        sf.reparam.power(2.0), sf.rigl(0.5, distribution=d, **SWAP)
    ),
    "chain": lambda d: sf.chain(
        sf.one_shot(0.4, pattern=sf.patterns.channel(0)),
        sf.one_shot(0.6, when=sf.at([1]), distribution=d),
    ),
    "sequence": lambda d: sf.sequence(
        sf.gmp(0.5, distribution=d), sf.rigl("current", **SWAP)
    ),
    "phases": lambda d: sf.phases(
        [(0, sf.gmp(0.5, distribution=d)), (1, sf.set(0.6, distribution=d, **SWAP))]
    ),
    "partition": lambda d: sf.partition(
        [("a.*", sf.static(0.5, key=KEY)), ("*", sf.rigl(0.5, distribution=d, **SWAP))]
    ),
    "with_terms": lambda d: sf.with_terms(
        sf.rigl(0.5, distribution=d, **SWAP), sf.terms.l2(0.5), sf.terms.noise(0.1, KEY)
    ),
    "adam rigl": lambda d: sf.with_optimizer(
        sf.rigl(0.5, distribution=d, **SWAP), sf.optimizers.adam(1e-2)
    ),
    "sgd gmp": lambda d: sf.with_optimizer(
        sf.gmp(0.5, distribution=d), sf.optimizers.sgd(0.1, momentum=0.9)
    ),
    "torchopt set": lambda d: sf.with_optimizer(
        sf.set(0.5, distribution=d, **SWAP), torchopt.adam(1e-2)
    ),
}


def trained(algorithm: sf.Algorithm) -> sf.Algorithm:
    return sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1))


ONCE: dict[str, Callable[[], sf.Algorithm]] = {
    "dense": sf.dense,
    "static bernoulli": lambda: sf.static(0.5, init="bernoulli", key=KEY),
    "supermask bernoulli": lambda: sf.supermask("bernoulli", key=KEY),
    "soft_threshold": lambda: sf.reparametrised(sf.reparam.soft_threshold(init=0.0)),
    "random scores": lambda: sf.one_shot(0.5, sf.scores.random, key=KEY),
    "snfs exclude": lambda: sf.snfs(0.5, exclude_dropped=True, pruned="keep", **SWAP),
    "one_shot above": lambda: sf.one_shot(sf.counts.above(0.4, at_least=2)),
    "gmp above of channels": lambda: sf.gmp(
        sf.counts.above(2.0), pattern=sf.patterns.channel(0), regrow=True
    ),
    "gmp above global": lambda: sf.gmp(
        sf.counts.above(0.4), distribution=sf.budgets.global_(floor=0.3)
    ),
    "gmp mass of rows": lambda: sf.gmp(
        sf.counts.mass(0.8), pattern=sf.patterns.row_balanced(), init="dense"
    ),
    "set below": lambda: sf.set(
        0.5, **SWAP | {"drop_fraction": sf.counts.below(0.3, spare=1)}
    ),
    "one_shot sampled": lambda: sf.one_shot(
        0.5, sf.scores.sampled(sf.scores.magnitude, 2.0), key=KEY
    ),
    "one_shot leafwise": lambda: sf.one_shot(
        0.5, sf.scores.leafwise(lambda w, g, m: (w * g).abs())
    ),
    "chain of rows": lambda: sf.chain(
        sf.one_shot(0.5, pattern=sf.patterns.channel(0)),
        sf.sequence(
            sf.gmp(0.8), sf.rigl(0.7, pattern=sf.patterns.row_balanced(), **SWAP)
        ),
    ),
    "sgd hard_concrete": lambda: trained(sf.methods.hard_concrete(0.1, key=KEY)),
    "sgd faded": lambda: trained(
        sf.reparametrised(
            sf.reparam.faded(sf.patterns.unstructured(), 0.5, sparsity=0.5), key=KEY
        )
    ),
    "sgd soft_movement": lambda: trained(sf.methods.soft_movement(steps=4)),
    "adamw ste": lambda: sf.with_optimizer(sf.ste(0.5), sf.optimizers.adamw(1e-2)),
}


# Their counts follow from what a leaf has left, or from all leaves together.
REFUSED = {("iterative", "erk"), ("snfs", "global"), ("snfs", "floor")}


def refused(algorithm: sf.Algorithm, params: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        algorithm.update(algorithm.init(params), params, 0)


def cases() -> Cases:
    places = layouts(2)
    yield from parts_lie_right(2)
    params, grads = values(SHAPES), values(SHAPES, seed=1)
    for name, make in FACTORIES.items():
        for kind, distribution in DISTRIBUTIONS.items():
            if (name, kind) in REFUSED:
                continue
            yield from compared(
                f"{name}, {kind}", partial(make, distribution), params, grads, places
            )
    for name, make in ONCE.items():
        yield from compared(name, make, params, grads, places)
    few = {"w": (1, 6), "v": (3, 4)}  # parts of one process are empty
    for name in ("sgd hard_concrete", "sgd faded", "sgd soft_movement"):
        yield from compared(
            f"{name} of empty parts",
            ONCE[name],
            values(few),
            values(few, seed=1),
            places,
        )
    plain = "expected plain tensors, got a DTensor at 'v'"
    some = places["S0"](values(few))
    algorithm = sf.methods.srigl(0.5, steps=4)
    text = f"srigl: {plain}; the entries of a whole"
    yield "srigl", partial(refused, algorithm, some, text)
    algorithm = sf.rigl(
        0.5, drop_fraction=0.5, key=KEY, grow_count=lambda scores, free, wanted: wanted
    )
    text = f"^grow_count: {plain}: it reads whole rows of scores; leave the leaf out"
    yield "grow_count", partial(refused, algorithm, some, text)
    algorithm = sf.gmp(sf.counts.Counted(lambda scores, active, step: active.sum(-1)))
    yield "a count", partial(refused, algorithm, some, f"^Counted.*: {plain}")
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        params, grads = (values(SHAPES, seed=seed, dtype=dtype) for seed in (2, 3))
        for name in ("rigl", "gmp", "snfs", "adam rigl"):
            kind = DISTRIBUTIONS["uniform" if name == "snfs" else "global"]
            yield from compared(
                f"{name} of {dtype}",
                partial(FACTORIES[name], kind),
                params,
                grads,
                places,
            )


def test_every_algorithm_and_distribution_on_two_ranks() -> None:
    on_ranks(2, cases)
