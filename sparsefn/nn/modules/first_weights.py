"""First weights that suit the inputs which a mask leaves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsefn._engine.leaves import is_sparse
from sparsefn._engine.numbers import sqrt
from sparsefn.core.state import State, with_params
from sparsefn.core.tree import flatten, leaves_like
from sparsefn.nn.modules.calls import check_shape, check_state
from sparsefn.nn.modules.originals import layer_of
from sparsefn.nn.modules.weights import TRANSPOSED, channel_axis, is_weight
from sparsefn.nn.modules.wrappers import own_tensors


def scaled_init(module: nn.Module, state: State) -> State:
    """The state with initial weights scaled to the inputs that each output keeps.

    >>> layer = torch.nn.Linear(8, 2, bias=False)
    >>> mask = torch.tensor([[True] * 2 + [False] * 6, [True] * 8])
    >>> state = sf.State({"weight": torch.ones(2, 8) * mask}, {"weight": mask})
    >>> sf.modules.scaled_init(layer, state).params["weight"][:, 0]
    tensor([2., 1.])

    Args:
        module: The module whose layers say what the inputs of an output are.
        state: The State that `init` returned. Call it once.

    Returns:
        A state in which each kept weight is multiplied by sqrt(n / k), where n is the
        number of inputs of its output (of a convolution times the window), and k the
        number that the mask keeps. Other leaves, leaves without a mask, pruned weights
        and outputs without an input do not change.

    Raises:
        TypeError: `state` is not a State, or `module` is not a module.
        ValueError: A masked leaf is no parameter of the module or has another shape, or
            the state trains latents or learned scores, which follow from no params.

    Weights are initialised for a dense layer, with a variance in proportion to 1 /
    inputs. Under a mask an output has fewer inputs, and signals fade from layer to
    layer. It scales the weights of linear and bilinear layers, convolutions, transposed
    ones too, recurrent layers, projections of attention and `Conv1D` of transformers.
    No key is needed, and any initialisation keeps its form.

    Evci et al. 2022, arXiv 2010.03533, sec. 3: He initialisation by the fan-in of each
    output.
    """
    check_state("scaled_init", state)
    named = own_tensors(module, "parameters", tied=True)
    leaves, rebuild = flatten(state.params)
    new = dict(leaves)
    for (path, leaf), mask in zip(
        leaves.items(), leaves_like(state.masks, state.params), strict=True
    ):
        if not is_sparse(mask, leaf):
            continue
        if path not in named:
            raise ValueError(
                "scaled_init: expected masks of parameters of the "
                f"{type(module).__name__}, got {path!r}"
            )
        at, param = named[path]
        check_shape("a mask", path, mask, param)
        if is_weight(module, at, param):
            layer = layer_of(module, at)
            axis = channel_axis(module, path)
            groups = layer.groups if isinstance(layer, TRANSPOSED) else 1
            new[path] = torch.where(
                mask,
                (leaf.double() * _factors(mask, axis, groups)).to(leaf.dtype),
                leaf,
            )
    return with_params(state, rebuild(list(new.values())))


def _factors(mask: Tensor, axis: int, groups: int) -> Tensor:
    # sqrt(inputs / kept inputs) of each output, for the weights. Groups of transposed
    # convolutions follow each other along the inputs.
    split = mask.reshape(groups, mask.shape[0] // groups, *mask.shape[1:])
    others = [dim for dim in range(1, split.ndim) if dim != axis + 1]
    kept = split.sum(others, keepdim=True)
    inputs = split.numel() // max(kept.numel(), 1)
    factors = sqrt(inputs / kept.clamp(min=1).double())
    return factors.expand(split.shape).reshape(mask.shape)
