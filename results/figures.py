"""Two figures of the page, from the summary alone: error by the share of weights kept,
and a forest of the claims.
"""

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from results.claims import SECTIONS
from results.summary import CONTROL, FAILS, HOLDS, OPEN

# The arms that the first figure shows: their names on it, and colours that all kinds of
# colour vision tell apart.
METHODS = {
    "IMP": ("lottery tickets", "#0072B2"),
    "GMP": ("gradual pruning", "#56B4E9"),
    "RigL": ("RigL", "#D55E00"),
    "SNIP": ("SNIP", "#009E73"),
    "SET": ("SET", "#E69F00"),
    "static": ("random mask", "#777777"),
}
VERDICTS = {HOLDS: "#0072B2", OPEN: "#777777", FAILS: "#D55E00"}
PUBLISHED = "#111111"
# Unit -> up to where its axis is linear, and its ticks.
LINEAR = {
    "points of test accuracy (linear to 2, then logarithmic)": (2, (1, 2, 5, 20, 50)),
    "bits per character; published: bits per token (linear to 0.1)": (
        0.1,
        (0.05, 0.1, 0.3, 1, 3),
    ),
}


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those that are wanted, in their order, a gap apart, and between the
    bounds.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    for k, i in enumerate(order):  # upwards, no lower than those below need
        before = places[order[k - 1]] + gap if k else low
        places[i] = max(wanted[i], before, low)
    # then downwards, no higher than those above need
    for k in reversed(range(len(order))):
        after = places[order[k + 1]] - gap if k + 1 < len(order) else high
        places[order[k]] = min(places[order[k]], after)
    return places


def methods(summary: dict[str, Any]) -> Figure:
    """Test error by the weights kept; the axes are logarithmic, so that methods near
    the dense network stay apart.
    """
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes: Axes = figure.subplots()
    rows = {
        (row["arm"], float(row["level"])): row for row in summary["errors"]["lenet"]
    }
    left = []
    for arm, (name, colour) in METHODS.items():
        levels = sorted(level for other, level in rows if other == arm)
        medians = [rows[arm, level]["median"] for level in levels]
        axes.plot(levels, medians, color=colour, marker="o", ms=5, lw=2)
        if levels:
            left.append((name, levels[0], medians[0], colour))
    shown = [
        row["median"] for (arm, _), row in rows.items() if arm in (*METHODS, "dense")
    ]
    low, high = 0.85 * min(shown, default=5), 1.15 * max(shown, default=50)
    places = spread(
        [math.log(y) for _, _, y, _ in left],
        0.055 * math.log(high / low),
        math.log(low),
        math.log(high),
    )
    for (name, x, y, colour), place in zip(left, places, strict=True):
        arrow = {
            "arrowstyle": "-",
            "color": colour,
            "lw": 0.8,
            "shrinkA": 0,
            "shrinkB": 4,
        }
        at = (0.87, math.exp(place))
        axes.annotate(
            name,
            (x, y),
            at,
            color=colour,
            ha="right",
            va="center",
            fontsize=11,
            arrowprops=arrow,
        )
    if ("dense", 100.0) in rows:
        dense = rows["dense", 100.0]["median"]
        axes.axhline(dense, color="black", lw=1.2)
        axes.text(
            1.01,
            dense,
            "dense",
            va="center",
            fontsize=11,
            transform=axes.get_yaxis_transform(),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.38, 11.5)
    axes.set_ylim(low, high)
    ticks = [
        tick
        for tick in (4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 60, 80)
        if low < tick < high
    ]
    axes.set_yticks(ticks, [f"{tick} %" for tick in ticks], fontsize=10)
    axes.set_xticks([1, 2, 3, 5, 10], ["1 %", "2 %", "3 %", "5 %", "10 %"], fontsize=10)
    axes.minorticks_off()
    axes.set_xlabel("weights kept", fontsize=11)
    axes.grid(axis="y", color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Test error: lower is better", loc="left", fontsize=12)
    return figure


def claims(summary: dict[str, Any]) -> Figure:
    """Each claim's difference with its interval, grouped by section; published numbers
    as diamonds.
    """
    rows = [row for row in summary["claims"] if row["verdict"] != CONTROL]
    apart = ("data", "low rank", "learned", "recovery")
    points, bits = LINEAR
    parts = {
        points: [r for r in rows if r["section"] not in (*apart, "collapse")],
        bits: [r for r in rows if r["section"] in apart],
    }
    parts = {unit: part for unit, part in parts.items() if part}
    heights = [
        len(part) + 1.4 * len({r["section"] for r in part}) + 2
        for part in parts.values()
    ]
    figure = Figure(figsize=(6.4, 0.19 * sum(heights) + 1.2), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (unit, part) in zip(panels, parts.items(), strict=True):
        forest(axes, part, unit)
    marks = [
        Line2D([], [], color=VERDICTS[name], marker="o", ms=5)
        for name in (HOLDS, OPEN, FAILS)
    ]
    marks.append(Line2D([], [], color=PUBLISHED, marker="D", mfc="none", ls="", ms=5))
    names = ["holds", "open", "does not hold", "published, another network"]
    figure.legend(
        marks, names, frameon=False, fontsize=9, loc="outside upper center", ncols=2
    )
    return figure


def forest(axes: Axes, rows: list[dict[str, Any]], unit: str) -> None:
    """The claims of one unit."""
    y, ticks, labels = 0.0, [], []
    axes.margins(x=0.06)
    axes.text(
        1.01,
        1.4,
        "better",
        fontsize=8,
        va="center",
        transform=axes.get_yaxis_transform(),
    )
    for name in dict.fromkeys(row["section"] for row in rows):
        y += 1.4
        at = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(
            -0.015, y, SECTIONS[name].title, ha="right", fontsize=9, weight="bold", **at
        )
        for row in (row for row in rows if row["section"] == name):
            y += 1
            colour = VERDICTS[row["verdict"]]
            if row["low"] is not None:
                axes.plot(
                    [row["low"], row["high"]],
                    [y, y],
                    color=colour,
                    lw=2,
                    solid_capstyle="butt",
                )
            axes.plot(row["median"], y, "o", color=colour, ms=4.5)
            if row["published"] is not None:
                axes.plot(
                    row["published"], y, "D", mfc="none", color=PUBLISHED, ms=5, mew=1
                )
            axes.text(1.01, y, f"{row['better']}/{row['n']}", fontsize=8, **at)
            ticks.append(y)
            labels.append(row["text"])
    axes.set_ylim(y + 0.8, 0.6)
    axes.set_yticks(ticks, labels, fontsize=8.5)
    axes.axvline(0, color="black", lw=0.8)
    linear, marks = LINEAR[unit]
    axes.set_xscale("symlog", linthresh=linear)
    low, high = axes.get_xlim()
    axes.set_xlim(low, 1.25 * high)  # the last diamond is not on the counts beside it
    shown = [
        mark for mark in (*(-mark for mark in marks), 0, *marks) if low <= mark <= high
    ]
    axes.set_xticks(
        shown, [f"{mark:+g}" if mark else "0" for mark in shown], fontsize=8.5
    )
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit, fontsize=9)
    axes.grid(axis="x", color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw(summary: dict[str, Any], folder: Path) -> None:
    """Write both; nothing before the first runs."""
    if not summary["claims"]:
        return
    methods(summary).savefig(
        folder / "results-methods.png", dpi=150, metadata={"Software": None}
    )
    claims(summary).savefig(
        folder / "results-claims.png", dpi=150, metadata={"Software": None}
    )
