"""Another process: what it finds, and what it says."""

import pytest

import sparsefn as sf
from sparsefn.testing import Meta, Row
from sparsefn.testing.processes import processes_do_not_matter
from sparsefn.testing.strategies import large

CASE = large()


def static(sparsity, key, params):
    return sf.static(sparsity, key=key)


def make(reference):
    return Row("static", static, Meta(), reference)


def test_what_cannot_be_imported_is_not_tried():
    processes_do_not_matter(make(None), CASE)


def test_a_function_that_can_be_imported_gives_the_same_bits():
    processes_do_not_matter(make(f"{__name__}:static"), CASE)


def test_an_error_there_is_shown_here():
    with pytest.raises(AssertionError, match="another process fails:\n(.|\n)*No module named 'nowhere'"):
        processes_do_not_matter(make("nowhere:static"), CASE)
