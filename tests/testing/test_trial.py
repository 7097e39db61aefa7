"""One check of one algorithm: groups are unfolded, errors are errors, and only what is
undeclared is asked for.
"""

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing.laws import DETERMINISM, EXACT_COUNT, LAWS, PURITY
from sparsefn.testing.meta import row_of
from sparsefn.testing.trial import outcome_of, what_to_declare
from tests.testing.broken import PLANTED, fails_on_empty, guarded, halving

CHECKS = {check.name: (law, check) for law in LAWS for check in law.checks}


def tried(name, make, meta=sf.testing.Meta(), **options):
    return outcome_of(*CHECKS[name], row_of(make, meta), **options)


def test_one_that_holds_says_how_many_examples_it_was_tried_on():
    found = tried(
        "functions_are_pure", halving, sf.testing.Meta(when=sf.every(2)), max_examples=8
    )
    assert found.status == "passed" and found.examples == 2 and found.seconds > 0
    assert not found.lines("x") and not found.details("x") and not found.failed


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_fail_their_check_in_one_line_each(bug):
    make, meta, check, healthy = PLANTED[bug]
    found = tried(check, make, meta, shrink=False)
    assert found.status == "failed" and found.case is not None
    for line in found.lines("mine"):
        assert (
            line.startswith(f"mine breaks {found.law}, {check}: ") and "\n" not in line
        )
        assert "Hypothesis" not in line and "ExceptionGroup" not in line
    assert tried(check, healthy, meta).status == "passed"


@pytest.mark.deep
def test_distinct_failures_have_a_line_each():
    def twice(sparsity, key):
        full = sf.static(1.0)
        empty = full._replace(init=lambda params: full.init(params))
        return empty._replace(
            update=lambda state, grads, step: sf.static(sparsity, key=key).init(
                state.params
            )
        )

    def two(row, case):
        if case.sparsity != 0.5:
            raise AssertionError("no half")
        raise AssertionError("a half")

    found = outcome_of(
        PURITY, PURITY.checks[0]._replace(run=two), row_of(twice), max_examples=40
    )
    assert sorted(found.said) == ["a half", "no half"]
    assert len(found.lines("twice")) == 2


def test_long_lines_are_cut_and_stand_below_in_full():
    plain = outcome_of(PURITY, PURITY.checks[0], row_of(halving))._replace(
        status="failed", declare="Meta(idle=False)"
    )
    hint = "; if it is not meant to, declare Meta(idle=False)"
    short = plain._replace(said=("a half",))
    assert (
        short.lines("x") == [f"x breaks purity, {plain.check}: a half{hint}"]
        and short.details("x") == []
    )
    long = plain._replace(said=("half " * 50,))
    (line,), (whole,) = long.lines("x"), long.details("x")
    assert (
        len(line) == 200
        and line.endswith(f" ...{hint}")
        and whole.endswith(f"{'half ' * 50}{hint}")
    )
    many = long._replace(
        said=("a half",), declare=" or ".join(["Meta(idle=False)"] * 10)
    )
    assert many.lines("x") == [
        f"x breaks purity, {plain.check}: a half"
    ] and many.details("x")[0].endswith("False)")
    error = long._replace(status="error")
    assert len(error.lines("x")[0]) == 200 and hint not in error.details("x")[0]


@pytest.mark.deep
def test_an_error_of_the_algorithm_is_told_as_one_and_not_as_a_law():
    found = tried(
        "states_keep_their_structure",
        fails_on_empty,
        sf.testing.Meta(start="magnitude"),
        max_examples=200,
    )
    (line,) = found.lines("fails")
    assert found.status == "error" and not found.declare
    assert line.startswith(
        "fails: init raises RuntimeError: max(): Expected reduction dim"
    )
    assert "; w of shape (" in line and ", 0), torch.float" in line
    assert "breaks" not in line
    assert "max()" in str(found.cause)


def test_an_error_at_an_end_is_one_of_the_algorithm():
    def never_empty(sparsity, key):
        if sparsity == 1.0:
            raise ValueError("nothing is left")
        return sf.static(sparsity, init="magnitude")

    found = tried(
        "sparsity_one_is_empty",
        never_empty,
        sf.testing.Meta(when=sf.never(), start="magnitude"),
    )
    assert found.lines("mine")[0].startswith(
        "mine: make raises ValueError: nothing is left"
    )
    assert found.case.sparsity == 1.0


def test_an_error_that_only_a_law_brings_about_breaks_it():
    found = tried("vmap_is_a_loop", guarded, sf.testing.Meta(start="magnitude"))
    assert found.status == "failed" and found.said[0].startswith("RuntimeError: vmap: ")
    assert found.declare == ""


def test_what_is_declared_is_not_asked_for():
    counts = EXACT_COUNT.checks[0]
    asked = (
        "Meta(start='dense') or Meta(exact_count='total') or Meta(exact_count=False)"
    )
    assert what_to_declare(counts, sf.testing.Meta()) == asked
    dense = sf.testing.Meta(start="dense", exact_count="total")
    assert what_to_declare(counts, dense) == "Meta(exact_count=False)"
    assert what_to_declare(PURITY.checks[0], dense) == ""


def test_a_result_that_is_not_always_the_same_is_told_all_the_same():
    calls = []

    def flaky(row, case):
        calls.append(1)
        if len(calls) == 1:
            raise AssertionError("only the first time")

    found = outcome_of(
        DETERMINISM, DETERMINISM.checks[0]._replace(run=flaky), row_of(halving)
    )
    assert found.said == ("only the first time",)
    assert torch.is_tensor(optree.tree_leaves(found.case.params)[0])
