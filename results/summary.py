"""From rows to what the page and the figures show: differences by seed, their
intervals, and what became of a claim.

The rule, for every row: the number is the median of the differences by seed. Its
interval is between order statistics, the closest two with at least 95 % coverage for
every distribution; of ten seeds they are the second least and the second greatest
difference (97.9 %), so that one bad run cannot decide a row. A claim holds where the
interval is on the published side: at least nine of ten seeds agree. It does not hold
where the interval is on the other side. Else it is open. "The same or better" leaves a
margin on the worse side, as no number of runs shows that two methods are equal.
"""

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from results import collapse, runner, tuning
from results.claims import CLAIMS, Claim, Side
from results.jobs import Key, Plan, Row

PUBLISHED: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("published.toml").read_text("utf-8")
)
FAILS, OPEN, HOLDS, CONTROL = "does not hold", "open", "holds", ""
# points of test accuracy: a claim of "the same or better" may be worse by as much
MARGIN = 0.5


def interval(values: Sequence[float]) -> dict[str, Any]:
    """The median, its interval of order statistics (None for fewer than six values),
    the mean, and the number.
    """
    values = list(map(float, values))
    found = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    low, high = (
        None if math.isnan(end) else round(float(end), 4)
        for end in (found.low, found.high)
    )
    middle, mean = statistics.median(values), statistics.fmean(values)
    return {
        "median": round(middle, 4),
        "low": low,
        "high": high,
        "mean": round(mean, 4),
        "n": len(values),
    }


def verdict(says: str, low: float | None, high: float | None) -> str:
    """What an interval says of a claim about the sign."""
    if not says:
        return CONTROL
    if low is None or high is None:
        return OPEN
    if says.startswith("<"):
        low, high = -high, -low
    bound = -MARGIN if says.endswith("=") else 0.0
    if low > bound:
        return HOLDS
    return FAILS if high < bound else OPEN


def gain(number: Mapping[str, Any]) -> float:
    """How much better the first of two published numbers is: in points, or in bits per
    token.
    """
    if number.get("perplexity"):
        return round(math.log2(number["b"] / number["a"]), 4)
    return round(number["a"] - number["b"], 4)


def reach(rows: Mapping[Key, Row], method: str, seed: int) -> float | None:
    """Powers of ten of the largest compression that leaves a path, of all that are
    smaller too.
    """
    found = 0.0
    for ratio in collapse.RATIOS:
        row = rows.get(("collapse", method, str(ratio), seed))
        if row is None:
            return None
        if not row["connected"]:
            break
        found = math.log10(ratio)
    return found


def value(rows: Mapping[Key, Row], side: Side, seed: int) -> float | None:
    """Less is better: the error in per cent, bits per character, or minus what `reach`
    says.
    """
    group, arm, level = side
    if level == "reach":
        far = reach(rows, arm, seed)
        return None if far is None else -far
    row = rows.get((group, arm, level, seed))
    return None if row is None else row.get("bits", row.get("error"))


def differences(rows: Mapping[Key, Row], claim: Claim, seeds: int) -> list[float]:
    """By seed, over those that have all sides."""
    found = []
    for seed in range(seeds):
        gains = [value(rows, side, seed) for side in claim.better]
        losses = [value(rows, side, seed) for side in claim.worse]
        if None not in gains and None not in losses:
            found.append(sum(losses) - sum(gains))  # type: ignore[arg-type]
    return found


def of_claim(rows: Mapping[Key, Row], claim: Claim, seeds: int) -> Row | None:
    """A row of the page; None before the first seed."""
    found = differences(rows, claim, seeds)
    if not found:
        return None
    ours = interval(found)
    number = PUBLISHED[claim.number] if claim.number else None
    return {
        "section": claim.section,
        "text": claim.text,
        "words": claim.words,
        "case": claim.case,
        "says": claim.says,
        "verdict": verdict(claim.says, ours["low"], ours["high"]),
        **ours,
        "better": sum(d > 0 for d in found),
        "equal": sum(d == 0 for d in found),
        "published": None if number is None else gain(number),
        "network": None if number is None else number["network"],
        "source": claim.source if number is None else number["source"],
        "where": None if number is None else number["where"],
    }


def arms(rows: Mapping[Key, Row], group: str, what: str) -> list[Row]:
    """The median of every arm and level of a group, with its interval."""
    found: dict[tuple[str, str], list[float]] = {}
    for (named, arm, level, _), row in sorted(rows.items(), key=lambda item: item[0]):
        if named == group and what in row:
            found.setdefault((arm, level), []).append(row[what])
    return [
        {"arm": arm, "level": level, **interval(values)}
        for (arm, level), values in found.items()
    ]


def lost(rows: Mapping[Key, Row]) -> list[Row]:
    """Bits of learned and other masks minus the dense model's, by seed: the mean, its
    standard error (None for one seed), and in how many seeds all counts are exact.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    for (group, arm, level, seed), row in sorted(rows.items(), key=lambda r: r[0]):
        dense = rows.get(("learned", "dense", "0", seed))
        if group == "learned" and arm != "dense" and dense is not None:
            more = {"more": row["bits"] - dense["bits"], "exact": row["exact"]}
            found.setdefault((arm, level), []).append(more)
    made = []
    for (arm, level), each in found.items():
        more = [row["more"] for row in each]
        made.append(
            {
                "arm": arm,
                "level": level,
                "mean": round(statistics.fmean(more), 4),
                "error": round(statistics.stdev(more) / math.sqrt(len(more)), 4)
                if len(more) > 1
                else None,
                "n": len(more),
                "exact": sum(row["exact"] for row in each),
            }
        )
    return made


def zeros_kept(rows: Mapping[Key, Row]) -> list[Row]:
    """In how many seeds a model of "recovery" has as many zeros as the pruned one."""
    found: dict[str, list[bool]] = {}
    for (group, arm, level, seed), row in sorted(rows.items(), key=lambda r: r[0]):
        model, _ = arm.split(", ") if group == "recovery" else ("", "")
        pruned = rows.get((group, f"{model}, pruned", level, seed))
        if pruned is not None:
            found.setdefault(arm, []).append(row["zeros"] == pruned["zeros"])
    return [
        {"arm": arm, "kept": sum(kept), "n": len(kept)} for arm, kept in found.items()
    ]


def diverged(rows: Mapping[Key, Row]) -> list[Row]:
    """The arms with runs that ended with the loss of a guess, as where all units of a
    layer are dead.
    """
    found: dict[tuple[str, str, str], list[bool]] = {}
    for (group, arm, level, _), row in sorted(rows.items(), key=lambda item: item[0]):
        if "loss" in row:
            found.setdefault((group, arm, level), []).append(
                not row["loss"] < 0.99 * math.log(10)
            )
    return [
        {"group": group, "arm": arm, "level": level, "runs": sum(ends), "n": len(ends)}
        for (group, arm, level), ends in found.items()
        if any(ends)
    ]


def summarised(rows: Mapping[Key, Row], plan: Plan) -> dict[str, Any]:
    """All that the page and the figures show."""
    jobs = {"tuning": tuning.jobs(plan, rows)} | {
        name: group.jobs(plan) for name, group in runner.GROUPS.items()
    }
    claims = [of_claim(rows, claim, plan.seeds) for claim in CLAIMS]
    return {
        "seeds": plan.seeds,
        "steps": {
            "lenet": plan.steps,
            "small": plan.steps,
            "conv": plan.conv_steps,
            "text": plan.text_steps,
        },
        "runs": {
            name: {
                "jobs": len(each),
                "done": sum(job.makes() <= rows.keys() for job in each),
                "cpu": round(
                    sum(row["cpu"] for key, row in rows.items() if key[0] == name)
                ),
            }
            for name, each in jobs.items()
        },
        "rates": tuning.known(rows, plan),
        "tasks": {
            name: [task.levels, tuning.tried(task, rows)]
            for name, task in tuning.tasks(plan).items()
        },
        "claims": [claim for claim in claims if claim],
        "missing": [
            claim.text
            for claim, found in zip(CLAIMS, claims, strict=True)
            if found is None
        ],
        "errors": {
            group: arms(rows, group, "error") for group in ("lenet", "small", "conv")
        },
        "diverged": diverged(rows),
        "bits": arms(rows, "text", "bits"),
        "learned": lost(rows),
        "recovered": {
            what: arms(rows, "recovery", what) for what in ("bits", "error", "loss")
        },
        "zeros": zeros_kept(rows),
        "python": sorted({row["python"] for row in rows.values() if "python" in row}),
        "explored": arms(rows, "small", "explored"),
        "alone": arms(rows, "small", "member"),
        "flops": arms(rows, "conv", "flops"),
        "seconds": arms(rows, "conv", "seconds"),
        "ms": [
            *arms(rows, "conv", "ms"),
            *({**r, "arm": "born narrow"} for r in arms(rows, "conv", "narrow_ms")),
        ],
        "connected": arms(rows, "collapse", "connected"),
    }
