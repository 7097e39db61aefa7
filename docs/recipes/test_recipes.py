"""Every recipe runs: its Python blocks, joined to one script, in a process of its
own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import runnable

FOLDER = Path(__file__).parent
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem != "index")
# a page with this line is started by torchrun, on so many ranks
PROCESSES = re.compile(r"<!-- processes: (\d+) -->")


def script(text: str) -> str:
    """The page's code, each line at its own number so that a traceback shows where it
    stands on the page.
    """
    lines = [""] * len(text.splitlines())
    for block in runnable(text):
        code = block.code.splitlines()
        lines[block.line - 1 : block.line - 1 + len(code)] = code
    # docs/distributed.md says why: torch may abort at the interpreter's end
    if PROCESSES.search(text):
        lines += ["import os, sys", "sys.stdout.flush(), os._exit(0)"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # not the name of the page: a module may have it
    path = tmp_path / "recipe.py"
    path.write_text(script(text), encoding="utf-8")
    start = [sys.executable]
    if ranks := PROCESSES.search(text):
        start += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks[1]}",
        ]
    # One thread: small models only lose with more, above all beside other work.
    added = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, path.name],
        cwd=tmp_path,
        env=os.environ | added,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_the_index_names_every_page() -> None:
    named = re.findall(
        r"\]\((\w+)\.md\)", (FOLDER / "index.md").read_text(encoding="utf-8")
    )
    assert sorted(named) == [page.stem for page in PAGES]
