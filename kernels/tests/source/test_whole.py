"""Segments in one program, and the tables, compiled for GPUs that are not here."""

import pytest
from kernel_runs import INFINITY, built, by_compiler

from sparsefn_kernels import device_tables
from sparsefn_kernels.source import whole

pytestmark = by_compiler


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_segment_in_one_program_is_built_without_spills(bits, capability):
    how = {"FLAGS": True, "BITS": bits, "INF": INFINITY[bits], "STEPS": 6}
    for block, warps in ((64, 1), (8192, 16)):
        assert (
            built(whole.select_whole, {}, warps, capability, **how, B=block).spills == 0
        )


@pytest.mark.parametrize("n", device_tables._AT_ONCE)
@pytest.mark.parametrize("capability", [80, 90])
def test_numbers_go_along_with_a_launch(capability, n):
    assert 8 * n + 32 <= 4096  # the arguments of a kernel, with its own
    made = built(whole.write_table, {"numbers": ("i64",) * n}, 1, capability, N=n)
    assert made.spills == 0 and "ld.param.b64" in made.ptx
