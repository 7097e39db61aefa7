"""Every public name says in one sentence what it is and shows an example; every example is right."""

import ast
import doctest
import functools
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_origin

import optree
import pytest
import torch

import sparsefn as sf

MODULES = [importlib.import_module(found.name) for found in pkgutil.walk_packages(sf.__path__, "sparsefn.")]
NAMES = {"torch": torch, "optree": optree, "math": math, "sf": sf}  # what an example may use without an import
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def exported(source: str) -> list[str]:
    """The public names that the text of a package's `__init__` binds, so not those that an import leaves behind."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return [name for name in names if not name.startswith("_")]


def is_code(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


def can_be_called(value: Any) -> bool:
    return callable(value) and get_origin(value) is None  # so can an alias such as Callable[[int], float]


def defined_in(value: Any, home: str) -> bool:
    """Whether code comes from a module or, by the name of a package, from any of its modules."""
    return f"{value.__module__}.".startswith(f"{home}.")


def is_own(value: Any, module: ModuleType) -> bool:
    return defined_in(value, module.__name__) if is_code(value) else can_be_called(value)


def documented(module: ModuleType, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """`(dotted name, object)` for the functions, classes and objects that can be called among the
    names of a package, and among all that its public submodules define."""
    for name in names:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            own = [key for key, member in vars(value).items() if not key.startswith("_") and is_own(member, value)]
            yield from ((f"{name}.{key}", vars(value)[key]) for key in own)
        elif is_own(value, module):
            yield name, value


def words(value: Any) -> str:
    """The docstring of an object itself: what it takes over from its class says nothing about it."""
    doc = value.__doc__
    if not is_code(value) and doc == type(value).__doc__:
        return ""
    return inspect.cleandoc(doc or "")


def lacks(value: Any) -> list[str]:
    """What the docstring of a public object lacks."""
    if not (doc := words(value)):
        return ["a docstring"]
    first, *rest = doc.splitlines()
    found = []
    if not first.endswith(".") or re.search(r"[.!?] +[A-Z]", first) or (rest and rest[0]):
        found.append(f"a first line that is one sentence, not {first!r}")
    if not examples_of(value, "").examples:
        found.append("an example (>>>)")
    return found


def examples(module: ModuleType) -> list[doctest.DocTest]:
    """The doctests of a module; they see its names as well as `NAMES`."""
    found = doctest.DocTestFinder().find(module, module.__name__, globs={**NAMES, **vars(module)})
    return [test for test in found if test.examples]


def examples_of(value: Any, name: str) -> doctest.DocTest:
    """The doctest of one object, which sees `NAMES` alone."""
    return doctest.DocTestParser().get_doctest(words(value), dict(NAMES), name, None, None)


def run(test: doctest.DocTest) -> str:
    """The report on the examples that fail; empty when all is well."""
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append, clear_globs=False)
    return "".join(report)


PUBLIC = dict(documented(sf, exported(Path(str(sf.__file__)).read_text(encoding="utf-8"))))
EXAMPLES = {test.name: test for module in [sf, *MODULES] for test in examples(module)}
# doctest looks at functions and classes; these are the objects of other kinds that can be called.
EXAMPLES |= {f"sf.{name}": examples_of(value, f"sf.{name}") for name, value in PUBLIC.items() if not is_code(value)}


def test_there_is_a_public_surface() -> None:
    assert {"State", "effective", "rigl", "random.key", "schedules.cosine", "budgets.erk"} <= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    missing = lacks(PUBLIC[name])
    assert not missing, f"sf.{name} lacks {' and '.join(missing)}"


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_of_public_names_are_run(name: str) -> None:
    collected = {example.source for test in EXAMPLES.values() for example in test.examples}
    assert {example.source for example in examples_of(PUBLIC[name], name).examples} <= collected


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_right(name: str) -> None:
    report = run(EXAMPLES[name])
    assert not report, report


# What follows checks the checker, on modules made here.

GOOD = "One sentence.\n\n>>> 1 + 1\n2"


def made(source: str, **names: Any) -> ModuleType:
    module = ModuleType("made")
    vars(module).update(names)
    exec(source, vars(module))
    return module


def function(doc: str | None) -> Callable[[], None]:
    def f() -> None: ...

    f.__doc__ = doc
    return f


def test_the_checker_accepts_a_documented_function() -> None:
    assert lacks(function(GOOD)) == []


@pytest.mark.parametrize(
    ("doc", "expected"),
    [
        (None, ["a docstring"]),
        ("", ["a docstring"]),
        ("One sentence.", ["an example (>>>)"]),
        ("No full stop\n\n>>> 1\n1", ["a first line that is one sentence, not 'No full stop'"]),
        ("One. Two.\n\n>>> 1\n1", ["a first line that is one sentence, not 'One. Two.'"]),
        (
            "A sentence that goes on\nhere.\n\n>>> 1\n1",
            ["a first line that is one sentence, not 'A sentence that goes on'"],
        ),
        ("One sentence.\nAnd on.", ["a first line that is one sentence, not 'One sentence.'", "an example (>>>)"]),
    ],
)
def test_the_checker_names_what_is_missing(doc: str | None, expected: list[str]) -> None:
    assert lacks(function(doc)) == expected


def test_the_checker_does_not_take_a_generated_docstring() -> None:
    class Pair(NamedTuple):
        left: int

    assert lacks(Pair) == ["a first line that is one sentence, not 'Pair(left,)'", "an example (>>>)"]
    assert lacks(functools.partial(int)) == ["a docstring"]


def test_the_checker_finds_every_kind_of_public_name() -> None:
    shapes = """
from collections.abc import Callable
from torch import relu
size, Alias = 3, Callable[[int], float]
def area(): ...
def _hidden(): ...
"""
    source = """
from functools import partial as _partial
from torch import Tensor, nn as _nn
import shapes as shapes
class Kind: ...
def make(): ...
described = _partial(int)
described.__doc__ = GOOD
make.__doc__ = GOOD
bare = _partial(int)
"""
    package = made(source.replace("import shapes as shapes", ""), shapes=made(shapes), GOOD=GOOD)
    assert exported(source) == ["Tensor", "shapes", "Kind", "make", "described", "bare"]
    found = dict(documented(package, exported(source)))
    assert list(found) == ["shapes.area", "Kind", "make", "described", "bare"]
    assert [name for name, value in found.items() if lacks(value)] == ["shapes.area", "Kind", "bare"]


def test_the_runner_reports_a_wrong_example() -> None:
    source = """
size = 3
def right():
    '>>> size + 1, torch.ones(1)\\n(4, tensor([1.]))'
def wrong():
    '>>> size + 1\\n5'
"""
    reports = {test.name: run(test) for test in examples(made(source))}
    assert list(reports) == ["made.right", "made.wrong"]
    assert reports["made.right"] == ""
    assert "Expected:\n    5\nGot:\n    4" in reports["made.wrong"]


def test_the_runner_reports_a_wrong_example_of_a_constant() -> None:
    constant = functools.partial(int)
    constant.__doc__ = "Wrong.\n\n>>> torch.ones(1)\ntensor([2.])"
    assert "Expected:\n    tensor([2.])\nGot:\n    tensor([1.])" in run(examples_of(constant, "constant"))
