"""Configs of smaller models: their numbers become those of which a new model has the
same sizes.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sparsefn.shrinking.attributes import Guess, Trial, error_line, search
from sparsefn.shrinking.values import named_module, named_tensors

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
    same_paths: nn.Module | None = None,
) -> Iterator[tuple[str, str]]:
    """Set the configs in a smaller model so that new models from them equal it; by
    path, why one cannot be set.

    A config is what a module keeps as `config`, and is made of. Its numbers become what
    attributes of their name are, or else what most sizes of that number became, in the
    tensors' shapes or in `sizes` (before, after); with the choice that gives more of
    the shapes, in at most BUILDS new models. These have to have the same tensors and
    tables in the end, and the smaller model has to work with their attributes, such as
    numbers of heads. Numbers that none of this needs stay. Where that cannot be, a
    config stays as it was, so that it is not taken for one of the smaller model.

    Where modules went, `same_paths` is the model without them, so that the others are
    where they are in the smaller model.
    """
    before = dict(model.named_modules())
    same = before if same_paths is None else dict(same_paths.named_modules())
    for path, part in _configured(small):
        whole = before[path] if path in before else same[path]
        if _shapes(part) == _shapes(whole) and _attributes(part) == _attributes(whole):
            continue
        places = list(_places(part.config))
        old = [held[key] for held, key, _ in places]
        why = _classes(part, same[path])
        numbers: list[Guess] = []
        if not why:
            why, numbers = _fit(part, whole, places, sizes)
        if not why:
            spare = _spare(part, numbers)
            why = _unproven(part, whole, lambda: works(small))
            if why and spare:  # a forward may read them
                for number, choice in spare:
                    number.take(choice)
                why = _unproven(part, whole, lambda: works(small))
        if why:
            for (held, key, _), value in zip(places, old, strict=True):
                held[key] = value
            name = named_module(small, path)
            why = f"the config of {name} keeps its numbers: {why}"
        yield path, why


def is_told(small: nn.Module) -> bool:
    """Whether new models from the configs in a model have its shapes and attributes.

    >>> is_told(nn.ReLU())
    True
    """
    return all(
        not _refused(part.config) and _trial(part).done
        for _, part in _configured(small)
    )


def _configured(small: nn.Module) -> Iterator[tuple[str, Any]]:
    # The outermost modules that have configs.
    done: list[str] = []
    for path, part in small.named_modules():
        inside = any(f"{path}.".startswith(one) for one in done)
        if not inside and hasattr(getattr(part, "config", None), "__dict__"):
            done.append(f"{path}." if path else "")
            yield path, part


def _unproven(part: Any, whole: Any, works: Callable[[], bool]) -> str:
    # Why the config of a part may not be what it has become.
    refused = _refused(part.config)
    if refused and not _refused(whole.config):
        return refused
    return _other_tables(part) or _adopt(part, works)


def _refused(config: Any) -> str:
    # Why a config cannot be made again of what it is saved as.
    if not hasattr(config, "to_dict") or not hasattr(type(config), "from_dict"):
        return ""
    try:
        type(config).from_dict(config.to_dict())
    except Exception as error:  # a config's own code fails in any way
        return f"a {type(config).__name__} of others fails: {error_line(error)}"
    return ""


def _classes(part: nn.Module, whole: nn.Module) -> str:
    for path, layer in part.named_modules():
        if type(layer) is not type(whole.get_submodule(path)):
            return f"no others give {named_module(part, path)}"
    return ""


def _fit(
    part: nn.Module,
    whole: nn.Module,
    places: Sequence[Place],
    sizes: Sequence[tuple[int, int]],
) -> tuple[str, list[Guess]]:
    # Numbers become what attributes of their name are, or else what most of that size
    # became.
    old = _attributes(whole)
    new = _attributes(part)
    shapes = _shapes(part)
    became: dict[Any, Counter[Any]] = defaultdict(Counter)
    pairs: list[tuple[Any, Any]] = [
        *((shape, shapes.get(name)) for name, shape in _shapes(whole).items()),
        *((value, new[fact]) for fact, value in old.items() if fact in new),
        *sizes,
    ]
    for before, after in pairs:
        many = isinstance(before, tuple) and isinstance(after, tuple)
        if not many or len(before) != len(after):
            before = [before]
            after = [after]
        for a, b in zip(before, after, strict=True):
            if type(a) is type(b):
                became[type(a), a][b] += 1
    for fact, value in old.items():
        if fact in new and type(new[fact]) is type(value):
            became[fact[1], value][new[fact]] += 1
    numbers = []
    for held, key, name in places:
        value = held[key]
        some = [
            *became[name, value].most_common(),
            *became[type(value), value].most_common(),
            (value, 0),
        ]
        options = list(dict.fromkeys((number,) for number, _ in some))
        stays = options.index((value,))
        numbers.append(Guess({"": held}, key, None, options, stays))
        numbers[-1].take(0)
    return search(lambda _: numbers, lambda: _trial(part), BUILDS).why, numbers


def _spare(part: nn.Module, numbers: Sequence[Guess]) -> list[tuple[Guess, int]]:
    # Give back the numbers that shapes and attributes do not need, which are sizes by
    # chance; with what they had become.
    spare = []
    for number in numbers:
        choice = number.choice
        if choice == number.old:
            continue
        number.take(number.old)
        if _trial(part).done:
            spare.append((number, choice))
        else:
            number.take(choice)
    return spare


def _new(part: Any, device: str) -> nn.Module:
    with torch.random.fork_rng(), torch.device(device):
        made: nn.Module = type(part)(copy.deepcopy(part.config))
    return made


def _trial(part: nn.Module) -> Trial:
    # How many shapes and attributes differ in a new model from its config.
    try:
        made = _new(part, "meta")
    except Exception as error:  # a model's own code fails in any way
        why = f"with others {type(part).__name__} fails: {error_line(error)}"
        return Trial((-math.inf, 0), False, why)
    wanted = _shapes(part)
    got = _shapes(made)
    every = wanted | got
    wrong = [path for path in every if wanted.get(path) != got.get(path)]
    attributes = _attributes(made)
    other = sum(
        value != attributes.get(fact) for fact, value in _attributes(part).items()
    )
    return Trial(
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
    # Take the attributes of a new model, as the old ones were guessed.
    old = _attributes(part)
    new = _attributes(_new(part, "meta"))
    others = [fact for fact, value in new.items() if old.get(fact, value) != value]
    for path, name in others:
        vars(part.get_submodule(path))[name] = new[path, name]
    if works():
        return ""
    for path, name in others:
        vars(part.get_submodule(path))[name] = old[path, name]
    paths = [".".join(filter(None, fact)) for fact in others[:3]]
    names = ", ".join(paths)
    return f"others give other outputs{f', by {names}' if names else ''}"


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in named_tensors(model).items()}


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
