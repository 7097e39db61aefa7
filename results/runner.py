"""Runs the jobs that are not done, in a few processes of one thread each, the first
seeds of all claims first.
"""

import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from results import (
    collapse,
    conv,
    learned,
    lenet,
    recovery,
    small,
    store,
    text,
    tuning,
)
from results.jobs import Job, Key, Plan, Rates, Row

GROUPS = {
    "lenet": lenet,
    "small": small,
    "conv": conv,
    "collapse": collapse,
    "text": text,
    "recovery": recovery,
    "learned": learned,
}
# Rates are a part of what a run is: rows of another tuning are not used.
VERSIONS = {"tuning": f"{tuning.VERSION}"} | {
    name: f"{g.VERSION}.{tuning.VERSION}" for name, g in GROUPS.items()
}
EVERY = 5.0  # seconds between two lines of progress


def all_jobs(plan: Plan) -> list[Job]:
    """By their first seed: a run that is stopped has fewer seeds of all claims, not
    fewer claims.
    """
    found = [job for group in GROUPS.values() for job in group.jobs(plan)]
    return sorted(found, key=lambda job: job.seeds[0])  # it is stable


def done(job: Job, plan: Plan, rates: Rates) -> list[Row]:
    """The rows of a job, with the seconds of processor time that each took."""
    begin = time.process_time()
    rows = (tuning if job.group == "tuning" else GROUPS[job.group]).run(
        job, plan, rates
    )
    seconds = round((time.process_time() - begin) / len(rows), 3)
    about = {"group": job.group, "version": VERSIONS[job.group], "seed": job.seeds[0]}
    return [{**about, **row, "cpu": seconds} for row in rows]


def _work(task: tuple[Job, Plan, Rates]) -> tuple[Job, list[Row]]:
    try:
        return task[0], done(*task)
    except Exception as error:
        error.add_note(f"in {task[0]}")
        raise


def _one_thread() -> None:
    torch.set_num_threads(1)


class Progress:
    """A line every few seconds: what is done, what ended last, and how long the rest
    takes.
    """

    def __init__(self, jobs: list[Job]) -> None:
        self.left, self.total = list(jobs), len(jobs)
        self.begin = self.shown = time.perf_counter()
        # of processor time
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def tick(self, job: Job, seconds: float) -> None:
        """A job has ended."""
        self.left.remove(job)
        self.seconds[job.group, job.name].append(seconds)
        now = time.perf_counter()
        if now - self.shown < EVERY and self.left:
            return
        self.shown = now
        passed, ended = (now - self.begin) / 60, self.total - len(self.left)
        print(
            f"{ended}/{self.total} jobs, {passed:.1f} min, about "
            f"{self.rest(passed):.0f} min left; last: {job.group} {job.name} "
            f"{job.arms[0][1]}, seed {job.seeds[0]}",
            file=sys.stderr,
            flush=True,
        )

    def rest(self, passed: float) -> float:
        """What is left takes as long as jobs of the same name took, or of any name."""
        known = {name: sum(each) / len(each) for name, each in self.seconds.items()}
        spent = sum(map(sum, self.seconds.values()))
        usual = spent / (self.total - len(self.left))
        return (
            passed
            / spent
            * sum(known.get((job.group, job.name), usual) for job in self.left)
            if spent
            else 0.0
        )


def stage(
    jobs: Iterable[Job], folder: Path, plan: Plan, rates: Rates, workers: int
) -> dict[Key, Row]:
    """Run what is not in the folder yet, and return all rows that are there then."""
    rows = store.read(folder, VERSIONS)
    missing = [job for job in jobs if not job.makes() <= rows.keys()]
    if missing:
        progress = Progress(missing)
        tasks = [(job, plan, rates) for job in missing]
        with multiprocessing.get_context("spawn").Pool(workers, _one_thread) as pool:
            for job, made in pool.imap_unordered(_work, tasks):
                store.add(folder, made)
                progress.tick(job, sum(row["cpu"] for row in made))
        rows = store.read(folder, VERSIONS)
    return rows


def everything(folder: Path, plan: Plan, workers: int) -> dict[Key, Row]:
    """Choose the learning rates, then run all claims."""
    with store.alone(folder):
        tuned = store.read(folder, VERSIONS)
        while any(not job.makes() <= tuned.keys() for job in tuning.jobs(plan, tuned)):
            tuned = stage(tuning.jobs(plan, tuned), folder, plan, {}, workers)
        return stage(all_jobs(plan), folder, plan, tuning.chosen(tuned, plan), workers)
