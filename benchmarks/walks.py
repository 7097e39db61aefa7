"""How far a gradient walks: calls from one file of the library to another in one update of RigL with SGD.

`python benchmarks/walks.py` prints the files, the calls between them, and the most frequent pairs. An update in which
the masks change is counted, of two linear layers with biases, 784 to 300 to 10, and one in which they stay.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import sparsefn as sf

PACKAGE = str(Path(sf.__file__).parent)


def walks(run: Any) -> tuple[set[str], Counter[tuple[str, str]]]:
    """The files of the library that a call visits, and how often each calls into another."""
    rooms: set[str] = set()
    moves: Counter[tuple[str, str]] = Counter()

    def inside(frame: FrameType | None) -> str | None:
        # A comprehension or a function of Python's own library is part of the file that calls it.
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        return None if frame is None else frame.f_code.co_filename[len(PACKAGE) + 1 : -3]

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        here, origin = inside(frame), inside(frame.f_back)
        assert here is not None
        rooms.add(here)
        if origin is not None and origin != here:
            moves[origin, here] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return rooms, moves


def network() -> dict[str, torch.Tensor]:
    sizes = {"0.weight": (300, 784), "0.bias": (300,), "1.weight": (10, 300), "1.bias": (10,)}
    draw = torch.Generator().manual_seed(0)
    return {path: torch.randn(size, generator=draw) for path, size in sizes.items()}


def main() -> None:
    torch.set_num_threads(1)  # a second thread shares out the same work
    algorithm = sf.with_optimizer(sf.rigl(0.9, when=sf.at([1])), sf.optimizers.sgd(0.1, momentum=0.9))
    params = network()
    state = algorithm.init(params)
    state = algorithm.update(state, params, 0)
    for what, step in (("masks change", 1), ("masks stay", 2)):
        rooms, moves = walks(lambda step=step: algorithm.update(state, params, step))
        print(f"{what}: {len(rooms)} files, {sum(moves.values())} calls between them")
        for (origin, here), n in moves.most_common(12 if "change" in what else 4):
            print(f"  {n:4}  {origin} -> {here}")


if __name__ == "__main__":
    main()
