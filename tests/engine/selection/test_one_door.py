"""Nothing outside the folder of selection selects by itself, or goes in by another way than the door."""

import ast
from pathlib import Path

import pytest

import sparsefn

PACKAGE = Path(sparsefn.__file__).parent
HOUSE = PACKAGE / "engine" / "selection"
OUTSIDE = [file for file in sorted(PACKAGE.rglob("*.py")) if HOUSE not in file.parents]

DOOR = "sparsefn.engine.selection.winners"
ORDERS = {"sort", "argsort", "msort", "lexsort", "topk", "kthvalue", "partition", "argpartition", "searchsorted"}
# Orders that select no units: of steps in a trigger, of shares that fill up, of draws that shuffle, of pairs in a
# tournament, of scores that other scores and counts are made of.
OTHER_ORDERS = {
    *(("triggers.py", "sort"), ("engine/apportion.py", "argsort"), ("random.py", "sort")),
    *(("engine/ranks.py", "sort"), ("masks/making.py", "sort"), ("permutation.py", "sort")),
}


def ways_past(source: str) -> list[str]:
    """Imports of the folder other than of the door, and operations of torch or numpy that put scores in order."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparsefn.engine"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inside = [name for name in names if name.startswith("sparsefn.engine.selection")]
            found += [name for name in inside if node.module != DOOR and name != DOOR]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if "engine.selection" in alias.name and alias.name != DOOR]
        elif isinstance(node, ast.Attribute) and node.attr in ORDERS and not _of_a_list_or_str(node):
            found.append(node.attr)
    return found


def _of_a_list_or_str(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("pairs", "target")


def test_nothing_goes_past_the_door():
    found = [
        (file.relative_to(PACKAGE).as_posix(), way) for file in OUTSIDE for way in ways_past(file.read_text("utf-8"))
    ]
    assert [pair for pair in found if pair not in OTHER_ORDERS] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from sparsefn.engine.selection import groups", ["sparsefn.engine.selection.groups"]),
        ("from sparsefn.engine.selection.rows import x", ["sparsefn.engine.selection.rows.x"]),
        ("import sparsefn.engine.selection.bracket", ["sparsefn.engine.selection.bracket"]),
        ("from sparsefn.engine.selection import winners\nfrom sparsefn.engine.selection.winners import Entry", []),
        ("scores.topk(3)", ["topk"]),
        ("torch.kthvalue(x, 3) + np.argpartition(x, 3)", ["kthvalue", "argpartition"]),
    ],
)
def test_the_rule_sees_every_way_past(source, found):
    assert ways_past(source) == found
