"""The site: it builds without a warning, and what must stop `make docs` does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[1]


def built(docs: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A build as `make docs` makes it, with more options."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-E", "-q"]
    command += ["-b", "html", "-d", str(out / "doctrees"), *options]
    command += [str(docs), str(out / "site")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)


def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    # the code of other pages is run by tests/test_docs.py
    done = built(ROOT / "docs", tmp_path, "-t", "tutorials_alone")
    assert done.returncode == 0, done.stderr[-4000:]
    site = tmp_path / "site"
    assert all(
        (site / name).is_file()
        for name in ("index.html", "objects.inv", "searchindex.js", "api.html")
    )
    first = (site / "tutorials" / "first.html").read_text(encoding="utf-8")
    assert "printed" in first and "accuracy: 0." in first
    names = (site / "reference" / "algorithms.html").read_text(encoding="utf-8")
    assert (
        'id="sparsefn.rigl"' in names
        and "_modules/sparsefn/algorithms/drop_grow.html#rigl" in names
    )
    assert 'href="../bibliography.html#evci2020rigging"' in names and "`" not in names


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a build says of docs with mistakes: most pages are left out, and the others
    are spoiled.
    """
    root = tmp_path_factory.mktemp("spoiled")
    docs = root / "docs"
    shutil.copytree(ROOT / "docs", docs)
    (root / "tests").symlink_to(ROOT / "tests")
    for page in docs.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text("# A page\n" if "```python" in text else text, encoding="utf-8")
    (docs / "glossary.md").write_text(
        "# Glossary\n\n```python\nx = 1\n1 / 0\n```\n\n[a](gone.md) [b](api.md#gone) "
        "arXiv 9901.00001\n"
    )
    (docs / "reference" / "report.md").write_text("# Reports\n")
    (docs / "lost.md").write_text("# Lost\n")
    with open(docs / "conf.py", "a") as conf:
        conf.write("\nsf.report.plan.__doc__ = None\n")
    done = built(docs, root / "out")
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "glossary.md:5: WARNING: a block raised ZeroDivisionError('division by zero')",
        "cross-reference target not found: 'gone.md'",
        "local id not found in doc 'api': 'gone'",
        "WARNING: sparsefn.report.plan has no docstring",
        "WARNING: sparsefn.report.flops is on no page of docs/reference",
        "lost.md: WARNING: document isn't included in any toctree",
        "arXiv 9901.00001 is not in references.bib",
    ],
)
def test_a_mistake_stops_it(broken: str, text: str) -> None:
    assert text in broken
