"""What pruning with data costs: statistics of the inputs of a language model's weights,
and SparseGPT of a layer.

    python benchmarks/pruning.py
    python benchmarks/pruning.py --quick

Statistics are held against the forward pass alone, and against hooks as the authors
write them: one on each linear layer that adds to its own sums, squares as for Wanda and
products as for SparseGPT. SparseGPT is held against the linear algebra that it cannot
do without, and the authors' formulation. Results are compared before anything is timed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _timing import Case, Row, compare, options_of, write
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf

BLOCK = 128


class Layer(nn.Module):
    """A block of a language model as in LLaMA: attention with four projections, a gated
    MLP with three.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        self.heads, self.norms = (
            width // 64,
            nn.ModuleList(nn.RMSNorm(width) for _ in range(2)),
        )
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def hooked(model: nn.Module, x: Tensor, gram: bool) -> dict[str, Tensor]:
    """Sums of squares or products by a hook on each linear layer."""
    sums: dict[str, Tensor] = {}

    def hook(path: str, layer: nn.Linear, args: tuple[Tensor], out: Tensor) -> None:
        seen = args[0].reshape(-1, layer.in_features).T
        sums[path] = seen @ seen.T if gram else torch.norm(seen, p=2, dim=1).square()

    linears = [
        (path, part)
        for path, part in model.named_modules()
        if isinstance(part, nn.Linear)
    ]
    handles = [
        part.register_forward_hook(partial(hook, f"{path}.weight"))
        for path, part in linears
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return sums


def calibrated(sizes: tuple[int, int, int], options: argparse.Namespace) -> list[Case]:
    """The statistics of every linear layer over one batch."""
    width, layers, tokens = sizes
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width) for _ in range(layers))).requires_grad_(False)
    x = torch.randn(2, tokens // 2, width)
    for name in ("square", "gram"):
        ours = {
            path: of[name]
            for path, of in sf.calibration.inputs(model, None, x, of=name).items()
        }
        for path, sums in hooked(model, x, name == "gram").items():
            scale = float(sums.abs().max())
            torch.testing.assert_close(
                ours[path].float(), sums, rtol=1e-4, atol=1e-5 * scale
            )
    return [
        Case("forward alone", lambda: model(x)),
        Case(
            "sparsefn.posttraining.calibration.inputs, squares",
            lambda: sf.calibration.inputs(model, None, x, of="square"),
        ),
        Case("hooks, squares", lambda: hooked(model, x, False)),
        Case(
            "sparsefn.posttraining.calibration.inputs, products",
            lambda: sf.calibration.inputs(model, None, x, of="gram"),
        ),
        Case("hooks, products", lambda: hooked(model, x, True)),
    ]


def layer(size: int) -> tuple[Tensor, Tensor]:
    """A square weight, and the hessian of inputs whose scales differ and which are
    correlated.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * size, size, generator=generator) * torch.logspace(-1, 1, size)
    x[:, 1:] += 0.5 * x[:, :-1]
    return torch.randn(size, size, generator=generator), x.T @ x / len(x)


def by_the_inverse(
    weight: Tensor, hessian: Tensor, damp: float = 0.01
) -> tuple[Tensor, Tensor]:
    """SparseGPT at half of the weights as its authors write it: the factor of the
    inverse, and a rank-one update of the rest of the block after every column.
    """
    columns, w = weight.shape[1], weight.clone()
    damped = hessian + damp * hessian.diagonal().mean() * torch.eye(columns)
    upper = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True
    )
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
    (ours, mask), (theirs, other) = (
        sf.solve.obs(weight, hessian, keep=0.5),
        by_the_inverse(weight, hessian),
    )
    if int(mask.sum()) != size * size // 2 or (mask != other).float().mean() > 1e-3:
        raise AssertionError(f"masks differ in {int((mask != other).sum())} entries")
    errors = [
        float(((new - weight) @ hessian * (new - weight)).double().sum())
        for new in (ours, theirs)
    ]
    if abs(errors[0] - errors[1]) > 1e-3 * errors[1]:
        raise AssertionError(f"errors differ: {errors}")
    changes = torch.randn_like(weight)

    def alone() -> None:
        factor = torch.linalg.cholesky(hessian)
        for a in range(BLOCK, size, BLOCK):
            _ = factor[a : a + BLOCK, :a] @ changes[:a]

    return [
        Case("Cholesky and products alone", alone),
        Case(
            "sparsefn.posttraining.solve.obs, half kept",
            lambda: sf.solve.obs(weight, hessian, keep=0.5),
        ),
        Case(
            "sparsefn.posttraining.solve.obs, nm(2, 4)",
            lambda: sf.solve.obs(weight, hessian, pattern=sf.patterns.nm(2, 4)),
        ),
        Case(
            "the authors' formulation, half kept",
            lambda: by_the_inverse(weight, hessian),
        ),
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    sizes = (
        (64, 1, 64)
        if options.smoke
        else (512, 2, 1024)
        if options.quick
        else (1024, 2, 2048)
    )
    width, layers, tokens = sizes
    size = 64 if options.smoke else 1024 if options.quick else 4096
    # a round takes half a minute
    few = argparse.Namespace(**{**vars(options), "rounds": min(options.rounds, 3)})
    tables: list[tuple[str, Callable[..., list[Case]], Any, argparse.Namespace]] = [
        (
            f"calibration of {layers} blocks, width {width}, {tokens} tokens",
            calibrated,
            sizes,
            options,
        ),
        (f"SparseGPT of {size} x {size}", obs, size, few),
    ]
    return {
        title: compare(title, make(argument, own), own)
        for title, make, argument, own in tables
    }


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("pruning", main(chosen), chosen)
