"""Shorthands: what is read, what is printed, what is refused."""

import math

import numpy as np
import pytest
import torch

import sparsefn as sf
from sparsefn.config.shorthand import Shorthand

ELEMENTS, NM = sf.patterns.unstructured(), sf.patterns.nm
READ = {
    "DENSE": (ELEMENTS, 0.0, False),
    "DENSE(U)": (ELEMENTS, 0.0, False),
    "DENSE(M)": (ELEMENTS, 0.0, False),  # nothing is off its mask
    "BERN": (ELEMENTS, "bernoulli", False),
    "BERN(U)": (ELEMENTS, "bernoulli", False),
    "BERN(M)": (ELEMENTS, "bernoulli", True),
    "TOPK{0.5}(U)": (ELEMENTS, 0.5, False),
    "TOPK{.25}(M)": (ELEMENTS, 0.75, True),
    "TOPK{0.0}(U)": (ELEMENTS, 1.0, False),
    "TOPK{1.0}(U)": (ELEMENTS, 0.0, False),
    "TOPK{0.9}(U)": (ELEMENTS, 0.1, False),  # 1.0 - 0.9 is 0.09999999999999998
    "BTOPK{4:8,-1}(U)": (NM(4, 8), 0.5, False),
    "BTOPK{2:8,1}(M)": (NM(2, 8, axis=1), 0.75, True),
    "BTOPK{1:1,0}(U)": (NM(1, 1, axis=0), 0.0, False),
}
CANONICAL = [
    "DENSE",
    "BERN",
    "BERN(M)",
    "TOPK{1.0}(U)",
    "TOPK{0.0}(M)",
    "TOPK{0.125}(U)",
]
CANONICAL += [
    f"BTOPK{{{k}:{m},{axis}}}({u})"
    for k, m in ((1, 1), (2, 4), (8, 8))
    for axis in (-2, 0, 3)
    for u in "UM"
]


@pytest.mark.parametrize("text", READ)
def test_what_is_read(text):
    assert sf.config.from_shorthand(text) == READ[text]
    assert isinstance(sf.config.from_shorthand(text).mask_gradient, bool)
    assert (
        sf.config.from_shorthand(sf.config.to_shorthand(sf.config.from_shorthand(text)))
        == READ[text]
    )


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_strings_come_back(text):
    assert sf.config.to_shorthand(sf.config.from_shorthand(text)) == text


@pytest.mark.parametrize(
    "sparsity",
    [0.0, 1.0, 0.1, 1 / 3, 0.3, math.ulp(0.0), 1e-20, math.nextafter(1.0, 0.0)],
)
def test_every_sparsity_survives(sparsity):
    spec = Shorthand(ELEMENTS, sparsity, True)
    assert sf.config.from_shorthand(sf.config.to_shorthand(spec)) == spec


def test_no_count_moves_by_the_rounding_of_a_density():
    # 0.1 * 5 and 0.1 * 15 are ties of round-half-even; (1.0 - 0.9) * 15 is below its
    # own.
    assert (
        sf.budgets.n_kept(15, sf.config.from_shorthand("TOPK{0.9}(U)").sparsity) == 13
    )
    assert sf.budgets.n_kept(15, 1.0 - 0.9) == 14


def test_patterns_that_say_everything():
    assert sf.config.to_shorthand(NM(2, 4)) == "BTOPK{2:4,-1}(U)"
    assert sf.config.to_shorthand(NM(1, 16, axis=-3)) == "BTOPK{1:16,-3}(U)"


def test_the_named_ones():
    names = {
        name: sf.config.to_shorthand(getattr(sf.shorthand, name))
        for name in dir(sf.shorthand)
        if name.startswith("BTK")
    }
    assert names == {
        "BTK8_4_LD": "BTOPK{4:8,-1}(U)",
        "BTK8_4_FD": "BTOPK{4:8,1}(U)",
        "BTK8_2_LD": "BTOPK{2:8,-1}(U)",
        "BTK8_2_FD": "BTOPK{2:8,1}(U)",
    }


def test_a_changed_shorthand_prints_what_it_says():
    assert (
        sf.config.to_shorthand(sf.config.from_shorthand("DENSE")._replace(sparsity=0.5))
        == "TOPK{0.5}(U)"
    )
    assert (
        sf.config.to_shorthand(
            sf.config.from_shorthand("DENSE")._replace(mask_gradient=True)
        )
        == "TOPK{1.0}(M)"
    )
    assert (
        sf.config.to_shorthand(
            sf.config.from_shorthand("BERN")._replace(mask_gradient=True)
        )
        == "BERN(M)"
    )


@pytest.mark.parametrize(
    "text", ["DENSE", "TOPK{0.25}(M)", "BTOPK{1:4,-1}(M)", "BERN(M)"]
)
def test_its_fields_are_arguments_of_supermask(text):
    spec = sf.config.from_shorthand(text)
    state = sf.supermask(**spec._asdict(), init="magnitude").init(
        {"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])}
    )
    kept = {"DENSE": 4, "BERN(M)": 4}.get(text, 1)
    assert state.masks["w"].tolist() == [[i < kept for i in range(4)]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "FOO",
        "topk{0.5}(U)",
        "Dense",
        "DENSE(X)",
        "DENSER",
        "BERN{0.5}",
        "BERNOULLI",
        "BERN(M",
        "TOPK{1}(U)",
        "TOPK{0.5}",
        "TOPK{0.5}(m)",
        "TOPK{0.5}(X)",
        "TOPK{0.5}()",
        "TOPK{0.5}(UM)",
        "TOPK{5e-1}(U)",
        "TOPK{5.}(U)",
        "TOPK{-0.5}(U)",
        "TOPK{1.5}(U)",
        "TOPK{0.5}(U) ",
        "TOPK{0.5}(U)\n",
        " TOPK{0.5}(U)",
        "TOPK{ 0.5}(U)",
        "TOPK{\u0660.\u0665}(U)",  # digits, but not 0 to 9
        "BTOPK{4:8}(U)",
        "BTOPK{4:8, -1}(U)",  # read as axis 1 by the original
        "BTOPK{4:8,+1}(U)",
        "BTOPK{4:8,-1}",
        "BTOPK{0:8,-1}(U)",
        "BTOPK{9:8,-1}(U)",
        "BTOPK{0:0,-1}(U)",
    ],
)
def test_everything_else_is_refused_by_name(text):
    with pytest.raises(ValueError) as raised:
        sf.config.from_shorthand(text)
    assert str(raised.value).startswith(
        "expected a shorthand DENSE, TOPK{density}(U), BTOPK{kept:run,axis}(U) or BERN"
    )
    assert str(raised.value).endswith(f"got {text!r}")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: sf.config.from_shorthand(0.5),
            TypeError,
            "expected a shorthand to be a string, got float",
        ),
        (
            lambda: sf.config.to_shorthand("DENSE"),
            TypeError,
            "expected a Shorthand or a pattern, got str",
        ),
        (
            lambda: sf.config.to_shorthand(ELEMENTS),
            ValueError,
            "expected a Shorthand or an nm pattern: unstructured() does not say how "
            "much is kept",
        ),
        (
            lambda: sf.config.to_shorthand(Shorthand(sf.patterns.kernel(), 0.5, False)),
            ValueError,
            "no shorthand for kernel(reduce='mean'): expected unstructured() or nm(n, "
            "m, axis)",
        ),
        (
            lambda: sf.config.to_shorthand(NM(0, 4)),
            ValueError,
            "no shorthand for nm(0, 4, axis=-1): a run keeps one element or more",
        ),
        (
            lambda: sf.config.to_shorthand(Shorthand(NM(2, 4), 0.75, False)),
            ValueError,
            "nm(2, 4, axis=-1) fixes the sparsity at 0.5, got 0.75",
        ),
        (
            lambda: sf.config.to_shorthand(Shorthand(NM(2, 4), "bernoulli", False)),
            TypeError,
            "expected sparsity to be a float in [0, 1], got 'bernoulli'",
        ),
        (
            lambda: sf.config.to_shorthand(
                Shorthand(ELEMENTS, torch.tensor(0.5), False)
            ),
            TypeError,
            "expected the sparsity of a Shorthand to be a float, got Tensor",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


def test_a_float_of_numpy_is_a_float():
    spec = sf.shorthand.Shorthand(sf.patterns.unstructured(), np.float64(0.25), False)
    assert sf.config.to_shorthand(spec) == "TOPK{0.75}(U)"
