"""Learning rates: for each method the best of a few, on data that no result is measured on."""

from types import ModuleType

from results import conv, lenet, small, text
from results.jobs import Job, Key, Plan, Rates, Row, Task

VERSION = 1  # raise it where other rates are tried, and all runs are run again
SEEDS = (100, 101)
GROUPS: dict[str, ModuleType] = {"lenet": lenet, "small": small, "conv": conv, "text": text}


def tasks(plan: Plan) -> dict[str, Task]:
    """All of them by name, with as many rates as are tried."""
    found = [task._replace(rates=task.rates[: plan.rates]) for group in GROUPS.values() for task in group.tasks()]
    return {task.name: task for task in found}


def jobs(plan: Plan) -> list[Job]:
    """One for each task and rate."""
    found = tasks(plan).items()
    return [Job("tuning", name, SEEDS, ((name, str(rate)),)) for name, task in found for rate in task.rates]


def run(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """The error of each seed; bits per character for text."""
    task, ((arm, level),) = tasks(plan)[job.name], job.arms
    errors = GROUPS[task.group].tuned(task, job.seeds, plan, float(level))
    return [
        {"arm": arm, "level": level, "seed": seed, "error": error}
        for seed, error in zip(job.seeds, errors, strict=True)
    ]


def chosen(rows: dict[Key, Row], plan: Plan) -> dict[str, float]:
    """The rate of the least mean error, the first of several."""
    found = {}
    for name, task in tasks(plan).items():
        errors = {rate: sum(rows["tuning", name, str(rate), s]["error"] for s in SEEDS) for rate in task.rates}
        found[name] = min(errors, key=lambda rate: errors[rate])
    return found
