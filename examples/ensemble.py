"""64 sparse networks on scikit-learn's digits as one vmapped ensemble: 8 seeds times 8
sparsities.

    python examples/ensemble.py
    python examples/ensemble.py --quick
    python examples/ensemble.py --steps 1000 --compile

It prints a table and how much time one loop saves over 64 loops, and writes
`out/ensemble.png` and `out/ensemble.json`, which holds every number. Needs the `demo`
extra.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _ensemble_report import draw, table
from _options import at_least, make_folder
from _progress import progress
from digits import BATCH, TRAIN, Data, forward, he_init, load, loss
from torch import Tensor
from torch.func import grad, vmap

import sparsefn as sf

SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99)
PERIOD = 10  # steps from one change of the masks to the next
ROUNDS, ALONE = 5, 3  # timing: rounds, and how many members are trained alone in each

Step = Callable[..., sf.State]


class Members(NamedTuple):
    """The settings of the members: a key and a sparsity each."""

    keys: Tensor
    sparsities: Tensor


# ---- one member ----------------------------------------------------------------------


def algorithm(key: Tensor, sparsity: float | Tensor, steps: int) -> sf.Algorithm:
    """RigL: the sparsity may be a float, or a tensor that vmap has one of for every
    member.
    """
    stop = max(1, 3 * steps // 4)  # the last quarter trains a fixed mask
    rigl = sf.rigl(
        sparsity,
        when=sf.every(PERIOD, stop=stop),
        drop_fraction=sf.schedules.cosine_decay(0.3, stop),
        distribution=sf.budgets.erk(),
        key=sf.random.fold_in(key, "masks"),
    )
    return sf.with_optimizer(rigl, sgd(steps))


def sgd(steps: int) -> sf.optimizers.Optimizer:
    """Momentum and a cosine rate."""
    return sf.optimizers.sgd(sf.schedules.cosine_decay(0.1, steps), momentum=0.9)


def start(key: Tensor, sparsity: float | Tensor, steps: int) -> sf.State:
    """A member before training. Members of one seed share their weights, whatever their
    sparsity.
    """
    return algorithm(key, sparsity, steps).init(
        he_init(sf.random.fold_in(key, "weights"))
    )


def gradients(state: sf.State, x: Tensor, y: Tensor) -> Any:
    """Dense gradients at the weights that the network runs with."""
    return grad(loss)(sf.effective(state), x, y)


# ---- all of them ---------------------------------------------------------------------


def moving(steps: int) -> Step:
    """One step of one member, which may change its masks."""

    def step(
        key: Tensor,
        sparsity: float | Tensor,
        state: sf.State,
        x: Tensor,
        y: Tensor,
        now: int,
    ) -> sf.State:
        return algorithm(key, sparsity, steps).update(
            state, gradients(state, x, y), now
        )

    return step


def resting(steps: int, compiled: bool) -> Step:
    """One step of all members between two changes, when RigL's masks rest: a static
    mask has the same update.
    """
    fixed = sf.with_optimizer(sf.static(0.5), sgd(steps))
    step = vmap(lambda state, x, y: fixed.update(state, gradients(state, x, y), 0))
    return torch.compile(step) if compiled else step


def batches(data: Data, keys: Tensor, step: int) -> Data:
    """The next images of every member; those of one seed see the same ones."""
    epoch, i = divmod(step, TRAIN // BATCH)
    order = vmap(
        lambda key: sf.random.permutation(
            sf.random.fold_in(sf.random.fold_in(key, "batches"), epoch), TRAIN
        )
    )(keys)
    chosen = order[:, i * BATCH : (i + 1) * BATCH]
    return Data(data.x[chosen], data.y[chosen])


def train(
    members: Members, data: Data, steps: int, compiled: bool, bar: Any
) -> tuple[sf.State, sf.State]:
    """Train all members at once: the states before and after."""
    first = state = vmap(lambda key, sparsity: start(key, sparsity, steps))(*members)
    change = vmap(moving(steps), in_dims=(0, 0, 0, 0, 0, None))
    rest = resting(steps, compiled)
    for step in range(steps):
        x, y = batches(data, members.keys, step)
        # The step is an int, the same for all members: a step that changes no mask does
        # no work for masks.
        state = (
            rest(state, x, y) if step % PERIOD else change(*members, state, x, y, step)
        )
        bar.update()
    return first, state


# ---- results -------------------------------------------------------------------------


def measure(
    first: sf.State, last: sf.State, test: Data, levels: list[float], seeds: int
) -> list[dict[str, Any]]:
    """One result for each sparsity: its members, their mean prediction, and what their
    masks share.
    """
    chances = vmap(lambda state: forward(sf.effective(state), test.x).softmax(-1))(last)
    chances = chances.reshape(len(levels), seeds, *chances.shape[1:])
    alone = 100 * (chances.argmax(-1) == test.y).double().mean(-1)
    together = 100 * (chances.mean(1).argmax(-1) == test.y).double().mean(-1)
    before, after = sf.ensemble.summary(first), sf.ensemble.summary(last)
    results = []
    for i, level in enumerate(levels):
        group = slice(i * seeds, (i + 1) * seeds)
        results.append(
            {
                "sparsity": level,
                "kept": after.sparsified.kept[group],
                "accuracy": alone[i].tolist(),
                "mean": float(alone[i].mean()),
                "deviation": float(alone[i].std()),
                "together": float(together[i]),
                "overlap": {
                    "all layers": overlap(before, after, lambda row: True, group),
                    "first layer": overlap(
                        before, after, lambda row: row.path == "0.weight", group
                    ),
                },
            }
        )
    return results


def overlap(
    before: sf.ensemble.Summary,
    after: sf.ensemble.Summary,
    chosen: Callable[[sf.ensemble.Row], bool],
    group: slice,
) -> dict[str, float]:
    """How much masks of a group share in the chosen layers: mean and deviation over
    pairs, and as random masks would.

    Two random masks of k among n weights share k * k / n of them.
    """
    found = {}
    for moment, summary in (("before", before), ("after", after)):
        rows = [
            row for row in summary.rows if row.path not in summary.dense and chosen(row)
        ]
        shared = torch.stack([row.shared[group, group] for row in rows]).sum(0)
        kept = int(shared[0, 0])  # the same in all members of a group
        pairs = shared[~torch.eye(len(shared), dtype=torch.bool)].double()
        pairs = pairs / (2 * kept - pairs)
        by_chance = sum(row.kept[group.start] ** 2 / row.total for row in rows)
        found |= {
            moment: float(pairs.mean()),
            f"{moment}_deviation": float(pairs.std()),
        }
        found["chance"] = by_chance / (2 * kept - by_chance)
    return found


# ---- the time that one loop saves ----------------------------------------------------


def speed(
    members: Members, state: sf.State, data: Data, steps: int, compiled: bool
) -> dict[str, float]:
    """CPU seconds for one step of all members, as an ensemble and one by one, from
    rounds that alternate.

    One thread works, so CPU time is what the clock shows where nothing else runs. A
    round is a period, one change of masks included. The loop is timed on a few members,
    whose sparsity is a float as in any single run, and is never compiled. The ratio is
    the median over rounds.
    """
    n = len(members.keys)
    change, rest = (
        vmap(moving(steps), in_dims=(0, 0, 0, 0, 0, None)),
        resting(steps, compiled),
    )
    single = moving(steps)
    some = sorted({round(i * (n - 1) / (ALONE - 1)) for i in range(ALONE)})
    alone = [
        (members.keys[i], members.sparsities[i].item(), sf.ensemble.member(state, i))
        for i in some
    ]
    x, y = batches(data, members.keys, 0)
    rest(state, x, y)  # a compiled step is compiled here
    rounds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        now = state
        for step in range(PERIOD, 2 * PERIOD):
            now = (
                rest(now, x, y) if step % PERIOD else change(*members, now, x, y, step)
            )
        middle = time.process_time()
        for i, (key, sparsity, mine) in zip(some, alone, strict=True):
            for step in range(PERIOD, 2 * PERIOD):
                mine = single(key, sparsity, mine, x[i], y[i], step)
        end = time.process_time()
        rounds.append(
            ((middle - begin) / PERIOD, (end - middle) / PERIOD * n / len(some))
        )
    ratio, together, loop = (
        sorted(values)[len(values) // 2]
        for values in ([b / a for a, b in rounds], *zip(*rounds, strict=True))
    )
    return {
        "ratio": ratio,
        "ensemble_seconds": together,
        "loop_seconds": loop,
        "timed_alone": len(some),
    }


# ---- command line --------------------------------------------------------------------


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and make the output folder before any training."""
    parser = argparse.ArgumentParser(
        description="Train 64 sparse networks on scikit-learn's digits in one loop."
    )
    add = parser.add_argument
    add(
        "--steps",
        type=at_least(2 * PERIOD),
        help="training steps (default: 500; 60 with --quick)",
    )
    add(
        "--quick", action="store_true", help="2 seeds times 3 sparsities, and few steps"
    )
    add(
        "--compile",
        action="store_true",
        help="compile the step that moves no mask; takes a while at the start",
    )
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for ensemble.png and ensemble.json (default: out)",
    )
    chosen = parser.parse_args(argv)
    chosen.steps = chosen.steps or (60 if chosen.quick else 500)
    chosen.seeds = 2 if chosen.quick else 8
    chosen.sparsities = list(SPARSITIES[::3] if chosen.quick else SPARSITIES)
    make_folder(parser, chosen.out)
    return chosen


def main() -> None:
    """Train, measure, print and draw."""
    chosen = options()
    torch.set_num_threads(1)  # the matrices are small: more threads wait for each other
    data, test = load()
    seeds, levels = chosen.seeds, chosen.sparsities
    members = Members(  # the seeds of the first sparsity, then of the next
        sf.random.split(sf.random.key(1), seeds).repeat(len(levels), 1),
        torch.tensor(levels, dtype=torch.float64).repeat_interleave(seeds),
    )
    begin = time.perf_counter()
    with progress(chosen.steps, f"{len(members.keys)} networks") as bar:
        first, last = train(members, data, chosen.steps, chosen.compile, bar)
    seconds = time.perf_counter() - begin
    results = measure(first, last, test, levels, seeds)

    print(f"\n{sf.ensemble.summary(last)}\n")
    print(
        f"Test accuracy in per cent after {chosen.steps} steps: {seeds} members a "
        "sparsity, and their mean prediction"
    )
    print(f"\n{table(results)}\n")
    wins = sum(r["together"] > r["mean"] for r in results)
    print(
        f"the mean prediction beats the mean member at {wins} of {len(levels)} "
        "sparsities"
    )
    times = speed(members, first, data, chosen.steps, chosen.compile)
    together, one_by_one = (
        1000 * times[name] for name in ("ensemble_seconds", "loop_seconds")
    )
    print(
        f"one step of {len(members.keys)} networks: {together:.0f} ms of CPU time as "
        f"an ensemble, {one_by_one:.0f} ms one by one: {times['ratio']:.1f} times "
        "faster\n"
        f"(median of {ROUNDS} alternating rounds of {PERIOD} steps; "
        f"{times['timed_alone']} members were timed alone)"
    )

    about = {
        "seeds": seeds,
        "steps": chosen.steps,
        "compiled": chosen.compile,
        "seconds": seconds,
    }
    report = {**about, "test_images": len(test.y), "speed": times, "results": results}
    (chosen.out / "ensemble.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    draw(report, chosen.out / "ensemble.png")
    print(f"\nwrote {chosen.out / 'ensemble.png'} and {chosen.out / 'ensemble.json'}")


if __name__ == "__main__":
    main()
