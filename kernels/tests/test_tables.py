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
        i = find(made.spans.first_chunk, c)
        first, row_chunks = made.spans.first_chunk[i], made.spans.row_chunks[i]
        row, column = divmod(int(c - first), int(row_chunks))
        seen[i][row, column * T.chunk : (column + 1) * T.chunk] += 1
    assert all((part == 1).all() for part in seen)
    assert made.segments == 6 and made.chunks == 2 * 3 + 1 + 3 and made.widest == 48
    assert made.lots.count_at.tolist() == [0, 2, 3]
    assert made.lots.count_step.tolist() == [1, 0, 0]
    assert made.spans.before.tolist() == [0, 0, 0]


def test_a_joint_segment_has_all_tensors_in_order():
    leaves = [leaf(1, 40), leaf(1, 5), leaf(1, 20)]
    made = tables.plan(leaves, True, T)
    assert made.segments == 1 and all(len(column) == 1 for column in made.lots)
    assert made.lots.units[0] == 65 and made.lots.chunks[0] == made.chunks == 3 + 1 + 2
    assert made.spans.before.tolist() == [0, 40, 45]
    assert made.spans.first_chunk.tolist() == [0, 3, 4]


def test_segments_have_workers_and_room_of_their_own():
    made = tables.plan([leaf(2, 640), leaf(1, 64)], False, T)
    assert made.lots.workers.tolist() == [1, 1]
    assert made.lots.first_worker.tolist() == [0, 2]
    assert made.workers == 3
    assert made.lots.room.tolist() == [320, 32]
    assert made.lots.first_near.tolist() == [0, 640]
    assert made.near == 2 * 320 + 32
    many = tables.plan([leaf(1, 640)], False, T._replace(workers=1000))
    assert many.workers == many.chunks  # no more than there is work for


def test_flags_that_there_are_not_have_no_address():
    spans = tables.plan([leaf(1, 4)], False, T).spans
    assert spans.allow == [0]
    assert all(column != [0] for column in (spans.deny, spans.out, spans.scores))


@pytest.mark.parametrize("many", [1, 2, 3, 4, 5, 8, 54, 1000])
def test_the_halvings_reach_every_row(many):
    last = many - 1
    low = 0
    for b in reversed(range(tables.steps(many))):
        low = low + (1 << b) if low + (1 << b) <= last else low
    assert low == last


def test_memory_that_there_is_not_has_no_address():
    x = torch.ones(3)
    assert tables.addresses([None, x[1:]]).tolist() == [0, x.data_ptr() + 4]
