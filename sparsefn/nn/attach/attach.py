"""`attach`: an algorithm in a loop of torch.nn and torch.optim."""

from __future__ import annotations

import warnings
from collections import defaultdict
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
from sparsefn.core.tree import check_not_meta, flatten
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import never
from sparsefn.masks.sets import kept_in
from sparsefn.nn.attach.handle import Attached
from sparsefn.nn.attach.loop import watched
from sparsefn.nn.attach.module_state import ModuleState
from sparsefn.nn.attach.optimizer_state import check_moments
from sparsefn.nn.attach.parameters import (
    Record,
    belongs,
    inner_optimizers,
    optimizers_of,
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

    Args:
        algorithm: Algorithm without an optimizer inside: torch's take its place.
        model: Module that gets the effective weights at once. It gets no hooks, and no
            parameter is renamed or replaced. A parameter that requires no gradient is
            left alone, and so is one that no optimizer has and that the algorithm
            leaves dense.
        optimizer: Any torch optimizer of the model, or a list or tuple of several. Each
            gets two step hooks, which see the order of the calls. An optimizer that
            accelerate or Lightning has wrapped is taken out of its wrapper. One that
            takes the place of this optimizer has no hooks: call `detach`, then attach
            again.
        hooks: Whether the optimizer's step calls `before_step` and `after_step` itself
            and counts the steps, for frameworks that call `step()` themselves.
            Gradients are then clipped before they are masked.
        extra_group: Options of one new parameter group, such as `{"lr": 1e-2}`, for
            what the algorithm trains beside the parameters (scores of `supermask`,
            latents of `reparametrised`). Default: they join the groups of the weights.
            Make schedulers after `attach` then, as they count the groups when they are
            made.
        skip: Trigger that leaves out the optimizer's step where it fires, as in
            `with_optimizer`. Default: no step is left out.
        reset: Trigger that resets the optimizer's state after the update, as in
            `with_optimizer`. Default: it never fires.
        steps: Length of the run. With it, a warning says what of the algorithm's
            schedules and triggers lies after its end.
        clear: Function of the optimizer's state of one masked parameter, and of a bool
            tensor of the parameter's shape, which sets moments to their first values
            where that is true. It is called after each step and each change of masks,
            in place of the library's own rule: for states that the rule does not know,
            and for moments that start elsewhere. Default: the rule.

    Returns:
        An `Attached`. Call its `before_step` after one backward pass, and its
        `after_step` after the optimizer's step. In the end its `detach` leaves the
        weights to evaluate: masks that are soft or drawn in training are hard then.

    Raises:
        TypeError: An argument is of another type.
        ValueError: No optimizer has a parameter that is sparsified, or several have it;
            a masked parameter is one that a layer computes its weight from, as weight
            norm does; the model is attached already; the algorithm has an optimizer
            inside; a score multiplies weights by gradients, and `skip` is None;
            `extra_group` is given, and the algorithm trains nothing beside parameters.
        ValueError: There are hooks on several optimizers, SparseAdam on masked leaves,
            an optimizer whose moments are not known, here or in the first step that
            shows it, or one that moves copies of the weights or steps during backward.
        ValueError: The masks would keep nothing of a leaf of zeros, as a new adapter
            is, and nearly all weights are frozen; or weights are on the meta device.
        RuntimeError: Later, an optimizer steps without `before_step`, or a second time
            before `after_step`.

    The module trains as `with_optimizer` would: the same masks, and moments that are
    reset where weights are pruned and where they grow. Moments are the tensors of the
    optimizer's state with an entry for each one of the weight: also nested, flat, in
    8-bit codes, or in an optimizer inside this one. They start at zero, and copies of
    the weights at the weight.

    Warnings also name a leaf of which the mask keeps nothing, and a model of which
    nearly all weights are frozen, as with adapters. Later warnings, each once: steps
    that leave out where a trigger fires, gradients for which no optimizer stepped,
    pruned weights that other code wrote between the steps, and a weight that is added
    to an optimizer or unfrozen after `attach` and so stays dense.
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
        if watched(record.parameter):
            raise ValueError(
                f"attach: {name!r} has an algorithm attached already: call its "
                "detach() first"
            )
    check_unowned(algorithm, model, weights)
    check_not_meta("attach", [(name, r.parameter) for name, r in weights.items()])
    module_state = ModuleState(algorithm, weights)
    places = {
        name: path for name, (path, _) in own_tensors(model, "parameters").items()
    }
    check_masked("attach", model, places, module_state.state.masks)
    _judge(module_state, model, steps)
    for record in module_state.trained:
        record.clear = clear
    for one in optimizers_of(module_state.trained):
        added = [
            record
            for record in module_state.extra
            if record.optimizer is one and extra_group is None
        ]
        check_optimizer(one, added)
        check_moments(one, module_state.trained)
    put_in(module_state.extra, extra_group)
    return Attached(model, module_state, skip, reset, hooks)


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


def _judge(module_state: ModuleState, model: nn.Module, steps: int | None) -> None:
    """Raise for the masks of fresh adapters, which nothing passes, and warn of masks
    that may not be meant.
    """
    records = module_state.weights
    masks = module_state.state.masks
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
    sentences = [] if steps is None else unfinished(module_state.algorithm, steps)
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
                f"which are all zero as in a new adapter, and {frozen:,} "
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


def owned_parameters(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, Record]:
    """The parameters of a model that require a gradient and have an optimizer, by name.

    >>> layer = torch.nn.Linear(2, 1)
    >>> list(owned_parameters(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)]))
    ['weight', 'bias']

    Raises ValueError for parameters that several optimizers have, and where no
    optimizer has a parameter of the model.
    """
    kind = type(model).__name__
    owners = defaultdict(list)
    for optimizer in optimizers:
        for parameter in (
            p for group in optimizer.param_groups for p in group["params"]
        ):
            owners[id(parameter)].append(optimizer)
    named = {
        name: p
        for name, (_, p) in own_tensors(model, "parameters").items()
        if p.requires_grad
    }
    if not named:
        raise ValueError(
            "attach: expected a model with parameters that require a gradient, got a "
            f"{kind} without: unfreeze what trains, as model.requires_grad_(True) does"
        )
    if not any(id(p) in owners for p in named.values()):
        raise ValueError(
            f"attach: expected an optimizer of this {kind}, got one that has none of "
            "its parameters"
        )
    if shared := [repr(name) for name, p in named.items() if len(owners[id(p)]) > 1]:
        raise ValueError(
            f"attach: expected one optimizer to have {', '.join(shared)}, got "
            "several: take it out of all but one"
        )
    owned = {name: p for name, p in named.items() if owners[id(p)]}
    return {name: Record(name, p, owners[id(p)][0]) for name, p in owned.items()}  # type: ignore[arg-type]


def check_unowned(
    algorithm: Algorithm, model: nn.Module, weights: Mapping[str, Record]
) -> None:
    """Raise ValueError for parameters that an algorithm sparsifies or makes from
    latents, and that no optimizer has.

    >>> layer = torch.nn.Linear(2, 1)
    >>> weights = owned_parameters(layer, [torch.optim.SGD([layer.weight], lr=0.1)])
    >>> check_unowned(sf.static(0.5), layer, weights)
    >>> check_unowned(sf.static(0.5, where="*"), layer, weights)
    Traceback (most recent call last):
        ...
    ValueError: attach: expected an optimizer to have 'bias', which the algorithm
    sparsifies: give it to one, freeze it with requires_grad_(False), or leave it out of
    `where`
    """
    params = {
        name: p.detach()
        for name, (_, p) in own_tensors(model, "parameters").items()
        if p.requires_grad
    }
    unowned = [name for name in params if name not in weights]
    if not unowned:
        return
    with warnings.catch_warnings():  # the init of the others warns again
        warnings.simplefilter("ignore")
        state = algorithm.init(params)
    own = {id(leaf) for leaf in state.params.values()}
    latents = [
        path
        for path, leaf in flatten(algorithm.view.get(state))[0].items()
        if id(leaf) not in own
    ]

    def has_latents(name: str) -> bool:
        return any(belongs(path, name) for path in latents)

    needed = [
        repr(name)
        for name in unowned
        if is_sparse(state.masks[name], params[name]) or has_latents(name)
    ]
    if needed:
        raise ValueError(
            f"attach: expected an optimizer to have {', '.join(needed)}, which the "
            "algorithm sparsifies: give it to one, freeze it with "
            "requires_grad_(False), or leave it out of `where`"
        )


def without_wrapper(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps: the inner one if a wrapper has no step hooks, as the
    wrappers of accelerate and Lightning.

    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    >>> without_wrapper(sgd) is sgd
    True

    Wrappers with step hooks, such as ZeroRedundancyOptimizer, may move the weights
    after the optimizer inside them.
    """
    held = (
        []
        if "_optimizer_step_pre_hooks" in vars(optimizer)
        else inner_optimizers(optimizer)
    )
    return without_wrapper(held[0]) if held else optimizer


def check_optimizer(optimizer: Optimizer, extra: Sequence[Record]) -> None:
    """Raise ValueError for an optimizer that masks do not reach: it moves other
    tensors, or moves weights elsewhere.

    >>> check_optimizer(
    ...     torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), []
    ... )
    """
    kind = type(optimizer).__name__
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for one in inner_optimizers(optimizer):
        if any(id(p) not in own for group in one.param_groups for p in group["params"]):
            raise ValueError(
                f"attach: {kind} has a {type(one).__name__} inside, which moves "
                "copies of the weights (master weights, or on another device), and "
                "masks do not reach those: give it the weights themselves"
            )
        lists = [group["params"] for group in one.param_groups]
        shared = {id(params) for params in lists}
        groups = [record.added_for.group for record in extra if record.added_for]
        if any(id(group["params"]) not in shared for group in groups):
            raise ValueError(
                f"attach: {kind} would not move new parameters, such as "
                f"{extra[0].name!r}, in the groups of their weights, as the optimizer "
                "inside it has groups of its own: pass extra_group={} for a new "
                "group"
            )
    in_backward = any(
        hasattr(p, "_in_backward_optimizers")
        for g in optimizer.param_groups
        for p in g["params"]
    )
    if in_backward or getattr(optimizer, "_overlap_with_ddp", False):
        raise ValueError(
            f"attach: {kind} moves weights during backward, before masks see the "
            "gradients: step after backward, without apply_optimizer_in_backward or "
            "overlap_with_ddp"
        )
