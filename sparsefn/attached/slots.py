"""Which parameter of which optimizer holds each leaf that an algorithm trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn.engine.shards import here, is_sharded, laid_out, whole
from sparsefn.modules.wrappers import own_tensors
from sparsefn.tree import Tree, flatten

# These leave an entry at zero whose weight, gradient and moments are zero.
_ENTRY_BY_ENTRY = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
}
_WRAPPERS = {"AcceleratedOptimizer"}  # told by name; others may move the weights after the optimizer inside them


class Slot(NamedTuple):
    """A parameter, and the optimizer that moves it.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> Slot(weight, torch.optim.SGD([weight], lr=0.1)).group["lr"]
    0.1
    """

    parameter: nn.Parameter
    optimizer: Optimizer

    @property
    def group(self) -> dict[str, Any]:
        """The optimizer's parameter group that it is in."""
        return next(g for g in self.optimizer.param_groups if any(p is self.parameter for p in g["params"]))


def owned(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Slot]:
    """The parameters of a model that require a gradient, by name, each with its optimizer.

    >>> layer = torch.nn.Linear(2, 1)
    >>> list(owned(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)]))
    ['weight', 'bias']

    Raises ValueError for one that no optimizer has, or more than one.
    """
    kind, owners = type(model).__name__, _owners(optimizers)
    named = {name: p for name, (_, p) in own_tensors(model, "parameters").items() if p.requires_grad}
    if not named:
        raise ValueError(f"attach: expected a model with parameters that require a gradient, got a {kind} without")
    if not any(id(p) in owners for p in named.values()):
        raise ValueError(f"attach: expected an optimizer of this {kind}, got one that has none of its parameters")
    slots = {}
    for name, p in named.items():
        if len(found := owners.get(id(p), [])) != 1:
            hint = "" if found else ": give it to one, or freeze it with requires_grad_(False)"
            raise ValueError(f"attach: expected one optimizer to have {name!r}, got {len(found)}{hint}")
        slots[name] = Slot(p, found[0])  # type: ignore[arg-type]
    return slots


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside the wrapper that accelerate puts around it, any other as it is.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    >>> unwrapped(optimizer) is optimizer
    True

    The wrapper leaves out the steps between accumulated gradients and has no step hooks.
    """
    return optimizer.optimizer if type(optimizer).__name__ in _WRAPPERS else optimizer  # type: ignore[attr-defined]


def _owners(optimizers: Sequence[Optimizer]) -> dict[int, list[Optimizer]]:
    owners: dict[int, list[Optimizer]] = {}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            owners.setdefault(id(parameter), []).append(optimizer)
    return owners


def slots_of(trained: Tree, params: Mapping[str, Tensor], weights: Mapping[str, Slot]) -> tuple[list[Slot], list[Slot]]:
    """A slot for each leaf of a trained tree, and for each that is no param the slot of the weight it belongs to.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weights = {"w": Slot(weight, torch.optim.SGD([weight], lr=0.1))}
    >>> slots, beside = slots_of({"scores": {"w": torch.zeros(2)}}, {"w": torch.ones(2)}, weights)
    >>> slots[0].parameter, beside[0].parameter
    (Parameter containing:
    tensor([0., 0.], requires_grad=True), Parameter containing:
    tensor([1., 1.], requires_grad=True))

    A leaf belongs to the weight whose name ends its path; that of no weight to the first.
    """
    names = {id(leaf): name for name, leaf in params.items()}
    slots, beside = [], []
    for path, leaf in flatten(trained)[0].items():
        if id(leaf) in names:
            slots.append(weights[names[id(leaf)]])
            continue
        ends = [name for name in weights if path == name or path.endswith(f".{name}")]
        near = weights[max(ends, key=len)] if ends else next(iter(weights.values()))
        slots.append(Slot(nn.Parameter(leaf.detach().clone()), near.optimizer))
        beside.append(near)
    return slots, beside


def enter(extra: Sequence[Slot], beside: Sequence[Slot], options: Mapping[str, object] | None) -> None:
    """Give new parameters to their optimizers: in the groups of their weights, or in one of their own with options.

    >>> weight, score = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> enter([Slot(score, optimizer)], [Slot(weight, optimizer)], {"lr": 1.0})
    >>> Slot(score, optimizer).group["lr"]
    1.0
    """
    if options is not None and not extra:
        raise ValueError(
            "attach: expected an algorithm that trains scores or latents for extra_group, got one that adds no "
            "parameters"
        )
    if options is None:
        for slot, near in zip(extra, beside, strict=True):
            near.group["params"].append(slot.parameter)
        return
    for optimizer in {id(slot.optimizer): slot.optimizer for slot in extra}.values():
        members = [slot.parameter for slot in extra if slot.optimizer is optimizer]
        optimizer.add_param_group({**options, "params": members})


def leave(extra: Sequence[Slot]) -> None:
    """Take parameters out of their optimizers, with their moments and with groups that become empty.

    >>> weight, score = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> optimizer = torch.optim.SGD([weight, score], lr=0.1)
    >>> leave([Slot(score, optimizer)])
    >>> optimizer.param_groups[0]["params"] == [weight]
    True
    """
    for slot in extra:
        group = slot.group
        group["params"] = [p for p in group["params"] if p is not slot.parameter]
        slot.optimizer.state.pop(slot.parameter, None)
        if not group["params"]:
            slot.optimizer.param_groups.remove(group)


def zeros_stay(optimizers: Sequence[Optimizer]) -> bool:
    """Whether optimizers leave an entry at zero whose weight, gradient and moments are zero.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> zeros_stay([torch.optim.Adam([weight])]), zeros_stay([torch.optim.Muon([weight])])
    (True, False)
    """
    return all(type(optimizer) in _ENTRY_BY_ENTRY for optimizer in optimizers)


def clear_moments(slot: Slot, live: Tensor) -> None:
    """Zero the moments of a slot where they are not live: the tensors of its state that have its shape.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(2)
    >>> clear_moments(Slot(weight, optimizer), torch.tensor([True, False]))
    >>> optimizer.state[weight]
    {'momentum_buffer': tensor([1., 0.])}
    """
    for moment in slot.optimizer.state.get(slot.parameter, {}).values():
        if isinstance(moment, Tensor) and moment.shape == live.shape:
            moment.masked_fill_(~live, 0)


def gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, dense and laid out as the parameter; zeros where it has none.

    >>> gradient(torch.nn.Parameter(torch.ones(2)))
    tensor([0., 0.])
    """
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter)
    return laid_out(grad if grad.layout == torch.strided else grad.to_dense(), parameter)


def address(x: Tensor) -> int:
    """Where the memory of a tensor begins; of a DTensor, of the part that is here.

    >>> x = torch.ones(2)
    >>> address(x) == address(x.detach())
    True
    """
    return here(x.detach()).data_ptr()


def differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether the tensors of each pair differ anywhere, on any process that holds a part of them.

    >>> x = torch.ones(2)
    >>> differ([(x, x.clone()), (x, 2 * x)])
    [False, True]

    All processes get the same answers, in one message: what they do next must not differ.
    """
    if not any(is_sharded(a) for a, _ in pairs):
        return [not torch.equal(a, b) for a, b in pairs]
    # Not `a != b`, which torch 2.11 lacks for DTensors.
    return [bool(count) for count in whole([(~(a == b)).sum() for a, b in pairs])]
