"""Learning rates: for each method the best of a few, on data that no result is measured on."""

from collections.abc import Mapping
from types import ModuleType

from results import conv, lenet, small, text
from results.jobs import Job, Key, Plan, Rates, Row, Task

VERSION = 1  # raise it where runs are tuned in another way, and all are run again
SEEDS = (100, 101)
GROUPS: dict[str, ModuleType] = {"lenet": lenet, "small": small, "conv": conv, "text": text}


def tasks(plan: Plan) -> dict[str, Task]:
    """All of them by name, with the rates that are tried first."""
    found = [task._replace(rates=task.rates[: plan.rates]) for group in GROUPS.values() for task in group.tasks()]
    return {task.name: task for task in found}


def tried(task: Task, rows: Mapping[Key, Row]) -> list[float]:
    """The rates of a task, least first: those that are tried first, and others until the best one is inside."""
    found, errors = sorted(task.rates), dict[float, float]()
    while True:
        for rate in found:
            keys = [("tuning", task.name, str(rate), seed) for seed in SEEDS]
            if rate not in errors and all(key in rows for key in keys):
                errors[rate] = sum(rows[key]["error"] for key in keys)
        if len(found) < 2 or len(errors) < len(found):
            return found
        best = min(found, key=errors.__getitem__)
        if best not in (found[0], found[-1]):
            return found
        found = [best / 2, *found] if best == found[0] else [*found, best * 2]


def jobs(plan: Plan, rows: Mapping[Key, Row]) -> list[Job]:
    """One for each task and rate, as far as the rows say which."""
    found = tasks(plan).items()
    return [Job("tuning", name, SEEDS, ((name, str(rate)),)) for name, task in found for rate in tried(task, rows)]


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """The error of each seed; bits per character for text."""
    task, ((arm, level),) = tasks(plan)[job.name], job.arms
    errors = GROUPS[task.group].tuned(task, job.seeds, plan, float(level))
    return [
        {"arm": arm, "level": level, "seed": seed, "error": error}
        for seed, error in zip(job.seeds, errors, strict=True)
    ]


def chosen(rows: Mapping[Key, Row], plan: Plan) -> dict[str, float]:
    """The rate of the least mean error, the least of several."""
    found = {}
    for name, task in tasks(plan).items():
        errors = {rate: sum(rows["tuning", name, str(rate), s]["error"] for s in SEEDS) for rate in tried(task, rows)}
        found[name] = min(errors, key=lambda rate: errors[rate])
    return found
