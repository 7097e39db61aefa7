"""What laws share: leaves by path, comparison by bits, runs, and a counter of tensor work."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparsefn as sf
from property_tests.strategies import Case, Tree
from sparsefn.tree import flatten


def leaves(tree: Tree) -> dict[str, Tensor]:
    """`{dotted path: leaf}`, the leaves as they are: a checkpoint's would be copies of what is a view."""
    return flatten(tree)[0]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor; every NaN counts as the same."""
    if x.is_floating_point():
        x = torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x)
    return x.contiguous().view(_INTEGERS[x.element_size()])


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def assert_same(what: str, a: Tree, b: Tree) -> None:
    """Two trees have the same paths and the same bits."""
    left, right = leaves(a), leaves(b)
    assert set(left) == set(right), f"{what}: other leaves: {sorted(set(left) ^ set(right))}"
    for path, leaf in left.items():
        assert equal(leaf, right[path]), f"{what}: differs at {path}:\n{leaf}\n{right[path]}"


def digest(tree: Tree) -> str:
    """A hash of the bits of all leaves."""
    found = hashlib.blake2b()
    for path, leaf in leaves(tree).items():
        found.update(path.encode() + bits(leaf).numpy().tobytes())
    return found.hexdigest()


def sparse(state: sf.State) -> dict[str, Tensor]:
    """The masks of the sparsified leaves."""
    return {path: mask for path, mask in leaves(state.masks).items() if mask.ndim}


def updates(algorithm: sf.Algorithm, case: Case, step: Callable[[int], Any] = int) -> Iterator[sf.State]:
    """The state after init, and after each update."""
    state = algorithm.init(case.params)
    yield state
    for i, grads in enumerate(case.grads):
        state = algorithm.update(state, grads, step(i))
        yield state


class Work(TorchDispatchMode):
    """Counts the tensor operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def hold(name: str, law: Callable[[Any], None], examples: Any, share: float = 1.0, shrink: bool = True) -> None:
    """Try a law on drawn examples: always the same ones for a name, unless the profile searches.

    `share` is the part of the profile's examples that are drawn; without `shrink` the first failure is reported as
    it comes.
    """
    tried = given(examples)(lambda example: law(example))
    if settings.default.derandomize:
        tried = seed(zlib.crc32(name.encode()))(tried)
    settings(
        max_examples=math.ceil(share * settings.default.max_examples),
        phases=list(Phase) if shrink else [Phase.generate],
        report_multiple_bugs=shrink,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        database=None,
    )(tried)()
