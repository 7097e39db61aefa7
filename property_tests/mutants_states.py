"""Planted bugs in states: impure, other bits, wrong off the masks or at the ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import sparsefn as sf
from property_tests.planting import (
    HEALTHY,
    Mutant,
    after_update,
    drawn_by,
    each,
    gmp,
    kept,
    magnitude_masks,
    masks_by,
    mutant,
    per_leaf,
    rigl,
)
from property_tests.registry import EVEN, ramp, sgd, swap
from sparsefn._engine.transforms import host_number
from sparsefn.core.tree import Tree


def _counted_in_a_closure(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    made = itertools.count()
    return sf.set(
        s,
        key=key,
        grow=lambda state, grads, step: sf.scores.random(state, grads, next(made)),
        **swap,
    )


def _remembered_in_a_closure(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    memory: dict[str, Tree] = {}

    def grow(state: sf.State, grads: Tree, step: Any) -> Tree:
        old = (
            memory.get("mean", optree.tree_map(torch.zeros_like, grads))
            if step
            else grads
        )
        memory["mean"] = optree.tree_map(lambda a, b: 0.5 * a + b, old, grads)
        return optree.tree_map(torch.abs, memory["mean"])

    return sf.rigl(s, key=key, grow=grow, **swap)


def _numbered_by_insertion(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    order = {path: i for i, path in enumerate(_inserted(params))}
    return drawn_by(s, key, lambda path: order[path])


def _inserted(tree: Tree, prefix: str = "") -> list[str]:
    """Paths in the order in which dicts were filled."""
    if isinstance(tree, Tensor):
        return [prefix.removeprefix(".")]
    items = (
        tree.items()
        if isinstance(tree, dict)
        else zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
    )
    return [
        path for name, part in items for path in _inserted(part, f"{prefix}.{name}")
    ]


def _zeroed_in_place(old: sf.State, new: sf.State, grads: Tree, step: Any) -> sf.State:
    for mask, leaf in zip(
        optree.tree_leaves(old.masks), optree.tree_leaves(old.params), strict=True
    ):
        if mask.ndim:
            leaf.masked_fill_(~mask, 0.0)
    return new


def _multiplied(old: sf.State, new: sf.State, grads: Tree, step: Any) -> sf.State:
    return new._replace(params=each(lambda p, m: p * m, old.params, new.masks))


def _decayed_off_the_support(
    old: sf.State, new: sf.State, grads: Tree, step: Any
) -> sf.State:
    return new._replace(
        params=each(lambda p, m: torch.where(m, p, 0.5 * p), new.params, new.support)
    )


def _random_generator(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    return sf.static(
        None,
        init=masks_by(lambda _, x: sf.masks.topk_mask(torch.rand(x.shape), kept(x, s))),
        key=key,
    )


def _rounded_in_float32(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    return sf.static(s.float() if isinstance(s, Tensor) else s, key=key)


def _split_once_more(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    return sf.static(
        s, key=key if host_number(key[0]) is not None else sf.random.split(key, 1)[0]
    )


def _late_for_tensors(step: Any) -> Any:
    return EVEN(step + 1) if isinstance(step, Tensor) else EVEN(step)


def _at_least(least: int, spare: int) -> Callable[[Any, Tensor, Tree], sf.Algorithm]:
    """A count that never falls to `least` or comes closer than `spare` to the whole."""
    return magnitude_masks(
        lambda x, s: sf.masks.topk_mask(
            x,
            min(max(kept(x, s), least), max(x.numel() - spare, 0)) if x.numel() else 0,
        )
    )


def _as_it_lies(state: sf.State, grads: Tree, step: Any) -> Tree:
    """The gradient, read in the order of its memory."""
    return each(
        lambda g: g.as_strided(
            g.shape, torch.empty(g.shape, device="meta").stride()
        ).abs(),
        grads,
    )


def _by_threads(units: Tensor) -> Tensor:
    parts = [part.sum(-1) for part in units.tensor_split(torch.get_num_threads(), -1)]
    return torch.stack(parts).sum(0) / units.shape[-1]


def _sized_once(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    sizes: dict[str, int] = {}
    score = per_leaf(
        lambda path, leaf: (
            leaf.abs()
            * (1.0 if sizes.setdefault(path, leaf.numel()) == leaf.numel() else -1.0)
        )
    )
    return sf.gmp(ramp(s), when=EVEN, score=score)


def hashed(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    """Draws by `hash`, which every process has its own of."""
    return drawn_by(s, key, lambda path: hash(path) % 2**32)


def _rounded_early(state: sf.State, step: Any) -> Tree:
    return optree.tree_map(lambda w: 3.3 * (0.7 * (1.1 * w)), state.params)


def _mean_of_means(params: Tree, step: Any) -> Tensor:
    """The number of a schedule is a Python float or a float64 tensor: other bits from
    three leaves on.
    """
    means = [leaf.float().square().mean() for leaf in optree.tree_leaves(params)]
    return (
        sf.schedules.polynomial(0.1, 0.7, begin=0, end=4)(step)
        * sum(means, torch.zeros(()))
        / len(means)
    )


def _filled(tree: Tree) -> Tree:
    """The tree without its empty containers."""
    if isinstance(tree, dict):
        return {
            name: _filled(part)
            for name, part in tree.items()
            if optree.tree_leaves(part)
        }
    return tree


STATES = [
    mutant(
        "empty containers are left out",
        "states_keep_their_structure",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN),
            lambda old, new, grads, step: new._replace(params=_filled(new.params)),
        ),
        raises=ValueError,
    ),
    mutant(
        "a term is rounded to half precision",
        "vmap_is_a_loop",
        "sgd with_terms",
        lambda s, key, _: sgd(
            sf.with_terms(sf.rigl(s, key=key, **swap), _rounded_early)
        ),
    ),
    mutant(
        "an update adds a field",
        "states_keep_their_structure",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN),
            lambda old, new, grads, step: new._replace(scores={"old": old.params}),
        ),
    ),
    mutant(
        "masks come back transposed",
        "states_keep_their_structure",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN),
            lambda old, new, grads, step: new._replace(
                masks=each(lambda m: m.mT.contiguous().mT, new.masks)
            ),
        ),
    ),
    mutant(
        "weights are zeroed in place",
        "functions_are_pure",
        "gmp regrow keep",
        lambda s, key, _: after_update(
            sf.gmp(lambda step: s, when=EVEN, regrow=True, pruned="keep"),
            _zeroed_in_place,
        ),
    ),
    mutant(
        "masks are drawn from the global generator",
        "functions_are_pure",
        "static",
        _random_generator,
    ),
    mutant(
        "a part of the gradient is returned",
        "functions_are_pure",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN),
            lambda old, new, grads, step: new._replace(
                scores=each(lambda g: g[:1], grads)
            ),
        ),
    ),
    mutant(
        "init keeps the caller's params",
        "inputs_may_change_later",
        "dense",
        lambda s, key, _: sf.dense()._replace(
            init=lambda params: sf.dense().init(params)._replace(params=params)
        ),
    ),
    mutant(
        "the gradient is kept as it came",
        "inputs_may_change_later",
        "rigl",
        lambda s, key, _: after_update(
            sf.rigl(s, key=key, **swap),
            lambda old, new, grads, step: new._replace(params=grads),
        ),
    ),
    mutant(
        "a tensor is made on the default device",
        "modes_and_settings_do_not_matter",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN),
            lambda old, new, grads, step: new._replace(opt={"count": torch.zeros(())}),
        ),
    ),
    mutant(
        "what a gradient adds is nothing in inference mode",
        "modes_and_settings_do_not_matter",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN),
            lambda old, new, grads, step: (
                new if torch.is_grad_enabled() else new._replace(params=grads)
            ),
        ),
    ),
    mutant(
        "a gradient is read as it lies in memory",
        "memory_does_not_matter",
        "rigl",
        rigl(grow=_as_it_lies),
    ),
    mutant(
        "a unit is summed in as many parts as there are threads",
        "order_of_sums_is_fixed",
        "gmp block global",
        lambda s, key, _: sf.gmp(
            ramp(s),
            when=EVEN,
            distribution=sf.budgets.global_(),
            pattern=sf.patterns.block((2, 2), reduce=_by_threads),
        ),
    ),
    mutant("draws are numbered by calls", "runs_repeat", "set", _counted_in_a_closure),
    mutant(
        "draws are numbered by the order of a dict",
        "runs_repeat",
        "static",
        _numbered_by_insertion,
    ),
    mutant(
        "a sum depends on the threads",
        "threads_do_not_matter",
        "one_shot",
        lambda s, key, _: after_update(
            sf.one_shot(s, when=sf.at([1])),
            lambda old, new, grads, step: new._replace(
                scores=each(lambda p: p.sum(), old.params)
            ),
        ),
    ),
    mutant(
        "a penalty is in float64 for a tensor step alone",
        "steps_may_be_tensors",
        "sgd with_terms",
        lambda s, key, _: sgd(
            sf.with_terms(sf.rigl(s, key=key, **swap), sf.terms.penalty(_mean_of_means))
        ),
    ),
    mutant(
        "a tensor step is compared otherwise",
        "steps_may_be_tensors",
        "gmp",
        gmp(when=_late_for_tensors),
    ),
    mutant(
        "a tensor sparsity is rounded in float32",
        "vmap_is_a_loop",
        "static",
        _rounded_in_float32,
    ),
    mutant(
        "all members draw the same",
        "vmap_is_a_loop",
        "static",
        lambda s, key, _: sf.static(
            s, key=sf.random.key(0) if host_number(key[0]) is None else key
        ),
    ),
    mutant(
        "a batched key is split once more",
        "nested_vmap_is_two_loops",
        "static",
        _split_once_more,
    ),
    mutant(
        "a score is remembered outside of the state",
        "runs_resume",
        "rigl",
        _remembered_in_a_closure,
    ),
    mutant(
        "masks multiply",
        "pruned_weights_are_zero",
        "gmp",
        lambda s, key, _: after_update(sf.gmp(ramp(s), when=EVEN), _multiplied),
    ),
    mutant(
        "stale moments stay",
        "pruned_weights_are_zero",
        "adam rigl",
        lambda s, key, _: sf.with_optimizer(
            sf.rigl(s, key=key, **swap), sf.optimizers.adam(0.1), mask_moments=False
        ),
    ),
    mutant(
        "every weight trains",
        "nothing_moves_off_the_support",
        "chain keep ste",
        lambda s, key, _: sf.ste(s, when=EVEN),
    ),
    mutant(
        "weights decay where they do not train",
        "nothing_moves_off_the_support",
        "chain keep ste",
        lambda s, key, _: after_update(
            HEALTHY["chain keep ste"].make(s, key, None), _decayed_off_the_support
        ),
    ),
    mutant(
        "pruned weights train on",
        "outside_optimizers_cannot_revive",
        "gmp",
        gmp(pruned="train"),
    ),
    mutant(
        "one weight is always pruned",
        "sparsity_zero_is_dense",
        "static magnitude keep",
        _at_least(0, 1),
    ),
    mutant("terms are forgotten", "sparsity_zero_is_dense", "with_terms", rigl()),
    mutant(
        "one weight is always kept",
        "sparsity_one_is_empty",
        "static magnitude keep",
        _at_least(1, 0),
    ),
    mutant(
        "the step is made a Python bool",
        "compiling_changes_nothing",
        "gmp erk",
        lambda s, key, _: sf.gmp(ramp(s), when=lambda step: bool(step % 2 == 0)),
        raises=torch._dynamo.exc.TorchDynamoException,
    ),
    mutant(
        "the sizes of the first model are kept",
        "one_compiled_update_serves_two_models",
        "gmp",
        _sized_once,
    ),
    mutant(
        "a norm is sparsified where there is nothing else",
        "nothing_to_sparsify_is_dense",
        "gmp",
        lambda s, key, _: sf.gmp(
            ramp(s), when=EVEN, where=lambda path, leaf: leaf.ndim > 1
        ),
    ),
    mutant(
        "the update reads a value of the mask",
        "compiling_changes_nothing",
        "gmp erk",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN, distribution=sf.budgets.erk()),
            lambda old, new, grads, step: (
                new
                if all(bool(m.any()) for m in optree.tree_leaves(new.masks))
                else old
            ),
        ),
        raises=torch._dynamo.exc.TorchDynamoException,
    ),
    Mutant(
        "draws depend on the hash of a path",
        "processes_do_not_matter",
        HEALTHY["static"]._replace(
            make=hashed, reference="property_tests.mutants_states:hashed"
        ),
    ),
]
