"""What is saved of an algorithm at work in a module, and read again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsefn import algorithms
from sparsefn._engine.processes import is_sharded
from sparsefn.algorithms import combine
from sparsefn.core.checks import Call, call_of, is_int, parts_of, shown
from sparsefn.core.state import Algorithm, State, effective, masked_view, update_of
from sparsefn.core.tree import Tree, leaves_at, with_leaves
from sparsefn.nn import checkpoint

_ALGORITHMS = {*vars(algorithms), *vars(combine)}


def saved(
    algorithm: Algorithm,
    state: State,
    step: int,
    shown: Collection[str],
    snapshot: Callable[[Tree], Tree],
) -> dict[str, object]:
    """The algorithm and its arguments, the step, and the tensors of a state, but for
    the params that a module shows.

    >>> state = sf.static(0.5).init({"w": torch.ones(2, 2)})
    >>> list(saved(sf.static(0.5), state, 3, ["w"], dict)["tensors"])
    ['masks.w', 'key']

    `snapshot` copies the tensors that later steps write.
    """
    left_out = {f"params.{name}" for name in shown}
    tensors = {
        path: x
        for path, x in checkpoint.state_dict(state).items()
        if path not in left_out
    }
    name = _without_addresses(repr(algorithm))
    return {
        "algorithm": name,
        "arguments": arguments_by_path(algorithm),
        "step": step,
        "tensors": snapshot(tensors),
    }


def loaded(
    algorithm: Algorithm,
    found: Mapping[str, Any],
    like: State,
    weights: Mapping[str, Tensor],
    strict: bool = True,
) -> tuple[State, int]:
    """The state and the step of `saved`; params that were left out are the weights that
    a module has now, masked.

    >>> algorithm, weights = (
    ...     sf.static(0.5, init="magnitude"),
    ...     {"w": torch.tensor([[1.0, 2.0]])},
    ... )
    >>> state = algorithm.init(weights)
    >>> loaded(
    ...     algorithm,
    ...     saved(algorithm, state, 3, ["w"], dict),
    ...     state,
    ...     {"w": torch.ones(1, 2)},
    ... )[0].params
    {'w': tensor([[0., 1.]])}

    Raises ValueError for anything else, for the state of another algorithm, with
    `strict` for one with other arguments, and for tensors that do not fit.
    """
    if not isinstance(found, Mapping) or not {
        "algorithm",
        "arguments",
        "step",
        "tensors",
    } <= set(found):
        raise ValueError(
            "load_state_dict: expected the state_dict() of what attach returned, got "
            "something else"
        )
    if not is_int(found["step"]):
        raise ValueError(
            f"load_state_dict: expected 'step' to be an int, got {found['step']!r}"
        )
    theirs = found["algorithm"]
    name = _without_addresses(repr(algorithm))
    _check_arguments(
        theirs, found["arguments"], name, arguments_by_path(algorithm), strict
    )
    missing = {
        name: leaf
        for name, leaf in weights.items()
        if f"params.{name}" not in found["tensors"]
    }
    try:
        tensors = {
            **found["tensors"],
            **{f"params.{name}": leaf for name, leaf in missing.items()},
        }
        state = checkpoint.load_state_dict(like, tensors)
    except ValueError as error:
        raise ValueError(
            f"load_state_dict: a state of {theirs} does not fit {name}: {error}"
        ) from error
    masked = leaves_at(effective(state), missing)
    return state._replace(params=with_leaves(state.params, masked)), found["step"]


def arguments_by_path(made: Any, path: str = "") -> dict[str, str]:
    """Every argument of the calls that made an object, by dotted path; the calls
    themselves are there, too.

    >>> arguments_by_path(sf.schedules.linear(0.5, slope=0.25))
    {'': 'linear', 'init': '0.5', 'slope': '0.25'}

    Arguments that were left out are there with their defaults, tensors as a digest of
    their bits.
    """
    call = call_of(made)
    kind = type(made)
    items = {}
    if call is not None:
        text = call.make.__name__
        items = call.arguments()
    elif kind in (dict, list, tuple):
        text = kind.__name__
        items = made if kind is dict else {str(i): item for i, item in enumerate(made)}
    elif isinstance(made, Tensor) and not is_sharded(
        made
    ):  # of a sharded one each process has a part
        bits = made.detach().cpu().reshape(-1).view(torch.uint8)
        text = (
            f"{shown(made)} {hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]}"
        )
    else:
        text = _without_addresses(shown(made))
    found = {path: text}
    for name, item in items.items():
        found |= arguments_by_path(item, f"{path}.{name}".lstrip("."))
    return found


def arguments_of(algorithm: Algorithm) -> Iterator[tuple[str, Any]]:
    """The arguments of the calls that made an algorithm and its parts, by name, and
    what follows from `steps`.

    >>> [
    ...     value
    ...     for name, value in arguments_of(sf.rigl(0.9, steps=1000))
    ...     if name == "when" and value is not None
    ... ]
    [every(10, stop=750)]
    """
    for part in (part for part in parts_of(algorithm) if isinstance(part, Algorithm)):
        recipe = update_of(part).recipe
        call = call_of(part)
        yield from () if recipe is None else recipe._asdict().items()
        yield from () if call is None else call.arguments().items()


def reads_step(algorithm: Algorithm) -> bool:
    """Whether the gradients that an algorithm's optimizer sees may depend on the step.

    >>> (
    ...     reads_step(sf.rigl(0.9)),
    ...     reads_step(sf.with_terms(sf.rigl(0.9), sf.terms.pruned_decay(0.1))),
    ... )
    (False, True)
    """
    parts = list(parts_of(algorithm))
    if any(
        isinstance(part, Call) and part.make is combine.with_terms for part in parts
    ):
        return True
    made = [part for part in parts if isinstance(part, Algorithm) and part.made_by]
    known = [masked_view, *(part.view for part in made)]
    return all(algorithm.view is not view for view in known)


def _check_arguments(
    theirs: str,
    their: Mapping[str, str],
    mine: str,
    own: Mapping[str, str],
    strict: bool,
) -> None:
    def algorithms_in(arguments: Mapping[str, str]) -> list[str]:
        return [text for text in arguments.values() if text in _ALGORITHMS]

    other = [path for path in {**own, **their} if own.get(path) != their.get(path)]
    text = f"load_state_dict: expected a state of {mine}, got one of {theirs}"
    if algorithms_in(their) != algorithms_in(own):
        raise ValueError(text)
    if strict and other:
        here, there = (found.get(other[0], "nothing") for found in (own, their))
        raise ValueError(
            f"{text}, whose {other[0]!r} is {there} and not {here}; strict=False "
            "takes it"
        )


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
