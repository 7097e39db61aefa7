"""Arguments of methods, terms, patterns and budgets that are no numbers, or numbers out
of range: refused when the object is made.
"""

import re

import pytest
import torch

import sparsefn as sf

methods = sf.methods
NUMBER = "to be a number or a 0-d float tensor, got str"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: methods.hard_concrete("a"), TypeError, f"strength {NUMBER}"),
        (
            lambda: methods.hard_concrete(0.1, weight_decay="a"),
            TypeError,
            f"weight_decay {NUMBER}",
        ),
        (lambda: methods.proximal("a", rate=0.1), TypeError, f"strength {NUMBER}"),
        (
            lambda: methods.deep_rewiring(0.5, alpha="a"),
            TypeError,
            f"alpha {NUMBER}",
        ),
        (
            lambda: methods.granet(0.9, steps=4, drop_fraction=2.0),
            ValueError,
            "expected drop_fraction in [0, 1], got 2.0",
        ),
        (
            lambda: methods.movement(2.0, steps=4),
            ValueError,
            "expected sparsity in [0, 1], got 2.0",
        ),
        (
            lambda: methods.powerprop(alpha="a"),
            ValueError,
            "power: expected alpha >= 1, got 'a'",
        ),
        (
            lambda: methods.str_(init=float("nan")),
            ValueError,
            "soft_threshold: expected a finite init, got nan",
        ),
        (
            lambda: methods.str_(init="a"),
            ValueError,
            "soft_threshold: expected a finite init, got 'a'",
        ),
        (lambda: sf.terms.l1("x"), TypeError, f"strength {NUMBER}"),
        (
            lambda: sf.terms.l2(float("inf")),
            ValueError,
            "expected strength to be finite",
        ),
        (lambda: sf.terms.pruned_decay("x"), TypeError, f"strength {NUMBER}"),
        (
            lambda: sf.patterns.row_balanced("x"),
            TypeError,
            "row_balanced: expected axis to be an int, got str",
        ),
        (
            lambda: sf.patterns.row_balanced(1.0),
            TypeError,
            "row_balanced: expected axis to be an int, got float",
        ),
        (
            lambda: sf.patterns.block(2),
            TypeError,
            "expected block sizes such as (4, 4), got 2",
        ),
        (
            lambda: sf.budgets.by_path(3),
            TypeError,
            "by_path: expected a dict of a sparsity for each glob",
        ),
        (lambda: sf.budgets.erk("x"), ValueError, "expected a finite power, got 'x'"),
        (
            lambda: sf.report.braille({"w": torch.ones(2)}),
            TypeError,
            "braille: expected one mask, a tensor, got dict: take it from a tree",
        ),
    ],
)
def test_they_are_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


@pytest.mark.parametrize("method", [methods.sparsegpt, methods.obs])
def test_statistics_without_squares_are_refused_with_the_path(method):
    layer = torch.nn.Linear(8, 4)
    stats = sf.calibration.inputs(layer, None, torch.randn(16, 8))
    del stats["weight"]["square"]
    algorithm = method(0.5, stats)
    params = sf.modules.params_of(layer)
    text = "at 'weight', expected 'square' in the statistics, got count, gram"
    with pytest.raises(ValueError, match=text):
        algorithm.update(algorithm.init(params), params, 0)
