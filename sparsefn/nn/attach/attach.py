"""`attach`: an algorithm in a loop of torch.nn and torch.optim."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn import optim
from sparsefn._engine.leaves import is_sparse
from sparsefn._engine.processes import full_tensors
from sparsefn.algorithms.combine.same_step import check_paired
from sparsefn.core.checks import check_trigger, uncalled
from sparsefn.core.state import Algorithm, Trigger
from sparsefn.core.timetable import unfinished
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import never
from sparsefn.masks.sets import kept_in
from sparsefn.nn.attach import order
from sparsefn.nn.attach.attached import Attached
from sparsefn.nn.attach.moments import check_moments
from sparsefn.nn.attach.optimizer_state import check_optimizer, without_wrapper
from sparsefn.nn.attach.placed import Placed
from sparsefn.nn.attach.records import (
    check_unowned,
    optimizers_of,
    owned_parameters,
    put_in,
)
from sparsefn.nn.modules.originals import check_masked
from sparsefn.nn.modules.wrappers import own_tensors

_ORDER = "write sf.attach(algorithm, model, optimizer)"
# times as many frozen weights as masked ones: adapters train, the model does not
_ADAPTERS = 10


@torch.no_grad()
def attach(
    algorithm: Algorithm,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    hooks: bool = False,
    extra_group: Mapping[str, object] | None = None,
    skip: Trigger | None = None,
    reset: Trigger = never(),
    steps: int | None = None,
    clear: Callable[[dict[str, Tensor], Tensor], object] | None = None,
) -> Attached:
    """Run an algorithm in a module that torch optimizers train.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ... )
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> sparse = sf.attach(sf.rigl(0.75, steps=20, where="0.weight"), model, optimizer)
    >>> for step in range(20):
    ...     torch.nn.functional.cross_entropy(
    ...         model(torch.ones(3, 4)), torch.tensor([0, 1, 1])
    ...     ).backward()
    ...     sparse.before_step()  # dense gradients are kept; clip after it
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     sparse.after_step(step)
    >>> int(model[0].weight.count_nonzero())
    8

    A step needs one backward pass.

    The module gets the effective weights at once. It trains as `with_optimizer` would:
    the same masks, moments that start anew where weights are pruned and where they
    grow; but the optimizer may be any of torch's, or several. The module gets no hooks,
    and no parameter is renamed or replaced. Each optimizer gets two step hooks, which
    see the order of the calls: a step without `before_step`, or before `after_step`,
    raises RuntimeError. What the algorithm trains beside the parameters (scores of
    `supermask`, latents of `reparametrised`) joins the optimizer as new parameters, in
    the groups of the weights, or in one group with the options of `extra_group`, such
    as `{"lr": 1e-2}`. Make schedulers after `attach` then, as they count the groups
    when they are made.

    `skip` leaves out the optimizer's step where it fires, and `reset` starts the
    optimizer anew after the update, as in `with_optimizer`. With `steps`, the length of
    the run, a warning says what of the algorithm's schedules and triggers lies after
    its end. Warnings also name a leaf of which the mask keeps nothing, and a model of
    which nearly all weights are frozen, as with adapters. Both at once, where the leaf
    is all zeros as a new adapter is, are an error. Later warnings, each once: steps
    that leave out where a trigger fires, gradients for which no optimizer stepped,
    pruned weights that somebody wrote between the steps, and a weight that is added to
    an optimizer or unfrozen after `attach` and so stays dense.

    With `hooks` the optimizer's step calls both methods itself, and counts the steps,
    for frameworks that call `step()` themselves. Gradients are then clipped before they
    are masked. An optimizer that accelerate or Lightning has wrapped is taken out of
    its wrapper. One that takes the place of this optimizer has no hooks: call `detach`,
    then attach again.

    Moments are the tensors of the optimizer's state with an entry for each one of the
    weight: also nested, flat, in 8-bit codes, or in an optimizer inside this one. They
    start at zero, and copies of the weights at the weight. A state of which this is not
    known is refused, here or in the first step that shows it. `clear` serves such
    states, and moments that start elsewhere: a function that gets the optimizer's state
    of one masked parameter, and a bool tensor of the parameter's shape, and sets
    moments to their first values where that is true. It is called after each step and
    each change of masks, in place of the library's own rule.

    >>> def clear(state, entries):
    ...     state["exp_avg"].masked_fill_(entries, 0.0)
    ...     state["exp_avg_sq"].masked_fill_(entries, 1e-6)
    >>> layer = torch.nn.Linear(4, 8)
    >>> sparse = sf.attach(
    ...     sf.rigl(0.75, where="weight"),
    ...     layer,
    ...     torch.optim.Adam(layer.parameters()),
    ...     clear=clear,
    ... )

    A parameter that requires no gradient is left alone, and so is one that no optimizer
    has and that the algorithm leaves dense. Raises TypeError for other arguments,
    ValueError for a parameter that is sparsified and that no optimizer has, for one
    that several have, for a model that is attached already, for an algorithm with an
    optimizer inside, for hooks on several optimizers, for SparseAdam on masked leaves,
    for an optimizer whose moments are not known or that moves copies of the weights or
    steps during backward, for new adapters that the masks would keep nothing of, for a
    masked parameter that a layer computes its weight from, as weight norm does, and for
    a score that multiplies weights by gradients without `skip`.
    """
    if not isinstance(algorithm, Algorithm):
        got = uncalled(algorithm) or type(algorithm).__name__
        raise TypeError(
            f"attach: expected an Algorithm first, such as sf.rigl(0.9), got {got}; "
            f"{_ORDER}"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach: expected a torch.nn.Module second, got {type(model).__name__}; "
            f"{_ORDER}"
        )
    # an optimizer of this library is a named tuple
    several = type(optimizer) in (list, tuple)
    given: list[Optimizer] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type, list-item]
    for one in given:
        if not isinstance(one, Optimizer):
            raise TypeError(
                "attach: expected a torch optimizer third, or several, got "
                f"{_name_of(one)}"
            )
    # The wrapper that accelerate puts around one leaves out the steps between
    # accumulated gradients.
    optimizers = [without_wrapper(one) for one in given]
    if hooks and len(optimizers) != 1:
        raise ValueError(
            f"attach: hooks go with one optimizer, got {len(optimizers)}: call the "
            "two methods instead"
        )
    if not (clear is None or callable(clear)):
        raise TypeError(
            "attach: expected clear to be a function of (state, entries), got "
            f"{type(clear).__name__}"
        )
    check_trigger("skip", never() if skip is None else skip)
    check_trigger("reset", reset)
    check_paired("attach", algorithm, skip)
    weights = owned_parameters(model, optimizers)
    for name, record in weights.items():
        if order.watched(record.parameter):
            raise ValueError(
                f"attach: {name!r} has an algorithm attached already: call its "
                "detach() first"
            )
    check_unowned(algorithm, model, weights)
    placed = Placed(algorithm, weights)
    places = {
        name: path for name, (path, _) in own_tensors(model, "parameters").items()
    }
    check_masked("attach", model, places, placed.state.masks)
    _judge(placed, model, steps)
    for record in placed.trained:
        record.clear = clear
    for one in optimizers_of(placed.trained):
        added = [
            record
            for record in placed.extra
            if record.optimizer is one and extra_group is None
        ]
        check_optimizer(one, added)
        check_moments(one, placed.trained)
    put_in(placed.extra, extra_group)
    return Attached(model, placed, skip, reset, hooks)


def _name_of(optimizer: object) -> str:
    if isinstance(optimizer, type):
        return f"the class {optimizer.__name__}: call it with model.parameters()"
    if isinstance(optimizer, optim.Optimizer) or uncalled(optimizer):
        name = getattr(optimizer, "__name__", repr(optimizer))
        return (
            f"sf.optimizers.{name}: it goes into with_optimizer, and torch.optim's "
            "goes here"
        )
    if isinstance(optimizer, nn.Module | Tensor | Iterator):
        return (
            f"{type(optimizer).__name__}: make one, as "
            "torch.optim.AdamW(model.parameters(), lr=1e-3) does"
        )
    return type(optimizer).__name__


def _judge(placed: Placed, model: nn.Module, steps: int | None) -> None:
    """Raise for the masks of fresh adapters, which nothing passes, and warn of masks
    that may not be meant.
    """
    records = placed.weights
    masks = placed.state.masks
    sparse = [
        path
        for path, record in records.items()
        if is_sparse(masks[path], record.parameter)
    ]
    total = sum(masks[path].numel() for path in sparse)
    frozen = sum(
        p.numel()
        for n, p in model.named_parameters()
        if not p.requires_grad and default_where(n, p)
    )
    adapts = frozen > _ADAPTERS * total
    advice = "with adapters such as LoRA, masks prune the adapters and not the model"
    sentences = [] if steps is None else unfinished(placed.algorithm, steps)
    for path, kept in zip(
        sparse, kept_in([masks[path] for path in sparse]), strict=True
    ):
        count = masks[path].numel()
        if (
            not kept
            and adapts
            and not any(
                full_tensors([records[path].parameter.detach().count_nonzero()])
            )
        ):
            raise ValueError(
                f"attach: the mask of {path!r} keeps none of its {count} weights, "
                f"which are all zero as those of a new adapter are, and {frozen:,} "
                f"weights are frozen: {advice}. In place of attach, "
                "sf.integrations.peft.keep_zeros(model) keeps the model's own zeros; "
                "or leave it out of `where`"
            )
        if not kept:
            sentences.append(f"the mask of {path!r} keeps none of its {count} weights")
    if adapts:
        stay = (
            f"masks go to {total:,} weights that train, and {frozen:,} frozen weights "
            "stay as they are"
        )
        sentences.append(f"{stay}: {advice}")
    for sentence in sentences:
        warnings.warn(f"attach: {sentence}", stacklevel=4)
