"""Draws, compiled for GPUs that are not here."""

import re

import pytest
from kernel_runs import built, by_compiler

from sparsefn_kernels.source import threefry

pytestmark = by_compiler

OUT = {
    "words": "*i64",
    "pairs": "*i64",
    "uniform": "*fp32",
    "normal": "*fp32",
    "below": "*i8",
    "chances": "*i8",
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", OUT)
def test_draws_are_built_without_spills(kind, capability):
    types = {"out": OUT[kind], "chances": "*fp32", "n": "i32", "below": "i64"}
    how = {
        "XOR0": 0,
        "XOR1": 0,
        "KIND": kind,
        "DIGITS": 24,
        "INDEXED": False,
        "ONE_KEY": True,
        "B": 1024,
    }
    made = built(threefry.draw, types, 4, capability, fused=False, **how)
    assert made.spills == 0
    # exact as the definition is: no product fused with a sum, division and root rounded
    if kind == "normal":
        assert not re.findall(r"\bfma\.\S*f64", made.ptx)
        assert "div.rn.f64" in made.ptx and re.search(r"sqrt\.rn\.f64", made.ptx)
        fused = built(threefry.draw, types, 4, capability, **how)
        assert re.findall(r"\bfma\.\S*f64", fused.ptx), (
            "the option is what keeps them apart"
        )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_draws_of_leaves_are_built_without_spills(kind, capability):
    how = {"XOR0": 0, "XOR1": 0, "KIND": kind, "DIGITS": 24, "STEPS": 6, "B": 1024}
    made = built(threefry.draw_leaves, {}, 4, capability, fused=False, **how)
    assert made.spills == 0 and not re.findall(r"\bfma\.\S*f64", made.ptx)
    assert any(name.startswith("STG.E.128") for name in made.stores), (
        "draws are written 16 bytes at a time"
    )
