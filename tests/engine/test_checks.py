"""Functions that are not what was asked for, and keywords that do not exist."""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch

import sparsefn as sf
from sparsefn.engine.checks import check_call, check_int, check_keywords, is_int, is_number

WRONG = {
    # An uncalled factory, or a part in the place of another, says what it should have been.
    "distribution": (
        lambda: sf.static(0.5, distribution=sf.budgets.erk),
        "expected distribution to be a function of (shapes, sparsity), got erk, one of (power)",
    ),
    "when": (lambda: sf.gmp(0.5, when=sf.always), "expected when to be a function of (step), got always, one of ()"),
    "sparsity": (
        lambda: sf.gmp(sf.scores.magnitude),
        "expected sparsity to be a function of (step), got magnitude, one of (state, grads, step)",
    ),
    "fraction": (
        lambda: sf.iterative(sf.schedules.cosine_decay),
        "expected fraction to be a function of (step), got cosine_decay, one of (init, steps, final)",
    ),
    "score": (
        lambda: sf.one_shot(0.5, sf.scores.momentum),
        "expected score to be a function of (state, grads, step), got momentum, one of (decay)",
    ),
    "drop": (
        lambda: sf.rigl(0.5, drop=sf.always()),
        "expected drop to be a function of (state, grads, step), got always(), one of (step)",
    ),
    "where": (
        lambda: sf.static(0.5, where=lambda path: True).init({"w": torch.ones(2, 2)}),
        "expected where to be a function of (path, leaf), got <lambda>, one of (path)",
    ),
    "init": (
        lambda: sf.static(0.5, init=lambda: None).init({"w": torch.ones(2, 2)}),
        "expected init to be a function of (params), got <lambda>, one of ()",
    ),
    "init of scores": (
        lambda: sf.supermask(0.5, init=lambda: None).init({"w": torch.ones(2, 2)}),
        "expected init to be a function of (params), got <lambda>, one of ()",
    ),
    "link": (
        lambda: sf.supermask(0.5, link=lambda: 0),
        "expected link to be a function of (score), got <lambda>, one of ()",
    ),
    "count": (
        lambda: sf.rigl(0.5, count=lambda n: n),
        "expected count to be a function of (fraction, active), got <lambda>, one of (n)",
    ),
    "count of iterative": (
        lambda: sf.iterative(0.5, count=lambda n: n),
        "expected count to be a function of (fraction, active), got <lambda>, one of (n)",
    ),
    "grown": (
        lambda: sf.rigl(0.5, grown=lambda state: state),
        "expected grown to be a function of (state, grown, step), got <lambda>, one of (state)",
    ),
    "grow_count": (
        lambda: sf.rigl(0.5, grow_count=lambda n: n),
        "expected grow_count to be a function of (scores, free, wanted), got <lambda>, one of (n)",
    ),
    "redistribute": (
        lambda: sf.rigl(0.5, redistribute=lambda n: n),
        "expected redistribute to be a function of (scores, before, after), got <lambda>, one of (n)",
    ),
    "no function": (
        lambda: sf.rigl(0.5, count=3),
        "expected count to be a function of (fraction, active), got 3",
    ),
    "grown values": (
        lambda: sf.rigl(0.5, grown="zeros"),
        "expected grown to be a function of (state, grown, step), got 'zeros'",
    ),
    "a name as a link": (
        lambda: sf.supermask(0.5, link="abs"),
        "expected link to be a function of (score), got 'abs'",
    ),
    "term": (
        lambda: sf.with_terms(sf.dense(), sf.terms.l2),
        "expected the term at position 0 to be a function of (state, step), got l2, one of (",
    ),
    "skip": (
        lambda: sf.with_optimizer(sf.dense(), sf.optimizers.sgd(0.1), skip=sf.never),
        "expected skip to be a function of (step), got never, one of ()",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_function_than_was_meant(name):
    make, message = WRONG[name]
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


def test_what_can_be_called_passes():
    check_call("score", lambda *args: args, "state", "grads", "step")
    check_call("where", functools.partial(sf.default_where), "path", "leaf")
    check_call("link", torch.abs, "score")  # written in C: its signature is not known
    check_call("count", lambda fraction, active, extra=1: active, "fraction", "active")


def test_misspelt_keywords_name_the_preset_and_the_closest():
    for make, options, message in (
        (sf.rigl, {"drop_fractoin": 0.1}, "rigl() got an unexpected keyword argument 'drop_fractoin'; did you mean"),
        (sf.set, {"steps_": 1}, "set() got an unexpected keyword argument 'steps_'; did you mean 'steps'?"),
        (sf.snfs, {"dekay": 0.5}, "snfs() got an unexpected keyword argument 'dekay'; did you mean 'decay'?"),
        (sf.rigl, {"xyz": 0}, "rigl() got an unexpected keyword argument 'xyz'; expected one of drop, grow, drop_f"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            make(0.5, **options)
    check_keywords("snfs", ["when", "decay"], ["decay", "when"])


def test_algorithms_are_made_inside_compiled_code():
    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def masks(params):
        algorithm = sf.rigl(0.5, init="magnitude", distribution=sf.budgets.erk(), when=sf.every(2))
        return algorithm.init(params).masks

    params = {"w": torch.randn(4, 4)}
    assert sf.checkpoint.tree_equal(masks(params), sf.rigl(0.5, init="magnitude").init(params).masks)


def test_a_bool_is_neither_an_int_nor_a_number():
    values = (1, 1.0, True, "1", None, torch.tensor(1))
    assert [is_int(value) for value in values] == [True, False, False, False, False, False]
    assert [is_number(value) for value in values] == [True, True, False, False, False, False]


def test_an_int_is_checked_with_and_without_a_call_and_a_least_value():
    check_int("", "n", -5)
    with pytest.raises(TypeError, match="^expected n to be an int, got bool$"):
        check_int("", "n", True)
    with pytest.raises(ValueError, match="^split: expected n >= 1, got 0$"):
        check_int("split", "n", 0, 1)


NUMBERS = {"int", "float", "Integral", "Real"}
ELSEWHERE = {
    "engine/rounding.py": "what a schedule gives, and that may be a number of NumPy's",
    "engine/selection/groups.py": "an int, or a count for each group",
    "shorthand.py": "a sparsity that was checked, and is a float or a tensor",
}


def named(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def number_checks(source: str) -> list[int]:
    """Lines with `isinstance(x, bool)`, with `type(x) is int` and the like, or with a `not isinstance(x, int)`."""
    tree = ast.parse(source)
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"]
    found = [node.lineno for node in tests if "bool" in named(node.args[1])]
    for node in ast.walk(tree):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inside = [test for test in ast.walk(node) if test in tests]
            found += [test.lineno for test in inside if named(test.args[1]) & NUMBERS]
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            found += [node.lineno] if named(node.comparators[0]) & {"bool", *NUMBERS} else []
    return sorted(set(found))


def test_numbers_are_told_from_other_arguments_in_one_module():
    root = Path(str(sf.__file__)).parent
    sources = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in root.rglob("*.py")}
    assert {name for name, source in sources.items() if number_checks(source)} - {*ELSEWHERE} == {"engine/checks.py"}


def test_the_search_for_number_checks_finds_every_form():
    lines = [
        "isinstance(x, bool)",
        "isinstance(x, (bool, str))",
        "isinstance(x, bool | str)",
        "type(x) is not int",
        "not isinstance(x, int | Tensor)",
        "not all(isinstance(x, float) for x in xs)",
    ]
    other = ["isinstance(x, int)", "not isinstance(x, Tensor)", "x is None", "x.dtype == torch.bool"]
    assert number_checks("\n".join(lines + other)) == [1, 2, 3, 4, 5, 6]
