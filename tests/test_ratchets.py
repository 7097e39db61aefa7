"""Numbers that may only fall. When one has, write the new one here: then it stays."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sparsefn"

# Files, moves and calls from file to file of four walks (benchmarks/walks.py).
WALKS = {
    "change": {"files": 48, "moves": 474, "calls": 237},
    "quiet": {"files": 24, "moves": 206, "calls": 103},
    "attached change": {"files": 49, "moves": 472, "calls": 237},
    "sharded change": {"files": 54, "moves": 798, "calls": 399},
}
# Lines of code, without blanks, comments and docstrings.
LINES = {
    "engine": 4234,
    "algorithms": 1707,
    "compose": 772,
    "attached": 880,
    "methods": 736,
    "front": 2153,  # the modules beside the packages
    "all": 17989,
}
# Lines that name a concern of the machine.
MACHINE = {"algorithms": 79, "methods": 2, "scores": 15, "compose": 55}
HOMONYMS = 79  # public names of functions and classes that two modules or more define

WORDS = re.compile(
    "agreed|any_sharded|by_leaf|check_bare|check_plain|check_shards|donation|from_bytes|from_seats|fused|is_compiling|"
    "is_sharded|laid_out|lends|lie|lie_of|localized|many|of_leaves|offer|reading_bytes|saves|seat|seated|spends|spent|"
    "to_seats|together|unchecked"
)


def docstrings(source: str) -> set[int]:
    """The numbers of the lines of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            text = node.body[0]
            found |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """What is code: no comments, docstrings or ends of lines."""
    prose = docstrings(source)
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty and token.start[0] not in prose:
            yield token


def lines_of_code(source: str) -> int:
    """How many lines hold code."""
    return len({n for token in tokens(source) for n in range(token.start[0], token.end[0] + 1)})


def machine_lines(source: str) -> int:
    """How many lines name a concern of the machine."""
    return len({token.start[0] for token in tokens(source) if WORDS.fullmatch(token.string)})


def defined(source: str) -> set[str]:
    """The functions and classes that a module defines, without private ones."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.parse(source).body if isinstance(node, kinds) and node.name[0] != "_"}


def homonyms(sources: dict[str, str]) -> dict[str, int]:
    """How many modules define each name, of those that several define."""
    counts = Counter(name for source in sources.values() for name in defined(source))
    return {name: n for name, n in counts.items() if n > 1}


SOURCES = {file.relative_to(PACKAGE).as_posix(): file.read_text("utf-8") for file in sorted(PACKAGE.rglob("*.py"))}


def room(name: str) -> str:
    return name.split("/")[0] if "/" in name else "front"


def check(found: dict[str, int], most: dict[str, int]) -> None:
    assert {name: n for name, n in found.items() if n > most[name]} == {}


def test_updates_walk_no_further() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "walks.py"), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found.keys() == WALKS.keys()
    for name, numbers in found.items():
        check(numbers, WALKS[name])


def test_code_does_not_grow() -> None:
    found = Counter({"all": sum(map(lines_of_code, SOURCES.values()))})
    for name, source in SOURCES.items():
        found[room(name)] += lines_of_code(source)
    check({name: found[name] for name in LINES}, LINES)


def test_methods_do_not_speak_of_the_machine() -> None:
    found = Counter({room(name): 0 for name in SOURCES})
    for name, source in SOURCES.items():
        found[room(name)] += machine_lines(source)
    check({name: found[name] for name in MACHINE}, MACHINE)


def test_names_are_not_defined_twice() -> None:
    assert len(homonyms(SOURCES)) <= HOMONYMS


def test_the_rules_find_what_they_look_for() -> None:
    code = "def run(x):\n    'many'\n    return many(\n        x)\n\n\nclass Row:\n    y = 1\n"
    source = f"'Prose.'\n\n# a comment\n{code}"
    assert lines_of_code(source) == 5
    assert machine_lines(source) == 1
    assert defined(source + "def _own(): ...\n") == {"run", "Row"}
    assert homonyms({"a": source, "b": "class Row: ...\n"}) == {"Row": 2}
