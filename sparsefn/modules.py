"""The edge to `torch.nn`: a module is read, and never written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from sparsefn.axes import check_pattern_axis as check_pattern_axis
from sparsefn.pruned import from_pruned as from_pruned
from sparsefn.sparse_modules import with_sparse_linears
from sparsefn.tree import Tree, flatten
from sparsefn.types import State, effective
from sparsefn.where import float_leaves


def params_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters by name, as `init` takes them.

    >>> list(sf.modules.params_of(torch.nn.Linear(3, 2)))
    ['weight', 'bias']

    Detached copies, in the order of `named_parameters`; tied weights appear once, under their first name.
    """
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's buffers by name, for `call_with_buffers`.

    >>> list(sf.modules.buffers_of(torch.nn.BatchNorm1d(2)))
    ['running_mean', 'running_var', 'num_batches_tracked']

    Detached copies, in the order of `named_buffers`; those that `state_dict` leaves out are in it.
    """
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def call(
    module: nn.Module,
    state_or_params: State | Tree,
    *args: Any,
    buffers: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """Run the module with other weights: the effective ones of a state, or params as they are.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> state = sf.State({"weight": torch.tensor([[3.0, 5.0]])}, {"weight": torch.tensor([[True, False]])})
    >>> sf.modules.call(layer, state, torch.ones(2)), sf.modules.call(layer, state.params, torch.ones(2))
    (tensor([3.]), tensor([8.]))

    Params may be any tree whose dotted paths are the names of the module's parameters. Buffers are the
    module's own, or those given; a forward that changes them (BatchNorm in train mode) changes copies,
    which are dropped: `call_with_buffers` returns them, and says what such buffers need under `vmap`.
    Works under `grad`, `vmap` and `torch.compile`.
    Raises ValueError for names that are unknown or missing and for a tensor of another shape.
    """
    return _run(module, state_or_params, buffers, args, kwargs)[0]


def call_with_buffers(
    module: nn.Module, state_or_params: State | Tree, buffers: Mapping[str, Tensor], *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Run the module as `call` does, and return the buffers that the forward left.

    >>> norm, x = torch.nn.BatchNorm1d(1, momentum=0.5), torch.tensor([[0.0], [4.0]])
    >>> out, buffers = sf.modules.call_with_buffers(norm, sf.modules.params_of(norm), sf.modules.buffers_of(norm), x)
    >>> buffers["running_mean"], buffers["num_batches_tracked"], norm.running_mean
    (tensor([1.]), tensor(1), tensor([0.]))

    The buffers given are not changed. Under `grad` return them as the auxiliary output. Under `vmap` over
    members every member needs its own buffers: stack them (`sf.ensemble.stack([buffers] * B)`) and
    map over them, as a batch of outcomes cannot be written into one unbatched buffer. Raises as `call` does.
    """
    return _run(module, state_or_params, buffers, args, kwargs)


def _run(
    module: nn.Module, state_or_params: State | Tree, buffers: Mapping[str, Tensor] | None, args: Any, kwargs: Any
) -> tuple[Any, dict[str, Tensor]]:
    weights = _weights(module, state_or_params)
    _check_buffers(module, buffers)
    own = dict(module.named_buffers())
    copies = {name: buffer.clone() for name, buffer in (own if buffers is None else buffers).items()}
    # functional_call writes buffers that the forward assigned anew back into the dict it was given.
    tensors = {**weights, **copies}
    out = torch.func.functional_call(module, tensors, args, kwargs)
    return out, {name: tensors[name] for name in copies}


def _weights(module: nn.Module, state_or_params: State | Tree) -> dict[str, Tensor]:
    weights = flatten(effective(state_or_params) if isinstance(state_or_params, State) else state_or_params)[0]
    _check_names(
        module, "parameters", weights, dict(module.named_parameters()), module.named_parameters(remove_duplicate=False)
    )
    return weights


def _check_buffers(module: nn.Module, buffers: Mapping[str, Tensor] | None) -> None:
    if buffers is not None:
        own, every_name = dict(module.named_buffers()), module.named_buffers(remove_duplicate=False)
        _check_names(module, "buffers", buffers, own, every_name)


def _check_names(
    module: nn.Module,
    what: str,
    given: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    every_name: Iterable[tuple[str, Tensor]],
) -> None:
    missing, unknown = [name for name in own if name not in given], [name for name in given if name not in own]
    if missing or unknown:
        first = {id(tensor): name for name, tensor in own.items()}
        tied = [f"{name!r} is tied to {first[id(tensor)]!r}" for name, tensor in every_name if name in unknown]
        raise ValueError(
            f"expected the {what} of the {type(module).__name__}, but missing are {missing} and unknown {unknown}"
            + "".join(f"; {text}" for text in tied)
        )
    for name, tensor in own.items():
        _check_shape(what, name, given[name], tensor)


def _check_shape(what: str, name: str, given: Tensor, like: Tensor) -> None:
    if given.shape != like.shape:
        raise ValueError(f"expected {what} of shape {tuple(like.shape)} at {name!r}, got {tuple(given.shape)}")


def bake(module: nn.Module, state: State | Tree, *, buffers: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A copy of the module that has the effective weights for its own.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> state = sf.State({"weight": torch.tensor([[3.0, 5.0]])}, {"weight": torch.tensor([[True, False]])})
    >>> sf.modules.bake(layer, state)(torch.ones(2)).detach()
    tensor([3.])

    The same outputs as `call`. `requires_grad`, hooks and modes are those of the module, and its buffers, unless
    others are given; tied weights stay tied, and a dtype or device is that of the state. Raises as `call` does.
    """
    weights = _weights(module, state)
    _check_buffers(module, buffers)
    baked = copy.deepcopy(module)
    for name, param in baked.named_parameters():
        param.data = weights[name].detach().clone()
    for name, buffer in baked.named_buffers():
        if buffers is not None:
            buffer.data = buffers[name].detach().clone()
    return baked


def to_sparse(module: nn.Module, state: State, layout: str = "auto", *, blocksize: int | None = None) -> nn.Module:
    """A copy for inference whose sparsified linear layers store and multiply only what is kept.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
    >>> state = sf.static(0.75, where="0.weight").init(sf.modules.params_of(net))
    >>> sf.modules.to_sparse(net, state, "csr")
    Sequential(
      (0): SparseLinear(in_features=8, out_features=4, bias=True, csr, 8 of 32 stored)
      (1): ReLU()
    )

    The outputs are those of `call`, summed in another order. "csr" stores single weights; "bsr" square blocks
    of `blocksize`, or the largest of 32, 16, 8 and 4 of which the mask is made, and csr where the blocks do
    not divide or make up a weight. "auto" takes what was measured to be faster on CPU, dense when in doubt:
    see docs/sparse-execution.md. Dense stay tied weights, dtypes but float32 and float64, every layer but
    `nn.Linear` itself, those with hooks, and those of a `nn.TransformerEncoderLayer`. No parameter of the
    copy requires a gradient. Raises TypeError for anything but a State, ValueError for another layout and a
    blocksize without "bsr", and as `bake` does.
    """
    if not isinstance(state, State):
        raise TypeError(f"expected a State, got {type(state).__name__}; without masks use sf.modules.bake")
    return with_sparse_linears(bake(module, state), flatten(state.masks)[0], layout, blocksize)


def value_and_grad(loss: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, Tree]]:
    """`f(params, ...) -> (value, gradient)` for `loss(params, ...)`.

    >>> f = sf.modules.value_and_grad(lambda params, x: (params["w"] * x).sum())
    >>> f({"w": torch.tensor([1.0, 2.0]), "unused": torch.ones(1)}, torch.tensor([3.0, 4.0]))
    (tensor(11.), {'w': tensor([3., 4.]), 'unused': tensor([0.])})

    The gradient has the structure of params, with zeros for what is not used. With `has_aux` the loss
    returns `(value, aux)` and f `((value, aux), gradient)`; aux is a tree of tensors. Under a transform
    or `torch.compile` this is `torch.func.grad_and_value`, else `torch.autograd.grad`, which is faster;
    results are detached from any graph outside `torch.func` and no `.grad` is touched. They are the same, but
    for the last bits where torch has a formula of its own for a backward that may be differentiated again
    (group norm): see docs/training-step.md. Raises TypeError for params that are not floating point,
    ValueError for a loss that is not 0-d.
    """

    def value_and_gradient(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        leaves, rebuild = list(float_leaves(params).values()), flatten(params)[1]

        def run(inputs: list[Tensor]) -> tuple[Tensor, Tree]:
            return _pair(loss(rebuild(inputs), *args, **kwargs), has_aux)

        differentiate = torch.func.grad_and_value(run, has_aux=True) if _transformed() else _autograd(run)
        grads, (value, aux) = differentiate(leaves)
        return (value, aux) if has_aux else value, rebuild(grads)

    return value_and_gradient


def _transformed() -> bool:
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _pair(result: Any, has_aux: bool) -> tuple[Tensor, Tree]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"expected the loss to return (value, aux), got {type(result).__name__}")
    value, aux = result if has_aux else (result, ())
    if not isinstance(value, Tensor) or value.ndim:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected the loss to be a 0-d tensor, got {got}")
    return value, aux


def _autograd(
    run: Callable[[list[Tensor]], tuple[Tensor, Tree]],
) -> Callable[[list[Tensor]], tuple[Sequence[Tensor], tuple[Tensor, Tree]]]:
    def differentiate(leaves: list[Tensor]) -> tuple[Sequence[Tensor], tuple[Tensor, Tree]]:
        with torch.enable_grad():
            inputs = [leaf.detach().requires_grad_() for leaf in leaves]
            value, aux = run(inputs)
        if value.requires_grad and inputs:
            grads: Sequence[Tensor] = torch.autograd.grad(value, inputs, materialize_grads=True)
        else:  # a loss that uses no param
            grads = [torch.zeros_like(leaf) for leaf in leaves]
        return grads, (value.detach(), optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux))

    return differentiate
