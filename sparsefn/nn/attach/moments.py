"""What optimizers of torch do to zero entries, and where their state starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsefn._engine.leaves import is_sparse
from sparsefn.algorithms.combine.descent import Row, live_leaves
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.nn.attach.optimizer_state import check_known, clear_moments, joins
from sparsefn.nn.attach.records import Record, same_objects

# These leave an entry at zero whose weight, gradient and moments are zero, where their
# numbers are sane.
_ENTRY_BY_ENTRY = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
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


class HeldStates:
    """The states that an optimizer and the optimizers inside it hold for parameters.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> held = HeldStates([optimizer])
    >>> held.have_changed(), held.have_changed()
    (True, False)
    >>> optimizer.state[weight] = {"momentum_buffer": torch.ones(2)}
    >>> held.have_changed()
    True
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers  # an optimizer, and the optimizers inside it
        self.states: list[object] | None = None
        # how many values each holds, where the optimizer's moments are looked for
        self.sizes: list[int] = []

    def have_changed(self) -> bool:
        """Whether the states differ from the last call, or hold more or fewer values;
        True at the first call.
        """
        old = self.states
        old_sizes = self.sizes
        self.states = []
        for optimizer in self.optimizers:
            self.states += optimizer.state.values()
        is_known = type(self.optimizers[0]) in _ENTRY_BY_ENTRY
        self.sizes = [] if is_known else list(map(_size, self.states))
        return (
            old is None or not same_objects(self.states, old) or self.sizes != old_sizes
        )


def _size(state: object) -> int:
    values = state.values() if isinstance(state, Mapping) else ()
    return sum(value is not None for value in values)


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
    """Restart the optimizers: forget their state of some parameters.

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


def clear_changed(rows: Sequence[tuple[Record, Tensor, Tensor]], old: Tree) -> None:
    """Set moments to their first values where weights are pruned, grew, or were set by
    an update.

    >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(1, 2)
    >>> algorithm = sf.one_shot(0.5)
    >>> old = algorithm.init({"w": weight.detach()})
    >>> new = algorithm.update(old, {"w": torch.ones(1, 2)}, 0)
    >>> record = Record("w", weight, optimizer, support=old.masks["w"])
    >>> clear_changed([(record, new.params["w"], new.masks["w"])], old.params)
    >>> optimizer.state[weight]
    {'momentum_buffer': tensor([[0., 1.]])}

    Args:
        rows: Each record, which knows the support before, with its leaf and support
            after the update.
        old: The tree that trains, before the update.
    """
    changed: list[tuple[Record, Row]] = []
    for (record, value, support), stepped in zip(rows, leaves_of(old), strict=True):
        is_same = support is record.support and value is stepped
        if support.ndim and not is_same:
            changed.append((record, (support, record.support, value, stepped)))
    lives = live_leaves([row for _, row in changed])
    for (record, (_, _, value, _)), live in zip(changed, lives, strict=True):
        if live is not None:
            clear_moments(record, live, value)
