"""`attach`: an algorithm in a loop of torch.nn and torch.optim."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from sparsefn.attached.attached import Attached
from sparsefn.attached.slots import owned, unwrapped
from sparsefn.state import Algorithm

# Parameter -> what is attached to it, while both live. Two algorithms on one weight would undo each other's work.
_ATTACHED: MutableMapping[nn.Parameter, weakref.ref[Attached]] = WeakIdKeyDictionary()


@torch.no_grad()
def attach(
    algorithm: Algorithm,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    hooks: bool = False,
    extra_group: Mapping[str, object] | None = None,
) -> Attached:
    """Run an algorithm in a module that torch optimizers train, with one backward pass a step.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> sparse = sf.attach(sf.rigl(0.75, steps=20, where="0.weight"), model, optimizer)
    >>> for step in range(20):
    ...     torch.nn.functional.cross_entropy(model(torch.ones(3, 4)), torch.tensor([0, 1, 1])).backward()
    ...     sparse.before_step()  # dense gradients are kept; clip after it
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     sparse.after_step(step)
    >>> int(model[0].weight.count_nonzero())
    8

    The module gets the effective weights at once. It trains as `with_optimizer` would: the same masks, moments
    that are zero where weights are pruned and start anew where they grow; but the optimizer may be any of torch's, or
    several. No hook is set, and no parameter is renamed or replaced. What the algorithm trains beside the
    parameters (scores of `supermask`, latents of `reparametrised`) joins the optimizer as new parameters, in the groups
    of the weights, or in one group with the options of `extra_group`, such as `{"lr": 1e-2}`. Make schedulers after
    `attach` then, as they count the groups when they are made.

    With `hooks` the optimizer's own step hooks call both methods, and count the steps, for frameworks that call
    `step()` themselves. Gradients are then clipped before they are masked. An optimizer that accelerate has wrapped is
    taken out of its wrapper.

    A parameter that requires no gradient is left alone. Raises TypeError for other arguments, ValueError for a
    parameter that no optimizer has or more than one, for a model that is attached already, for an algorithm with an
    optimizer inside, and for hooks on several optimizers.
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"attach: expected an Algorithm first, such as sf.rigl(0.9), got {type(algorithm).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach: expected a torch.nn.Module second, got {type(model).__name__}")
    several = type(optimizer) in (list, tuple)  # an optimizer of this library is a named tuple
    given: list[Optimizer] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type, list-item]
    for one in given:
        if not isinstance(one, Optimizer):
            raise TypeError(f"attach: expected a torch optimizer third, or several, got {type(one).__name__}")
    optimizers = [unwrapped(one) for one in given]
    if hooks and len(optimizers) != 1:
        raise ValueError(f"attach: hooks go with one optimizer, got {len(optimizers)}: call the two methods instead")
    weights = owned(model, optimizers)
    for name, slot in weights.items():
        found = _ATTACHED.get(slot.parameter)
        if found is not None and (other := found()) is not None and other.is_attached:
            raise ValueError(f"attach: {name!r} has an algorithm attached already: call its detach() first")
    sparse = Attached(algorithm, weights, optimizers, extra_group)
    for slot in weights.values():
        _ATTACHED[slot.parameter] = weakref.ref(sparse)
    if hooks:
        _hook(sparse, optimizers[0])
    return sparse


def _hook(sparse: Attached, optimizer: Optimizer) -> None:
    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(x is not None for x in (*args[1:], *kwargs.values())):
            raise RuntimeError(
                "attach: hooks run before a closure makes the gradients: without hooks, call before_step at the end of "
                "the closure and after_step after the step"
            )
        sparse.before_step()

    def after(*_: Any) -> None:
        sparse.after_step(sparse._last + 1)

    sparse._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
