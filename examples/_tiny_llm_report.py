"""Reports the results of `tiny_llm.py`: a table, what the runs showed, and a figure."""

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
    "OWL": "#56B4E9",
    "RIA": "#CC79A7",
    "SparseGPT": "#0072B2",
}

Results = list[dict[str, Any]]


def by_level(results: Results) -> dict[str, Results]:
    """The results of pruned models, by level."""
    levels = dict.fromkeys(r["level"] for r in results if r["level"])
    return {level: [r for r in results if r["level"] == level] for level in levels}


def table(results: Results) -> str:
    """One aligned row for each folder."""
    head = (
        "zeros",
        "method",
        "zeros in blocks",
        "perplexity",
        "largest error of a block",
        "seconds",
    )
    rows = []
    for r in results:
        worst = max(r["blocks"].values())
        numbers = (
            f"{r['zeros']:,}",
            f"{r['perplexity']:.3f}",
            f"{worst:.3f}",
            f"{r['seconds']:.1f}",
        )
        rows.append(
            (r["level"], r["method"] + (", tuned" if r["tuned"] else ""), *numbers)
        )
    return aligned(head, rows, left=2)


def findings(results: Results) -> list[str]:
    """What the runs showed, sentences for each level."""
    dense, found = results[0]["perplexity"], []
    for level, rs in by_level(results).items():
        plain = sorted((r for r in rs if not r["tuned"]), key=lambda r: r["perplexity"])
        found.append(
            f"{level}, best first: "
            + ", ".join(f"{r['method']} {r['perplexity']:.3f}" for r in plain)
        )
        for r in rs:
            if r["tuned"]:
                before = next(
                    other for other in plain if other["method"] == r["method"]
                )
                found.append(
                    f"{level}: low-rank updates bring {r['method']} from "
                    f"{before['perplexity']:.3f} to {r['perplexity']:.3f} (dense: "
                    f"{dense:.3f}), zeros before and after: {before['zeros']:,} and "
                    f"{r['zeros']:,}"
                )
    return found


def draw(results: Results, file: Path) -> None:
    """Perplexities on the left, for each level; on the right, how far each matrix moves
    its outputs.
    """
    levels = by_level(results)
    figure = Figure(figsize=(13.5, 5.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    left, right = figure.subfigures(1, 2, width_ratios=(1.5, 1))
    panels = left.subplots(1, len(levels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (level, rs) in zip(panels, levels.items(), strict=True):
        bars(axes, level, rs, results[0]["perplexity"])
    values = [r["perplexity"] for r in results]
    # the numbers stand beside the bars
    room = 0.32 * max(max(values) - min(values), 1e-3)
    panels[0].set_xlim(min(values) - 0.6 * room, max(values) + room)
    left.suptitle(
        "A tiny LLaMA of bytes, pruned from folder to folder",
        x=0.02,
        ha="left",
        fontsize=12,
    )
    left.supxlabel("perplexity a byte of modules that were held out", fontsize=10)
    plain = [r for r in next(iter(levels.values())) if not r["tuned"]]
    errors(right.subplots(), min(plain, key=lambda r: r["perplexity"]))
    figure.savefig(file, dpi=110)


def bars(axes: Axes, level: str, results: Results, dense: float) -> None:
    """A bar for each method from the dense model on, and a diamond where it was
    tuned.
    """
    plain = [r for r in results if not r["tuned"]]
    names = list(COLOURS)[::-1]
    for r in plain:
        y, colour = names.index(r["method"]), COLOURS[r["method"]]
        axes.barh(
            y,
            r["perplexity"] - dense,
            left=dense,
            color=colour,
            alpha=0.35,
            height=0.62,
        )
        place = (max(r["perplexity"], dense), y)
        style = {
            "textcoords": "offset points",
            "va": "center",
            "color": colour,
            "weight": "bold",
        }
        axes.annotate(f"{r['perplexity']:.2f}", place, (6, 0), **style)
    for r in results:
        if r["tuned"]:
            y = names.index(r["method"])
            axes.scatter(
                r["perplexity"],
                y,
                color=COLOURS[r["method"]],
                marker="D",
                s=46,
                zorder=3,
                edgecolor="white",
            )
            style = {"textcoords": "offset points", "va": "center"}
            axes.annotate(
                f"tuned, {r['perplexity']:.2f}",
                (r["perplexity"], y),
                (-4, -23),
                **style,
            )
    axes.axvline(dense, color="0.3", linewidth=1)
    axes.annotate(
        f"dense {dense:.2f}",
        (dense, len(names) - 0.55),
        (4, 0),
        textcoords="offset points",
        color="0.3",
    )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.8, len(names) - 0.3)
    axes.set_title(f"{level} zeros" if level[-1] == "%" else f"{level} stay")
    axes.grid(axis="x", color="0.93")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def errors(axes: Axes, result: dict[str, Any]) -> None:
    """The error of each matrix, blocks from left to right."""
    kinds = list(
        dict.fromkeys(
            path.split(".", 3)[3].removesuffix(".weight") for path in result["layers"]
        )
    )
    blocks = len(result["blocks"])
    values = np.zeros((len(kinds), blocks))
    for path, error in result["layers"].items():
        _, _, block, kind = path.removesuffix(".weight").split(".", 3)
        values[kinds.index(kind), int(block)] = error
    axes.imshow(values, cmap="Blues", vmin=0, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        dark = value > 0.6 * values.max()
        axes.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            color="white" if dark else "0.2",
        )
    axes.set_yticks(range(len(kinds)), [kind.split(".")[-1] for kind in kinds])
    axes.set_xticks(range(blocks), [f"block {i}" for i in range(blocks)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"{result['method']} at {result['level']}: how far pruning moves\nthe outputs "
        "of each matrix, over their norm",
        loc="left",
        fontsize=12,
    )
