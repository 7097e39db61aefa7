"""What pruning with data costs: SparseGPT of a layer, over the linear algebra that it cannot do without.

    python benchmarks/pruning.py
    python benchmarks/pruning.py --quick

Masks and errors of the two formulations are compared before anything is timed.
"""

import argparse
from collections.abc import Callable

import torch
from _timing import Case, Row, compare, options_of, write
from torch import Tensor

import sparsefn as sf

BLOCK = 128


def layer(size: int) -> tuple[Tensor, Tensor]:
    """A square weight, and the hessian of inputs whose scales differ and which are correlated."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * size, size, generator=generator) * torch.logspace(-1, 1, size)
    x[:, 1:] += 0.5 * x[:, :-1]
    return torch.randn(size, size, generator=generator), x.T @ x / len(x)


def by_the_inverse(weight: Tensor, hessian: Tensor, damp: float = 0.01) -> tuple[Tensor, Tensor]:
    """SparseGPT at half of the weights as its authors write it: the factor of the inverse, and a rank-one update of
    the rest of the block after every column."""
    columns, w = weight.shape[1], weight.clone()
    damped = hessian + damp * hessian.diagonal().mean() * torch.eye(columns)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    mask = torch.zeros_like(w, dtype=torch.bool)
    for a in range(0, columns, BLOCK):
        b = min(a + BLOCK, columns)
        part, own = w[:, a:b].clone(), upper[a:b, a:b]
        scores, errors = part.square() / own.diagonal().square(), torch.zeros_like(part)
        mask[:, a:b] = scores > scores.flatten().kthvalue(scores.numel() // 2).values
        for j in range(b - a):
            errors[:, j] = part[:, j].masked_fill(mask[:, a + j], 0.0) / own[j, j]
            part[:, j:] -= errors[:, j, None] * own[j, j:]
        w[:, a:b] = part.masked_fill(~mask[:, a:b], 0.0)
        w[:, b:] -= errors @ upper[a:b, b:]
    return w, mask


def obs(size: int, options: argparse.Namespace) -> list[Case]:
    """SparseGPT of one layer."""
    weight, hessian = layer(size)
    (ours, mask), (theirs, other) = sf.solve.obs(weight, hessian, keep=0.5), by_the_inverse(weight, hessian)
    if int(mask.sum()) != size * size // 2 or (mask != other).float().mean() > 1e-3:
        raise AssertionError(f"masks differ in {int((mask != other).sum())} entries")
    errors = [float(((new - weight) @ hessian * (new - weight)).double().sum()) for new in (ours, theirs)]
    if abs(errors[0] - errors[1]) > 1e-3 * errors[1]:
        raise AssertionError(f"errors differ: {errors}")
    changes = torch.randn_like(weight)

    def alone() -> None:
        factor = torch.linalg.cholesky(hessian)
        for a in range(BLOCK, size, BLOCK):
            _ = factor[a : a + BLOCK, :a] @ changes[:a]

    return [
        Case("Cholesky and products alone", alone),
        Case("sparsefn.solve.obs, half kept", lambda: sf.solve.obs(weight, hessian, keep=0.5)),
        Case("sparsefn.solve.obs, nm(2, 4)", lambda: sf.solve.obs(weight, hessian, pattern=sf.patterns.nm(2, 4))),
        Case("the authors' formulation, half kept", lambda: by_the_inverse(weight, hessian)),
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    size = 64 if options.smoke else 1024 if options.quick else 4096
    few = argparse.Namespace(**{**vars(options), "rounds": min(options.rounds, 3)})  # a round takes half a minute
    tables: list[tuple[str, Callable[..., list[Case]], int, argparse.Namespace]] = [
        (f"SparseGPT of {size} x {size}", obs, size, few),
    ]
    return {title: compare(title, make(argument, own), own) for title, make, argument, own in tables}


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("pruning", main(chosen), chosen)
