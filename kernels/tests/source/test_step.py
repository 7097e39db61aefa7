"""Steps of optimizers, compiled for GPUs that are not here."""

import re

import pytest
from kernel_runs import built, by_compiler

from sparsefn_kernels.source import step

pytestmark = by_compiler

NUMBERS = {
    **dict.fromkeys(("count", "new_count"), "*i64"),
    **dict.fromkeys(("decay1", "decay2", "rate", "new_decay1", "new_decay2"), "*fp64"),
    **dict.fromkeys(("beta1", "beta2", "eps", "decay", "momentum"), "i64"),
}


def is_exact(made):
    """Nothing spilled, nothing fused, and no subnormal number counted as zero."""
    wide = (
        any(name.startswith("LDG.E.128") for name in made.loads),
        any(x.startswith("STG.E.128") for x in made.stores),
    )
    return (
        made.spills == 0
        and all(wide)
        and not re.search(r"\b(fma|mad)\.\S*f(32|64)|\.ftz|\.approx", made.ptx)
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("decay", [0, 1, 2])
def test_adam_rounds_every_operation(decay, clear, capability):
    how = {"DECAY": decay, "CLEAR": clear, "ALIGNED": True, "STEPS": 6, "B": 1024}
    made = built(step.adam, NUMBERS, 4, capability, fused=False, **how)
    assert is_exact(made)
    for operation in ("div.rn.f32", "sqrt.rn.f32", "div.rn.f64", "sqrt.rn.f64"):
        assert operation in made.ptx
    assert not is_exact(built(step.adam, NUMBERS, 4, capability, **how)), (
        "the option is what keeps them apart"
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_rounds_every_operation(nesterov, capability):
    how = {
        "DECAY": True,
        "MOMENTUM": True,
        "NESTEROV": nesterov,
        "CLEAR": True,
        "ALIGNED": True,
        "STEPS": 6,
        "B": 1024,
    }
    assert is_exact(built(step.sgd, NUMBERS, 4, capability, fused=False, **how))
    assert not is_exact(built(step.sgd, NUMBERS, 4, capability, **how))
