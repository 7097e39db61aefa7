"""Scores of a competition are read block by block, in shares for threads."""

import numpy as np
import pytest
import torch

from sparsefn._engine.leaves import buffers
from sparsefn._engine.selection import block_passes, entries


def arrays(*fields, absolute=False):
    (at,) = entries.arrays([entries.Entry(*fields, absolute=absolute)])
    return at


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("absolute", [False, True])
def test_blocks_are_the_scores_in_their_order(dtype, absolute):
    x = torch.randn(buffers.BLOCK + 3).to(dtype)
    scratch = block_passes.Scratch(buffers.BLOCK, dtype == torch.float64)
    read = [
        (start, stop, scores.copy())
        for start, stop, scores, _, _ in scratch.blocks(arrays(x, absolute=absolute))
    ]
    assert [row[:2] for row in read] == [
        (0, buffers.BLOCK),
        (buffers.BLOCK, buffers.BLOCK + 3),
    ]
    want = x.double().abs() if absolute else x.double()
    assert np.array_equal(np.concatenate([row[2] for row in read]), want.numpy())


def test_float32_beside_float64_is_widened():
    scratch = block_passes.Scratch(3, True)
    ((_, _, scores, _, _),) = scratch.blocks(arrays(torch.tensor([1.0, 2.0, 3.0])))
    assert scores.dtype == np.float64 and scores.tolist() == [1.0, 2.0, 3.0]


def test_buffers_are_as_wide_as_the_widest_scores():
    narrow, wide = (
        arrays(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)
    )
    assert [
        block_passes.work_on(some).double for some in ([narrow], [wide], [narrow, wide])
    ] == [
        False,
        True,
        True,
    ]
    assert block_passes.work_on([]).run(lambda at, scratch: 1) == []


@pytest.mark.parametrize("allow", [None, torch.tensor([True, True, False, False])])
@pytest.mark.parametrize("deny", [None, torch.tensor([True, False, True, False])])
def test_which_units_compete(allow, deny):
    at = arrays(torch.zeros(4), allow, deny)
    want = (torch.ones(4) > 0 if allow is None else allow) & (
        torch.ones(4) > 0 if deny is None else ~deny
    )
    assert entries.open_count([at]) == int(want.sum())
    flags = entries.eligible(at.allow, at.deny)
    assert flags is None if allow is deny is None else flags.tolist() == want.tolist()
    flags = np.ones(3, bool)
    block_passes.bar(at, 1, 4, flags)
    assert flags.tolist() == want[1:].tolist()


@pytest.mark.parametrize("sizes", [[10], [3, 3, 4], [1, 0, 9], [9, 1], [0], []])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_shares_hold_every_score_once_and_in_order(sizes, threads, monkeypatch):
    monkeypatch.setattr(block_passes, "_THREADED", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = list(torch.arange(float(sum(sizes))).split(sizes))
        work = block_passes.work_on([arrays(x) for x in tensors])
    finally:
        torch.set_num_threads(before)
    assert len(work.shares) == max(1, min(threads, sum(sizes)))
    seen = [at.wide for share in work.shares for at in share]
    assert np.concatenate([*seen, []]).tolist() == list(range(sum(sizes)))
    loads = [sum(at.out.size for at in share) for share in work.shares]
    assert max(loads) <= -(-sum(sizes) // threads) or not sum(sizes)
