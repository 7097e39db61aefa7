"""`python -m sparsefn.testing module:factory`: the laws from the command line.

Exits with 0 where all checks hold, 1 where one fails, and 2 where it is called wrongly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsefn.testing.check import check_laws
from sparsefn.testing.meta import Meta, imported


def main(given: Sequence[str] | None = None) -> int:
    """Check the algorithm that a command line names, and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m sparsefn.testing", description=__doc__
    )
    parser.add_argument(
        "factory",
        help="module:function of (sparsity, key), or of (sparsity, key, params)",
    )
    parser.add_argument("--meta", metavar="MODULE:NAME", help="its sf.testing.Meta")
    parser.add_argument(
        "--suggest", action="store_true", help="look for the Meta that would hold"
    )
    parser.add_argument(
        "--examples",
        type=int,
        default=25,
        metavar="N",
        help="examples of a check, at most",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="where examples begin"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report there, too"
    )
    args = parser.parse_args(given)
    try:
        make = _found(args.factory)
        meta = _found(args.meta) if args.meta else Meta()
        options: dict[str, Any] = {
            "max_examples": args.examples,
            "seed": args.seed,
            "suggest": args.suggest,
        }
        check_laws(make, meta=meta, laws=())  # says what is wrong with these
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    report = check_laws(make, meta=meta, on_fail="report", **options)
    print(report)
    if args.json:
        args.json.write_text(report.to_json() + "\n", encoding="utf-8")
    return 0 if report.ok else 1


def _found(target: str) -> Any:
    if not all(target.partition(":")):
        raise ValueError(f"expected module:name, got {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return imported(target)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
