"""Numbers that modules keep about sizes, and what they may become."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsefn.modules.weights import is_conv1d
from sparsefn.shrinking.cut import Cut
from sparsefn.shrinking.search import Tried, search
from sparsefn.shrinking.values import module_of, named_module, opname, values_in

TRIES = 64  # runs of a model in search of numbers

# of the largest value, where outputs show a wrong number
_NEAR = {torch.float64: 1e-8, torch.float32: 1e-4}

Works = Callable[[nn.Module], bool]
Outputs = list[tuple[str, list[Tensor]]]
Pairs = list[tuple[int, int]]  # sizes before and after
Sizes = dict[tuple[int, int, int], tuple[int, int]]
NodeSizes = dict[fx.Node, Pairs]


@dataclasses.dataclass
class Guess:
    """A number that the modules of one class keep, and what it may become in each of
    them: likely ones first.
    """

    modules: dict[str, nn.Module]
    key: str
    place: int | None  # in a list or tuple
    options: list[tuple[int, ...]]
    old: int  # which option is that it stays
    choice: int = 0

    def take(self, choice: int) -> None:
        self.choice = choice
        for layer, value in zip(
            self.modules.values(), self.options[choice], strict=True
        ):
            held = vars(layer)[self.key]
            if self.place is not None:
                held = list(held)
                number = value
                held[self.place] = number
                value = type(vars(layer)[self.key])(held)
            vars(layer)[self.key] = value


def guesses(small: nn.Module, nodes: NodeSizes) -> list[Guess]:
    """Set whole numbers, also in lists and tuples, that are a size that changes; and
    say what else they may be.

    A number is told by where it is a size in the module's own forward, or in that of
    its children: modules of one class whose forward does the same operations keep it
    from the same place.
    """
    own = _seen(nodes, 0)
    below = _seen(nodes, 1)
    alike: dict[Any, dict[str, tuple[nn.Module, int]]] = defaultdict(dict)
    for path, layer in small.named_modules():
        for key, place, value in _numbers(layer):
            alike[type(layer), key, place, tuple(own[path][0])][path] = layer, value
    made = []
    for (_, key, place, _), members in alike.items():
        values = tuple(value for _, value in members.values())
        seen = []
        for sizes in (own, below):
            seen += _columns([sizes[path][1] for path in members], values)
        options = list(
            dict.fromkeys([*(option for option in seen if option != values), values])
        )
        if len(options) == 1:
            options += set(_parts([own[path][1] for path in members], values)) - {
                values
            }
        if len(options) > 1:
            modules = {path: layer for path, (layer, _) in members.items()}
            made.append(Guess(modules, key, place, options, options.index(values)))
            made[-1].take(0)
    return made


def _numbers(layer: nn.Module) -> Iterator[tuple[str, int | None, int]]:
    open_ = isinstance(layer, nn.Unflatten | nn.ChannelShuffle | nn.Transformer)
    if (
        type(layer).__module__.startswith(("torch.nn.", "sparsefn.")) and not open_
    ) or is_conv1d(layer):
        return  # layer_sizes knows of them
    for key, value in list(vars(layer).items()):
        if open_ or key not in getattr(layer, "__constants__", ()):
            many = type(value) in (list, tuple, torch.Size) and all(
                type(n) is int for n in value
            )
            for place, number in enumerate(value) if many else [(None, value)]:
                if type(number) is int and number > 1:
                    yield key, place, number


def node_sizes(cut: Cut) -> NodeSizes:
    """The sizes of all dimensions that the nodes of a program give, before and
    after.
    """
    sizes: NodeSizes = {}
    for node, tree in cut.analysis.values.items():
        sizes[node] = []
        for value in values_in(tree):
            sizes[node] += zip(value.shape, cut.size(value), strict=True)
    return sizes


def _seen(nodes: NodeSizes, up: int) -> dict[str, tuple[list[str], Sizes]]:
    # The operations in each module's forward, and the sizes that these see: (operation,
    # operand, dimension).
    made: dict[str, tuple[list[str], Sizes]] = defaultdict(lambda: ([], {}))
    for node in nodes:
        if node.op == "call_function":
            names, sizes = made[module_of(node, up)]
            for i, seen in enumerate((node, *node.all_input_nodes)):
                sizes |= {
                    (len(names), i, d): pair for d, pair in enumerate(nodes[seen])
                }
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
        fits = {
            at: (old, new)
            for at, (old, new) in some.items()
            if old and new and not old % v and not new * v % old
        }
        made.append({at: (v, new * v // old) for at, (old, new) in fits.items()})
    return _columns(made, values)


def outputs_of(model: nn.Module, works: Works) -> Outputs:
    """What the modules give in turn while a model runs, by path."""
    made: Outputs = []
    _watched(model, works, lambda path, outs, error: made.append((path, outs)))
    return made


def settle(
    small: nn.Module, unknown: Sequence[Guess], works: Works, wanted: Outputs, cut: Cut
) -> str:
    """Choose numbers with which a model works; the reason where none are found."""
    keeps = _keeps(cut)

    def order(tried: Tried) -> list[Guess]:
        return sorted(
            unknown,
            key=lambda guess: -max(_near(path, tried.path) for path in guess.modules),
        )

    found = search(order, lambda: _run(small, works, wanted, keeps), TRIES)
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
    changed = [(guess, guess.choice) for guess in unknown if guess.choice != guess.old]
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
    # How near a module is to the one that failed: that one itself, then those around it
    # from inside out.
    if path == failed:
        return math.inf
    return len(path) + 1 if not path or failed.startswith(f"{path}.") else 0


def _watched(
    model: nn.Module,
    works: Works,
    see: Callable[[str, list[Tensor], BaseException | None], None],
) -> bool:
    def seen(path: str, layer: nn.Module, args: Any, out: Any) -> None:
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        see(path, tensors, sys.exc_info()[1] if out is None else None)

    layers = model.named_modules()
    handles = [
        layer.register_forward_hook(partial(seen, path), always_call=True)
        for path, layer in layers
    ]
    try:
        return works(model)
    finally:
        for handle in handles:
            handle.remove()


def _run(small: nn.Module, works: Works, wanted: Outputs, keeps: Any) -> Tried:
    # Its score is how many calls of modules gave what they give in the masked model.
    far = 0
    wrong: list[tuple[str, str]] = []

    def see(path: str, outs: list[Tensor], error: BaseException | None) -> None:
        nonlocal far
        if wrong:
            return
        if error is not None:
            wrong.append(
                (
                    path,
                    "fails: "
                    f"{(str(error).strip() or type(error).__name__).splitlines()[0]}",
                )
            )
        elif far == len(wanted) or wanted[far][0] != path:
            wrong.append((path, "runs where another module did"))
        elif not _alike(outs, wanted[far][1], keeps):
            wrong.append((path, "gives other outputs"))
        else:
            far += 1

    if _watched(small, works, see):
        return Tried((math.inf, 0), True)
    path, what = wrong[0] if wrong else ("", "gives other outputs")
    return Tried((far, 0), False, f"{named_module(small, path)} {what}", path)


def _alike(
    some: list[Tensor], whole: list[Tensor], keeps: dict[tuple[int, int], list[Tensor]]
) -> bool:
    return len(some) == len(whole) and all(
        _alike_but(x, y, keeps) for x, y in zip(some, whole, strict=True)
    )


def _alike_but(
    x: Tensor, y: Tensor, keeps: dict[tuple[int, int], list[Tensor]]
) -> bool:
    # Whether tensors are the same, but for entries of dimensions that lose some.
    dims = [d for d, (n, m) in enumerate(zip(x.shape, y.shape, strict=False)) if n != m]
    for chosen in (
        itertools.product(*(keeps.get((y.shape[d], x.shape[d]), []) for d in dims))
        if x.ndim == y.ndim
        else ()
    ):
        left = y
        for d, keep in zip(dims, chosen, strict=True):
            left = left.index_select(d, keep.to(y.device))
        near = (
            _NEAR.get(x.dtype, 0.05) * float(left.abs().max()) if left.numel() else 0.0
        )
        if torch.allclose(x, left.to(x.dtype), 0, near, equal_nan=True):
            return True
    return False


def _keeps(cut: Cut) -> dict[tuple[int, int], list[Tensor]]:
    # All choices of indices that stay of a dimension, by its sizes before and after.
    made: dict[tuple[int, int], dict[bytes, Tensor]] = defaultdict(dict)
    for value in values_in(list(cut.analysis.values.values())):
        for label in value.labels:
            kept = cut.kept(label)
            if not kept.all():
                made[len(kept), int(kept.sum())][kept.tobytes()] = (
                    torch.from_numpy(kept).nonzero().flatten()
                )
    return {sizes: list(some.values()) for sizes, some in made.items()}
