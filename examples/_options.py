"""What the command lines of the examples share."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import sparsefn as sf


class Kept(NamedTuple):
    """How much of each weight stays: a fraction of zeros, or n of every m inputs."""

    name: str
    sparsity: float | None
    pattern: sf.patterns.Pattern | None


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
        raise argparse.ArgumentTypeError(
            f"expected a fraction between 0 and 1, got {text}"
        )
    return float(text)


def level(text: str) -> Kept:
    """An argparse type: a fraction of zeros, or n:m."""
    if not (found := re.fullmatch(r"(\d+):(\d+)", text)):
        try:
            sparsity = fraction(text)
        except ValueError:
            expected = "expected a fraction of zeros between 0 and 1, or n:m, got"
            raise argparse.ArgumentTypeError(f"{expected} {text!r}") from None
        return Kept(f"{100 * sparsity:g}%", sparsity, None)
    try:
        return Kept(text, None, sf.patterns.nm(int(found[1]), int(found[2])))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_folder(parser: argparse.ArgumentParser, out: Path) -> None:
    """Make the folder for the output, or exit with an error message."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")
