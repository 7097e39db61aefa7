"""Every algorithm of the registry reads like the call that made it, and pickles where
its parts do.
"""

import builtins
import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch

import sparsefn as sf
from property_tests import method_rows, registry
from sparsefn.algorithms.combine.same_step import check_paired
from sparsefn.core.timetable import changes_once
from sparsefn.nn.attach.files import arguments_of, reads_step
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
MODULES = (*MODULES, sf.curvature, sf, sf.redistribute, sf.optimizers, sf.scores)
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


def guards(algorithm: sf.Algorithm) -> list[object]:
    """What the library knows of an algorithm before it runs: errors, warnings, where
    masks change.
    """

    def refused(call: Callable[[], object]) -> str:
        try:
            call()
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    named = [(name, repr(value)) for name, value in arguments_of(algorithm)]
    return [
        refused(lambda: check_paired("attach", algorithm, None)),
        refused(lambda: sf.testing.passive(algorithm)),
        reads_step(algorithm),
        changes_once(algorithm, 50, "the run of 50 steps"),
        sorted({*named}),
    ]


def guarded() -> dict[str, sf.Algorithm]:
    terms = sf.with_terms(sf.rigl(0.5), sf.terms.l2(0.1))
    return ALGORITHMS | {"donated": sf.donated(sf.rigl(0.5)), "terms": terms}


@pytest.mark.parametrize("field", sf.Algorithm._fields)
def test_a_changed_copy_is_guarded_as_what_it_was_made_of(field: str) -> None:
    for name, algorithm in guarded().items():
        copied = algorithm._replace(**{field: getattr(algorithm, field)})
        assert copied.made_by is None and copied.made_of is algorithm
        assert guards(copied) == guards(algorithm), name


def test_the_law_of_changed_copies_notices_one_that_knows_nothing() -> None:
    lost = []
    for name, algorithm in guarded().items():
        copied = algorithm._replace(settled=algorithm.settled, unchecked=None)
        vars(copied)["made_of"] = None
        lost += [name] if guards(copied) != guards(algorithm) else []
    assert {"donated", "terms", "rigl"} <= {*lost} and len(lost) > len(ALGORITHMS) / 2


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
