"""Reports the results of `prune.py`: a table, what the runs showed, and a figure."""

from pathlib import Path
from typing import Any

import numpy as np
from _tables import aligned
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Distinct for every kind of colour vision; the method without data is grey.
COLOURS = {
    "magnitude": "#777777",
    "Wanda": "#E69F00",
    "Wanda, swaps": "#56B4E9",
    "RIA": "#CC79A7",
    "SparseGPT": "#0072B2",
    "WoodFisher": "#009E73",
}
EXPECTED = ("SparseGPT", "Wanda", "magnitude")  # the best first
GROUPS = 16  # of inputs, by their size

Results = list[dict[str, Any]]


def grouped(results: Results) -> dict[str, dict[str, Results]]:
    """The results of all seeds, by level and method."""
    found: dict[str, dict[str, Results]] = {}
    for r in results:
        found.setdefault(r["level"], {}).setdefault(r["method"], []).append(r)
    return found


def mean(results: Results, name: str) -> float:
    """The mean of a number over seeds."""
    return sum(r[name] for r in results) / len(results)


def table(results: Results) -> str:
    """One aligned row for each level and method, with the mean over seeds and the loss
    of each seed.
    """
    head = (
        "zeros",
        "method",
        "kept in blocks",
        "before",
        "after",
        "rise",
        "each seed",
        "seconds",
    )
    rows = []
    for level, methods in grouped(results).items():
        for method, rs in methods.items():
            before, after = mean(rs, "before"), mean(rs, "bits")
            each = " ".join(f"{r['bits']:.3f}" for r in rs)
            numbers = (
                f"{before:.3f}",
                f"{after:.3f}",
                f"{after - before:+.3f}",
                each,
                f"{mean(rs, 'seconds'):.1f}",
            )
            rows.append((level, method, f"{rs[0]['kept']:,}", *numbers))
    return aligned(head, rows, left=2)


def findings(results: Results) -> list[str]:
    """What the runs showed, a sentence for each level."""
    found = []
    for level, methods in grouped(results).items():
        order = sorted(methods, key=lambda method: mean(methods[method], "bits"))
        found.append(
            f"{level}, best first: "
            + ", ".join(f"{m} {mean(methods[m], 'bits'):.3f}" for m in order)
        )
        if all(method in methods for method in EXPECTED):
            seeds = list(
                zip(*([r["bits"] for r in methods[m]] for m in EXPECTED), strict=True)
            )
            held = [sum(seed[i] < seed[i + 1] for seed in seeds) for i in (0, 1)]
            found.append(
                f"{level}: SparseGPT < Wanda in {held[0]} of {len(seeds)} seeds, "
                f"Wanda < magnitude in {held[1]}; SparseGPT < Wanda < magnitude in "
                f"{sum(a < b < c for a, b, c in seeds)} of {len(seeds)} seeds"
            )
    return found


def draw(results: Results, shown: dict[str, Any], file: Path) -> None:
    """The loss after pruning on the left, for each level; on the right, which inputs of
    a layer are kept.
    """
    levels = grouped(results)
    figure = Figure(figsize=(13.5, 5.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    left, right = figure.subfigures(1, 2, width_ratios=(1.75, 1))
    panels = left.subplots(1, len(levels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (level, methods) in zip(panels, levels.items(), strict=True):
        losses(axes, level, methods)
    rises = [r["bits"] - r["before"] for r in results]
    # the numbers stand beside the bars
    panels[0].set_xlim(min(0.0, 1.1 * min(rises)), 1.32 * max(*rises, 1e-3))
    for label in panels[0].get_yticklabels():
        label.set(color=COLOURS[label.get_text()], fontsize=11)
    left.suptitle(title(levels), x=0.02, ha="left", fontsize=12)
    left.supxlabel(
        "bits per held-out character that pruning adds; a dot is a seed, a bar their "
        "mean",
        fontsize=10,
    )
    inputs(right.subplots(), list(levels)[len(levels) // 2], shown)
    figure.savefig(file, dpi=110)


def title(levels: dict[str, dict[str, Results]]) -> str:
    """What the left half shows, in two lines."""
    level = list(levels)[len(levels) // 2]
    order = sorted(levels[level], key=lambda method: rise(levels[level][method]))
    best, worst = order[0], order[-1]
    first = (
        f"A trained transformer, pruned without training: at {level} zeros"
        if level[-1] == "%"
        else f"At {level}"
    )
    return (
        f"{first}\n{best} adds {rise(levels[level][best]):.3f} bits to its loss, "
        f"{worst} {rise(levels[level][worst]):.3f}"
    )


def rise(results: Results) -> float:
    """The mean over seeds of what pruning adds to the loss."""
    return mean(results, "bits") - mean(results, "before")


def losses(axes: Axes, level: str, methods: dict[str, Results]) -> None:
    """A bar for each method, and a dot for each of its seeds."""
    names = list(methods)[::-1]
    for y, name in enumerate(names):
        rises = [r["bits"] - r["before"] for r in methods[name]]
        middle = rise(methods[name])
        axes.barh(y, middle, color=COLOURS[name], alpha=0.28, height=0.62)
        axes.scatter(
            rises,
            [y] * len(rises),
            color=COLOURS[name],
            s=26,
            zorder=3,
            edgecolor="white",
            linewidth=0.6,
        )
        axes.annotate(
            f"{middle:+.3f}",
            (max(middle, *rises, 0.0), y),
            (7, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[name],
            weight="bold",
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_title(
        f"{level} zeros"
        if level[-1] == "%"
        else f"{level}, half zeros"
        if level == "2:4"
        else level
    )
    axes.axvline(0, color="0.3", linewidth=1)
    axes.grid(axis="x", color="0.93")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def inputs(axes: Axes, level: str, shown: dict[str, Any]) -> None:
    """The share of the weights that each method keeps, from the smallest inputs of a
    layer to the largest.
    """
    order = np.argsort(np.asarray(shown["norms"]))
    ends = []
    for (at, name), mask in shown["masks"].items():
        if at == level:
            kept = [
                100 * float(part.mean())
                for part in np.array_split(np.asarray(mask)[:, order].mean(0), GROUPS)
            ]
            x = (np.arange(GROUPS) + 0.5) * len(order) / GROUPS
            axes.plot(x, kept, color=COLOURS[name], linewidth=2.2)
            ends.append((kept[-1], name))
    low, high = axes.get_ylim()
    gap, height = 0.055 * (high - low), -np.inf
    for last, name in sorted(ends):
        height = max(last, height + gap)
        axes.text(
            1.02 * len(order),
            height,
            name,
            color=COLOURS[name],
            va="center",
            clip_on=False,
        )
    axes.set_xlim(0, len(order))
    axes.set_title(
        "What data changes: how many weights are kept\nof each of the last layer's "
        f"{len(order)} inputs, at {level}",
        loc="left",
        fontsize=12,
    )
    axes.set_xlabel("inputs, from the smallest to the largest")
    axes.set_ylabel("% of the weights kept")
    axes.grid(axis="y", color="0.93")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
