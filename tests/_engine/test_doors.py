"""The engine has eight rooms with one door each: nothing else of it is imported outside
of a room.
"""

import ast
from pathlib import Path

import sparsefn

PACKAGE = Path(sparsefn.__file__).parent
# From the lowest: a room may use those before it.
ROOMS = (
    "surroundings",
    "numbers",
    "processes",
    "leaves",
    "checks",
    "draws",
    "sums",
    "selection",
)


def past_doors(name: str, source: str) -> list[str]:
    """The imports of a module that go into a room of the engine by another way than its
    door.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        targets = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
        targets += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for target in targets:
            head, _, inner = target.partition("sparsefn._engine.")
            room = inner.split(".")[0]
            if not head and "." in inner and not name.startswith(f"engine/{room}/"):
                found.append(target)
    return found


def through_doors(source: str) -> list[tuple[str, str]]:
    """(room, name) of all that a module imports from rooms of the engine."""
    nodes = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
    ]
    inside = [
        node for node in nodes if (node.module or "").startswith("sparsefn._engine.")
    ]
    return [
        ((node.module or "").split(".")[2], alias.name)
        for node in inside
        for alias in node.names
    ]


def test_the_rooms_are_these() -> None:
    assert {
        file.name
        for file in (PACKAGE / "engine").iterdir()
        if file.is_dir() and file.name[0] != "_"
    } == {*ROOMS}
    assert [file.name for file in (PACKAGE / "engine").glob("*.py")] == ["__init__.py"]


def test_a_room_is_entered_by_its_door() -> None:
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if ways := past_doors(name, file.read_text("utf-8")):
            found[name] = ways
    assert found == {}


def test_rooms_use_those_before_them() -> None:
    found = []
    for file in sorted((PACKAGE / "engine").rglob("*.py")):
        room = file.parent.name
        others = (
            {other for other, _ in through_doors(file.read_text("utf-8"))}
            if room in ROOMS
            else set()
        )
        found += [
            f"{room}/{file.name} uses {other}"
            for other in others
            if ROOMS.index(other) > ROOMS.index(room)
        ]
    assert found == []


def test_a_door_hands_on_what_is_used_outside() -> None:
    used: set[tuple[str, str]] = set()
    for file in PACKAGE.rglob("*.py"):
        pairs = through_doors(file.read_text("utf-8"))
        used |= {
            (room, name)
            for room, name in pairs
            if not file.is_relative_to(PACKAGE / "engine" / room)
        }
    doors = {
        room: (PACKAGE / "engine" / room / "__init__.py").read_text("utf-8")
        for room in ROOMS
    }
    assert {
        (room, name)
        for room, source in doors.items()
        for _, name in through_doors(source)
    } == used


def test_the_rule_sees_every_way_past() -> None:
    assert past_doors("select.py", "from sparsefn._engine.selection.rows import x") == [
        "sparsefn._engine.selection.rows"
    ]
    assert past_doors("select.py", "import sparsefn._engine.sums.folds") == [
        "sparsefn._engine.sums.folds"
    ]
    assert (
        past_doors(
            "engine/sums/pooling.py", "from sparsefn._engine.sums.folds import x"
        )
        == []
    )
    assert (
        past_doors("select.py", "from sparsefn._engine.selection import winners") == []
    )
