"""Counts of DTensors are those of the whole, and the same on every process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sparsefn as sf
from sparsefn.engine.shards import is_sharded, whole


def states():
    """Two states of plain tensors: leaves of which some shards are uneven or empty, and a dense one."""
    shapes = {"a": (7, 5, 3), "b": (1, 9), "c": (12,), "bias": (5,)}
    params = {path: torch.ones(shape) for path, shape in shapes.items()}
    for seed in (0, 1):
        draws = torch.Generator().manual_seed(seed)
        masks = {path: torch.rand(shapes[path], generator=draws) < 0.3 for path in ("a", "b", "c")}
        masks["a"][2] = masks["c"][3] = False
        yield sf.State(params, {**masks, "bias": torch.tensor(True)})


def numbers(old, new):
    """Everything that counts."""
    seen = sf.masks.explored(sf.masks.explored(None, old), new)
    return {
        "kept": (sf.masks.n_kept(new.masks), sf.masks.n_kept(new.masks, new.params)),
        "sparsity": (sf.masks.sparsity(new.masks), sf.masks.sparsity(new.masks, new.params)),
        "hamming": sf.masks.hamming(old.masks, new.masks),
        "summary": sf.report.summary(new),
        "changed": sf.report.changed(old, new),
        "observe": sf.report.observe(new),
        "scalars": sf.report.scalars(new, old),
        "itop": sf.report.itop(seen, new.params),
    }


def run(rank: int, folder: str, wanted: dict[str, object]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Shard(0), Shard(1)]):

        def laid(x, placement=placements[0], other=placements[-1]):
            if not x.ndim:
                return x
            fits = placement if placement.is_replicate() or placement.dim < x.ndim else other
            fits = fits if fits.is_replicate() or fits.dim < x.ndim else Replicate()
            return distribute_tensor(x, mesh, [fits])

        found = numbers(
            *(sf.State(*({k: laid(x) for k, x in tree.items()} for tree in state[:2])) for state in states())
        )
        for name, value in wanted.items():
            assert found[name] == value, (placements, name, found[name], value)

    messages = []
    send = dist._functional_collectives.all_reduce
    dist._functional_collectives.all_reduce = lambda *args, **options: messages.append(args) or send(*args, **options)
    many = [distribute_tensor(torch.ones(6, 2) > 0, mesh, [Shard(0)]) for _ in range(50)]
    assert sf.masks.n_kept(many) == 600
    assert len(messages) == 1, "one message for all leaves"
    dist.barrier()
    dist.destroy_process_group()


def test_counts_are_of_the_whole(tmp_path):
    torch.multiprocessing.spawn(run, (str(tmp_path), numbers(*states())), nprocs=2)


def test_plain_tensors_are_handed_on():
    given = [torch.tensor(1), torch.ones(3)]
    assert all(a is b for a, b in zip(whole(given), given, strict=True))
    assert not is_sharded(given[0])


@pytest.mark.parametrize("transform", [torch.vmap, lambda fn: torch.compile(fn, backend="eager", fullgraph=True)])
def test_counts_under_transforms(transform):
    masks = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(transform(lambda mask: whole([mask.sum()])[0])(masks).sum(), masks.sum())
