"""Helpers of the laws: leaves by path, comparison by bits, runs, counted operations."""

from __future__ import annotations

import hashlib
import math
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as start_from
from hypothesis.strategies import SearchStrategy as Examples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsefn.algorithms.combine import with_optimizer
from sparsefn.core.checks import uncalled
from sparsefn.core.random import key
from sparsefn.core.state import Algorithm, State, has_optimizer
from sparsefn.core.tree import flatten
from sparsefn.core.triggers import never
from sparsefn.optim import Optimizer, sgd
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.meta import Row
from sparsefn.typing import Step, Tree

T = TypeVar("T")


def leaves(tree: Tree) -> dict[str, Tensor]:
    """`{dotted path: leaf}`, the leaves themselves: a checkpoint copies views."""
    return flatten(tree)[0]


def bits_of(x: Tensor) -> Tensor:
    """The bytes of each entry, in a last dimension; every NaN counts as the same."""
    if x.is_floating_point():
        x = torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x)
    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def equal(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and torch.equal(
        bits_of(a), bits_of(b)
    )


def assert_same(what: str, a: Tree, b: Tree) -> None:
    """Two trees have the same paths and the same bits."""
    left = leaves(a)
    right = leaves(b)
    assert set(left) == set(right), (
        f"{what}: other leaves: {sorted(set(left) ^ set(right))}"
    )
    for path, leaf in left.items():
        assert equal(leaf, right[path]), (
            f"{what}: differs at {path}:\n{leaf}\n{right[path]}"
        )


def hash_of(tree: Tree) -> str:
    """A hash of the bits of all leaves."""
    found = hashlib.blake2b()
    for path, leaf in leaves(tree).items():
        found.update(path.encode() + bytes(bits_of(leaf).reshape(-1).tolist()))
    return found.hexdigest()


def sparse(state: State) -> dict[str, Tensor]:
    """The masks of the sparsified leaves."""
    return {path: mask for path, mask in leaves(state.masks).items() if mask.ndim}


def algorithm_of(row: Row, case: Case) -> Algorithm:
    """The algorithm of a row at the sparsity and key of a run."""
    made = row.make(case.sparsity, key(case.seed), case.params)
    check_made(row.name, made)
    return made


def check_made(name: str, made: object) -> None:
    """Raise TypeError where a function makes no algorithm.

    >>> check_made("mine", None)
    Traceback (most recent call last):
        ...
    TypeError: expected mine to return an Algorithm, got None; a pair of functions is
    sf.Algorithm(init, update)
    """
    if not isinstance(made, Algorithm):
        if made is None:
            got = "None"
        else:
            got = uncalled(made) or type(made).__name__
        raise TypeError(
            f"expected {name} to return an Algorithm, got {got}; a pair of functions "
            "is sf.Algorithm(init, update)"
        )


def trained_of(
    row: Row, case: Case, optimizer: Optimizer = sgd(0.25, momentum=0.5)
) -> Algorithm:
    """The same with an optimizer, where it has none: else no gradient reaches what it
    trains, and no term is read.
    """
    algorithm = algorithm_of(row, case)
    own = has_optimizer(algorithm.init(case.params))
    if own:
        return algorithm
    return with_optimizer(algorithm, optimizer, skip=never())


def mapped(
    case: Case,
    of_params: Callable[[Tree], Tree],
    of_grads: Callable[[Tree], Tree] | None = None,
) -> Case:
    """The run with what functions make of its params and gradients; one function for
    both where the other is None.
    """
    return case._replace(
        params=of_params(case.params),
        grads=tuple(map(of_grads or of_params, case.grads)),
    )


def updates(
    algorithm: Algorithm, case: Case, step: Callable[[int], Step] = int
) -> Iterator[State]:
    """The state after init, and after each update."""
    state = algorithm.init(case.params)
    yield state
    for i, grads in enumerate(case.grads):
        state = algorithm.update(state, grads, step(i))
        yield state


def states_of(row: Row, case: Case) -> list[State]:
    """The states of the algorithm of a row in a run."""
    return list(updates(algorithm_of(row, case), case))


def generators(numpy: bool = True) -> list[object]:
    """The states of the global generators of torch's CPU, of `random` and, if asked
    for, of NumPy.
    """
    return [
        bytes(torch.get_rng_state().numpy()),
        random.getstate(),
        repr(np.random.get_state()) if numpy else "",
    ]


def memory_of(x: Tensor) -> tuple[object, ...]:
    """Where the entries of a tensor are in memory, and as what."""
    return (
        x.untyped_storage().data_ptr(),
        x.storage_offset(),
        x.shape,
        x.stride(),
        x.dtype,
    )


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensor operations that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def hold(
    name: str,
    law: Callable[[T], None],
    examples: Examples[T],
    tries: float,
    seed: int | None = 0,
    shrink: bool = True,
) -> None:
    """Try a law on drawn examples: the same ones for a name and a seed, new ones each
    time without a seed.

    >>> from hypothesis import strategies as st
    >>> hold("small", lambda n: None, st.integers(), 5)

    Without `shrink` the first failure is reported as it comes.
    """
    tried = given(examples)(lambda example: law(example))
    if seed is not None:
        tried = start_from(zlib.crc32(f"{name} {seed}".encode()))(tried)
    settings(
        max_examples=max(1, math.ceil(tries)),
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        report_multiple_bugs=shrink,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.nested_given,
        ],
        deadline=None,
        database=None,
    )(tried)()
