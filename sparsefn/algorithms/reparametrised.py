"""Weights that are a function of latents, which train through the function's vjp."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from sparsefn._engine.leaves import is_sparse, without_autocast
from sparsefn.algorithms.frame import framed, own_params
from sparsefn.algorithms.processes import derived_view
from sparsefn.algorithms.reparam import Reparametrisation
from sparsefn.algorithms.static import dense
from sparsefn.core import random
from sparsefn.core.checks import described, uncalled
from sparsefn.core.state import (
    Algorithm,
    State,
    Step,
    Where,
    apply_masks,
    everywhere,
    has_optimizer,
    masked_view,
    masks_tree,
    support_of,
    update_of,
)
from sparsefn.core.tree import Leaves, Tree, flatten, leaves_of, with_leaves
from sparsefn.core.tree.where import default_where, select_leaves
from sparsefn.masks import intersect


@described
def reparametrised(
    reparam: Reparametrisation,
    inner: Algorithm | None = None,
    *,
    where: Where = default_where,
    key: Tensor | None = None,
) -> Algorithm:
    """The chosen leaves are made from latents, which an optimizer trains.

    >>> algorithm = sf.with_optimizer(
    ...     sf.reparametrised(sf.reparam.power(2.0)), sf.optimizers.sgd(0.1)
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[4.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[1.0]])}, 0).scores["latent"]
    {'latent': {'w': tensor([[1.6000]])}}

    Args:
        reparam: Map from latents to weights, such as `sf.reparam.power(2.0)`.
        inner: Algorithm that masks the weights. None: `dense()`. A weight that it grows
            back resumes from its latent.
        where: Which leaves are made from latents: a function of (path, leaf), a glob or
            several globs. Default: the weights of layers. Other leaves train directly.
        key: PRNG key of random maps. None: `sf.random.key(0)`.

    Returns:
        Algorithm whose `state.params` are the weights made from the latents, so
        `sf.effective` works as on any state. `state.scores` holds "latent" and "step",
        the step that random or scheduled maps are drawn at; `state.parts` holds the
        state of `inner`.

    Raises:
        TypeError: `reparam` is no Reparametrisation, or `inner` no Algorithm.
        ValueError: `inner` has a view of its own (latents or terms), or, in the
            algorithm's `init`, an optimizer: put `with_optimizer` outermost.

    Every update makes the weights again, on skipped optimizer steps too: `update(step)`
    draws for step + 1.
    """
    if not isinstance(reparam, Reparametrisation):
        got = uncalled(reparam) or repr(reparam)
        raise TypeError(
            "reparametrised: expected a Reparametrisation such as "
            f"sf.reparam.power(2.0), got {got}; a sparsity belongs to inner, as in "
            "reparametrised(sf.reparam.power(2.0), sf.static(0.9))"
        )
    algorithm = dense() if inner is None else inner
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            "reparametrised: expected an inner Algorithm, got "
            f"{uncalled(algorithm) or type(algorithm).__name__}"
        )
    if algorithm.view is not masked_view:
        raise ValueError(
            "reparametrised: expected an inner algorithm without a view of its own "
            "(latents or terms)"
        )
    seed = random.key(0) if key is None else key

    def made(latents: Tree, params: Tree, step: Step) -> tuple[Tree, Tree]:
        weights, masks = reparam.apply(latents, step, seed)
        return with_leaves(params, weights), masks_tree(params, masks)

    def finish(part: State, masks: Tree, latents: Tree, step: Tensor) -> State:
        both = intersect(part.masks, masks)
        stored = part._replace(params=(), key=(), opt=())
        scores = {"latent": latents, "step": step}
        return State(
            apply_masks(part.params, masks), both, scores, part.key, parts=(stored,)
        )

    def inner_state(state: State) -> State:
        return state.parts[0]._replace(params=state.params, key=state.key)

    def init(params: Tree) -> State:
        params = own_params(params)
        chosen = select_leaves(params, where)
        latents = reparam.init(chosen, seed)
        step = torch.zeros(
            (),
            dtype=torch.int64,
            device=next((p.device for p in chosen.values()), torch.device("cpu")),
        )
        weights, masks = made(latents, params, step)
        part = algorithm.init(weights)
        if has_optimizer(part):
            raise ValueError(
                "reparametrised: the inner algorithm has an optimizer; put "
                "with_optimizer outermost"
            )
        return finish(part, masks, latents, step)

    def update(state: State, grads: Tree, step: Step) -> State:
        latents = state.scores["latent"]
        if reparam.project is not None:
            latents = reparam.project(latents, step)
        following = torch.zeros_like(state.scores["step"]) + step + 1
        weights, masks = made(latents, state.params, following)
        # Off its support `inner` keeps what it has: zeros, or the weights that it holds
        # still.
        part = masked_view.put(inner_state(state), weights)
        return finish(
            update_of(algorithm).inner(part, grads, step), masks, latents, following
        )

    def view_of(state: State, latents: Tree, leaves: Leaves) -> Tree:
        # No rest is (), as in a state: compiled code cannot flatten an empty dict
        # inside another.
        chosen = _latent_paths(state)
        return {
            "latent": latents,
            "rest": {path: leaf for path, leaf in leaves.items() if path not in chosen}
            or (),
        }

    def trained(state: State) -> Tree:
        return {
            name: tree
            for name, tree in state.scores["latent"].items()
            if name not in reparam.held
        }

    def get(state: State) -> Tree:
        return view_of(state, trained(state), flatten(state.params)[0])

    def moved(moves: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(moves, new, old) if is_sparse(moves, new) else new

    def put(state: State, tree: Tree) -> State:
        params = masked_view.put(
            inner_state(state), with_leaves(state.params, dict(tree["rest"]))
        ).params
        latents = optree.tree_map(
            moved, support(state)["latent"], tree["latent"], trained(state)
        )
        return state._replace(
            params=params,
            scores={**state.scores, "latent": {**state.scores["latent"], **latents}},
        )

    def grads_of(state: State, grads: Tree, step: Step) -> Tree:
        del step  # the weights were drawn at the stored step
        leaves = flatten(masked_view.grads(inner_state(state), grads, 0))[0]
        every = state.scores["latent"]
        latents = trained(state)
        # no leaf is selected: vjp refuses functions of nothing
        if not _latent_paths(state):
            return view_of(state, latents, leaves)

        def weights_of(tree: Tree) -> Tree:
            return reparam.apply({**every, **tree}, state.scores["step"], seed)[0]

        device = leaves_of(latents)[0].device.type
        with without_autocast(device):
            weights, pull = torch.func.vjp(weights_of, latents)[:2]
            pulled = pull({path: leaves[path] for path in weights})[0]
        return view_of(state, pulled, leaves)

    def support(state: State) -> Tree:
        moves = flatten(support_of(inner_state(state)))[0]
        leaves = flatten(state.params)[0]

        def where_moves(path: str, latent: Tensor) -> Tensor:
            fits = latent.shape == leaves[path].shape and is_sparse(
                moves[path], leaves[path]
            )
            return moves[path] if fits else everywhere(latent)

        latents: dict[str, Tree] = {}
        for name, tree in trained(state).items():
            latents[name] = {
                path: where_moves(path, leaf) for path, leaf in tree.items()
            }
        return view_of(state, latents, moves)

    def at_rest(state: State) -> State:
        assert reparam.settled is not None
        weights, masks = reparam.settled(state.scores["latent"], state.scores["step"])
        part = inner_state(state)
        part = masked_view.put(part, with_leaves(state.params, weights))
        tree = masks_tree(state.params, masks)
        return state._replace(
            params=apply_masks(part.params, tree), masks=intersect(part.masks, tree)
        )

    view = derived_view(get, put, grads_of, support)
    return framed(
        init, update, view, settled=None if reparam.settled is None else at_rest
    )


def _latent_paths(state: State) -> set[str]:
    return {path for tree in state.scores["latent"].values() for path in tree}


def settled(algorithm: Algorithm, state: State) -> State:
    """The state to evaluate a model with, where weights are drawn or soft in training.

    >>> algorithm = sf.reparametrised(sf.reparam.sigmoid_gate(1.0, init=0.0))
    >>> state = algorithm.init({"w": torch.tensor([[2.0, 4.0]])})
    >>> sf.effective(state), sf.effective(sf.settled(algorithm, state))
    ({'w': tensor([[2., 4.]])}, {'w': tensor([[0., 0.]])})

    Args:
        algorithm: Algorithm that made the state.
        state: State of training. Train on with it.

    Returns:
        State whose `params` and `masks` are for evaluation, without noise and with hard
        gates. Pass it to `effective`, reports, `bake` and `shrink`. It is the given
        state where nothing differs.

    Raises:
        TypeError: The arguments are not an Algorithm and a State.

    `detach` of what `sf.attach` returned writes the settled weights into the module.
    """
    if not isinstance(algorithm, Algorithm) or not isinstance(state, State):
        got = f"{type(algorithm).__name__} and {type(state).__name__}"
        raise TypeError(f"settled: expected an Algorithm and its State, got {got}")
    return state if algorithm.settled is None else algorithm.settled(state)
