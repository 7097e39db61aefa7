"""Nothing outside the folder of selection selects by itself.
(`tests/_engine/test_packages.py`: how it is entered.)
"""

import ast
from pathlib import Path

import pytest

import sparsefn

PACKAGE = Path(sparsefn.__file__).parent
SELECTION = PACKAGE / "_engine" / "selection"
FILES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = [file for file in FILES if SELECTION not in file.parents]

ORDERS = {
    "sort",
    "argsort",
    "msort",
    "lexsort",
    "topk",
    "kthvalue",
    "partition",
    "argpartition",
    "searchsorted",
}
# Orders that select no units: of steps in a trigger, of draws that shuffle, of pairs in
# a tournament, of scores that other scores and counts are made of.
OTHER_ORDERS = {
    *(
        ("core/triggers.py", "sort"),
        ("core/random.py", "sort"),
        ("_engine/numbers/ranks.py", "sort"),
    ),
    *(("masks/constructors.py", "argsort"), ("masks/permutation.py", "sort")),
    # Of counts, units, channels, texts and drawn indices.
    *(("masks/budgets/filling.py", way) for way in ("argsort", "searchsorted", "sort")),
    ("masks/budgets/count_steps.py", "sort"),
    *(
        (f"{name}.py", "argsort")
        for name in ("masks/patterns/places", "shrinking/channels", "shrinking/groups")
    ),
    *(
        (f"shrinking/{name}.py", "partition")
        for name in ("depth", "groups", "products", "removal")
    ),
    *(("shrinking/plan.py", "sort"), ("shrinking/probe.py", "sort")),
    ("core/tree/originals.py", "partition"),  # of a path
    ("testing/coverage.py", "sort"),  # to find ties
    ("shrinking/experts.py", "topk"),  # that of a model, which is recognised
}


def ways_past(source: str) -> list[str]:
    """Operations of torch or numpy that put scores in order."""
    nodes = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    ]
    return [
        node.attr
        for node in nodes
        if node.attr in ORDERS and not _of_a_list_or_str(node)
    ]


def _of_a_list_or_str(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("pairs", "target")


def test_nothing_goes_past_the_door():
    found = [
        (file.relative_to(PACKAGE).as_posix(), way)
        for file in OUTSIDE
        for way in ways_past(file.read_text("utf-8"))
    ]
    assert [pair for pair in found if pair not in OTHER_ORDERS] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from sparsefn._engine.selection import winners", []),
        ("scores.topk(3)", ["topk"]),
        ("torch.kthvalue(x, 3) + np.argpartition(x, 3)", ["kthvalue", "argpartition"]),
    ],
)
def test_the_rule_sees_every_way_past(source, found):
    assert ways_past(source) == found
