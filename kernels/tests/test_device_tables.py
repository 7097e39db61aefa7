"""Tables by Triton's interpreter: every number arrives."""

import pytest
import torch
from kernel_runs import by_interpreter

from sparsefn_kernels.device_tables import by_copy, write

pytestmark = by_interpreter


@pytest.mark.parametrize("n", [0, 1, 32, 33, 128, 129, 448, 449, 1026])
def test_tables_of_any_length_are_written(n):
    rows = [(i - 5, 1 << 47, i) for i in range(n // 3)] + [(7,)] * (n % 3)
    numbers = [x for row in rows for x in row]
    assert write(rows, torch.device("cpu"))[:n].tolist() == numbers
    table = torch.full((n + 2,), -7)
    by_copy(numbers, table)
    assert table.tolist() == [*numbers, -7, -7]
