"""Tables by Triton's interpreter: every number arrives."""

import numpy as np
import pytest
import torch
from kernel_runs import by_interpreter

from sparsefn_kernels.device_tables import by_copy, write

pytestmark = by_interpreter


@pytest.mark.parametrize("n", [0, 1, 32, 33, 128, 129, 448, 449, 1026])
def test_tables_of_any_length_are_written(n):
    numbers = [i - 5 if i % 3 else 1 << 47 for i in range(n)]
    row = np.array(numbers, np.int64)
    assert write(row, torch.device("cpu"))[:n].tolist() == numbers
    square = np.stack([row, row], 1)
    assert write(square, torch.device("cpu"))[: 2 * n : 2].tolist() == numbers
    table = torch.full((n + 2,), -7)
    by_copy(row, table)
    assert table.tolist() == [*numbers, -7, -7]
