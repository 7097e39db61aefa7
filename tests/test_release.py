"""What is released: the archives hold the package and no more, and run where nothing
else of this copy is.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from test_layout import tree

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
VERSION = PROJECT["version"]
PYTHONS = [
    part.rpartition(" ")[2]
    for part in PROJECT["classifiers"]
    if re.search(r"Python :: 3\.", part)
]


class Archives(NamedTuple):
    """The source archive, and the wheel that was built from it."""

    source: Path
    wheel: Path


def run(*command: object, cwd: Path) -> str:
    """What a command printed; no variable of this environment leads it back here."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST"))
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, folder: Path, out: Path) -> Path:
    """Let the build backend make an archive of a folder."""
    call = (
        "from setuptools import build_meta; "
        f"print(build_meta.build_{kind}({str(out)!r}))"
    )
    return out / run(sys.executable, "-c", call, cwd=folder).splitlines()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    made = tmp_path_factory.mktemp("release")
    copy, unpacked, out = made / "copy", made / "unpacked", made / "out"
    for file in tree(ROOT):
        (copy / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy / file.relative_to(ROOT))
    out.mkdir()
    source = build("sdist", copy, out)
    with tarfile.open(source) as archive:
        archive.extractall(unpacked, filter="data")
    return Archives(source, build("wheel", unpacked / f"sparsefn-{VERSION}", out))


@pytest.mark.deep
def test_the_wheel_holds_the_package_and_nothing_else(archives: Archives) -> None:
    files = [
        file for file in tree(ROOT / "sparsefn") if file.suffix in (".py", ".typed")
    ]
    package = {file.relative_to(ROOT).as_posix() for file in files}
    with zipfile.ZipFile(archives.wheel) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert found == package
        assert "sparsefn/py.typed" in found
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


@pytest.mark.deep
def test_the_wheel_says_what_the_project_says(archives: Archives) -> None:
    with zipfile.ZipFile(archives.wheel) as wheel:
        (name,) = (
            name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")
        )
        told = email.message_from_bytes(wheel.read(name))
    assert (told["Version"], told["Requires-Python"]) == (
        VERSION,
        PROJECT["requires-python"],
    )
    assert told.get_all("Provides-Extra") == list(PROJECT["optional-dependencies"])
    assert [
        part for part in told.get_all("Requires-Dist", []) if "extra ==" not in part
    ] == PROJECT["dependencies"]
    assert told.get_all("Project-URL") == [
        f"{name}, {url}" for name, url in PROJECT["urls"].items()
    ]


def test_the_readme_names_the_extras_and_the_versions_that_serve() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"'\.\[(\w+)\]'", readme))
    assert named and named <= set(PROJECT["optional-dependencies"])
    first = "\n".join(readme.splitlines()[:30])
    oldest, newest = (
        _pinned("torch>=", PROJECT["dependencies"]),
        _pinned("torch==", _lines("constraints.txt")),
    )
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in first
    assert f"torch {oldest} to {newest.rpartition('.')[0]}" in first


def test_what_is_cited_is_what_is_released() -> None:
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    released = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (date,) = re.findall(
        rf"^## \[{re.escape(VERSION)}\] - (\S+)$", released, re.MULTILINE
    )
    assert f"version: {VERSION}\n" in cited and f'date-released: "{date}"\n' in cited


def test_workflows_run_commands_that_are_there() -> None:
    targets = set(
        re.findall(
            r"^([a-z-]+):.*##",
            (ROOT / "Makefile").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    called = set()
    for file in sorted((ROOT / ".github" / "workflows").iterdir()):
        jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
        called |= {
            step["run"]
            for job in jobs.values()
            for step in job["steps"]
            if "run" in step
        }
        if file.name == "nightly.yml":
            called |= {
                f"make {target}"
                for target in jobs["everything"]["strategy"]["matrix"]["target"]
            }
        if file.name == "checks.yml":
            assert jobs["test"]["strategy"]["matrix"]["python"] == PYTHONS
    made = {
        command.removeprefix("make ")
        for command in called
        if command.startswith("make ") and "$" not in command
    }
    assert {"lint", "test", "test-all", "compat", "dist"} <= made <= targets


@pytest.mark.deep
def test_an_empty_environment_runs_the_readme(
    archives: Archives, tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-index",
        "--no-deps",
        archives.wheel,
        cwd=tmp_path,
    )
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # The dependencies are those of this environment; a line in a .pth file does not
    # read the .pth files there.
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n", encoding="utf-8"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = readme.partition("```python\n")[2].partition("```")[0]
    where = (
        "print(sf.__file__, sf.__version__, "
        '__import__("importlib.metadata").metadata.version("sparsefn"))\n'
    )
    (tmp_path / "snippet.py").write_text(snippet + where, encoding="utf-8")
    *report, last = run(python, "-W", "error", "snippet.py", cwd=tmp_path).splitlines()
    assert last == f"{site / 'sparsefn' / '__init__.py'} {VERSION} {VERSION}"
    assert report


def _lines(name: str) -> list[str]:
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def _pinned(start: str, lines: list[str]) -> str:
    (found,) = (line.removeprefix(start) for line in lines if line.startswith(start))
    return found
