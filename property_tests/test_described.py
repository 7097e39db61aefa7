"""Every algorithm of the registry reads like the call that made it, and pickles where
its parts do.
"""

import builtins
import copy
import inspect
import pickle

import pytest
import torch

import sparsefn as sf
from property_tests import method_rows, registry
from sparsefn.testing import Row
from sparsefn.testing.harness import algorithm_of, assert_same, updates
from sparsefn.testing.strategies import large

# What the reprs are written in. Of two things of one name, the registry means the later
# one.
MODULES = (
    builtins,
    registry,
    torch,
    sf.schedules,
    sf.patterns,
    sf.terms,
    sf.reparam,
    sf.budgets,
    sf.counts,
)
MODULES = (*MODULES, sf.curvature, sf, sf.redistribute, sf.scores, sf.optimizers)
NAMES = {name: value for module in MODULES for name, value in vars(module).items()}
METHOD_NAMES = (
    NAMES
    | vars(method_rows)
    | {name: getattr(sf.methods, name) for name in sf.methods.__all__}
)

ROWS = [
    *registry.ROWS,
    *(row._replace(name=f"methods.{row.name}") for row in method_rows.ROWS),
]
ALGORITHMS = {row.name: algorithm_of(row, large(row.meta.layout.form)) for row in ROWS}
# Some part of these is a function that was made inside another, which has no name to
# pickle it by.
LOCAL = {"one_shot global grasp", "drop_grow current", "torchopt gmp", "methods.grasp"}
# These are given large tensors as well.
UNSPOKEN = {*LOCAL, "from_masks", "methods.wanda", "methods.ria", "methods.woodfisher"}
# Factories of which a call is shown and pickled here.
SHOWN = {
    repr(algorithm).partition("(")[0]
    for name, algorithm in ALGORITHMS.items()
    if name not in UNSPOKEN
}


def test_the_rows_exist() -> None:
    assert set(ALGORITHMS) >= UNSPOKEN


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - UNSPOKEN))
def test_the_repr_is_a_call_that_makes_the_algorithm(name: str) -> None:
    text, names = (
        repr(ALGORITHMS[name]),
        METHOD_NAMES if name.startswith("methods.") else NAMES,
    )
    assert repr(eval(text, dict(names))) == text


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name not in LOCAL], ids=lambda row: row.name
)
def test_a_pickled_algorithm_has_the_same_bits(row: Row) -> None:
    run, algorithm = large(row.meta.layout.form), ALGORITHMS[row.name]
    states = list(updates(algorithm, run))
    for other in (pickle.loads(pickle.dumps(algorithm)), copy.deepcopy(algorithm)):
        assert repr(other) == repr(algorithm)
        for old, new in zip(states, updates(other, run), strict=True):
            assert_same("a copy", old, new)


PLAIN = (
    "magnitude",
    "gradient",
    "saliency",
    "movement",
    "random",
    "lamp",
    "distance()",
)
PLAIN = (*PLAIN, "topology()", "ema(gradient, 0.5)", "momentum(0.5)", "first_sign()")
OVER = {
    "absolute": "absolute({})",
    "sampled": "sampled({}, power=2.0)",
    "ranked": "ranked({})",
    "by_unit": "by_unit({}, channel(axis=0, norm=1), largest)",
    "ema": "ema({}, 0.5)",
    "sum": "sum({}, reset=every(2))",
    "mean": "mean({})",
    "steered": "steered(always(), 5, score={})",
}


def test_every_combinator_of_scores_is_here() -> None:
    takes = {
        name
        for name in dir(sf.scores)
        if inspect.isfunction(fn := getattr(sf.scores, name))
        and {"score", "signed"} & inspect.signature(fn).parameters.keys()
    }
    assert takes == set(OVER)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("plain", PLAIN)
def test_a_score_of_a_score_is_shown_as_the_call_and_pickles(
    plain: str, over: str
) -> None:
    names = {**NAMES, "torch": torch, "largest": largest}
    memory = ("ema(", "momentum(", "first_sign(")
    text = OVER[over].format(plain)
    try:
        score = eval(text, names)
    except TypeError:
        assert plain.startswith(memory) and over in ("ema", "sum", "mean", "steered")
        return
    assert repr(score) == text
    algorithm = sf.drop_grow(0.5, drop=score, grow=score, when=sf.always())
    again = pickle.loads(pickle.dumps(algorithm))
    assert repr(again) == repr(algorithm) and text in repr(algorithm)
    params = {"w": torch.randn(6, 8, generator=torch.Generator().manual_seed(0))}
    grads = {"w": params["w"].roll(1)}
    old, new = algorithm.init(params), again.init(params)
    for step in range(3):
        old, new = algorithm.update(old, grads, step), again.update(new, grads, step)
        assert_same("a copy", old, new)


def largest(scores: torch.Tensor) -> torch.Tensor:
    return scores.amax(-1)


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_what_does_not_pickle_is_named(name: str) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        pickle.dumps(ALGORITHMS[name])
