"""What other code did to a module: written weights, replaced parameters and layers."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn._engine.leaves import either, is_sparse, zeroed
from sparsefn._engine.processes import full_tensors, is_sharded
from sparsefn.core.state import Algorithm, State
from sparsefn.core.tree import all_finite
from sparsefn.core.tree.where import matching
from sparsefn.nn.attach.files import arguments_of
from sparsefn.nn.attach.records import Record, differ
from sparsefn.nn.modules.wrappers import own_tensors

_AGAIN = "call detach(), then attach again"


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


def check_links(links: Sequence[Link]) -> None:
    """Raise RuntimeError where a parameter, or a layer that holds it, was replaced.

    >>> layer = torch.nn.Linear(2, 1)
    >>> links = links_of(
    ...     layer,
    ...     [
    ...         Record(
    ...             "weight", layer.weight, torch.optim.SGD(layer.parameters(), lr=0.1)
    ...         )
    ...     ],
    ... )
    >>> layer.weight = torch.nn.Parameter(torch.ones(1, 2))
    >>> check_links(links)
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: 'weight', or a layer that holds it, was replaced since
    attach: call detach(), then attach again
    """
    for place, key, held, name in links:
        if key not in place or place[key] is not held:
            raise RuntimeError(
                f"before_step: {name!r}, or a layer that holds it, was replaced since "
                f"attach: {_AGAIN}"
            )


def fits(state: State, record: Record) -> bool:
    """Whether a parameter has the dtype, device and shape of its leaf of the state.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    >>> record = Record("w", weight, torch.optim.SGD([weight], lr=0.1))
    >>> fits(State({"w": torch.ones(2)}, {"w": torch.tensor(True)}), record)
    False
    """
    leaf = state.params[record.name]
    parameter = record.parameter
    return bool(
        leaf.dtype == parameter.dtype
        and leaf.device == parameter.device
        and leaf.shape == parameter.shape
    )


def check_kinds(call: str, state: State, records: Iterable[Record]) -> None:
    """Raise RuntimeError for a parameter that has another dtype, device or shape than
    its leaf of the state.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    >>> record = Record("w", weight, torch.optim.SGD([weight], lr=0.1))
    >>> check_kinds(
    ...     "before_step",
    ...     State({"w": torch.ones(2)}, {"w": torch.tensor(True)}),
    ...     [record],
    ... )
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: 'w' was torch.float32 on cpu of shape (2,) when it was
    attached, and is torch.float64 on cpu of shape (2,): call detach(), then attach
    again
    """
    for record in records:
        if not fits(state, record):
            both = (state.params[record.name], record.parameter)
            was, now = (
                f"{x.dtype} on {x.device} of shape {tuple(x.shape)}" for x in both
            )
            raise RuntimeError(
                f"{call}: {record.name!r} was {was} when it was attached, and is "
                f"{now}: {_AGAIN}"
            )


def members_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The parameters of some optimizers.

    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> [tuple(p.shape) for p in members_of([optimizer])]
    [(1, 2), (1,)]
    """
    return [
        p
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def check_members(
    records: Sequence[Record], members: Sequence[Tensor], known: Container[int] = ()
) -> list[Tensor]:
    """The trained parameters of the optimizers that are not known; RuntimeError for a
    record whose optimizer has it no more.

    >>> layer = torch.nn.Linear(2, 1)
    >>> record = Record(
    ...     "weight", layer.weight, torch.optim.SGD(layer.parameters(), lr=0.1)
    ... )
    >>> len(check_members([record], list(layer.parameters()), {id(layer.weight)}))
    1

    `members` are the parameters of the optimizers. Parameters whose `id` is in `known`
    are left out, and parameters that require no gradient.
    """
    found = {id(p): p for p in members}
    for record in records:
        if id(record.parameter) not in found:
            raise RuntimeError(
                f"before_step: the optimizer of {record.name!r} has it no more: "
                f"{_AGAIN}"
            )
    return [p for key, p in found.items() if key not in known and p.requires_grad]


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
                    f"or unfreeze it before, or {_AGAIN}"
                )
    return ""


def check_order(records: Iterable[Record], dense: Mapping[str, Tensor]) -> str:
    """A warning where no optimizer has stepped, though gradients are finite.

    It is "" where they are not.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> record = Record("w", weight, torch.optim.SGD([weight], lr=0.1))
    >>> record.note()
    >>> check_order([record], {"w": torch.ones(2)})[:55]
    'after_step: no optimizer has stepped since before_step:'
    >>> check_order([record], {"w": torch.full((2,), torch.inf)})
    ''

    Raises RuntimeError where weights have moved then.
    """
    if not bool(all_finite(dense)):
        return ""
    moved = [record for record in records if record.written or record.is_written()]
    if moved:
        raise RuntimeError(
            f"after_step: {moved[0].name!r} moved without its optimizer: for another "
            f"optimizer, {_AGAIN}"
        )
    return (
        "after_step: no optimizer has stepped since before_step: where several "
        "batches make a step, call both around optimizer.step(), after the last "
        "backward; where a step is left out on purpose, all is well"
    )


def taken_over(call: str, state: State, records: Collection[Record]) -> State:
    """The state with the values of some parameters of the module, which somebody may
    have written.

    >>> weight = torch.nn.Parameter(torch.tensor([7.0, 8.0]))
    >>> state = State(
    ...     {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> taken_over(
    ...     "before_step",
    ...     state,
    ...     [Record("w", weight, torch.optim.SGD([weight], lr=0.1))],
    ... ).params
    {'w': tensor([7., 0.])}

    Of a leaf whose pruned entries have values in the state alone (`hidden`), pruned
    entries are taken that are not zero in the module. Raises RuntimeError for a weight
    that somebody wrote and that follows from what trains in its place.
    """
    check_kinds(call, state, records)
    check_followers(call, state, [record for record in records if record.follows])
    params = dict(state.params)
    taken = [record for record in records if not record.follows]
    for record in taken:
        name = record.name
        value = record.parameter.detach()
        if record.hidden:
            (params[name],) = either(
                [state.masks[name] | (value != 0)], [value], [params[name]]
            )
        else:
            (params[name],) = zeroed([state.masks[name]], [value])
    return state._replace(params=params)


def check_followers(call: str, state: State, records: Sequence[Record]) -> None:
    """Raise RuntimeError where the module has other values than the state, of weights
    that follow from something.

    >>> weight = torch.nn.Parameter(torch.tensor([7.0, 8.0]))
    >>> state = State(
    ...     {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> record = Record(
    ...     "w", weight, torch.optim.SGD([weight], lr=0.1), follows="scores"
    ... )
    >>> check_followers("before_step", state, [record])
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: somebody wrote to 'w', but its mask follows from scores,
    which the write does not reach: call detach(), write, and attach again, or load the
    state_dict() of what attach returned, which has the scores
    """
    shown = zeroed(
        [state.masks[r.name] for r in records], [state.params[r.name] for r in records]
    )
    pairs = [
        (record.parameter.detach(), leaf)
        for record, leaf in zip(records, shown, strict=True)
    ]
    for record, differs in zip(records, differ(pairs), strict=True):
        if differs:
            what = (
                "its mask follows"
                if record.follows == "scores"
                else "its values follow"
            )
            raise RuntimeError(
                f"{call}: somebody wrote to {record.name!r}, but {what} from "
                f"{record.follows}, which the write does not reach: call detach(), "
                "write, and attach again, or load the state_dict() of what attach "
                f"returned, which has the {record.follows}"
            )


def gradient_of_others(stained: Collection[str]) -> str:
    """A warning of a gradient that may belong to weights without masks.

    >>> gradient_of_others(["w"])[:61]
    "before_step: somebody wrote to pruned entries of 'w' between "
    """
    return (
        f"before_step: somebody wrote to pruned entries of {next(iter(stained))!r} "
        "between the steps. They are masked now, but if the loss was computed after "
        "the write, its gradient is the one of unmasked weights: after a write call "
        "apply_masks(), then compute the loss"
    )


def stains(state: State, records: Iterable[Record]) -> dict[str, int]:
    """How many pruned entries of each weight are not zero in the module, for weights
    that have some.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> state = State({"w": torch.ones(3)}, {"w": torch.tensor([True, False, False])})
    >>> stains(state, [Record("w", weight, torch.optim.SGD([weight], lr=0.1))])
    {'w': 2}
    """
    masked = [r for r in records if is_sparse(state.masks[r.name], r.parameter)]
    counts = full_tensors(
        [(~((r.parameter.detach() == 0) | state.masks[r.name])).sum() for r in masked]
    )
    return {
        record.name: int(count)
        for record, count in zip(masked, counts, strict=True)
        if count
    }


def in_module(state: State, records: Iterable[Record]) -> State:
    """The state that a module shows: its weights, and masks of its kept or nonzero
    entries.

    >>> weight = torch.nn.Parameter(torch.tensor([0.0, 1.0, 0.0]))
    >>> state = State({"w": torch.zeros(3)}, {"w": torch.tensor([True, False, False])})
    >>> in_module(state, [Record("w", weight, torch.optim.SGD([weight], lr=0.1))]).masks
    {'w': tensor([ True,  True, False])}
    """
    params = dict(state.params)
    masks = dict(state.masks)
    for record in records:
        params[record.name] = value = record.parameter.detach()
        if is_sparse(masks[record.name], value):
            masks[record.name] = masks[record.name] | ~(value == 0)
    return state._replace(params=params, masks=masks)
