"""docs/coming-from: every public name of the systems people come from has a row, and
every row's expression runs.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pages import split

FOLDER = Path(__file__).parents[1] / "docs" / "coming-from"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem != "index")
HEADER = "| name | in sparsefn | what differs |"

# The names that a page must have a row for: a file for each page, which begins with a
# comment that says which version was read. A member is written `Class.member`; a row
# may leave the class away.
NAMES = {
    file.stem: re.sub("^#.*", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for file in sorted((Path(__file__).parent / "coming_from").glob("*.txt"))
}


class Row(NamedTuple):
    line: int
    names: list[str]
    code: str


def stem(page: Path) -> str:
    return page.stem.replace("_", "-")


def rows(text: str) -> list[Row]:
    """The rows of the one table of a page; ValueError for a row of another form."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            names = [name.split("(")[0] for name in re.findall(r"`([^`]+)`", cells[0])]
            if (
                len(cells) != 3
                or not re.fullmatch(r"`[^`]+`", cells[1])
                or not cells[2]
            ):
                raise ValueError(
                    f"line {number}: expected | `name` | `code` | what differs |, got "
                    f"{line}"
                )
            found.append(Row(number, names, cells[1].strip("`")))
    return found


def same(a: str, b: str) -> bool:
    """Whether two names may mean one thing: the last parts agree, and the classes where
    both say one.
    """
    left, right = a.split("."), b.split(".")
    return left[-1] == right[-1] and (
        len(left) == 1 or len(right) == 1 or left[-2] == right[-2]
    )


def missing(names: str, table: list[Row]) -> list[str]:
    """The names without a row."""
    shown = [name for row in table for name in row.names]
    return [
        name for name in names.split() if not any(same(name, other) for other in shown)
    ]


def namespace(text: str, filename: str) -> dict[str, Any]:
    """The names that the Python blocks of a page define."""
    found: dict[str, Any] = {"__name__": "__main__"}
    for block in split(text)[1]:
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.code, filename, "exec"), found)
    return found


def test_every_name_has_a_row() -> None:
    assert list(NAMES) == sorted(stem(page) for page in PAGES) and all(
        names.split() for names in NAMES.values()
    )
    gone = {
        stem(page): missing(NAMES[stem(page)], rows(page.read_text(encoding="utf-8")))
        for page in PAGES
    }
    assert {page: names for page, names in gone.items() if names} == {}


def unread(text: str) -> list[str]:
    """What is wrong with the table of a page: there is another, or none, or lines that
    are no rows.
    """
    lines = text.splitlines()
    if lines.count(HEADER) != 1:
        return [f"{lines.count(HEADER)} tables"]
    start = lines.index(HEADER)
    wrong = (
        [] if re.fullmatch(r"\|( ?-+ ?\|){3}", lines[start + 1]) else [lines[start + 1]]
    )
    others = [
        line
        for i, line in enumerate(lines)
        if line.startswith("|") and i not in (start, start + 1)
    ]
    return wrong + [line for line in others if not line.startswith("| `")]


def test_a_page_has_one_table_and_all_of_it_is_read() -> None:
    wrong = {stem(page): unread(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: lines for page, lines in wrong.items() if lines} == {}


@pytest.mark.deep
@pytest.mark.parametrize("page", PAGES, ids=stem)
def test_the_code_of_every_row_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names = namespace(text, str(page))
    for row in rows(text):
        # Each row has the page's names to itself; blank lines make a traceback show the
        # page's own line.
        exec(compile("\n" * (row.line - 1) + row.code, str(page), "exec"), dict(names))


# The tests below check the checker.

TABLE = """
```python
import math
x = 4
```

| name | in sparsefn | what differs |
| --- | --- | --- |
| `A` | `math.sqrt(x)` | nothing |
| `B.c(n)`, `d` | `y = x; y + 1` | `a` count |
"""


def test_rows_are_read() -> None:
    assert rows(TABLE) == [
        Row(9, ["A"], "math.sqrt(x)"),
        Row(10, ["B.c", "d"], "y = x; y + 1"),
    ]
    assert namespace(TABLE, "page.md")["x"] == 4


def test_what_is_no_row_is_found() -> None:
    assert (unread(TABLE), unread(TABLE + TABLE)) == ([], ["2 tables"])
    assert unread(f"{HEADER}\n| : |\n| x | `y` | z |") == ["| : |", "| x | `y` | z |"]


def test_a_name_without_a_row_is_found() -> None:
    assert missing("A B.c c E.d E C.c", rows(TABLE)) == ["E", "C.c"]


@pytest.mark.parametrize(
    "line",
    ["| `a` | b | c |", "| `a` | `b` |", "| `a` | `b` | |", "| `a` | `b` or `c` | d |"],
)
def test_a_row_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(
        ValueError,
        match=re.escape("line 2: expected | `name` | `code` | what differs |, got"),
    ):
        rows("\n" + line)
