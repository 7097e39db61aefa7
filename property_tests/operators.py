"""The thirteenth law: `torch.library.opcheck` of each operator that the library
defines, on inputs of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import sparsefn as sf
import sparsefn.posttraining.solve as solve

# What opcheck does with each: is the schema true, does the fake kernel say the shapes,
# does it compile for any sizes.
UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
KEY, W = sf.random.key(3), torch.linspace(-1, 1, 24).reshape(4, 6)
NARROW, FLAGS = W.to(torch.bfloat16), W > 0
HESSIAN = W[:, :].T @ W + torch.eye(6)

INPUTS: Mapping[str, Sequence[tuple[Any, ...]]] = {
    "elementary": [
        ("power", W.abs().double() + 0.5, torch.tensor(2.5, dtype=torch.float64))
    ],
    "mask_bytes": [([FLAGS, FLAGS[0]],)],
    "member_product": [(W, W.T), (W.T, W[:, 0])],
    "obs_exact": [
        (W, HESSIAN, [], 0, 9, 0.01),
        (W, HESSIAN, [], 3, 1, 0.01),
        (W, HESSIAN, [1, 2, 0, 6], 0, 6, 0.01),
    ],
    "pool": [
        (W, [2, 3], "mean", 0.0),
        (NARROW, [1, 6], "sum", 0.0),
        (W.double(), [4, 1], "max", 0.0),
    ],
    "proximal_sizes": [
        (W.abs().double().sort(0, descending=True).values, 2, torch.tensor(0.5)),
        (W[:2].abs().double().flip(1), 1, torch.tensor(0.5, dtype=torch.float64)),
    ],
    "refit": [(W, HESSIAN, FLAGS, 0.01, None), (W, HESSIAN, FLAGS, 0.01, 2 * W)],
    "reinterpreted": [(W, torch.int32), (NARROW, torch.int16)],
    "swaps": [
        (W, HESSIAN, FLAGS, None, [1, 1], [1, 3], 5),
        (W, HESSIAN, FLAGS, W < 0.5, [1, 1], [2, 6], 5),
        (W, HESSIAN, W[:1].expand(4, 6) > 0, None, [4, 1], [1, 6], 5),
    ],
    "threefry2x32": [
        (KEY, None, 5, "uniform", torch.float32),
        (torch.stack([KEY, KEY + 1]), torch.arange(4), 4, "uniform", torch.float64),
    ],
    "widened": [(NARROW,), (NARROW[:0],)],
    "winners": [
        ([W.reshape(1, -1)], [None], [None], [True], torch.tensor([5]), [1], False),
        (
            [W.reshape(1, -1), W[:1] * 2],
            [None, None],
            [None, None],
            [False, True],
            torch.tensor([3, 2]),
            [1, 1],
            False,
        ),
        (
            [W.reshape(1, -1), W[:1] * 2],
            [None, None],
            [None, None],
            [True, True],
            torch.tensor([7]),
            [1],
            True,
        ),
    ],
}


def operators() -> list[str]:
    """The names of all operators that the library has defined so far."""
    assert solve  # which defines two of them
    names = torch._C._dispatch_get_all_op_names()
    return sorted(
        {
            name.split("::")[1].split(".")[0]
            for name in names
            if name.startswith("sparsefn::")
        }
    )


def operators_are_sound(operator: Any, inputs: Sequence[tuple[Any, ...]]) -> None:
    """Schema, fake kernel and compiled code of an operator say the truth;
    AssertionError where one does not.
    """
    for given in inputs:
        found = torch.library.opcheck(
            operator, given, test_utils=UTILITIES, raise_exception=False
        )
        failed = {name: result for name, result in found.items() if result != "SUCCESS"}
        assert not failed, f"{operator}: {failed}"
