"""Configs of smaller models: a search for numbers with which a new model has the same
sizes.

Layers may differ in `per_layer_config` of transformers: the numbers that each layer has
in place of the config's.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from sparsefn.shrinking.attributes import Guess, Trial, search
from sparsefn.shrinking.trace import first_line
from sparsefn.shrinking.values import named_module, named_tensors

KEEPS = "keeps its numbers"  # said of a config that is not of the smaller model
BUILDS = 100  # of a model on the meta device in search of numbers

# the path of a module, and the name of a tensor or attribute of it
Fact = tuple[str, str]
# where a number stands: what holds it, by which key, and the name in the config
Place = tuple[Any, Any, str]
# by layer, what it has in place of the config's numbers
LayerNumbers = dict[int, dict[str, Any]]
LAYER_NUMBERS = "_heterogeneity_spec"  # the name under which a config holds them
_LAYERS = "num_hidden_layers"


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
    where they are in the smaller model. A reason has the mend for layers that became
    of different widths.
    """
    before = dict(model.named_modules())
    same = before if same_paths is None else dict(same_paths.named_modules())
    for path, part in _configured(small):
        whole = before[path] if path in before else same[path]
        if _shapes(part) == _shapes(whole) and _attributes(part) == _attributes(whole):
            continue
        numbers = _Numbers.of(part.config)
        why = _classes(part, same[path]) or _set(
            part, whole, same[path], sizes, numbers, lambda: works(small)
        )
        if why:
            numbers.put_back()
            name = named_module(small, path)
            why = f"the config of {name} {KEEPS}: {why}{_mend(part, same[path])}"
        yield path, why


def _mend(part: nn.Module, same: nn.Module) -> str:
    # What to do where layers of one width became of different ones.
    shapes = _shapes(part)
    became: dict[Any, set[Any]] = defaultdict(set)
    for name, shape in _shapes(same).items():
        kind = re.sub(r"\b\d+\b", "*", name)
        became[kind, shape].add(shapes.get(name))
    for (kind, _), widths in became.items():
        if len(widths) > 1:
            return (
                f". Layers differ in {kind}: a distribution "
                "sf.budgets.in_multiples(..., equal_across=...) keeps them equal"
            )
    return ""


def configs_fit(small: nn.Module) -> bool:
    """Whether new models from the configs in a model have its shapes and attributes.

    >>> configs_fit(nn.ReLU())
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


class _Numbers(NamedTuple):
    # What a config had at first.
    config: Any
    places: list[Place]
    values: list[Any]
    layers: LayerNumbers

    @classmethod
    def of(cls, config: Any) -> _Numbers:
        places = list(_places(config))
        values = [held[key] for held, key, _ in places]
        return cls(config, places, values, layer_numbers(config))

    def put_back(self) -> None:
        for (held, key, _), value in zip(self.places, self.values, strict=True):
            held[key] = value
        if has_layer_numbers(self.config):
            self.config.per_layer_config = self.layers or None

    def changes(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        # What holds each number that is another one now, its key, and its old value.
        plain = {}
        for (held, key, name), value in zip(self.places, self.values, strict=True):
            if held is vars(self.config):
                plain[name] = value
            if held[key] != value:
                yield held, key, value
        for i, held in _by_layer(self.config).items():
            old = plain | self.layers.get(i, {})
            for key in held:
                if key in old and held[key] != old[key]:
                    yield held, key, old[key]


def _set(
    part: Any,
    whole: nn.Module,
    same: nn.Module,
    sizes: Sequence[tuple[int, int]],
    numbers: _Numbers,
    works: Callable[[], bool],
) -> str:
    # The numbers of one config; why they cannot be set.
    def is_proven() -> bool:
        return not _trial(part).why and not _unproven(part, whole, works)

    why = _fit(part, whole, numbers.places, sizes)
    if not why:
        why = _unproven(part, whole, works)
        if why:  # a forward may read what changed by chance
            _give_back(part, numbers, lambda: _trial(part).done)
            why = _unproven(part, whole, works)
        if _refused_now(part, whole):
            return why
    if why and has_layer_numbers(part.config):
        for exact in (False, True):
            numbers.put_back()
            if not _fit_layers(part, same, sizes, exact):
                break
            if not _unproven(part, whole, works):
                why = ""
                break
    if not why:
        _give_back(part, numbers, is_proven)
    return why


def _unproven(part: Any, whole: Any, works: Callable[[], bool]) -> str:
    # Why the config of a part may not be what it has become.
    return _refused_now(part, whole) or _other_tables(part) or _adopt(part, works)


def _refused_now(part: Any, whole: Any) -> str:
    # Why a config cannot be made again, where the one before could.
    return "" if _refused(whole.config) else _refused(part.config)


def _refused(config: Any) -> str:
    # Why a config cannot be made again of what it is saved as.
    if not hasattr(config, "to_dict") or not hasattr(type(config), "from_dict"):
        return ""
    try:
        type(config).from_dict(config.to_dict())
    except Exception as error:  # a config's own code fails in any way
        return f"a {type(config).__name__} of others fails: {first_line(error)}"
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
    inside: str = "",
) -> str:
    # Numbers become what attributes of their name are, or else what most sizes of that
    # number became. Only modules whose paths start with `inside` are looked at.
    old = _attributes(whole, inside)
    new = _attributes(part, inside)
    shapes = _shapes(part, inside)
    became: dict[Any, Counter[Any]] = defaultdict(Counter)
    pairs: list[tuple[Any, Any]] = [
        *((shape, shapes.get(name)) for name, shape in _shapes(whole, inside).items()),
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
        options = dict.fromkeys((number,) for number, _ in some)
        numbers.append(Guess({"": held}, key, None, list(options), 0))
        numbers[-1].take(0)
    return search(lambda _: numbers, lambda: _trial(part, inside), BUILDS).why


def _give_back(part: Any, numbers: _Numbers, fits: Callable[[], bool]) -> None:
    # A number that changes nothing stays: it was the size of something else by chance,
    # such as the window of an attention, and wrong where no example shows it.
    for held, key, old in list(numbers.changes()):
        new = held[key]
        held[key] = old
        if not fits():
            held[key] = new
    if _by_layer(part.config):
        # without what is as in the config
        part.config.per_layer_config = layer_numbers(part.config)


def _new(part: Any, device: str) -> nn.Module:
    with torch.random.fork_rng(), torch.device(device):
        made: nn.Module = type(part)(copy.deepcopy(part.config))
    return made


def _trial(part: nn.Module, inside: str = "") -> Trial:
    # How many shapes and attributes differ in a new model from its config.
    try:
        made = _new(part, "meta")
    except Exception as error:  # a model's own code fails in any way
        why = f"with others {type(part).__name__} fails: {first_line(error)}"
        return Trial((-math.inf, 0), False, why)
    wanted = _shapes(part, inside)
    got = _shapes(made, inside)
    every = wanted | got
    wrong = [path for path in every if wanted.get(path) != got.get(path)]
    attributes = _attributes(made, inside)
    other = sum(
        value != attributes.get(fact)
        for fact, value in _attributes(part, inside).items()
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


def _shapes(model: nn.Module, inside: str = "") -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(x.shape)
        for name, x in named_tensors(model).items()
        if name.startswith(inside)
    }


def _attributes(model: nn.Module, inside: str = "") -> dict[Fact, Any]:
    # What modules keep of numbers and words.
    made: dict[Fact, Any] = {}
    for path, layer in model.named_modules():
        if not f"{path}.".startswith(inside):
            continue
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


# ---- layers that differ --------------------------------------------------------------


def has_layer_numbers(config: Any) -> bool:
    """Whether layers of a config may have numbers of their own, as in transformers from
    5.14 on.

    >>> has_layer_numbers(object())
    False
    """
    return hasattr(type(config), "per_layer_config")


def layer_numbers(config: Any) -> LayerNumbers:
    """The numbers that layers have in place of a config's, by layer.

    >>> layer_numbers(object())
    {}
    """
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(i): own for i, own in config.to_dict()["per_layer_config"].items()}


def _by_layer(config: Any) -> LayerNumbers:
    # where `per_layer_config` is held
    if not getattr(config, "is_heterogeneous", False):
        return {}
    found: LayerNumbers = vars(config)[LAYER_NUMBERS].per_layer_overrides
    return found


def _fit_layers(
    part: Any, whole: nn.Module, sizes: Sequence[tuple[int, int]], exact: bool
) -> bool:
    # A number that differs from layer to layer goes to `per_layer_config`, if the class
    # reads it there. If `exact`, attributes become what they are, too, not shapes
    # alone.
    config = part.config
    number = getattr(config, _LAYERS, 0)
    path = _list_of(part, number) if number else None
    if path is None:
        return False
    differ = layer_numbers(config)
    found: list[dict[str, Any]] = []
    for i in range(number):
        layer = f"{path}.{i}."
        own = _fit_layer(part, whole, sizes, layer, differ.get(i, {}), exact)
        if own is None or (found and not _builds(part, found[0], own, i)):
            return False
        found.append(own)
    most = {key: Counter(own[key] for own in found) for key in found[0]}
    shared = {key: counts.most_common(1)[0][0] for key, counts in most.items()}
    uneven = {key for key, counts in most.items() if len(counts) > 1}
    vars(config).update(shared)
    config.per_layer_config = {
        i: {**differ.get(i, {}), **own} for i, own in enumerate(found)
    }
    rest = [place for place in _places(config) if place[2] not in uneven]
    return not _fit(part, whole, rest, sizes)


def _list_of(part: nn.Module, number: int) -> str | None:
    # The path of the list of so many layers.
    paths: list[str] = [
        path
        for path, layers in part.named_modules()
        if isinstance(layers, nn.ModuleList) and len(layers) == number
    ]
    return paths[0] if paths else None


def _fit_layer(
    part: Any,
    whole: nn.Module,
    sizes: Sequence[tuple[int, int]],
    inside: str,
    own: dict[str, Any],
    exact: bool,
) -> dict[str, Any] | None:
    # The numbers with which all layers would be like one; None where none are.
    alone: Any = copy.copy(part)
    config: Any = copy.copy(part.config)
    config.per_layer_config = None
    alone.config = config
    held = vars(config)
    held.update(own)
    # how many layers there are is no number of one of them
    places = [
        place for place in _places(config) if place[0] is held and place[2] != _LAYERS
    ]
    before = {name: held[name] for _, _, name in places}
    if _fit(alone, whole, places, sizes, inside):
        return None
    for key, number in before.items():
        changed = held[key]
        if changed != number:
            # it may have been of the size of another number by chance
            held[key] = number
            trial = _trial(alone, inside)
            if trial.why or (exact and not trial.done):
                held[key] = changed
    numbers: dict[str, Any] = {key: held[key] for key in before}
    return numbers


def _builds(part: Any, first: dict[str, Any], own: dict[str, Any], i: int) -> bool:
    # Whether the class takes what one layer has in place of the first one's numbers.
    alone: Any = copy.copy(part)
    config: Any = copy.copy(part.config)
    vars(config).update(first)
    config.per_layer_config = {i: own}
    alone.config = config
    return _trial(alone).score[0] > -math.inf
