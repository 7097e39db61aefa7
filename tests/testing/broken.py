"""Algorithms that break a law each, and the healthy ones that they were."""

import optree
import torch

import sparsefn as sf

EVEN = sf.every(2)
MAGNITUDE = sf.testing.Meta(
    start="magnitude", choose=sf.scores.magnitude, pruned="train"
)
QUIET = sf.testing.Meta(when=EVEN, start="magnitude", monotone=True)
NEVER = sf.testing.Meta(when=sf.never(), start="magnitude")


def by(choose):
    """`ste` with masks that `choose(scores, n)` makes of the magnitudes of a leaf."""

    def made(sparsity, key):
        def masks(params):
            def mask(path, x):
                if not sf.default_where(path, x):
                    return torch.ones((), dtype=torch.bool)
                return choose(x.abs(), sf.budgets.n_kept(x.numel(), sparsity))

            return sf.tree.map_with_path(mask, params)

        def init(params):
            return sf.dense().init(params)._replace(masks=masks(params))

        return sf.Algorithm(
            init, lambda state, grads, step: state._replace(masks=masks(state.params))
        )

    return made


def one_more(scores, n):
    return sf.masks.topk_mask(scores, min(int(n) + 1, scores.numel()))


def nan_wins(scores, n):
    return sf.masks.topk_mask(torch.nan_to_num(scores, nan=float("inf")), n)


def last_of_ties(scores, n):
    return (
        sf.masks.topk_mask(scores.reshape(-1).flip(0), n).flip(0).reshape(scores.shape)
    )


def halving(sparsity, key):
    return sf.gmp(sparsity, when=EVEN)


def guarded(sparsity, key):
    """Reads in Python whether all weights are kept, which vmap does not allow."""
    base = sf.gmp(sparsity)

    def update(state, grads, step):
        full = all(bool(mask.all()) for mask in optree.tree_leaves(state.masks))
        return state if full else base.update(state, grads, step)

    return base._replace(update=update)


def static(sparsity, key):
    return sf.static(sparsity, init="magnitude")


def makes_nothing(sparsity, key):
    sf.static(sparsity, key=key)


def makes_a_factory(sparsity, key):
    return sf.rigl


def after(algorithm, change):
    def update(state, grads, step):
        return change(state, algorithm.update(state, grads, step), grads)

    return algorithm._replace(update=update)


def writes(sparsity, key):
    """Scales the gradients that it is given."""

    def change(old, new, grads):
        for grad in optree.tree_leaves(grads):
            grad.mul_(2).add_(1)
        return new

    return after(halving(sparsity, key), change)


def draws(sparsity, key):
    """Masks from the global generator."""

    def masks(params):
        def mask(path, x):
            return (
                sf.masks.topk_mask(
                    torch.rand(x.shape), sf.budgets.n_kept(x.numel(), sparsity)
                )
                if x.ndim > 1
                else None
            )

        return optree.tree_map(
            lambda m: m, sf.tree.map_with_path(lambda p, x: _full(p, x, mask), params)
        )

    return sf.static(None, init=masks)


def _full(path, x, mask):
    return (
        mask(path, x) if sf.default_where(path, x) else torch.ones((), dtype=torch.bool)
    )


def restless(sparsity, key):
    """Turns masks over at every step."""

    def change(old, new, grads):
        return new._replace(
            masks=optree.tree_map(lambda m: m.flip(0) if m.ndim else m, new.masks)
        )

    return after(halving(sparsity, key), change)


def aliases(sparsity, key):
    """Keeps the params that it is given, and no copy."""
    plain = static(sparsity, key)
    return plain._replace(
        init=lambda params: plain.init(params)._replace(params=params)
    )


def forgetful(sparsity, key):
    """Remembers in Python, and not in the state."""
    steps = []

    def change(old, new, grads):
        steps.append(1)
        return (
            new
            if len(steps) < 2
            else new._replace(masks=optree.tree_map(torch.zeros_like, new.masks))
        )

    return after(static(sparsity, key), change)


def fails_on_empty(sparsity, key):
    """Takes a maximum, which empty leaves have not."""

    def largest(scores, n):
        scores.max()
        return sf.masks.topk_mask(scores, n)

    return by(largest)(sparsity, key)


# what is planted: the algorithm, its promises, the law, the check that must fail, a
# healthy one
PLANTED = {
    "off by one": (
        by(one_more),
        MAGNITUDE._replace(choose=None),
        "counts_are_exact",
        by(sf.masks.topk_mask),
    ),
    "NaN wins": (by(nan_wins), MAGNITUDE, "the_best_are_kept", by(sf.masks.topk_mask)),
    "ties the other way": (
        by(last_of_ties),
        MAGNITUDE,
        "the_best_are_kept",
        by(sf.masks.topk_mask),
    ),
    "writes to gradients": (writes, QUIET, "functions_are_pure", halving),
    "global generator": (
        draws,
        NEVER._replace(start="other"),
        "functions_are_pure",
        static,
    ),
    "between triggers": (restless, QUIET, "nothing_happens_between_triggers", halving),
    "aliases params": (aliases, NEVER, "inputs_may_change_later", static),
    "memory in Python": (forgetful, NEVER, "runs_repeat", static),
}
