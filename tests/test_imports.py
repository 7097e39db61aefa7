"""Imports inside the library go downward only, and importing it loads no package it does not need."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module may import any module listed before it. A new module is one row; the families in
# algorithms/ share a row and may import each other, as long as no import goes round in a circle.
ORDER = (
    "compiling",
    "tree",
    "arrays",
    "folds",
    "blocks",
    "passes",
    "types",
    "calls",
    "numerics",
    "slopes",
    "elementary",
    "pooling",
    "threefry",
    "random",
    "triggers",
    "where",
    "schedules",
    "patterns",
    "boxes",
    "ranks",
    "narrow",
    "parts",
    "scan",
    "lanes",
    "contest",
    "select",
    "gates",
    "activations",
    "rounding",
    "shares",
    "budgets",
    "shorthand",
    "masks",
    "scores",
    "redistribute",
    "terms",
    "algorithms.rule",
    "algorithms.memory",
    "algorithms.core",
    "algorithms.*",
    "algorithms",
    "reparam",
    "compose",
    "timing",
    "moments",
    "optim",
    "adam_pass",
    "sgd_pass",
    "optimizers",
    "table",
    "ensemble",
    "wrappers",
    "weights",
    "axes",
    "channels",
    "operations",
    "layers",
    "dependencies",
    "sparse_modules",
    "gradients",
    "stateless",
    "pruned",
    "modules",
    "derivatives",
    "curvature",
    "shrinking",
    "checkpoint",
    "braille",
    "flops",
    "report",
    "config",
    "testing.values",
    "testing.strategies",
    "testing.oracle",
    "testing.meta",
    "testing.rows",
    "testing.harness",
    "testing.processes",
    "testing.laws_masks",
    "testing.laws_dependence",
    "testing.laws_states",
    "testing.laws_transforms",
    "testing.laws_ends",
    "testing.laws",
    "testing.check",
    "testing",
)
FAMILIES = ORDER.index("algorithms.*")

# Only tests, benchmarks and examples need these; a function may still import one when it is called.
NOT_ON_IMPORT = {"hypothesis", "matplotlib", "pytest", "sklearn", "torchopt", "tqdm"}


def modules_in(package: Path) -> dict[str, str]:
    """`{dotted name below the package: source}`; the package's own `__init__` is left out."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        if name := ".".join(part for part in parts if part != "__init__"):
            found[name] = file.read_text(encoding="utf-8")
    return found


MODULES = modules_in(ROOT / "sparsefn")


def rank(name: str) -> int:
    if name in ORDER:
        return ORDER.index(name)
    if name.startswith("algorithms."):
        return FAMILIES
    raise LookupError(
        f"sparsefn.{name} has no row: add {name!r} to ORDER in {Path(__file__).name}, below all it imports"
    )


def imported(source: str, name: str = "x", package: bool = False) -> Iterator[str]:
    """Absolute dotted names that the imports of one module mean, wherever in it they stand."""
    here = ("sparsefn." + name).split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package that the module is in, which for an `__init__` is itself.
            above = here[: len(here) - node.level + package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def internal(source: str, name: str = "x", known: tuple[str, ...] = ()) -> list[str]:
    """The modules of the library that a module imports; `""` is the package itself."""
    known = known or tuple(MODULES)
    found = []
    for target in imported(source, name, package=any(other.startswith(name + ".") for other in known)):
        head, *parts = target.split(".")
        if head == "sparsefn":
            # `sparsefn.tree.paths` is a name in the module `tree`; the longest module name wins.
            prefixes = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
            found.append(next(prefix for prefix in prefixes if prefix in known or not prefix))
    return found


def problems(name: str, source: str, known: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with the imports of one module, one sentence each."""
    found = []
    for other in internal(source, name, known):
        if not other:
            found.append(f"sparsefn.{name} imports the package itself; import from the module that defines the name")
        elif rank(other) > rank(name) or (rank(other) == rank(name) != FAMILIES):
            found.append(f"sparsefn.{name} imports sparsefn.{other}, which is not below it")
    return found


def on_import(tree: ast.AST) -> Iterator[str]:
    """Top-level packages that are imported when the module itself is."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from on_import(node)


def test_every_module_has_a_row_and_every_row_a_module() -> None:
    ranked = {rank(name) for name in MODULES}
    stale = [row for number, row in enumerate(ORDER) if number not in ranked]
    assert not stale, f"rows of ORDER without a module: {stale}"


def test_a_module_without_a_row_is_told_where_to_go() -> None:
    with pytest.raises(
        LookupError, match=r"sparsefn\.newcomer has no row: add 'newcomer' to ORDER in test_imports\.py"
    ):
        rank("newcomer")


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downward(name: str) -> None:
    assert not problems(name, MODULES[name])


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {name: [other for other in internal(source, name) if other] for name, source in MODULES.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


@pytest.mark.parametrize("name", MODULES)
def test_modules_do_not_import_what_only_tests_need(name: str) -> None:
    allowed = {"hypothesis"} if name.startswith("testing") else set()
    assert set(on_import(ast.parse(MODULES[name]))) & NOT_ON_IMPORT <= allowed


# torch loads tqdm itself; its compiler takes a second to load
@pytest.mark.parametrize("package", [*sorted(NOT_ON_IMPORT - {"tqdm"}), "torch._dynamo", "torch._inductor"])
def test_a_fresh_process_does_not_load(package: str, loaded: set[str]) -> None:
    assert package not in loaded


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    script = "import sys, sparsefn; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stderr
    names = set(done.stdout.split())
    assert "sparsefn.types" in names
    return names


KNOWN = ("tree", "select", "masks", "scores", "algorithms", "algorithms.core", "algorithms.prune", "algorithms.static")


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("masks", "from sparsefn.select import topk_mask", []),
        ("masks", "from sparsefn import select", []),
        ("masks", "import sparsefn.scores", ["sparsefn.masks imports sparsefn.scores, which is not below it"]),
        ("masks", "from .scores import magnitude", ["sparsefn.masks imports sparsefn.scores, which is not below it"]),
        (
            "masks",
            "def f():\n    from . import scores",
            ["sparsefn.masks imports sparsefn.scores, which is not below it"],
        ),
        ("masks", "import sparsefn.masks", ["sparsefn.masks imports sparsefn.masks, which is not below it"]),
        ("algorithms.prune", "from sparsefn.algorithms.static import static", []),
        ("algorithms.prune", "from .core import init_masks\nfrom .. import scores", []),
        (
            "algorithms.core",
            "from . import static",
            ["sparsefn.algorithms.core imports sparsefn.algorithms.static, which is not below it"],
        ),
        (
            "algorithms.prune",
            "from . import gmp",
            ["sparsefn.algorithms.prune imports sparsefn.algorithms, which is not below it"],
        ),
        ("algorithms", "from .static import static\nfrom . import prune", []),
    ],
)
def test_the_checker_reads_every_form_of_import(name: str, source: str, expected: list[str]) -> None:
    assert problems(name, source, KNOWN) == expected


@pytest.mark.parametrize("source", ["import sparsefn as sf", "from sparsefn import gmp", "from . import gmp"])
def test_the_checker_refuses_an_import_of_the_package_itself(source: str) -> None:
    (problem,) = problems("scores", source, KNOWN)
    assert problem.startswith("sparsefn.scores imports the package itself")


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
"""
    assert set(on_import(ast.parse(source))) == {"matplotlib", "sklearn", "tqdm"}
