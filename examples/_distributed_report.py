"""Reports the run of `distributed.py`: a table, and a figure of the part of a mask that
each process holds.
"""

from pathlib import Path
from typing import Any

import numpy as np
from _tables import aligned
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

# one a process; distinct for every kind of colour vision
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#B0579A")
PARTS = ("queries", "keys", "values")  # the outputs of the layer

Runs = list[dict[str, Any]]


def table(runs: Runs) -> str:
    """One aligned row for each process of each run."""
    head = (
        "processes",
        "rank",
        "weights held",
        "kept in the layer",
        "of",
        "seconds a step",
    )
    rows = []
    for run in runs:
        ranks = len(run["held"])
        for rank, (held, mask) in enumerate(
            zip(run["held"], run["masks"], strict=True)
        ):
            first = (
                (str(ranks), f"{run['seconds'] / len(run['losses']):.2f}")
                if rank == 0
                else ("", "")
            )
            rows.append(
                (
                    first[0],
                    str(rank),
                    f"{held:,}",
                    f"{int(mask.sum()):,}",
                    f"{mask.numel():,}",
                    first[1],
                )
            )
        layer = sum(int(mask.sum()) for mask in run["masks"])
        of = sum(mask.numel() for mask in run["masks"])
        rows.append(("", "all", f"{run['weights']:,}", f"{layer:,}", f"{of:,}", ""))
    return aligned(head, rows)


def draw(runs: Runs, layer: str, file: Path) -> None:
    """The mask of one layer after each run, in the colours of the processes that hold
    it.
    """
    figure = Figure(figsize=(11.5, 7.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    for axes, run in zip(figure.subplots(1, len(runs)), runs, strict=True):
        strips(axes, run["masks"])
    kept = [sum(int(mask.sum()) for mask in run["masks"]) for run in runs]
    same = (
        f"{kept[0]:,}"
        if len(set(kept)) == 1
        else " and then ".join(f"{n:,}" for n in kept)
    )
    figure.suptitle(
        f"One mask of {layer}, cut into rows: {len(runs[0]['held'])} processes "
        f"trained it, {len(runs[1]['held'])} went on.\nTogether they keep exactly "
        f"{same} weights. How many of them lie on one process, the weights decide.",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    figure.savefig(file, dpi=110)


def strips(axes: Axes, masks: list[Any]) -> None:
    """A strip of rows for each process: a kept weight in its colour, a pruned one in a
    pale tint of it.
    """
    pixels, top = [], 0
    for rank, mask in enumerate(masks):
        colour = np.array(to_rgb(COLOURS[rank]))
        kept = mask.numpy()[..., None]
        pixels.append(np.where(kept, colour, 1 - 0.13 * (1 - colour)))
        bottom, width = top + len(mask), mask.shape[1]
        axes.text(
            width + 1.5,
            (top + bottom) / 2,
            f"rank {rank}\n{int(mask.sum()):,} of {mask.numel():,}",
            color=COLOURS[rank],
            va="center",
            fontsize=11,
        )
        top = bottom
        if rank + 1 < len(masks):
            axes.axhline(top - 0.5, color="white", linewidth=2.5)
    axes.imshow(np.concatenate(pixels), interpolation="nearest", aspect="auto")
    axes.set_title(f"on {len(masks)} processes", loc="left", fontsize=11)
    axes.set_xlabel("inputs")
    axes.set_xticks([])
    for i, part in enumerate(PARTS):
        axes.text(
            -1,
            (2 * i + 1) * top / 6 - 0.5,
            part,
            rotation=90,
            ha="right",
            va="center",
            fontsize=10,
        )
    axes.set_yticks([i * top / 3 - 0.5 for i in range(4)], labels=[""] * 4)
    axes.spines[:].set_visible(False)
