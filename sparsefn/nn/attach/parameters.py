"""The parameters that an attached algorithm reads or trains, and their gradients."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn._engine.processes import (
    any_sharded,
    full_tensors,
    is_sharded,
    local_tensor,
    redistributed,
)
from sparsefn.core.state import State, TrainView
from sparsefn.core.tree import Leaves, flatten, leaves_of

# the end of errors on what other code changed
AGAIN = "call detach(), then attach again"
_ALL = torch.tensor(True, device="cpu")
_PLAIN = {Tensor, nn.Parameter}


@dataclasses.dataclass(eq=False, slots=True)
class Record:
    """A parameter, the optimizer that moves it, and what is known of both.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> Record("w", weight, torch.optim.SGD([weight], lr=0.1)).group["lr"]
    0.1
    """

    name: str
    parameter: nn.Parameter
    optimizer: Optimizer
    # the weight that it was added for; None if the module has it
    added_for: Record | None = None
    trains: bool = False  # it is a leaf of the tree that the algorithm trains
    support: Tensor = _ALL  # where it trains
    # what trains in its place: "latents" that it is made of, or "scores" that its mask
    # is made of
    follows: str = ""
    # the state has values at its pruned entries, which the module does not show
    hidden: bool = False
    # its version and address when it was last read or written here
    noted: tuple[int, int] = (-1, -1)
    # the gradient that the optimizer was given, and its version then
    given: tuple[Tensor | None, int] = (None, -1)
    # the user's way to clear moments
    clear: Callable[[dict[str, Tensor], Tensor], object] | None = None
    # where the optimizer's states have factors, and no moments
    factors: frozenset[str] = frozenset()
    optimizers: Sequence[Optimizer] = ()  # the optimizer, and the optimizers inside it

    def __post_init__(self) -> None:
        self.optimizers = (self.optimizer, *inner_optimizers(self.optimizer))

    @property
    def group(self) -> dict[str, Any]:
        """The optimizer's parameter group that it is in."""
        return next(groups_with(self.optimizer, self.parameter))

    def is_written(self) -> bool:
        """Whether other code has written to the parameter, or moved it to other memory,
        since `note`.
        """
        return bool(written_among([self]))

    def note(self) -> None:
        """Note the present version and address of the parameter."""
        note_all([self])


# ---- records of what an algorithm trains ---------------------------------------------


def belongs(path: str, name: str) -> bool:
    """Whether a trained leaf is of the weight of that name: its path ends in it."""
    return path == name or path.endswith(f".{name}")


def trained_records(
    view: TrainView, state: State, weights: Mapping[str, Record]
) -> list[Record]:
    """A record for each leaf that an algorithm trains: the record of a weight, or a new
    record beside it.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> algorithm, optimizer = sf.supermask(0.5), torch.optim.SGD([weight], lr=0.1)
    >>> weights = {"w": Record("w", weight, optimizer)}
    >>> (record,) = trained_records(
    ...     algorithm.view, algorithm.init({"w": weight.detach()}), weights
    ... )
    >>> record.name, record.added_for.name
    ('scores.w', 'w')

    A leaf belongs to the weight whose name ends its path, a leaf of no weight to the
    first weight. Raises ValueError for SparseAdam, which takes no masked gradients.
    """
    names = {id(leaf): name for name, leaf in flatten(state.params)[0].items()}
    records = []
    for path, leaf in flatten(view.get(state))[0].items():
        if id(leaf) in names:
            records.append(weights[names[id(leaf)]])
            continue
        ends = [name for name in weights if belongs(path, name)]
        beside = weights[max(ends, key=len)] if ends else next(iter(weights.values()))
        if ends and beside.follows != "latents":
            beside.follows = "latents" if "latent" in path.split(".") else "scores"
        records.append(
            Record(path, nn.Parameter(leaf.detach().clone()), beside.optimizer, beside)
        )
    for record, support in zip(records, leaves_of(view.support(state)), strict=True):
        record.trains = True
        record.support = support
        record.follows = ""
        if isinstance(record.optimizer, torch.optim.SparseAdam) and (
            record.added_for or support.ndim
        ):
            raise ValueError(
                f"attach: SparseAdam takes no masks: leave {record.name!r} out of "
                "`where`, or use Adam"
            )
    return records


def put_in(extra: Sequence[Record], options: Mapping[str, object] | None) -> None:
    """Give new parameters to their optimizers: in the groups of their weights, or in
    one of their own with options.

    >>> weight, score = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> put_in(
    ...     [Record("s", score, optimizer, Record("w", weight, optimizer))], {"lr": 1.0}
    ... )
    >>> Record("s", score, optimizer).group["lr"]
    1.0
    """
    if options is not None and not extra:
        raise ValueError(
            "attach: extra_group is for new parameters, such as scores, and this "
            "algorithm adds none"
        )
    for optimizer in optimizers_of(extra):
        new = [record for record in extra if record.optimizer is optimizer]
        if options is not None:
            optimizer.add_param_group(
                {**options, "params": [record.parameter for record in new]}
            )
        for record in new if options is None else ():
            record.added_for.group["params"].append(record.parameter)  # type: ignore[union-attr]
        _forget_length(optimizer)


def take_out(extra: Iterable[Record]) -> None:
    """Take parameters out of their optimizers, with their moments and with groups that
    become empty.

    >>> weight, score = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> optimizer = torch.optim.SGD([weight, score], lr=0.1)
    >>> take_out([Record("s", score, optimizer)])
    >>> optimizer.param_groups[0]["params"] == [weight]
    True
    """
    for record in extra:
        record.optimizer.state.pop(record.parameter, None)
        for group in list(groups_with(record.optimizer, record.parameter)):
            group["params"][:] = [
                p for p in group["params"] if p is not record.parameter
            ]  # LBFGS holds this list
            if not group["params"]:
                record.optimizer.param_groups.remove(group)
        _forget_length(record.optimizer)


def _forget_length(optimizer: Optimizer) -> None:
    # LBFGS keeps the number of all entries, and directions of that length.
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer._numel_cache = None
        optimizer.state.clear()


def optimizers_of(records: Iterable[Record]) -> list[Optimizer]:
    """The optimizers of some parameters, each once."""
    return list(dict.fromkeys(record.optimizer for record in records))


def groups_with(optimizer: Optimizer, parameter: Tensor) -> Iterator[dict[str, Any]]:
    """The parameter groups of an optimizer that have a parameter.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> [group["lr"] for group in groups_with(torch.optim.SGD([weight], 0.1), weight)]
    [0.1]
    """
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            yield group


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that an optimizer holds in its attributes, as wrappers do.

    >>> inner_optimizers(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    []
    """
    found = {id(optimizer): optimizer}
    left = [optimizer]
    while left:
        for value in vars(left.pop()).values():
            held = list(value.values()) if isinstance(value, dict) else value
            for one in held if isinstance(held, list | tuple) else [held]:
                if isinstance(one, Optimizer) and id(one) not in found:
                    found[id(one)] = one
                    left.append(one)
    return list(found.values())[1:]


# ---- memory: who wrote to it ---------------------------------------------------------


def written_among(records: Collection[Record]) -> list[Record]:
    """The records of parameters to which other code has written since `note`."""
    found = []
    places = addresses([record.parameter for record in records])
    for record, place in zip(records, places, strict=True):
        if record.noted != (record.parameter._version, place):
            found.append(record)
    return found


def note_all(records: Collection[Record]) -> None:
    """Note the present versions and addresses of some parameters."""
    places = addresses([record.parameter for record in records])
    for record, place in zip(records, places, strict=True):
        record.noted = (record.parameter._version, place)


def addresses(tensors: Collection[Tensor]) -> list[int]:
    """The address of each tensor."""
    # quick, as every step asks often
    if set(map(type, tensors)) <= _PLAIN:
        return list(map(Tensor.data_ptr, tensors))
    return [address(x) for x in tensors]


def address(x: Tensor) -> int:
    """Where the memory of a tensor begins; of a DTensor, of the part that is here.

    >>> x = torch.ones(2)
    >>> address(x) == address(x.detach())
    True
    """
    return (local_tensor(x.detach()) if is_sharded(x) else x).data_ptr()


def differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether the tensors of each pair differ anywhere, on any process that holds a
    part of them; NaN is NaN.

    >>> x = torch.ones(2)
    >>> differ([(x, x.clone()), (x, 2 * x)])
    [False, True]

    All processes get the same answers, in one message: what they do next must not
    differ. A device is waited for once.
    """
    firsts = [a for a, _ in pairs]
    if all(a.is_cpu for a in firsts) and not any_sharded(firsts):
        return [
            not (torch.equal(a, b) or bool(same_or_nan(a, b).all())) for a, b in pairs
        ]
    counts = full_tensors([(~same_or_nan(a, b)).sum() for a, b in pairs])
    return torch.stack([count.to(counts[0].device) for count in counts]).bool().tolist()


def same_or_nan(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are equal, or both NaN.

    >>> same_or_nan(
    ...     torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([1.0, torch.nan, 4.0])
    ... )
    tensor([ True,  True, False])
    """
    return (a == b) | (a.isnan() & b.isnan())


def same_objects(ones: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold the same objects, not only equal ones.

    >>> same_objects([x := torch.ones(1)], [x]), same_objects([x], [x.clone()])
    (True, False)
    """
    return len(ones) == len(others) and all(map(is_, ones, others))


# ---- gradients -----------------------------------------------------------------------


def dense_gradient(parameter: Tensor, like: Tensor) -> Tensor:
    """The gradient of a parameter, dense and laid out as a leaf.

    It is zeros where the parameter has none.

    >>> dense_gradient(torch.nn.Parameter(torch.ones(2)), torch.ones(2))
    tensor([0., 0.])
    """
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(like)
    grad = grad if grad.layout == torch.strided else grad.to_dense()
    grad = redistributed(grad, like)
    # it does after backward(create_graph=True)
    return grad.detach() if grad.requires_grad else grad


def dense_gradients(records: Collection[Record]) -> dict[str, Tensor]:
    """The gradients of some weights by name.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> dense_gradients([Record("w", weight, torch.optim.SGD([weight], lr=0.1))])
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: no parameter has a new gradient: call it after backward()
    and before zero_grad(), on what attach returned for this very module; a copy of a
    module has parameters of its own, and several optimizers with closures need an
    attach each

    Raises RuntimeError where no parameter has a gradient, or each gradient is a masked
    one that an optimizer was given.
    """
    if not with_other_gradients(records):
        raise RuntimeError(
            "before_step: no parameter has a new gradient: call it after backward() "
            "and before zero_grad(), on what attach returned for this very module; a "
            "copy of a module has parameters of its own, and several optimizers with "
            "closures need an attach each"
        )
    dense = {}
    for record in records:
        grad = record.parameter.grad
        is_dense = type(grad) is Tensor and grad.layout == torch.strided
        if grad is None or not is_dense or grad.requires_grad:
            grad = dense_gradient(record.parameter, record.parameter)
        dense[record.name] = grad
    return dense


def give(
    records: Iterable[Record],
    trained: Sequence[Record],
    seen: Sequence[Tensor],
    dense: Leaves,
) -> None:
    """Make gradients what optimizers see, in memory of their own.

    An empty list gives no gradients.

    >>> weight, latent = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> optimizer = torch.optim.SGD([weight, latent], lr=0.1)
    >>> weight.grad = torch.ones(2)
    >>> weights, dense = [Record("w", weight, optimizer)], {"w": weight.grad}
    >>> give(
    ...     weights,
    ...     [Record("latent.w", latent, optimizer, weights[0], trains=True)],
    ...     [weight.grad],
    ...     dense,
    ... )
    >>> weight.grad, latent.grad, latent.grad is dense["w"]
    (None, tensor([1., 1.]), False)

    A parameter without a gradient stays without one. A gradient that is handed on as it
    is stays the parameter's own, and the dense one becomes a copy: what clips or zeroes
    it does not reach the algorithm.
    """
    held = dict(zip(addresses(dense.values()), dense, strict=True))
    given: dict[str, Tensor | None] = dict.fromkeys([r.name for r in trained])
    rows = zip(trained, seen, addresses(seen), strict=bool(seen))
    for record, grad, at in rows:
        own = record.parameter.grad
        if own is None and not record.added_for:
            continue
        if at not in held:
            given[record.name] = grad
            held[at] = ""
        elif held[at] != record.name:
            given[record.name] = grad.clone()
        else:
            given[record.name] = own
            # a sparse one was made dense, in memory of its own
            if own is not None and own.layout == torch.strided:
                dense[record.name] = grad.clone()
    others = [record for record in records if not record.trains]
    none = [None] * len(others)
    set_gradients([*trained, *others], [*given.values(), *none])


def set_gradients(records: Iterable[Record], grads: Iterable[Tensor | None]) -> None:
    """Let optimizers see some gradients."""
    for record, grad in zip(records, grads, strict=True):
        record.parameter.grad = grad
        record.given = (grad, -1 if grad is None else grad._version)


def with_other_gradients(records: Iterable[Record]) -> list[Record]:
    """The records whose gradient is not the gradient that `set_gradients` set, or has
    been written to since.
    """
    return [
        record
        for record in records
        if (grad := record.parameter.grad) is not None
        and not (grad is record.given[0] and grad._version == record.given[1])
    ]


def gradients_of(model: nn.Module) -> list[tuple[Tensor | None, int]]:
    """The gradients of a module's parameters, each with its version.

    >>> layer = torch.nn.Linear(2, 1)
    >>> gradients_of(layer)
    [(None, -1), (None, -1)]
    """
    grads = [parameter.grad for parameter in model.parameters()]
    return [(grad, -1 if grad is None else grad._version) for grad in grads]


def are_untouched(
    model: nn.Module, before: Sequence[tuple[Tensor | None, int]]
) -> bool:
    """Whether a module has the gradients that it had, and no code wrote to them.

    >>> layer = torch.nn.Linear(2, 1)
    >>> before = gradients_of(layer)
    >>> layer(torch.ones(2)).backward()
    >>> are_untouched(layer, before)
    False
    """
    rows = zip(gradients_of(model), before, strict=True)
    return all(
        grad is old and version == known for (grad, version), (old, known) in rows
    )


def warn_of_zeros(dense: Mapping[str, Tensor], step: int) -> None:
    """Warn where every gradient is zero, from which a change of masks learns nothing.

    >>> warn_of_zeros({"w": torch.ones(2)}, 3)
    """
    counts = full_tensors([grad.count_nonzero() for grad in dense.values()])
    if not any(bool(count) for count in counts):
        warnings.warn(
            f"after_step: every gradient was zero at step {step}, where masks "
            "changed: call before_step before zero_grad(set_to_none=False)",
            stacklevel=4,
        )
