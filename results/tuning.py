"""Learning rates: for each method the best of a few, on data that no result is measured
on.
"""

import math
from collections.abc import Mapping
from types import ModuleType

from results import conv, learned, lenet, small, text
from results.jobs import Job, Key, Plan, Rates, Row, Task

VERSION = 2  # raise it where runs are tuned in another way, and all are run again
GROUPS: dict[str, ModuleType] = {
    "lenet": lenet,
    "small": small,
    "conv": conv,
    "text": text,
    "learned": learned,
}


def tasks(plan: Plan) -> dict[str, Task]:
    """All of them by name, with the rates that are tried first, and with no more seeds
    than the plan has.
    """
    found = [
        task._replace(rates=task.rates[: plan.rates], seeds=task.seeds[: plan.seeds])
        for group in GROUPS.values()
        for task in group.tasks()
    ]
    return {task.name: task for task in found}


def typical_error(task: Task, rate: float, rows: Mapping[Key, Row]) -> float | None:
    """The geometric mean over seeds and levels, so that each level counts alike; None
    before the runs.
    """
    keys = [("tuning", task.name, str(rate), seed) for seed in task.seeds]
    if any(key not in rows for key in keys):
        return None
    errors = [error for key in keys for error in rows[key]["errors"].values()]
    mean = math.exp(math.fsum(map(math.log, errors)) / len(errors))
    return math.inf if math.isnan(mean) else mean


def tried(task: Task, rows: Mapping[Key, Row]) -> list[float]:
    """The rates of a task, least first: the first ones, and others until the best one
    has neighbours.
    """
    rates = sorted(task.rates)
    while task.grows and len(rates) > 1:
        best = best_rate(task, rates, rows)
        if best == rates[0]:
            rates = [best / 2, *rates]
        elif best == rates[-1]:
            rates = [*rates, best * 2]
        else:
            break
    return rates


def best_rate(task: Task, rates: list[float], rows: Mapping[Key, Row]) -> float | None:
    """The rate of the least typical error, the least of several; None before all are
    run.
    """
    errors = {rate: typical_error(task, rate, rows) for rate in rates}
    known = {rate: error for rate, error in errors.items() if error is not None}
    return (
        min(known, key=lambda rate: (known[rate], rate))
        if len(known) == len(rates)
        else None
    )


def jobs(plan: Plan, rows: Mapping[Key, Row]) -> list[Job]:
    """One for each task and rate, as far as the rows say which."""
    found = tasks(plan).items()
    return [
        Job("tuning", name, task.seeds, ((name, str(rate)),))
        for name, task in found
        for rate in tried(task, rows)
    ]


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """The errors of each seed; bits per character for text."""
    task, ((arm, level),) = tasks(plan)[job.name], job.arms
    errors = GROUPS[task.group].tuned(task, job.seeds, plan, float(level))
    return [
        {"arm": arm, "level": level, "seed": seed, "errors": of_seed}
        for seed, of_seed in zip(job.seeds, errors, strict=True)
    ]


def known(rows: Mapping[Key, Row], plan: Plan) -> dict[str, float]:
    """The best rate of each task whose runs have ended."""
    best = {
        name: best_rate(task, tried(task, rows), rows)
        for name, task in tasks(plan).items()
    }
    return {name: rate for name, rate in best.items() if rate is not None}


def chosen(rows: Mapping[Key, Row], plan: Plan) -> dict[str, float]:
    """The best rate of each task."""
    found = known(rows, plan)
    for name in tasks(plan):
        assert name in found, f"{name} is not tuned"
    return found
