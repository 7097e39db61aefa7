"""The sweep of SparseGPT, compiled for GPUs that are not here."""

import re

import pytest
from kernel_runs import built, by_compiler

from sparsefn_kernels.source import sweep

pytestmark = by_compiler


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("bits", [32, 64])
def test_every_operation_is_rounded(bits, rounds, choose, capability):
    kind = f"*fp{bits}"
    names = ("due", "changes", "factor", "scale", "scores", "grid_scale", "grid_zero")
    types = {"mask": "*i8", **dict.fromkeys(names, kind)}
    how = {"SPAN": 4 if choose else 1, "BEST": 2, "CHOOSE": choose, "B": 32}
    how |= {"ROUND": rounds, "LOW": -8, "HIGH": 7}
    made = built(sweep.sweep, types, 1, capability, fused=False, **how)
    assert made.spills == 0
    assert not re.search(r"\b(fma|mad)\.\S*f(32|64)|\.ftz|\.approx", made.ptx)
