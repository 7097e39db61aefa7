"""A Markdown table of targets (targets.toml) beside the measurements in the JSON files of full runs.

    python benchmarks/targets.py out/benchmarks
    python benchmarks/targets.py out/benchmarks out/benchmarks-2

One column for each folder, with the middle half of the rounds in brackets. Smaller runs have few of the tables.
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
    "times": ("{:g} times at most", "{:.2f}"),
    "faster": ("{:g} times faster", "{:.1f}"),
    "peak": ("1 / {:g} of its peak", "1 / {:.0f}"),
    "extra": ("{:g} bytes a weight at most", "{:.2f}"),
    "milliseconds": ("{:g} ms at most", "{:.0f}"),
    "percent": ("{:g}% of the weights at most", "{:.2f}%"),
    "collectives": ("{:g} collectives at most", "{:.0f}"),
}


def measured(target: dict[str, Any], rows: Named) -> tuple[list[float], bool] | None:
    """The value, with its quartiles where rounds have one each, and whether it is within the limit."""
    row, other = rows.get(target["of"]), rows.get(target.get("to", target["of"]))
    if row is None or other is None:
        return None
    if "times" in target:
        values = list(middle(row["rounds"], other["rounds"]))
        return values, values[0] <= target["times"]
    if "faster" in target:
        values = list(middle(other["rounds"], row["rounds"]))
        return values, values[0] >= target["faster"]
    if "milliseconds" in target:
        return [1e3 * row["seconds"]], 1e3 * row["seconds"] <= target["milliseconds"]
    for unit in ("percent", "collectives"):
        if unit in target:
            return [row[unit]], row[unit] <= target[unit]
    if row["peak_mib"] is None or other["peak_mib"] is None:
        return None
    if "peak" in target:
        share = other["peak_mib"] / row["peak_mib"]
        return [share], share >= target["peak"]
    return [row["extra"]], row["extra"] <= target["extra"]


def entry(target: dict[str, Any], rows: Named) -> str:
    """The text of a cell of the table."""
    found = measured(target, rows)
    if found is None:
        return "not measured"
    (unit,) = LIMITS.keys() & target.keys()
    value, *spread = (LIMITS[unit][1].format(number) for number in found[0])
    between = f" ({spread[0]} to {spread[1]})" if spread else ""
    return f"{value}{between}, {'yes' if found[1] else '**no**'}"


def table(folders: Sequence[Path]) -> list[str]:
    """The lines of the table; targets that no run here measured are left out."""
    targets = tomllib.loads(Path(__file__).with_name("targets.toml").read_text(encoding="utf-8"))["target"]
    runs = [{file.stem: json.loads(file.read_text(encoding="utf-8")) for file in at.glob("*.json")} for at in folders]
    threads = [max((run["machine"]["threads"] for run in of.values()), default=0) for of in runs]
    heads = [f"{number} thread{'s' * (number != 1)}" for number in threads]
    lines = [f"| what | target | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for target in targets:
        tables = [of.get(target["script"], {"tables": {}})["tables"].get(target["table"], []) for of in runs]
        if any(tables):
            (unit,) = LIMITS.keys() & target.keys()
            cells = [entry(target, {row["name"]: row for row in rows}) for rows in tables]
            lines.append(f"| {' | '.join([target['what'], LIMITS[unit][0].format(target[unit]), *cells])} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="where `--out` of the benchmarks was")
    print("\n".join(table(parser.parse_args().folders)))
