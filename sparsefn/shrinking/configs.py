"""Configs from which a new model of the same sizes can be made."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sparsefn.shrinking.search import Tried, search
from sparsefn.shrinking.values import named_module

BUILDS = 100  # of a model on the meta device in search of numbers

# the path of a module, and the name of a tensor or attribute of it
Fact = tuple[str, str]
# where a number stands: what holds it, by which key, and the name in the config
Place = tuple[Any, str | int, str]


def set_configs(
    small: nn.Module,
    model: nn.Module,
    sizes: Sequence[tuple[int, int]],
    works: Callable[[nn.Module], bool],
) -> Iterator[tuple[str, str]]:
    """Set the configs in a smaller model so that new models from them equal it; by
    path, why one cannot be set.

    A config is what a module keeps as `config`, and is made of. Its numbers become what
    attributes of their name are, or else what most sizes of that number became, in the
    tensors' shapes or in `sizes` (before, after); with the choice that gives more of
    the shapes, in at most BUILDS new models. These have to have the same tensors and
    tables in the end, and the smaller model has to work with their attributes, such as
    numbers of heads. Where that cannot be, a config stays as it was, so that it is not
    taken for one of the smaller model.
    """
    done: list[str] = []
    for path, part in small.named_modules():
        if not hasattr(getattr(part, "config", None), "__dict__") or any(
            f"{path}.".startswith(one) for one in done
        ):
            continue
        done.append(f"{path}." if path else "")
        whole = model.get_submodule(path)
        if _shapes(part) == _shapes(whole) and _attributes(part) == _attributes(whole):
            continue
        places = list(_places(part.config))
        old = list(_places(copy.deepcopy(part.config)))
        why = (
            _classes(part, whole)
            or _fit(part, whole, places, sizes)
            or _other_tables(part)
            or _adopt(part, lambda: works(small))
        )
        if why:
            for (held, key, _), (before, _, _) in zip(places, old, strict=True):
                held[key] = before[key]
        yield (
            path,
            f"the config of {named_module(small, path)} keeps its numbers: {why}"
            if why
            else "",
        )


def _classes(part: nn.Module, whole: nn.Module) -> str:
    other = [
        path
        for path, layer in part.named_modules()
        if type(layer) is not type(whole.get_submodule(path))
    ]
    return f"no others give {named_module(part, other[0])}" if other else ""


def _fit(
    part: nn.Module,
    whole: nn.Module,
    places: Sequence[Place],
    sizes: Sequence[tuple[int, int]],
) -> str:
    # Numbers become what attributes of their name are, or else what most of that size
    # became.
    old = _attributes(whole)
    new = _attributes(part)
    shapes = _shapes(part)
    became: dict[Any, Counter[Any]] = defaultdict(Counter)
    pairs = [(shape, shapes.get(name)) for name, shape in _shapes(whole).items()]
    for before, after in (
        *pairs,
        *((value, new.get(fact)) for fact, value in old.items()),
        *sizes,
    ):
        many = (
            isinstance(before, tuple)
            and isinstance(after, tuple)
            and len(before) == len(after)
        )
        for a, b in zip(before, after, strict=True) if many else [(before, after)]:  # type: ignore[arg-type]
            if type(a) is type(b):
                became[type(a), a].update([b])
    for fact, value in old.items():
        if type(new.get(fact)) is type(value):
            became[fact[1], value].update([new[fact]])
    numbers = []
    for held, key, name in places:
        value = held[key]
        some = [
            *became[name, value].most_common(),
            *became[type(value), value].most_common(),
            (value, 0),
        ]
        numbers.append(
            _Number(held, key, list(dict.fromkeys(number for number, _ in some)))
        )
        numbers[-1].take(0)
    return search(lambda _: numbers, lambda: _tried(part), BUILDS).why


@dataclasses.dataclass
class _Number:
    held: Any
    key: str | int
    options: list[Any]
    choice: int = 0

    def take(self, choice: int) -> None:
        self.choice = choice
        self.held[self.key] = self.options[choice]


def _new(part: Any, device: str) -> nn.Module:
    with torch.random.fork_rng(), torch.device(device):
        made: nn.Module = type(part)(copy.deepcopy(part.config))
    return made


def _tried(part: nn.Module) -> Tried:
    # How many shapes and attributes are others in a new model from its config.
    try:
        made = _new(part, "meta")
    except Exception as error:  # a model's own code fails in any way
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Tried(
            (-math.inf, 0), False, f"with others {type(part).__name__} fails: {line}"
        )
    wanted = _shapes(part)
    got = _shapes(made)
    wrong = [path for path in wanted | got if wanted.get(path) != got.get(path)]
    attributes = _attributes(made)
    other = sum(
        value != attributes.get(fact) for fact, value in _attributes(part).items()
    )
    return Tried(
        (-len(wrong), -other),
        not wrong and not other,
        f"no others give {wrong[0]}" if wrong else "",
    )


def _other_tables(part: nn.Module) -> str:
    # The buffers that a checkpoint does not hold.
    saved = part.state_dict().keys()
    tables = {name: x for name, x in part.named_buffers() if name not in saved}
    new = _new(part, "cpu") if tables else part
    other = [
        name
        for name, x in tables.items()
        if not torch.equal(new.get_buffer(name).to(x), x)
    ]
    return f"others give another {other[0]}" if other else ""


def _adopt(part: nn.Module, works: Callable[[], bool]) -> str:
    # The attributes of a new model, as those were guessed.
    old = _attributes(part)
    new = _attributes(_new(part, "meta"))
    others = [fact for fact, value in new.items() if old.get(fact, value) != value]
    for path, name in others:
        vars(part.get_submodule(path))[name] = new[path, name]
    if works():
        return ""
    for path, name in others:
        vars(part.get_submodule(path))[name] = old[path, name]
    names = ", ".join(".".join(filter(None, fact)) for fact in others[:3])
    return f"others give other outputs{f', by {names}' if names else ''}"


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: tuple(x.shape) for name, x in tensors}


def _attributes(model: nn.Module) -> dict[Fact, Any]:
    # What modules keep of numbers and words.
    made: dict[Fact, Any] = {}
    for path, layer in model.named_modules():
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training" and _is_plain(value):
                made[path, name] = value
    return made


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | None) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
    )


def _places(config: Any) -> Iterator[Place]:
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if type(value) in (int, float):
            yield vars(config), name, name
        elif type(value) is list and all(type(n) in (int, float) for n in value):
            yield from ((value, i, name) for i in range(len(value)))
        elif hasattr(value, "to_dict"):
            yield from _places(value)
