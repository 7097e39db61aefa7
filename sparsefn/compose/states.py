"""Joining the states of several algorithms into one, and taking the parts out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch

from sparsefn.engine.checks import uncalled
from sparsefn.masks import intersect
from sparsefn.state import Algorithm, State, has_own_support, masked_view, support_of
from sparsefn.tree import Tree, flatten


def join_states(parts: Sequence[State], params: Tree, masks: Tree, extra: Sequence[Mapping[str, Tree]]) -> State:
    """Join states into one: each part's own fields by its number, and a common support if a part has its own.

    >>> state = sf.dense().init({"w": torch.ones(1)})
    >>> join_states([state], state.params, state.masks, [{}]).scores
    {'0': {'scores': (), 'support': ()}}
    """
    scores = {str(i): {**kept(part), **more} for i, (part, more) in enumerate(zip(parts, extra, strict=True))}
    own = any(has_own_support(part) for part in parts)
    support = reduce(intersect, (support_of(part) for part in parts)) if own else ()
    return State(params, masks, scores, {str(i): part.key for i, part in enumerate(parts)}, support=support)


def kept(part: State) -> dict[str, Tree]:
    """The fields of a part's state that a composition keeps beside params, masks and key.

    >>> kept(sf.dense().init({"w": torch.ones(1)}))
    {'scores': (), 'support': ()}
    """
    return {"scores": part.scores, "support": part.support}


def check_algorithm(name: str, algorithm: object, at: str = "") -> None:
    """Raise for anything but an Algorithm; the error may say at which place it is.

    >>> check_algorithm("donated", sf.dense())
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"{name}: expected an Algorithm{at}, got {uncalled(algorithm) or type(algorithm).__name__}")


def check_trained(name: str, algorithms: Sequence[Algorithm]) -> None:
    """Raise unless every algorithm trains params: one that trains latents goes outermost.

    >>> check_trained("chain", [sf.dense()])
    """
    if not algorithms:
        raise ValueError(f"{name}: expected at least one algorithm, got none")
    for i, algorithm in enumerate(algorithms):
        check_algorithm(name, algorithm, f" at position {i}")
        if algorithm.view is not masked_view:
            raise ValueError(
                f"{name}: the algorithm at position {i} has a view of its own (latents or terms); put that outermost: "
                f"reparametrised(..., inner={name}(...)) or with_terms({name}(...), ...)"
            )


def no_optimizer(name: str, states: Sequence[State]) -> None:
    """Raise for a part that has an optimizer.

    >>> no_optimizer("chain", [sf.dense().init({"w": torch.ones(1)})])
    """
    for i, state in enumerate(states):
        if state.opt != ():
            raise ValueError(f"{name}: the algorithm at position {i} has an optimizer; put with_optimizer outermost")


# Made once: a step that changes nothing does no tensor work.
_TRUE = torch.ones((), dtype=torch.bool, device="cpu")


def _true(device: torch.device) -> torch.Tensor:
    return _TRUE if device.type == "cpu" else torch.ones((), dtype=torch.bool, device=device)  # a copy would wait


def owned(state: State) -> dict[str, Tree]:
    """The leaves that a part sparsifies, as a structure without tensors.

    >>> owned(sf.static(0.5).init({"w": torch.ones(2, 2), "b": torch.ones(2)}))
    {'w': ()}
    """
    return {path: () for path, mask in flatten(state.masks)[0].items() if mask.ndim}


def part_of(state: State, params: Tree, masks: Tree, i: int) -> State:
    """The state of part `i`, which keeps `owned` by its number and sees only the masks of its own leaves.

    >>> part = sf.static(0.5).init({"w": torch.ones(2, 2)})
    >>> whole = join_states([part], part.params, part.masks, [{"owns": {}}])
    >>> part_of(whole, whole.params, whole.masks, 0).masks
    {'w': tensor(True)}
    """
    own = state.scores[str(i)]
    leaves, rebuild = flatten(masks)
    seen = rebuild([m if p in own["owns"] or not m.ndim else _true(m.device) for p, m in leaves.items()])
    return State(params, seen, own["scores"], state.key[str(i)], state.opt, own["support"])
