"""Layers whose sizes can change: which of their outputs are constant, and how to remove channels from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsefn.shrinking.channels import UNKNOWN, Channels, Plan, Value, batch_of, columns, where_finite

Kept = Callable[[str], Tensor]  # the mask of one of the layer's parameters, of its full shape
Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class Handling(NamedTuple):
    """How to follow and cut a layer: `rule(plan, path, layer, kept, x)` and `cut(layer, inputs, outputs, removed)`.

    >>> LAYERS[torch.nn.Linear] == Handling(of_linear, cut_affine)
    True
    """

    rule: Callable[[Plan, str, Any, Kept, Value], Value]
    cut: Callable[[Any, Value, Value, Tensor], None]


def _cpu(layer: nn.Module, name: str) -> Tensor | None:
    tensor = getattr(layer, name, None)
    return None if tensor is None else tensor.detach().cpu()


def _sums(weight: Tensor) -> Tensor:
    # A layer's output for one constant a column: (rows, columns), summed over the window.
    return weight.double().flatten(2).sum(2) if weight.ndim > 2 else weight.double()


def _affine(plan: Plan, weight: Tensor, kept: Tensor, bias: Tensor | None, x: Value, padded: bool = False) -> Tensor:
    # The constants of the rows. Pins the columns that are used and cannot be folded into the bias: columns that vary,
    # and constant columns other than 0 where there is no bias or where padding with zeros makes them vary.
    const = x.const if isinstance(x, Channels) else torch.full(weight.shape[1:2], torch.nan, device="cpu")
    fixed = const == 0 if padded or bias is None else const.isfinite()
    used = kept.flatten(2).any(2) if kept.ndim > 2 else kept
    if isinstance(x, Channels):
        taken = "pads with zeros around" if padded else "has no bias to take"
        for which, why in (
            (const.isfinite(), f"{plan.at} {taken} their constant, which is not 0"),
            (~const.isfinite(), f"{plan.at} reads them, and they vary"),
        ):
            plan.pin(x._replace(ids=x.ids[used.any(0) & ~fixed & which]), why)
    total = (_sums(weight) * torch.where(fixed, const, 0.0)).sum(1)
    total = (total if bias is None else total + bias).to(weight.dtype)
    return torch.where((used & ~fixed).any(1), torch.nan, total)


def of_linear(plan: Plan, path: str, layer: nn.Linear, kept: Kept, x: Value) -> Value:
    """The value of a linear layer's output.

    >>> plan, layer = Plan(), torch.nn.Linear(2, 2)
    >>> rows = lambda name: torch.tensor([[True, True], [False, False]])
    >>> of_linear(plan, "", layer, rows, UNKNOWN).const.isnan()
    tensor([ True, False])
    """
    rank, batch = x.rank if isinstance(x, Channels) else 2, batch_of(x)
    x = columns(plan, x, layer.in_features, not isinstance(x, Channels) or x.axis == -1)
    const = _affine(plan, layer.weight.detach().cpu(), kept("weight"), _cpu(layer, "bias"), x)
    out = Channels(plan.number(layer.out_features), const, -1, rank, batch=batch)
    plan.sizes[path] = (x, out)
    return out


def conv(plan: Plan, path: str, layer: Conv, kept: Kept, x: Value) -> Value:
    """The value of a convolution's output; groups must be 1, or one for each channel.

    >>> plan, layer = Plan(), torch.nn.Conv2d(1, 2, 3)
    >>> conv(plan, "", layer, lambda name: torch.ones(2, 1, 3, 3, dtype=torch.bool), UNKNOWN)[2:4]
    (-3, 4)
    """
    axis, batch = 1 - layer.weight.ndim, batch_of(x)
    rank = 1 - axis
    depthwise = layer.groups == layer.in_channels == layer.out_channels and layer.groups > 1
    x = columns(plan, x, layer.in_channels, isinstance(x, Channels) and x.axis == axis and not x.spread)
    if layer.groups > 1 and not (depthwise and isinstance(x, Channels)):
        plan.refuse(path, x, "a grouped convolution")
        return UNKNOWN
    padded = layer.padding_mode == "zeros" and (
        layer.padding != "valid" if isinstance(layer.padding, str) else any(layer.padding)
    )
    weight, mask, bias = layer.weight.detach().cpu(), kept("weight"), _cpu(layer, "bias")
    if depthwise:  # channel i is channel i of the input
        fixed = x.const == 0 if padded else x.const.isfinite()
        total = _sums(weight)[:, 0] * torch.where(fixed, x.const, 0.0)
        total = (total if bias is None else total + bias).to(weight.dtype)
        out = x._replace(const=torch.where(mask.flatten(1).any(1) & ~fixed, torch.nan, total), rank=rank)
        plan.note(x, out.const, f"{plan.at} pads with zeros around their constant, which is not 0")
    else:
        out = Channels(
            plan.number(layer.out_channels), _affine(plan, weight, mask, bias, x, padded), axis, rank, batch=batch
        )
    plan.sizes[path] = (x, out)
    return out


def norm(plan: Plan, path: str, layer: Norm, kept: Kept, x: Value) -> Value:
    """The value of a batch norm's output, from running statistics.

    >>> plan, layer = Plan(), torch.nn.BatchNorm1d(1, affine=False).eval()
    >>> norm(plan, "", layer, lambda name: None, Channels(plan.number(1), torch.zeros(1), -1, 2)).const
    tensor([0.])
    """
    if layer.running_mean is None or layer.running_var is None:
        return UNKNOWN
    x = columns(plan, x, layer.num_features, isinstance(x, Channels) and x.position == 1)
    if not isinstance(x, Channels):
        return UNKNOWN
    weight, bias = _cpu(layer, "weight"), _cpu(layer, "bias")
    moments = (layer.running_mean.cpu(), layer.running_var.cpu())
    const = functional.batch_norm(x.const[None], *moments, weight, bias, eps=layer.eps)[0]
    const = where_finite(x.const, const)
    if weight is not None:
        const = torch.where(kept("weight"), const, torch.zeros_like(const) if bias is None else bias)
    out = x._replace(const=const)
    plan.sizes[path] = (x, out)
    return out


# Number of gates, and the index of the candidate gate: if that gate is 0, a unit that starts at 0 stays 0.
GATES: dict[type[nn.Module], tuple[int, int]] = {nn.LSTM: (4, 2), nn.GRU: (3, 2), nn.RNN: (1, 0)}


def recurrent(plan: Plan, path: str, layer: Any, kept: Kept, x: Value) -> Value:
    """The value `(output, state)` of a recurrent layer with initial state 0, of one layer and one direction.

    >>> plan, layer = Plan(), torch.nn.GRU(2, 3)
    >>> output, h = recurrent(plan, "", layer, lambda name: getattr(layer, name) != 0, UNKNOWN)
    >>> output.const, output.rank
    (tensor([nan, nan, nan]), 3)
    """
    if layer.num_layers > 1 or layer.bidirectional or layer.proj_size:
        plan.refuse(path, x, "of several layers or directions, or projects")
        return UNKNOWN
    x = columns(plan, x, layer.input_size, isinstance(x, Channels) and x.axis == -1)
    units, candidate = layer.hidden_size, GATES[type(layer)][1]
    rows = slice(candidate * units, (candidate + 1) * units)
    weight, bias = layer.weight_ih_l0.detach().cpu(), _cpu(layer, "bias_ih_l0")
    const, loop = _affine(plan, weight, kept("weight_ih_l0"), bias, x)[rows], kept("weight_hh_l0")
    zero = (const == 0) & ~loop[rows].any(1)
    if (loop_bias := _cpu(layer, "bias_hh_l0")) is not None:
        zero &= loop_bias[rows] == 0
    hidden = Channels(plan.number(units), torch.where(zero, 0.0, torch.nan).to(weight.dtype), -1, 3, batch=object())
    plan.pin(hidden._replace(ids=hidden.ids[loop.any(0) & ~zero]), f"{plan.at} reads them again, and they are not 0")
    plan.sizes[path] = (x, hidden)
    return hidden, (hidden, hidden) if isinstance(layer, nn.LSTM) else hidden


def _stays(side: Value, removed: Tensor, width: int) -> Tensor:
    return ~removed[side.ids] if isinstance(side, Channels) else torch.ones(width, dtype=torch.bool, device="cpu")


def keep_entries(layer: nn.Module, name: str, keep: Tensor, dim: int = 0) -> None:
    """Keep some indices along a dimension of a tensor of a layer, in place; nothing where the layer has none.

    >>> layer = torch.nn.Linear(2, 1)
    >>> keep_entries(layer, "weight", torch.tensor([True, False]), 1)
    >>> layer.weight.shape
    torch.Size([1, 1])
    """
    old = getattr(layer, name, None)
    if old is not None:
        new = old.detach().index_select(dim, keep.nonzero()[:, 0].to(old.device))
        setattr(layer, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


def _fold(layer: nn.Module, weight: str, bias: str, x: Value, removed: Tensor) -> None:
    # Adds the contribution of the removed columns to the bias; without a bias it is 0.
    old = getattr(layer, bias, None)
    if isinstance(x, Channels) and old is not None:
        const = torch.where(removed[x.ids] & x.const.isfinite(), x.const, 0.0).double()
        brought = (_sums(getattr(layer, weight).detach().cpu()) * const).sum(1).to(old.device)
        setattr(layer, bias, nn.Parameter((old.detach() + brought).to(old.dtype), old.requires_grad))


def cut_affine(layer: nn.Linear | Conv, inputs: Value, outputs: Value, removed: Tensor) -> None:
    """Give a linear layer or convolution fewer rows and columns, in place.

    >>> layer = torch.nn.Linear(2, 1)
    >>> cut_affine(layer, Channels(torch.tensor([0, 1]), torch.zeros(2), -1, 2), UNKNOWN, torch.tensor([True, False]))
    >>> layer.in_features, layer.weight.shape
    (1, torch.Size([1, 1]))
    """
    depthwise = getattr(layer, "groups", 1) > 1
    keep = _stays(outputs, removed, len(layer.weight))
    if not depthwise:
        _fold(layer, "weight", "bias", inputs, removed)
        keep_entries(layer, "weight", _stays(inputs, removed, layer.weight.shape[1]), 1)
    keep_entries(layer, "weight", keep)
    keep_entries(layer, "bias", keep)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    else:
        layer.out_channels = len(layer.weight)
        layer.in_channels = layer.out_channels if depthwise else layer.weight.shape[1]
        layer.groups = layer.out_channels if depthwise else 1


def cut_norm(layer: Norm, inputs: Value, outputs: Value, removed: Tensor) -> None:
    """Give a batch norm fewer channels, in place.

    >>> layer = torch.nn.BatchNorm1d(2)
    >>> cut_norm(layer, UNKNOWN, Channels(torch.tensor([0, 1]), torch.zeros(2), -1, 2), torch.tensor([True, False]))
    >>> layer
    BatchNorm1d(1, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
    """
    keep = _stays(outputs, removed, layer.num_features)
    for name in ("weight", "bias", "running_mean", "running_var"):
        keep_entries(layer, name, keep)
    layer.num_features = int(keep.sum())


def cut_recurrent(layer: Any, inputs: Value, outputs: Value, removed: Tensor) -> None:
    """Give a recurrent layer fewer inputs and hidden units, in place.

    >>> layer, hidden = torch.nn.LSTM(1, 2), Channels(torch.tensor([0, 1]), torch.zeros(2), -1, 3)
    >>> cut_recurrent(layer, UNKNOWN, hidden, torch.tensor([True, False]))
    >>> layer.hidden_size, layer.weight_hh_l0.shape
    (1, torch.Size([4, 1]))
    """
    keep = _stays(outputs, removed, layer.hidden_size)
    rows = keep.repeat(GATES[type(layer)][0])
    _fold(layer, "weight_ih_l0", "bias_ih_l0", inputs, removed)
    keep_entries(layer, "weight_ih_l0", _stays(inputs, removed, layer.input_size), 1)
    keep_entries(layer, "weight_hh_l0", keep, 1)
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        keep_entries(layer, name, rows)
    layer.input_size, layer.hidden_size = layer.weight_ih_l0.shape[1], int(keep.sum())
    layer.flatten_parameters()


LAYERS: dict[type[nn.Module], Handling] = {
    nn.Linear: Handling(of_linear, cut_affine),
    **{kind: Handling(conv, cut_affine) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{kind: Handling(norm, cut_norm) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)},
    **{kind: Handling(recurrent, cut_recurrent) for kind in GATES},
}
