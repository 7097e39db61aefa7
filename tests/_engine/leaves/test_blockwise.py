"""Rows of flat arrays: which memory may be read, what is new, and that kernels get
every block.
"""

import numpy as np
import pytest
import torch

from sparsefn._engine.leaves import blockwise
from sparsefn._engine.leaves.buffers import BLOCK


def test_every_block_reaches_a_kernel_once():
    rows = [
        (np.arange(n, dtype=np.int64), np.zeros(n, np.int64))
        for n in (1, BLOCK + 1, 0, 20 * BLOCK)
    ]

    def count(blocks):
        for x, out in blocks:
            out += x + 1

    blockwise.run_blocks(count, rows)
    for x, out in rows:
        assert np.array_equal(out, x + 1)
    with pytest.raises(ZeroDivisionError):
        blockwise.run_blocks(lambda blocks: [1 // 0 for _ in blocks], rows)


def test_memory_is_for_plain_tensors_of_one_shape():
    x = torch.ones(64, 64)
    assert blockwise.flat_memory(x, x) is not None
    hidden = [
        x[:2],
        x.T[:, :63],
        x.clone().requires_grad_(),
        x.to("meta"),
        x.to_sparse(),
    ]
    for other in hidden:
        assert blockwise.flat_memory(other) is None, other
    assert blockwise.flat_memory(x, torch.ones(4096)) is None
    with torch.no_grad():
        assert blockwise.flat_memory(hidden[2]) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_new_tensors_of_a_row_share_their_memory(dtype):
    rows, x = [], torch.ones(2, 3, dtype=dtype)
    with torch.device("meta"):
        flat = blockwise.flat_memory(x, least=1)
        out, rest = blockwise.append_row(rows, flat, [x], 2)
    given, memory, _ = rows[0]
    memory[:] = given
    assert (
        out.dtype == dtype == rest.dtype
        and out.device.type == "cpu"
        and torch.equal(out, x)
    )
