"""A module's tensors by name, and copies of a module with the weights of a state."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from sparsefn.core.state import State
from sparsefn.core.tree import Tree, flatten
from sparsefn.nn.modules.calls import tensors_for
from sparsefn.nn.modules.sparse_linear import Layout, with_sparse_linears
from sparsefn.nn.modules.wrappers import check_not_sharded, own_tensors, tensors_by_name


def params_of(module: nn.Module, *, trainable: bool = False) -> dict[str, Tensor]:
    """A module's parameters by name, as `init` takes them.

    >>> list(sf.modules.params_of(torch.nn.Linear(3, 2)))
    ['weight', 'bias']

    Detached copies, in the order of `named_parameters`; tied weights appear once, under
    their first name. Names are as in the module without `DistributedDataParallel`,
    `torch.compile` and checkpointing wrappers in it, as random draws depend on them.
    With `trainable` only those with `requires_grad`: an optimizer moves all that it is
    given. Then `partial=True` tells `call` and `bake` to take the others from the
    module.

    >>> layer = torch.nn.Linear(2, 1)
    >>> layer.bias.requires_grad_(False).zero_()
    Parameter containing:
    tensor([0.])
    >>> params = sf.modules.params_of(layer, trainable=True)
    >>> (
    ...     list(params),
    ...     sf.modules.call(
    ...         layer, {"weight": torch.ones(1, 2)}, torch.ones(2), partial=True
    ...     ),
    ... )
    (['weight'], tensor([2.]))
    """
    return {
        name: p.detach().clone()
        for name, p in tensors_by_name(module).items()
        if p.requires_grad or not trainable
    }


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's buffers by name, for `call_with_buffers`.

    >>> list(sf.modules.buffers_of(torch.nn.BatchNorm1d(2)))
    ['running_mean', 'running_var', 'num_batches_tracked']

    Detached copies, in the order of `named_buffers`, non-persistent ones included.
    """
    buffers = tensors_by_name(module, "buffers")
    return {name: b.detach().clone() for name, b in buffers.items()}


def bake(
    module: nn.Module,
    state: State | Tree,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    partial: bool = False,
) -> nn.Module:
    """A copy of the module whose parameters are the effective weights.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> state = sf.State(
    ...     {"weight": torch.tensor([[3.0, 5.0]])},
    ...     {"weight": torch.tensor([[True, False]])},
    ... )
    >>> sf.modules.bake(layer, state)(torch.ones(2)).detach()
    tensor([3.])

    The same outputs as `call`. `requires_grad`, hooks and modes are taken from the
    module, and so are buffers that are not given and, with `partial`, parameters that
    the state lacks. Tied weights stay tied. Dtypes and devices are the state's. Raises
    as `call` does.
    """
    new = {"parameters": tensors_for(module, "parameters", state, partial)}
    check_not_sharded("sf.modules.bake", module)
    new["buffers"] = {} if buffers is None else tensors_for(module, "buffers", buffers)
    baked = deep_copy(module)
    for kind, tensors in new.items():
        own = tensors_by_name(baked, kind)
        for name, (_, tensor) in tensors.items():
            own[name].data = tensor.detach().clone()
    return baked


def deep_copy(module: nn.Module) -> nn.Module:
    """A deep copy of a module, also of one in which a hook has left a weight that it
    has computed.

    >>> deep_copy(torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    # Such a tensor is part of a graph, which deepcopy refuses.
    attributes = [value for part in module.modules() for value in vars(part).values()]
    memo: dict[int, object] = {
        id(v): v.detach().clone()
        for v in attributes
        if isinstance(v, Tensor) and not v.is_leaf
    }
    return copy.deepcopy(module, memo)


def to_sparse(
    module: nn.Module,
    state: State,
    layout: Layout = "auto",
    *,
    blocksize: int | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    partial: bool = False,
) -> nn.Module:
    """A copy for inference whose linear layers store and multiply only kept weights.

    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
    >>> state = sf.static(0.75, where="0.weight").init(sf.modules.params_of(net))
    >>> sf.modules.to_sparse(net, state, "csr")
    Sequential(
      (0): SparseLinear(in_features=8, out_features=4, bias=True, csr, 8 of 32 stored)
      (1): ReLU()
    )

    The outputs are those of `call`, summed in another order. "csr" stores single
    weights; "bsr" square blocks of `blocksize`, or the largest of 32, 16, 8 and 4 that
    the mask consists of, and csr for a weight that blocks do not divide or make up.
    "auto" takes the layout that measured faster on CPU, dense when in doubt: see
    docs/sparse-execution.md. "semi" makes each weight
    `torch.sparse.to_sparse_semi_structured` of it, for GPUs that skip the zeros of 2:4
    masks (`sf.patterns.nm(2, 4)`); the layer stays an `nn.Linear`.

    Tied weights stay dense, and so do layers other than `nn.Linear` itself, layers with
    hooks, the layers of an `nn.TransformerEncoderLayer` and, but for "semi", dtypes
    other than float32 and float64. No parameter of the copy requires a gradient;
    `buffers` and `partial` are those of `bake`. Raises TypeError for anything but a
    State, ValueError for another layout and a blocksize without "bsr", and as `bake`
    does. With "semi", ValueError names the path of a weight that is not float16 or
    bfloat16, has sides that 16 does not divide, has a mask that keeps more than 2 of 4
    inputs, or is not on a CUDA device of compute capability 8.0 or higher, and
    RuntimeError that of one that torch refuses.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"expected a State, got {type(state).__name__}; without masks use "
            "sf.modules.bake"
        )
    baked = bake(module, state, buffers=buffers, partial=partial)
    masks = flatten(state.masks)[0]
    paths = {
        name: path for name, (path, _) in own_tensors(module, "parameters").items()
    }
    return with_sparse_linears(
        baked, {paths[name]: mask for name, mask in masks.items()}, layout, blocksize
    )
