"""Statistics of what experts give for the tokens that are routed to them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sparsefn.core.state import State
from sparsefn.core.tree import Tree
from sparsefn.nn.modules.calls import quiet_call
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.cache import copied_call
from sparsefn.posttraining.calibration.inputs import weights_of_call
from sparsefn.posttraining.calibration.sums import Stats

# of the largest value; 0.1 for 16 bits
_NEAR = {torch.float64: 1e-8, torch.float32: 1e-3}


def experts(
    module: nn.Module,
    state: State | None,
    *args: Tree,
    **kwargs: Tree,
) -> Stats:
    """Sums over the tokens routed to each expert in one call: `{path: statistics}`.

    >>> class Experts(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.down = torch.nn.Parameter(torch.ones(3, 4, 2))
    ...
    ...     def forward(self, x, index, weights):
    ...         return torch.einsum("tk,tkoi,ti->to", weights, self.down[index], x)
    >>> index, weights = (
    ...     torch.tensor([[0, 2], [2, 0]]),
    ...     torch.tensor([[0.75, 0.25], [1.0, 0.0]]),
    ... )
    >>> sf.calibration.experts(Experts(), None, torch.ones(2, 2), index, weights)[
    ...     "down"
    ... ]
    {'count': tensor([2, 0, 2]), 'norm': tensor([3., 0., 5.], dtype=torch.float64)}

    Args:
        module: A model with modules of experts, which have parameters of three or more
            dimensions, [experts, out, in], and are called with the states of tokens
            (tokens, width), the numbers of the experts that each is routed to (tokens,
            k), and their weights (tokens, k), by position or by name, as the experts of
            transformers from 5.0 on.
        state: As in `inputs`.
        *args: The arguments of one call of the module.
        **kwargs: Its arguments by name.

    Returns:
        The statistics of all parameters along whose first dimension experts lie. They
        are the same for all parameters of a module:

        - "count", int64 (experts,): how many tokens were routed to the expert.
        - "norm", float64 (experts,): the sum over these of the weight times the norm of
          what the expert gives. A negative weight, as some routers give, counts as a
          positive one: it is the norm of what the expert adds.

    Raises:
        TypeError: `state` is no State.
        ValueError: No module of experts was called, the output of one is not the sum of
            weights times what single experts give, numbers are past the last expert, or
            outputs are not finite; each with the path.

    What one expert gives is found by a call with it alone and a weight of 1, so that no
    names matter and all k together cost one more call. Statistics of several batches
    are added with `optree.tree_map(torch.add, a, b)`, and read by `sf.scores.reap`. All
    tokens count, padding too. The module, its buffers and the arguments stay as they
    are.
    """
    weights = weights_of_call(Named.of(module), state)
    shared: dict[int, Any] = {
        id(x): x for x in (*module.parameters(), *module.buffers())
    }
    own = copy.deepcopy(module, shared)  # for hooks, with the module's tensors
    named = Named.of(own)
    paths = {at: path for path, (at, _) in named.own.items()}
    stats: Stats = {}
    for place, part in own.named_modules():
        held = {
            paths.get(f"{place}.{name}".lstrip(".")): x
            for name, x in part.named_parameters(recurse=False)
        }
        sizes = {len(x) for x in held.values() if x.ndim > 2}
        if len(sizes) == 1:
            leaves = [
                path
                for path, x in held.items()
                if path is not None and x.ndim > 1 and len(x) in sizes
            ]
            part.register_forward_hook(
                _hook(leaves, place, sizes.pop(), stats), with_kwargs=True
            )
    with torch.no_grad():
        quiet_call(named, weights)(copied_call((args, kwargs)))
    if not stats:
        raise ValueError(
            "experts: expected a module with parameters [experts, out, in] that is "
            "called with states of tokens, numbers of experts and their weights, but "
            f"the {type(module).__name__} called none"
        )
    return stats


def _hook(leaves: list[str], place: str, size: int, stats: Stats) -> Any:
    # A hook that adds what a call of experts says of each.
    def hook(
        part: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        routed = _routed((*args, *kwargs.values()))
        if routed is None or not isinstance(out, Tensor):
            return
        x, index, weights = routed
        where = f"experts {place!r} ({type(part).__name__})"
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise ValueError(
                f"experts: expected {where} to be called with numbers of {size} "
                "experts, got others"
            )
        count, norm = (
            index.new_zeros(size, dtype=dtype) for dtype in (torch.int64, torch.float64)
        )
        whole = torch.zeros_like(out)
        for slot in range(index.shape[1]):
            alone = {
                id(index): index[:, slot : slot + 1],
                id(weights): torch.ones_like(weights[:, :1]),
            }
            given = part.forward(
                *[alone.get(id(value), value) for value in args],
                **{name: alone.get(id(value), value) for name, value in kwargs.items()},
            )
            sizes = torch.linalg.vector_norm(
                given if given.dtype == torch.float64 else given.float(), dim=-1
            )
            count += torch.bincount(index[:, slot], minlength=size)
            norm.index_add_(
                0, index[:, slot], weights[:, slot].double().abs() * sizes.double()
            )
            whole = whole + weights[:, slot, None] * given
        if not bool(norm.isfinite().all()):
            raise ValueError(
                f"experts: expected finite outputs of {where}, got NaN or infinity"
            )
        if len(x) and float((whole - out).abs().max()) > _NEAR.get(
            out.dtype, 0.1
        ) * float(out.abs().max()):
            raise ValueError(
                f"experts: expected {where} to give the sum over experts of a token's "
                "weight times what each expert gives alone, but they give something "
                "else"
            )
        for path in leaves:
            old = stats.get(path, {"count": 0, "norm": 0})
            stats[path] = {"count": old["count"] + count, "norm": old["norm"] + norm}

    return hook


def _routed(given: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor] | None:
    # The states of tokens, the numbers of their experts and the weights of these; None
    # for another call.
    tensors = [
        value for value in given if isinstance(value, Tensor) and value.ndim == 2
    ]
    whole = [
        x
        for x in tensors
        if not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    ]
    floats = [x for x in tensors if x.is_floating_point()]
    if len(whole) != 1 or len(floats) != 2 or len(floats[0]) != len(floats[1]):
        return None
    x, weights = floats if floats[1].shape == whole[0].shape else floats[::-1]
    if weights.shape == whole[0].shape:
        return (x, whole[0], weights)
    return None
