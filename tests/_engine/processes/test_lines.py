"""The way to the processes of some groups."""

import numpy as np
import torch.distributed as dist

from sparsefn._engine.processes.lines import Line, board, group_of, is_first
from tests.nn.distributed.harness import on_ranks


def on_a_grid():
    """Cases on two rows and two columns of processes."""
    rank = dist.get_rank()
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row, column = rows[rank // 2].group_name, columns[rank % 2].group_name

    def first():
        assert is_first([row]) == (rank % 2 == 0) and is_first([row, column]) == (
            rank == 0
        )
        assert group_of(row) is rows[rank // 2]

    def line():
        line = Line((row, column))
        assert (line.size, line.place) == (4, rank)
        assert line.total(np.array([rank, 1])).tolist() == [6, 4]
        assert line.blocks(np.full(2, rank, np.uint8)).tolist() == [
            [i, i] for i in range(4)
        ]
        sizes = np.arange(4)
        assert [
            x.tolist() for x in line.messages(np.full(rank, rank, np.uint8), sizes)
        ] == [[i] * i for i in range(4)]

    def texts():
        said = [b"a" * n for n in (3, 0, 1, 2)]
        assert Line((row, column)).texts(said[rank]) == said

    def notes():
        board().set(f"note {rank}", "here")
        dist.barrier()
        assert all(board().get(f"note {other}") == b"here" for other in range(4))

    yield "the first process", first
    yield "a line", line
    yield "texts", texts
    yield "notes", notes


def test_a_line_of_nobody_else():
    line = Line(())
    assert (line.size, line.place) == (1, 0)
    assert line.blocks(np.ones(2, np.uint8)).tolist() == [[1, 1]]


def test_four_processes():
    on_ranks(4, on_a_grid)
