"""Configs of models with fewer layers: a search for the numbers and lists that say so.

No two classes say in the same way how many layers there are, and which of them are of
which kind. A config is therefore tried: the model that it makes, without weights, must
have the modules that stay, each as it was.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sparsefn.posttraining.calibration.folders.disk import write_json
from sparsefn.posttraining.calibration.folders.model import empty_model

Config = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))
_FOLDER = "name_or_path"  # an attribute that says where the model is from
_BY_LAYER = "per_layer_config"  # numbers of layers, by their places
_TRIES = 64  # models that are made in search of a config


class Cut(NamedTuple):
    """A list of layers that loses some.

    Attributes:
        path: The path of the list.
        before: How many layers it has.
        kept: The places of the layers that stay.
    """

    path: str
    before: int
    kept: tuple[int, ...]

    def count(self, number: int) -> int:
        """How many of the first layers stay, of so many.

        >>> Cut("layers", 4, (0, 3)).count(3)
        1
        """
        return sum(place < number for place in self.kept)

    def moved(self, name: str) -> str | None:
        """The new name of a module or tensor; None where it is gone.

        >>> cut = Cut("layers", 4, (0, 3))
        >>> cut.moved("layers.3.weight"), cut.moved("layers.1"), cut.moved("head")
        ('layers.1.weight', None, 'head')
        """
        place = self.place(name)
        if place is None:
            return name
        if place not in self.kept:
            return None
        rest = name.removeprefix(f"{self.path}.{place}")
        return f"{self.path}.{self.kept.index(place)}{rest}"

    def place(self, name: str) -> int | None:
        """The place of the layer that a module or tensor is in; None outside of the
        list.

        >>> cut = Cut("layers", 4, (0, 3))
        >>> cut.place("layers.3.weight"), cut.place("layers")
        (3, None)
        """
        start = f"{self.path}."
        if not name.startswith(start):
            return None
        return int(name.removeprefix(start).split(".")[0])


def smaller_config(
    config: Config, model: nn.Module, cuts: Sequence[Cut]
) -> tuple[Config, nn.Module]:
    """The config of a model with shorter lists of layers, and that model without
    weights.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(
    ...     LlamaConfig(num_hidden_layers=2, vocab_size=8, **sizes)
    ... ).eval()
    >>> said = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    >>> config, small = smaller_config(said, model, [Cut("model.layers", 2, (1,))])
    >>> config["num_hidden_layers"], len(small.model.layers)
    (1, 1)

    Raises ValueError where none is found, and says what came out otherwise.
    """
    for cut in cuts:
        config, model = _without(config, model, cut)
    return config, model


def _without(config: Config, model: nn.Module, cut: Cut) -> tuple[Config, nn.Module]:
    name = type(model).__name__
    said = {**_as_dict(getattr(model, "config", None)), **config}
    by_place = [
        place[-1]
        for place, value in _entries(said)
        if "layer_idx" in place[-1] and value
    ]
    if by_place and cut.kept != tuple(range(len(cut.kept))):
        raise ValueError(
            "stream: expected layers that compute the same in another place, but "
            f"{by_place[0]!r} of config.json has them compute by their place: drop "
            "the last layers alone"
        )
    why = ""
    tried: list[Config] = []
    for small_config in _candidates(config, said, cut):
        if small_config in tried:
            continue
        if len(tried) == _TRIES:
            break
        tried.append(small_config)
        try:
            small = _made(small_config, model)
        except Exception as error:  # a config that its class refuses
            why = why or f"{type(error).__name__}: {error}"
            continue
        found = first_difference(model, small, cut)
        if not found:
            return small_config, small
        why = why or found
    raise ValueError(
        f"stream: expected a config.json that can say which layers of {cut.path!r} "
        f"stay, but for {list(cut.kept)} of {cut.before} none was found that makes the "
        f"{name} with these layers: {why or 'no number in it is their number'}. Drop "
        "other layers, or remove them in memory, with sf.shrink"
    )


def _made(config: Config, model: nn.Module) -> nn.Module:
    dtype = next((x.dtype for x in model.parameters()), torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder, "config.json"), config)
        return empty_model(Path(folder), None, dtype)


# ---- candidates ----------------------------------------------------------------------

# a place in a config: the keys of the configs around it, and its own
Place = tuple[str, ...]
Change = tuple[Place, Any]


def _candidates(config: Config, said: Config, cut: Cut) -> Iterator[Config]:
    # The likely ones first: a number of layers named so, with all lists by layer. What
    # is said besides the file are defaults.
    places = list(_entries(said))
    numbers = [
        (place, value)
        for place, value in places
        if type(value) is int and 0 < value <= cut.before
    ]
    numbers = sorted(numbers, key=lambda one: "layer" not in one[0][-1])
    main = [(place, len(cut.kept)) for place, value in numbers if value == cut.before]
    others = [
        (place, cut.count(value)) for place, value in numbers if value != cut.before
    ]
    lists = list(_lists_by_layer(places, cut))
    for change in main:
        for some in lists:
            yield _with(config, said, [change, *some])
    for change, more in itertools.product(main, [*main, *others]):
        if change != more:
            for some in lists:
                yield _with(config, said, [change, more, *some])


def _as_dict(config: object) -> Config:
    # What a config holds besides what is in its file.
    make: Callable[[], Config] | None = getattr(config, "to_dict", None)
    return {} if make is None else make()


def _entries(config: Config, above: Place = ()) -> Iterator[Change]:
    # Also of configs of parts of a model, such as text_config.
    for key, value in config.items():
        is_part = key.endswith("_config") and key != _BY_LAYER
        if is_part and isinstance(value, dict):
            yield from _entries(value, (*above, key))
        else:
            yield (*above, key), value


def _lists_by_layer(places: Sequence[Change], cut: Cut) -> Iterator[list[Change]]:
    # Ways to change the lists with an entry for each layer, and the lists of layers.
    likely: list[Change] = []
    listed: list[Change] = []
    every: list[Change] = []
    for place, value in places:
        if place[-1] == _BY_LAYER and isinstance(value, dict):
            for way in (likely, listed, every):
                way.append((place, _numbered_again(value, cut)))
        if not isinstance(value, list | tuple):
            continue
        is_named = "layer" in place[-1] or "block" in place[-1]
        runs = _expanded(value)
        shorter: list[Any] | None = None
        if len(value) == cut.before:
            shorter = [value[i] for i in cut.kept]
        elif len(runs) == cut.before:
            shorter = [[[runs[i]], 1] for i in cut.kept]
        layers: list[Any] | None = None
        if is_named and _are_layers(value, cut.before):
            layers = [cut.kept.index(i) for i in value if i in cut.kept]
        known = shorter if is_named or runs or _are_kinds(value) else None
        for way, choices in (
            (likely, [known, layers]),
            (listed, [layers, known]),
            (every, [shorter]),
        ):
            new = next((choice for choice in choices if choice is not None), None)
            if new is not None:
                way.append((place, new))
    yield from (likely, listed, every, [])


def _numbered_again(value: Config, cut: Cut) -> Config:
    by_place = {int(key): own for key, own in value.items()}
    return {
        str(new): by_place[old] for new, old in enumerate(cut.kept) if old in by_place
    }


def _expanded(value: Sequence[Any]) -> list[Any]:
    # The entries of [[entries, how many times], ...], as GPT-Neo writes kinds.
    found: list[Any] = []
    for one in value:
        match one:
            case [list(entries), int(times)]:
                found += entries * times
            case _:
                return []
    return found


def _are_layers(value: Sequence[Any], total: int) -> bool:
    # Whether entries may be the places of layers.
    whole = all(type(i) is int and 0 <= i < total for i in value)
    return bool(value) and whole and list(value) == sorted({*value})


def _are_kinds(value: Sequence[Any]) -> bool:
    return all(isinstance(one, str | bool) for one in value)


def _with(config: Config, said: Config, changes: Sequence[Change]) -> Config:
    made = dict(config)
    for place, value in changes:
        held = made
        known = said
        for key in place[:-1]:
            held[key] = dict(held.get(key) or known[key])
            held = held[key]
            known = known[key]
        held[place[-1]] = value
    return made


# ---- comparison ----------------------------------------------------------------------


def first_difference(model: nn.Module, small: nn.Module, cut: Cut) -> str:
    """What of a smaller model is not as in the model; empty where nothing is.

    >>> make = torch.nn.Linear
    >>> model = torch.nn.ModuleDict(
    ...     {"x": torch.nn.ModuleList([make(2, 2), make(2, 3)])}
    ... )
    >>> small = torch.nn.ModuleDict({"x": torch.nn.ModuleList([make(2, 2)])})
    >>> first_difference(model, small, Cut("x", 2, (1,)))
    "'x.0.weight' has the shape (2, 2), and had (3, 2)"
    >>> first_difference(model, small, Cut("x", 2, (0,)))
    ''

    Tensors must have their shapes and buffers their values. Plain attributes must be
    equal, but for the place of a layer and the number of layers.
    """
    wanted = _moved(dict(model.named_modules(remove_duplicate=False)), cut)
    got = dict(small.named_modules(remove_duplicate=False))
    for path in [*got, *wanted]:
        if path not in wanted or path not in got:
            return f"{path!r} is {'new' if path in got else 'gone'}"
        if type(wanted[path]) is not type(got[path]):
            before = type(wanted[path]).__name__
            return f"{path!r} is a {type(got[path]).__name__}, and was a {before}"
    tensors = _moved(model.state_dict(keep_vars=True), cut)
    now = small.state_dict(keep_vars=True)
    for name in [*now, *tensors]:
        if name not in tensors or name not in now:
            return f"{name!r} is {'new' if name in now else 'gone'}"
        shapes = [tuple(x.shape) for x in (now[name], tensors[name])]
        if shapes[0] != shapes[1]:
            return f"{name!r} has the shape {shapes[0]}, and had {shapes[1]}"
    for path, part in got.items():
        key = _changed(vars(wanted[path]), vars(part), cut, cut.place(path))
        if key:
            return f"{key!r} of {path!r} is another"
        for name, buffer in part._buffers.items():
            old = wanted[path]._buffers.get(name)
            if buffer is not None and (old is None or not torch.equal(old, buffer)):
                return f"{name!r} of {path!r} has other values"
    return ""


def _moved(held: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    made = {}
    for name, value in held.items():
        new = cut.moved(name)
        if new is not None:
            made[new] = value
    return made


def _changed(
    old: Mapping[str, Any], new: Mapping[str, Any], cut: Cut, place: int | None
) -> str:
    # The first plain attribute that is another, of a module in the layer at a place.
    for key, value in new.items():
        was = old.get(key)
        if isinstance(value, list | tuple) and isinstance(was, list | tuple):
            if not all(isinstance(one, _PLAIN) for one in (*was, *value)):
                continue
            left = [was[i] for i in cut.kept] if len(was) == cut.before else was
            # outside of layers, such as the kinds of them that there are
            some = place is None and {*value} <= {*was}
            alike = some or list(value) in (list(was), list(left))
        elif isinstance(value, _PLAIN) and key != _FOLDER:
            alike = type(was) is type(value) and was == value
        else:
            continue
        if not alike and type(value) is int and type(was) is int:
            if place is None:
                alike = value == cut.count(was)
            else:
                pairs = [(cut.kept[place], place), (cut.before, len(cut.kept))]
                alike = (was, value) in pairs
        if not alike:
            return key
    return ""
