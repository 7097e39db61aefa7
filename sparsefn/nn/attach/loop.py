"""The training loop around an optimizer's step: the order of its calls, which step
hooks see, and what must stay as `attach` found it.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sparsefn._engine.processes import is_sharded
from sparsefn.core.checks import as_int, check_kind
from sparsefn.core.state import Algorithm
from sparsefn.core.tree.where import matching
from sparsefn.core.triggers import At, Every
from sparsefn.nn.attach.files import arguments_of
from sparsefn.nn.attach.parameters import AGAIN, Record, optimizers_of, same_objects
from sparsefn.nn.modules.wrappers import own_tensors

STEP_ALONE = (
    "step: call before_step before it, and after_step after it; attach(..., "
    "hooks=True) has step() call both. An optimizer that steps during backward, in "
    "hooks of parameters, moves weights before masks see all gradients: step after "
    "backward"
)

_CALL_AFTER = (
    "call after_step after every before_step, also where the optimizer skipped its step"
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# an Attached, whose methods are called around the steps; None where it is garbage
Found = Callable[[], Any]


class Loop(enum.Enum):
    """Where a training loop is: it says which calls may come next.

    | state            | call                               | next state       |
    | ---------------- | ---------------------------------- | ---------------- |
    | READY            | before_step                        | GRADIENTS_MASKED |
    | GRADIENTS_MASKED | an optimizer's step                | STEPPED          |
    | GRADIENTS_MASKED | after_step, where no step was made | READY            |
    | STEPPED          | the step of another optimizer      | STEPPED          |
    | STEPPED          | after_step                         | READY            |
    | these three      | a step calls its closure           | READY            |
    | these three      | load_state_dict                    | READY            |
    | these three      | detach                             | DETACHED         |

    Other calls in this order raise RuntimeError. After the closure, `before_step`
    follows, and the optimizer's step ends in STEPPED. A closure that leaves all
    gradients alone leaves the state alone. With `attach(..., hooks=True)`, the
    optimizer's step calls `before_step` and `after_step`.
    """

    READY = enum.auto()
    GRADIENTS_MASKED = enum.auto()
    STEPPED = enum.auto()
    DETACHED = enum.auto()


# A step has begun, and has not ended.
IN_STEP = (Loop.GRADIENTS_MASKED, Loop.STEPPED)


class Position(NamedTuple):
    """The state of a loop, and what is known of its step.

    >>> position = Position().begin(0, {}, False)
    >>> position.loop
    <Loop.GRADIENTS_MASKED: 2>
    >>> position.check_ready("before_step")
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: called between before_step and after_step: call
    after_step after every before_step, also where the optimizer skipped its step

    Attributes:
        loop: The state.
        last: Number of the last step that ended; -1 before the first.
        number: Number of the step that has begun.
        gradients: The step's dense gradients by name of the weight.
        skipped: Whether the optimizer's step is left out.
        stepped: Optimizers that have stepped since `after_step`.
        moving: Optimizer in its step: its gradients and moments are masked.
        mixes: Whether an optimizer may have let pruned entries reach kept entries.
    """

    loop: Loop = Loop.READY
    last: int = -1
    number: int = -1
    gradients: Mapping[str, Tensor] = {}
    skipped: bool = False
    stepped: tuple[Optimizer, ...] = ()
    moving: Optimizer | None = None
    mixes: bool = False

    def check_attached(self) -> None:
        """Raise RuntimeError after `detach`."""
        if self.loop is Loop.DETACHED:
            raise RuntimeError("this algorithm was detached: attach it again")

    def check_between(self, call: str) -> None:
        """Raise RuntimeError for a call in a step."""
        if self.loop in IN_STEP:
            raise RuntimeError(
                f"{call}: called between before_step and after_step: {_CALL_AFTER}"
            )

    def check_ready(self, call: str) -> None:
        """Raise RuntimeError for a call in a step, or after `detach`."""
        if self.loop is not Loop.READY:
            self.check_attached()
            self.check_between(call)

    def check_in_step(self) -> None:
        """Raise RuntimeError for `after_step` without `before_step`."""
        if self.loop not in IN_STEP:
            self.check_attached()
            raise RuntimeError(
                "after_step: call before_step first, between backward and the "
                "optimizer's step"
            )

    def begin(
        self, number: int, gradients: Mapping[str, Tensor], skipped: bool
    ) -> Position:
        """After `before_step`.

        Where a closure has begun the step again, another optimizer may have stepped.
        """
        return self._replace(
            loop=Loop.STEPPED if self.stepped else Loop.GRADIENTS_MASKED,
            number=number,
            gradients=gradients,
            skipped=skipped,
        )

    def enter(self, optimizer: Optimizer, mixes: bool) -> Position:
        """While an optimizer moves the weights."""
        return self._replace(moving=optimizer, mixes=self.mixes or mixes)

    def leave(self, optimizer: Optimizer) -> Position:
        """After an optimizer's step."""
        stepped = (*self.stepped, optimizer)
        return self._replace(loop=Loop.STEPPED, stepped=stepped, moving=None)

    def begin_again(self) -> Position:
        """As before `before_step`: a closure makes other gradients."""
        return Position(last=self.last, stepped=self.stepped)


def later(call: str, step: object, last: int) -> int:
    """A step as an int, which has to be after the last one; NumPy's integers are ints.

    >>> later("after_step", 3, 2)
    3
    """
    number = as_int(call, "step", step)
    if number <= last:
        raise ValueError(f"{call}: expected a step after {last}, got {number}")
    check_kind(number)
    return number


def left_out(algorithm: Algorithm, last: int, step: int) -> str:
    """A warning of a trigger that fires at none but the steps between two, which a loop
    leaves out; "" without one.

    >>> left_out(sf.rigl(0.9), -1, 3), left_out(sf.rigl(0.9), 99, 103)[:72]
    ('', 'after_step: expected step 100, got 103, which leaves out where every(100')

    One is missed that fires between the two and not at the second. The first step of a
    run, where `last` is -1, may be a late one: then a trigger is missed that fires no
    more.
    """
    end = step if last >= 0 else 1 << 62
    for _, when in arguments_of(algorithm):
        if isinstance(when, Every | At) and when.count(last) < when.count(
            step - 1
        ) == when.count(end):
            return (
                f"after_step: expected step {last + 1}, got {step}, which leaves out "
                f"where {when!r} fires: count steps of the optimizer from 0, as "
                "after_step(i // 4) does where 4 batches make a step; where a run "
                "goes on, call load_state_dict first, and where it begins late, give "
                "the algorithm a later trigger"
            )
    return ""


def without_step(moved: Sequence[Record]) -> str:
    """A warning where no optimizer has stepped, though gradients are finite.

    >>> without_step([])[:55]
    'after_step: no optimizer has stepped since before_step:'

    Raises RuntimeError where weights have `moved` then.
    """
    if moved:
        raise RuntimeError(
            f"after_step: {moved[0].name!r} moved without its optimizer: for another "
            f"optimizer, {AGAIN}"
        )
    return (
        "after_step: no optimizer has stepped since before_step: where several "
        "batches make a step, call both around optimizer.step(), after the last "
        "backward; where a step is left out on purpose, all is well"
    )


def unmasked_loss(stained: Collection[str]) -> str:
    """A warning of a gradient that may belong to weights without masks.

    >>> unmasked_loss(["w"])[:63]
    "before_step: other code wrote to pruned entries of 'w' between "
    """
    return (
        f"before_step: other code wrote to pruned entries of {next(iter(stained))!r} "
        "between the steps. They are masked now, but if the loss was computed after "
        "the write, its gradient is the one of unmasked weights: after a write call "
        "apply_masks(), then compute the loss"
    )


# ---- step hooks ----------------------------------------------------------------------


class _Watch(NamedTuple):
    around: Found
    ids: Collection[int]  # of its parameters, which live as long as it does
    handles: Sequence[RemovableHandle]


# Optimizer -> who watches it, while it lives. Two algorithms on one weight would undo
# each other's work.
# Parameters are no keys: torch swaps no tensor that something refers to weakly.
_WATCHES: MutableMapping[Optimizer, list[_Watch]] = weakref.WeakKeyDictionary()


def watched(parameter: nn.Parameter) -> bool:
    """Whether an algorithm is attached to a parameter.

    The hooks of one that is garbage are removed.

    >>> watched(torch.nn.Parameter(torch.ones(2)))
    False
    """
    found = [
        watch
        for watches in _WATCHES.values()
        for watch in watches
        if id(parameter) in watch.ids
    ]
    for watch in found:
        if watch.around() is None:
            _remove(watch)
    return any(watch.around() is not None for watch in found)


def watch(around: Any, records: Sequence[Record], keep: bool) -> Callable[[], None]:
    """Set the step hooks, and return the function that removes them.

    With `keep` the optimizers hold what they call; else it may become garbage, and a
    step then raises RuntimeError.
    """
    alive = weakref.ref(around)
    found: Found = (lambda: around) if keep else alive
    handles: list[RemovableHandle] = []
    made = _Watch(alive, {id(record.parameter) for record in records}, handles)
    for optimizer in optimizers_of(records):
        handles.append(optimizer.register_step_pre_hook(partial(_before, found)))
        handles.append(optimizer.register_step_post_hook(partial(_after, found)))
        _WATCHES.setdefault(optimizer, []).append(made)
    return partial(_remove, made)


def _remove(watch: _Watch) -> None:
    for handle in watch.handles:
        handle.remove()
    for watches in _WATCHES.values():
        watches[:] = [one for one in watches if one is not watch]


def _before(
    found: Found, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    around = found()
    if around is None:
        raise RuntimeError(
            "step: what sf.attach returned for these weights is gone: keep it, or "
            "call detach() first"
        )
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    around.enter_step(optimizer, closure is not None)
    if closure is None:
        return None
    wrapped = partial(around.around_closure, optimizer, closure)
    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


def _after(
    found: Found, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any
) -> None:
    around = found()
    if around is not None:
        around.leave_step(optimizer)


# ---- module and optimizers are what they were ----------------------------------------


class ParameterLinks:
    """Where the parameters of an algorithm are reached, in a module and in optimizers.

    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> weights = [Record("weight", layer.weight, optimizer)]
    >>> links = ParameterLinks(layer, weights, weights)
    >>> layer.weight = torch.nn.Parameter(torch.ones(1, 2))
    >>> links.check_module()
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: 'weight', or a layer that holds it, was replaced since
    attach: call detach(), then attach again
    """

    def __init__(
        self, model: nn.Module, weights: Iterable[Record], trained: Sequence[Record]
    ) -> None:
        self.links = links_of(model, weights)
        self.trained = trained
        self.optimizers = optimizers_of(trained)
        # the optimizers' parameters at the last look, whether each trained, and the ids
        # of all that were seen to train
        self.members: list[Tensor] = []
        self.train: list[bool] = []
        self.known: set[int] = set()
        self.new_members()

    def check_module(self) -> None:
        """Raise RuntimeError where a parameter, or a layer that holds it, was
        replaced.
        """
        for place, key, held, name in self.links:
            if key not in place or place[key] is not held:
                raise RuntimeError(
                    f"before_step: {name!r}, or a layer that holds it, was replaced "
                    f"since attach: {AGAIN}"
                )

    def new_members(self) -> list[Tensor]:
        """The parameters that the optimizers train since the last look.

        Raises RuntimeError for a record whose optimizer has it no more. The parameters
        are looked at one by one where they, or whether they train, differ.
        """
        members = [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        train = [parameter.requires_grad for parameter in members]
        if same_objects(members, self.members) and train == self.train:
            return []
        found = {id(parameter): parameter for parameter in members}
        for record in self.trained:
            if id(record.parameter) not in found:
                raise RuntimeError(
                    f"before_step: the optimizer of {record.name!r} has it no more: "
                    f"{AGAIN}"
                )
        new = [
            parameter
            for key, parameter in found.items()
            if key not in self.known and parameter.requires_grad
        ]
        self.members = members
        self.train = train
        self.known |= {id(parameter) for parameter in new}
        return new


class Link(NamedTuple):
    """A place in a module that a parameter is reached through, and what was there."""

    place: Mapping[str, Any]
    key: str
    held: object
    name: str


def links_of(model: nn.Module, weights: Iterable[Record]) -> list[Link]:
    """The places in a module through which its parameters are reached.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    >>> weights = [
    ...     Record(
    ...         "0.weight", model[0].weight, torch.optim.SGD(model.parameters(), lr=0.1)
    ...     )
    ... ]
    >>> [link.key for link in links_of(model, weights)]
    ['0', 'weight']

    Parameters of `fully_shard` are left out, which come and go around every forward
    pass.
    """
    paths = {name: path for name, (path, _) in own_tensors(model, "parameters").items()}
    found: dict[tuple[int, str], Link] = {}
    for record in weights:
        node: Any = model
        for part in paths[record.name].split("."):
            place = node._modules if part in node._modules else node._parameters
            if part not in place or (
                place is node._parameters and is_sharded(record.parameter)
            ):
                break
            found.setdefault(
                (id(node), part), Link(place, part, place[part], record.name)
            )
            node = place[part]
    return list(found.values())


def left_dense(algorithm: Algorithm, model: nn.Module, new: Collection[Tensor]) -> str:
    """A warning of a parameter that is new in an optimizer, and that an algorithm would
    have masked; "" without one.

    >>> net = torch.nn.Linear(2, 1)
    >>> (
    ...     left_dense(sf.static(0.5), net, [net.bias]),
    ...     left_dense(sf.static(0.5), net, [net.weight])[:45],
    ... )
    ('', "before_step: 'weight' trains since attach, an")
    """
    named = {name: p for name, (_, p) in own_tensors(model, "parameters").items()}
    added = {id(p) for p in new}
    for argument, where in arguments_of(algorithm):
        chosen = matching("where", where, named) if argument == "where" else {}
        for name, p in chosen.items():
            if id(p) in added:
                return (
                    f"before_step: {name!r} trains since attach, and stays dense: add "
                    f"or unfreeze it before, or {AGAIN}"
                )
    return ""
