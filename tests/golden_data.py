"""Recorded outputs of the systems that sparsefn is held against:
`tests/golden/<system>.json` and `.npz`.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


class Case(NamedTuple):
    id: str
    args: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    value: Any  # None where nothing was recorded besides tensors


@cache
def _system(system: str) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    with np.load(GOLDEN / f"{system}.npz") as arrays:
        return json.loads((GOLDEN / f"{system}.json").read_text(encoding="utf-8"))[
            "cases"
        ], dict(arrays)


def functions(system: str) -> list[str]:
    """The names of everything that was recorded of a system, in the order of the
    file.
    """
    return list(dict.fromkeys(case["fn"] for case in _system(system)[0]))


def cases(system: str, fn: str) -> list[Case]:
    """All recorded cases of one function of a system, as fresh tensors; LookupError if
    there are none.
    """
    records, arrays = _system(system)
    found = []
    for record in records:
        if record["fn"] == fn:
            names = [record.get("inputs", []), record.get("outputs", [])]
            inputs, outputs = (
                {n: torch.tensor(arrays[f"{record['id']}/{n}"]) for n in group}
                for group in names
            )
            found.append(
                Case(record["id"], record["args"], inputs, outputs, record.get("value"))
            )
    if not found:
        raise LookupError(
            f"no recorded case of {fn!r} in {system}, which has {functions(system)}"
        )
    return found
