"""What an exact mask costs: of n scores, and of all weights of a ResNet-50 in one
competition.

    python benchmarks/selection.py
    python benchmarks/selection.py --quick
    python benchmarks/selection.py --large

The base of the tables is a floor: one comparison of all scores with a known threshold,
into a fresh bool mask. Masks are held against those of the peers first; peers leave the
order of equal scores open.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _models import Weight, normal_tree, resnet50_shapes
from _timing import (
    INPUTS,
    Case,
    Row,
    compare,
    in_turn,
    options_of,
    same_up_to_ties,
    write,
)
from torch import Tensor, nn
from torch.nn.utils import prune

import sparsefn as sf

KEEP, THRESHOLD = 0.1, 1.645  # a tenth of the magnitudes of normal numbers exceeds it


def by_topk(scores: Tensor, n_keep: int) -> Tensor:
    """The mask as one writes it with only torch."""
    flat = scores.reshape(-1)
    best = torch.topk(flat, n_keep, sorted=False).indices
    return (
        torch.zeros(flat.shape, dtype=torch.bool)
        .scatter_(0, best, True)
        .reshape(scores.shape)
    )


def continuous(n: int, seed: int) -> Tensor:
    """Magnitudes of normal weights."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).abs_()


def pruned_before(n: int, seed: int) -> Tensor:
    """The same after pruning: all but a tenth are zero, so that the threshold is at the
    ties.
    """
    scores = continuous(n, seed)
    return scores.masked_fill_(~by_topk(scores, round(KEEP * n)), 0.0)


def one_tensor(n: int) -> list[Case]:
    """Keep the best of one tensor, continuous or pruned before."""
    n_keep = round(KEEP * n)
    kinds: dict[str, Callable[[int, int], Tensor]] = {
        "": continuous,
        ", 90% zeros": pruned_before,
    }
    cases: list[Case] = []
    for kind, make in kinds.items():
        inputs = [make(n, seed) for seed in range(INPUTS if n <= 10**5 else 1)]
        for scores in inputs:
            same_up_to_ties(
                sf.masks.topk_mask(scores, n_keep), by_topk(scores, n_keep), scores
            )
        if not cases:
            cases.append(
                Case(
                    "floor: scores > t",
                    in_turn(lambda scores: scores > THRESHOLD, inputs),
                )
            )
        cases.append(
            Case(
                "sparsefn.topk_mask" + kind,
                in_turn(lambda scores: sf.masks.topk_mask(scores, n_keep), inputs),
            )
        )
        cases.append(
            Case(
                "torch.topk, scatter" + kind,
                in_turn(lambda scores: by_topk(scores, n_keep), inputs),
            )
        )
    return cases


def every_weight(divide: int) -> list[Case]:
    """One competition of all weights of a ResNet-50 by magnitude."""
    weights = normal_tree(resnet50_shapes(divide), 0)
    scores = {path: w.abs() for path, w in weights.items()}
    total = sum(w.numel() for w in weights.values())
    n_prune = round((1 - KEEP) * total)
    algorithm = sf.one_shot(1 - KEEP, distribution=sf.budgets.global_())
    start = algorithm.init(weights)

    def by_cat() -> list[Tensor]:
        flat = torch.cat([w.abs().reshape(-1) for w in weights.values()])
        parts = torch.split(
            by_topk(flat, total - n_prune), [w.numel() for w in weights.values()]
        )
        return [
            part.reshape(w.shape)
            for part, w in zip(parts, weights.values(), strict=True)
        ]

    def unpruned() -> list[nn.Module]:
        return [Weight(w) for w in weights.values()]

    def by_prune(modules: list[nn.Module]) -> list[nn.Module]:
        pairs = [(module, "weight") for module in modules]
        prune.global_unstructured(
            pairs, pruning_method=prune.L1Unstructured, amount=n_prune
        )
        return modules

    def flat(masks: Any) -> Tensor:
        return torch.cat([mask.reshape(-1) for mask in masks])

    mine = flat(sf.masks.topk_masks(scores, total - n_prune).values())
    if not torch.equal(mine, flat(algorithm.update(start, weights, 0).masks.values())):
        raise AssertionError("one_shot has other masks than topk_masks")
    theirs = [module.get_buffer("weight_mask") > 0 for module in by_prune(unpruned())]
    for other in (flat(by_cat()), flat(theirs)):
        same_up_to_ties(mine, other, flat(scores.values()))
    return [
        Case(
            "floor: scores > t, each",
            lambda: [leaf > THRESHOLD for leaf in scores.values()],
        ),
        Case(
            "sparsefn.topk_masks", lambda: sf.masks.topk_masks(scores, total - n_prune)
        ),
        Case(
            "sparsefn.topk_masks, and |w| of each",
            lambda: sf.masks.topk_masks(
                {path: w.abs() for path, w in weights.items()}, total - n_prune
            ),
        ),
        Case(
            "sparsefn.one_shot, new weights too",
            lambda: algorithm.update(start, weights, 0),
        ),
        Case("|w|, torch.cat, topk, scatter", by_cat),
        Case("prune.global_unstructured", by_prune, unpruned),
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    full = [
        10**3,
        10**4,
        10**5,
        10**6,
        10**7,
        25_000_000,
        *([10**8] if options.large else []),
    ]
    tables = {}
    for n in full[:2] if options.smoke else full[:4] if options.quick else full:
        title = f"keep 10% of {n:.3g}".replace("e+0", "e")
        tables[title] = compare(title, one_tensor(n), options, n)
    divide = 16 if options.smoke else 4 if options.quick else 1
    title = "keep 10% of ResNet-50's 54 weights together" + (
        f", channels / {divide}" if divide > 1 else ""
    )
    shapes = resnet50_shapes(divide)
    tables[title] = compare(
        title,
        every_weight(divide),
        options,
        sum(torch.Size(shape).numel() for shape in shapes),
    )
    return tables


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("selection", main(chosen), chosen)
