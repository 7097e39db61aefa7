"""What an exact mask costs: of n scores, of all weights of a ResNet-50 together, of 2 in 4; to draw, and to pack.

    python benchmarks/selection.py
    python benchmarks/selection.py --quick
    python benchmarks/selection.py --large

The base of the first tables is a floor: one comparison of all scores with a known threshold, into a fresh bool mask.
Masks are held against those of the peers first; peers leave the order of equal scores open.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _models import Weight, normal_tree, resnet50_shapes
from _timing import Case, Row, compare, options_of, same_up_to_ties, write
from torch import Tensor, nn
from torch.ao.pruning import WeightNormSparsifier
from torch.nn.utils import prune

import sparsefn as sf

KEEP = 0.1


def by_topk(scores: Tensor, n_keep: int) -> Tensor:
    """What one writes with torch alone."""
    flat = scores.reshape(-1)
    best = torch.topk(flat, n_keep, sorted=False).indices
    return torch.zeros(flat.shape, dtype=torch.bool).scatter_(0, best, True).reshape(scores.shape)


def continuous(n: int) -> Tensor:
    """Magnitudes of normal weights."""
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).abs_()


def pruned_before(n: int) -> Tensor:
    """The same after pruning: all but a tenth are zero, so that the threshold is at the ties."""
    scores = continuous(n)
    return scores.masked_fill_(~by_topk(scores, round(KEEP * n)), 0.0)


def one_tensor(n: int, scores: Tensor, n_keep: int) -> list[Case]:
    """Keep the best of one tensor."""
    ours, theirs = sf.topk_mask(scores, n_keep), by_topk(scores, n_keep)
    same_up_to_ties(ours, theirs, scores)
    threshold = float(scores[ours].amin())
    return [
        Case("floor: scores > t", lambda: scores > threshold),
        Case("sparsefn.topk_mask", lambda: sf.topk_mask(scores, n_keep)),
        Case("torch.topk, scatter", lambda: by_topk(scores, n_keep)),
    ]


def every_weight(divide: int) -> list[Case]:
    """One competition of all weights of a ResNet-50 by magnitude."""
    weights = normal_tree(resnet50_shapes(divide), 0)
    total = sum(w.numel() for w in weights.values())
    n_prune = round((1 - KEEP) * total)

    def ours() -> Any:
        return sf.topk_masks({path: w.abs() for path, w in weights.items()}, total - n_prune)

    def by_cat() -> list[Tensor]:
        flat = torch.cat([w.abs().reshape(-1) for w in weights.values()])
        parts = torch.split(by_topk(flat, total - n_prune), [w.numel() for w in weights.values()])
        return [part.reshape(w.shape) for part, w in zip(parts, weights.values(), strict=True)]

    def unpruned() -> list[nn.Module]:
        return [Weight(w) for w in weights.values()]

    def by_prune(modules: list[nn.Module]) -> list[nn.Module]:
        pairs = [(module, "weight") for module in modules]
        prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=n_prune)
        return modules

    scores = torch.cat([w.abs().reshape(-1) for w in weights.values()])
    mine = torch.cat([mask.reshape(-1) for mask in ours().values()])
    same_up_to_ties(mine, torch.cat([mask.reshape(-1) for mask in by_cat()]), scores)
    theirs = [module.get_buffer("weight_mask").reshape(-1) > 0 for module in by_prune(unpruned())]
    same_up_to_ties(mine, torch.cat(theirs), scores)
    return [
        Case("floor: |w| > t, each", lambda: [w.abs() > 1.6 for w in weights.values()]),
        Case("sparsefn.topk_masks", ours),
        Case("torch.cat, topk, scatter", by_cat),
        Case("prune.global_unstructured", by_prune, unpruned),
    ]


def two_of_four(size: int) -> list[Case]:
    """2:4 by magnitude on a square matrix."""
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    pattern = sf.patterns.nm(2, 4)
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    module[0].weight = nn.Parameter(weight.clone())
    sparsifier.prepare(module, [{"tensor_fqn": "0.weight"}])

    def by_four() -> Tensor:
        best = torch.topk(weight.abs().reshape(-1, 4), 2, dim=1).indices
        mask = torch.zeros(weight.numel() // 4, 4, dtype=torch.bool)
        return mask.scatter_(1, best, True).reshape(weight.shape)

    ours = sf.topk_mask(weight.abs(), None, pattern=pattern)
    sparsifier.step()
    theirs = {"torch.topk": by_four(), "torch.ao": module[0].parametrizations.weight[0].mask != 0}
    for name, mask in theirs.items():
        # Where the second and third of four tie, either may be kept: then as many and as large ones are.
        best = [(weight.abs() * m).reshape(-1, 4).sort(-1).values for m in (ours, mask)]
        if not torch.equal(*best):
            raise AssertionError(f"2:4 of {name} differs")
    return [
        Case("floor: |w| > t", lambda: weight.abs() > 0.67),
        Case("sparsefn.topk_mask, nm(2, 4)", lambda: sf.topk_mask(weight.abs(), None, pattern=pattern)),
        Case("torch.topk of rows of 4, scatter", by_four),
        Case("torch.ao WeightNormSparsifier", sparsifier.step),
    ]


def drawn(n: int) -> list[Case]:
    """Uniform numbers: torch's from its global state, ours from a key."""
    key = sf.random.key(0)
    cases = [
        Case("torch.rand", lambda: torch.rand(n)),
        Case("sparsefn.random.uniform", lambda: sf.random.uniform(key, (n,))),
    ]
    if n < 10**7:  # in a compiled graph smaller draws are the same operator
        return cases
    compiled = torch.compile(lambda key: sf.random.uniform(key, (n,)), fullgraph=True)
    if not torch.equal(compiled(key), sf.random.uniform(key, (n,))):
        raise AssertionError("compiled draws differ")
    return [*cases, Case("sparsefn.random.uniform, compiled", lambda: compiled(key))]


def packed(n: int) -> list[Case]:
    """A mask into bytes and back."""
    scores = continuous(n)
    mask = {"w": scores > 1.6}
    small = sf.masks.pack(mask)
    if small["w"].numel() != -(-n // 8) or not torch.equal(sf.masks.unpack(small, mask)["w"], mask["w"]):
        raise AssertionError("a packed mask comes back another")
    return [
        Case("floor: scores > t", lambda: scores > 1.6),
        Case("sparsefn.masks.pack", lambda: sf.masks.pack(mask)),
        Case("sparsefn.masks.unpack", lambda: sf.masks.unpack(small, mask)),
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    exponents = range(3, 5) if options.smoke else range(3, 7) if options.quick else range(3, 9 if options.large else 8)
    kinds: dict[str, Callable[[int], Tensor]] = {"continuous": continuous, "90% zeros": pruned_before}
    tables = {}
    for exponent in exponents:
        n = 10**exponent
        for kind, make in kinds.items():
            title = f"keep 10% of 1e{exponent}, {kind}"
            tables[title] = compare(title, one_tensor(n, make(n), round(KEEP * n)), options, exponent >= 6)
    divide = 16 if options.smoke else 4 if options.quick else 1
    title = "keep 10% of ResNet-50's 54 weights together" + (f", channels / {divide}" if divide > 1 else "")
    tables[title] = compare(title, every_weight(divide), options, memory=True)
    size = 64 if options.smoke else 1024 if options.quick else 4096
    title = f"2:4 of {size} x {size}"
    tables[title] = compare(title, two_of_four(size), options, memory=True)
    exponent = 4 if options.smoke else 6 if options.quick else 7
    tables[f"1e{exponent} uniform numbers"] = compare(
        f"1e{exponent} uniform numbers", drawn(10**exponent), options, True
    )
    title = f"a mask of 1e{exponent} in bytes"
    tables[title] = compare(title, packed(10**exponent), options, memory=True)
    return tables


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("selection", main(chosen), chosen)
