"""A Markdown table of targets (targets.toml) beside the measurements in the JSON files
of full runs.

    python benchmarks/targets.py out/benchmarks
    python benchmarks/targets.py out/benchmarks out/benchmarks-2

One column for each folder: the median over rounds, bold where the target is missed.
Smaller runs have few of the tables.
"""

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _timing import middle

Named = dict[str, dict[str, Any]]  # the rows of a table by name
LIMITS: dict[str, tuple[str, str]] = {  # how a limit and a measured value are written
    "times": ("≤ {:g}", "{:.2f}"),
    "faster": ("≥ {:g}", "{:.1f}"),
    "peak": ("≤ 1/{:g}", "1/{:.0f}"),
    "extra": ("≤ {:g} bytes/weight", "{:.2f}"),
    "milliseconds": ("≤ {:g} ms", "{:.0f}"),
    "percent": ("≤ {:g}%", "{:.2f}%"),
    "collectives": ("≤ {:g}", "{:.0f}"),
}


def measured(target: dict[str, Any], rows: Named) -> tuple[float, bool] | None:
    """The value, a median where rounds have one each, and whether it is within the
    limit.
    """
    row, other = rows.get(target["of"]), rows.get(target.get("to", target["of"]))
    if row is None or other is None:
        return None
    if "times" in target:
        value, *_ = middle(row["rounds"], other["rounds"])
        return value, value <= target["times"]
    if "faster" in target:
        value, *_ = middle(other["rounds"], row["rounds"])
        return value, value >= target["faster"]
    if "milliseconds" in target:
        return 1e3 * row["seconds"], 1e3 * row["seconds"] <= target["milliseconds"]
    for unit in ("percent", "collectives"):
        if unit in target:
            return row[unit], row[unit] <= target[unit]
    if row["peak_mib"] is None or other["peak_mib"] is None:
        return None
    if "peak" in target:
        share = other["peak_mib"] / row["peak_mib"]
        return share, share >= target["peak"]
    return row["extra"], row["extra"] <= target["extra"]


def entry(target: dict[str, Any], rows: Named) -> str:
    """The text of a cell of the table."""
    found = measured(target, rows)
    if found is None:
        return "not measured"
    (unit,) = LIMITS.keys() & target.keys()
    value = LIMITS[unit][1].format(found[0])
    return value if found[1] else f"**{value}**"


def table(folders: Sequence[Path]) -> list[str]:
    """The lines of the table; targets that no run here measured are left out."""
    targets = tomllib.loads(
        Path(__file__).with_name("targets.toml").read_text(encoding="utf-8")
    )["target"]
    runs = [
        {
            file.stem: json.loads(file.read_text(encoding="utf-8"))
            for file in at.glob("*.json")
        }
        for at in folders
    ]
    threads = [
        max((run["machine"]["threads"] for run in of.values()), default=0)
        for of in runs
    ]
    heads = [f"{number} thread{'s' * (number != 1)}" for number in threads]
    lines = [
        f"| what | target | {' | '.join(heads)} |",
        f"|---|---|{'---|' * len(heads)}",
    ]
    for target in targets:
        tables = [
            of.get(target["script"], {"tables": {}})["tables"].get(target["table"], [])
            for of in runs
        ]
        if any(tables):
            (unit,) = LIMITS.keys() & target.keys()
            cells = [
                entry(target, {row["name"]: row for row in rows}) for rows in tables
            ]
            limit = LIMITS[unit][0].format(target[unit])
            lines.append(f"| {' | '.join([target['what'], limit, *cells])} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, help="where `--out` of the benchmarks was"
    )
    print("\n".join(table(parser.parse_args().folders)))
