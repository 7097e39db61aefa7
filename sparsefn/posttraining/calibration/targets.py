"""What a layer answered before it was pruned, for those who train it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import optree
from torch import Tensor

from sparsefn.core.checks import check_call
from sparsefn.core.state import State
from sparsefn.core.tree import Tree, check_like, leaves_of, wide
from sparsefn.nn.modules.calls import Call, quiet_call
from sparsefn.nn.modules.params import buffers_of
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.cache import CachedTree, read_tree

Compare = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Errors = Callable[[Compare], Iterator[Callable[[Any], Tensor]]]
Recover = Callable[[State, Errors], State]


def errors_of(
    part: Named,
    calls: Callable[[], Iterable[Call]],
    before: Sequence[CachedTree],
    tokens: Sequence[Tensor | None] = (),
) -> Errors:
    """The errors of a part of a model against what it returned before, as functions of
    its params: one a call, for a loss of (student, teacher, tokens).

    A part of 16 bits runs in float32: in float16 the gradient of a mean over many
    outputs would be 0.

    >>> import torch
    >>> from sparsefn.posttraining.calibration.cache import cache_tree, in_memory
    >>> part = Named.of(torch.nn.Linear(2, 1, bias=False))
    >>> before = [cache_tree(torch.zeros(5, 1), in_memory)]
    >>> errors = errors_of(part, lambda: [((torch.ones(5, 2),), {})], before)
    >>> [e({"weight": torch.ones(1, 2)}) for e in errors(sf.recovery.mean_square)]
    [tensor(4.)]
    """

    def errors(loss: Compare) -> Iterator[Callable[[Tree], Tensor]]:
        counted = itertools.chain(tokens, itertools.repeat(None))
        for call, old, own in zip(calls(), before, counted, strict=False):
            teacher = first_floats(read_tree(old))
            yield partial(_error, part, loss, call, teacher, own)

    return errors


def _error(
    part: Named,
    loss: Compare,
    call: Call,
    teacher: Tensor,
    tokens: Tensor | None,
    params: Mapping[str, Tensor],
) -> Tensor:
    args, kwargs = in_float32(call)
    run = quiet_call(part, in_float32(params), in_float32(buffers_of(part.module)))
    return loss(first_floats(run((args, kwargs))), wide(teacher), tokens)


def in_float32(tree: Any) -> Any:
    """The tree with its floating-point tensors in float32, or as they are if wider.

    >>> import torch
    >>> in_float32((torch.ones(1, dtype=torch.float16), 2))
    (tensor([1.]), 2)
    """
    return optree.tree_map(_wide_if_floats, tree)


def _wide_if_floats(x: Any) -> Any:
    return wide(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def check_recover(recover: Recover) -> None:
    """Raise TypeError for what is no function of (state, errors), as a loss is none.

    >>> check_recover(sf.recovery.mean_square)
    Traceback (most recent call last):
        ...
    TypeError: expected recover to be a function of (state, errors), got a loss of
    (student, teacher): write recover=sf.recovery.blockwise(optimizer, loss=...)
    """
    check_call("recover", recover, "state", "errors")
    names = tuple(inspect.signature(recover).parameters)[:2]
    if names in (("student", "teacher"), ("input", "target")):
        raise TypeError(
            "expected recover to be a function of (state, errors), got a loss of "
            f"({', '.join(names)}): write recover=sf.recovery.blockwise(optimizer, "
            "loss=...)"
        )


def recovered_with(state: State, recover: Recover, errors: Errors) -> State:
    """The state with the params that a training of its part gives.

    >>> import torch
    >>> state = sf.dense().init({"a": torch.ones(2)})
    >>> recovered_with(state, lambda state, errors: state, lambda loss: iter(())).params
    {'a': tensor([1., 1.])}
    """
    done = recover(state, errors)
    if not isinstance(done, State):
        raise TypeError(
            f"in_order: expected recover to give a State, got {type(done).__name__}"
        )
    check_like("the params that recover gives", done.params, state.params)
    return state._replace(params=done.params)


def first_floats(out: Tree) -> Tensor:
    """The first floating-point tensor of what a part returns.

    >>> import torch
    >>> first_floats((torch.arange(2), torch.ones(1)))
    tensor([1.])
    """
    for leaf in leaves_of(out):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError(
        "in_order: expected a layer that returns a floating-point tensor with recover, "
        f"got {type(out).__name__}"
    )
