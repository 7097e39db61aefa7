"""Weights into a module that several processes train, and gradients out of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsefn._engine.processes import words_of
from sparsefn.core.state import State
from sparsefn.core.tree import Tree, flatten
from sparsefn.nn.attach.parameters import dense_gradient
from sparsefn.nn.modules.calls import check_shape, check_state, tensors_for
from sparsefn.nn.modules.wrappers import mend_of_names, tensors_by_name


@torch.no_grad()
def commit(model: nn.Module, state: State, *, partial: bool = False) -> None:
    """Write the effective weights of a state into the parameters of a module, in place.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> state = sf.State(
    ...     {"weight": torch.tensor([[3.0, 5.0]])},
    ...     {"weight": torch.tensor([[True, False]])},
    ... )
    >>> sf.distributed.commit(model, state)
    >>> model.weight
    Parameter containing:
    tensor([[3., 0.]], requires_grad=True)

    Args:
        model: The module. Names are as in the module without wrappers.
        state: A State. Each process writes the shard that it holds: nothing is sent.
        partial: Whether the state may lack parameters, which then do not change.

    Raises:
        TypeError: `model` is not a module, `state` is not a State, or a weight has
            another dtype than the parameter.
        ValueError: Names are missing or unknown, a weight has another shape or is not
            sharded as the parameter is, or a weight is computed from a masked
            parameter.

    Use it for modules that `sf.modules.call` refuses, as their gradients come from
    hooks of their own: modules under `torch.distributed.fsdp.fully_shard`, tensor
    parallelism and `DistributedDataParallel`. The next forward runs with these weights;
    `grads_of` takes the gradients. Where it raises an error, nothing is written.
    """
    check_state("commit", state, " second")
    weights = tensors_for(model, "parameters", state, partial)
    own = tensors_by_name(model)
    written = {name: weights[name][1] for name in flatten(state.params)[0]}
    for name, weight in written.items():
        _check_fits("commit", name, weight, own[name])
    for name, weight in written.items():
        own[name].copy_(weight)


@torch.no_grad()
def grads_of(model: nn.Module, state: State) -> Tree:
    """Take the gradients off a module, as a tree like the params of a state.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> state = sf.dense().init(sf.modules.params_of(model))
    >>> model(torch.ones(2)).sum().backward()
    >>> sf.distributed.grads_of(model, state), model.weight.grad
    ({'weight': tensor([[1., 1.]])}, None)

    Args:
        model: The module, after backward, on weights that `commit` wrote.
        state: The State.

    Returns:
        A tree laid out as the params. The gradients are what the module's wrapper has
        made of them, averaged over the processes by `fully_shard` and
        `DistributedDataParallel`. The gradient of a parameter that the loss does not
        use is zero.

    Raises:
        TypeError: `model` is not a module, `state` is not a State, or a param has
            another dtype than the parameter.
        ValueError: No parameter has a gradient, the module lacks a name, or a param has
            another shape or is not sharded as the parameter is.

    Where it raises an error, no gradient is taken off.
    """
    check_state("grads_of", state, " second")
    own = tensors_by_name(model)
    leaves, rebuild = flatten(state.params)
    unknown = [name for name in leaves if name not in own]
    if unknown:
        mend = mend_of_names(unknown, own)
        raise ValueError(
            f"grads_of: expected params of the {type(model).__name__}, but unknown "
            f"are {unknown}{mend}"
        )
    for name, leaf in leaves.items():
        check_shape("params", name, leaf, own[name])
        _check_fits("grads_of", name, leaf, own[name])
    if leaves and all(own[name].grad is None for name in leaves):
        raise ValueError(
            "grads_of: expected gradients, but no parameter has one: call it after "
            "backward(), and when gradients are accumulated, after the backward() "
            "that reduces them over the processes"
        )
    grads = [dense_gradient(own[name], leaf) for name, leaf in leaves.items()]
    for name in leaves:
        own[name].grad = None
    return rebuild(grads)


def _check_fits(what: str, name: str, given: Tensor, parameter: Tensor) -> None:
    if given.dtype != parameter.dtype:
        raise TypeError(
            f"{what}: expected params of dtype {parameter.dtype} at {name!r}, got "
            f"{given.dtype}"
        )
    if words_of(given) != words_of(parameter):
        raise ValueError(
            f"{what}: expected params as the module's parameter, "
            f"{words_of(parameter)}, at {name!r}, got one that is {words_of(given)}: "
            "make the state from sf.modules.params_of(model) after the module is "
            "sharded"
        )
