"""Talks over processes: alone, in step, over the rows and columns of a grid, and with errors."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sparsefn.engine import talks
from sparsefn.engine.talks import Gather, Sum, agree, agreement, alone, together

DTYPES = (np.float32, np.float64, np.int64)


def told(rank, dtype=np.float64, steps=3):
    """All that a talk of one process is told, step by step."""
    heard = []
    for step in range(steps):
        heard.append((yield Sum([rank, 10 * step])).tolist())
        if step % 2 == 0:
            heard.append((yield Gather(np.full(rank + step, rank, dtype))))
    return heard


def test_alone_everything_is_ones_own():
    first, values, second = alone(told(3, steps=2))
    assert first == [3, 0] and second == [3, 10]
    assert values.dtype == np.float64 and values.tolist() == [3.0] * 3
    assert [[len(x) for x in heard] for heard in together([((), told(3, steps=2)), ((), told(0, steps=0))])] == [
        [2, 3, 2],
        [],
    ]


def test_nothing_is_told_about_nothing():
    assert together([]) == []
    agree(())
    with agreement(()):
        pass
    with pytest.raises(KeyError), agreement(()):
        raise KeyError


def run(rank: int, folder: str) -> None:
    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=4)
    # A grid of two rows and two columns, in which every process has names of its own for its row and its column.
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row, column, world = rows[rank // 2].group_name, columns[rank % 2].group_name, dist.group.WORLD.group_name

    asked = [((row,), told(rank, dtype)) for dtype in DTYPES]
    asked += [((row, column), told(rank, dtype)) for dtype in DTYPES] + [
        ((), told(rank)),
        ((world,), told(rank, steps=1)),
    ]
    sent: dict[str, int] = {}
    for name in ("all_reduce", "all_gather_into_tensor"):

        def counted(*args, name=name, send=getattr(dist, name), **options):
            sent[name] = sent.get(name, 0) + 1
            return send(*args, **options)

        setattr(dist, name, counted)
    results = together(asked)
    # Three sums for each of two groups, one of them alone and with the other, and one for the world; and two exchanges.
    # Steps are alike for all dtypes. Sizes are summed where values are exchanged. All of it begins with `agree`.
    assert sent == {"all_reduce": 3 + 5 + 2 * 5 + 2, "all_gather_into_tensor": 2 + 2 * 2 + 1}, sent
    for i, heard in enumerate(results):
        members = [2 * (rank // 2), 2 * (rank // 2) + 1] if i < 3 else [rank] if i == 6 else [0, 1, 2, 3]
        gathered = [values for values in heard if isinstance(values, np.ndarray)]
        assert [one for one in heard if isinstance(one, list)] == [
            [sum(members), 10 * step * len(members)] for step in range(1 if i == 7 else 3)
        ]
        for step, values in zip((0, 2), gathered, strict=i != 7):
            assert values.dtype == (DTYPES[i % 3] if i < 6 else np.float64)
            assert values.tolist() == [member for member in members for _ in range(member + step)], (i, members, values)
    assert talks.is_first([row]) == (rank % 2 == 0) and talks.is_first([row, column]) == (rank == 0)

    # An error of one process is raised on all of the grid, in place of an exchange too, and is told once.
    before = time.monotonic()
    for fails in (3, 0):
        sent.clear()
        error, text = (ValueError, "mine") if rank == fails else (RuntimeError, "another")
        with pytest.raises(error, match=text), agreement((row, column)), agreement((row, column)):
            if rank == fails:
                raise ValueError("mine")
            together([((row, column), told(rank))])
        assert sent == {"all_reduce": 2}
    with pytest.raises((ValueError, RuntimeError)), agreement((row, column)):  # the other row hears of it, too
        with agreement((row,)):
            if rank == 2:
                raise ValueError("mine")
        together([((row, column), told(rank))])
    with agreement((row, column)):
        together([((row,), told(rank))])
    assert time.monotonic() - before < 20
    dist.barrier()
    dist.destroy_process_group()


def test_four_processes(tmp_path):
    torch.multiprocessing.spawn(run, (str(tmp_path),), nprocs=4)
