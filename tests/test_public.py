"""Every public name says in one sentence what it is and shows an example; every example
is right.
"""

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import sparsefn as sf

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(sf.__path__, "sparsefn.")
]
NAMES = {"torch": torch, "sf": sf}  # what an example may use without an import
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def is_code(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


def public(module: ModuleType, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`(dotted name, object)` for what completes after a package: its names, and those
    of its modules among them.
    """
    package = module.__name__.split(".")[0]
    for name in dir(module):
        value = getattr(module, name)
        if isinstance(value, ModuleType) and value.__name__.startswith(f"{package}."):
            yield from public(value, f"{prefix}{name}.")
        elif not name.startswith("_"):
            yield prefix + name, value


def words(value: Any) -> str:
    """The docstring of an object itself: what it takes over from its class says nothing
    about it.
    """
    doc = value.__doc__
    if not is_code(value) and doc == type(value).__doc__:
        return ""
    return inspect.cleandoc(doc or "")


def lacks(value: Any) -> list[str]:
    """The parts that the docstring of a public object lacks."""
    if not (doc := words(value)):
        return ["a docstring"]
    first, *rest = doc.splitlines()
    found = []
    if (
        not first.endswith(".")
        or re.search(r"[.!?] +[A-Z]", first)
        or (rest and rest[0])
    ):
        found.append(f"a first line that is one sentence, not {first!r}")
    if not examples_of(value, "").examples:
        found.append("an example (>>>)")
    return found


def examples(module: ModuleType) -> list[doctest.DocTest]:
    """The doctests of a module. Those of names that users have see `NAMES` alone,
    others those of the module, too.
    """
    found = [
        test
        for test in doctest.DocTestFinder().find(module, module.__name__, globs={})
        if test.examples
    ]
    for test in found:
        test.globs = NAMES | ({} if test.docstring in SHOWN else vars(module))
    return found


def examples_of(value: Any, name: str) -> doctest.DocTest:
    """The doctest of one object, which sees `NAMES` alone."""
    return doctest.DocTestParser().get_doctest(
        words(value), dict(NAMES), name, None, None
    )


def run(test: doctest.DocTest) -> str:
    """The report on the examples that fail; empty when all is well."""
    report: list[str] = []
    torch.manual_seed(0)
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(
        test, out=report.append, clear_globs=False
    )
    return "".join(report)


def docstrings(values: Collection[Any]) -> set[str]:
    """Those of some objects, and of what the classes among them define."""
    own = [
        member
        for value in values
        if inspect.isclass(value)
        for member in vars(value).values()
    ]
    return {
        doc for value in [*values, *own] if (doc := getattr(value, "__doc__", None))
    }


PUBLIC = dict(public(sf))
# The others are constants, and types for annotations.
CALLED = {
    name: value
    for name, value in PUBLIC.items()
    if callable(value) and not name.startswith("typing.")
}
SHOWN = docstrings(CALLED.values())  # on the pages of the reference
PAGE = Path(__file__).parents[1] / "docs" / "api.md"
EXAMPLES = {module.__name__: examples(module) for module in [sf, *MODULES]}
# doctest looks at functions and classes; these are the objects of other kinds that can
# be called.
EXAMPLES["sf"] = [
    examples_of(value, f"sf.{name}")
    for name, value in CALLED.items()
    if not is_code(value)
]


def test_there_is_a_public_surface() -> None:
    assert {
        "State",
        "effective",
        "rigl",
        "random.key",
        "schedules.cosine",
        "budgets.erk",
    } <= set(PUBLIC)


def test_what_completes_is_what_a_module_lists() -> None:
    named = [getattr(sf, name) for name in [*sf.__all__, "testing"]]
    modules = [value for value in named if isinstance(value, ModuleType)]
    modules += [sf.testing.laws, sf.testing.strategies]
    assert len(modules) > 25
    assert [
        m.__name__
        for m in modules
        if dir(m) != sorted(getattr(m, "__all__", ["no __all__"]))
    ] == []


def test_what_completes_is_on_the_page_of_names() -> None:
    written = re.findall(
        r"^- `sf\.([\w.]+)`:", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    cards = PAGE.with_name("methods.md").read_text(encoding="utf-8")
    written += re.findall(r"^`sf\.(methods\.\w+)`:", cards, re.MULTILINE)
    assert {*PUBLIC} ^ {*written} == set()
    assert [name for name in PUBLIC if name.startswith("tree.")][6:] == []


def test_types_for_annotations_are_explained() -> None:
    page = PAGE.with_name("reference") / "state.md"
    explained = re.findall(r"^\| `(\w+)` \| \S", page.read_text("utf-8"), re.MULTILINE)
    assert sorted(explained) == sf.typing.__all__


def test_public_names_are_documented() -> None:
    assert [
        f"sf.{name} lacks {' and '.join(lacks(value))}"
        for name, value in CALLED.items()
        if lacks(value)
    ] == []


def test_examples_of_public_names_are_run() -> None:
    collected = {
        example.source
        for tests in EXAMPLES.values()
        for test in tests
        for example in test.examples
    }
    assert [
        f"sf.{name}"
        for name, value in CALLED.items()
        if not {example.source for example in examples_of(value, name).examples}
        <= collected
    ] == []


# searches take seconds
@pytest.mark.deep(but=["sf", "sparsefn.[!t]*", "sparsefn.core.tree*", "sparsefn.core*"])
@pytest.mark.parametrize("module", [name for name, tests in EXAMPLES.items() if tests])
def test_examples_are_right(module: str) -> None:
    if (
        "integrations." in module
        and (other := module.split(".")[-1]) in sf.integrations.__all__
    ):
        pytest.importorskip(other)  # `make recipes` has them, and runs this test
    reports = "".join(run(test) for test in EXAMPLES[module])
    assert not reports, reports


# The tests below check the checker, on modules made here.

GOOD = "One sentence.\n\n>>> 1 + 1\n2"

Made = Callable[..., ModuleType]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes a package of the sources given and imports it."""

    def make(**sources: str) -> ModuleType:
        (tmp_path / "made").mkdir()
        for name, source in sources.items():
            (tmp_path / "made" / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module("made")

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "made"]:
        del sys.modules[name]


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
        (
            "No full stop\n\n>>> 1\n1",
            ["a first line that is one sentence, not 'No full stop'"],
        ),
        (
            "One. Two.\n\n>>> 1\n1",
            ["a first line that is one sentence, not 'One. Two.'"],
        ),
        (
            "A sentence that goes on\nhere.\n\n>>> 1\n1",
            ["a first line that is one sentence, not 'A sentence that goes on'"],
        ),
        (
            "One sentence.\nAnd on.",
            [
                "a first line that is one sentence, not 'One sentence.'",
                "an example (>>>)",
            ],
        ),
    ],
)
def test_the_checker_names_what_is_missing(
    doc: str | None, expected: list[str]
) -> None:
    assert lacks(function(doc)) == expected


def test_the_checker_does_not_take_a_generated_docstring() -> None:
    class Pair(NamedTuple):
        left: int

    assert lacks(Pair) == [
        "a first line that is one sentence, not 'Pair(left,)'",
        "an example (>>>)",
    ]
    assert lacks(Pair(1)) == ["a docstring"]


def test_the_checker_finds_every_kind_of_public_name(made: Made) -> None:
    shapes = f"""
from collections.abc import Callable
import math
size = 3
def area():
    {GOOD!r}
def _hidden(): ...
"""
    package = f"""
from functools import partial as _partial
from made import shapes
from torch import relu
class Kind: ...
described, bare = _partial(int), _partial(int)
described.__doc__ = {GOOD!r}
def __dir__():
    return ["Kind", "__version__", "bare", "described", "relu", "shapes"]
__version__ = "1"
"""
    found = dict(public(made(__init__=package, shapes=shapes)))
    assert list(found) == ["Kind", "bare", "described", "relu"] + [
        f"shapes.{name}" for name in ("Callable", "area", "math", "size")
    ]
    wrong = ["Kind", "bare", "relu", "shapes.Callable"]  # names of others among them
    assert [
        name for name, value in found.items() if callable(value) and lacks(value)
    ] == wrong


def test_the_runner_reports_a_wrong_example(made: Made) -> None:
    source = """
size = 3
def right():
    '>>> size + 1, torch.ones(1)\\n(4, tensor([1.]))'
def wrong():
    '>>> size + 1\\n5'
"""
    reports = {test.name: run(test) for test in examples(made(__init__=source))}
    assert list(reports) == ["made.right", "made.wrong"]
    assert reports["made.right"] == ""
    assert "Expected:\n    5\nGot:\n    4" in reports["made.wrong"]


def test_the_runner_reports_a_wrong_example_of_a_constant() -> None:
    constant = functools.partial(int)
    constant.__doc__ = "Wrong.\n\n>>> torch.ones(1)\ntensor([2.])"
    assert "Expected:\n    tensor([2.])\nGot:\n    tensor([1.])" in run(
        examples_of(constant, "constant")
    )


@pytest.mark.deep
def test_what_is_loaded_later_is_told_to_type_checkers_and_listed() -> None:
    tree = ast.parse(Path(str(sf.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {
        alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    script = """
        import sys, sparsefn
        first = set(sys.modules)
        print(*sparsefn._LATER)
        later = ["config", "shrinking", "curvature"]
        assert not [name for name in later if f"sparsefn.{name}" in first]
        import sparsefn.shrinking
        for name in sparsefn._LATER:
            assert getattr(sparsefn, name) is getattr(sparsefn, name)
        assert callable(sparsefn.shrink)
        assert {*sparsefn._LATER, "rigl"} <= {*dir(sparsefn)}
        assert not hasattr(sparsefn, "nothing")
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert told | {"testing"} == set(done.stdout.split())


@pytest.mark.parametrize(("name", "package"), sf._MOVED.items())
def test_a_name_of_the_last_release_works_and_warns(name: str, package: str) -> None:
    moved = f"sf.{name} has moved: write sf.{package}.{name}"
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(moved)}$") as caught:
        found = getattr(sf, name)
    assert caught[0].filename == __file__
    assert found is getattr(getattr(sf, package), name)
    assert name not in dir(sf) and name not in sf.__all__
    assert f"sf.{name}`" in PAGE.with_name("moved.md").read_text("utf-8")


@pytest.mark.deep
def test_listing_and_star_import_hide_nothing_and_need_no_hypothesis() -> None:
    script = """
        import builtins, inspect, pydoc, sys
        sys.modules["hypothesis"] = None
        import sparsefn
        names = dict(inspect.getmembers(sparsefn))
        assert "rigl(" in pydoc.render_doc(sparsefn)
        assert {"rigl", "set", "curvature", "shrink"} <= {*names}
        assert "testing" not in names
        scope = {}
        exec("from sparsefn import *", scope)
        assert scope["rigl"] is sparsefn.rigl
        assert not {*scope} & {*dir(builtins)} - {"__builtins__"}
        import sparsefn._engine.selection.dispatch
        print(*dir(sparsefn))
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.split()} == {*sf.__all__, "set", "__version__"}
    assert {*dir(sf)} == {
        *sf.__all__,
        "set",
        "testing",
        "__version__",
    } and sf.__all__ == sorted(sf.__all__)


@pytest.mark.deep
def test_compiled_code_may_ask_for_what_is_loaded_later() -> None:
    script = """
        import torch, sparsefn as sf
        loss = lambda params: (params["w"] ** 3).sum()
        double = lambda params: sf.curvature.hessian_vector(loss, params, params, ())
        compiled = torch.compile(double, backend="eager", fullgraph=True)
        assert compiled({"w": torch.tensor([2.0])})["w"].tolist() == [24.0]
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
