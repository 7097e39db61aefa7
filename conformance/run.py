"""Runs the laws on every system in its environment, and writes results.json and
docs/conformance.md.

    python conformance/run.py
    python conformance/run.py --only torch_prune --only torch_ao
    python conformance/run.py --page

Environments are made below out/conformance and used again as long as their requirements
stay the same. What is not run keeps the cells that it has in results.json. A cell `no`
needs a reproduction, which must fail.
"""

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import page

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS, OUT = HERE / "results.json", ROOT / "out" / "conformance"
SYSTEMS: dict[str, dict[str, Any]] = tomllib.loads(
    (HERE / "systems.toml").read_text(encoding="utf-8")
)
# scripts that print the rows of a table each, with the packages that it names
TABLES = {
    "structured": ["sparsefn", "torch-pruning", "torch", "transformers"],
    "legacy": ["sparsefn", "compressed-tensors", "torch", "transformers"],
}
LIMIT = 900  # seconds for the laws of one system


def python_of(environment: str) -> Path:
    """The interpreter of an environment, made where it is missing or has other
    requirements.
    """
    folder, wanted = OUT / environment, HERE / "requirements" / f"{environment}.txt"
    mark, digest = (
        folder / ".installed",
        hashlib.sha256(wanted.read_bytes()).hexdigest(),
    )
    python = folder / "bin" / "python"
    if not mark.exists() or mark.read_text() != digest:
        print(f"installing {folder}", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        torch = [
            line
            for line in wanted.read_text().splitlines()
            if line.startswith("torch==")
        ]
        if torch:  # with what its build needs; all else is listed
            subprocess.run([*pip, *torch], check=True)
        subprocess.run([*pip, "--no-deps", "-r", wanted], check=True)
        mark.write_text(digest)
    return python


def ask(
    python: Path, *arguments: str | Path, here: Path = HERE
) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment, with this library in the path where it serves."""
    places = os.pathsep.join(map(str, (HERE, ROOT)))
    own = {
        "PYTHONPATH": places,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return subprocess.run(
        [python, *arguments],
        env=os.environ | own,
        cwd=here,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def versions(python: Path, packages: list[str]) -> dict[str, str]:
    """What is installed; this library is not, and has the version of the checkout."""
    own = {
        "sparsefn": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "version"
        ]
    }
    others = [name for name in packages if name not in own]
    code = (
        "import importlib.metadata as m, sys, json; print(json.dumps({n: m.version(n) "
        "for n in sys.argv[1:]}))"
    )
    found = json.loads(ask(python, "-c", code, *others).stdout)
    return {name: own.get(name) or found[name] for name in packages}


def reproduced(python: Path, name: str, law: str) -> str:
    """The last line that the reproduction of a cell prints, which must be an error."""
    file = HERE / "reproductions" / f"{name}_{law}.py"
    if not file.exists():
        raise SystemExit(
            f"{name} does not keep the law `{law}`: write {file.relative_to(ROOT)}, "
            "which shows it"
        )
    done = ask(python, file, here=file.parent)
    if done.returncode == 0:
        raise SystemExit(
            f"{file.relative_to(ROOT)} shows nothing: it ends without an error"
        )
    lines = [
        line
        for line in done.stderr.strip().splitlines()
        if line and not line.startswith(" ")
    ]
    return next(
        line for line in reversed(lines) if "Error" in line or "Unsupported" in line
    )[:200]


def cell(python: Path, name: str, law: str, status: str, remark: str) -> dict[str, str]:
    """A cell of the table: what the run says, and what the system says of it."""
    if law in SYSTEMS[name].get("documented", {}):
        if status != "no":
            raise SystemExit(
                f"systems.toml documents `{law}` of {name}, which is {status}: delete "
                "that"
            )
        return {"status": "documented otherwise", "remark": remark}
    if (status, remark) == ("not applicable", "in place by design"):
        return {"status": "in place by design", "remark": ""}
    shown = {"shown": reproduced(python, name, law)} if status == "no" else {}
    return {"status": status, "remark": remark} | shown


def row(name: str) -> dict[str, Any]:
    """Every cell of one system, with versions and the date."""
    python = python_of(SYSTEMS[name]["environment"])
    done = ask(python, "in_environment.py", name)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    cells = json.loads(done.stdout.splitlines()[-1])
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions(python, SYSTEMS[name]["packages"]),
        "cells": {law: cell(python, name, law, *found) for law, found in cells.items()},
    }


def main() -> None:
    """Run, and write both files after every system."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--only",
        action="append",
        choices=[*SYSTEMS, *TABLES],
        help="a row; several are allowed",
    )
    options.add_argument(
        "--page",
        action="store_true",
        help="write the page from results.json, and run nothing",
    )
    chosen = options.parse_args()
    results = (
        json.loads(RESULTS.read_text(encoding="utf-8"))
        if RESULTS.exists()
        else {key: {} for key in ("systems", *TABLES)}
    )
    for name in [] if chosen.page else chosen.only or [*SYSTEMS, *TABLES]:
        print(name, flush=True)
        if name in TABLES:
            results[name] = rows_of(name)
        else:
            results["systems"][name] = row(name)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (ROOT / "docs" / "conformance.md").write_text(
        page.text(results, SYSTEMS), encoding="utf-8"
    )


def rows_of(table: str) -> dict[str, Any]:
    """All rows of a table that a script of its own prints."""
    python = python_of(table)
    done = ask(python, f"{table}.py")
    if done.returncode:
        raise SystemExit(done.stderr)
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions(python, TABLES[table]),
        "rows": json.loads(done.stdout.splitlines()[-1]),
    }


if __name__ == "__main__":
    main()
