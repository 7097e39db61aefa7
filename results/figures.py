"""Two figures of the page, from the summary alone: error by the share that is kept, and a forest of the claims."""

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from results.claims import SECTIONS
from results.summary import CONTROL, FAILS, HOLDS, OPEN

# Families share a colour that all kinds of colour vision tell apart; markers and lines tell their methods.
FAMILIES = {
    "pruned while or after it trains dense": "#0072B2",
    "sparse all along, masks move": "#D55E00",
    "masks before training, by gradients": "#009E73",
    "masks at random": "#777777",
}
METHODS = {
    "IMP": (0, "s", "-"),
    "GMP": (0, "o", "-"),
    "RigL": (1, "o", "-"),
    "SNFS": (1, "s", "--"),
    "SET": (1, "^", "-."),
    "DSR": (1, "D", ":"),
    "DeepR": (1, "v", "--"),
    "SynFlow": (2, "o", "-"),
    "GraSP": (2, "s", "--"),
    "SNIP": (2, "^", "-."),
    "static": (3, "o", "-"),
    "static, scaled start": (3, "s", "--"),
}
VERDICTS = {HOLDS: "#0072B2", OPEN: "#777777", FAILS: "#D55E00"}
PUBLISHED = "#111111"
# Unit -> up to where its axis is linear, and its ticks.
LINEAR = {
    "points of test accuracy (linear to 2, then logarithmic)": (2, (1, 2, 5, 20, 50)),
    "bits per character; published: bits per token (linear to 0.1)": (0.1, (0.05, 0.1, 0.3, 1, 3)),
}


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those that are wanted, in their order, a gap apart, and between the bounds."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    for k, i in enumerate(order):  # upwards, no lower than those below need
        before = places[order[k - 1]] + gap if k else low
        places[i] = max(wanted[i], before, low)
    for k in reversed(range(len(order))):  # then downwards, no higher than those above need
        after = places[order[k + 1]] - gap if k + 1 < len(order) else high
        places[order[k]] = min(places[order[k]], after)
    return places


def methods(summary: dict[str, Any]) -> Figure:
    """Test error on a logarithmic axis, so that methods near the dense network stay apart."""
    figure = Figure(figsize=(6.4, 7.4), layout="constrained")
    axes: Axes = figure.subplots()
    rows = {(row["arm"], float(row["level"])): row for row in summary["errors"]["lenet"]}
    ends = []
    for i, (name, (family, marker, line)) in enumerate(METHODS.items()):
        colour = list(FAMILIES.values())[family]
        levels = sorted(level for arm, level in rows if arm == name)
        if not levels:
            continue
        mine = [rows[name, level] for level in levels]
        x = [level * 1.012 ** (i - len(METHODS) / 2) for level in levels]
        y = [row["mean"] for row in mine]
        below = [row["mean"] - max(row["low"], 0.2) if row["low"] is not None else 0 for row in mine]
        above = [row["high"] - row["mean"] if row["high"] is not None else 0 for row in mine]
        axes.errorbar(x, y, [below, above], color=colour, marker=marker, linestyle=line, ms=4, lw=1.3, elinewidth=0.8)
        ends.append((name, x[0], y[0], colour))
    axes.set_yscale("log")
    axes.set_xscale("log")
    means = [row["mean"] for (name, _), row in rows.items() if name in (*METHODS, "dense")]
    low, high = math.log(0.8 * min(means, default=5)), math.log(1.25 * max(means, default=50))
    gap = 0.05 * (high - low)
    middle = (low + high) / 2
    room = (len(ends) - 1) * gap / 2  # labels stay inside: those at the edges push the others inwards
    bounds = min(low + gap / 2, middle - room), max(high - gap / 2, middle + room)
    places = spread([math.log(y) for _, _, y, _ in ends], gap, *bounds)
    for (name, x, y, colour), place in zip(ends, places, strict=True):
        arrow = {"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 2}
        at = (0.8, math.exp(place))
        axes.annotate(name, (x, y), at, color=colour, ha="right", va="center", fontsize=10, arrowprops=arrow)
    for row in summary["errors"]["lenet"]:
        if row["arm"] == "dense":
            axes.axhline(row["mean"], color="black", lw=0.9)
            axes.text(1.01, row["mean"], "dense", va="center", fontsize=10, transform=axes.get_yaxis_transform())
    axes.set_ylim(math.exp(low), math.exp(high))
    ticks = [t for t in (4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 60, 80) if low < math.log(t) < high]
    axes.set_yticks(ticks, [f"{t} %" for t in ticks], fontsize=10)
    axes.set_xticks([1, 2, 3, 5, 10], ["1 %", "2 %", "3 %", "5 %", "10 %"], fontsize=10)
    axes.minorticks_off()
    axes.set_xlim(0.3, 12.5)
    axes.set_xlabel("weights kept", fontsize=10)
    axes.grid(axis="y", color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    counts = sorted({row["n"] for row in rows.values()}) or [0]
    counted = f"seeds: {counts[0]} to {counts[-1]}" if len(counts) > 1 else f"seeds: {counts[0]}"
    axes.set_title(
        f"Test error, LeNet-300-100 on MNIST-5k\n{counted}, 95 % intervals", loc="left", fontsize=11, linespacing=1.4
    )
    marks = [Line2D([], [], color=colour, lw=2) for colour in FAMILIES.values()]
    figure.legend(marks, list(FAMILIES), frameon=False, fontsize=10, loc="outside lower center", ncols=1)
    return figure


def claims(summary: dict[str, Any]) -> Figure:
    """Each claim's difference with its interval, grouped by section; published numbers as diamonds."""
    rows = [row for row in summary["claims"] if row["verdict"] != CONTROL]
    apart, (points, bits) = ("data", "low rank"), LINEAR
    parts = {
        points: [r for r in rows if r["section"] not in (*apart, "collapse")],
        bits: [r for r in rows if r["section"] in apart],
    }
    parts = {unit: part for unit, part in parts.items() if part}
    heights = [len(part) + 1.4 * len({r["section"] for r in part}) + 2 for part in parts.values()]
    figure = Figure(figsize=(6.4, 0.19 * sum(heights) + 1.2), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (unit, part) in zip(panels, parts.items(), strict=True):
        forest(axes, part, unit)
    marks = [Line2D([], [], color=VERDICTS[name], marker="o", ms=5) for name in (HOLDS, OPEN, FAILS)]
    marks.append(Line2D([], [], color=PUBLISHED, marker="D", mfc="none", ls="", ms=5))
    names = ["holds", "open: contains 0", "does not hold", "published, another network"]
    figure.legend(marks, names, frameon=False, fontsize=9, loc="outside upper center", ncols=2)
    return figure


def forest(axes: Axes, rows: list[dict[str, Any]], unit: str) -> None:
    """The claims of one unit."""
    y, ticks, labels = 0.0, [], []
    axes.margins(x=0.06)
    axes.text(1.01, 1.4, "better", fontsize=8, va="center", transform=axes.get_yaxis_transform())
    for name in dict.fromkeys(row["section"] for row in rows):
        y += 1.4
        at = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(-0.015, y, SECTIONS[name].title, ha="right", fontsize=9, weight="bold", **at)
        for row in (row for row in rows if row["section"] == name):
            y += 1
            colour = VERDICTS[row["verdict"]]
            if row["low"] is not None:
                axes.plot([row["low"], row["high"]], [y, y], color=colour, lw=2, solid_capstyle="butt")
            axes.plot(row["mean"], y, "o", color=colour, ms=4.5)
            if row["published"] is not None:
                axes.plot(row["published"], y, "D", mfc="none", color=PUBLISHED, ms=5, mew=1)
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
    shown = [mark for mark in (*(-mark for mark in marks), 0, *marks) if low <= mark <= high]
    axes.set_xticks(shown, [f"{mark:+g}" if mark else "0" for mark in shown], fontsize=8.5)
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
    methods(summary).savefig(folder / "results-methods.png", dpi=150, metadata={"Software": None})
    claims(summary).savefig(folder / "results-claims.png", dpi=150, metadata={"Software": None})
