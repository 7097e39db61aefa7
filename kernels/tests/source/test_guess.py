"""The pass over all scores, compiled for GPUs that are not here."""

import pytest
from kernel_runs import INFINITY, built, by_compiler

from sparsefn_kernels.source import guess
from sparsefn_kernels.tables import Tuning

pytestmark = by_compiler


@pytest.mark.parametrize(
    ("bits", "joint"), [(16, False), (32, False), (32, True), (64, True)]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_the_guess_are_built_without_spills(bits, capability, joint):
    key = "*i64" if bits == 64 else "*i32"
    how = {
        "JOINT": joint,
        "FLAGS": joint,
        "BITS": bits,
        "INF": INFINITY[bits],
        "STEPS": 6,
    }
    types = {"ends": key, "near_key": key, "reach": "fp32"}
    assert (
        built(guess.bracket, types, 16, capability, **how, M=Tuning().sample).spills
        == 0
    )
    made = built(guess.divide, types, 8, capability, **how, ALIGNED=True, B=4096)
    assert made.spills == 0
    assert any(name.startswith("LDG.E.128") for name in made.loads), (
        "a whole chunk is read 16 bytes at a time"
    )
    assert any(name.startswith("STG.E.128") for name in made.stores)
    assert "ld.global.v4.b32" in made.ptx or "ld.global.v2.b64" in made.ptx
