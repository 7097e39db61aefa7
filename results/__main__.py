"""Command line: `python -m results`."""

import argparse
import json
from pathlib import Path

from results import data, figures, page, runner, store, summary
from results.jobs import TINY, Plan

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"


def main() -> None:
    """Run, and make the page and the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m results", description="Measure published claims."
    )
    add = parser.add_argument
    add(
        "--workers",
        type=int,
        default=2,
        help="processes of one thread each (default: 2); numbers do not depend on it",
    )
    add(
        "--tiny",
        action="store_true",
        help="one seed and a few steps of everything; give other folders",
    )
    add(
        "--page",
        action="store_true",
        help="run nothing: the page and the figures of the rows that are there",
    )
    add("--numbers", type=Path, default=HERE / "numbers", help="folder of the rows")
    add("--docs", type=Path, default=DOCS, help="folder of the page and the figures")
    chosen = parser.parse_args()
    if chosen.workers < 1:
        parser.error(f"--workers must be at least 1, got {chosen.workers}")
    if chosen.tiny and (chosen.numbers == HERE / "numbers" or chosen.docs == DOCS):
        parser.error("--tiny needs other folders: --numbers FOLDER --docs FOLDER")
    if not chosen.page and (names := data.missing()):
        parser.error(f"{' and '.join(names)} missing: {data.INSTALL}")
    plan = TINY if chosen.tiny else Plan()
    try:
        if not chosen.page:
            runner.everything(chosen.numbers, plan, chosen.workers)
    except KeyboardInterrupt:
        parser.exit(
            130, "stopped; the same command goes on, and --page shows what is there\n"
        )
    write(chosen.numbers, chosen.docs, plan)


def write(numbers: Path, docs: Path, plan: Plan) -> None:
    """The summary of the rows, and from it the page and the figures."""
    found = summary.summarised(store.read(numbers, runner.VERSIONS), plan)
    (numbers / "summary.json").write_text(
        json.dumps(found, indent=1) + "\n", encoding="utf-8"
    )
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "results.md").write_text(page.text(found), encoding="utf-8")
    figures.draw(found, docs)


if __name__ == "__main__":
    main()
