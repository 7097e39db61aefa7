"""What pruning with calibration data costs: the statistics of the inputs of a language model's weights.

    python benchmarks/pruning.py
    python benchmarks/pruning.py --quick

The base is the forward pass alone. The peers are the authors' formulation, a forward hook on each linear layer that
adds to its own sums: squares as for Wanda, products as for SparseGPT. Sums are compared before anything is timed.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from _timing import Case, Row, compare, options_of, write
from torch import Tensor, nn
from torch.nn import functional

import sparsefn as sf


class Layer(nn.Module):
    """A block of a language model as in LLaMA: attention with four projections, a gated MLP with three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        self.heads, self.norms = width // 64, nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
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

    linears = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    handles = [part.register_forward_hook(partial(hook, f"{path}.weight")) for path, part in linears]
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
        ours = {path: of[name] for path, of in sf.calibration.inputs(model, None, x, of=name).items()}
        for path, sums in hooked(model, x, name == "gram").items():
            scale = float(sums.abs().max())
            torch.testing.assert_close(ours[path].float(), sums, rtol=1e-4, atol=1e-5 * scale)
    return [
        Case("forward alone", lambda: model(x)),
        Case("sparsefn.calibration.inputs, squares", lambda: sf.calibration.inputs(model, None, x, of="square")),
        Case("hooks, squares", lambda: hooked(model, x, False)),
        Case("sparsefn.calibration.inputs, products", lambda: sf.calibration.inputs(model, None, x, of="gram")),
        Case("hooks, products", lambda: hooked(model, x, True)),
    ]


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    sizes = (64, 1, 64) if options.smoke else (512, 2, 1024) if options.quick else (1024, 2, 2048)
    width, layers, tokens = sizes
    tables: list[tuple[str, Callable[..., list[Case]], tuple[int, ...], argparse.Namespace]] = [
        (f"calibration of {layers} blocks, width {width}, {tokens} tokens", calibrated, sizes, options),
    ]
    return {title: compare(title, make(argument, own), own) for title, make, argument, own in tables}


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("pruning", main(chosen), chosen)
