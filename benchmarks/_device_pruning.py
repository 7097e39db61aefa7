"""Pruning with data on an accelerator: SparseGPT of one layer, and a model block after
block.
"""

from typing import Any

import torch
from _device import OFF, Bench
from _loops import METHODS
from _models import Transformer

import sparsefn as sf

CHUNK = 4  # windows at a time


def solvers(b: Bench) -> None:
    """SparseGPT of square layers."""
    b.begin("solve.obs")
    for side in (32,) if b.smoke else (2048, 4096):
        weight = torch.randn(side, side, device=b.device)
        inputs = torch.randn(2 * side, side, device=b.device)
        hessian = inputs.T @ inputs
        calls: dict[str, dict[str, Any]] = {
            "half kept": {"keep": 0.5},
            "2:4": {"pattern": sf.patterns.nm(2, 4)},
            "4:8": {"pattern": sf.patterns.nm(4, 8)},
            "a mask": {"mask": weight > 0},
        }
        for name, options in calls.items():
            for way in b.ways():
                b.time(
                    f"{side} x {side}, {name}",
                    way,
                    lambda w=weight, h=hessian, o=options: sf.solve.obs(w, h, **o),
                )
        b.tidy()


def in_order(b: Bench) -> None:
    """A Transformer pruned block after block."""
    width, layers, windows, length = (16, 2, 4, 8) if b.smoke else (2048, 8, 32, 512)
    b.begin(f"in_order, {layers} blocks of width {width}, {windows} windows")
    dtype = torch.float32 if b.device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    model = Transformer(width, layers).to(b.device, dtype).eval().requires_grad_(False)
    words = torch.randint(128, (windows, length)).to(b.device)
    blocks = [f"layers.{i}.*" for i in range(layers)]

    def forward() -> None:
        with torch.no_grad():
            for some in words.split(CHUNK):
                model(some)

    b.time("a forward pass", OFF, forward)
    for name, (prune, of) in METHODS.items():
        for way in b.ways():
            b.time(
                name,
                way,
                lambda prune=prune, of=of: sf.calibration.in_order(
                    model, None, blocks, prune, words, of=of, chunk_size=CHUNK
                ),
            )
    b.tidy()
