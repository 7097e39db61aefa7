"""Reports the results of `story.py`: a table, a page and a figure."""

from pathlib import Path
from typing import Any

from _tables import aligned
from matplotlib.figure import Figure

RUNTIMES = ("PyTorch", "torch.export", "ONNX Runtime")
# Distinct for every kind of colour vision; the dense model is grey.
COLOURS = {
    "dense": "#777777",
    "width": "#E69F00",
    "depth": "#56B4E9",
    "width + depth": "#0072B2",
    "2:4": "#CC79A7",
}
HEAD = (
    "model",
    "parameters",
    "FLOPs",
    "bits a byte, pruned",
    "recovered",
    "PyTorch, ms",
    "torch.export, ms",
    "ONNX Runtime, ms",
    "ONNX file, MB",
    "in transformers",
)

Report = dict[str, Any]


def rows(report: Report) -> list[tuple[str, ...]]:
    """One for each model; a time is followed by its ratio to the dense model's."""
    found = []
    dense = report["rows"]["dense"]
    for way, row in report["rows"].items():
        times = [
            f"{row['ms'][name]:.1f} ({row['ms'][name] / dense['ms'][name]:.2f})"
            for name in RUNTIMES
        ]
        found.append(
            (
                way,
                f"{row['params']:,}",
                f"{row['flops'] / dense['flops']:.2%}",
                "" if way == "dense" else f"{row['pruned']:.3f}",
                f"{row['bits']:.3f}",
                *times,
                f"{row['bytes'] / 1e6:.1f}",
                "yes" if row["loads"] else "no",
            )
        )
    return found


def table(report: Report) -> str:
    """An aligned row for each model."""
    return aligned(HEAD, rows(report), left=1)


def findings(report: Report) -> list[str]:
    """What the run showed, in sentences."""
    found, plan, counts = report["rows"], report["plan"], report["counts"]
    dense = found["dense"]
    best = min((way for way in found if way != "dense"), key=lambda w: found[w]["bits"])
    smaller = [found[way] for way in ("width", "depth", "width + depth")]
    flops = [row["flops"] / dense["flops"] for row in smaller]
    zeros = [found["2:4"]["ms"][name] / dense["ms"][name] for name in RUNTIMES]
    total = sum(report["seconds"].values())
    parts = ", ".join(f"{name} {s:.0f}" for name, s in report["seconds"].items())
    return [
        f"The dense model has {dense['params']:,} parameters and saw "
        f"{report['tokens']:,} tokens in {plan['steps']} steps: {dense['bits']:.3f} "
        "bits a byte of modules that were held out. Counts of single tokens reach "
        f"{counts['unigram']:.3f}, counts of pairs {counts['bigram']:.3f}.",
        f"Of its FLOPs width keeps {flops[0]:.2%}, depth {flops[1]:.2%} and both "
        f"{flops[2]:.2%}. "
        f"2:4 keeps {found['2:4']['flops'] / dense['flops']:.2%}, counted with half of "
        "each matrix in the blocks: products of attention and the head stay whole.",
        f"After {plan['recover']} steps of distillation {best} is best, with "
        f"{found[best]['bits']:.3f} bits a byte.",
        f"2:4 takes {min(zeros):.2f} to {max(zeros):.2f} of the dense time: without "
        "sparse kernels a product with zeros takes as long as any other, and its files "
        "are as large.",
        f"All of it took {total:.0f} s of one core, which is {total / 120:.1f} minutes "
        f"of two: {parts}.",
    ]


def page(report: Report) -> str:
    """The page, in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (HEAD, *rows(report))]
    lines.insert(1, "|---" * len(HEAD) + "|")
    parts = [
        "# The story of a smaller model",
        "![Loss over milliseconds in three runtimes](story.png)",
        "\n".join(lines),
        "Milliseconds are of processor time, with one thread, of a call on a window of "
        f"{report['plan']['window']} tokens: medians of {report['plan']['repeats']} "
        "rounds, and in brackets the ratio to the dense model of the same run.",
        "\n".join(f"- {one}" for one in findings(report)),
    ]
    return "\n\n".join(parts) + "\n"


def draw(report: Report, file: Path) -> None:
    """Loss over measured milliseconds, a panel for each runtime."""
    found = report["rows"]
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = figure.subplots(1, len(RUNTIMES), sharey=True)
    for axes, name in zip(panels, RUNTIMES, strict=True):
        for way, row in found.items():
            place = (row["ms"][name], row["bits"])
            axes.scatter(*place, color=COLOURS[way], s=70, zorder=3, edgecolor="white")
            style = {"textcoords": "offset points", "weight": "bold"}
            axes.annotate(way, place, (7, 5), color=COLOURS[way], **style)
        axes.axhline(found["dense"]["bits"], color="0.8", linewidth=1, zorder=0)
        axes.set_xlim(0, 1.35 * max(row["ms"][name] for row in found.values()))
        axes.set_title(name, loc="left", fontsize=11)
        axes.set_xlabel("ms of a forward pass")
        axes.grid(color="0.94")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bits a byte, held out")
    figure.suptitle(
        "A small LLaMA at half of its FLOPs: loss over measured time",
        x=0.01,
        ha="left",
    )
    figure.savefig(file, dpi=110)
