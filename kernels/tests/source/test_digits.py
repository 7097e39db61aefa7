"""The passes that find the threshold, compiled for GPUs that are not here."""

import pytest
from kernel_runs import INFINITY, built, by_compiler

from sparsefn_kernels.source import digits

pytestmark = by_compiler


@pytest.mark.parametrize(
    ("bits", "joint"), [(16, False), (32, False), (32, True), (64, True)]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_digits_are_built_without_spills(bits, capability, joint):
    key = "*i64" if bits == 64 else "*i32"
    how = {
        "JOINT": joint,
        "FLAGS": joint,
        "ALIGNED": True,
        "BITS": bits,
        "INF": INFINITY[bits],
        "STEPS": 6,
    }
    how |= {"PLACE": (1 << 32) - 1, "B": 4096}
    for kernel in (digits.count_digits, digits.finish):
        made = built(kernel, {"ends": key, "near_key": key}, 8, capability, **how)
        assert made.spills == 0
        assert any(name.startswith("LDG.E.128") for name in made.loads), (
            "a whole chunk is read 16 bytes at a time"
        )
