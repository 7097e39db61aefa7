"""Plain data read by name."""

import re

import pytest

from sparsefn.core.checks import plain


def test_a_name_is_found_in_either_case():
    assert plain.named("it", "ERK", {"erk": 1}) == 1
    with pytest.raises(
        ValueError, match=re.escape("expected it to be one of 'erk', got 3")
    ):
        plain.named("it", 3, {"erk": 1})


def test_every_key_is_an_argument():
    assert plain.called("a sum", lambda a, b=2: a + b, {"a": 1}) == 3
    for given, message in (
        ({"c": 1}, "expected a sum to have keys among 'a', 'b', got 'c'"),
        ({"b": 1}, "expected a sum to have the key 'a', got 'b'"),
        ({"a": "x"}, "a sum: can only concatenate str"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            plain.called("a sum", lambda a, b=2: a + b, given)
