"""What optimizers of torch do to zero entries, and where their state starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsefn.attached.optimizer_state import (
    StateTensor,
    check_known,
    first_value,
    found_in,
    joins,
    optimizer_states,
    tensors_in,
)
from sparsefn.attached.records import Record
from sparsefn.compose.descent import live_leaves
from sparsefn.engine.leaves import is_sparse
from sparsefn.engine.processes import here, is_sharded
from sparsefn.state import State, TrainView
from sparsefn.tree import zipped

# These leave an entry at zero whose weight, gradient and moments are zero, where their
# numbers are sane.
_ENTRY_BY_ENTRY = {
    *(
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
    ),
    *(
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    ),
}
# a weight times 1 - lr * this: -0.0 for a zero where it is negative
_SHRINKS = ("weight_decay", "lambd")


def zeros_stay(optimizer: Optimizer, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether an optimizer leaves an entry at zero whose weight, gradient and moments
    are zero.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> (
    ...     zeros_stay(torch.optim.Adam([weight]), [torch.float32]),
    ...     zeros_stay(torch.optim.Muon([weight]), [torch.float32]),
    ... )
    (True, False)

    Not where `eps` is zero in a dtype, as 1e-8 is in float16: zero divided by zero is
    NaN.

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
        # reading it would wait for the device
        rate = rate.item() if rate.device.type == "cpu" else 0.0
    shrinks = max(group.get(name, 0.0) for name in _SHRINKS)
    return (
        group.get("eps", 1.0) >= least and math.isfinite(rate) and rate * shrinks <= 1.0
    )


@torch.no_grad()
def clear_moments(record: Record, live: Tensor, value: Tensor | None = None) -> None:
    """Set the moments of a parameter to their first values where they are not live.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(2)
    >>> clear_moments(Record("w", weight, optimizer), torch.tensor([True, False]))
    >>> optimizer.state[weight]
    {'momentum_buffer': tensor([1., 0.])}

    Args:
        record: The parameter, its optimizer, and the user's function `clear`, which
            does all of this if there is one.
        live: Bool tensor of the parameter's shape: where moments are kept.
        value: What trains after the update. Copies of the weights are set to it.
            Default: the parameter.
    """
    value = record.parameter.detach() if value is None else value
    for optimizer, state in optimizer_states(record):
        if record.clear is not None:
            record.clear(state, ~live)
        elif joins(optimizer):
            _forget_history(optimizer, state, record.parameter, live)
        else:
            for found in found_in(record, optimizer, state):
                _clear(
                    found,
                    live,
                    value,
                    first_value(optimizer, record.parameter, found.path),
                )


def _clear(found: StateTensor, live: Tensor, value: Tensor, first: float) -> None:
    if found.fault:
        return
    moment = found.tensor
    if type(live) is not Tensor and not is_sharded(moment):
        live = here(live)
        value = here(value)
    live = live.reshape(moment.shape).to(moment.device)
    if found.is_copy:
        moment.copy_(torch.where(live, moment, value.reshape(moment.shape).to(moment)))
    elif found.zero is not None:
        moment.masked_fill_(~live, found.zero)
    else:
        moment.masked_fill_(~live, first)


def _forget_history(
    optimizer: Optimizer, state: Mapping[str, Any], parameter: Tensor, live: Tensor
) -> None:
    """Clear the state of LBFGS if its history has entries of a parameter that are not
    live.

    Its vectors are all parameters end to end, and all numbers of its history follow
    from all entries.
    """
    start = 0
    for other in optimizer.param_groups[0]["params"]:
        if other is parameter:
            break
        start += other.numel()
    gone = ~live.reshape(-1)
    vectors = [vector for _, vector in tensors_in(state) if vector.ndim == 1]
    if any(vector[start : start + len(gone)][gone].any() for vector in vectors):
        optimizer.state.clear()


def check_moments(optimizer: Optimizer, records: Iterable[Record]) -> None:
    """Raise ValueError where an optimizer's state shows that moments of masked weights
    are not known.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.Adam([weight])
    >>> check_moments(optimizer, [Record("w", weight, optimizer)])
    """
    if type(optimizer) in _ENTRY_BY_ENTRY:
        return
    own = [
        record
        for record in records
        if record.optimizer is optimizer and record.clear is None
    ]
    masked = [record for record in own if is_sparse(record.support, record.parameter)]
    if masked:
        check_known(optimizer, masked)


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
        for optimizer in record.optimizers:
            if joins(optimizer):
                optimizer.state.clear()
            optimizer.state.pop(record.parameter, None)
        record.moments = None


def clear_changed(
    records: Sequence[Record], view: TrainView, new: State, old: State
) -> None:
    """Set moments to their first values where weights are pruned, grew, or were set by
    an update from old to new.

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
        support, before, value, stepped = row
        same = support is before and value is stepped
        if is_sparse(support, value) and not same:
            (live,) = live_leaves([row])
            if live is not None:
                clear_moments(record, live, value)
