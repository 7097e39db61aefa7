"""Planted bugs in the primitives."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparsefn as sf
from property_tests.laws_primitives import SCHEDULES


class PrimitiveMutant(NamedTuple):
    bug: str
    law: str
    subject: Any


def _counted_on(shape: Any, index: Tensor | None) -> Tensor | None:
    if index is None or not index.numel():
        return index
    return index.reshape(-1)[0] + torch.arange(index.numel()).reshape(shape)


def _floored(shares: Any, total: Any, caps: Any = None) -> Any:
    if any(isinstance(x, Tensor) for x in (total, *shares.values())):
        return sf.budgets.apportion(shares, total, caps)
    whole = sum(shares.values())
    return {
        name: min(int(share / whole * total), caps[name]) if whole else 0
        for name, share in shares.items()
    }


def _uncapped(shares: Any, total: Any, caps: Any = None) -> Any:
    return sf.budgets.apportion(shares, total)


def _first_come(shares: Any, total: Any, caps: Any = None) -> Any:
    names = {str(i): name for i, name in enumerate(shares)}  # ties go by insertion
    counts = sf.budgets.apportion(
        {i: shares[n] for i, n in names.items()},
        total,
        {i: caps[n] for i, n in names.items()},
    )
    return {names[i]: count for i, count in counts.items()}


def _erk_clipped(power: float) -> Any:
    def counts(shapes: Any, sparsity: Any) -> Any:
        sizes = {path: math.prod(shape) for path, shape in shapes.items()}
        raw = {
            path: sizes[path] * (sum(shape) / math.prod(shape)) ** power
            for path, shape in shapes.items()
        }
        epsilon = (sum(sizes.values()) - round(sparsity * sum(sizes.values()))) / sum(
            raw.values()
        )
        return {path: min(round(epsilon * raw[path]), sizes[path]) for path in shapes}

    return counts


def _torch_topk(scores: Tensor, n_keep: Any, *, pattern: Any) -> Tensor:
    if str(pattern) != str(sf.patterns.unstructured()) or isinstance(n_keep, Tensor):
        return sf.masks.topk_mask(scores, n_keep, pattern=pattern)
    flat = scores.reshape(-1)
    return (
        torch.zeros(flat.shape, dtype=torch.bool)
        .scatter(0, flat.topk(n_keep).indices, True)
        .reshape(scores.shape)
    )


def _unbarred_drop(
    scores: Tensor, mask: Tensor, n_drop: Any, *, pattern: Any
) -> Tensor:
    return mask & sf.masks.drop_lowest(
        scores, torch.ones_like(mask), n_drop, pattern=pattern
    )


def _nan_stays(scores: Tensor, mask: Tensor, n_drop: Any, *, pattern: Any) -> Tensor:
    return sf.masks.drop_lowest(
        torch.nan_to_num(scores, nan=math.inf), mask, n_drop, pattern=pattern
    )


def _grow_anywhere(
    scores: Tensor, mask: Tensor, n_grow: Any, *, pattern: Any, exclude: Tensor
) -> Tensor:
    return sf.masks.grow_highest(scores, mask, n_grow, pattern=pattern)


def _leaf_by_leaf(scores: Any, n_keep: Any) -> Any:
    total = sum(leaf.numel() for leaf in scores.values())
    return {
        path: sf.masks.topk_mask(x, round(int(n_keep) * x.numel() / max(total, 1)))
        for path, x in scores.items()
    }


def _at_or_above(scores: Tensor, tau: float, *, min_keep: int) -> Tensor:
    return (scores >= tau) | sf.masks.threshold_mask(scores, tau, min_keep=min_keep)


def _without_tail(tree: Any) -> Any:
    return {
        path: bits[:-1] if bits.ndim and bits.numel() else bits
        for path, bits in sf.masks.pack(tree).items()
    }


def _unpack_short(packed: Any, like: Any) -> Any:
    sizes = {
        path: -(-leaf.numel() // 8) if leaf.ndim else 0 for path, leaf in like.items()
    }
    padded = {
        p: torch.cat([b, b.new_zeros(sizes[p] - b.numel())]) if b.ndim else b
        for p, b in packed.items()
    }
    return sf.masks.unpack(padded, like)


def _float32_for_tensors(step: Any) -> Any:
    value = sf.schedules.cosine_decay(0.3, 75)(step)
    return value.float().double() if isinstance(value, Tensor) else value


PRIMITIVES = [
    PrimitiveMutant(
        "every shard counts from zero",
        "shards_are_parts_of_the_whole",
        lambda key, shape, index=None: sf.random.uniform(key, shape),
    ),
    PrimitiveMutant(
        "a shard counts on from its first element",
        "shards_are_parts_of_the_whole",
        lambda key, shape, index=None: sf.random.uniform(
            key, shape, index=_counted_on(shape, index)
        ),
    ),
    PrimitiveMutant(
        "the size of a draw is folded in",
        "draws_depend_on_key_and_index_alone",
        lambda key, shape, index=None: sf.random.bits(
            sf.random.fold_in(key, math.prod(shape)), shape, index=index
        ),
    ),
    PrimitiveMutant(
        "indices are ignored",
        "draws_depend_on_key_and_index_alone",
        lambda key, shape, index=None: sf.random.uniform(key, shape),
    ),
    PrimitiveMutant(
        "numbers are folded in modulo 2^16",
        "folding_is_injective",
        lambda key, data: sf.random.fold_in(
            key, data if isinstance(data, str) else data % 2**16
        ),
    ),
    PrimitiveMutant(
        "numbers are folded in as names",
        "folding_is_injective",
        lambda key, data: sf.random.fold_in(key, str(data)),
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
    PrimitiveMutant(
        "the order of the dict breaks ties", "shares_are_handed_out", _first_come
    ),
    PrimitiveMutant(
        "full leaves keep their overflow", "erk_is_the_closed_form", _erk_clipped
    ),
    PrimitiveMutant(
        "the power is ignored", "erk_is_the_closed_form", lambda power: sf.budgets.erk()
    ),
    PrimitiveMutant("torch.topk breaks ties", "topk_keeps_the_best", _torch_topk),
    PrimitiveMutant(
        "pruned weights are dropped", "dropping_clears_the_worst", _unbarred_drop
    ),
    PrimitiveMutant("NaN stays", "dropping_clears_the_worst", _nan_stays),
    PrimitiveMutant("excluded weights grow", "growing_fills_the_best", _grow_anywhere),
    PrimitiveMutant(
        "leaves do not compete", "one_competition_over_all_leaves", _leaf_by_leaf
    ),
    PrimitiveMutant(
        "the threshold itself is kept", "thresholds_keep_what_is_above", _at_or_above
    ),
    PrimitiveMutant(
        "the last byte is lost", "packing_round_trips", (_without_tail, _unpack_short)
    ),
    PrimitiveMutant(
        "tensor steps are float32",
        "schedules_stay_in_bounds",
        (_float32_for_tensors, SCHEDULES["cosine_decay"][1]),
    ),
    PrimitiveMutant(
        "the decay goes on below its end",
        "schedules_stay_in_bounds",
        (sf.schedules.linear(0.7, -0.02), SCHEDULES["linear_decay"][1]),
    ),
    PrimitiveMutant(
        "stop is inclusive",
        "triggers_fire_in_turn",
        lambda n, start=0, stop=None: sf.every(
            n, start=start, stop=None if stop is None else stop + 1
        ),
    ),
    PrimitiveMutant(
        "start does not set the phase",
        "triggers_fire_in_turn",
        lambda n, start=0, stop=None: sf.every(n, stop=stop),
    ),
]
