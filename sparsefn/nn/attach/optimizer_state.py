"""What the state of an optimizer of torch, or of elsewhere, holds for a weight:
moments, copies, and other things.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn._engine.leaves import is_sparse
from sparsefn._engine.processes import is_sharded, local_tensor
from sparsefn.algorithms.combine.descent import Row, live_leaves
from sparsefn.algorithms.combine.foreign import BASES, holds_numbers, layout
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.nn.attach.parameters import (
    Record,
    groups_with,
    inner_optimizers,
    same_objects,
)

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
# Copies and averages of the weights, by name, and the optimizers with such a name: ""
# is any.
_COPIES = {
    "ax": "ASGD",
    "lookahead_params": "",
    "master_param": "",
    "mov_avg_param": "SRMM",
    "p0": "Prodigy",
    "param_buffer": "SPlus",
    "pbar": "FOCUS",
    "prev_param": "AdaSmooth",
    "shadow": "",
    "slow_buffer": "",
    "slow_param": "",
    "slow_params": "",
    "x0": "",
    "x_k": "A2Grad",
    "z": "ScheduleFree",
}
# Where moments do not start at zero: the option that says the value, or the value.
_FIRST: dict[tuple[str, str], str | float] = {
    ("Rprop", "step_size"): "lr",
    ("Adagrad", "sum"): "initial_accumulator_value",
    ("Yogi", "exp_avg"): "initial_accumulator",
    ("Yogi", "exp_avg_sq"): "initial_accumulator",
    ("Adai", "beta1_prod"): 1.0,
    ("DAdaptAdaGrad", "alpha_k"): 1e-6,
    ("VSGD", "bg"): "pbg2",
    ("VSGD", "bhg"): "pbhg2",
}
# For optimizers with a basis, the moments that are not in it. The other moments are
# statistics of directions, and stay.
_BESIDE_A_BASIS = {"SOAP": ("exp_avg",), "Kron": ("momentum_buffer",)}
_CUTS = "DistributedShampoo"  # has states of blocks of a weight
# of bitsandbytes: codes, and the numbers that they stand for
_CODES = {"state1": "qmap1", "state2": "qmap2"}
_CLEAR = (
    "pass attach(..., clear=f), where f(state, entries) sets the moments in `state`, "
    "the optimizer's state of one parameter, to their first values where the bool "
    "tensor `entries` is true"
)


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state with an entry for each entry of a weight.

    `fault` says why it cannot be cleared; "" where it can.
    """

    path: str
    tensor: Tensor
    is_copy: bool = False  # a copy or an average of the weight
    zero: Tensor | None = None  # where the tensor holds codes, the code for zero
    fault: str = ""


# ---- optimizers ----------------------------------------------------------------------


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


def joins(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps the entries of all its parameters end to end, as LBFGS
    does.

    >>> joins(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))]))
    True
    """
    return _is_a(optimizer, "LBFGS")


def _is_a(optimizer: Optimizer, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(optimizer).__mro__)


# ---- what a state holds --------------------------------------------------------------


def optimizer_states(record: Record) -> list[tuple[Optimizer, dict[str, Any]]]:
    """The states of a parameter in its optimizer and in the optimizers inside it, each
    with its optimizer.

    LBFGS has one state for all parameters: it is the state of each.
    """
    found = {}
    for one in record.optimizers:
        state = one.state.get(record.parameter)
        if state is None and joins(one):
            state = next(iter(one.state.values()), None)
        if state is not None:
            found[id(state)] = (one, state)
    return list(found.values())


def tensors_in(
    state: object, path: str = "", seen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state by path: in dicts, lists and plain objects, however deep.

    >>> list(tensors_in({"step": 3, "m": [torch.tensor(1.0)]}))
    [('m.0', tensor(1.))]
    """
    if isinstance(state, Tensor):
        yield path, state
        return
    if id(state) in seen:
        return
    for name, value in _items(state):
        yield from tensors_in(
            value, f"{path}.{name}" if path else name, seen | {id(state)}
        )


def _items(state: object) -> list[tuple[str, object]]:
    if isinstance(state, Mapping):
        return [(str(name), value) for name, value in state.items()]
    if isinstance(state, list | tuple | deque):
        return [(str(i), value) for i, value in enumerate(state)]
    if isinstance(state, nn.Module | Optimizer | type) or callable(state):
        return []
    return list(getattr(state, "__dict__", {}).items())


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


def first_value(optimizer: Optimizer, parameter: Tensor, path: str) -> float:
    """The value at which a moment starts.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> first_value(
    ...     torch.optim.Adagrad([weight], initial_accumulator_value=0.5), weight, "sum"
    ... )
    0.5
    """
    for (kind, name), first in _FIRST.items():
        if name == path and _is_a(optimizer, kind):
            if isinstance(first, float):
                return first
            return float(next(groups_with(optimizer, parameter))[first])
    return 0.0


def factors_in(optimizer: Optimizer) -> frozenset[str]:
    """The paths, without digits, at which an optimizer has matrices that are no
    moments, such as Shampoo's.

    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> optimizer.state[weight] = {
    ...     "m": torch.ones(2, 3),
    ...     "L_0": torch.ones(2, 2),
    ...     "L_1": torch.ones(3, 3),
    ... }
    >>> factors_in(optimizer)
    frozenset({'L_'})

    Factors of a square weight look like moments; factors of other weights do not.
    """
    found = set()
    for one in (optimizer, *inner_optimizers(optimizer)):
        for parameter, state in one.state.items():
            for path, tensor in (
                tensors_in(state) if isinstance(parameter, Tensor) else ()
            ):
                if (
                    tensor.ndim > 1
                    and layout(tensor.shape, parameter.shape) == "shared"
                ):
                    found.add(_without_digits(path))
    return frozenset(found)


def _without_digits(path: str) -> str:
    return re.sub(r"\d", "", path)


def found_in(
    record: Record, optimizer: Optimizer, state: Mapping[str, Any]
) -> list[StateTensor]:
    """The tensors of a parameter's state that have its entries, or may have them.

    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> state = {"m": torch.ones(2, 3), "row": torch.ones(2), "low": torch.ones(4, 3)}
    >>> [
    ...     (found.path, found.fault)
    ...     for found in found_in(Record("w", weight, optimizer), optimizer, state)
    ... ]
    [('m', ''), ('low', 'has shape (4, 3) for a weight of shape (2, 3)')]
    """
    tensors = list(tensors_in(state))
    names = [name for path, _ in tensors for name in path.split(".")]
    basis = next((name for name in (*state, *names) if name in BASES), None)
    beside = next(
        (own for name, own in _BESIDE_A_BASIS.items() if _is_a(optimizer, name)), None
    )
    found = []
    for path, tensor in tensors:
        one = _read(record, optimizer, state, path, tensor)
        if basis is None or beside is not None:
            leave = beside is not None and path not in beside
        else:
            leave = tensor.ndim < 2 or not BASES.isdisjoint(path.split("."))
            why = (
                f"lies beside the basis {basis!r}: its entries may be directions, "
                "which belong to no weight"
            )
            one = StateTensor(path, tensor, fault=why)
        if one is not None and not leave:
            found.append(one)
    return found


def _read(
    record: Record,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    path: str,
    tensor: Tensor,
) -> StateTensor | None:
    """A tensor of a state that has a parameter's entries, or may have; None for
    statistics of several entries.
    """
    # quick, as every step asks
    local = tensor if type(tensor) is Tensor else local_tensor(tensor)
    weight = record.parameter
    if local is tensor and type(weight) is not nn.Parameter:
        weight = local_tensor(weight)  # type: ignore[assignment]
    shape = tuple(weight.shape)
    if tensor.numel() <= 1 and tensor.shape != shape:
        return None
    kind = layout(tensor.shape, shape)
    if (
        tensor.ndim == 2
        and tensor.shape[0] == tensor.shape[1]
        and _without_digits(path) in record.factors
    ):
        kind = "shared"
    name = path.split(".")[-1]
    is_copy = name in _COPIES and any(
        _COPIES[name] in base.__name__ for base in type(optimizer).__mro__
    )
    if kind == "other" or (kind == "shared" and is_copy):
        return StateTensor(
            path,
            tensor,
            fault=f"has shape {tuple(tensor.shape)} for a weight of shape {shape}",
        )
    if kind == "shared":
        joined = tensor.ndim == 1 and len(tensor) == sum(
            p.numel() for g in optimizer.param_groups for p in g["params"]
        )
        return (
            StateTensor(path, tensor, fault="joins the entries of all parameters")
            if joined
            else None
        )
    if path in _CODES and _CODES[path] in state and tensor.dtype == torch.uint8:
        return StateTensor(
            path, tensor, zero=_code_of_zero(state[_CODES[path]], torch.uint8)
        )
    if type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return _read_subclass(path, local)
    if not holds_numbers(tensor):
        return StateTensor(
            path, tensor, fault=f"holds {tensor.dtype} entries, whose zero is not known"
        )
    return StateTensor(path, tensor, is_copy)


def _read_subclass(path: str, moment: Tensor) -> StateTensor:
    """A moment in codes, as torchao has it: `codes` are of the moment's shape, and
    `qmap` are the numbers.
    """
    codes = getattr(moment, "codes", None)
    if not isinstance(codes, Tensor) or codes.shape != moment.shape:
        return StateTensor(
            path,
            moment,
            fault=f"is a {type(moment).__name__}, which has no code of each entry",
        )
    if codes.is_floating_point() and codes.element_size() == 1:
        return StateTensor(
            path,
            codes.view(torch.uint8),
            zero=torch.zeros((), dtype=torch.uint8, device=codes.device),
        )
    qmap = getattr(moment, "qmap", None)
    if not isinstance(qmap, Tensor):
        return StateTensor(
            path,
            moment,
            fault=f"is a {type(moment).__name__}, whose code of zero is not known",
        )
    return StateTensor(path, codes, zero=_code_of_zero(qmap, codes.dtype))


def _code_of_zero(qmap: Tensor, dtype: torch.dtype) -> Tensor:
    return qmap.abs().argmin().to(dtype)


# ---- clearing ------------------------------------------------------------------------


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
        live = local_tensor(live)
        value = local_tensor(value)
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


def clear_changed(rows: Sequence[tuple[Record, Tensor, Tensor]], old: Tree) -> None:
    """Set moments to their first values where weights are pruned, grew, or were set by
    an update.

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


# ---- checks --------------------------------------------------------------------------


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


def check_known(optimizer: Optimizer, records: Sequence[Record]) -> None:
    """Raise ValueError where the moments of masked weights are not known, naming the
    tensor; note what is no moment.

    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> optimizer.state[weight] = {"seen": torch.ones(2, 3, dtype=torch.int64)}
    >>> check_known(optimizer, [Record("w", weight, optimizer)])
    Traceback (most recent call last):
        ...
    ValueError: attach: cannot clear the moments of pruned weights of 'w' in the state
    of SGD: 'seen' holds torch.int64 entries, whose zero is not known; pass attach(...,
    clear=f), where f(state, entries) sets the moments in `state`, the optimizer's state
    of one parameter, to their first values where the bool tensor `entries` is true
    """
    for one in (optimizer, *inner_optimizers(optimizer)):
        if _is_a(one, _CUTS):
            _refuse(records[0], one, "it keeps moments of blocks of a weight")
    factors = factors_in(optimizer)
    for record in records:
        record.factors = factors
        for one, state in optimizer_states(record):
            for found in () if joins(one) else found_in(record, one, state):
                if found.fault:
                    _refuse(record, one, f"{found.path!r} {found.fault}")


def _refuse(record: Record, optimizer: Optimizer, why: str) -> None:
    raise ValueError(
        f"attach: cannot clear the moments of pruned weights of {record.name!r} in "
        f"the state of {type(optimizer).__name__}: {why}; {_CLEAR}"
    )
