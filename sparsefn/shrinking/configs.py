"""Configs from which a new model of the same sizes can be made."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

BUILDS = 100  # of a model on the meta device in search of numbers

Facts = dict[tuple[str, str], Any]
Place = tuple[Any, str, int | None]  # where a number stands: a config, a name, a place in a list


def set_configs(small: nn.Module, model: nn.Module, works: Callable[[nn.Module], bool]) -> Iterator[str]:
    """Set the configs in a smaller model so that new models from them equal it; say of which that cannot be.

    A config is what a module keeps as `config`, and is made of: its numbers become what most sizes of that number
    became. Where no choice gives the same sizes, attributes and tables, a config stays as it was, so that it cannot be
    taken for one of the smaller model.
    """
    done: list[str] = []
    for path, part in small.named_modules():
        if not hasattr(getattr(part, "config", None), "__dict__") or any(f"{path}.".startswith(one) for one in done):
            continue
        done.append(f"{path}." if path else "")
        whole = model.get_submodule(path)
        if _facts(part) == _facts(whole):
            continue
        places, old = list(_places(part.config)), copy.deepcopy(part.config)
        why = _set(part, whole, places) or ("" if works(small) else "the model gives other outputs with them")
        if why:
            for place, before in zip(places, _places(old), strict=True):
                _put(place, _get(before))
            yield f"the config of the {type(part).__name__}{f' at {path!r}' if path else ''} keeps its numbers: {why}"


def _set(part: nn.Module, whole: nn.Module, places: Sequence[Place]) -> str:
    # One number after the other, as long as a new model differs less.
    became = _became(_facts(whole), _facts(part))
    options = [(place, [*(+became[_get(place)]), _get(place)]) for place in places]
    for place, numbers in options:
        _put(place, numbers[0])
    best, why = _differs(part)
    changes = [(place, number) for place, numbers in options for number in numbers if len(numbers) > 1]
    for place, number in (changes * 2)[:BUILDS]:
        if best and number != (before := _get(place)):
            _put(place, number)
            count, text = _differs(part)
            if count < best:
                best, why = count, text
            else:
                _put(place, before)
    return why or _other_tables(part)


def _differs(part: nn.Module) -> tuple[float, str]:
    # How many facts are others in a new model from its config, and one of them.
    wanted, kind = _facts(part), type(part)
    try:
        with torch.device("meta"):
            made = _facts(kind(copy.deepcopy(part.config)))
    except Exception as error:  # a model's own code fails in any way
        return math.inf, f"with others {kind.__name__} fails: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    wrong = [".".join(filter(None, fact)) for fact in {**wanted, **made} if wanted.get(fact) != made.get(fact)]
    return len(wrong), f"none give {wrong[0]} = {wanted.get(tuple(wrong[0].rpartition('.')[::2]))}" if wrong else ""


def _other_tables(part: Any) -> str:
    # The buffers that a checkpoint does not hold.
    saved = part.state_dict().keys()
    tables = {name: x for name, x in part.named_buffers() if name not in saved}
    if tables:
        with torch.random.fork_rng():
            new = type(part)(copy.deepcopy(part.config))
        for name, x in tables.items():
            if not torch.equal(new.get_buffer(name).to(x), x):
                return f"they give another {name}"
    return ""


def _became(before: Facts, after: Facts) -> dict[Any, Counter[Any]]:
    # What became of each number in shapes and attributes, and how often.
    became: dict[Any, Counter[Any]] = defaultdict(Counter)
    for fact, old in before.items():
        new = after.get(fact)
        many = type(old) is type(new) is tuple and len(old) == len(new)
        for a, b in zip(old, new, strict=True) if many else [(old, new)]:
            if type(a) is type(b):
                became[a][b] += a != b
    return became


def _facts(model: nn.Module) -> Facts:
    # The classes, shapes and plain attributes of all modules.
    made: Facts = {}
    for path, layer in model.named_modules():
        made[path, ""] = type(layer)
        for name, x in (*layer._parameters.items(), *layer._buffers.items()):
            made[path, name] = None if x is None else tuple(x.shape)
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training" and _is_plain(value):
                made[path, name] = value
    return made


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | None) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _places(config: Any) -> Iterator[Place]:
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if type(value) in (int, float):
            yield config, name, None
        elif type(value) is list and all(type(n) in (int, float) for n in value):
            yield from ((config, name, i) for i in range(len(value)))
        elif hasattr(value, "to_dict"):
            yield from _places(value)


def _get(place: Place) -> Any:
    config, name, i = place
    return vars(config)[name] if i is None else vars(config)[name][i]


def _put(place: Place, number: Any) -> None:
    config, name, i = place
    if i is None:
        vars(config)[name] = number
    else:
        vars(config)[name][i] = number
