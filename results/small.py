"""A small network on MNIST-1D: the seeds of a method, and the members of an ensemble,
are trained in one vmapped loop.

40 numbers, two hidden layers of 128, ten classes.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

import sparsefn as sf
from results import data
from results.jobs import Job, Plan, Rates, Row, Task, blocks, each, learning_rate
from results.lenet import DECAY, MOMENTUM, batches

VERSION = 2
SIZES = (40, 128, 128, 10)
KEPT = 3  # per cent, but for N:M and ensembles
LONGER = {"1x": 1, "3x": 3}  # the length of a run, in runs of usual length
# of a run, between two changes of masks
MOVES = {"a 60th": 60, "a 20th": 20, "a 4th": 4}
SHAPES = ((2, 4), (1, 8))
ENSEMBLES = (4, 16)  # members, each with one over that many of the weights
RATES = (0.4, 0.2, 0.8)
N_OF_M = tuple(f"{n}:{m}" for n, m in SHAPES)
TUNED = {
    "dense": ("100",),
    "static": ("1x",),
    "SET": ("1x",),
    "RigL": ("1x",),
    "GMP": ("1x",),
    "SR-STE": N_OF_M,
    "STE": N_OF_M,
    "ASP": N_OF_M,
}

Make = Callable[[Tensor], sf.Algorithm]


# ---- network -------------------------------------------------------------------------


def weights(key: Tensor) -> dict[str, Tensor]:
    """He's normal weights and zero biases."""
    made = {}
    for i, (a, b) in enumerate(itertools.pairwise(SIZES)):
        made[f"{i}.weight"] = sf.random.normal(
            sf.random.fold_in(key, i), (b, a)
        ) * math.sqrt(2 / a)
        made[f"{i}.bias"] = torch.zeros(b)
    return made


def forward(params: Any, x: Tensor) -> Tensor:
    """Signals to logits."""
    for i in range(len(SIZES) - 1):
        x = functional.linear(
            x.relu() if i else x, params[f"{i}.weight"], params[f"{i}.bias"]
        )
    return x


def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, the mean over a batch."""
    return functional.cross_entropy(forward(params, x), y)


# ---- training ------------------------------------------------------------------------


@functools.cache
def signals(seed: int, tuning: bool) -> data.Split:
    """Those of a seed."""
    return data.split(*data.mnist1d(), seed, tuning=tuning)


def train(
    make: Make,
    keys: Tensor,
    seeds: tuple[int, ...],
    steps: int,
    rate: Callable[[int], Any],
    *,
    tuning: bool = False,
    watch: bool = False,
    reset: Any = sf.never(),
) -> tuple[Tensor, list[Row]]:
    """Train a network for each key on the signals of its seed: logits for the test
    signals, and a row for each.
    """
    splits = [signals(seed, tuning) for seed in seeds]
    optimizer = sf.optimizers.sgd(rate, momentum=MOMENTUM, weight_decay=DECAY)

    def algorithm(key: Tensor) -> sf.Algorithm:
        return sf.with_optimizer(
            make(sf.random.fold_in(key, "masks")), optimizer, reset=reset
        )

    def moved(
        key: Tensor, state: sf.State, x: Tensor, y: Tensor, step: int
    ) -> sf.State:
        return algorithm(key).update(state, grad(loss)(sf.effective(state), x, y), step)

    update = vmap(moved, in_dims=(0, 0, 0, 0, None))
    states = vmap(
        lambda key: algorithm(key).init(weights(sf.random.fold_in(key, "weights")))
    )(keys)
    index = torch.stack(
        [
            batches(len(split.y), steps, seed)
            for split, seed in zip(splits, seeds, strict=True)
        ]
    )
    seen = states.masks
    for step in range(steps):
        x, y = (
            torch.stack(
                [part[i] for part, i in zip(parts, index[:, step], strict=True)]
            )
            for parts in _columns(splits)
        )
        before, states = states.masks, update(keys, states, x, y, step)
        if watch and not sf.tree.identical(states.masks, before):
            seen = vmap(sf.masks.union)(seen, states.masks)
    logits = vmap(lambda state, x: forward(sf.effective(state), x))(
        states, torch.stack([s.test_x for s in splits])
    )
    rows = [
        measured(out, split)
        for out, split in zip(logits.softmax(-1), splits, strict=True)
    ]
    if watch:
        shares = 1 - vmap(sf.masks.sparsity)(seen)
        rows = [
            {**row, "explored": round(float(share), 6)}
            for row, share in zip(rows, shares, strict=True)
        ]
    return logits, rows


def _columns(splits: list[data.Split]) -> tuple[list[Tensor], list[Tensor]]:
    return [split.x for split in splits], [split.y for split in splits]


def measured(chances: Tensor, split: data.Split) -> Row:
    """Test error in per cent, and loss."""
    wrong = int((chances.argmax(-1) != split.test_y).sum())
    nats = float(functional.nll_loss(chances.log(), split.test_y))
    return {"error": round(100 * wrong / len(split.test_y), 4), "loss": round(nats, 6)}


# ---- methods -------------------------------------------------------------------------


def moving(method: str, sparsity: float, steps: int, every: int) -> Make:
    """SET, RigL or GMP, that changes masks in the first three quarters of a run; or a
    mask that stays.
    """
    stop, erk = 3 * steps // 4, sf.budgets.erk()
    if method == "static":
        return lambda key: sf.static(sparsity, distribution=erk, key=key)
    if method == "GMP":
        cubic = sf.schedules.polynomial(0.0, sparsity, begin=0, end=stop)
        return lambda key: sf.gmp(
            cubic,
            when=sf.every(every, stop=stop + 1),
            distribution=sf.budgets.global_(),
        )
    options = {
        "when": sf.every(every, stop=stop),
        "drop_fraction": sf.schedules.cosine_decay(0.3, stop),
    }
    rule = {"SET": sf.set, "RigL": sf.rigl}[method]
    return lambda key: rule(sparsity, **options, distribution=erk, key=key)


def cycles(peak: float, period: int) -> Callable[[Any], Any]:
    """Learning rates that start again after each period."""
    schedule = learning_rate(peak, period)
    return lambda step: schedule(step % period)


def one(
    method: str,
    level: str,
    seeds: tuple[int, ...],
    plan: Plan,
    rate: float,
    tuning: bool = False,
) -> list[Row]:
    """Train the network of each seed."""
    keys = torch.stack([sf.random.key(seed) for seed in seeds])
    steps, every, watch = plan.steps, plan.steps // 40, False
    reset, period = sf.never(), steps  # after which the learning rate starts again
    if level in LONGER:
        steps *= LONGER[level]
        every, period = steps // 40, steps
    if level in MOVES:
        every, watch = max(1, steps // MOVES[level]), True
    if method == "dense":
        make: Make = lambda key: sf.dense()  # noqa: E731
    elif ":" in level:
        n, m = map(int, level.split(":"))
        if method == "SR-STE":
            make = lambda key: sf.methods.sr_ste(n, m)  # noqa: E731
        elif method == "STE":
            make = lambda key: sf.ste(None, pattern=sf.patterns.nm(n, m))  # noqa: E731
        else:
            # train, prune, and train again with the rates and an optimizer of the start
            period = steps if method == "ASP, twice as long" else steps // 2
            steps, reset = 2 * period, sf.at([period - 1])
            make = lambda key: sf.methods.asp(n, m, when=sf.at([period - 1]))  # noqa: E731
    else:
        make = moving(method, 1 - KEPT / 100, steps, every)
    return train(
        make,
        keys,
        seeds,
        steps,
        cycles(rate, period),
        tuning=tuning,
        watch=watch,
        reset=reset,
    )[1]


def ensemble(members: int, seed: int, plan: Plan, rate: float) -> Row:
    """The mean prediction of some RigL networks that have one over `members` of the
    weights each.
    """
    keys = torch.stack(
        [sf.random.fold_in(sf.random.key(seed), member) for member in range(members)]
    )
    make = moving("RigL", 1 - 1 / members, plan.steps, plan.steps // 40)
    logits, rows = train(
        make, keys, (seed,) * members, plan.steps, cycles(rate, plan.steps)
    )
    alone = sum(row["error"] for row in rows) / members
    return {
        **measured(logits.softmax(-1).mean(0), signals(seed, False)),
        "member": round(alone, 4),
    }


# ---- jobs ----------------------------------------------------------------------------


def jobs(plan: Plan) -> list[Job]:
    """All of this group."""
    arms = [("dense", "100")]
    arms += [
        (method, level) for level in LONGER for method in ("static", "RigL", "GMP")
    ]
    arms += [(method, level) for level in MOVES for method in ("SET", "RigL")]
    for n, m in SHAPES:
        arms += [
            (method, f"{n}:{m}")
            for method in ("SR-STE", "STE", "ASP", "ASP, twice as long")
        ]
    made = [job for arm in arms for job in blocks("small", arm[0], [arm], plan)]
    for members in ENSEMBLES:
        made += each("small", "ensemble", [("ensemble", str(members))], plan)
    return made


def tasks() -> list[Task]:
    """Learning rates to choose."""
    return [Task("small", method, levels, RATES) for method, levels in TUNED.items()]


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """Rows of a job, one for each seed."""
    ((arm, level),) = job.arms
    if arm == "ensemble":
        rows = [
            ensemble(int(level), seed, plan, rates["small RigL"]) for seed in job.seeds
        ]
    else:
        rows = one(arm, level, job.seeds, plan, rates[f"small {arm.split(',')[0]}"])
    return [
        {"arm": arm, "level": level, "seed": seed, **row}
        for seed, row in zip(job.seeds, rows, strict=True)
    ]


def tuned(
    task: Task, seeds: tuple[int, ...], plan: Plan, rate: float
) -> list[dict[str, float]]:
    """The error of each seed at each level of the task, on the data for tuning."""
    found: list[dict[str, float]] = [{} for _ in seeds]
    for level in task.levels:
        rows = one(task.method, level, seeds, plan, rate, tuning=True)
        for errors, row in zip(found, rows, strict=True):
            errors[level] = row["error"]
    return found
