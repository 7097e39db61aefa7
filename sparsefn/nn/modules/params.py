"""A module's tensors by name, and copies of a module with the weights of a state."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from sparsefn.core.state import State
from sparsefn.core.tree import Tree, check_not_meta, flatten
from sparsefn.nn.modules.calls import tensors_for
from sparsefn.nn.modules.sparse_linear import Layout, with_sparse_linears
from sparsefn.nn.modules.wrappers import check_not_sharded, own_tensors, tensors_by_name


def params_of(module: nn.Module, *, trainable: bool = False) -> dict[str, Tensor]:
    """A module's parameters by name, as `init` takes them.

    >>> list(sf.modules.params_of(torch.nn.Linear(3, 2)))
    ['weight', 'bias']

    Args:
        module: The module. Names are as in the module without
            `DistributedDataParallel`, `torch.compile` and checkpointing wrappers, as
            random draws depend on them.
        trainable: Whether to leave out parameters that require no gradient: an
            optimizer moves all that it is given. Then `partial=True` tells `call` and
            `bake` to take the others from the module.

    Returns:
        Dict of detached copies, in the order of `named_parameters`. Tied weights appear
        once, under their first name.

    Raises:
        TypeError: `module` is not a module.
        ValueError: A lazy layer has no shape yet.

    With a frozen bias:

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

    Args:
        module: The module.

    Returns:
        Dict of detached copies, in the order of `named_buffers`, non-persistent ones
        included.

    Raises:
        TypeError: `module` is not a module.
        ValueError: A lazy layer has no shape yet.
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

    Args:
        module: The module. It is not changed.
        state: A State, or a tree of weights as they are, with the names of `params_of`.
        buffers: Tensors by name, as `buffers_of` has them. Default: the module's own.
        partial: Whether `state` may lack parameters, which then come from the module.

    Returns:
        A module with the same outputs as `call`. Tied weights stay tied. Dtypes and
        devices are the state's; `requires_grad`, hooks and modes are the module's.

    Raises:
        TypeError: `module` is not a module, or `state` or `buffers` is no tree of
            tensors.
        ValueError: Names are unknown or missing, a tensor has another shape, a weight
            is computed from a masked parameter, `fully_shard` has sharded the module,
            or only one of module and state is on the meta device.
    """
    new = {"parameters": tensors_for(module, "parameters", state, partial)}
    check_not_sharded("sf.modules.bake", module)
    new["buffers"] = {} if buffers is None else tensors_for(module, "buffers", buffers)
    baked = deep_copy(module)
    for kind, tensors in new.items():
        own = tensors_by_name(baked, kind)
        for name, (_, tensor) in tensors.items():
            if own[name].is_meta != tensor.is_meta:
                check_not_meta("bake", [(name, own[name]), (name, tensor)])
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

    Args:
        module: The module. It is not changed.
        state: A State, whose masks say which weights are kept.
        layout: How weights are stored. "csr" stores single weights; "bsr" square
            blocks, and csr for a weight that blocks do not divide or make up. "semi"
            makes each weight `torch.sparse.to_sparse_semi_structured` of it, for GPUs
            that skip the zeros of 2:4 masks (`sf.patterns.nm(2, 4)`); the layer stays
            an `nn.Linear`. "dense" stores all weights. "auto" takes the layout that
            measured faster on CPU, dense when in doubt: see docs/sparse-execution.md.
        blocksize: Side of the blocks of "bsr". Default: the largest of 32, 16, 8 and 4
            that the mask consists of.
        buffers: As in `bake`.
        partial: As in `bake`.

    Returns:
        A module with the outputs of `call`, summed in another order. No parameter of it
        requires a gradient.

    Raises:
        TypeError: `state` is not a State, `blocksize` is not an int, or as in `bake`.
        ValueError: As in `bake`; the layout is unknown, or `blocksize` is given without
            "bsr". With "semi", a weight, named by its path, is not float16 or bfloat16,
            has sides that 16 does not divide, has a mask that keeps more than 2 of 4
            inputs, or is not on a CUDA device of compute capability 8.0 or higher.
        RuntimeError: With "semi", torch refuses a weight, named by its path.

    Tied weights stay dense, and so do layers other than `nn.Linear` itself, layers with
    hooks, the layers of an `nn.TransformerEncoderLayer` and, but for "semi", dtypes
    other than float32 and float64.
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
