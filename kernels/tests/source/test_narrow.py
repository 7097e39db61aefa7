"""Rows of few units, compiled for GPUs that are not here."""

import pytest
from kernel_runs import built, by_compiler

from sparsefn_kernels.source import narrow

pytestmark = by_compiler

SCORES = {16: ("*i16", 0x7F80), 32: ("*i32", 0x7F800000), 64: ("*i64", 0x7FF << 52)}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("units", [4, 16, 32])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_rows_of_few_units_are_built_without_spills(bits, units, capability):
    kind, infinity = SCORES[bits]
    how = {
        "ABS": True,
        "ALLOW": False,
        "DENY": False,
        "BITS": bits,
        "INF": infinity,
        "columns": 1,
    }
    types = {"scores": kind, "out": "*i8", "columns": "constexpr"}
    made = built(
        narrow.select_narrow,
        types,
        4,
        capability,
        **how,
        UNITS=units,
        WIDE=units,
        R=2048 // units,
    )
    assert made.spills == 0
    assert any(name.startswith(("LDG.E.128", "LDG.E.64")) for name in made.loads), (
        "rows are read in wide words"
    )
