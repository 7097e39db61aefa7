"""Algorithms from plain data, as JSON or YAML gives it.

    config := number | entry | [config, ...] | {"groups": config}
    entry  := {"algorithm": "static" | "gmp" | "set" | "rigl", "sparsity": level,
               "init_method": name or function, "param_filter": glob | [glob, ...],
               "update": update, "drop_fraction": level,
               "balance_in_groups" | "balance_out_groups": int}
    level  := number | [number, ...] | {"type": curve, ...}
    curve  := "constant" | "linear" | "exp" | "power" | "cosine" | "cycling"
    update := null | {"freq": int, "start": int, "stop": int} | {"steps": [int, ...]}

Reading files is left to the caller: what `json.load` or a YAML loader returns is what
these functions take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn.algorithms import dense, gmp, rigl, set, static
from sparsefn.algorithms.combine import partition
from sparsefn.algorithms.start import Named
from sparsefn.config.shorthand import from_shorthand as from_shorthand
from sparsefn.config.shorthand import to_shorthand as to_shorthand
from sparsefn.core import schedules, triggers
from sparsefn.core.checks import (
    call_of,
    called,
    check_keys,
    is_number,
    keywords_of,
    listed,
    named,
)
from sparsefn.core.rounding import fraction_at
from sparsefn.core.state import Algorithm, Schedule, Trigger, Where, masks_tree
from sparsefn.core.tree import Tree
from sparsefn.core.tree.where import default_where, select_leaves
from sparsefn.masks.patterns import kinds

_DYNAMIC = ("sparsity", "init_method", "update")
_Factory = tuple[Callable[..., Algorithm], tuple[str, ...]]
_ALGORITHMS: dict[str, _Factory] = {
    "static": (static, ("sparsity", "init_method")),
    "gmp": (gmp, _DYNAMIC),
    "set": (set, (*_DYNAMIC, "drop_fraction")),
    "rigl": (
        rigl,
        (*_DYNAMIC, "drop_fraction", "balance_in_groups", "balance_out_groups"),
    ),
}
_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": schedules.constant,
    "linear": schedules.linear,
    "exp": schedules.exponential,
    "power": schedules.power,
    "cosine": schedules.cosine,
    "cycling": schedules.cycling,
}
_INITS: dict[str, Named]
_INITS = {
    "random": "random",
    "topk": "magnitude",
    "from_zeros": "from_zeros",
    "checkerboard": "checkerboard",
}
_PATTERNS = {
    "balance_in_groups": kinds.in_groups,
    "balance_out_groups": kinds.out_groups,
}

# (parameter, sparsity at step 0) -> the mask of one leaf
FirstMask = Callable[[Tensor, Real], Tensor]
Entry = Mapping[str, object]  # a dict of a config
Part = tuple[Where, Callable[[Where], Algorithm]]


def level(value: object, when: Trigger) -> Schedule:
    """The schedule for a level of a config.

    >>> schedule = sf.config.level([0.1, 0.4], when=sf.every(10))
    >>> [schedule(step) for step in (0, 9, 10, 20)]
    [0.1, 0.1, 0.4, 0.1]
    >>> sf.config.level(
    ...     {"type": "cosine", "init": 0.3, "half_period": 100}, when=sf.every(10)
    ... )(50)
    0.15

    Args:
        value: A number in [0, 1], an int too, which is constant; a list, which is
            cycled through, one value per firing of `when`; a dict, which names its
            schedule by "type", in upper or lower case, and has the arguments of the
            function in `sf.schedules` besides ("exp" is `exponential`); or a schedule,
            which is returned as it is.
        when: The trigger at which a list moves on.

    Returns:
        The schedule.

    Raises:
        ValueError: `value` is none of these.
    """
    if callable(value):
        return value
    if isinstance(value, list | tuple):
        value = {"type": "cycling", "values": [_fraction(item) for item in value]}
    if not isinstance(value, Mapping):
        return schedules.constant(_fraction(value))
    if "type" not in value:
        raise ValueError(
            f"expected a level to have a 'type' among {listed(_SCHEDULES)}, got "
            f"{dict(value)!r}"
        )
    make = named("the type of a level", value["type"], _SCHEDULES)
    ours = {"when": when} if make is schedules.cycling else {}
    given = {name: item for name, item in value.items() if name != "type"}
    return called(f"a level of type {value['type']!r}", make, given, **ours)


def _fraction(value: object) -> float:
    if not is_number(value):
        raise ValueError(
            "expected a level to be a number, a list of numbers or a dict with a "
            f"'type', got {value!r}"
        )
    if not 0 <= value <= 1:
        raise ValueError(f"expected a level in [0, 1], got {value}")
    return float(value)


def trigger(value: object) -> Trigger:
    """The trigger for an update schedule of a config.

    >>> when = sf.config.trigger({"freq": 10, "start": 5, "stop": 36})
    >>> [step for step in range(60) if when(step)]
    [5, 15, 25, 35]
    >>> sf.config.trigger(None) == sf.always()
    True

    Args:
        value: `{"freq", "start", "stop"}` for `every`, `{"steps"}` for `at`, None for
            `always()`, or a trigger, which is returned as it is.

    Returns:
        The trigger.

    Raises:
        ValueError: `value` is none of these.
    """
    if value is None:
        return triggers.always()
    if callable(value):
        return value
    if isinstance(value, Mapping) and "steps" in value:
        return called("update", triggers.at, value)
    if not isinstance(value, Mapping) or "freq" not in value:
        raise ValueError(
            "expected update to be null or to have the key 'freq' or 'steps', got "
            f"{value!r}"
        )
    return called(
        "update",
        lambda freq, start=0, stop=None: triggers.every(freq, start, stop),
        value,
    )


def init_method(value: object) -> Named | FirstMask:
    """The argument `init` of an algorithm for an init method of a config.

    >>> sf.config.init_method("topk")
    'magnitude'

    Args:
        value: One of "random", "topk", "from_zeros" and "checkerboard", or a function
            of (parameter, sparsity at step 0) that gives the mask of one leaf.

    Returns:
        The name that algorithms have for the method, or the function as it is.

    Raises:
        ValueError: `value` is none of these.
    """
    if callable(value):
        return value
    if not isinstance(value, str) or value not in _INITS:
        raise ValueError(
            f"expected init_method to be a function or one of {listed(_INITS)}, got "
            f"{value!r}"
        )
    return _INITS[value]


def from_config(
    config: object,
    *,
    key: Tensor | None = None,
    algorithms: Mapping[str, Callable[..., Algorithm]] | None = None,
) -> Algorithm:
    """The algorithm that a config of plain data describes.

    >>> algorithm = sf.config.from_config(
    ...     [
    ...         {"param_filter": "head.*", "sparsity": 0.5, "init_method": "topk"},
    ...         {
    ...             "algorithm": "rigl",
    ...             "sparsity": 0.75,
    ...             "drop_fraction": {"type": "cosine", "init": 0.3, "half_period": 50},
    ...             "update": {"freq": 10, "stop": 50},
    ...         },
    ...     ]
    ... )
    >>> masks = algorithm.init(
    ...     {"body.weight": torch.randn(4, 4), "head.weight": torch.randn(4, 4)}
    ... ).masks
    >>> int(masks["body.weight"].sum()), int(masks["head.weight"].sum())
    (4, 8)

    Args:
        config: A number, which is `{"sparsity": number}`, a dict, or a list of them. In
            a list the first entry whose "param_filter" matches a leaf applies to it
            (`sf.partition`), and nested lists are flattened. In `{"groups": ...}`,
            "params" of an entry is merged into it.
        key: The PRNG key for every algorithm. None: their own.
        algorithms: Factories of your own by lower-case name. Each is called as
            `f(sparsity, where=, init=, key=, when=, ...)`, with the keywords that its
            entry sets, and its other parameters are keys of an entry.

    Returns:
        The algorithm. Without entries nothing is sparsified.

    Raises:
        TypeError: `algorithms` is no dict, or a "param_filter" is not a glob or a list
            of globs.
        ValueError: An entry has another form, key, name or level. It says where, and
            lists the known names.

    Without a filter an entry applies to the leaves that `default_where` chooses; with
    one, to leaves of any rank. An entry with sparsity null is left out. "algorithm" is
    "static" by default ("type" is an older name for it, "schedule" for "sparsity") and
    may be in upper or lower case. "init_method" is not used where an "update" does not
    fire at step 0: then training starts dense. Counts are as in `sf.budgets.n_kept`.
    Configs count steps from 1: step 0 belongs to `init`. What an entry does not say is
    left to the function of that name:

    >>> sf.config.from_config(
    ...     {"algorithm": "rigl", "sparsity": 0.9, "update": {"freq": 10}}
    ... )
    rigl(0.9, when=every(10))

    So without "update" masks change every 100 steps for "set" and "rigl", and with null
    at every step.
    """
    if algorithms is not None and not isinstance(algorithms, Mapping):
        raise TypeError(
            "from_config: expected algorithms to be a dict of factories by lower-case "
            f"name, got {type(algorithms).__name__}"
        )
    known = _ALGORITHMS | {
        name: (make, (*_DYNAMIC, *_options(make)))
        for name, make in (algorithms or {}).items()
    }
    parts = []
    for at, entry in _entries(config, "config"):
        try:
            part = _part(entry, key, known)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{at}: {error}") from error
        parts += [] if part is None else [part]
    if len(parts) > 1:
        return partition([(where, make(_any_leaf)) for where, make in parts])
    if parts:
        return parts[0][1](parts[0][0])
    return dense()


def _any_leaf(path: str, leaf: Tensor) -> bool:
    return True


def _entries(config: object, at: str) -> Iterator[tuple[str, Entry]]:
    """Every entry of a config and its place in it, with nested lists flattened."""
    waiting: list[tuple[object, str, bool]] = [(config, at, False)]
    while waiting:
        config, at, grouped = waiting.pop()
        if isinstance(config, list | tuple):
            if not config:
                raise ValueError(f"{at}: expected at least one entry, got none")
            waiting += [(item, f"{at}[{i}]", grouped) for i, item in enumerate(config)][
                ::-1
            ]
        elif isinstance(config, Mapping) and "groups" in config:
            waiting.append((config["groups"], f"{at}.groups", True))
        elif isinstance(config, Mapping):
            inner = config.get("params", {}) if grouped else {}
            if not isinstance(inner, Mapping):
                raise ValueError(f"{at}: expected params to be a dict, got {inner!r}")
            yield (
                at,
                {
                    name: value
                    for name, value in config.items()
                    if not grouped or name != "params"
                }
                | dict(inner),
            )
        elif is_number(config):
            yield at, {"sparsity": config}
        else:
            raise ValueError(
                f"{at}: expected a number, a dict or a list of them, got {config!r}"
            )


def _alias(entry: Entry, name: str, other: str) -> dict[str, object]:
    if name in entry and other in entry:
        raise ValueError(
            f"expected {name!r} or {other!r}, which mean the same, got both"
        )
    return {name if found == other else found: value for found, value in entry.items()}


def _options(make: Callable[..., Algorithm]) -> list[str]:
    # The keys that an entry may have besides the keys of the grammar.
    options = keywords_of(make)[1:]
    return [name for name in options if name not in ("where", "init", "key", "when")]


def _part(
    entry: Entry, key: Tensor | None, known: Mapping[str, _Factory]
) -> Part | None:
    """Which leaves an entry is for, and its algorithm for a given `where`.

    The algorithm is None without a sparsity.
    """
    entry = _alias(_alias(entry, "algorithm", "type"), "sparsity", "schedule")
    name = entry.get("algorithm", "static")
    factory, options = named("algorithm", name, known)
    check_keys(
        f"an entry of algorithm {name!r}",
        entry,
        ["algorithm", *options, "param_filter"],
        ["sparsity"],
    )
    where = _filter(entry.get("param_filter"))
    if entry["sparsity"] is None:
        return None
    # what the entry says, and nothing else
    more: dict[str, object] = {} if key is None else {"key": key}
    when = trigger(entry["update"]) if "update" in entry else None
    sparsity = _level(
        entry, "sparsity", triggers.never() if factory is static else when
    )
    if factory is static and callable(sparsity):
        raise ValueError(
            f"expected the sparsity of static to be a number, got {entry['sparsity']!r}"
        )
    begin = init_method(entry["init_method"]) if "init_method" in entry else None
    if when is not None:
        more["when"] = when
        if not when(0):
            begin = "dense"
    if factory is gmp:
        if isinstance(entry["sparsity"], Mapping):
            kind = entry["sparsity"].get("type")
        else:
            kind = entry["sparsity"]
        if is_number(kind) or str(kind).lower() == "constant":
            raise ValueError(
                f"expected the sparsity of gmp to change, got {entry['sparsity']!r}; "
                "static is constant"
            )
    if "drop_fraction" in entry:
        more["drop_fraction"] = _level(entry, "drop_fraction", when)
    balanced = [name for name in _PATTERNS if entry.get(name) is not None]
    if len(balanced) > 1:
        raise ValueError("expected balance_in_groups or balance_out_groups, got both")
    for name in balanced:
        more["pattern"] = called(name, _PATTERNS[name], {"groups": entry[name]})
    grammar = {"algorithm", "param_filter", *_DYNAMIC, "drop_fraction", *_PATTERNS}
    more |= {option: value for option, value in entry.items() if option not in grammar}

    def make(where: Where) -> Algorithm:
        def masks(params: Tree) -> Tree:
            assert callable(begin)
            first = fraction_at(schedules.as_schedule(sparsity), 0)
            return masks_tree(
                params,
                {
                    p: begin(leaf, first)
                    for p, leaf in select_leaves(params, where).items()
                },
            )

        if where is not default_where:
            more["where"] = where
        if begin is not None:
            more["init"] = masks if callable(begin) else begin
        return factory(sparsity, **more)

    return where, make


def _level(entry: Entry, name: str, when: Trigger | None) -> float | Schedule:
    # A number stays one, as it would be written by hand.
    found = level(entry[name], triggers.always() if when is None else when)
    call = call_of(found)
    if when is None and call is not None and call.make is schedules.cycling:
        raise ValueError(
            f"expected an update, which says when the {name} moves on, got "
            f"{name}={entry[name]!r} alone"
        )
    if is_number(entry[name]):
        return float(found(0))
    return found


def _filter(globs: object) -> Where:
    if globs is None:
        return default_where
    if (
        not isinstance(globs, str | list | tuple)
        or globs in ([], ())
        or not all(isinstance(x, str) for x in globs)
    ):
        raise TypeError(
            f"expected param_filter to be a glob or a list of globs, got {globs!r}"
        )
    return globs
