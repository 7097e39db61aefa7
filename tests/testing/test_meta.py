"""Promises: their defaults, and what follows from them; rows: their names, and where
another process finds them.
"""

import functools
import re
from pathlib import Path

import pytest
import torch

import sparsefn as sf
from sparsefn.testing import Layout, Meta
from sparsefn.testing.meta import import_name, row_of


def test_the_defaults_promise_what_the_library_does():
    meta = Meta()
    assert meta.exact_count
    assert not meta.needs_grads
    assert not meta.stochastic
    assert meta.layout.pattern == sf.patterns.unstructured()
    assert not meta.joint and meta.independent and meta.zeroes
    assert Meta(distribution=sf.budgets.global_()).joint


def test_what_follows_from_others():
    exchange = sf.testing.Exchange(sf.scores.magnitude)
    assert (Meta(choose=exchange).exchange, Meta(choose=exchange).score) == (
        exchange,
        None,
    )
    assert (
        Meta(choose=sf.scores.lamp).exchange,
        Meta(choose=sf.scores.lamp).score,
    ) == (None, sf.scores.lamp)
    assert (
        Meta(distribution=sf.budgets.global_()).total
        and Meta(exact_count="total").total
    )
    assert (
        Meta(pruned=sf.schedules.constant).support
        and Meta(pruned="train").support is None
    )
    assert not Meta(pruned="keep").zeroes and Meta(pruned="zero").zeroes


@pytest.mark.parametrize(
    ("distribution", "apart"),
    [
        (sf.budgets.uniform(), True),
        (sf.budgets.owl({"*": 0.5}), True),
        (lambda shapes, sparsity: dict.fromkeys(shapes, 1), True),
        (sf.budgets.erk(), False),
        (sf.budgets.erdos_renyi(), False),
        (sf.budgets.uniform(dense_first=True), False),
        (
            sf.budgets.by_path({"head.*": 0.0}),
            False,
        ),  # it refuses trees without that leaf
        (sf.budgets.global_(), False),
    ],
)
def test_leaves_are_independent_where_their_counts_are(distribution, apart):
    assert Meta(distribution=distribution).independent == apart
    assert not Meta(distribution=distribution, exact_count="total").independent


def test_unknown_names_and_words():
    with pytest.raises(
        TypeError,
        match="unexpected keyword argument 'monoton'; did you mean 'monotone'",
    ):
        Meta(monoton=True)
    for name, word in (
        ("start", "magnitud"),
        ("exact_count", "all"),
        ("stochastic", "always"),
        ("pruned", "zeros"),
    ):
        with pytest.raises(
            ValueError, match=f"Meta: expected {name} to be one of .*, got '{word}'"
        ):
            Meta(**{name: word})
        with pytest.raises(ValueError, match=f"got '{word}'"):
            Meta()._replace(**{name: word})


def test_the_page_on_laws_has_all_fields():
    text = (
        (Path(__file__).parents[2] / "docs" / "laws.md")
        .read_text("utf-8")
        .partition("## What to declare")[2]
    )
    rows = "".join(
        line.split("|")[1]
        for line in text.partition("\n## ")[0].splitlines()
        if line.startswith("| `")
    )
    assert f"`sf.testing.Meta` has {len(Meta._fields)} fields" in text
    assert set(re.findall(r"`(\w+)=", rows)) == set(Meta._fields)


def test_a_layout_may_be_given_as_the_pattern():
    layout = Layout(sf.patterns.nm(2, 4), group=lambda grid: (1, 4), fixed=2)
    assert Meta(pattern=layout).layout is layout
    assert Meta(pattern=sf.patterns.nm(2, 4)).layout.fixed == 2


def made(sparsity, key):
    return sf.static(sparsity, key=key)


def test_names_and_references():
    row = row_of(made)
    assert row.name == "made"
    assert row.reference == f"{__name__}:made"
    assert import_name(functools.partial(made)) is None
    assert row_of(functools.partial(made)).name == "partial"


def test_params_are_given_to_those_who_take_them():
    params = {"w": torch.ones(1, 1)}
    taken = []
    row_of(lambda s, key, params: taken.append(params)).make(0.5, None, params)
    row_of(lambda s, key, least=0: taken.append(least)).make(0.5, None, params)
    assert taken == [params, 0]
