"""Rows of weights that processes deal out: the bits of one process, and errors where
processes do otherwise.
"""

import contextlib
import importlib
from unittest import mock

import pytest
import torch
from nn.distributed.harness import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sparsefn as sf
from sparsefn._engine.processes import own
from sparsefn._engine.selection import per_process
from sparsefn.posttraining.solve import greedy, sparsegpt

by_rows, patterns = sf.distributed.by_rows, sf.patterns
SMALL = 16 * 300  # entries of the smallest part: 16 rows


def layer(rows, columns=300):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2 * columns, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator), x.T @ x


def solves(rows):
    """Solvers of a layer with so many rows, and algorithms."""
    w, h = layer(rows)
    stats = {
        "w": {"count": torch.tensor(600), "square": h.diagonal().double(), "gram": h}
    }
    # its weight is (inputs, outputs)
    stats["conv1d"] = stats["w"] | {"square": stats["w"]["square"][:, None]}
    balanced, kept = patterns.row_balanced(), w.abs() > 0.5
    narrow, square = w[:, :12].contiguous(), h[:12, :12].contiguous()
    yield "obs, a share", lambda: sf.solve.obs(w, h, keep=0.5)
    yield "obs, bfloat16", lambda: sf.solve.obs(w.bfloat16(), h, keep=0.5, block=60)
    yield "obs, 2:4", lambda: sf.solve.obs(w, h, pattern=patterns.nm(2, 4))
    yield "obs, rows", lambda: sf.solve.obs(w, h, pattern=balanced, keep=100, block=300)
    yield (
        "obs, boxes",
        lambda: sf.solve.obs(w, h, pattern=patterns.block((2, 2)), keep=30, block=300),
    )
    yield (
        "obs, columns",
        lambda: sf.solve.obs(w, h, pattern=patterns.row_balanced(1), keep=1),
    )
    yield "obs, a mask", lambda: sf.solve.obs(w, h, mask=kept)
    yield "refit", lambda: (sf.solve.refit(narrow, square, kept[:, :12]),)
    yield (
        "refit, few masks",
        lambda: (sf.solve.refit(narrow, square, kept[:1, :12].expand(rows, 12)),),
    )
    yield (
        "refit, with what is missing",
        lambda: (sf.solve.refit(narrow, square, kept[:, :12], missing=narrow),),
    )
    yield "obs_exact", lambda: sf.solve.obs_exact(narrow, square, 2 * rows)
    yield (
        "obs_exact, 2:4",
        lambda: sf.solve.obs_exact(narrow, square, None, patterns.nm(2, 4)),
    )
    yield "swaps", lambda: (sf.solve.swaps(narrow, square, kept[:, :12]),)
    for pattern in (patterns.block((2, 2)), patterns.channel(0), patterns.channel(1)):
        mask = sf.masks.topk_mask(narrow, 1, pattern=pattern)
        yield (
            f"swaps, {pattern}",
            lambda m=mask, p=pattern: (sf.solve.swaps(narrow, square, m, p),),
        )

    def algorithm(made, w=w, path="w"):
        def run():
            state = made.init({path: w})
            state = made.update(state, {path: torch.zeros_like(w)}, 0)
            return state.params[path], state.masks[path]

        return run

    methods = sf.methods
    yield "magnitude", algorithm(sf.one_shot(0.5, pattern=balanced))
    yield "magnitude of a whole leaf", algorithm(sf.one_shot(0.5))
    yield (
        "magnitude of pairs of rows",
        algorithm(sf.one_shot(0.5, pattern=patterns.channel(0))),
    )
    yield "wanda", algorithm(methods.wanda(0.5, stats, pattern=balanced))
    yield "wanda, 2:4", algorithm(methods.wanda(None, stats, pattern=patterns.nm(2, 4)))
    outputs = patterns.row_balanced(1)
    yield (
        "wanda of a Conv1D",
        algorithm(
            methods.wanda(0.5, stats, pattern=outputs), w.T.contiguous(), "conv1d"
        ),
    )
    both = patterns.nm(2, 4, axis=0)
    yield (
        "wanda of a Conv1D, 2:4",
        algorithm(methods.wanda(None, stats, pattern=both), w.T.contiguous(), "conv1d"),
    )
    yield "ria", algorithm(methods.ria(0.5, stats))
    yield "sparsegpt", algorithm(methods.sparsegpt(0.5, stats))
    yield (
        "sparsegpt of a Conv1D, 2:4",
        algorithm(
            methods.sparsegpt(None, stats, pattern=patterns.nm(2, 4)),
            w.T.contiguous(),
            "conv1d",
        ),
    )
    few = {
        "w": {
            "count": torch.tensor(9),
            "square": square.diagonal().double(),
            "gram": square,
        }
    }
    yield "obs_exact, an algorithm", algorithm(methods.obs(0.5, few, damp=0.1), narrow)


def cases():
    sparsegpt.ENTRIES, greedy.AT_ONCE = (SMALL, SMALL), 12**2 * 4
    importlib.import_module("sparsefn.posttraining.solve.swaps").AT_ONCE = 12**2 * 4

    def has_the_bits_of_one_process(solve):
        alone = solve()
        with by_rows():
            shared = solve()
        return all(
            x.dtype == y.dtype and torch.equal(x, y)
            for x, y in zip(alone, shared, strict=True)
        )

    def one(solve):
        assert has_the_bits_of_one_process(solve)

    for rows in (2, 40, 61):
        for name, solve in solves(rows):
            yield f"{name}, {rows} rows", lambda solve=solve: one(solve)

    def shards_are_left_as_they_are():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        w = layer(40)[0]
        algorithm = sf.one_shot(0.5, pattern=patterns.row_balanced())
        alone = algorithm.update(start := algorithm.init({"w": w}), start.params, 0)
        with by_rows():
            start = algorithm.init({"w": distribute_tensor(w, mesh, [Shard(0)])})
            both = algorithm.update(start, start.params, 0)
        assert torch.equal(both.masks["w"].full_tensor(), alone.masks["w"])

    yield "shards", shards_are_left_as_they_are

    def rows_off_by_one_are_noticed():
        for name, solve in solves(64):
            if name in ("obs, 2:4", "obs, a share", "obs_exact", "wanda"):
                with contextlib.ExitStack() as stack:
                    for module in (sparsegpt, greedy, per_process):
                        stack.enter_context(
                            mock.patch.object(module, "own", off_by_one)
                        )
                    assert not has_the_bits_of_one_process(solve), name

    yield "off by one", rows_off_by_one_are_noticed


def off_by_one(n):
    part = own(n)
    return range(part.start - 1, part.stop - 1) if part.start else part


def test_one_process_has_all_rows():
    w, h = layer(4, 12)
    with by_rows():
        shared = sf.solve.obs(w, h, keep=0.5)
    assert all(map(torch.equal, shared, sf.solve.obs(w, h, keep=0.5)))


@pytest.mark.parametrize("count", [2, 3])
def test_the_bits_are_those_of_one_process(count):
    on_ranks(count, cases)
