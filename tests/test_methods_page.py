"""The cards of docs/methods.md are those of the module, and their parts are read as
they are meant.
"""

import ast
import builtins
import inspect
import re
from pathlib import Path

import pytest
from methods_page import (
    PAGE,
    card,
    expression,
    is_handed_on,
    method,
    named,
    page,
    without_brackets,
)
from pages import split

import sparsefn as sf
from sparsefn.algorithms import one_shot, set
from sparsefn.masks.budgets import counts, distributions
from sparsefn.masks.scores import saliency, wanda

RECIPES = 30  # headings with code, at least


def test_the_page_is_what_the_docstrings_say_now() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run `python tests/methods_page.py`"


def test_every_method_has_a_card_with_a_paper_and_evidence() -> None:
    assert {"rigl", "set", "snfs"} <= named().keys()
    for name, make in named().items():
        row = method(name, make)
        assert row.headline and row.expression and row.paper and row.verified, name
        assert not re.search(r"\b_[a-z]", row.expression), f"{name}: {row.expression}"


def test_every_recipe_has_a_sentence_code_and_a_paper() -> None:
    parts = (
        PAGE.with_name("more-methods.md")
        .read_text(encoding="utf-8")
        .split("\n### ")[1:]
    )
    assert len(parts) >= RECIPES
    for part in parts:
        prose, blocks = split(part.split("\n## ")[0])
        title, *told = [line for line in prose.splitlines() if line]
        assert (len(blocks) == 1 and told and told[0].rstrip()[-1] in ".,:") or len(
            told
        ) > 1, title
        assert "20" in " ".join(told), f"{title}: no paper"


def test_an_expression_has_the_values_of_variables_and_public_names() -> None:
    def made(stats, sparsity, where=None, key=None):  # type: ignore[no-untyped-def]
        score = saliency if sparsity else wanda(stats)
        return one_shot(
            sparsity, score, distribution=distributions.global_(), where=where, key=key
        )

    assert expression(made) == (
        "sf.one_shot(sparsity, sf.scores.saliency if sparsity else "
        "sf.scores.wanda(stats), distribution=distributions.global_())"
    )

    def passed(sparsity, where):  # type: ignore[no-untyped-def]
        return set(
            sparsity,
            drop_fraction=counts.below(0.0),
            where=lambda path, leaf: where(path, leaf) | False,
        )

    assert expression(passed) == (
        "sf.set(sparsity, drop_fraction=sf.counts.below(0.0), where=lambda path, "
        "leaf: where(path, leaf) | False)"
    )


def test_a_long_expression_keeps_its_variables() -> None:
    def made(sparsity):  # type: ignore[no-untyped-def]
        score = [
            saliency,
            saliency,
            saliency,
            saliency,
            saliency,
            saliency,
            saliency,
            saliency,
            saliency,
            saliency,
        ]
        scores = [score, score, score]
        return one_shot(sparsity, scores)

    assert expression(made) == "sf.one_shot(sparsity, [score, score, score])"


@pytest.mark.parametrize(
    "name", [name for name, make in named().items() if not is_handed_on(make)]
)
def test_an_expression_needs_sf_torch_and_what_the_function_has(name: str) -> None:
    function = inspect.unwrap(named()[name])
    nodes = list(ast.walk(ast.parse(expression(function))))
    bound = {
        arg.arg
        for node in nodes
        if isinstance(node, ast.Lambda)
        for arg in node.args.args
    }
    used = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    own = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    helpers = {helper for helper in used if callable(function.__globals__.get(helper))}
    assert used - bound - own - helpers - {*vars(builtins)} <= {"sf", "torch"}


def test_what_a_docstring_says_is_taken_apart() -> None:
    def snip(sparsity):  # type: ignore[no-untyped-def]
        """SNIP: the weights stay.

        >>> 1
        1

        The authors' code does the same.

        Verified by recordings (masks
        (and scores) of 3 cases), and laws.

        Lee, Ajanthan and Torr 2019, arXiv 1810.02340.
        """
        return one_shot(sparsity, saliency)

    snip.__module__ = "sparsefn.methods.at_start"
    row = method("snip", snip)
    assert row == (
        "snip",
        "SNIP: the weights stay.",
        "`sf.one_shot(sparsity, sf.scores.saliency)`",
        "Lee et al. 2019, arXiv 1810.02340",
        "recordings, and laws",
    )
    snip.__doc__ = "SNIP: the weights stay.\n\nLee et al. 2019, arXiv 1810.02340."
    with pytest.raises(
        ValueError,
        match="snip: expected a paragraph 'Verified by ...'.* got 0, 0 and 'Lee et al.",
    ):
        method("snip", snip)


def test_names_of_the_top_level_have_their_paper() -> None:
    row = method("rigl", sf.rigl)
    assert (row.expression, row.paper) == (
        "`sf.rigl`",
        "Evci et al. 2020, arXiv 1911.11134",
    )


def test_a_card_has_a_heading_a_picture_where_there_is_one_and_the_evidence() -> None:
    text = card(method("rigl", sf.rigl))
    assert text.startswith("### RigL\n\n`sf.methods.rigl`: drop the smallest weights")
    assert "](gallery/rigl.png)" in text and text.endswith(
        "arXiv 1911.11134. Verified by recordings, and laws."
    )
    assert "gallery" not in card(method("obd", sf.methods.obd))


def test_brackets_are_left_out() -> None:
    assert without_brackets("a (b (c) d), e") == "a, e"


def test_the_page_is_beside_the_others() -> None:
    assert Path(__file__).parents[1] / "docs" / "methods.md" == PAGE and PAGE.exists()
