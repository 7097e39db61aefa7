"""How far a fresh network is pruned before no path joins its input and its output:
nothing is trained.

Six hidden layers of 100 on scikit-learn's digits.
"""

import functools

import torch

import sparsefn as sf
from results import data
from results.jobs import Job, Plan, Rates, Row, Task, each
from results.lenet import SCORED, fresh, masks_at_start

VERSION = 1
SIZES = (64, *[100] * 6, 10)
RATIOS = (3, 10, 30, 100, 300, 1000)  # one weight in so many is kept
METHODS = ("random", "magnitude", "SNIP", "GraSP", "SynFlow")


@functools.cache
def images(seed: int) -> data.Split:
    """Those of a seed."""
    return data.split(*data.digits(), seed)


def connected(masks: dict[str, torch.Tensor]) -> bool:
    """Whether any input reaches any output."""
    reached = torch.ones(SIZES[0], dtype=torch.bool)
    for mask in masks.values():
        if mask.ndim == 2:
            reached = (mask & reached).any(1)
    return bool(reached.any())


def jobs(plan: Plan) -> list[Job]:
    """All of this group: a job has all ratios of a method."""
    return [
        job
        for method in METHODS
        for job in each(
            "collapse", method, [(method, str(ratio)) for ratio in RATIOS], plan
        )
    ]


def tasks() -> list[Task]:
    """Nothing is tuned."""
    return []


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """Whether a path is left, at each ratio."""
    (seed,), rows = job.seeds, []
    split = images(seed)
    x, y = split.x[:SCORED], split.y[:SCORED]
    for method, ratio in job.arms:
        net, sparsity = fresh(SIZES, seed), 1 - 1 / int(ratio)
        if method == "random":
            masks = (
                sf.static(sparsity, key=sf.random.key(seed))
                .init(sf.modules.params_of(net))
                .masks
            )
        else:
            masks = masks_at_start(method, net, sparsity, x, y, plan.rounds)
        row = {
            "arm": method,
            "level": ratio,
            "connected": connected(masks),
            "kept": sf.masks.n_kept(masks),
        }
        rows.append(row)
    return rows
