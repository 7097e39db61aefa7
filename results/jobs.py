"""What is run: jobs, the rows that they end with, and how large a run is."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import sparsefn as sf

Row = dict[str, Any]
Key = tuple[str, str, str, int]  # group, arm, level, seed

# of all steps: without it one run of SET and all runs of GraSP at 10 % lost units for
# good
WARMUP = 0.1


class Plan(NamedTuple):
    """How large all runs are: steps are multiples of 40, so that masks change in 40ths
    and rest in the last quarter.
    """

    seeds: int = 10
    block: int = 5  # seeds that are trained in one vmapped loop
    steps: int = 600  # LeNet, and small networks at their usual length
    conv_steps: int = 280
    text_steps: int = 1000
    tuned_steps: int = 200  # low-rank updates
    llama_steps: int = 400
    recovery_steps: int = 80
    windows: int = 128  # of calibration
    width: int = 64  # of the transformer
    mask_width: int = 32  # of the LLaMA whose masks are learned
    mask_steps: int = 100
    mask_windows: int = 1024
    rates: int = 3  # that are tried first
    rounds: int = 100  # of SynFlow


TINY = Plan(
    seeds=1,
    block=1,
    steps=40,
    conv_steps=40,
    text_steps=40,
    tuned_steps=40,
    llama_steps=40,
    recovery_steps=40,
    windows=8,
    width=32,
    mask_width=16,
    mask_steps=8,
    mask_windows=32,
    rates=1,
    rounds=4,
)


class Job(NamedTuple):
    """One call of a group's `run`, which ends with a row for each arm, level and
    seed.
    """

    group: str
    name: str
    seeds: tuple[int, ...]
    arms: tuple[tuple[str, str], ...]  # arm and level

    def makes(self) -> set[Key]:
        """The keys of its rows."""
        return {
            (self.group, arm, level, seed)
            for arm, level in self.arms
            for seed in self.seeds
        }


class Task(NamedTuple):
    """What a learning rate is chosen for: a method of a group, at the ends of the
    levels that the rate serves.
    """

    group: str
    method: str
    levels: tuple[str, ...]
    rates: tuple[float, ...]  # the middle one, then its neighbours
    seeds: tuple[int, ...] = (100, 101, 102)  # none of a result
    grows: bool = True  # whether more rates follow where the best is at an end

    @property
    def name(self) -> str:
        """Under which its rate is found."""
        return f"{self.group} {self.method}"


Rates = Mapping[str, float]  # the name of a task -> the rate


def learning_rate(peak: float, steps: int) -> Callable[[Any], Any]:
    """The schedule of every run: a linear rise, times half a cosine."""
    rise = sf.schedules.polynomial(
        0.0, 1.0, begin=0, end=max(1, round(WARMUP * steps)), power=1
    )
    fall = sf.schedules.cosine_decay(peak, steps)
    return lambda step: rise(step + 1) * fall(step)


def each(group: str, name: str, arms: list[tuple[str, str]], plan: Plan) -> list[Job]:
    """A job for each seed."""
    return [Job(group, name, (seed,), tuple(arms)) for seed in range(plan.seeds)]


def blocks(group: str, name: str, arms: list[tuple[str, str]], plan: Plan) -> list[Job]:
    """A job for each block of seeds."""
    starts = range(0, plan.seeds, plan.block)
    ranges = [range(start, min(start + plan.block, plan.seeds)) for start in starts]
    return [Job(group, name, tuple(seeds), tuple(arms)) for seeds in ranges]
