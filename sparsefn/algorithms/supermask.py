"""Learned masks of the best trained scores, where weights stay or train along."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsefn.algorithms.competition import Competition, Goal
from sparsefn.algorithms.frame import (
    fired,
    framed,
    own_key,
    own_params,
    sparse_leaves,
    with_masks,
)
from sparsefn.algorithms.memory import Scores
from sparsefn.algorithms.processes import derived_view
from sparsefn.algorithms.start import Given
from sparsefn.algorithms.unit_table import full, unit_table
from sparsefn.core import random
from sparsefn.core.checks import check_call, check_trigger, described
from sparsefn.core.state import (
    Algorithm,
    Level,
    State,
    Step,
    Trigger,
    Where,
    everywhere,
    masks_tree,
)
from sparsefn.core.tree import (
    Leaves,
    Tree,
    flatten,
    leaves_at,
    leaves_like,
    same_structure,
    structure_error,
    with_leaves,
)
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import always
from sparsefn.masks.apply import Mode, check_mode, gate
from sparsefn.masks.budgets.counts import Counted
from sparsefn.masks.budgets.distributions import Distribution, is_uniform, uniform
from sparsefn.masks.patterns.kinds import Pattern, unstructured
from sparsefn.masks.select import bernoulli_masks

InitialScores = Literal["random", "zeros", "magnitude"] | Callable[[Tree], Tree] | Given
Link = Callable[[Tensor], Tensor]


@described
def supermask(
    sparsity: Level | Counted | Literal["bernoulli"] | None,
    *,
    mode: Mode = "supermask",
    mask_gradient: bool = False,
    init: InitialScores = "random",
    link: Link | None = None,
    when: Trigger = always(),
    where: Where = default_where,
    pattern: Pattern = unstructured(),
    distribution: Distribution = uniform(),
    key: Tensor | None = None,
) -> Algorithm:
    """Masks learned through scores: the weights with the best scores are kept.

    >>> algorithm = sf.with_optimizer(
    ...     sf.supermask(0.5, init="zeros"), sf.optimizers.sgd(1.0)
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[1.0, -1.0]])})
    >>> state = algorithm.update(state, {"w": torch.tensor([[0.5, 0.5]])}, 0)
    >>> state.scores["learned"], state.masks
    ({'w': tensor([[-0.5000,  0.5000]])}, {'w': tensor([[False,  True]])})

    Args:
        sparsity: Fraction of the weights that is pruned, at each step: a float, a
            schedule, a 0-d tensor, or a count that the linked scores decide, as in
            `sf.methods.soft_movement`. None where the pattern fixes it. "bernoulli"
            keeps each weight with probability `link(score)`, clamped to [0, 1]: init
            draws for step 0, update(step) for step + 1, from (key, path).
        mode: What trains: "supermask" the scores, "joint" scores and weights, "ste" the
            weights (scores change by `rescore` alone). Leaves that are not sparsified
            always train.
        mask_gradient: Whether a score's gradient, which is gradient * weight, is 0 off
            the mask. A weight's gradient always is: see `sf.masks.gate`.
        init: First scores: "random" (uniform in [0, 1)), "zeros", "magnitude", a
            function of params, or a tree like params.
        link: Function of the scores of a leaf, whose results compete, and whose slope
            goes into their gradient: `torch.abs` is edge-popup. None: the scores
            themselves.
        when: Trigger at which masks follow the scores.
        where: Which leaves are sparsified: a function of (path, leaf), a glob or
            several globs. Default: the weights of layers.
        pattern: Which weights are kept or pruned as one, and which compete. Default:
            each weight by itself, in its whole leaf. Not with "bernoulli".
        distribution: How the kept weights are split between leaves. Default: each leaf
            has the same sparsity. Not with "bernoulli".
        key: PRNG key of random scores and masks. None: `sf.random.key(0)`.

    Returns:
        Algorithm whose `state.params` are the whole weights. Off the mask they keep
        their value and their moments, because masks may come back to them.
        `state.scores["learned"]` has the treedef of params, 0-d zero where a leaf is
        not sparsified (it is `state.scores["score"]` in mode "ste", whose scores do not
        train).

    Raises:
        TypeError: An argument is of another kind, scores are not floating-point
            tensors, or `sparsity` is None and the pattern leaves the count open.
        ValueError: A fraction is outside [0, 1] or a name unknown; scores have another
            structure or shape than params; a count comes with a pattern that fixes it
            or another distribution than `uniform()` and `global_()`; or "bernoulli"
            with a pattern or a distribution.

    Scores train inside `with_optimizer` alone: `with_params` refuses a state that
    learns. The last bits of `torch.sigmoid` as a link may differ under `vmap`; a sum, a
    product or `abs` has the same everywhere.

    Ramanujan et al. 2020, arXiv 1911.13299; with mode="joint", init="zeros": Sanh et
    al. 2020, arXiv 2005.07683.
    """
    check_mode(mode)
    check_trigger("when", when)
    if link is not None:
        check_call("link", link, "score")
    rule = Competition(pattern, distribution).check()
    choose: Choose
    if isinstance(sparsity, str):
        if sparsity != "bernoulli":
            raise ValueError(
                "expected sparsity to be a number, a schedule or 'bernoulli', got "
                f"{sparsity!r}"
            )
        if pattern != unstructured() or not is_uniform(distribution):
            raise ValueError(
                "supermask: 'bernoulli' draws each element by itself, without pattern "
                "or distribution"
            )
        choose = _drawn
    else:
        goal = rule.goal(sparsity)
        if goal is None and pattern.fixed is None:
            raise TypeError(
                "expected sparsity to be a float in [0, 1], a schedule, a 0-d tensor "
                "or 'bernoulli', got None"
            )
        choose = partial(_best, rule, goal)
    learned = _Learned(
        rule,
        where,
        init,
        random.key(0) if key is None else key,
        choose,
        mode,
        mask_gradient,
        link,
        when,
    )
    return framed(
        learned.start,
        learned.update,
        derived_view(learned.get, learned.put, learned.grads, learned.support),
    )


# (sparse leaves, their scores, key, step, step of the draw) -> masks
Choose = Callable[[Leaves, Leaves, Tensor, Step, Step], Leaves]


def _best(
    rule: Competition,
    goal: Goal,
    leaves: Leaves,
    scores: Leaves,
    key: Tensor,
    step: Step,
    draw: Step,
) -> Leaves:
    return unit_table(rule, leaves, goal=goal, step=step).best_masks(Scores(scores))


def _drawn(
    leaves: Leaves, scores: Leaves, key: Tensor, step: Step, draw: Step
) -> Leaves:
    return bernoulli_masks(scores, key, draw)


class _Learned(NamedTuple):
    # Scores that are learned, and masks that follow them: see `supermask`.
    rule: Competition
    where: Where
    init: InitialScores
    seed: Tensor
    choose: Choose
    mode: Mode
    mask_gradient: bool
    link: Link | None
    when: Trigger

    @property
    def role(self) -> str:
        return "score" if self.mode == "ste" else "learned"

    def linked(self, score: Tensor) -> Tensor:
        return score if self.link is None else self.link(score)

    def start(self, params: Tree) -> State:
        params = own_params(params)
        leaves = self.rule.pattern.leaves_in(params, self.where)
        # raises for leaves that the pattern does not fit
        unit_table(self.rule, leaves)
        scores = {
            self.role: _scores(
                params, _initial_scores(params, leaves, self.init, self.seed)
            )
        }
        support = () if self.mode == "supermask" else everywhere(params)
        state = State(
            params,
            masks_tree(params, full({}, leaves)),
            scores,
            own_key(self.seed, params),
            support=support,
        )
        return self.masked(state, 0, 0)

    def masked(self, state: State, step: Step, draw: Step) -> State:
        leaves = sparse_leaves(state)[0]
        values = {
            path: self.linked(score)
            for path, score in leaves_at(state.scores[self.role], leaves).items()
        }
        for path, value in values.items():
            _check_score("link to give scores", path, value, leaves[path])
        return with_masks(
            state, self.choose(leaves, values, state.key, step, draw), "keep"
        )

    def update(self, state: State, grads: Tree, step: Step) -> State:
        return fired(
            self.when, lambda now: self.masked(now, step, step + 1), state, step
        )

    def view_of(self, params: Leaves, scores: Leaves) -> Tree:
        # Leaves that are not sparsified train in every mode. An empty part is (), as in
        # a state: compiled code cannot flatten an empty dict inside another.
        if self.mode == "supermask":
            params = {path: x for path, x in params.items() if path not in scores}
        return {
            "scores": () if self.mode == "ste" or not scores else scores,
            "params": params or (),
        }

    def get(self, state: State) -> Tree:
        return self.view_of(
            flatten(state.params)[0],
            leaves_at(state.scores[self.role], sparse_leaves(state)[0]),
        )

    def put(self, state: State, tree: Tree) -> State:
        scores = with_leaves(state.scores[self.role], dict(tree["scores"]))
        return state._replace(
            params=with_leaves(state.params, dict(tree["params"])),
            scores={self.role: scores},
        )

    def grads(self, state: State, grads: Tree, step: Step) -> Tree:
        del step
        leaves, masks = sparse_leaves(state)
        scores = leaves_at(state.scores[self.role], leaves)
        slopes = {}
        dense = flatten(grads)[0]
        for path, mask in masks.items():

            def run(s: Tensor, w: Tensor, mask: Tensor = mask) -> Tensor:
                return gate(
                    w,
                    self.linked(s),
                    mask,
                    mode=self.mode,
                    mask_gradient=self.mask_gradient,
                )

            pull = torch.func.vjp(run, scores[path], leaves[path])[1]
            slopes[path], dense[path] = pull(dense[path])
        return self.view_of(dense, slopes)

    def support(self, state: State) -> Tree:
        return everywhere(self.get(state))  # masks flip, and pruned weights train on


def rescore(state: State, fn: Callable[[Tensor, Tensor], Tensor]) -> State:
    """New scores by `fn(score, weight)` for every sparsified leaf.

    >>> algorithm = sf.supermask(0.5, mode="ste")
    >>> state = algorithm.init({"w": torch.tensor([[1.0, -3.0, 2.0, 0.5]])})
    >>> state = sf.rescore(state, lambda score, weight: weight.abs())
    >>> algorithm.update(state, state.params, 0).masks
    {'w': tensor([[False,  True,  True, False]])}

    Args:
        state: State of `supermask`; a stack of states under `vmap`.
        fn: Function of (score, weight) of a leaf that returns its new score, of the
            same shape. The state keeps the dtype of the old one.

    Returns:
        State with these scores, until they train or are scored again. Masks follow at
        the next update; moments of an optimizer are left alone.

    Raises:
        TypeError: `fn` gives scores that are not floating-point tensors.
        ValueError: `state` has no scores, or `fn` gives scores of another shape.
    """
    role = next(
        (
            role
            for role in ("learned", "score")
            if isinstance(state.scores, dict) and role in state.scores
        ),
        "",
    )
    if not role or not same_structure(state.scores[role], state.params):
        raise ValueError(
            "rescore: expected a state of supermask, got one whose scores are "
            f"{_roles(state)}"
        )
    leaves = sparse_leaves(state)[0]
    new = {}
    for path, score in leaves_at(state.scores[role], leaves).items():
        value = fn(score, leaves[path])
        _check_score("fn to give scores", path, value, leaves[path])
        new[path] = value.detach().to(score.dtype)
    return state._replace(scores={role: _scores(state.params, new)})


def _roles(state: State) -> str:
    return (
        ", ".join(map(repr, state.scores))
        if isinstance(state.scores, dict)
        else repr(state.scores)
    )


def _check_score(what: str, path: str, score: object, leaf: Tensor) -> None:
    if not isinstance(score, Tensor) or not score.is_floating_point():
        got = score.dtype if isinstance(score, Tensor) else type(score).__name__
        raise TypeError(
            f"expected {what} that are floating-point tensors, got {got} at {path!r}"
        )
    if score.shape != leaf.shape:
        raise ValueError(
            f"expected {what} of shape {tuple(leaf.shape)} at {path!r}, got "
            f"{tuple(score.shape)}"
        )


def _scores(params: Tree, scores: Leaves) -> Tree:
    # A tree like params, 0-d zero for a leaf that has no scores.
    leaves, rebuild = flatten(params)
    return rebuild(
        [
            scores[p]
            if p in scores
            else torch.zeros((), dtype=x.dtype, device=x.device)
            for p, x in leaves.items()
        ]
    )


def _initial_scores(
    params: Tree, leaves: Leaves, init: InitialScores, key: Tensor
) -> Leaves:
    if callable(init):
        check_call("init", init, "params")
        init = init(params)
    if not isinstance(init, str):
        if not same_structure(init, params):
            raise ValueError(structure_error("initial scores", init, params))
        given = {
            p: s
            for p, s in zip(flatten(params)[0], leaves_like(init, params), strict=True)
            if p in leaves
        }
        for path, score in given.items():
            _check_score("initial scores", path, score, leaves[path])
        return {path: score.detach().clone() for path, score in given.items()}
    if init == "random":
        draws = random.fold_in(key, "init")
        return {
            p: random.uniform_like(random.leaf_key(draws, p), x, x.dtype)
            for p, x in leaves.items()
        }
    if init == "zeros":
        return {path: torch.zeros_like(leaf) for path, leaf in leaves.items()}
    if init == "magnitude":
        return {path: leaf.abs() for path, leaf in leaves.items()}
    known = "'random', 'zeros', 'magnitude', a function of params or a tree of scores"
    raise ValueError(f"expected init to be {known}, got {init!r}")
