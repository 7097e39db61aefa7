"""The engine has three modules and six packages. Of these, and of `core.checks`, only
the names of `__init__.py` are imported elsewhere, also by the kernels.
"""

import ast
from pathlib import Path

import sparsefn

PACKAGE = Path(sparsefn.__file__).parent
ENGINE = PACKAGE / "_engine"
KERNELS = Path(__file__).parents[2] / "kernels" / "sparsefn_kernels"
MODULES = {"transforms", "torch_limits", "backends"}
# A package of the engine may use the modules, and the packages before it.
ORDER = (
    "numbers",
    "processes",
    "leaves",
    "draws",
    "sums",
    "selection",
)
PACKAGES = (*(f"_engine.{name}" for name in ORDER), "core.checks")


def package_of(module: str) -> str:
    """The package of `PACKAGES` that a module is in, or is; "" for others."""
    for package in PACKAGES:
        name = f"sparsefn.{package}"
        if module == name or module.startswith(f"{name}."):
            return package
    return ""


def internal_imports(file: str, source: str) -> list[str]:
    """The imports in a file of the library that reach into one of `PACKAGES`, past its
    `__init__.py`.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        targets = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
        targets += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for target in targets:
            package = package_of(target)
            is_inside = file.startswith(package.replace(".", "/") + "/")
            if package and target != f"sparsefn.{package}" and not is_inside:
                found.append(target)
    return found


def sources() -> dict[str, str]:
    """The source of each file of the library, and of the kernels, by its path."""
    files = [(PACKAGE, file) for file in PACKAGE.rglob("*.py")]
    files += [(KERNELS.parent, file) for file in KERNELS.rglob("*.py")]
    return {
        file.relative_to(root).as_posix(): file.read_text("utf-8")
        for root, file in sorted(files)
    }


def imported_names(source: str) -> list[tuple[str, str]]:
    """(package, name) of all that a module imports from `PACKAGES`."""
    nodes = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
    ]
    return [
        (package_of(node.module or ""), alias.name)
        for node in nodes
        for alias in node.names
        if package_of(node.module or "")
    ]


def test_the_packages_are_these() -> None:
    folders = [file.name for file in ENGINE.iterdir() if file.is_dir()]
    assert {name for name in folders if name[0] != "_"} == {*ORDER}
    modules = {file.stem for file in ENGINE.glob("*.py")}
    assert modules == {"__init__", *MODULES}


def test_the_modules_of_the_engine_use_no_package_of_it() -> None:
    for name in MODULES:
        source = (ENGINE / f"{name}.py").read_text("utf-8")
        assert imported_names(source) == []


def test_only_public_names_of_a_package_are_imported_elsewhere() -> None:
    found = {}
    for name, source in sources().items():
        if imports := internal_imports(name, source):
            found[name] = imports
    assert found == {}


def test_packages_of_the_engine_use_those_before_them() -> None:
    found = []
    for file in sorted(ENGINE.rglob("*.py")):
        if file.parent == ENGINE:
            continue
        here = ORDER.index(file.parent.name)
        for package, name in imported_names(file.read_text("utf-8")):
            other = package.removeprefix("_engine.")
            if other not in ORDER or ORDER.index(other) > here:
                found.append(f"{file.parent.name}/{file.name} uses {package}.{name}")
    assert found == []


def test_an_init_hands_on_what_is_used_elsewhere() -> None:
    used: set[tuple[str, str]] = set()
    exported: set[tuple[str, str]] = set()
    for name, source in sources().items():
        for package, imported in imported_names(source):
            folder = package.replace(".", "/") + "/"
            if not name.startswith(folder):
                used.add((package, imported))
            elif name == f"{folder}__init__.py":
                exported.add((package, imported))
    assert exported == used


def test_the_rule_sees_every_import() -> None:
    rows = "sparsefn._engine.selection.rows"
    assert internal_imports("masks/select.py", f"from {rows} import x") == [rows]
    folds = "sparsefn._engine.sums.folds"
    assert internal_imports("masks/select.py", f"import {folds}") == [folds]
    assert internal_imports("_engine/sums/pooling.py", f"from {folds} import x") == []
    public = "from sparsefn._engine.selection import winners"
    assert internal_imports("masks/select.py", public) == []
