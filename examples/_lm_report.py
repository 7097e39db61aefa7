"""Reports the results of `lm.py`: a table, what the run showed, and a figure."""

from pathlib import Path
from typing import Any

import numpy as np
from _tables import aligned
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

# Distinct for every kind of colour vision; models without masks are grey.
COLOURS = {
    "dense": "#222222",
    "small dense": "#8A8A8A",
    "static": "#56B4E9",
    "SET": "#009E73",
    "RigL": "#D55E00",
    "GMP": "#0072B2",
    "STE": "#CC79A7",
    "SR-STE 2:4": "#B8860B",
}
# the last has a sparsity of its own
BASELINES, FIXED = (("dense", "small dense"), "SR-STE 2:4")

LABELS = {"small dense": "small dense*", "SR-STE 2:4": "SR-STE 2:4 (half zeros)"}

Results = list[dict[str, Any]]
Masks = dict[str, Any]  # method -> the mask of one matrix, an array of bools


def table(results: Results) -> str:
    """One aligned row for each model."""
    head = (
        "method",
        "zeros",
        "kept in blocks",
        "kept in all",
        "bits/char",
        "vs dense",
        "seconds",
    )
    dense = results[0]["bits"]
    rows = [
        (
            r["method"],
            f"{1 - r['kept'] / r['total']:.4f}",
            f"{r['kept']:,} of {r['total']:,}",
            f"{r['all_kept']:,}",
            f"{r['bits']:.3f}",
            "-" if r is results[0] else f"{r['bits'] - dense:+.3f}",
            f"{r['seconds']:.1f}",
        )
        for r in results
    ]
    return aligned(head, rows, left=1)


def ranked(results: Results) -> Results:
    """The models at the sparsity that was asked for, the best first."""
    return sorted(
        (r for r in results if r["method"] not in (*BASELINES, FIXED)),
        key=lambda r: r["bits"],
    )


def findings(results: Results) -> list[str]:
    """What the run showed, a sentence each."""
    by_name, sparse, found = {r["method"]: r for r in results}, ranked(results), []
    if sparse:
        order = ", ".join(f"{r['method']} {r['bits']:.3f}" for r in sparse)
        found.append(
            f"{100 * (1 - sparse[0]['kept'] / sparse[0]['total']):.4g}% zeros, best "
            f"first: {order}"
        )
    if sparse and (small := by_name.get("small dense")):
        better = [r["method"] for r in sparse if r["bits"] < small["bits"]]
        found.append(
            f"better than a dense model of {small['all_kept']:,} weights "
            f"({small['bits']:.3f}): {', '.join(better) or 'none'}, which keep "
            f"{sparse[0]['all_kept']:,}"
        )
    return found


def draw(report: dict[str, Any], masks: Masks, file: Path) -> None:
    """Held-out loss on the left, the masks of one matrix on the right."""
    figure = Figure(figsize=(13.5, 6.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    curves(left.subplots(), report)
    if masks:
        strips(right, report["results"], masks)
    figure.savefig(file, dpi=110)


# ---- the loss ------------------------------------------------------------------------


def curves(axes: Axes, report: dict[str, Any]) -> None:
    """A line for each model, named at its end."""
    results, level = report["results"], f"{100 * report['sparsity']:g}%"
    last = report["steps"]
    for r in results:
        steps, values = zip(*r["curve"], strict=True)
        width, style = (
            (2.6, "-")
            if r["method"] == "dense"
            else (1.9, "--" if r["method"] in BASELINES else "-")
        )
        axes.plot(
            steps, values, color=COLOURS[r["method"]], linewidth=width, linestyle=style
        )
    lowest, highest = (
        min(r["bits"] for r in results),
        max(r["curve"][0][1] for r in results),
    )
    span = highest - lowest
    axes.set_ylim(lowest - 0.06 * span, highest + 0.04 * span)
    for r, height in zip(
        results, apart([r["bits"] for r in results], 0.043 * span), strict=True
    ):
        axes.annotate(
            f"{r['bits']:.2f}  {LABELS.get(r['method'], r['method'])}",
            (last, r["bits"]),
            (1.04 * last, height),
            color=COLOURS[r["method"]],
            weight="bold" if r["method"] == "dense" else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": COLOURS[r["method"]],
                "linewidth": 0.8,
                "shrinkA": 1,
                "shrinkB": 2,
            },
        )
    pairs = report["pair_bits"]
    if lowest < pairs < highest:
        axes.axhline(pairs, color="0.6", linewidth=1, linestyle=":", zorder=0)
        axes.text(
            last,
            pairs,
            "a table of character pairs",
            color="0.45",
            fontsize=9,
            ha="right",
            va="bottom",
        )
    dense, sparse = results[0]["bits"], ranked(results)
    title = f"dense reaches {dense:.2f} bits a character"
    if sparse:
        best, worst = sparse[0], sparse[-1]
        title = (
            f"With {level} zeros in its blocks the model loses "
            f"{best['bits'] - dense:.2f} bits ({best['method']})"
        )
        title += (
            f"\nto {worst['bits'] - dense:.2f} bits ({worst['method']}) a character"
            if worst is not best
            else ""
        )
    axes.set_title(title, loc="left", fontsize=12)
    small = [r for r in results if r["method"] == "small dense"]
    note = (
        f"\n* a narrower model of {small[0]['all_kept']:,} weights in all"
        if small
        else ""
    )
    if note and sparse:
        note += f"; the sparse ones keep {sparse[0]['all_kept']:,}"
    axes.set_xlabel(f"training steps{note}")
    axes.set_ylabel("held-out loss, bits per character")
    axes.set_xlim(0, last)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)


def apart(values: list[float], gap: float) -> list[float]:
    """Heights near the values, in their order and at least a gap apart."""
    order = np.argsort(values, kind="stable")
    heights = np.array(values, dtype=float)[order]
    for _ in range(500):  # push neighbours apart, a little each time
        short = np.maximum(gap - np.diff(heights), 0) / 2
        heights[:-1] -= short
        heights[1:] += short
    placed = np.empty_like(heights)
    placed[order] = heights
    return placed.tolist()


# ---- the masks -----------------------------------------------------------------------


def strips(figure: SubFigure, results: Results, masks: Masks) -> None:
    """An image of the same matrix for each method, dark where a weight is kept."""
    by_name = {r["method"]: r for r in results}
    panels = figure.subplots(1, len(masks), squeeze=False)[0]
    figure.suptitle(
        "What the first attention layer keeps: rows are outputs, columns inputs.\n"
        "Below, the share of the kept weights in the fullest tenth of the rows",
        fontsize=12,
    )
    for axes, (name, mask) in zip(panels, masks.items(), strict=True):
        axes.imshow(
            mask,
            cmap="Greys",
            interpolation="antialiased",
            aspect="auto",
            vmin=0,
            vmax=0.8,
        )
        axes.set_title(name, color=COLOURS[name], fontsize=11)
        axes.set_xlabel(
            f"{100 * by_name[name]['fullest']:.0f}%", color=COLOURS[name], fontsize=11
        )
        third = len(mask) / 3
        names = ["query", "key", "value"] if axes is panels[0] else [""] * 3
        axes.set_yticks([third / 2, 1.5 * third, 2.5 * third], names)
        for line in (third, 2 * third):
            axes.axhline(line - 0.5, color=COLOURS[name], linewidth=1.2)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_color("0.8")
