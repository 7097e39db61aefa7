"""What the command lines of the examples share."""

import argparse
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return int(text)

    return integer


def fraction(text: str) -> float:
    """An argparse type: neither dense nor empty."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a fraction of zeros between 0 and 1, got {text}")
    return float(text)


def make_folder(parser: argparse.ArgumentParser, out: Path) -> None:
    """Make the folder for the output, or exit with an error message."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")
