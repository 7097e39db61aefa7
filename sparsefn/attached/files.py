"""What is saved of an algorithm at work in a module, and read again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from sparsefn import algorithms, checkpoint, compose
from sparsefn.engine.checks import is_int
from sparsefn.state import Algorithm, State, inside
from sparsefn.tree import flatten, leaves_of

_ALGORITHMS = {name for wing in (algorithms, compose) for name in vars(wing)}


def saved(
    algorithm: Algorithm,
    state: State,
    step: int,
    shown: Collection[str],
    own: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> dict[str, object]:
    """The algorithm's name, the step, and the tensors of a state, but for the params that a module shows.

    >>> state = sf.static(0.5).init({"w": torch.ones(2, 2)})
    >>> list(saved(sf.static(0.5), state, 3, ["w"], list)["tensors"])
    ['masks.w', 'key']

    `own` copies the tensors that later steps write.
    """
    left_out = {f"params.{name}" for name in shown}
    tensors = {path: x for path, x in checkpoint.state_dict(state).items() if path not in left_out}
    kept = dict(zip(tensors, own(list(tensors.values())), strict=True))
    return {"algorithm": _name(algorithm), "step": step, "tensors": kept}


def loaded(
    algorithm: Algorithm, found: Mapping[str, Any], like: State, weights: Mapping[str, Tensor]
) -> tuple[State, int]:
    """The state and the step of `saved`; params that were left out are the weights that a module has now, masked.

    >>> algorithm, weights = sf.static(0.5, init="magnitude"), {"w": torch.tensor([[1.0, 2.0]])}
    >>> state = algorithm.init(weights)
    >>> loaded(algorithm, saved(algorithm, state, 3, ["w"], list), state, {"w": torch.ones(1, 2)})[0].params
    {'w': tensor([[0., 1.]])}

    Raises ValueError for anything else, for the state of another algorithm, and for tensors that do not fit.
    """
    if not isinstance(found, Mapping) or not {"algorithm", "step", "tensors"} <= set(found):
        raise ValueError("load_state_dict: expected the state_dict() of what attach returned, got something else")
    if not is_int(found["step"]):
        raise ValueError(f"load_state_dict: expected 'step' to be an int, got {found['step']!r}")
    theirs, name = found["algorithm"], _name(algorithm)
    if _kinds(theirs) != _kinds(name):
        raise ValueError(f"load_state_dict: expected a state of {name}, got one of {theirs}")
    missing = {name: leaf for name, leaf in weights.items() if f"params.{name}" not in found["tensors"]}
    try:
        tensors = {**found["tensors"], **{f"params.{name}": leaf for name, leaf in missing.items()}}
        state = checkpoint.load_state_dict(like, tensors)
    except ValueError as error:
        raise ValueError(f"load_state_dict: a state of {theirs} does not fit {name}: {error}") from error
    params, rebuild = flatten(state.params)
    masked = dict(zip(params, leaves_of(inside(state.masks, state.params)), strict=True))
    params = {name: masked[name] if name in missing else leaf for name, leaf in params.items()}
    return state._replace(params=rebuild(list(params.values()))), found["step"]


def _kinds(name: str) -> list[str]:
    # The algorithm, and those inside it; their numbers and schedules may be others.
    words = re.findall(r"\w+(?=\()", name)
    return words[:1] + [word for word in words[1:] if word in _ALGORITHMS]


def _name(algorithm: Algorithm) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(algorithm))
