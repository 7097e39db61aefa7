"""What users see of types: mypy on code of theirs, and no signature that says Any."""

import ast
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from test_public import public

import sparsefn as sf

ROOT = Path(__file__).parents[1]
RIGHT, WRONG = (ROOT / "tests" / "typed" / f"{name}.py" for name in ("right", "wrong"))

# Types of what has no better one: a tree is whatever optree takes for one, and a value
# of torch.fx any constant.
ALIASES = {"sparsefn/core/tree/leaves.py: Tree"}


def expected(file: Path) -> set[tuple[str, int, str]]:
    """(file, line, error code) of every comment `# error: code, code`."""
    found = set()
    for i, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        codes = line.partition("  # error: ")[2]
        found |= {(file.name, i, code) for code in codes.split(", ") if code}
    return found


@pytest.mark.deep
def test_mypy_accepts_right_code_and_finds_every_mistake_of_wrong_code():
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-pretty",
        str(RIGHT),
        str(WRONG),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    pattern = r"^\S*?(\w+\.py):(\d+): error: .*\[([\w-]+)\]$"
    found = {
        (name, int(line), code)
        for name, line, code in re.findall(pattern, done.stdout, re.MULTILINE)
    }
    assert done.stdout and found == expected(WRONG), done.stdout + done.stderr


def test_right_code_runs():
    runpy.run_path(str(RIGHT))


def says_any(value: object) -> bool:
    """Whether Any stands in the signature of a function, or in the fields or methods of
    a class.
    """
    own = [value, *(vars(value).values() if inspect.isclass(value) else ())]
    texts = [
        text
        for part in own
        for text in getattr(inspect.unwrap(part), "__annotations__", {}).values()
    ]
    return any(re.search(r"\bAny\b", str(text)) for text in texts)


def test_no_public_signature_says_any():
    # torch gives the method of `Launches` its signature.
    assert [name for name, value in public(sf) if says_any(value)] == [
        "testing.Launches"
    ]


def test_any_is_found_in_functions_fields_and_methods():
    class Field:
        x: "dict[str, Any]"  # noqa: F821

    class Method:
        def method(self, x: "Any") -> None: ...  # noqa: F821

    def gives() -> "list[Any]": ...  # noqa: F821

    def plain(x: "Anyone") -> None: ...  # noqa: F821

    assert [says_any(value) for value in (Field, Method, gives, plain)] == [
        True,
        True,
        True,
        False,
    ]


def test_no_other_name_stands_for_any():
    found = set()
    for file in (ROOT / "sparsefn").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Name)
                and node.value.id == "Any"
            ):
                found |= {
                    f"{file.relative_to(ROOT).as_posix()}: {ast.unparse(target)}"
                    for target in node.targets
                }
    assert found == ALIASES
