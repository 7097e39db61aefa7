"""Numbers that modules keep about sizes, and a search for what they become."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsefn.shrinking.plan import PruningPlan
from sparsefn.shrinking.small_layers import is_transformers_conv
from sparsefn.shrinking.trace import first_line
from sparsefn.shrinking.values import (
    module_of,
    named_module,
    opname,
    values_in,
)


class Trial(NamedTuple):
    """What came of a choice of numbers: more is better."""

    score: tuple[float, float]
    done: bool
    why: str = ""  # not
    path: str = ""  # of the module that is to blame


@dataclasses.dataclass
class Guess:
    """A number that is kept in several places, such as in the modules of one class, and
    what it may become in each of them: likely ones first.
    """

    owners: dict[str, Any]  # by path what holds it: attributes, a config, or a list
    key: str | int
    place: int | None  # in a list or tuple
    options: list[tuple[Any, ...]]
    old: int  # which option is that it stays
    choice: int = 0

    def take(self, choice: int) -> None:
        self.choice = choice
        values = self.options[choice]
        for owner, value in zip(self.owners.values(), values, strict=True):
            if self.place is not None:
                whole = list(owner[self.key])
                whole[self.place] = value
                value = type(owner[self.key])(whole)
            owner[self.key] = value


def search(
    order: Callable[[Trial], Sequence[Guess]], run: Callable[[], Trial], tries: int
) -> Trial:
    """Change one number, or two at once, as long as that is better; the best that was
    found in so many runs.
    """
    best = run()
    left = iter(range(tries))
    while not best.done:
        for change in _changes(order(best)):
            if next(left, None) is None:
                return best
            before = [(number, number.choice) for number, _ in change]
            for number, choice in change:
                number.take(choice)
            now = run()
            if now.done or now.score > best.score:
                best = now
                break
            for number, choice in before:
                number.take(choice)
        else:
            return best
    return best


def _changes(numbers: Sequence[Guess]) -> Iterator[list[tuple[Guess, int]]]:
    single = []
    for number in numbers:
        for choice in range(len(number.options)):
            if choice != number.choice:
                single.append((number, choice))
    for one in single:
        yield [one]
    for one, other in itertools.combinations(single, 2):
        if one[0] is not other[0]:
            yield [one, other]


TRIES = 64  # runs of a model in search of numbers

# of the largest value, where outputs show a wrong number
_NEAR = {torch.float64: 1e-8, torch.float32: 1e-4}

Works = Callable[[nn.Module], bool]
Outputs = list[tuple[str, list[Tensor]]]
Pairs = list[tuple[int, int]]  # sizes before and after
Sizes = dict[tuple[int, int, int], tuple[int, int]]
NodeSizes = dict[fx.Node, Pairs]


def guesses(small: nn.Module, nodes: NodeSizes) -> list[Guess]:
    """Set whole numbers, also in lists and tuples, that are a size that changes; and
    say what else they may be.

    A number is known by where it is a size in the module's own forward, or in its
    children's: modules of one class whose forward does the same operations keep it
    from the same place.
    """
    own = _seen(nodes, 0)
    below = _seen(nodes, 1)
    alike: dict[Any, dict[str, int]] = defaultdict(dict)
    for path, layer in small.named_modules():
        operations, _ = own[path]
        for key, place, value in _numbers(layer):
            alike[type(layer), key, place, tuple(operations)][path] = value
    made = []
    for (_, key, place, _), members in alike.items():
        values = tuple(members.values())
        here = [own[path][1] for path in members]
        inside = [below[path][1] for path in members]
        seen = [*_columns(here, values), *_columns(inside, values)]
        others = dict.fromkeys(option for option in seen if option != values)
        options = [*others, values]
        if len(options) == 1:
            options += set(_parts(here, values)) - {values}
        if len(options) > 1:
            owners = {path: vars(small.get_submodule(path)) for path in members}
            old = options.index(values)
            guess = Guess(owners, key, place, options, old)
            guess.take(0)
            made.append(guess)
    return made


def _numbers(layer: nn.Module) -> Iterator[tuple[str, int | None, int]]:
    open_ = isinstance(layer, nn.Unflatten | nn.ChannelShuffle | nn.Transformer)
    known = type(layer).__module__.startswith(("torch.nn.", "sparsefn."))
    if (known and not open_) or is_transformers_conv(layer):
        return  # layer_sizes knows of them
    for key, value in list(vars(layer).items()):
        if not open_ and key in getattr(layer, "__constants__", ()):
            continue
        numbers: Any = [(None, value)]
        if type(value) in (list, tuple, torch.Size):
            numbers = []
            if all(type(n) is int for n in value):
                numbers = enumerate(value)
        for place, number in numbers:
            if type(number) is int and number > 1:
                yield key, place, number


def node_sizes(plan: PruningPlan) -> NodeSizes:
    """The sizes of all dimensions that the nodes of a program give, before and
    after.
    """
    sizes: NodeSizes = {}
    for node, tree in plan.analysis.values.items():
        sizes[node] = []
        for value in values_in(tree):
            sizes[node] += zip(value.shape, plan.size(value), strict=True)
    return sizes


def _seen(nodes: NodeSizes, up: int) -> dict[str, tuple[list[str], Sizes]]:
    # The operations in each module's forward, and the sizes that these see: (operation,
    # operand, dimension).
    made: dict[str, tuple[list[str], Sizes]] = defaultdict(lambda: ([], {}))
    for node in nodes:
        if node.op == "call_function":
            names, sizes = made[module_of(node, up)]
            for i, seen in enumerate((node, *node.all_input_nodes)):
                for d, pair in enumerate(nodes[seen]):
                    sizes[len(names), i, d] = pair
            names.append(opname(node))
    return made


def _columns(sizes: Sequence[Sizes], values: tuple[int, ...]) -> list[tuple[int, ...]]:
    # What becomes of the sizes that are these values, in the same place of each module.
    columns = []
    for at in sizes[0]:
        if not all(at in some for some in sizes):
            continue
        pairs = [some[at] for some in sizes]
        if tuple(old for old, _ in pairs) == values:
            columns.append(tuple(new for _, new in pairs))
    return columns


def _parts(sizes: Sequence[Sizes], values: tuple[int, ...]) -> list[tuple[int, ...]]:
    # The same where a size is a multiple of the value.
    made = []
    for some, v in zip(sizes, values, strict=True):
        parts: Sizes = {}
        for at, (old, new) in some.items():
            if not old or not new:
                continue
            if old % v == 0 and new * v % old == 0:
                parts[at] = (v, new * v // old)
        made.append(parts)
    return _columns(made, values)


def outputs_of(model: nn.Module, works: Works) -> Outputs:
    """What the modules give in turn while a model runs, by path."""
    made: Outputs = []

    def see(path: str, outs: list[Tensor], error: BaseException | None) -> None:
        made.append((path, outs))

    _watched(model, works, see)
    return made


def settle(
    small: nn.Module,
    unknown: Sequence[Guess],
    works: Works,
    wanted: Outputs,
    plan: PruningPlan,
) -> str:
    """Choose numbers with which a model works; the reason where none are found."""
    keeps = _keeps(plan)

    def order(trial: Trial) -> list[Guess]:
        def far(guess: Guess) -> float:
            return -max(_near(path, trial.path) for path in guess.owners)

        return sorted(unknown, key=far)

    def run() -> Trial:
        return _run(small, works, wanted, keeps)

    found = search(order, run, TRIES)
    if found.done and not works(small):
        return (
            "it only works while its modules are watched, so that they take no fast "
            "paths"
        )
    return found.why


def give_back(small: nn.Module, unknown: Sequence[Guess], works: Works) -> None:
    """Give numbers back that need not change: what is a size by chance would be wrong
    where nothing proves it.
    """
    changed = []
    for guess in unknown:
        if guess.choice != guess.old:
            changed.append((guess, guess.choice))
    tries = [[one] for one in changed]
    if len(changed) > 1:
        tries = [changed, *tries]
    for some in tries:
        for guess, _ in some:
            guess.take(guess.old)
        if not works(small):
            for guess, choice in some:
                guess.take(choice)
        elif some is changed:
            return


def _near(path: str, failed: str) -> float:
    # How near a module is to the failed module: itself first, then the modules around
    # it from inside out.
    if path == failed:
        return math.inf
    is_around = not path or failed.startswith(f"{path}.")
    return len(path) + 1 if is_around else 0


def _watched(
    model: nn.Module,
    works: Works,
    see: Callable[[str, list[Tensor], BaseException | None], None],
) -> bool:
    def seen(path: str, layer: nn.Module, args: Any, out: Any) -> None:
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        error = None
        if out is None:
            _, error, _ = sys.exc_info()
        see(path, tensors, error)

    handles = []
    for path, layer in model.named_modules():
        hook = partial(seen, path)
        handles.append(layer.register_forward_hook(hook, always_call=True))
    try:
        return works(model)
    finally:
        for handle in handles:
            handle.remove()


def _run(small: nn.Module, works: Works, wanted: Outputs, keeps: Any) -> Trial:
    # Its score is how many calls of modules gave what they give in the masked model.
    far = 0
    wrong: list[tuple[str, str]] = []

    def see(path: str, outs: list[Tensor], error: BaseException | None) -> None:
        nonlocal far
        if wrong:
            return
        if error is not None:
            wrong.append((path, f"fails: {first_line(error)}"))
        elif far == len(wanted) or wanted[far][0] != path:
            wrong.append((path, "runs where another module did"))
        elif not _alike(outs, wanted[far][1], keeps):
            wrong.append((path, "gives other outputs"))
        else:
            far += 1

    if _watched(small, works, see):
        return Trial((math.inf, 0), True)
    wrong.append(("", "gives other outputs"))  # no module did
    path, what = wrong[0]
    why = f"{named_module(small, path)} {what}"
    return Trial((far, 0), False, why, path)


def _alike(
    some: list[Tensor], whole: list[Tensor], keeps: dict[tuple[int, int], list[Tensor]]
) -> bool:
    if len(some) != len(whole):
        return False
    pairs = zip(some, whole, strict=True)
    return all(_alike_but(x, y, keeps) for x, y in pairs)


def _alike_but(
    x: Tensor, y: Tensor, keeps: dict[tuple[int, int], list[Tensor]]
) -> bool:
    # Whether tensors are the same, but for entries of dimensions that lose some.
    if x.ndim != y.ndim:
        return False
    dims = []
    choices = []
    for d, (now, before) in enumerate(zip(x.shape, y.shape, strict=True)):
        if now != before:
            dims.append(d)
            choices.append(keeps.get((before, now), []))
    for chosen in itertools.product(*choices):
        left = y
        for d, keep in zip(dims, chosen, strict=True):
            left = left.index_select(d, keep.to(y.device))
        largest = 0.0
        if left.numel():
            largest = float(left.abs().max())
        near = _NEAR.get(x.dtype, 0.05) * largest
        if torch.allclose(x, left.to(x.dtype), 0, near, equal_nan=True):
            return True
    return False


def _keeps(plan: PruningPlan) -> dict[tuple[int, int], list[Tensor]]:
    # All choices of indices that stay of a dimension, by its sizes before and after.
    made: dict[tuple[int, int], dict[bytes, Tensor]] = defaultdict(dict)
    for value in values_in(list(plan.analysis.values.values())):
        for label in value.labels:
            kept = plan.kept(label)
            if kept.all():
                continue
            places = torch.from_numpy(kept).nonzero().flatten()
            sizes = (len(kept), len(places))
            made[sizes][kept.tobytes()] = places
    return {sizes: list(some.values()) for sizes, some in made.items()}
