"""Checks of numbers: ints, floats, sparsities, and that one module tells them apart."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import sparsefn as sf
from sparsefn.core.checks.checks import (
    as_int,
    check_int,
    is_int,
    is_number,
    positive_pair,
)


@pytest.mark.parametrize(
    "make",
    [sf.static, sf.gmp, sf.rigl, sf.one_shot, sf.ste, sf.supermask, sf.methods.snip],
)
def test_a_dict_in_the_place_of_a_sparsity_names_what_takes_one(make):
    for table, hint in (
        (
            {"w": 0.5},
            "; for one by path write distribution=sf.budgets.by_path({'w': 0.5}) "
            "beside the sparsity of the ",
        ),
        (
            {0: 0.5, 9: 0.9},
            "; for one by step write sf.schedules.piecewise({0: 0.5, 9: 0.9})",
        ),
        (
            {},
            "; for one by path write distribution=sf.budgets.by_path({}) beside the "
            "sparsity of the other leaves",
        ),
    ):
        with pytest.raises(
            TypeError,
            match=re.escape(
                f"expected sparsity to be a float in [0, 1], got {table}{hint}"
            ),
        ):
            make(table)


def test_a_dict_elsewhere_has_no_such_hint():
    for make, name in (
        (lambda d: sf.rigl(0.5, drop_fraction=d), "drop_fraction"),
        (sf.iterative, "fraction"),
    ):
        with pytest.raises(
            TypeError,
            match=rf"expected {name} to be a float in \[0, 1\], got {{'w': 0.5}}$",
        ):
            make({"w": 0.5})
    message = (
        "expected distribution to be one such as sf.budgets.erk(), got {'w': 0.5}; "
        "write sf.budgets.by_path(...)"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        sf.rigl(0.5, distribution={"w": 0.5})


def test_a_bool_is_neither_an_int_nor_a_number():
    values = (1, 1.0, True, "1", None, torch.tensor(1))
    assert [is_int(value) for value in values] == [
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    assert [is_number(value) for value in values] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_an_int_is_checked_with_and_without_a_call_and_a_least_value():
    check_int("", "n", -5)
    with pytest.raises(TypeError, match="^expected n to be an int, got bool$"):
        check_int("", "n", True)
    with pytest.raises(ValueError, match="^split: expected n >= 1, got 0$"):
        check_int("split", "n", 0, 1)


def test_a_pair_has_two_numbers_above_0():
    assert positive_pair("scale", [1, 0.5]) == (1.0, 0.5)
    first, _ = positive_pair("scale", (torch.tensor(-1.0), 2.0))
    assert first == -1.0  # the sign of a tensor is not looked at
    text = "expected scale to be two numbers, at the first step and at the last, got "
    for wrong, got in ((3, "3; write (3, 3)"), (None, "None"), ((1,), "(1,)")):
        with pytest.raises(TypeError, match=f"^{re.escape(text + got)}$"):
            positive_pair("scale", wrong)
    with pytest.raises(ValueError, match="^expected the last scale > 0, got 0.0$"):
        positive_pair("scale", (1.0, 0.0))


NUMBERS = {"int", "float", "Integral", "Real"}
ELSEWHERE = {
    "core/rounding.py": ("what a schedule gives, and that may be a number of NumPy's"),
    "_engine/selection/narrow_rows.py": "an int, or a count for each group",
    "masks/budgets/distributions.py": (
        "a float, whose counts may be kept: they are looked up by it"
    ),
    **dict.fromkeys(
        (
            f"shrinking/{name}.py"
            for name in (
                "analysis",
                "attributes",
                "plan",
                "rebuild",
                "removal",
                "rewrites",
                "small_layers",
            )
        ),
        "the arguments of a traced operation, and the attributes of a module",
    ),
    **dict.fromkeys(
        ("shrinking/depth.py", "shrinking/depth_scores.py"),
        "an argument, where only public names of other rooms are imported",
    ),
    "posttraining/calibration/folders/model_configs.py": "the values of a config.json",
    "core/checks/factories.py": "a number of any type, to be written as code",
    "nn/modules/weights.py": "an attribute of a module of transformers",
    "testing/written.py": "a value of any type, to be written as code",
    "config/shorthand.py": "a sparsity that was checked, and is a float or a tensor",
}


def named(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def number_checks(source: str) -> list[int]:
    """Lines with `isinstance(x, bool)`, with `type(x) is int` and the like, or with a
    `not isinstance(x, int)`.
    """
    tree = ast.parse(source)
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
    ]
    found = [node.lineno for node in tests if "bool" in named(node.args[1])]
    for node in ast.walk(tree):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inside = [test for test in ast.walk(node) if test in tests]
            found += [test.lineno for test in inside if named(test.args[1]) & NUMBERS]
        elif isinstance(node, ast.Compare) and any(
            isinstance(op, ast.Is | ast.IsNot) for op in node.ops
        ):
            found += (
                [node.lineno] if named(node.comparators[0]) & {"bool", *NUMBERS} else []
            )
    return sorted(set(found))


def test_numbers_are_told_from_other_arguments_in_one_module():
    root = Path(str(sf.__file__)).parent
    sources = {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8")
        for file in root.rglob("*.py")
    }
    assert {name for name, source in sources.items() if number_checks(source)} - {
        *ELSEWHERE
    } == {"core/checks/checks.py"}


def test_the_search_for_number_checks_finds_every_form():
    lines = [
        "isinstance(x, bool)",
        "isinstance(x, (bool, str))",
        "isinstance(x, bool | str)",
        "type(x) is not int",
        "not isinstance(x, int | Tensor)",
        "not all(isinstance(x, float) for x in xs)",
    ]
    other = [
        "isinstance(x, int)",
        "not isinstance(x, Tensor)",
        "x is None",
        "x.dtype == torch.bool",
    ]
    assert number_checks("\n".join(lines + other)) == [1, 2, 3, 4, 5, 6]


def test_integers_of_every_kind_become_ints():
    assert type(as_int("f", "n", np.int32(3))) is int
    for wrong in (True, np.bool_(True), 3.0, torch.tensor(3), "3"):
        with pytest.raises(TypeError, match="f: expected n to be an int, got"):
            as_int("f", "n", wrong)
