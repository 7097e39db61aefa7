"""Imports inside the library go downward only, and importing it loads no package it
does not need.
"""

import ast
import functools
import graphlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

# The import law: a module may import from its own layer and from those before it.
# Inside a layer no import goes round in a circle.
LAYERS = (
    "_engine",
    "core",
    "masks",
    "optim",
    "algorithms",
    "nn",
    "posttraining",
    "typing",
    "methods",
    "config",
    "shrinking",
    "report",
    "testing",
)
# All that training needs, which can be installed without the rest.
TRAINING = LAYERS[:5]

# Only tests, benchmarks and examples need these; a function may still import one when
# it is called.
NOT_ON_IMPORT = {
    "accelerate",
    "hypothesis",
    "lightning",
    "matplotlib",
    "peft",
    "pytest",
    "sklearn",
    "torchopt",
    "tqdm",
}
NOT_ON_IMPORT |= {"safetensors", "transformers"}
# But for these, which are loaded when they are asked for.
MAY = {
    ("testing", "hypothesis"),
    ("nn.integrations.lightning", "lightning"),
    ("nn.integrations.transformers", "transformers"),
}


def modules_in(package: Path) -> dict[str, str]:
    """`{dotted name below the package: source}`; the package's own `__init__` is left
    out.
    """
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        if name := ".".join(part for part in parts if part != "__init__"):
            found[name] = file.read_text(encoding="utf-8")
    return found


MODULES = modules_in(ROOT / "sparsefn")


def rank(name: str) -> int:
    head = name.split(".")[0]
    if head not in LAYERS:
        raise LookupError(
            f"sparsefn.{head} is no layer: move it into one, or add {head!r} to LAYERS "
            f"in {Path(__file__).name}"
        )
    return LAYERS.index(head)


def imported(source: str, name: str = "x", package: bool = False) -> Iterator[str]:
    """Absolute dotted names that the imports of one module mean, wherever in it they
    stand.
    """
    here = ("sparsefn." + name).split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package that the module is in, which for an `__init__` is
            # itself.
            above = here[: len(here) - node.level + package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def internal(source: str, name: str = "x", known: tuple[str, ...] = ()) -> list[str]:
    """The modules of the library that a module imports; `""` is the package itself."""
    known = known or tuple(MODULES)
    found = []
    for target in imported(
        source, name, package=any(other.startswith(name + ".") for other in known)
    ):
        head, *parts = target.split(".")
        if head == "sparsefn":
            # `sparsefn.core.tree.paths` is a name in the module `core.tree`; the
            # longest module name wins.
            prefixes = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
            found.append(
                next(prefix for prefix in prefixes if prefix in known or not prefix)
            )
    return found


def problems(name: str, source: str, known: tuple[str, ...] = ()) -> list[str]:
    """The errors in the imports of one module, one sentence each."""
    found = []
    for other in internal(source, name, known):
        if not other:
            found.append(
                f"sparsefn.{name} imports the package itself; import from the module "
                "that defines the name"
            )
        elif rank(other) > rank(name):
            found.append(
                f"sparsefn.{name} imports sparsefn.{other}, which is a layer above it"
            )
    return found


def on_import(tree: ast.AST) -> Iterator[str]:
    """Top-level packages that are imported when the module itself is."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif (
            isinstance(node, ast.If)
            and ast.unparse(node.test) == "TYPE_CHECKING"
            and not node.orelse
        ):
            pass  # read by type checkers alone
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from on_import(node)


def test_the_folders_are_the_layers() -> None:
    assert {*LAYERS} == {name.split(".")[0] for name in MODULES}


def test_a_new_folder_is_told_where_to_go() -> None:
    with pytest.raises(
        LookupError,
        match=r"sparsefn\.newcomer is no layer: move it into one, or add 'newcomer' to "
        r"LAYERS in test_imports\.py",
    ):
        rank("newcomer.part")


def test_imports_go_downward() -> None:
    assert [
        problem
        for name, source in MODULES.items()
        for problem in problems(name, source)
    ] == []


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module loads: its imports, and the faces of the packages
    that they are in.
    """
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        loads = found.setdefault(name, set())
        for other in internal(source, name, tuple(sources)):
            parts = other.split(".")
            faces = {".".join(parts[:n]) for n in range(1, len(parts))}
            inside = {
                face for face in faces if name == face or name.startswith(face + ".")
            }
            loads |= {other, *(faces - inside)} - {""}
    return found


def test_no_import_goes_round_in_a_circle() -> None:
    # raises CycleError with the circle
    assert list(graphlib.TopologicalSorter(graph(MODULES)).static_order())


def test_the_face_of_a_package_counts_as_imported_with_its_modules() -> None:
    sources = {
        "a": "from .b import face",
        "a.b": "from sparsefn.c import d",
        "c": "from sparsefn.a.b import e",
    }
    assert graph(sources) == {"a": {"a.b"}, "a.b": {"c"}, "c": {"a", "a.b"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph(sources)).prepare()


def test_modules_do_not_import_what_only_tests_need() -> None:
    found = {
        (name, other)
        for name, source in MODULES.items()
        for other in on_import(ast.parse(source))
    }
    assert [
        f"{name} imports {other}"
        for name, other in sorted(found)
        if other in NOT_ON_IMPORT
        and not any(name.startswith(part) and other == may for part, may in MAY)
    ] == []


# Parts that use the rest of the library as its users do, so that each could be a
# distribution of its own; and what they still import besides public names, with the
# reason: a list that may only get shorter.
# How an algorithm was made: its public name and arguments, which laws read and repeat.
_CALLS = "reads which call made an algorithm"
# What an algorithm has of its own choice of masks, which no public field says.
_CHOICE = "compares masks with the rule that the algorithm itself follows"
# The same texts for the same faults, and the same answer to what can be read.
_AS_ALGORITHMS_DO = "checks and refuses as the algorithms of the library do"
ON_PUBLIC_NAMES: dict[str, dict[str, str]] = {
    "shrinking": {},
    "testing": {
        **dict.fromkeys(
            [
                f"sparsefn.core.checks.{name}"
                for name in ["Call", "call_of", "described", "own_calls", "shown"]
            ],
            _CALLS,
        ),
        **dict.fromkeys(
            ["sparsefn.core.checks.check_keywords", "sparsefn.core.checks.uncalled"],
            _AS_ALGORITHMS_DO,
        ),
        **dict.fromkeys(
            [
                "sparsefn._engine.leaves.saves_memory",
                "sparsefn._engine.processes.any_sharded",
                "sparsefn._engine.transforms.host_number",
                "sparsefn._engine.transforms.transformed",
                "sparsefn.algorithms.combine.parts.check_algorithm",
                "sparsefn.core.state.check_masks",
                "sparsefn.core.tree.check_like",
                "sparsefn.core.tree.same_structure",
                "sparsefn.core.tree.structure_error",
            ],
            _AS_ALGORITHMS_DO,
        ),
        **dict.fromkeys(
            [
                "sparsefn.algorithms.competition.Competition",
                "sparsefn.algorithms.competition.Goal",
                "sparsefn.algorithms.frame.sparse_leaves",
                "sparsefn.algorithms.unit_table.unit_table",
                "sparsefn.core.state.update_of",
                "sparsefn.masks.budgets.distributions.Global",
            ],
            _CHOICE,
        ),
        "sparsefn._engine.transforms.Onlooker": "a plain mode changes what it counts",
        "sparsefn.core.state.has_optimizer": "an optimizer may be deep in the parts",
    },
}


@functools.cache
def public_names() -> frozenset[tuple[str, int]]:
    """The name and the id of all that `dir` lists, from the package on."""
    import sparsefn

    found: set[tuple[str, int]] = set()
    modules: list[ModuleType] = [sparsefn]
    for module in modules:
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or (name, id(value)) in found:
                continue
            found.add((name, id(value)))
            if isinstance(value, ModuleType) and value.__name__.startswith("sparsefn."):
                modules.append(value)
    return frozenset(found)


def not_public(part: str, name: str, source: str) -> list[str]:
    """What a module of a part imports of the library that is not public."""
    found = []
    inside = f"sparsefn.{part}."
    for target in imported(source, name, f"{name}.x" in MODULES or name == part):
        origin, _, last = target.rpartition(".")
        if not target.startswith("sparsefn.") or f"{target}.".startswith(inside):
            continue
        value = getattr(importlib.import_module(origin), last, None)
        if (last, id(value)) not in public_names():
            found.append(target)
    return found


@pytest.mark.parametrize("part", ON_PUBLIC_NAMES)
def test_a_part_imports_public_names_alone(part: str) -> None:
    found = {
        target
        for name, source in MODULES.items()
        if name.split(".")[0] == part
        for target in not_public(part, name, source)
    }
    assert found == {*ON_PUBLIC_NAMES[part]}, (
        "do without these names, or make them public in the packages where users look "
        "for them"
    )


def test_the_page_on_stability_lists_what_the_test_kit_needs() -> None:
    page = (ROOT / "docs" / "stability.md").read_text("utf-8")
    section = page.split("## For libraries that extend this one")[1].split("\n## ")[0]
    listed = {
        f"{module}.{name}"
        for module, names in re.findall(r"^- `([\w.]+)`: (.*)$", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == {*ON_PUBLIC_NAMES["testing"]}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from sparsefn.core.state import State", []),
        ("from sparsefn.masks import patterns as p", []),
        ("from sparsefn.nn.modules.params import bake", []),
        ("from . import groups\nfrom .trace import traced", []),
        ("import torch\nfrom numpy import zeros", []),
        ("from sparsefn.core.checks import check_int", ["core.checks.check_int"]),
        ("def f():\n    from ..core.tree import paths", ["core.tree.paths"]),
        ("import sparsefn.nn.modules.params", ["nn.modules.params"]),
        ("from sparsefn.nn.modules import params", ["nn.modules.params"]),
        ("from sparsefn.core.tree.leaves import *", ["core.tree.leaves.*"]),
        ("from sparsefn._engine import sums", ["_engine.sums"]),
    ],
)
def test_the_rule_of_public_names_sees_every_other(
    source: str, found: list[str]
) -> None:
    names = not_public("shrinking", "shrinking.newcomer", source)
    assert names == [f"sparsefn.{name}" for name in found]


# torch loads tqdm itself; its compiler and the parts of torch.distributed each take a
# second to load
SLOW = [
    "torch._dynamo",
    "torch._inductor",
    *(f"torch.distributed.{name}" for name in ("tensor", "fsdp", "checkpoint")),
]


@pytest.mark.deep
def test_a_fresh_process_does_not_load_them() -> None:
    script = "import sys, sparsefn; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    loaded = set(done.stdout.split())
    assert "sparsefn.core.state" in loaded
    assert loaded & {*NOT_ON_IMPORT - {"tqdm"}, *SLOW} == set()
    own = {name.split(".")[1] for name in loaded if name.startswith("sparsefn.")}
    assert own == {*TRAINING}


@pytest.mark.deep
def test_the_layers_of_training_work_without_the_others(tmp_path: Path) -> None:
    package = tmp_path / "sparsefn"
    package.mkdir()
    (package / "__init__.py").write_text('"""Five layers."""\n')
    for layer in TRAINING:
        shutil.copytree(ROOT / "sparsefn" / layer, package / layer)
    script = """
import sys, torch, sparsefn
from sparsefn.algorithms import rigl
from sparsefn.algorithms.combine.with_optimizer import with_optimizer
from sparsefn.optim import adamw
algorithm = with_optimizer(rigl(0.5), adamw(0.1))
state = algorithm.init({"w": torch.randn(8, 8)})
state = algorithm.update(state, {"w": torch.ones(8, 8)}, 0)
print(sparsefn.__file__, int(state.masks["w"].sum()))
print(*{name.split(".")[1] for name in sys.modules if name.startswith("sparsefn.")})
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, loaded = done.stdout.splitlines()
    assert first == f"{package / '__init__.py'} 32"
    assert {*loaded.split()} == {*TRAINING}


KNOWN = (
    "core",
    "masks",
    "masks.scores",
    "optim",
    "algorithms",
    "algorithms.frame",
    "algorithms.prune",
    "testing.laws",
)
ABOVE = "sparsefn.optim imports sparsefn.algorithms, which is a layer above it"


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("masks", "from sparsefn.masks.scores import magnitude", []),
        ("masks", "from sparsefn.masks import scores", []),
        ("optim", "import sparsefn.algorithms", [ABOVE]),
        ("optim", "from .algorithms import rigl", [ABOVE]),
        ("optim", "def f():\n    from . import algorithms", [ABOVE]),
        (
            "optim",
            "from .testing.laws import LAWS",
            [ABOVE.replace("algorithms", "testing.laws")],
        ),
        ("algorithms.prune", "from .frame import build\nfrom .. import masks", []),
        ("algorithms", "from .frame import build\nfrom . import prune", []),
    ],
)
def test_the_checker_reads_every_form_of_import(
    name: str, source: str, expected: list[str]
) -> None:
    assert problems(name, source, KNOWN) == expected


@pytest.mark.parametrize(
    "source", ["import sparsefn as sf", "from sparsefn import gmp", "from . import gmp"]
)
def test_the_checker_refuses_an_import_of_the_package_itself(source: str) -> None:
    (problem,) = problems("optim", source, KNOWN)
    assert problem.startswith("sparsefn.optim imports the package itself")


def test_the_checker_sees_imports_that_run_on_import() -> None:
    source = """
import matplotlib.pyplot
if True:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        pass
class Lazy:
    import tqdm
    def method(self):
        import hypothesis
if TYPE_CHECKING:
    import pytest
"""
    assert set(on_import(ast.parse(source))) == {"matplotlib", "sklearn", "tqdm"}
