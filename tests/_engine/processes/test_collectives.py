"""Exchanges of processes: alone, in step, and over the rows and columns of a grid."""

import numpy as np

from sparsefn._engine.processes.collectives import Gather, Sum, alone, in_step
from sparsefn._engine.processes.lines import GATHER
from tests.nn.distributed.harness import grid_of_four, on_ranks

DTYPES = (np.float32, np.float64, np.int64)


def told(rank, dtype=np.float64, steps=3):
    """All that an exchange of one process is told, step by step."""
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
    assert [
        [len(x) for x in heard]
        for heard in in_step([((), told(3, steps=2)), ((), told(0, steps=0))])
    ] == [
        [2, 3, 2],
        [],
    ]


def test_nothing_is_told_about_nothing():
    assert in_step([]) == []


def on_a_grid():
    """Cases on two rows and two columns of processes, where each has names of its own
    for its row and its column.
    """
    rank, row, column, world, sent = grid_of_four("all_reduce", GATHER)

    def all_in_step():
        sent.clear()
        asked = [((row,), told(rank, dtype)) for dtype in DTYPES]
        asked += [((row, column), told(rank, dtype)) for dtype in DTYPES]
        results = in_step([*asked, ((), told(rank)), ((world,), told(rank, steps=1))])
        # `agree` over three groups; the row's five steps; as many over rows and
        # columns; and the two of the world.
        assert sent == {"all_reduce": 5 + 2 * 5 + 2, GATHER: 3 + 2 + 2 * 2 + 1}, sent
        for i, heard in enumerate(results):
            members = (
                [2 * (rank // 2), 2 * (rank // 2) + 1]
                if i < 3
                else [rank]
                if i == 6
                else [0, 1, 2, 3]
            )
            sums, gathered = (
                [x for x in heard if isinstance(x, kind)] for kind in (list, np.ndarray)
            )
            assert sums == [
                [sum(members), 10 * step * len(members)]
                for step in range(1 if i == 7 else 3)
            ]
            for step, values in zip((0, 2), gathered, strict=i != 7):
                assert values.dtype == (DTYPES[i % 3] if i < 6 else np.float64)
                assert values.tolist() == [
                    member for member in members for _ in range(member + step)
                ]

    yield "exchanges in step", all_in_step


def test_four_processes():
    on_ranks(4, on_a_grid)
