"""Numbers that modules keep about sizes: what they may become, and which of them makes the model work."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsefn.shrinking.cut import Cut
from sparsefn.shrinking.values import opname, scope, values_in

TRIES = 200  # runs of a model in search of numbers

Works = Callable[[nn.Module], bool]
Sizes = list[tuple[int, int]]  # before and after


@dataclasses.dataclass
class Guess:
    """A number that the modules of one class keep, and what it may become in each of them: likely ones first."""

    modules: dict[str, nn.Module]
    key: str
    place: int | None  # in a list or tuple
    options: list[tuple[int, ...]]
    choice: int = 0

    def take(self, choice: int) -> None:
        self.choice = choice
        for layer, value in zip(self.modules.values(), self.options[choice], strict=True):
            held = vars(layer)[self.key]
            if self.place is not None:
                held, number = list(held), value
                held[self.place] = number
                value = type(vars(layer)[self.key])(held)
            vars(layer)[self.key] = value


def guesses(small: nn.Module, cut: Cut) -> list[Guess]:
    """Set whole numbers, also in lists and tuples, that are a size that changes; and say what else they may be.

    A number is told by where it is a size in the module's own forward, or in that of its children: modules of one class
    whose forward does the same operations keep it from the same place.
    """
    own, below = _sizes(cut, 0), _sizes(cut, 1)
    alike: dict[Any, dict[str, tuple[nn.Module, int]]] = defaultdict(dict)
    for path, layer in small.named_modules():
        for key, place, value in _numbers(layer):
            alike[type(layer), key, place, tuple(own[path][0])][path] = layer, value
    made = []
    for (_, key, place, _), members in alike.items():
        values = tuple(value for _, value in members.values())
        options = [
            *_columns([own[path][1] for path in members], values),
            *_columns([below[path][1] for path in members], values),
        ]
        options = [*(option for option in options if option != values), values]
        if len(options) == 1:
            options += _parts([own[path][1] for path in members], values)
        if len(options := list(dict.fromkeys(options))) > 1:
            made.append(Guess({path: layer for path, (layer, _) in members.items()}, key, place, options))
            made[-1].take(0)
    return made


def _numbers(layer: nn.Module) -> Iterator[tuple[str, int | None, int]]:
    if type(layer).__module__.startswith(("torch.nn.", "sparsefn.")) and not isinstance(layer, nn.Unflatten | nn.Transformer):
        return  # torch's layers: of those that keep sizes layer_sizes knows
    for key, value in list(vars(layer).items()):
        if key not in getattr(layer, "__constants__", ()):
            many = type(value) in (list, tuple, torch.Size) and all(type(n) is int for n in value)
            for place, number in enumerate(value) if many else [(None, value)]:
                if type(number) is int and number > 1:
                    yield key, place, number


def _sizes(cut: Cut, up: int) -> dict[str, tuple[list[str], Sizes]]:
    # The operations in each module's forward, and the sizes of all dimensions that they see.
    made: dict[str, tuple[list[str], Sizes]] = defaultdict(lambda: ([], []))
    known: dict[Any, Sizes] = {}
    for node, tree in cut.analysis.values.items():
        known[node] = [pair for value in values_in(tree) for pair in zip(value.shape, cut.size(value), strict=True)]
        if node.op == "call_function":
            names, sizes = made[scope(node, up)]
            names.append(opname(node))
            for seen in (*node.all_input_nodes, node):
                sizes += known[seen]
    return made


def _columns(sizes: Sequence[Sizes], values: tuple[int, ...]) -> list[tuple[int, ...]]:
    # What becomes of the sizes that are these values, in the same place of each module.
    if len({len(some) for some in sizes}) > 1:
        return []
    pairs = (tuple(zip(*column, strict=True)) for column in zip(*sizes, strict=True))
    return [new for old, new in pairs if old == values]


def _parts(sizes: Sequence[Sizes], values: tuple[int, ...]) -> list[tuple[int, ...]]:
    # The same where a size is a multiple of the value.
    made = [[(v, n * v // m) if m % v == 0 and n * v % m == 0 else (0, 0) for m, n in some] for some, v in zip(sizes, values, strict=True)]
    return [option for option in _columns(made, values) if all(option)]


# ------------------------------------------------ which of them: the first module that differs from the masked model
@dataclasses.dataclass
class Run:
    """How far a model came: so many calls of modules gave what they give in the masked model."""

    works: bool = False
    far: int = 0
    path: str = ""
    why: str = ""

    def better(self, other: Run) -> bool:
        return (self.works, self.far) > (other.works, other.far)


def settle(small: nn.Module, unknown: Sequence[Guess], works: Works, masked: nn.Module, cut: Cut) -> str:
    """Choose numbers with which a model works; the reason where none are found."""
    wanted: list[tuple[str, list[Tensor]]] = []
    _watched(masked, works, lambda path, outs, error: wanted.append((path, outs)))
    keeps, tries = _keeps(cut), itertools.count()
    best = _run(small, works, wanted, keeps)
    while not best.works:
        near = sorted(unknown, key=lambda guess: -max(_shared(path, best.path) for path in guess.modules))
        for change in _changes(near):
            if next(tries) >= TRIES:
                return best.why
            before = [guess.choice for guess, _ in change]
            for guess, choice in change:
                guess.take(choice)
            run = _run(small, works, wanted, keeps)
            if run.better(best):
                best = run
                break
            for (guess, _), choice in zip(change, before, strict=True):
                guess.take(choice)
        else:
            return best.why
    return "" if works(small) else "it differs unless its modules are watched, so that they take no fast paths"


def _changes(near: Sequence[Guess]) -> Iterator[list[tuple[Guess, int]]]:
    single = [(guess, choice) for guess in near for choice in range(len(guess.options)) if choice != guess.choice]
    yield from ([one] for one in single)
    for one, other in itertools.combinations(single, 2):
        if one[0] is not other[0]:
            yield [one, other]


def _shared(path: str, failed: str) -> float:
    # How near a module is to the one that failed: that one itself, then those around it from inside out.
    if path == failed:
        return math.inf
    return len(path) + 1 if not path or failed.startswith(f"{path}.") else 0


def _watched(model: nn.Module, works: Works, see: Callable[[str, list[Tensor], BaseException | None], None]) -> bool:
    def hook(path: str) -> Callable[..., None]:
        def seen(layer: nn.Module, args: Any, out: Any) -> None:
            see(path, [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)], sys.exc_info()[1] if out is None else None)

        return seen

    handles = [layer.register_forward_hook(hook(path), always_call=True) for path, layer in model.named_modules()]
    try:
        return works(model)
    finally:
        for handle in handles:
            handle.remove()


def _run(small: nn.Module, works: Works, wanted: Sequence[tuple[str, list[Tensor]]], keeps: Any) -> Run:
    run = Run()

    def see(path: str, outs: list[Tensor], error: BaseException | None) -> None:
        if run.why:
            return
        name = f"the {type(small.get_submodule(path)).__name__} at {path!r}" if path else f"the {type(small).__name__}"
        if error is not None:
            run.why = f"{name} fails: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}"
        elif run.far >= len(wanted) or wanted[run.far][0] != path:
            run.why = f"{name} runs where another module did"
        elif not _alike(outs, wanted[run.far][1], keeps):
            run.why = f"{name} gives other outputs"
        else:
            run.far += 1
            return
        run.path = path

    run.works = _watched(small, works, see)
    run.why = run.why or "it gives other outputs"
    return run


def _alike(some: list[Tensor], whole: list[Tensor], keeps: dict[tuple[int, int], list[Tensor]]) -> bool:
    return len(some) == len(whole) and all(_alike_but(x, y, keeps) for x, y in zip(some, whole, strict=True))


def _alike_but(x: Tensor, y: Tensor, keeps: dict[tuple[int, int], list[Tensor]]) -> bool:
    # Whether tensors are the same, but for entries of dimensions that lose some.
    dims = [d for d, (n, m) in enumerate(zip(x.shape, y.shape, strict=False)) if n != m]
    for chosen in itertools.product(*(keeps.get((y.shape[d], x.shape[d]), []) for d in dims)) if x.ndim == y.ndim else ():
        left = y
        for d, keep in zip(dims, chosen, strict=True):
            left = left.index_select(d, keep.to(y.device))
        if torch.allclose(x, left.to(x.dtype), 1e-5, 1e-6, equal_nan=True):
            return True
    return False


def _keeps(cut: Cut) -> dict[tuple[int, int], list[Tensor]]:
    # All choices of indices that stay of a dimension, by its sizes before and after.
    made: dict[tuple[int, int], dict[bytes, Tensor]] = defaultdict(dict)
    for value in values_in(list(cut.analysis.values.values())):
        for label in value.labels:
            kept = cut.kept(label)
            if not kept.all():
                made[len(kept), int(kept.sum())][kept.tobytes()] = torch.from_numpy(kept).nonzero().flatten()
    return {sizes: list(some.values()) for sizes, some in made.items()}
