"""Run by the Python of an environment: `in_environment.py ADAPTER` prints the cells of
one system as JSON.
"""

import importlib
import json
import sys
import warnings

import laws


def main(name: str) -> None:
    """Print one line, the last: versions are asked by the front script."""
    warnings.simplefilter("ignore")  # of peers, at each other
    adapter = importlib.import_module(f"adapters.{name}")
    subject = importlib.import_module(
        getattr(adapter, "FRAMEWORK", "in_torch")
    ).subject(adapter)
    print("\n" + json.dumps(laws.check(subject)))


if __name__ == "__main__":
    main(sys.argv[1])
