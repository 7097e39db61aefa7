"""What optimizers of torch do to entries that are zero, and where their state starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsefn.attached.records import Record
from sparsefn.compose.descent import live_entries
from sparsefn.engine.leaves import is_sparse
from sparsefn.state import State, TrainView
from sparsefn.tree import zipped

# These leave an entry at zero whose weight, gradient and moments are zero, where their numbers are sane.
_ENTRY_BY_ENTRY = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
}
_SHRINKS = ("weight_decay", "lambd")  # a weight times 1 - lr * this: -0.0 for a zero where it is negative


def zeros_stay(optimizer: Optimizer, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether an optimizer leaves an entry at zero whose weight, gradient and moments are zero.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> zeros_stay(torch.optim.Adam([weight]), [torch.float32]), zeros_stay(torch.optim.Muon([weight]), [torch.float32])
    (True, False)

    Not where `eps` is zero in a dtype, as 1e-8 is in float16: zero divided by zero is NaN.

    >>> zeros_stay(torch.optim.Adam([weight]), [torch.float16])
    False
    """
    if type(optimizer) not in _ENTRY_BY_ENTRY:
        return False
    least = max(torch.finfo(dtype).tiny for dtype in dtypes)
    return all(_is_sane(group, least) for group in optimizer.param_groups)


def _is_sane(group: Mapping[str, Any], least: float) -> bool:
    rate = group["lr"]
    if isinstance(rate, Tensor):
        rate = rate.item() if rate.device.type == "cpu" else 0.0  # reading it would wait for the device
    shrinks = max(group.get(name, 0.0) for name in _SHRINKS)
    return group.get("eps", 1.0) >= least and math.isfinite(rate) and rate * shrinks <= 1.0


@torch.no_grad()
def clear_moments(record: Record, live: Tensor) -> None:
    """Set the moments of a parameter to their first values where they are not live.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(2)
    >>> clear_moments(Record("w", weight, optimizer), torch.tensor([True, False]))
    >>> optimizer.state[weight]
    {'momentum_buffer': tensor([1., 0.])}

    Moments are the tensors of the optimizer's state that have the parameter's shape. They start at zero, but the step
    sizes of Rprop at the learning rate and the sums of Adagrad at `initial_accumulator_value`.
    """
    for name, moment in record.optimizer.state.get(record.parameter, {}).items():
        if isinstance(moment, Tensor) and moment.shape == live.shape:
            moment.masked_fill_(~live, _first(record, name))


def _first(record: Record, name: str) -> float:
    if isinstance(record.optimizer, torch.optim.Rprop) and name == "step_size":
        return float(record.group["lr"])
    if isinstance(record.optimizer, torch.optim.Adagrad) and name == "sum":
        return float(record.group["initial_accumulator_value"])
    return 0.0


def restart(records: Iterable[Record]) -> None:
    """Start the optimizers anew: forget their state of some parameters.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(2)
    >>> restart([Record("w", weight, optimizer)])
    >>> weight in optimizer.state
    False
    """
    for record in records:
        record.optimizer.state.pop(record.parameter, None)
        record.moments = None


def clear_changed(records: Sequence[Record], view: TrainView, new: State, old: State) -> None:
    """Set moments to their first values where weights are pruned, grew, or were set by an update from old to new.

    >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(1, 2)
    >>> algorithm = sf.one_shot(0.5)
    >>> old = algorithm.init({"w": weight.detach()})
    >>> new = algorithm.update(old, {"w": torch.ones(1, 2)}, 0)
    >>> clear_changed([Record("w", weight, optimizer)], algorithm.view, new, old)
    >>> optimizer.state[weight]
    {'momentum_buffer': tensor([[0., 1.]])}
    """
    rows, _ = zipped(view.support(new), view.support(old), view.get(new), view.get(old))
    for record, row in zip(records, rows, strict=True):
        same = row[0] is row[1] and row[2] is row[3]
        if is_sparse(row[0], row[2]) and not same and (live := live_entries(*row)) is not None:
            clear_moments(record, live)
