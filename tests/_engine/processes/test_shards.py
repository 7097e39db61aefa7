"""Counts of DTensors are those of the whole; parts, draws, sums and alignments fit the
whole on every process.
"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import sparsefn as sf
from sparsefn._engine.processes.alignment import alignment_of, realigned
from sparsefn._engine.processes.shards import (
    extent_of,
    full_tensors,
    is_sharded,
    local_tensor,
    localized,
    sharded_like,
)
from sparsefn._engine.sums.exact_sums import sums
from tests.nn.distributed.harness import Cases, on_ranks


def states():
    """Two states of plain tensors: leaves of which some shards are uneven or empty, and
    a dense one.
    """
    shapes = {"a": (7, 5, 3), "b": (1, 9), "c": (12,), "bias": (5,)}
    params = {path: torch.ones(shape) for path, shape in shapes.items()}
    for seed in (0, 1):
        draws = torch.Generator().manual_seed(seed)
        masks = {
            path: torch.rand(shapes[path], generator=draws) < 0.3
            for path in ("a", "b", "c")
        }
        masks["a"][2] = masks["c"][3] = False
        yield sf.State(params, {**masks, "bias": torch.tensor(True)})


def numbers(old, new):
    """Everything that counts."""
    seen = sf.masks.explored(sf.masks.explored(None, old), new)
    return {
        "kept": (sf.masks.n_kept(new.masks), sf.masks.n_kept(new.masks, new.params)),
        "sparsity": (
            sf.masks.sparsity(new.masks),
            sf.masks.sparsity(new.masks, new.params),
        ),
        "hamming": sf.masks.hamming(old.masks, new.masks),
        "summary": sf.report.summary(new),
        "changed": sf.report.changed(old, new),
        "observe": sf.report.observe(new),
        "scalars": sf.report.scalars(new, old),
        "itop": sf.report.itop(seen, new.params),
    }


def two_ranks() -> Cases:
    yield "counts", check_counts


def check_counts() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    wanted = numbers(*states())
    mesh = init_device_mesh("cpu", (2,))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Shard(0), Shard(1)]):

        def laid(x, placement=placements[0], other=placements[-1]):
            if not x.ndim:
                return x
            fits = (
                placement
                if placement.is_replicate() or placement.dim < x.ndim
                else other
            )
            fits = fits if fits.is_replicate() or fits.dim < x.ndim else Replicate()
            return distribute_tensor(x, mesh, [fits])

        found = numbers(
            *(
                sf.State(*({k: laid(x) for k, x in tree.items()} for tree in state[:2]))
                for state in states()
            )
        )
        for name, value in wanted.items():
            assert found[name] == value, (placements, name, found[name], value)

    messages = []
    send = dist._functional_collectives.all_reduce
    dist._functional_collectives.all_reduce = lambda *args, **options: (
        messages.append(args) or send(*args, **options)
    )
    many = [
        distribute_tensor(torch.ones(6, 2) > 0, mesh, [Shard(0)]) for _ in range(50)
    ]
    assert sf.masks.n_kept(many) == 600
    assert len(messages) == 1, "one message for all leaves"


def test_counts_are_of_the_whole():
    on_ranks(2, two_ranks)


def four_ranks() -> Cases:
    yield "meshes", check_meshes


def check_meshes() -> None:
    """What four processes hold, draw, sum and move on meshes of one and two
    dimensions.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = [(line, [p]) for p in (Shard(0), Shard(1), Replicate())]
    layouts += [
        (grid, list(pair))
        for pair in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)
    ]
    layouts += [
        (grid, [_StridedShard(dim, split_factor=2), Shard(dim)]) for dim in (0, 1)
    ]
    sent = []
    send = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **options: (
        sent.append(args) or send(*args, **options)
    )
    for mesh, placements in layouts:
        seen = []
        for shape in ((37, 24), (40,), (3, 8), (5, 7, 3)):
            if any(getattr(p, "dim", 0) >= len(shape) for p in placements):
                continue
            size, start = compute_local_shape_and_global_offset(shape, mesh, placements)
            whole_draw = sf.random.normal(sf.random.key(1), shape)
            part = box(whole_draw, start, size).contiguous()
            x = DTensor.from_local(
                part,
                mesh,
                placements,
                run_check=False,
                shape=shape,
                stride=whole_draw.stride(),
            )
            extent = extent_of(x)
            assert (extent.shape, extent.start, extent.size) == (shape, start, size), (
                placements,
                extent,
            )
            assert len(extent.groups) == sum(not p.is_replicate() for p in placements)
            again = sharded_like(local_tensor(x), x)
            assert (again.shape, again.placements, again.stride()) == (
                x.shape,
                x.placements,
                x.stride(),
            )
            assert torch.equal(local_tensor(again), part)
            check_draws(x, whole_draw)
            # an operation on a DTensor takes a tenth of a second the first time
            flags = sharded_like(local_tensor(x) > 0, x)
            (total,) = sums([x], [flags])
            assert float(total) == math.fsum(whole_draw[whole_draw > 0].tolist())
            for cell in (
                (4, 4, 2),
                (16, 8, 1),
                (1, shape[-1], 3),
                (shape[0], 1, 1),
                (1, 1, 1),
            ):
                for y in (x, flags, sharded_like(local_tensor(x).bfloat16(), x)):
                    alignment = alignment_of(y, cell[: len(shape)])
                    full = {torch.bool: whole_draw > 0}.get(
                        y.dtype, whole_draw.to(y.dtype)
                    )
                    seen.append(
                        (
                            local_tensor(y),
                            alignment,
                            box(full, alignment.box.start, alignment.box.size),
                        )
                    )
                    ends = zip(
                        alignment.box.start,
                        alignment.box.size,
                        cell,
                        shape,
                        strict=False,
                    )
                    assert all(
                        at % c == 0 or at == n
                        for a, k, c, n in ends
                        for at in (a, a + k)
                    )
        split = sum(not p.is_replicate() for p in placements)
        parts, alignments, wanted = map(list, zip(*seen, strict=True))
        sent.clear()
        there = realigned(parts, alignments)
        assert len(sent) == split, "one message a group for all tensors"
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype
            for a, b in zip(there, wanted, strict=True)
        )
        back = realigned(there, alignments, back=True)
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype
            for a, b in zip(back, parts, strict=True)
        )
        sent.clear()
        fits = [i for i, alignment in enumerate(alignments) if not alignment.moves]
        stayed = realigned([parts[i] for i in fits], [alignments[i] for i in fits])
        assert all(y is parts[i] for y, i in zip(stayed, fits, strict=True))
        assert not sent

    def laid(part, placements, shape=(4, 2)):
        return DTensor.from_local(
            part, grid, placements, run_check=False, shape=shape, stride=(2, 1)
        )

    refused = [
        (
            laid(torch.ones(2, 2), [Partial(), Shard(0)]),
            "expected a DTensor of shards or replicas, got one of shape",
        ),
        (
            laid(torch.ones(2, 2), [_StridedShard(0, split_factor=2), Replicate()]),
            r"got one of shape \(4, 2\) with placements .*, whose parts are no boxes",
        ),
        (
            laid(torch.ones(3, 2), [Replicate(), Shard(0)]),
            r"expected a DTensor cut as torch.chunk cuts, on rank \d a part of shape "
            r"\(2, 2\), got a part of shape "
            r"\(3, 2\)",
        ),
    ]
    for x, text in refused:
        for use in (
            extent_of,
            lambda x: alignment_of(x, (1, 1)),
            lambda x: sf.random.uniform_like(sf.random.key(0), x),
        ):
            with pytest.raises(ValueError, match=text):
                use(x)
    fine = laid(torch.ones(2, 2), [Replicate(), Shard(0)])
    with pytest.raises(
        ValueError,
        match=r"expected a key of shape \(2,\) for a draw like a DTensor, got \(3, 2\)",
    ):
        sf.random.normal_like(sf.random.split(sf.random.key(0), 3), fine)
    with pytest.raises(
        ValueError,
        match="expected a DTensor of probabilities without an index and without "
        "another",
    ):
        sf.random.bernoulli(sf.random.key(0), fine, (3, 4, 2))


def check_draws(x, values) -> None:
    """Each part of a draw is the slice of the whole draw, and no process makes more
    than its part.
    """
    extent, key = extent_of(x), sf.random.key(5)
    chances = sharded_like(local_tensor(x).clamp(0, 1), x)
    made = []

    class Sizes(TorchFunctionMode):
        def __torch_function__(self, fn, types, args=(), kwargs=None):
            out = fn(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not is_sharded(out):
                made.append(out.numel())
            return out

    with Sizes():
        found = [
            sf.random.uniform_like(key, x),
            sf.random.normal_like(key, x, torch.bfloat16),
            sf.random.bernoulli(key, chances),
        ]
        score = sf.scores.random(sf.State({"w": x}, (), key=key), (), 3)["w"]
    assert max(made) <= max(local_tensor(x).numel(), 2), "a key has two numbers"
    wanted = [
        sf.random.uniform(key, values.shape),
        sf.random.normal(key, values.shape, torch.bfloat16),
        sf.random.bernoulli(key, values.clamp(0, 1)),
        sf.random.uniform(sf.random.leaf_key(key, "w", 3), values.shape),
    ]
    for got, want in zip([*found, score], wanted, strict=True):
        assert got.placements == x.placements and got.dtype == want.dtype
        assert torch.equal(local_tensor(got), box(want, extent.start, extent.size))


def box(x, start, size):
    return x[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]


def test_parts_draws_sums_and_seats_on_meshes():
    on_ranks(4, four_ranks)


def test_plain_tensors_are_handed_on():
    given = [torch.tensor(1), torch.ones(3)]
    assert all(a is b for a, b in zip(full_tensors(given), given, strict=True))
    assert not is_sharded(given[0])


@pytest.mark.parametrize(
    "transform",
    [torch.vmap, lambda fn: torch.compile(fn, backend="eager", fullgraph=True)],
)
def test_counts_under_transforms(transform):
    masks = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(
        transform(lambda mask: full_tensors([mask.sum()])[0])(masks).sum(), masks.sum()
    )


def test_plain_rows_are_handed_on():
    rows = [(torch.ones(2), torch.zeros(2))]
    found, rebuild = localized(rows, tuple)
    assert found is rows and rebuild is tuple
