"""Planted bugs: each is an algorithm or a primitive gone wrong in one way, and the law that must notice.

`python -m property_tests.mutants` prints which laws notice which of them.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import sparsefn as sf
from property_tests import laws, laws_primitives
from property_tests.harness import hold, leaves
from property_tests.laws import Law
from property_tests.laws_primitives import PrimitiveLaw
from property_tests.registry import EVEN, ROWS, Row, ramp, swap
from property_tests.strategies import Tree

HEALTHY = {row.name: row for row in ROWS}
MAGNITUDE, GRADIENT = sf.scores.magnitude, sf.scores.gradient


class Mutant(NamedTuple):
    """`law` must fail on `row`, and hold on the healthy row of that name."""

    bug: str
    law: str
    row: Row
    raises: type[Exception] = AssertionError

    @property
    def healthy(self) -> Row:
        return HEALTHY[self.row.name]


def mutant(bug: str, law: str, base: str, make: Callable[[Any, Tensor, Tree], sf.Algorithm], **options: Any) -> Mutant:
    return Mutant(bug, law, HEALTHY[base]._replace(make=make), **options)


# ---- tools for planting -----------------------------------------------------------------------------


def after_update(algorithm: sf.Algorithm, change: Callable[[sf.State, sf.State, Tree, Any], sf.State]) -> sf.Algorithm:
    """`change(before, after, grads, step)` has the last word in every update."""

    def update(state: sf.State, grads: Tree, step: Any) -> sf.State:
        return change(state, algorithm.update(state, grads, step), grads, step)

    return algorithm._replace(update=update, within=None)


def masks_by(rule: Callable[[str, Tensor], Tensor]) -> Callable[[Tree], Tree]:
    """An `init` that makes the masks of the sparsified leaves by hand."""

    def init(params: Tree) -> Tree:
        true = torch.ones((), dtype=torch.bool)
        made = [rule(p, x) if sf.default_where(p, x) else true for p, x in leaves(params).items()]
        return optree.tree_unflatten(optree.tree_structure(params), made)

    return init


def magnitude_masks(choose: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Tensor, Tree], sf.Algorithm]:
    """`static magnitude keep` with masks made by `choose(scores, sparsity)`."""
    return lambda s, key, _: sf.static(None, init=masks_by(lambda path, leaf: choose(leaf.abs(), s)), pruned="keep")


def kept(scores: Tensor, sparsity: Any) -> Any:
    return sf.budgets.n_kept(scores.numel(), sparsity)


def by_threshold(scores: Tensor, count: Any) -> Tensor:
    """What many libraries do: everything at least as large as the k-th largest."""
    if int(count) == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    return scores >= scores.reshape(-1).sort(descending=True).values[int(count) - 1]


def per_leaf(fn: Callable[[str, Tensor], Tensor]) -> Callable[[sf.State, Tree, Any], Tree]:
    """A score that sees the path of a leaf."""

    def score(state: sf.State, grads: Tree, step: Any) -> Tree:
        made = [fn(path, leaf) for path, leaf in leaves(state.params).items()]
        return optree.tree_unflatten(optree.tree_structure(state.params), made)

    return score


def gmp(score: Any = MAGNITUDE, **options: Any) -> Callable[[Any, Tensor, Tree], sf.Algorithm]:
    return lambda s, key, _: sf.gmp(ramp(s), score=score, **{"when": EVEN, "key": key, **options})


def rigl(**options: Any) -> Callable[[Any, Tensor, Tree], sf.Algorithm]:
    return lambda s, key, _: sf.rigl(s, key=key, **{**swap, **options})


def each(fn: Callable[..., Tensor], *trees: Tree) -> Tree:
    return optree.tree_map(lambda *x: fn(*x) if x[0].ndim else x[0], *trees)


# ---- planted: how many and which ones ---------------------------------------------------------------


def _in_part(state: sf.State, after: sf.State, grads: Tree, step: Any) -> sf.State:
    board = each(lambda m: m & sf.masks.checkerboard(m.shape, 0.5), after.masks)
    return after._replace(masks=board, params=sf.apply_masks(after.params, board))


def _draws_by_position(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    place = itertools.count()

    def mask(path: str, leaf: Tensor) -> Tensor:
        draws = sf.random.uniform(sf.random.fold_in(key, next(place)), leaf.shape)
        return sf.topk_mask(draws, kept(leaf, s))

    return sf.static(None, init=masks_by(mask), key=key)


MASKS = [
    mutant(
        "the count is truncated in float32",
        "counts_are_exact",
        "static magnitude keep",
        magnitude_masks(lambda x, s: sf.topk_mask(x, int(torch.tensor(1.0 - s, dtype=torch.float32) * x.numel()))),
    ),
    mutant(
        "halves of a unit are rounded up",
        "counts_are_exact",
        "static magnitude keep",
        magnitude_masks(lambda x, s: sf.topk_mask(x, x.numel() - math.floor(s * x.numel() + 0.5))),
    ),
    mutant(
        "ties at the threshold all stay",
        "counts_are_exact",
        "static magnitude keep",
        magnitude_masks(lambda x, s: by_threshold(torch.nan_to_num(x, nan=-1.0), kept(x, s))),
    ),
    mutant(
        "the trigger fires one step late",
        "counts_are_exact",
        "one_shot",
        lambda s, key, _: sf.one_shot(s, when=sf.at([2])),
    ),
    mutant(
        "the schedule is read one step early",
        "counts_are_exact",
        "gmp",
        lambda s, key, _: sf.gmp(lambda step: ramp(s)(step - 1), when=EVEN),
    ),
    mutant(
        "the budget of a leaf is the average one",
        "counts_are_exact",
        "static erk",
        lambda s, key, _: sf.static(s, key=key),
    ),
    mutant(
        "NaN wins",
        "the_best_are_kept",
        "gmp",
        gmp(per_leaf(lambda path, leaf: torch.nan_to_num(leaf.abs(), nan=math.inf))),
    ),
    mutant(
        "ties go to the higher index",
        "the_best_are_kept",
        "static magnitude keep",
        magnitude_masks(lambda x, s: sf.topk_mask(x.reshape(-1).flip(0), kept(x, s)).flip(0).reshape(x.shape)),
    ),
    mutant(
        "scores are compared in bfloat16", "the_best_are_kept", "gmp", gmp(per_leaf(lambda _, x: x.abs().bfloat16()))
    ),
    mutant(
        "a unit is kept in part",
        "units_are_whole",
        "gmp channel",
        lambda s, key, _: after_update(sf.gmp(ramp(s), when=EVEN, pattern=sf.patterns.channel(0)), _in_part),
    ),
    mutant("pruned weights compete again", "masks_only_shrink", "gmp", gmp(regrow=True)),
    mutant(
        "what is off the mask is believed",
        "masks_only_shrink",
        "one_shot",
        lambda s, key, _: after_update(
            sf.one_shot(s, when=sf.at([1])),
            lambda old, new, grads, step: new._replace(masks=each(lambda m, p: m | (p > 7), new.masks, old.params)),
        ),
    ),
    mutant(
        "the drop count is rounded up",
        "the_worst_are_exchanged",
        "rigl",
        rigl(count=lambda f, n: torch.ceil(f * n).long()),
    ),
    mutant(
        "the sign of the gradient counts",
        "the_worst_are_exchanged",
        "rigl",
        rigl(grow=lambda state, grads, step: grads),
    ),
    mutant(
        "weights are scored before they are masked",
        "the_worst_are_exchanged",
        "drop_grow exclude keep",
        lambda s, key, _: sf.drop_grow(
            s, drop=sf.scores.saliency, grow=GRADIENT, key=key, exclude_dropped=False, pruned="keep", **swap
        ),
    ),
    mutant(
        "the largest are dropped",
        "the_worst_are_exchanged",
        "set",
        lambda s, key, _: sf.set(s, key=key, drop=per_leaf(lambda _, x: -x.abs()), **swap),
    ),
    mutant("more are dropped than the fraction says", "exchanges_conserve", "rigl", rigl(drop_fraction=0.9)),
    mutant(
        "more come than go",
        "exchanges_conserve",
        "rigl",
        lambda s, key, _: sf.rigl(lambda step: s * (step < 1), key=key, **swap),
    ),
    mutant(
        "grown weights start at one",
        "exchanges_conserve",
        "rigl",
        rigl(grown=lambda state, grown, step: optree.tree_map(torch.ones_like, state.params)),
    ),
    mutant(
        "masks are made anew between triggers",
        "nothing_happens_between_triggers",
        "rigl even magnitude",
        lambda s, key, _: sf.rigl(s, init="magnitude", drop_fraction=0.5),
    ),
    mutant(
        "an idle step copies the masks",
        "nothing_happens_between_triggers",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN), lambda old, new, grads, step: new._replace(masks=each(torch.clone, new.masks))
        ),
    ),
    mutant("a score reads gradients on the sly", "gradients_matter_where_declared", "gmp", gmp(sf.scores.saliency)),
    mutant("ties are broken by chance", "keys_matter_where_declared", "gmp", gmp(sf.scores.random)),
    mutant("the key is a constant", "declared_dependence_is_real", "set", lambda s, key, _: sf.set(s, **swap)),
    mutant(
        "every step draws the same",
        "declared_dependence_is_real",
        "set",
        lambda s, key, _: sf.set(s, key=key, grow=lambda state, grads, step: sf.scores.random(state, grads, 0), **swap),
    ),
    mutant(
        "gradients are masked before they are scored",
        "declared_dependence_is_real",
        "rigl even magnitude",
        lambda s, key, _: sf.rigl(
            s,
            init="magnitude",
            when=EVEN,
            drop_fraction=0.5,
            grow=lambda state, grads, step: sf.scores.gradient(state, sf.apply_masks(grads, state.masks), step),
        ),
    ),
    mutant("keys are numbered by the leaf's place", "leaves_are_independent", "static", _draws_by_position),
    mutant(
        "one threshold for every scale",
        "scale_does_not_matter",
        "static magnitude keep",
        magnitude_masks(lambda x, s: x > s),
    ),
    mutant(
        "the path is part of the score",
        "names_do_not_matter",
        "gmp",
        gmp(per_leaf(lambda path, x: x.abs() * (1 if zlib.crc32(path.encode()) % 2 else -1))),
    ),
    mutant(
        "the place is part of the score",
        "permutations_commute",
        "gmp",
        gmp(per_leaf(lambda _, x: x.abs() + torch.arange(x.numel()).reshape(x.shape))),
    ),
]


# ---- planted: states --------------------------------------------------------------------------------


def _counted_in_a_closure(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    made = itertools.count()
    return sf.set(s, key=key, grow=lambda state, grads, step: sf.scores.random(state, grads, next(made)), **swap)


def _remembered_in_a_closure(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    memory: dict[str, Tree] = {}

    def grow(state: sf.State, grads: Tree, step: Any) -> Tree:
        old = memory.get("mean", optree.tree_map(torch.zeros_like, grads)) if step else grads
        memory["mean"] = optree.tree_map(lambda a, b: 0.5 * a + b, old, grads)
        return optree.tree_map(torch.abs, memory["mean"])

    return sf.rigl(s, key=key, grow=grow, **swap)


def _numbered_by_insertion(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    order = {path: i for i, path in enumerate(_inserted(params))}

    def mask(path: str, leaf: Tensor) -> Tensor:
        draws = sf.random.uniform(sf.random.fold_in(key, order[path]), leaf.shape)
        return sf.topk_mask(draws, kept(leaf, s))

    return sf.static(None, init=masks_by(mask), key=key)


def _inserted(tree: Tree, prefix: str = "") -> list[str]:
    """Paths in the order in which dicts were filled."""
    if isinstance(tree, Tensor):
        return [prefix.removeprefix(".")]
    items = (
        tree.items() if isinstance(tree, dict) else zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
    )
    return [path for name, part in items for path in _inserted(part, f"{prefix}.{name}")]


def _zeroed_in_place(old: sf.State, new: sf.State, grads: Tree, step: Any) -> sf.State:
    for mask, leaf in zip(optree.tree_leaves(old.masks), optree.tree_leaves(old.params), strict=True):
        if mask.ndim:
            leaf.masked_fill_(~mask, 0.0)
    return new


def _multiplied(old: sf.State, new: sf.State, grads: Tree, step: Any) -> sf.State:
    return new._replace(params=each(lambda p, m: p * m, old.params, new.masks))


def _random_generator(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    return sf.static(None, init=masks_by(lambda _, x: sf.topk_mask(torch.rand(x.shape), kept(x, s))), key=key)


def _rounded_in_float32(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    return sf.static(s.float() if isinstance(s, Tensor) else s, key=key)


def _late_for_tensors(step: Any) -> Any:
    return EVEN(step + 1) if isinstance(step, Tensor) else EVEN(step)


def _at_least(least: int, spare: int) -> Callable[[Any, Tensor, Tree], sf.Algorithm]:
    """A count that never falls to `least` or comes closer than `spare` to the whole."""
    return magnitude_masks(
        lambda x, s: sf.topk_mask(x, min(max(kept(x, s), least), max(x.numel() - spare, 0)) if x.numel() else 0)
    )


STATES = [
    mutant(
        "an update adds a field",
        "states_keep_their_structure",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN), lambda old, new, grads, step: new._replace(scores={"old": old.params})
        ),
    ),
    mutant(
        "masks come back transposed",
        "states_keep_their_structure",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN),
            lambda old, new, grads, step: new._replace(masks=each(lambda m: m.mT.contiguous().mT, new.masks)),
        ),
    ),
    mutant(
        "weights are zeroed in place",
        "functions_are_pure",
        "gmp regrow keep",
        lambda s, key, _: after_update(sf.gmp(lambda step: s, when=EVEN, regrow=True, pruned="keep"), _zeroed_in_place),
    ),
    mutant("masks are drawn from the global generator", "functions_are_pure", "static", _random_generator),
    mutant(
        "a part of the gradient is returned",
        "functions_are_pure",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN), lambda old, new, grads, step: new._replace(scores=each(lambda g: g[:1], grads))
        ),
    ),
    mutant("draws are numbered by calls", "runs_repeat", "set", _counted_in_a_closure),
    mutant("draws are numbered by the order of a dict", "runs_repeat", "static", _numbered_by_insertion),
    mutant(
        "a sum depends on the threads",
        "threads_do_not_matter",
        "one_shot",
        lambda s, key, _: after_update(
            sf.one_shot(s, when=sf.at([1])),
            lambda old, new, grads, step: new._replace(scores=each(lambda p: p.sum(), old.params)),
        ),
    ),
    mutant("a tensor step is compared otherwise", "steps_may_be_tensors", "gmp", gmp(when=_late_for_tensors)),
    mutant("a tensor sparsity is rounded in float32", "vmap_is_a_loop", "static", _rounded_in_float32),
    mutant(
        "all members draw the same",
        "vmap_is_a_loop",
        "static",
        lambda s, key, _: sf.static(s, key=sf.random.key(0) if torch._C._functorch.is_batchedtensor(key) else key),
    ),
    mutant("a score is remembered outside of the state", "runs_resume", "rigl", _remembered_in_a_closure),
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
        lambda s, key, _: sf.with_optimizer(sf.rigl(s, key=key, **swap), sf.optimizers.adam(0.1), mask_moments=False),
    ),
    mutant("pruned weights train on", "outside_optimizers_cannot_revive", "gmp", gmp(pruned="train")),
    mutant("one weight is always pruned", "sparsity_zero_is_dense", "static magnitude keep", _at_least(0, 1)),
    mutant("terms are forgotten", "sparsity_zero_is_dense", "with_terms", rigl()),
    mutant("one weight is always kept", "sparsity_one_is_empty", "static magnitude keep", _at_least(1, 0)),
    mutant(
        "the step is made a Python bool",
        "compiling_changes_nothing",
        "gmp erk",
        lambda s, key, _: sf.gmp(ramp(s), when=lambda step: bool(step % 2 == 0)),
        raises=torch._dynamo.exc.TorchDynamoException,
    ),
]

MUTANTS = MASKS + STATES


# ---- planted: primitives ----------------------------------------------------------------------------


class PrimitiveMutant(NamedTuple):
    bug: str
    law: str
    subject: Any


def _floored(shares: Any, total: Any, caps: Any = None) -> Any:
    if any(isinstance(x, Tensor) for x in (total, *shares.values())):
        return sf.budgets.apportion(shares, total, caps)
    whole = sum(shares.values())
    return {name: min(int(share / whole * total), caps[name]) if whole else 0 for name, share in shares.items()}


def _uncapped(shares: Any, total: Any, caps: Any = None) -> Any:
    return sf.budgets.apportion(shares, total)


def _first_come(shares: Any, total: Any, caps: Any = None) -> Any:
    names = {str(i): name for i, name in enumerate(shares)}  # ties go by insertion
    counts = sf.budgets.apportion(
        {i: shares[n] for i, n in names.items()}, total, {i: caps[n] for i, n in names.items()}
    )
    return {names[i]: count for i, count in counts.items()}


def _erk_clipped(power: float) -> Any:
    def counts(shapes: Any, sparsity: Any) -> Any:
        sizes = {path: math.prod(shape) for path, shape in shapes.items()}
        raw = {path: sizes[path] * (sum(shape) / math.prod(shape)) ** power for path, shape in shapes.items()}
        epsilon = (sum(sizes.values()) - round(sparsity * sum(sizes.values()))) / sum(raw.values())
        return {path: min(round(epsilon * raw[path]), sizes[path]) for path in shapes}

    return counts


def _torch_topk(scores: Tensor, n_keep: Any, *, pattern: Any) -> Tensor:
    if str(pattern) != str(sf.patterns.unstructured()) or isinstance(n_keep, Tensor):
        return sf.topk_mask(scores, n_keep, pattern=pattern)
    flat = scores.reshape(-1)
    return torch.zeros(flat.shape, dtype=torch.bool).scatter(0, flat.topk(n_keep).indices, True).reshape(scores.shape)


def _unbarred_drop(scores: Tensor, mask: Tensor, n_drop: Any, *, pattern: Any) -> Tensor:
    return mask & sf.drop_lowest(scores, torch.ones_like(mask), n_drop, pattern=pattern)


def _nan_stays(scores: Tensor, mask: Tensor, n_drop: Any, *, pattern: Any) -> Tensor:
    return sf.drop_lowest(torch.nan_to_num(scores, nan=math.inf), mask, n_drop, pattern=pattern)


def _grow_anywhere(scores: Tensor, mask: Tensor, n_grow: Any, *, pattern: Any, exclude: Tensor) -> Tensor:
    return sf.grow_highest(scores, mask, n_grow, pattern=pattern)


def _leaf_by_leaf(scores: Any, n_keep: Any) -> Any:
    total = sum(leaf.numel() for leaf in scores.values())
    return {path: sf.topk_mask(x, round(int(n_keep) * x.numel() / max(total, 1))) for path, x in scores.items()}


def _at_or_above(scores: Tensor, tau: float, *, min_keep: int) -> Tensor:
    return (scores >= tau) | sf.threshold_mask(scores, tau, min_keep=min_keep)


def _without_tail(tree: Any) -> Any:
    return {path: bits[:-1] if bits.ndim and bits.numel() else bits for path, bits in sf.masks.pack(tree).items()}


def _unpack_short(packed: Any, like: Any) -> Any:
    sizes = {path: -(-leaf.numel() // 8) if leaf.ndim else 0 for path, leaf in like.items()}
    padded = {p: torch.cat([b, b.new_zeros(sizes[p] - b.numel())]) if b.ndim else b for p, b in packed.items()}
    return sf.masks.unpack(padded, like)


def _float32_for_tensors(step: Any) -> Any:
    value = sf.schedules.cosine_decay(0.3, 75)(step)
    return value.float().double() if isinstance(value, Tensor) else value


PRIMITIVES = [
    PrimitiveMutant(
        "the size of a draw is folded in",
        "draws_depend_on_key_and_index_alone",
        lambda key, shape, index=None: sf.random.bits(sf.random.fold_in(key, math.prod(shape)), shape, index=index),
    ),
    PrimitiveMutant(
        "indices are ignored",
        "draws_depend_on_key_and_index_alone",
        lambda key, shape, index=None: sf.random.uniform(key, shape),
    ),
    PrimitiveMutant(
        "numbers are folded in modulo 2^16",
        "folding_is_injective",
        lambda key, data: sf.random.fold_in(key, data if isinstance(data, str) else data % 2**16),
    ),
    PrimitiveMutant(
        "numbers are folded in as names", "folding_is_injective", lambda key, data: sf.random.fold_in(key, str(data))
    ),
    PrimitiveMutant(
        "the first new key is the old one",
        "split_keys_are_independent",
        lambda key, n: torch.cat([key[None], sf.random.split(key, n)])[:n],
    ),
    PrimitiveMutant(
        "the number of keys is folded in",
        "split_keys_are_independent",
        lambda key, n: sf.random.split(sf.random.fold_in(key, n), n),
    ),
    PrimitiveMutant("remainders are lost", "shares_are_handed_out", _floored),
    PrimitiveMutant("caps are ignored", "shares_are_handed_out", _uncapped),
    PrimitiveMutant("the order of the dict breaks ties", "shares_are_handed_out", _first_come),
    PrimitiveMutant("full leaves keep their overflow", "erk_is_the_closed_form", _erk_clipped),
    PrimitiveMutant("the power is ignored", "erk_is_the_closed_form", lambda power: sf.budgets.erk()),
    PrimitiveMutant("torch.topk breaks ties", "topk_keeps_the_best", _torch_topk),
    PrimitiveMutant("pruned weights are dropped", "dropping_clears_the_worst", _unbarred_drop),
    PrimitiveMutant("NaN stays", "dropping_clears_the_worst", _nan_stays),
    PrimitiveMutant("excluded weights grow", "growing_fills_the_best", _grow_anywhere),
    PrimitiveMutant("leaves do not compete", "one_competition_over_all_leaves", _leaf_by_leaf),
    PrimitiveMutant("the threshold itself is kept", "thresholds_keep_what_is_above", _at_or_above),
    PrimitiveMutant("the last byte is lost", "packing_round_trips", (_without_tail, _unpack_short)),
    PrimitiveMutant(
        "tensor steps are float32",
        "schedules_stay_in_bounds",
        (_float32_for_tensors, laws_primitives.SCHEDULES["cosine_decay"][1]),
    ),
    PrimitiveMutant(
        "the decay goes on below its end",
        "schedules_stay_in_bounds",
        (sf.schedules.linear(0.7, -0.02), laws_primitives.SCHEDULES["linear_decay"][1]),
    ),
    PrimitiveMutant(
        "stop is inclusive",
        "triggers_fire_in_turn",
        lambda n, start=0, stop=None: sf.every(n, start=start, stop=None if stop is None else stop + 1),
    ),
    PrimitiveMutant(
        "start does not set the phase", "triggers_fire_in_turn", lambda n, start=0, stop=None: sf.every(n, stop=stop)
    ),
]


# ---- running them -----------------------------------------------------------------------------------


def notices(law: Law, row: Row, bug: str, raises: type[Exception] = AssertionError) -> bool:
    """Whether the law fails on the row, on as many examples as it gets on a few rows."""
    try:
        hold(f"{bug} {law.name}", lambda case: law.check(row, case), law.examples(row.meta), shrink=False)
    except raises:
        return True
    return False


def primitive_notices(law: PrimitiveLaw, mutant: PrimitiveMutant) -> bool:
    try:
        hold(mutant.bug, lambda x: law.check(mutant.subject, x), law.examples, law.share, shrink=False)
    except AssertionError:
        return True
    return False


def matrix() -> str:
    """One line a mutant, one column a law: X where the law that must notice does, x where another one does."""
    columns = laws.LAWS
    lines = [f"{i:2} {law.name}" for i, law in enumerate(columns)]
    lines += ["", " ".join(f"{i:2}" for i in range(len(columns)))]
    for planted in MUTANTS:
        marks = []
        for law in columns:
            found = law.binds(planted.row.meta) and notices(law, planted.row, planted.bug, Exception)
            marks.append(" ." if not found else " X" if law.name == planted.law else " x")
        lines.append(f"{' '.join(marks)}  {planted.row.name}: {planted.bug}")
    lines.append("")
    for primitive in PRIMITIVES:
        (law,) = (law for law in laws_primitives.LAWS if law.name == primitive.law)
        lines.append(f"{' X' if primitive_notices(law, primitive) else ' .'}  {law.name}: {primitive.bug}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(matrix())
