"""What makes sure that a smaller program is right: operations are tried out, and all sizes compared."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsefn.shrinking.change import Resizing, refused
from sparsefn.shrinking.values import Value, run_op, values_in


def check_operation(change: Resizing) -> None:
    """Refuse an operation that does not give the same where entries of its inputs are left out.

    It runs on random numbers, with the constants that go in their places: an operation that no rule is about.
    """
    draw, ins = torch.Generator().manual_seed(0), values_in(change.values)
    given = {**change.values, "device": torch.device("cpu")} if "device" in change.values else change.values
    whole = [_sample(change, value, draw) for value in ins]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            wanted = run_op(change.node.target, given, [_filled(change, v, x) for v, x in zip(ins, whole, strict=True)])
            got = run_op(change.node.target, given, [_left(change, v, x) for v, x in zip(ins, whole, strict=True)])
    except Exception as error:  # operations fail in any way
        change.refuse(str(error).strip().split("\n")[0])
    for value, a, b in zip(change.outs, wanted, got, strict=True):
        left = _left(change, value, a)
        if left.shape != b.shape or not torch.allclose(left.double(), b.double(), 1e-9, 1e-9, equal_nan=True):
            change.refuse("without them it gives something else")


def _sample(change: Resizing, value: Value, draw: torch.Generator) -> Tensor:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return torch.randn(
            value.shape,
            generator=draw,
            device="cpu",
            dtype=torch.complex128 if value.dtype.is_complex else torch.float64,
        )
    if value.dtype == torch.bool:
        return torch.randint(2, value.shape, generator=draw, device="cpu", dtype=torch.bool)
    if value.real is None:
        change.refuse("its result depends on integers that depend on inputs")
    return value.real.cpu()


def _filled(change: Resizing, value: Value, x: Tensor) -> Tensor:
    # With the constants that are known of what goes.
    for d in change.lost(value):
        constants = value.gone[d]
        if constants is not None and x.dtype.is_floating_point:
            known = ~change.kept(value, d) & np.isfinite(constants)
            line = [-1 if e == d else 1 for e in range(x.ndim)]
            fill = torch.from_numpy(np.where(known, constants, 0.0)).reshape(line)
            x = torch.where(torch.from_numpy(known).reshape(line), fill, x)
    return x


def _left(change: Resizing, value: Value, x: Tensor) -> Tensor:
    for d in change.lost(value):
        x = x.index_select(d, torch.from_numpy(change.kept(value, d)).nonzero().flatten())
    return x


def check_sizes(program: fx.GraphModule, sizes: Mapping[fx.Node, list[list[int]]]) -> None:
    """Refuse a program in which a tensor has another shape than expected, or that does not run.

    It runs without values, at the sizes of the example.
    """
    mode = FakeTensorMode()
    run, log = _Sizes(program, sizes, mode), logging.getLogger("torch._subclasses.fake_tensor")
    with mode, torch.no_grad(), mock.patch.object(log, "disabled", True):  # what fails is said by the error
        inputs = [_input(node.meta.get("val"), sizes[node]) for node in program.graph.find_nodes(op="placeholder")]
        run.run(*inputs, enable_io_processing=False)


def _input(val: Any, sizes: list[list[int]]) -> Any:
    return torch.empty(sizes[0], dtype=val.dtype, device=val.device) if isinstance(val, Tensor) else val


class _Sizes(fx.Interpreter):
    def __init__(self, program: fx.GraphModule, sizes: Mapping[fx.Node, list[list[int]]], mode: FakeTensorMode) -> None:
        super().__init__(program)
        self.sizes, self.mode, self.extra_traceback = sizes, mode, False

    def fetch_attr(self, target: str) -> Any:
        held = super().fetch_attr(target)
        return self.mode.from_tensor(held) if isinstance(held, Tensor) else held

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None  # checks of the inputs

    def run_node(self, n: fx.Node) -> Any:
        try:
            made = super().run_node(n)
        except Exception as error:  # operations fail in any way
            raise refused(n, str(error).strip().split("\n")[0]) from error
        parts = [x for x in (made if isinstance(made, list | tuple) else [made]) if isinstance(x, Tensor)]
        empty = all(0 in x.shape for x in parts) and all(0 in size for size in self.sizes.get(n, []))  # nothing to read
        if (
            n.op == "call_function"
            and n in self.sizes
            and not empty
            and [list(x.shape) for x in parts] != self.sizes[n]
        ):
            raise refused(n, f"it gives shapes {[list(x.shape) for x in parts]}, where {self.sizes[n]} are expected")
        return made
