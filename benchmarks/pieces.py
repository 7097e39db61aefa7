"""What single pieces cost: masks of 2 in 4, random numbers, masks in bits, sparse
layers, the import of the library.

    python benchmarks/pieces.py
    python benchmarks/pieces.py --quick

A floor is one comparison of all scores with a known threshold, into a fresh bool mask.
Masks are held against those of the peers, compiled results against eager ones, sparse
layers against the masked dense layer.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from _timing import Case, Row, call, compare, options_of, row, show, write
from torch import Tensor, nn
from torch.ao.pruning import WeightNormSparsifier

import sparsefn as sf

IMPORTS = """
import time
first = time.perf_counter()
import torch, optree
second = time.perf_counter()
import sparsefn
print(second - first, time.perf_counter() - second)
"""


def compiled(
    run: Callable[[Tensor], Tensor], x: Tensor, options: argparse.Namespace
) -> Callable[[Tensor], Tensor]:
    """The function in one graph, compiled by inductor for this argument, with the same
    result.
    """
    torch.compiler.reset()
    fast = torch.compile(
        run, fullgraph=True, backend="aot_eager" if options.smoke else "inductor"
    )
    start = time.perf_counter()
    same = torch.equal(fast(x), run(x))
    print(f"\ncompiled in {time.perf_counter() - start:.1f} s")
    if not same:
        raise AssertionError("compiled results differ")
    return fast


def two_of_four(size: int, options: argparse.Namespace) -> list[Case]:
    """2:4 by magnitude on a square matrix."""
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    scores, pattern = weight.abs(), sf.patterns.nm(2, 4)
    sparsifier = WeightNormSparsifier(
        sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2
    )
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    module[0].weight = nn.Parameter(weight.clone())
    sparsifier.prepare(module, [{"tensor_fqn": "0.weight"}])

    def ours(scores: Tensor) -> Tensor:
        return sf.masks.topk_mask(scores, None, pattern=pattern)

    def by_four() -> Tensor:
        best = torch.topk(scores.reshape(-1, 4), 2, dim=1).indices
        mask = torch.zeros(weight.numel() // 4, 4, dtype=torch.bool)
        return mask.scatter_(1, best, True).reshape(weight.shape)

    fast = compiled(ours, scores, options)
    sparsifier.step()
    theirs = {
        "torch.topk": by_four(),
        "torch.ao": module[0].parametrizations.weight[0].mask != 0,
    }
    for name, mask in theirs.items():
        # Where the second and third of four tie, either may be kept: then as many and
        # as large ones are.
        best = [
            (scores * m).reshape(-1, 4).sort(-1).values for m in (ours(scores), mask)
        ]
        if not torch.equal(*best):
            raise AssertionError(f"2:4 of {name} differs")
    return [
        Case("floor: scores > t", lambda: scores > 0.67),
        Case("sparsefn.topk_mask, nm(2, 4)", lambda: ours(scores)),
        Case("sparsefn.topk_mask, nm(2, 4), compiled", lambda: fast(scores)),
        Case("torch.topk of rows of 4, scatter", by_four),
        Case("torch.ao WeightNormSparsifier", sparsifier.step),
    ]


def drawn(n: int, options: argparse.Namespace) -> list[Case]:
    """Uniform numbers: torch's from its global state, ours from a key."""
    key = sf.random.key(0)
    fast = compiled(lambda key: sf.random.uniform(key, (n,)), key, options)
    return [
        Case("torch.rand", lambda: torch.rand(n)),
        Case("sparsefn.core.random.uniform", lambda: sf.random.uniform(key, (n,))),
        Case("sparsefn.core.random.uniform, compiled", lambda: fast(key)),
    ]


def packed(n: int, options: argparse.Namespace) -> list[Case]:
    """A mask into bits and back."""
    scores = torch.rand(n, generator=torch.Generator().manual_seed(0))
    mask = {"w": scores > 0.9}
    small = sf.masks.pack(mask)
    if small["w"].nbytes != -(-n // 8) or not torch.equal(
        sf.masks.unpack(small, mask)["w"], mask["w"]
    ):
        raise AssertionError("a packed mask comes back another")
    return [
        Case("floor: scores > t", lambda: scores > 0.9),
        Case(
            "sparsefn.masks.pack, unpack",
            lambda: sf.masks.unpack(sf.masks.pack(mask), mask),
        ),
        Case("sparsefn.masks.pack", lambda: sf.masks.pack(mask)),
        Case("sparsefn.masks.unpack", lambda: sf.masks.unpack(small, mask)),
    ]


def multiplied(size: int, options: argparse.Namespace) -> list[Case]:
    """A linear layer with 95% zeros, single ones or in blocks of 16 x 16, on a batch of
    256, for inference.
    """
    x, cases = (
        torch.randn(min(256, size), size, generator=torch.Generator().manual_seed(1)),
        [],
    )
    torch.manual_seed(0)
    layer = nn.Linear(size, size)
    params = sf.modules.params_of(layer)
    kinds = {
        "dense": sf.patterns.unstructured(),
        "csr": sf.patterns.unstructured(),
        "bsr": sf.patterns.block((16, 16)),
    }
    for layout, pattern in kinds.items():
        state = sf.static(0.95, where="weight", pattern=pattern, init="magnitude").init(
            params
        )
        fast = sf.modules.to_sparse(layer, state, layout)

        def run(fast: nn.Module = fast) -> Tensor:
            with torch.inference_mode():
                return fast(x)

        name = "bsr, blocks of 16 x 16" if layout == "bsr" else layout
        cases.append(Case(name, run))
        torch.testing.assert_close(
            call(cases[-1]), sf.modules.call(layer, state, x), rtol=1e-4, atol=1e-5
        )
    return cases


def imported(title: str, options: argparse.Namespace) -> list[Row]:
    """The import of the library in fresh processes that have torch and optree
    already.
    """
    # As after an installation: modules are compiled, by a run that does not count if
    # need be.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONDONTWRITEBYTECODE"
    }
    command, taken = [sys.executable, "-c", IMPORTS], []
    for _ in range(1 + min(options.rounds, 9)):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
        taken.append(tuple(map(float, done.stdout.split())))
    before, ours = zip(*taken[1:], strict=True)
    rows = [
        row("import torch, optree", before, before),
        row("import sparsefn, after them", ours, before),
    ]
    show(f"{title} ({len(ours)} fresh processes)", rows)
    return rows


def main(options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every table."""
    size, n, side = (
        (64, 10**4, 64)
        if options.smoke
        else (1024, 10**6, 1024)
        if options.quick
        else (4096, 0, 2048)
    )
    n = n or 25_000_000
    count = f"{n:.3g}".replace("e+0", "e")
    tables: list[tuple[str, Callable[..., list[Case]], int, int]] = [
        (f"2:4 of {size} x {size}", two_of_four, size, size * size),
        (f"{count} uniform numbers", drawn, n, n),
        (f"a mask of {count} in bits", packed, n, n),
        (f"Linear({side}, {side}), 95% zeros", multiplied, side, 0),
    ]
    done = {}
    for title, make, argument, weights in tables:
        done[title] = compare(title, make(argument, options), options, weights)
    done["import"] = imported("import", options)
    return done


if __name__ == "__main__":
    chosen = options_of(__doc__)
    write("pieces", main(chosen), chosen)
