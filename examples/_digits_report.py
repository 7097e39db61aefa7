"""Reports the results of `digits.py`: a table, orderings and a figure."""

from pathlib import Path
from typing import Any

import numpy as np
from _tables import aligned
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

# distinct for every kind of colour vision
COLOURS = {"uniform": "#0072B2", "ERK": "#D55E00"}
MARKERS = {"uniform": "o", "ERK": "s"}
# the mask of the first of these that was run is shown
PICTURED = ("RigL", "SET", "GMP", "one-shot", "static")
BLANK = 0.05  # mean ink below which a pixel counts as blank

Results = list[dict[str, Any]]


def table(results: Results) -> str:
    """One aligned row for each run."""
    head = (
        "method",
        "distribution",
        "sparsity",
        "accuracy",
        "std. err.",
        "exploration",
        "seconds",
    )
    rows = [
        (
            r["method"],
            r["distribution"] or "-",
            f"{r['reached']:.4f}",
            f"{r['mean']:.2f}",
            "-" if r["standard_error"] is None else f"{r['standard_error']:.2f}",
            f"{r['exploration']:.3f}",
            f"{r['seconds']:.1f}",
        )
        for r in results
    ]
    return aligned(head, rows, left=2)


def orderings(results: Results) -> list[dict[str, Any]]:
    """In how many seeds one run is better than another; members of one seed share
    weights and batches.
    """
    runs = {
        (r["sparsity"], r["distribution"], r["method"]): r["accuracy"] for r in results
    }
    found = []
    for sparsity in sorted({r["sparsity"] for r in results if r["distribution"]}):
        pairs = [
            (d, better, d, worse)
            for d in COLOURS
            for better, worse in (("RigL", "SET"), ("SET", "static"))
        ]
        pairs += [("ERK", name, "uniform", name) for name in ("static", "SET", "RigL")]
        for d1, m1, d2, m2 in pairs:
            a, b = runs.get((sparsity, d1, m1)), runs.get((sparsity, d2, m2))
            if a is not None and b is not None:
                wins = sum(x > y for x, y in zip(a, b, strict=True))
                ties = sum(x == y for x, y in zip(a, b, strict=True))
                claim = f"{m1} > {m2} ({d1})" if d1 == d2 else f"{d1} > {d2} ({m1})"
                found.append(
                    {
                        "sparsity": sparsity,
                        "claim": claim,
                        "wins": wins,
                        "ties": ties,
                        "seeds": len(a),
                    }
                )
    return found


def draw(report: dict[str, Any], file: Path) -> None:
    """Accuracy above, one panel for each sparsity; the first layer's mask below."""
    dense, *sparse = report["results"]
    levels = sorted({result["sparsity"] for result in sparse})
    figure = Figure(figsize=(max(10.0, 5.0 * len(levels)), 8.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    above, below = figure.subfigures(2, 1, height_ratios=(1.3, 1))
    panels = above.subplots(1, len(levels), squeeze=False)[0]
    for axes, level in zip(panels, levels, strict=True):
        accuracy(
            axes,
            [result for result in sparse if result["sparsity"] == level],
            dense["mean"],
        )
    panels[0].set_ylabel("test accuracy, %")
    handles, labels = panels[0].get_legend_handles_labels()
    above.legend(
        handles, labels, loc="outside upper center", ncols=len(labels), frameon=False
    )
    first_layer(below, np.array(report["mean_image"]), sparse)
    figure.savefig(file, dpi=110)


def accuracy(axes: Axes, results: Results, dense: float) -> None:
    """Seeds as points, their mean as a bar, and its number below."""
    methods = list(dict.fromkeys(result["method"] for result in results))
    best, worst = (
        pick(results, key=lambda result: result["mean"]) for pick in (max, min)
    )
    axes.set_title(
        f"{100 * best['sparsity']:.4g}% zeros: {best['method']} "
        f"{best['distribution']} is best with {best['mean']:.1f},\n"
        f"{worst['method']} {worst['distribution']} worst with {worst['mean']:.1f}",
        fontsize=11,
    )
    axes.axhline(
        dense,
        color="0.4",
        linestyle="--",
        linewidth=1,
        zorder=0,
        label=f"dense, mean {dense:.1f}",
    )
    for result in results:
        kind, points = result["distribution"], result["accuracy"]
        centre = methods.index(result["method"]) + (
            -0.21 if kind == "uniform" else 0.21
        )
        label = (
            f"{kind}: seeds and their mean" if result["method"] == methods[0] else None
        )
        spread = np.linspace(-0.1, 0.1, len(points)) if len(points) > 1 else np.zeros(1)
        style = {
            "color": COLOURS[kind],
            "marker": MARKERS[kind],
            "alpha": 0.6,
            "linewidths": 0,
        }
        axes.scatter(centre + spread, points, s=24, label=label, **style)
        axes.hlines(
            result["mean"],
            centre - 0.17,
            centre + 0.17,
            color=COLOURS[kind],
            linewidth=2.2,
        )
        axes.text(
            centre,
            -0.035,
            f"{result['mean']:.1f}",
            transform=axes.get_xaxis_transform(),  # x in data, y as a part of the panel
            ha="center",
            va="top",
            color=COLOURS[kind],
        )
    axes.set_ylim(top=101)
    axes.set_xticks(range(len(methods)), methods)
    axes.set_xlim(-0.5, len(methods) - 0.5)
    axes.tick_params(axis="x", length=0, pad=22, labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)


def first_layer(figure: SubFigure, ink: Any, sparse: Results) -> None:
    """The mean digit beside the connections of every pixel, before and after
    training.
    """
    name = next(
        name for name in PICTURED if any(result["method"] == name for result in sparse)
    )
    candidates = [
        result
        for result in sparse
        if result["method"] == name and result["distribution"] == "uniform"
    ]
    shown = max(candidates, key=lambda result: result["sparsity"])
    before, after = (
        np.array(shown["connections_before"]),
        np.array(shown["connections_after"]),
    )
    blank = ink < BLANK
    figure.suptitle(
        f"Where the first layer of {name} looks ({100 * shown['sparsity']:.4g}% "
        "zeros, uniform): connections of each of the 8x8 pixels, mean over seeds",
        fontsize=11,
    )
    most = max(before.max(), after.max())
    panels = (
        (
            ink,
            "Greys",
            1,
            f"the mean digit: {blank.sum()} pixels\nare nearly blank (outlined)",
            "ink",
        ),
        (before, "viridis", most, inside("before", before, blank), "connections"),
        (after, "viridis", most, inside("after", after, blank), "connections"),
    )
    for axes, (image, colours, top, title, unit) in zip(
        figure.subplots(1, 3), panels, strict=True
    ):
        drawn = axes.imshow(image, cmap=colours, vmin=0, vmax=top)
        outline(axes, blank)
        axes.set_title(title, fontsize=11)
        axes.set_axis_off()
        figure.colorbar(drawn, ax=axes, label=unit, shrink=0.9)


def inside(moment: str, counts: Any, chosen: Any) -> str:
    """How much of the first layer is on the chosen pixels."""
    share = 100 * counts[chosen].sum() / max(counts.sum(), 1)
    return f"{moment} training: {share:.0f}% of the\nconnections lie inside the outline"


def outline(axes: Axes, chosen: Any) -> None:
    """A line round the chosen pixels."""
    padded = np.pad(chosen, 1)
    style = {"color": COLOURS["ERK"], "linewidth": 1.8, "clip_on": False}
    for row, column in zip(*np.nonzero(padded[:, 1:] != padded[:, :-1]), strict=True):
        axes.plot([column - 0.5] * 2, [row - 1.5, row - 0.5], **style)
    for row, column in zip(*np.nonzero(padded[1:] != padded[:-1]), strict=True):
        axes.plot([column - 1.5, column - 0.5], [row - 0.5] * 2, **style)
