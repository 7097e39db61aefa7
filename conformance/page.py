"""docs/conformance.md, made of results.json."""

from pathlib import Path
from typing import Any

import laws

HERE = Path(__file__).parent
SHORT = {
    "yes": "yes",
    "no": "**no**",
    "documented otherwise": "documented",
    "in place by design": "in place",
    "not applicable": "n/a",
    "could not run": "not run",
}

HEAD = """# Conformance

What {count} systems for pruning keep of the laws that can be put without an API in \
common. `make conformance` runs them
and writes this page; {where} says how. Terms are in the [glossary](glossary.md).

Each system prunes two linear layers by magnitude, through an adapter of less than 60 \
lines, on a CPU, in the versions
of the second table. A law is put as follows:

{laws}

A cell is one of these:

- **yes**: the law held in every case that was run
- **no**: it did not; a [reproduction](#reproductions) is below, and has been run
- **documented**: it does not hold, and [the system's own text](#documented-otherwise) \
says otherwise
- **in place**: the function is there to change the module that it is given
- **n/a**: the system has no such part, or one call is all that there is
- **not run**: [said below](#not-run)

{table}

`ties` says which of equal weights are kept: "first" are the weights of the lowest \
index. `nan` says whether NaN is pruned
first or refused.

## Versions

{versions}
"""

STRUCTURED = """
## Structured pruning

Half of the units of each group go by magnitude, in random weights. *Runs*: the \
smaller model computes its output.
*Equal*: that output is the one of the model with the removed units masked, as the \
system itself names them; n/a
where it does not run, and "not run" where
[the script](../conformance/structured.py) cannot mask a layer. Torch-Pruning makes no \
such
promise: its layer norms average over the channels that are left. It is called with \
its defaults, without the numbers of
heads that it can be given. *Removed* is the share of parameters.
{versions}, {date}.

{table}
"""


LEGACY = """
## Files that other libraries no longer read

A small LLaMA is written by compressed-tensors in the two formats that it has given \
up since, and read by it and by
`sf.checkpoint.read_legacy` ([the script](../conformance/legacy.py)). *Masks*: how \
many weights have one. *Equal*: every
tensor has the bits that the library itself reads, and that the model had.
{versions}, {date}.

{table}
"""


SIDES = ("sparsefn", "Torch-Pruning")
TABLES = {
    "structured": (
        STRUCTURED,
        [
            "model",
            *(f"{x}, {who}" for who in SIDES for x in ("runs", "equal", "removed")),
        ],
    ),
    "legacy": (LEGACY, ["format", "dtype", "masks", "equal"]),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]
    )


def shown(cell: dict[str, str], law: str) -> str:
    """A cell of the first table."""
    text = SHORT[cell["status"]]
    remark = {
        "lowest index": "first",
        "another order": "others",
        "refused": "refused",
    }.get(cell["remark"])
    return f"{text}, {remark}" if cell["status"] == "yes" and remark else text


def listed(versions: dict[str, str]) -> str:
    """Names and numbers."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def law_line(name: str) -> str:
    """A law with its sentence."""
    sentence = " ".join((laws.LAWS[name].__doc__ or "").split()).rstrip(".")
    return (
        f"- `{name}`: "
        f"{sentence if sentence[:3] == 'NaN' else sentence[0].lower() + sentence[1:]}"
    )


def reproductions(results: dict[str, Any], systems: dict[str, Any]) -> list[str]:
    """Every cell `no`, by system, with its code."""
    lines = [
        "## Reproductions",
        "",
        "Each ends with an error, whose last line stands below it.",
    ]
    for name, row in results["systems"].items():
        broken = {
            law: cell for law, cell in row["cells"].items() if cell["status"] == "no"
        }
        if broken:
            lines += ["", f"### {systems[name]['title']}"]
        for law, cell in broken.items():
            code = (
                (HERE / "reproductions" / f"{name}_{law}.py")
                .read_text(encoding="utf-8")
                .strip()
            )
            lines += ["", f"`{law}`: {cell['remark'].replace('|', chr(92) + '|')}", ""]
            lines += [
                "<!-- no-run: it ends with an error, in an environment of its own -->",
                "",
            ]
            lines += ["```python", code, "```", "", "```", cell["shown"], "```"]
    return lines


def text(results: dict[str, Any], systems: dict[str, Any]) -> str:
    """The whole page."""
    found = {
        name: results["systems"][name] for name in systems if name in results["systems"]
    }
    title = {
        name: f"[{systems[name]['title']}]({systems[name]['link']})" for name in found
    }
    rows = [
        [title[name], *(shown(row["cells"][law], law) for law in laws.LAWS)]
        for name, row in found.items()
    ]
    versions = [
        [
            systems[name]["title"],
            systems[name]["pruned"],
            listed(row["versions"]),
            row["date"],
        ]
        for name, row in found.items()
    ]
    out = HEAD.format(
        count=len(found),
        where="[conformance/run.py](../conformance/run.py)",
        laws="\n".join(map(law_line, laws.LAWS)),
        table=table(["", *laws.LAWS], rows),
        versions=table(["system", "what prunes", "versions", "run on"], versions),
    )
    for name, (section, head) in TABLES.items():
        if done := results[name]:
            out += section.format(
                table=table(head, done["rows"]),
                versions=listed(done["versions"]),
                date=done["date"],
            )
    lines = ["## Documented otherwise", ""]
    for name in found:
        for law, said in systems[name].get("documented", {}).items():
            lines.append(
                f"- {systems[name]['title']}, `{law}`: {said['says']} "
                f"([source]({said['link']}))"
            )
    lines += ["", "## Not run", ""]
    for name in found:
        lines += (
            [f"- {systems[name]['title']}: {systems[name]['note']}"]
            if "note" in systems[name]
            else []
        )
        for law, cell in found[name]["cells"].items():
            if cell["status"] == "could not run":
                lines.append(f"- {systems[name]['title']}, `{law}`: {cell['remark']}")
    return (
        out
        + "\n"
        + "\n".join([*lines, "", *reproductions({"systems": found}, systems)])
        + "\n"
    )
