"""Planted bugs in how many weights are kept and which."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import optree
import torch
from torch import Tensor

import sparsefn as sf
from property_tests.planting import (
    GRADIENT,
    HEALTHY,
    Mutant,
    after_update,
    by_threshold,
    drawn_by,
    each,
    gmp,
    kept,
    magnitude_masks,
    mutant,
    per_leaf,
    rigl,
)
from property_tests.registry import EVEN, lopsided, ramp, swap
from sparsefn.core.tree import Tree


def _in_part(state: sf.State, after: sf.State, grads: Tree, step: Any) -> sf.State:
    board = each(lambda m: m & sf.masks.checkerboard(m.shape, 0.5), after.masks)
    return after._replace(masks=board, params=sf.apply_masks(after.params, board))


def _draws_by_position(s: Any, key: Tensor, params: Tree) -> sf.Algorithm:
    place = itertools.count()
    return drawn_by(s, key, lambda path: next(place))


def _only_where_it_flows(scores: Tensor, room: Tensor, wanted: Tensor) -> Tensor:
    return torch.minimum(wanted, ((scores > 0) & room).sum(-1))


def _infinite_where_nan(path: str, leaf: Tensor) -> Tensor:
    return torch.nan_to_num(leaf.abs(), nan=math.inf)


MASKS = [
    mutant(
        "nothing grows where the gradient is zero",
        "counts_are_exact",
        "rigl",
        rigl(grow_count=_only_where_it_flows),
    ),
    mutant(
        "the count is truncated in float32",
        "counts_are_exact",
        "static magnitude keep",
        magnitude_masks(
            lambda x, s: sf.masks.topk_mask(
                x, int(torch.tensor(1.0 - s, dtype=torch.float32) * x.numel())
            )
        ),
    ),
    mutant(
        "halves of a unit are rounded up",
        "counts_are_exact",
        "static magnitude keep",
        magnitude_masks(
            lambda x, s: sf.masks.topk_mask(
                x, x.numel() - math.floor(s * x.numel() + 0.5)
            )
        ),
    ),
    mutant(
        "ties at the threshold all stay",
        "counts_are_exact",
        "static magnitude keep",
        magnitude_masks(
            lambda x, s: by_threshold(torch.nan_to_num(x, nan=-1.0), kept(x, s))
        ),
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
        "gmp regrow keep",
        lambda s, key, _: sf.gmp(
            lambda step: s,
            when=EVEN,
            score=per_leaf(_infinite_where_nan),
            regrow=True,
            pruned="keep",
        ),
    ),
    mutant(
        "ties go to the higher index",
        "the_best_are_kept",
        "static magnitude keep",
        magnitude_masks(
            lambda x, s: (
                sf.masks.topk_mask(x.reshape(-1).flip(0), kept(x, s))
                .flip(0)
                .reshape(x.shape)
            )
        ),
    ),
    mutant(
        "scores are compared in bfloat16",
        "the_best_are_kept",
        "gmp",
        gmp(per_leaf(lambda _, x: x.abs().bfloat16())),
    ),
    mutant(
        "a unit is kept in part",
        "units_are_whole",
        "gmp channel",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN, pattern=sf.patterns.channel(0)), _in_part
        ),
    ),
    mutant(
        "pruned weights compete again", "masks_only_shrink", "gmp", gmp(regrow=True)
    ),
    mutant(
        "what is off the mask is believed",
        "masks_only_shrink",
        "one_shot",
        lambda s, key, _: after_update(
            sf.one_shot(s, when=sf.at([1])),
            lambda old, new, grads, step: new._replace(
                masks=each(lambda m, p: m | (p > 7), new.masks, old.params)
            ),
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
            s,
            drop=sf.scores.saliency,
            grow=GRADIENT,
            key=key,
            exclude_dropped=False,
            pruned="keep",
            **swap,
        ),
    ),
    mutant(
        "the largest are dropped",
        "the_worst_are_exchanged",
        "set",
        lambda s, key, _: sf.set(
            s, key=key, drop=per_leaf(lambda _, x: -x.abs()), **swap
        ),
    ),
    mutant(
        "more are dropped than the fraction says",
        "exchanges_conserve",
        "rigl",
        rigl(drop_fraction=0.9),
    ),
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
        rigl(
            grown=lambda state, grown, step: optree.tree_map(
                torch.ones_like, state.params
            )
        ),
    ),
    mutant(
        "masks are made anew between triggers",
        "nothing_happens_between_triggers",
        "rigl even magnitude",
        lambda s, key, _: sf.rigl(
            s, init="magnitude", drop_fraction=0.5, when=sf.always()
        ),
    ),
    mutant(
        "an idle step copies the masks",
        "nothing_happens_between_triggers",
        "gmp",
        lambda s, key, _: after_update(
            sf.gmp(ramp(s), when=EVEN),
            lambda old, new, grads, step: new._replace(
                masks=each(torch.clone, new.masks)
            ),
        ),
    ),
    mutant(
        "a score reads gradients on the sly",
        "gradients_matter_where_declared",
        "gmp",
        gmp(sf.scores.saliency),
    ),
    mutant(
        "ties are broken by chance",
        "keys_matter_where_declared",
        "gmp",
        gmp(sf.scores.random),
    ),
    mutant(
        "the key is a constant",
        "declared_dependence_is_real",
        "set",
        lambda s, key, _: sf.set(s, **swap),
    ),
    mutant(
        "every step draws the same",
        "declared_dependence_is_real",
        "set",
        lambda s, key, _: sf.set(
            s,
            key=key,
            grow=lambda state, grads, step: sf.scores.random(state, grads, 0),
            **swap,
        ),
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
            grow=lambda state, grads, step: sf.scores.gradient(
                state, sf.apply_masks(grads, state.masks), step
            ),
        ),
    ),
    mutant(
        "keys are numbered by the leaf's place",
        "leaves_are_independent",
        "static",
        _draws_by_position,
    ),
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
        gmp(
            per_leaf(
                lambda path, x: x.abs() * (1 if zlib.crc32(path.encode()) % 2 else -1)
            )
        ),
    ),
    mutant(
        "the place is part of the score",
        "permutations_commute",
        "gmp",
        gmp(per_leaf(lambda _, x: x.abs() + torch.arange(x.numel()).reshape(x.shape))),
    ),
    mutant(
        "the floor of a leaf is forgotten",
        "floors_are_respected",
        "gmp global floor",
        lambda s, key, _: sf.gmp(
            ramp(0.5 * s), when=EVEN, score=lopsided, distribution=sf.budgets.global_()
        ),
    ),
    Mutant(
        "the level leaves its bounds",
        "levels_stay_in_bounds",
        HEALTHY["gmp"]._replace(
            meta=HEALTHY["gmp"].meta._replace(
                level=lambda s: sf.schedules.linear(s, 0.1)
            )
        ),
    ),
    Mutant(
        "the trigger tells ints from tensors",
        "levels_stay_in_bounds",
        HEALTHY["gmp"]._replace(
            meta=HEALTHY["gmp"].meta._replace(when=lambda step: isinstance(step, int))
        ),
    ),
]
