"""The vocabulary: `State`, `Algorithm`, and how an optimizer sees a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn._engine.leaves import leafwise
from sparsefn._engine.torch_limits import replaceable
from sparsefn.core.checks import Level as Level
from sparsefn.core.checks import Made, check_call
from sparsefn.core.checks import Schedule as Schedule
from sparsefn.core.checks import Step as Step
from sparsefn.core.tree import (
    Leaves,
    Tree,
    check_like,
    flatten,
    leaves_like,
    leaves_of,
    mend_of,
    opened,
    paths,
    same_structure,
    structure_error,
)

__all__ = [
    "Accumulated",
    "Algorithm",
    "State",
    "TrainView",
    "apply_masks",
    "effective",
    "masked_view",
    "with_params",
]
__dir__ = __all__.copy


Trigger = Callable[[Step], bool | Tensor]
Where = Callable[[str, Tensor], bool] | str | Sequence[str]
Term = Callable[["State", Step], Tree]


@replaceable
class State(NamedTuple):
    """Everything an algorithm knows, as one pytree of tensors.

    >>> import sparsefn as sf
    >>> state = sf.dense().init({"w": torch.ones(2, 2)})
    >>> state.masks, state.scores
    ({'w': tensor(True)}, ())

    Attributes:
        params: Weights before masks, a tree of tensors. Run the model with
            `sf.effective(state)`.
        masks: Bool tensors, a tree with the treedef of `params`: True = kept, 0-d True
            for a leaf that is not sparsified.
        scores: Tensors that the algorithm accumulates or learns, a dict of trees by
            role. The trees "learned" and "latent" can be trained only by an optimizer
            inside the algorithm.
        key: PRNG key, int64 of shape (2,).
        opt: State of the optimizer inside the algorithm.
        support: Tree of masks that says which weights move, or `()` if it is `masks`
            itself.
        parts: States of the algorithms that a composition is made of. What they share
            with the whole is `()` in them, and the `masks` of a part may be a dict
            keyed by the paths that it sparsifies.

    An unused field is `()`.
    """

    params: Tree
    masks: Tree
    scores: Tree = ()
    key: Tree = ()
    opt: Tree = ()
    support: Tree = ()
    parts: tuple[State, ...] = ()


class TrainView(NamedTuple):
    """How an optimizer sees a state: which tree it trains, and with which gradients.

    >>> import sparsefn as sf
    >>> algorithm = sf.dense()
    >>> state = algorithm.init({"w": torch.ones(2)})
    >>> algorithm.view.get(state)
    {'w': tensor([1., 1.])}

    Attributes:
        get: Function of a state that reads the trained tree.
        put: Function of (state, trained tree) that returns the state with that tree.
        grads: Function of (state, grads, step) that turns the gradient at the effective
            weights into the gradient of `get(state)`.
        support: Function of a state that returns a bool tree like `get(state)`: where
            it moves and keeps moments (0-d True = everywhere).
    """

    get: Callable[[State], Tree]
    put: Callable[[State, Tree], State]
    grads: Callable[[State, Tree, Step], Tree]
    support: Callable[[State], Tree]


class _Memory(NamedTuple):
    init: Callable[[Tree], Tree]
    accumulate: Callable[[Tree, State, Tree, Step], Tree]
    value: Callable[[Tree, State, Tree, Step], Tree]


class Accumulated(Made, _Memory):
    """A score with memory, whose leaves are in `state.scores` under the score's role.

    >>> import sparsefn as sf
    >>> ema = sf.scores.ema(sf.scores.gradient, decay=0.5)
    >>> ema.init({"w": torch.ones(2)})
    {'w': tensor([0., 0.])}

    Attributes:
        init: Function of params that makes the memory.
        accumulate: Function of (memory, state, grads, step) that returns the next
            memory. Called on every step.
        value: Function of (memory, state, grads, step) that returns the scores, a tree
            like params. Called when a trigger fires.
    """


PlainScore = Callable[[State, Tree, Step], Tree]
Score = PlainScore | Accumulated


def support_of(state: State) -> Tree:
    """The entries at which weights of a state move: its support, else the masks."""
    return state.support if has_own_support(state) else state.masks


def has_own_support(state: State) -> bool:
    """Whether a state has a support other than its masks."""
    return not (isinstance(state.support, tuple) and not state.support)


def has_optimizer(state: State) -> bool:
    """Whether a state, or one of its parts, holds an optimizer's state.

    >>> import sparsefn as sf
    >>> trained = sf.with_optimizer(sf.static(0.5), sf.optimizers.sgd(0.1))
    >>> has_optimizer(sf.partition([("*", trained)]).init({"w": torch.ones(2, 2)}))
    True
    """
    return state.opt != () or any(has_optimizer(part) for part in state.parts)


def everywhere(tree: Tree) -> Tree:
    """The support under which every entry of a tree moves: 0-d True for each leaf."""
    return optree.tree_map(_true, tree)


def _true(leaf: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=leaf.device)


def inside(support: Tree, new: Tree, old: Tree | None = None) -> Tree:
    """The new leaves on their support, and off it the old ones, or +0.0.

    It is `apply_masks` without its checks.

    >>> inside(
    ...     {"w": torch.tensor([True, False])},
    ...     {"w": torch.tensor([1.0, 2.0])},
    ...     {"w": torch.tensor([3.0, 4.0])},
    ... )
    {'w': tensor([1., 4.])}
    """
    masks, rebuild = opened(support)
    leaves = leaves_like(new, support)
    if old is None:
        return rebuild(leafwise.zeroed(masks, leaves))
    return rebuild(leafwise.either(masks, leaves, leaves_like(old, support)))


def apply_masks(tree: Tree, masks: Tree) -> Tree:
    """The tree with +0.0 wherever its mask is False.

    >>> sf.apply_masks(
    ...     {"w": torch.tensor([1.0, -0.0, float("nan")])},
    ...     {"w": torch.tensor([True, False, False])},
    ... )
    {'w': tensor([1., 0., 0.])}

    Args:
        tree: Tree of tensors.
        masks: Bool tensors, a tree with the structure of `tree`: each mask has the
            shape of its leaf, or is 0-d and keeps its leaf whole.

    Returns:
        A tree like `tree`, differentiable in it. Entries are selected and not
        multiplied: -0.0, NaN and inf off the mask become +0.0.

    Raises:
        ValueError: The structures differ, or a mask has another shape.
        TypeError: A mask is not bool.
    """
    check_masks(masks, tree)
    return inside(masks, tree)


def check_masks(masks: Tree, params: Tree) -> None:
    """Raise unless `masks` fits `params`: the same structure, bool, each of its leaf's
    shape or 0-d.
    """
    if not same_structure(masks, params):
        raise ValueError(structure_error("masks", masks, params))
    leaves = leaves_of(masks)
    wanted = leaves_of(params)
    for i, (mask, leaf) in enumerate(zip(leaves, wanted, strict=True)):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"expected a bool mask at {paths(params)[i]!r}, got {got}")
        if mask.ndim and mask.shape != leaf.shape:
            at = paths(params)[i]
            raise ValueError(
                f"expected a mask of shape {tuple(leaf.shape)} or () at {at!r}, got "
                f"{tuple(mask.shape)}"
            )


def effective(state: State) -> Tree:
    """The weights to run the model with: `params` under `masks`, for every algorithm.

    >>> sf.effective(sf.State({"w": torch.ones(2)}, {"w": torch.tensor([True, False])}))
    {'w': tensor([1., 0.])}

    Args:
        state: State of any algorithm.

    Returns:
        A tree like `state.params`, with +0.0 for pruned weights.

    Raises:
        TypeError: `state` is not a State.
    """
    if not isinstance(state, State):
        got = f"{type(state).__name__}{mend_of('state', state)}"
        raise TypeError(
            "effective: expected a State, as algorithm.init(params) gives it, got "
            f"{got}"
        )
    return apply_masks(state.params, state.masks)


def _put(state: State, params: Tree) -> State:
    return state._replace(params=inside(support_of(state), params, state.params))


def with_params(state: State, params: Tree) -> State:
    """The state with a copy of an outside optimizer's weights put in, detached.

    >>> state = sf.State(
    ...     {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> sf.with_params(state, {"w": torch.tensor([2.0, 3.0])}).params
    {'w': tensor([2., 0.])}

    Args:
        state: State of an algorithm whose view trains params.
        params: Weights after the optimizer's step, a tree like `state.params` with its
            shapes and dtypes.

    Returns:
        The state with these weights at the entries of the support, which is the mask,
        or everything under `pruned="train"`. Elsewhere the state keeps its own weights.

    Raises:
        ValueError: The structure or a shape differs (the text names the path), or the
            state is of `reparametrised` or of a `supermask` whose scores train.
        TypeError: A dtype differs, or a leaf is not a tensor; the text names the path.
    """
    _check_outside(state)
    check_like("the new params", params, state.params)
    given = optree.tree_map(lambda p: p.detach().contiguous(), params)
    put = _put(state, given)
    return put._replace(
        params=optree.tree_map(
            lambda new, old: new.clone() if new is old else new, put.params, given
        )
    )


def _check_outside(state: State) -> None:
    if "latent" in state.scores:
        raise ValueError(
            "this state trains latents, which follow from no params; use with_optimizer"
        )
    if "learned" in state.scores:
        raise ValueError(
            "this state learns masks by scores, which params alone leave as they are; "
            "use with_optimizer"
        )
    for part in state.parts:
        _check_outside(part)


def moved(state: State, updates: Tree) -> State:
    """The state with updates added to its params on their support.

    >>> state = State(
    ...     {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> moved(state, {"w": torch.tensor([0.5, 0.5])}).params
    {'w': tensor([1.5000, 2.0000])}

    Equal to `masked_view.put` of the sums, in one pass. Raises ValueError for another
    structure.
    """
    old, rebuild = opened(state.params)
    new = leafwise.added(
        leaves_of(support_of(state)), old, leaves_like(updates, state.params)
    )
    return state._replace(params=rebuild(new))


masked_view = TrainView(
    get=lambda state: state.params,
    put=_put,
    grads=lambda state, grads, step: inside(support_of(state), grads),
    support=support_of,
)


class UncheckedUpdate(NamedTuple):
    """The update for the algorithms around this one, which have checked the arguments.

    They call `inner`. With `overwrites`, `inner` sets the weights last, and weights on
    the new support stay: it may write over weights that nothing else needs. The public
    update calls `around` where there is one, but not for DTensors. `recipe` holds the
    arguments of a mask-based algorithm: a `MaskRecipe` of the frame.
    """

    inner: Callable[[State, Tree, Step], State]
    overwrites: bool = False
    around: Callable[[State, Tree, Step], State] | None = None
    recipe: Any = None


class _Pair(NamedTuple):
    init: Callable[[Tree], State]
    update: Callable[[State, Tree, Step], State]
    view: TrainView = masked_view
    within: Callable[[Tree], Algorithm] | None = None
    settled: Callable[[State], State] | None = None
    unchecked: UncheckedUpdate | None = None


class Algorithm(Made, _Pair):
    """A pure pair `init(params) -> state`, `update(state, grads, step) -> state`.

    >>> import sparsefn as sf
    >>> algorithm = sf.gmp(sf.schedules.polynomial(0.0, 0.5, begin=0, end=2))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    >>> algorithm.update(state, {"w": torch.zeros(2, 2)}, 2).masks
    {'w': tensor([[False, False],
            [ True,  True]])}

    Attributes:
        init: Function of params, a tree of floating-point tensors, that returns the
            first state. The state holds copies.
        update: Function of (state, grads, step) that returns the next state. `grads` is
            the dense gradient of the loss at `sf.effective(state)`, a tree like params;
            `step` is an int >= 0 or a 0-d int64 tensor.
        view: What an optimizer trains. Default: params, where the support lets them
            move.
        within: Function of masks that returns the same algorithm choosing only among
            what they keep, for `sf.chain`. None: a chain intersects its masks.
            `_replace` of `init` or `update` clears it.
        settled: Function of a state that returns the state to evaluate: see
            `sf.settled`. None: they are the same.
        unchecked: Update for algorithms around this one, where the library made it.
            `_replace` of `update` clears it.

    The repr of an algorithm that a function of this library made is that call. It
    pickles if the arguments do.
    """

    ways_of: ClassVar = {"within": ("init", "update"), "unchecked": ("update",)}


def update_of(algorithm: Algorithm) -> UncheckedUpdate:
    """The update of an algorithm, for an algorithm around it; a function of a user
    checks for itself.
    """
    return algorithm.unchecked or UncheckedUpdate(algorithm.update)


def check_score(name: str, score: object) -> None:
    """Raise TypeError unless it is a score: a function of (state, grads, step), or one
    with memory.
    """
    if isinstance(score, Accumulated):
        return
    if not callable(score):
        raise TypeError(
            f"expected {name} to be a score such as sf.scores.magnitude, got {score!r}"
        )
    check_call(name, score, "state", "grads", "step")


def masks_tree(params: Tree, masks: Leaves) -> Tree:
    """The masks of some leaves as a tree like params, 0-d True for the rest."""
    leaves, rebuild = flatten(params)
    return rebuild(
        [masks[path] if path in masks else _true(leaf) for path, leaf in leaves.items()]
    )
