"""The smaller model of the same class, proven by running it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparsefn.shrinking.analysis import Cut
from sparsefn.shrinking.attributes import (
    Guess,
    Pairs,
    give_back,
    guesses,
    node_sizes,
    outputs_of,
    set_configs,
    settle,
)
from sparsefn.shrinking.layer_sizes import (
    COUNTED,
    averages,
    fold_norms,
    resize,
)
from sparsefn.shrinking.trace import tensor_at
from sparsefn.shrinking.values import module_of, named_module, opname

Works = Callable[[nn.Module, Mapping[str, Tensor]], bool]


class SameClass(NamedTuple):
    """A smaller model of the same class, or why there is none."""

    model: nn.Module | None
    why: str = ""  # there is none
    # the parameters that are scaled, as norms of fewer entries need it
    scaled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what the model's configs cannot say


def same_class(
    model: nn.Module,
    cut: Cut,
    works: Works,
    tensors: Mapping[str, Tensor] | None = None,
) -> SameClass:
    """A copy of a model with smaller tensors, whose modules keep fitting sizes.

    `works(small, exact)` has to run a model, with the tensors `exact` in float64 in
    place of its own, which were rounded, and to say whether it gives what is wanted: on
    the same inputs each time, and an exception is a no. It may copy the model. No model
    is returned of which it did not say yes.

    Tensors have their old names; entries of `tensors` take their place, rounded to the
    dtypes of the model. What torch's layers keep about sizes follows from their
    tensors. Other numbers that modules keep are guessed: numbers that equal a size that
    changes in the module's forward. Where a number may mean several sizes these are
    tried, at most `attributes.TRIES` in all: it is better if more modules in turn give
    the outputs that they have in the masked model. What need not change for the outputs
    stays as it was, unless a config says it. The reason, where there is no such model,
    names the first module that does not give those outputs.

    Norms of torch that lose entries become norms of `sparsefn.shrinking.layers`. Of an
    RMS norm in a module's own code the weight and eps are scaled, which is the same:
    `scaled` names these parameters. Configs are set where a new model from them equals
    the smaller model; `notes` says where not.
    """
    given = tensors or {}
    exact = dict[str, Tensor]()

    def taken(name: str, x: Tensor) -> Tensor:
        made = cut.take(name, given.get(name, x))
        if made.dtype != x.dtype:
            exact[name] = made
        return made.to(x.dtype)

    answers: list[bool] = []

    def proven(some: nn.Module) -> bool:
        answers.append(works(some, exact))
        return answers[-1]

    small = _with(model, cut, taken)
    why = resize(small, cut)
    if why:
        return SameClass(None, why)
    scaled = fold_norms(small, cut)
    exact |= scaled
    ready = {name.rpartition(".")[0] for name in scaled}
    for average in averages(cut):
        path = module_of(average.node)
        counts = type(small.get_submodule(path)) in COUNTED.values()
        if not counts and path not in ready:
            what = opname(average.node)
            where = named_module(small, path)
            return SameClass(
                None, f"{where} takes a {what} of entries that go in code of its own"
            )
    nodes = node_sizes(cut)
    sizes = [pair for pairs in nodes.values() for pair in pairs]
    unknown = guesses(small, nodes)
    notes: tuple[str, ...] = ()
    if not unknown:  # one proof is enough, of the model with its configs
        notes = with_configs(small, model, sizes, unknown, proven)
    if not any(answers) and not proven(small):
        wanted = outputs_of(_masked(model, cut), lambda some: works(some, {}))
        why = settle(small, unknown, proven, wanted, cut)
        if why:
            return SameClass(None, why)
    if unknown:
        notes = with_configs(small, model, sizes, unknown, proven)
    return SameClass(small, "", tuple(scaled), notes)


def with_configs(
    small: nn.Module,
    model: nn.Module,
    sizes: Pairs,
    unknown: list[Guess],
    works: Callable[[nn.Module], bool],
) -> tuple[str, ...]:
    """Set the configs of a smaller model, and give back the numbers that neither these
    nor its outputs need; notes.

    >>> with_configs(nn.ReLU(), nn.ReLU(), [], [], lambda small: True)
    ()
    """
    configs = dict(set_configs(small, model, sizes, works))
    said = tuple(f"{path}." if path else "" for path, why in configs.items() if not why)

    def is_said(guess: Guess) -> bool:
        return all(path.startswith(said) for path in guess.owners)

    give_back(small, [guess for guess in unknown if not is_said(guess)], works)
    return tuple(why for why in configs.values() if why)


def _with(
    model: nn.Module, cut: Cut, new: Callable[[str, Tensor], Tensor]
) -> nn.Module:
    # A copy with other tensors in place of the program's, shared ones shared.
    made: dict[int, Any] = {}
    for name in cut.analysis.leaves:
        x = tensor_at(model, name)  # none is a constant of the program
        if isinstance(x, nn.Parameter):
            made[id(x)] = type(x)(new(name, x), x.requires_grad)
        elif isinstance(x, Tensor):
            made[id(x)] = new(name, x)
    return copy.deepcopy(model, made)


def _masked(model: nn.Module, cut: Cut) -> nn.Module:
    # The whole model, with 0 for what goes: to find where a smaller model differs.
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def masked(name: str, x: Tensor) -> Tensor:
        if name not in parameters:
            return x.detach().clone()
        masks = cut.analysis.book.masks
        mask = cut.mask(name) if masks is None else masks.get(name)
        return x.detach().clone() if mask is None else x.detach() * mask.to(x.device)

    return _with(model, cut, masked)
