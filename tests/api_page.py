"""Every public name on one page: `python tests/api_page.py` writes docs/api.md."""

import operator
import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# Every public name

Every name after `import sparsefn as sf`, and how its docstring begins; \
`help(sf.rigl)` shows the rest.
`python tests/api_page.py` writes this page. Terms are in the [glossary](glossary.md).
"""


def wrapped(line: str) -> str:
    """A list item in lines of at most 120 characters."""
    return (
        textwrap.fill(
            line,
            120,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def clause(line: str) -> str:
    """The first clause of five words or more, or all where a label stands first, as in
    `RigL: ...`.
    """
    for end in re.finditer(
        r"[;:] |, "
        r"(?=(?:which|with|for|as|at|by|in|drawn|each|not|scored|made|without)\b)",
        line,
    ):
        first = line[: end.start()]
        if first.count(" ") < 4 and end[0] != ", ":
            return line
        closed = first.count("`") % 2 == 0 and len(re.findall(r"[(\[{]", first)) == len(
            re.findall(r"[)\]}]", first)
        )
        if closed and first.count(" ") >= 4:
            return first + "."
    return line


def page() -> str:
    """The text of docs/api.md, from the docstrings as they are now."""
    from test_public import PUBLIC, words  # loads Hypothesis and the whole library

    import sparsefn as sf

    first = {id(value): name for name, value in PUBLIC.items() if "." not in name}

    explained = (PAGE.parent / "reference" / "state.md").read_text(encoding="utf-8")
    types = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", explained, re.MULTILINE))

    def headline(name: str, value: object) -> str:
        group, _, last = name.rpartition(".")
        if group == "typing":
            return types[last][0].upper() + types[last][1:] + "."
        if first.get(id(value), name) != name:
            return f"`sf.{first[id(value)]}`."
        return (
            words(value).splitlines()[0]
            if callable(value)
            else f"`{type(value).__name__}`."
        )

    groups: dict[str, list[str]] = {}
    for name in sorted(PUBLIC, key=lambda name: (name.count("."), name.lower())):
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    text = HEAD
    for group in sorted(groups):
        module = operator.attrgetter(group)(sf) if group else sf
        whole = [headline(name, PUBLIC[name]) for name in groups[group]]
        short = [clause(line) for line in whole]
        told = [
            one if short.count(one) == 1 else line
            for one, line in zip(short, whole, strict=True)
        ]
        lines = [
            wrapped(f"- `sf.{name}`: {line}")
            for name, line in zip(groups[group], told, strict=True)
        ]
        if group == "methods":
            lines.insert(
                0,
                "Each has a card in the [gallery of methods](methods.md#by-name).\n\n",
            )
        title = f"sf.{group}" if group else "sf"
        text += f"\n## {title}\n\n{words(module).splitlines()[0]}\n\n{''.join(lines)}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
