"""Reports the results of `ensemble.py`: a table and a figure."""

from pathlib import Path
from typing import Any

import numpy as np
from _digits_report import COLOURS
from _tables import aligned
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE = COLOURS.values()

Results = list[dict[str, Any]]


def table(results: Results) -> str:
    """One aligned row for each sparsity."""
    head = (
        "sparsity",
        "kept",
        "mean member",
        "std. dev.",
        "together",
        "gain",
        "overlap",
        "by chance",
    )
    rows = [
        (
            f"{r['sparsity']:g}",
            f"{r['kept'][0]:,}",
            f"{r['mean']:.2f}",
            f"{r['deviation']:.2f}",
            f"{r['together']:.2f}",
            f"{r['together'] - r['mean']:+.2f}",
            f"{r['overlap']['all layers']['after']:.3f}",
            f"{r['overlap']['all layers']['chance']:.3f}",
        )
        for r in results
    ]
    return aligned(head, rows)


def draw(report: dict[str, Any], file: Path) -> None:
    """Accuracy on the left, the overlap of masks of different seeds on the right."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    left, right = figure.subplots(1, 2)
    accuracy(left, report)
    overlap(right, report)
    for axes in (left, right):
        levels = [r["sparsity"] for r in report["results"]]
        axes.set_xscale("log")  # by the fraction kept: each halving is as wide
        axes.invert_xaxis()
        axes.set_xticks([1 - s for s in levels], [f"{100 * s:g}" for s in levels])
        axes.minorticks_off()
        axes.set_xlabel("zeros, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


def accuracy(axes: Axes, report: dict[str, Any]) -> None:
    """Every member as a point, the band of one standard deviation round their mean, and
    their mean prediction.
    """
    results = report["results"]
    kept = np.array([1 - r["sparsity"] for r in results])
    mean, deviation = (
        np.array([r[name] for r in results]) for name in ("mean", "deviation")
    )
    n = report["seeds"]
    jitter = np.geomspace(0.97, 1.03, n)  # so that equal accuracies are seen
    for r, x in zip(results, kept, strict=True):
        label = f"a member ({n} seeds)" if r is results[0] else None
        axes.scatter(
            x * jitter,
            r["accuracy"],
            s=14,
            color=BLUE,
            alpha=0.5,
            linewidths=0,
            label=label,
        )
    axes.plot(
        kept, mean, color=BLUE, linewidth=2, label="mean member, ± 1 standard deviation"
    )
    axes.fill_between(
        kept, mean - deviation, mean + deviation, color=BLUE, alpha=0.15, linewidth=0
    )
    together = [r["together"] for r in results]
    axes.plot(
        kept,
        together,
        color=ORANGE,
        linewidth=2,
        marker="s",
        markersize=5,
        label="mean prediction of members",
    )
    most = max(results, key=lambda r: r["together"] - r["mean"])
    axes.set_title(
        f"{n * len(results)} networks in one loop: predicting together gains up to\n"
        f"{most['together'] - most['mean']:.1f} points, at "
        f"{100 * most['sparsity']:g}% zeros",
        fontsize=11,
    )
    axes.set_ylabel("test accuracy, %")


def overlap(axes: Axes, report: dict[str, Any]) -> None:
    """How much more two seeds share than random masks with as many weights in each
    layer.
    """
    results = report["results"]
    kept = [1 - r["sparsity"] for r in results]
    for layers, colour, marker in (
        ("first layer", ORANGE, "s"),
        ("all layers", BLUE, "o"),
    ):
        found = [r["overlap"][layers] for r in results]
        chance = np.array([f["chance"] for f in found])
        after, deviation = (
            np.array([f[name] for f in found]) / chance
            for name in ("after", "after_deviation")
        )
        axes.plot(
            kept,
            after,
            color=colour,
            linewidth=2,
            marker=marker,
            markersize=5,
            label=layers,
        )
        axes.fill_between(
            kept,
            after - deviation,
            after + deviation,
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    axes.axhline(1, color="0.4", linestyle="--", linewidth=1, label="random masks")
    first = results[0]["overlap"]["first layer"]
    axes.set_title(
        "Seeds do not agree on weights: in the first layer two masks share\n"
        f"{first['after'] / first['chance']:.2f} times what chance gives at "
        f"{100 * results[0]['sparsity']:g}% zeros",
        fontsize=11,
    )
    axes.set_ylabel("overlap of two masks, times chance (± 1 std. dev.)")
    axes.set_ylim(bottom=0)
