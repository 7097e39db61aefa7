"""The tables of a call: every unit of every tensor is in one chunk, and every segment
has its own numbers.
"""

import pytest
import torch

from sparsefn_kernels import tables
from sparsefn_kernels.tables import Leaf, Tuning

T = Tuning(chunk=16, workers=4, room=2)


def leaf(rows, width, count_at=0, count_step=0):
    scores = torch.zeros(rows, width)
    return Leaf(scores, None, scores > 0, False, scores > 0, count_at, count_step)


def find(starts, x):
    return max(i for i, start in enumerate(starts) if start <= x)


def test_the_chunks_of_rows_cover_each_unit_once():
    leaves = [leaf(2, 40, 0, 1), leaf(1, 16, 2), leaf(3, 1, 3)]
    made = tables.plan(leaves, False, T)
    seen = [torch.zeros_like(leaf.scores) for leaf in leaves]
    for c in range(made.chunks):
        i = find([span.first_chunk for span in made.spans], c)
        row, column = divmod(c - made.spans[i].first_chunk, made.spans[i].row_chunks)
        seen[i][row, column * T.chunk : (column + 1) * T.chunk] += 1
    assert all((part == 1).all() for part in seen)
    assert made.segments == 6 and made.chunks == 2 * 3 + 1 + 3 and made.widest == 48
    assert [(lot.count_at, lot.count_step) for lot in made.lots] == [
        (0, 1),
        (2, 0),
        (3, 0),
    ]
    assert [span.before for span in made.spans] == [0, 0, 0]


def test_a_joint_segment_has_all_tensors_in_order():
    leaves = [leaf(1, 40), leaf(1, 5), leaf(1, 20)]
    made = tables.plan(leaves, True, T)
    assert made.segments == len(made.lots) == 1
    assert made.lots[0].units == 65 and made.lots[0].chunks == made.chunks == 3 + 1 + 2
    assert [span.before for span in made.spans] == [0, 40, 45]
    assert [span.first_chunk for span in made.spans] == [0, 3, 4]


def test_segments_have_workers_and_room_of_their_own():
    made = tables.plan([leaf(2, 640), leaf(1, 64)], False, T)
    assert [lot.workers for lot in made.lots] == [1, 1] and [
        lot.first_worker for lot in made.lots
    ] == [0, 2]
    assert made.workers == 3
    assert [lot.room for lot in made.lots] == [320, 32] and [
        lot.first_near for lot in made.lots
    ] == [0, 640]
    assert made.near == 2 * 320 + 32
    many = tables.plan([leaf(1, 640)], False, T._replace(workers=1000))
    assert many.workers == many.chunks  # no more than there is work for


def test_flags_that_there_are_not_have_no_address():
    (span,) = tables.plan([leaf(1, 4)], False, T).spans
    assert span.allow == 0 and span.deny != 0 and span.out != 0 and span.scores != 0


@pytest.mark.parametrize("many", [1, 2, 3, 4, 5, 8, 54, 1000])
def test_the_halvings_reach_every_row(many):
    last = many - 1
    low = 0
    for b in reversed(range(tables.steps(many))):
        low = low + (1 << b) if low + (1 << b) <= last else low
    assert low == last


def test_memory_that_there_is_not_has_no_address():
    x = torch.ones(3)
    assert tables.address(None) == 0 and tables.address(x[1:]) == x.data_ptr() + 4
