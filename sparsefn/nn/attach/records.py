"""A record for each parameter that an attached algorithm reads or trains."""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
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

from sparsefn._engine.leaves import is_sparse
from sparsefn._engine.processes import (
    any_sharded,
    full_tensors,
    is_sharded,
    local_tensor,
)
from sparsefn.core.state import Algorithm, State, TrainView
from sparsefn.core.tree import flatten, leaves_of
from sparsefn.nn.modules.wrappers import own_tensors

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
    beside: Record | None = (
        None  # the weight that it was added for; None if the module has it
    )
    trains: bool = False  # it is a leaf of the tree that the algorithm trains
    support: Tensor = _ALL  # where it trains
    # what trains in its place: "latents" that it is made of, or "scores" that its mask
    # is made of
    follows: str = ""
    # the state has values at its pruned entries, which the module does not show
    hidden: bool = False
    found: Tensor | None = None  # the values that `attach` found, until the first step
    # its version and address when it was last read or written here
    noted: tuple[int, int] = (-1, -1)
    written: bool = (
        False  # somebody wrote to it between before_step and the optimizer's step
    )
    given: Tensor | None = None  # the gradient that the optimizer was given
    given_version: int = -1
    clear: Callable[[dict[str, Tensor], Tensor], object] | None = (
        None  # the user's way to clear moments
    )
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
        """Whether somebody has written to the parameter, or moved it to other memory,
        since `note`.
        """
        return bool(written_among([self]))

    def note(self) -> None:
        """Note the present version and address of the parameter."""
        note_all([self])


def set_gradients(records: Iterable[Record], grads: Iterable[Tensor | None]) -> None:
    """Let optimizers see some gradients."""
    for record, grad in zip(records, grads, strict=True):
        record.parameter.grad = record.given = grad
        record.given_version = -1 if grad is None else grad._version


def with_other_gradients(records: Iterable[Record]) -> list[Record]:
    """The records whose gradient is not the gradient that `set_gradients` set, or has
    been written to since.
    """
    found = []
    for record in records:
        grad = record.parameter.grad
        is_set = grad is record.given
        if grad is not None and not (is_set and grad._version == record.given_version):
            found.append(record)
    return found


def written_among(records: Collection[Record]) -> list[Record]:
    """The records of parameters to which somebody has written since `note`."""
    pairs = zip(records, _versions_and_addresses(records), strict=True)
    return [record for record, now in pairs if record.noted != now]


def note_all(records: Collection[Record]) -> None:
    """Note the present versions and addresses of some parameters."""
    for record, now in zip(records, _versions_and_addresses(records), strict=True):
        record.noted = now


def _versions_and_addresses(
    records: Collection[Record],
) -> Iterable[tuple[int, int]]:
    parameters = [record.parameter for record in records]
    versions = [parameter._version for parameter in parameters]
    return zip(versions, addresses(parameters), strict=True)


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
            f"{kind} without"
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
        return any(_belongs(path, name) for path in latents)

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


def _belongs(path: str, name: str) -> bool:
    # Whether a trained leaf is of the weight of that name: its path ends in it.
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
    >>> record.name, record.beside.name
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
        ends = [name for name in weights if _belongs(path, name)]
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
            record.beside or support.ndim
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
            record.beside.group["params"].append(record.parameter)  # type: ignore[union-attr]
        _forget_length(optimizer)


def optimizers_of(records: Iterable[Record]) -> list[Optimizer]:
    """The optimizers of some parameters, each once."""
    return list(dict.fromkeys(record.optimizer for record in records))


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


def same_objects(ones: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold the same objects, not only equal ones.

    >>> same_objects([x := torch.ones(1)], [x]), same_objects([x], [x.clone()])
    (True, False)
    """
    return len(ones) == len(others) and all(map(is_, ones, others))


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
