"""The shape of the repository: small files, nothing empty, tests for every package."""

import ast
import os
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import sparsefn

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sparsefn"
MODULES = [file.relative_to(PACKAGE) for file in sorted(PACKAGE.rglob("*.py"))]

MOST_LINES = 600
GENERATED = {"__pycache__", "build", "dist", "out"}
MAY_BE_EMPTY = {"py.typed"}  # its presence is its content
# Spelled in parts, so that this file does not hold what it looks for.
MACHINE_PATHS = [f"/{top}/".encode() for top in ("work", "tmp", "root")]


def tree(root: Path) -> Iterator[Path]:
    """The files a commit would hold: no hidden folder but .ci, nothing generated, no
    virtual environment.
    """
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in sorted(folders)
            if (name == ".ci" or not name.startswith("."))
            and name not in GENERATED
            and not name.endswith(".egg-info")
            and not (Path(folder, name) / "pyvenv.cfg").exists()
        ]
        # a file in a worktree
        yield from (Path(folder, name) for name in sorted(files) if name != ".git")


def faults(root: Path) -> list[str]:
    """Empty files, and files that name a path of one machine."""
    found = []
    for file in tree(root):
        content, name = file.read_bytes(), file.relative_to(root).as_posix()
        if not content.strip() and file.name not in MAY_BE_EMPTY:
            found.append(f"{name} is empty")
        found += [
            f"{name} names {path.decode()}" for path in MACHINE_PATHS if path in content
        ]
    return found


def test_nothing_is_empty_and_no_file_names_a_path_of_one_machine() -> None:
    assert not faults(ROOT)


def test_the_checker_finds_what_it_looks_for(tmp_path: Path) -> None:
    for name, content in {
        "kept.py": b"x = 1\n",
        "py.typed": b"",
        "blank.py": b" \n",
        "sub/script": b"cd " + MACHINE_PATHS[1] + b"x",
        ".ci/run": b"cd " + MACHINE_PATHS[0],
        ".cache/blank": b"",
        "env/pyvenv.cfg": b"",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    paths = [path.decode() for path in MACHINE_PATHS]
    assert sorted(faults(tmp_path)) == [
        f".ci/run names {paths[0]}",
        "blank.py is empty",
        f"sub/script names {paths[1]}",
    ]


LINES = {
    f"sparsefn/{module}": len((PACKAGE / module).read_text("utf-8").splitlines())
    for module in MODULES
}


def test_modules_are_short() -> None:
    assert {name: lines for name, lines in LINES.items() if lines > MOST_LINES} == {}, (
        "split these"
    )


# Why a name occurs twice. A module that is not here has a name of its own.
NAMES_TWICE = {
    "averages": "of weights, by `optim` and by other libraries in a module",
    "blocks": "of a model: found for calibration, trained for recovery",
    "depth_scores": "of a model in memory, and of one in a folder",
    "experts": "removed from a model, and measured for that",
    "files": "of an attached algorithm, and of a run on several processes",
    "n_of_m": "N:M patterns: methods, and checkpoints",
    "originals": "torch's word: their names in a tree, and in a module",
    "plan": "of `sf.report.plan`, and of units that go",
    "removal": "of layers from a model in memory, and from one in a folder",
    "shards": "DTensor's word: their tensors, and their units",
    "weights": "of a module: which parameters they are, and into its shards",
}


def test_files_have_the_same_name_for_a_reason() -> None:
    count = Counter(m.stem for m in MODULES if m.stem != "__init__")
    twice = {name for name, times in count.items() if times > 1}
    assert twice == {*NAMES_TWICE}


def beyond_a_face(source: str) -> list[str]:
    """What a module does besides handing names on: anything but a docstring, imports
    and names with two underscores.
    """
    found = []
    for node in ast.parse(source).body:
        names = (
            [ast.unparse(target) for target in node.targets]
            if isinstance(node, ast.Assign)
            else []
        )
        names += [node.name] if isinstance(node, ast.FunctionDef) else []
        dunder = bool(names) and all(
            name.startswith("__") and name.endswith("__") for name in names
        )
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (dunder or text or isinstance(node, ast.Import | ast.ImportFrom)):
            found.append(ast.unparse(node).split("\n")[0])
    return found


def test_an_init_only_hands_names_on() -> None:
    # `sparsefn/__init__.py` also loads some packages on first use.
    faces = [
        module
        for module in MODULES
        if module.name == "__init__.py" and module != Path(module.name)
    ]
    work = {
        str(module): beyond_a_face((PACKAGE / module).read_text("utf-8"))
        for module in faces
    }
    assert {name: found for name, found in work.items() if found} == {}


def test_the_checker_of_faces_sees_work() -> None:
    face = (
        '"""Doc."""\nfrom a import b as b\n__all__ = ["b"]\ndef __dir__():\n    return '
        "__all__\n"
    )
    assert beyond_a_face(face) == []
    assert beyond_a_face(face + "x = 1\ndef f(): ...\nb()") == [
        "x = 1",
        "def f():",
        "b()",
    ]


def test_every_package_has_its_tests() -> None:
    """`tests/` mirrors packages, not files: a module that serves its neighbours may be
    tested with them.
    """
    packages = {m.parent for m in MODULES if m.name != "__init__.py"}
    tested = {
        file.parent.relative_to(ROOT / "tests")
        for file in (ROOT / "tests").rglob("test_*.py")
    }
    assert packages - tested == set(), "write tests for these"
    assert tested - {m.parent for m in MODULES} == set(), "tests of no package"


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert sparsefn.__version__ == project["version"]


KERNELS = ROOT / "kernels" / "sparsefn_kernels"


def test_the_kernels_are_a_distribution_that_keeps_the_same_rules() -> None:
    files = sorted(KERNELS.rglob("*.py"))
    assert not [
        file
        for file in files
        if len(file.read_text(encoding="utf-8").splitlines()) > MOST_LINES
    ]
    modules = [
        file.relative_to(KERNELS) for file in files if file.name != "__init__.py"
    ]
    tests = [
        KERNELS.parent / "tests" / module.with_name(f"test_{module.name}")
        for module in modules
    ]
    assert not [test for test in tests if not test.is_file()]
    made = tomllib.loads(
        (KERNELS.parent / "pyproject.toml").read_text(encoding="utf-8")
    )
    folders = {
        ".".join(file.parent.relative_to(KERNELS.parent).parts) for file in files
    }
    assert set(made["tool"]["setuptools"]["packages"]) == folders
    assert made["project"]["version"] == sparsefn.__version__
    assert f"sparsefn=={sparsefn.__version__}" in made["project"]["dependencies"]


def test_what_they_are_written_in_is_named_on_one_page_and_nowhere_in_the_package() -> (
    None
):
    files = [
        file
        for folder in (PACKAGE, ROOT / "docs")
        for file in tree(folder)
        if file.parent.name != "coming-from"
    ]
    named = [
        file.relative_to(ROOT).as_posix()
        for file in files
        if b"triton" in file.read_bytes().lower()
    ]
    assert named == ["docs/accelerators.md"]
