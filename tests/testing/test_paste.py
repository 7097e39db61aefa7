"""What is printed of a failure can be pasted: it fails for a broken algorithm, and holds for the healthy one."""

import warnings

import pytest
import torch

import sparsefn as sf
from sparsefn.testing import paste
from sparsefn.testing.laws import LAWS
from sparsefn.testing.meta import row_of
from sparsefn.testing.trial import outcome_of
from tests.testing.broken import NEVER, PLANTED, aliases, fails_on_empty

CHECKS = {check.name: (law, check) for law in LAWS for check in law.checks}


PLAIN = {"off by one", "NaN wins", "ties the other way", "writes to gradients", "global generator", "between triggers"}
PLAIN |= {"aliases params"}


def pasted(name, make, meta, **options):
    found = outcome_of(*CHECKS[name], row_of(make, meta), **options)
    assert found.test, found.said
    return found


def run(text, **given):
    space = {"__name__": "pasted", **given}
    exec(text, space)
    (test,) = [value for name, value in space.items() if name.startswith("test_")]
    with torch.random.fork_rng():
        test()


@pytest.mark.deep(but=["off by one", "ties*", "aliases*"])
@pytest.mark.parametrize("bug", PLANTED)
def test_the_text_fails_for_the_broken_one_and_holds_for_the_healthy_one(bug):
    make, meta, check, healthy = PLANTED[bug]
    found = pasted(check, make, meta)
    assert "hypothesis" not in found.test and len(found.test.splitlines()) < 25
    assert f"# {found.said[0].splitlines()[0]}" in found.test
    assert bug not in PLAIN or "sf.testing" not in found.test
    name = make.__name__
    with pytest.raises(AssertionError):
        run(found.test, **{name: make}, meta=meta)
    alone = found.test.replace("from tests.testing.broken import", "from tests.testing.broken import static as _ #")
    run(alone, **{name: healthy}, meta=meta)


@pytest.mark.deep
def test_an_error_of_the_algorithm_is_raised_by_the_text():
    found = pasted("runs_repeat", fails_on_empty, sf.testing.Meta(start="magnitude"), max_examples=200)
    assert "torch.zeros(2, 0)" in found.test and "sf.testing" not in found.test
    with pytest.raises(RuntimeError, match=r"max\(\)"):
        run(found.test)


def test_the_global_generator_is_where_it_was():
    before = torch.get_rng_state()
    outcome_of(*CHECKS["inputs_may_change_later"], row_of(aliases, NEVER))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_name_that_is_no_identifier_is_replaced():
    found = pasted("counts_are_exact", lambda sparsity, key: sf.static(1.0), sf.testing.Meta(when=sf.never()))
    assert "# made: what you gave" in found.test and "def test_made_counts_are_exact():" in found.test


def test_promises_without_code_are_a_name():
    meta = sf.testing.Meta(when=lambda step: step < 0, start="dense")
    found = pasted("nothing_to_sparsify_is_dense", _never_dense, meta)
    assert "sf.testing.Row(" in found.test
    with pytest.raises(AssertionError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(found.test, meta=meta)


def _never_dense(sparsity, key, params):
    full = sf.dense()
    return full._replace(
        init=lambda params: full.init(params)._replace(
            masks={name: torch.zeros_like(x, dtype=torch.bool) for name, x in params.items()}
            if "norm" in params
            else full.init(params).masks
        )
    )


def test_what_is_too_large_is_not_written_down():
    make, meta, name, _ = PLANTED["off by one"]
    case = sf.testing.Case({"w": torch.arange(8100.0).reshape(90, 90)}, (), 0.5, 0)
    assert paste.pasted(row_of(make, meta), CHECKS[name][1], case, AssertionError("one more"), False) == ""
