"""Reports the results of `smaller.py`: a table and a figure."""

from pathlib import Path
from statistics import mean
from typing import Any

from _tables import aligned
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Distinct for every kind of colour vision; the dense network is grey.
COLOURS = {"dense": "#777777", "shrunk": "#E69F00", "tuned": "#0072B2"}
NAMES = {
    "dense": "dense",
    "shrunk": "pruned and shrunk,\nbefore the last steps",
    "tuned": "the small model\nat the end",
}
COSTS = {
    "params": "parameters",
    "flops": "FLOPs",
    "torch_ms": "time in torch",
    "onnx_ms": "time in ONNX Runtime",
}

Results = list[dict[str, Any]]


def by_network(results: Results) -> dict[str, Results]:
    """The results of all seeds, by network."""
    found: dict[str, Results] = {}
    for r in results:
        found.setdefault(r["network"], []).append(r)
    return found


def average(results: Results, model: str, cost: str) -> float | None:
    """The mean of a cost over seeds; None where it was not measured."""
    numbers = [r[model][cost] for r in results]
    return None if None in numbers else mean(numbers)


def table(results: Results) -> str:
    """Two aligned rows for each network, with means over seeds and the accuracy of
    each.
    """
    head = (
        "network",
        "model",
        "params",
        "FLOPs",
        "torch ms",
        "ONNX ms",
        "accuracy",
        "each seed",
    )
    rows = []
    for network, rs in by_network(results).items():
        for model, accuracy in (("dense", "dense"), ("small", "tuned")):
            times = [average(rs, model, cost) for cost in ("torch_ms", "onnx_ms")]
            scores = [r["accuracy"][accuracy] for r in rs]
            rows.append(
                (
                    network,
                    model,
                    f"{average(rs, model, 'params'):,.0f}",
                    f"{average(rs, model, 'flops'):,.0f}",
                    *("-" if t is None else f"{t:.2f}" for t in times),
                    f"{mean(scores):.1f}",
                    " ".join(f"{s:.1f}" for s in scores),
                )
            )
    return aligned(head, rows, left=2)


def draw(report: dict[str, Any], file: Path) -> None:
    """For each network what is left of its costs, and its accuracy."""
    networks = by_network(report["results"])
    figure = Figure(figsize=(12, 3.1 * len(networks) + 0.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    panels = figure.subplots(len(networks), 2, squeeze=False, width_ratios=(1.25, 1))
    for (network, rs), (left, right) in zip(networks.items(), panels, strict=True):
        costs(left, network, rs)
        accuracies(right, rs)
    panels[-1][0].set_xlabel("% of the dense network")
    panels[-1][1].set_xlabel("% of the test images; dots are seeds, lines their mean")
    figure.suptitle(
        f"Pruned by tied units to at most {100 * report['share']:.0f} % of the FLOPs "
        "while it trains, then shrunk",
        x=0.01,
        ha="left",
        fontsize=13,
    )
    figure.savefig(file, dpi=110)


def costs(axes: Axes, network: str, rs: Results) -> None:
    """A bar for each cost of the small model."""
    shown = [cost for cost in COSTS if average(rs, "small", cost) is not None]
    for y, cost in enumerate(reversed(shown)):
        before, after = average(rs, "dense", cost), average(rs, "small", cost)
        assert before is not None and after is not None
        share = 100 * after / before
        axes.barh(y, 100, color="0.93", height=0.62)
        axes.barh(y, share, color=COLOURS["tuned"], alpha=0.75, height=0.62)
        told = (
            f"{before:.2f} to {after:.2f} ms"
            if cost.endswith("_ms")
            else f"{before:,.0f} to {after:,.0f}"
        )
        axes.text(max(103, share + 3), y, f"{share:.0f} %, {told}", va="center")
    axes.set_yticks(range(len(shown)), [COSTS[cost] for cost in reversed(shown)])
    axes.set_xlim(0, 165)
    axes.set_xticks(range(0, 101, 20))
    axes.set_title(network, loc="left", fontsize=12)
    plain(axes)


def accuracies(axes: Axes, rs: Results) -> None:
    """A dot for each seed, and a line for the mean of each model."""
    lowest = min(min(r["accuracy"].values()) for r in rs)
    for y, model in enumerate(reversed(NAMES)):
        scores = [r["accuracy"][model] for r in rs]
        axes.plot(
            [mean(scores)] * 2,
            [y - 0.25, y + 0.25],
            color=COLOURS[model],
            linewidth=2.2,
        )
        axes.scatter(
            scores,
            [y] * len(scores),
            color=COLOURS[model],
            s=26,
            zorder=3,
            edgecolor="white",
            linewidth=0.6,
        )
        place = (max(scores), y)
        text = f"{mean(scores):.1f}"
        axes.annotate(
            text,
            place,
            (8, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[model],
            weight="bold",
        )
    axes.set_yticks(range(len(NAMES)), reversed(NAMES.values()))
    axes.set_xlim(max(0.0, lowest - 2), 101)
    axes.set_ylim(-0.5, len(NAMES) - 0.5)
    axes.set_title("accuracy", loc="left", fontsize=12)
    plain(axes)


def plain(axes: Axes) -> None:
    """No frame, light lines behind the bars."""
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
