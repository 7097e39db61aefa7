"""`check_laws`: one call for one algorithm, and what it says of a broken one."""

import re

import optree
import pytest
import torch

import sparsefn as sf
from sparsefn.testing.laws import LAWS
from sparsefn.testing.strategies import cases
from tests.testing.broken import guarded, halving

MAGNITUDE = sf.testing.Meta(
    when=sf.every(2), start="magnitude", choose=sf.scores.magnitude, monotone=True
)


def without_compile():
    return [law for law in sf.testing.LAWS if law.name != "compile_is_eager"]


@pytest.mark.deep
def test_an_algorithm_of_the_library_obeys_all_laws_that_bind_it():
    names = sf.testing.check_laws(
        halving, meta=MAGNITUDE, max_examples=4, laws=without_compile()
    ).held
    assert {
        "counts_are_exact",
        "masks_only_shrink",
        "vmap_is_a_loop",
        "runs_resume",
    } <= set(names)
    assert "exchanges_conserve" not in names  # nothing is exchanged


def test_the_params_given_are_what_it_is_tried_on():
    seen = set()

    def spy(sparsity, key, params):
        seen.update(tuple(leaf.shape) for leaf in optree.tree_leaves(params))
        return sf.static(sparsity, key=key)

    params = {"w": torch.ones(5, 7, dtype=torch.float64), "b": torch.ones(7)}
    meta = sf.testing.Meta(
        when=sf.never(), start="random", stochastic=True, permutes=False
    )
    sf.testing.check_laws(
        spy, meta=meta, params=params, max_examples=4, laws=sf.testing.LAWS[:5]
    )
    assert seen == {(5, 7), (7,)}


def forgetful(sparsity, key):
    """Keeps one weight too many."""

    def init(params):
        state = sf.static(sparsity, init="magnitude").init(params)
        first = optree.tree_map(
            lambda m: (
                m.reshape(-1).index_fill(0, torch.tensor([0]), True).reshape(m.shape)
                if m.ndim and m.numel()
                else m
            ),
            state.masks,
        )
        return state._replace(masks=first)

    return sf.Algorithm(init, lambda state, grads, step: state)


@pytest.mark.deep
def test_a_broken_one_is_told_which_law_it_breaks_on_what_and_what_to_declare():
    with pytest.raises(sf.testing.Broken) as raised:
        sf.testing.check_laws(
            forgetful, meta=sf.testing.Meta(when=sf.never()), laws=sf.testing.LAWS[:1]
        )
    text = str(raised.value)
    assert text.startswith(
        "forgetful breaks exact_count, counts_are_exact: after init: "
    )
    first, *_ = text.splitlines()
    asked = (
        "Meta(start='dense') or Meta(exact_count='total') or Meta(exact_count=False)"
    )
    assert first.endswith(f"; if it is not meant to, declare {asked}")
    assert "\ncounts_are_exact on Case(sparsity=" in text
    assert raised.value.__cause__ is None  # a law's own assertion


def test_what_is_declared_is_not_checked():
    meta = sf.testing.Meta(when=sf.never(), exact_count=False)
    report = sf.testing.check_laws(forgetful, meta=meta, laws=sf.testing.LAWS[:1])
    assert report.held == [] and {row.status for row in report.rows} == {
        "does not bind"
    }


@pytest.mark.deep
def test_the_first_failure_raises_and_a_report_has_all_of_them():
    meta = sf.testing.Meta(when=sf.never(), exact_count=False)
    laws = [sf.testing.laws.PURITY, sf.testing.laws.DETERMINISM]
    with pytest.raises(sf.testing.Broken, match="functions_are_pure") as raised:
        sf.testing.check_laws(chance, meta=meta, laws=laws)
    assert "runs_repeat" not in str(raised.value)
    report = sf.testing.check_laws(chance, meta=meta, laws=laws, on_fail="report")
    assert {"functions_are_pure", "runs_repeat"} <= {
        row.check for row in report.rows if row.failed
    }


def test_an_error_of_the_algorithm_is_the_cause_of_what_is_raised():
    def fails(sparsity, key):
        raise RuntimeError("not written yet")

    with pytest.raises(
        sf.testing.Broken, match="^fails: make raises RuntimeError: not written yet"
    ) as raised:
        sf.testing.check_laws(fails, laws=sf.testing.LAWS[:1])
    assert str(raised.value.__cause__) == "not written yet"


def chance(sparsity, key):
    def masks(params):
        def mask(path, leaf):
            return (
                torch.rand(leaf.shape) > 0.5
                if sf.default_where(path, leaf)
                else torch.tensor(True)
            )

        return sf.tree.map_with_path(mask, params)

    return sf.static(None, init=masks)


def test_the_global_generator_is_noticed():
    meta = sf.testing.Meta(when=sf.never(), exact_count=False)
    with pytest.raises(
        sf.testing.Broken,
        match="chance breaks purity, functions_are_pure: init reads or advances a "
        "global",
    ):
        sf.testing.check_laws(chance, meta=meta, laws=[sf.testing.laws.PURITY])
    with pytest.raises(
        sf.testing.Broken,
        match="chance breaks determinism, runs_repeat: run 1, state 0: differs at "
        "masks",
    ):
        sf.testing.check_laws(chance, meta=meta, laws=[sf.testing.laws.DETERMINISM])


def test_what_an_algorithm_raises_is_told_with_the_law_under_which_it_does():
    with pytest.raises(
        sf.testing.Broken,
        match=r"guarded breaks vmap_is_a_loop, vmap_is_a_loop: RuntimeError: vmap: ",
    ):
        sf.testing.check_laws(
            guarded,
            meta=sf.testing.Meta(start="magnitude"),
            laws=[sf.testing.laws.VMAP],
            max_examples=5,
        )


@pytest.mark.parametrize(
    ("make", "meta", "message"),
    [
        (
            sf.static(0.5),
            MAGNITUDE,
            "expected make_algorithm(sparsity, key), got Algorithm",
        ),
        (
            lambda: sf.static(0.5),
            MAGNITUDE,
            "expected make_algorithm to take (sparsity, key) or (sparsity, key, "
            "params), got <lambda>()",
        ),
        (
            lambda a, b, c, d: None,
            MAGNITUDE,
            "(sparsity, key, params), got <lambda>(a, b, c, d)",
        ),
        (
            halving,
            {"monotone": True},
            "expected meta to be a sf.testing.Meta, got dict",
        ),
    ],
    ids=["algorithm", "few", "many", "meta"],
)
def test_bad_arguments(make, meta, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        sf.testing.check_laws(make, meta=meta)


def test_a_way_to_fail_that_there_is_not():
    with pytest.raises(
        ValueError, match='expected on_fail to be "raise" or "report", got \'warn\''
    ):
        sf.testing.check_laws(halving, on_fail="warn")


def test_a_law_on_its_own():
    row = sf.testing.Row("halving", lambda s, key, params: halving(s, key), MAGNITUDE)
    for law in sf.testing.LAWS[:4]:
        for check in law.checks:
            if check.binds(MAGNITUDE):
                sf.testing.check_row(law, check, row, max_examples=4)


# ---- cases that are too easy ---------------------------------------------------------


def on(strategy):
    """A law of one's own, that holds, on examples of one's own."""
    check = sf.testing.laws.Check(
        lambda row, case: None, examples=lambda meta, like: strategy, share=1.0
    )
    return [sf.testing.laws.Law("mine", (check,))]


POOR = {
    "nan": cases(palettes=["exact"]),
    "empty leaf": cases(sf.testing.Form(least=1)),
    "half of a unit": cases().map(lambda case: case._replace(sparsity=0.0)),
}


@pytest.mark.deep(but=["nan"])
@pytest.mark.parametrize("trait", POOR)
def test_a_run_on_a_poor_strategy_fails(trait):
    text = f"halving was tried on cases that are too easy: {trait} in "
    with pytest.raises(sf.testing.Broken, match=f"^{text}") as raised:
        sf.testing.check_laws(halving, laws=on(POOR[trait]), max_examples=110)
    assert len(str(raised.value).splitlines()) == 1
    report = sf.testing.check_laws(
        halving, laws=on(POOR[trait]), max_examples=110, on_fail="report"
    )
    assert not report.ok and report.failures == [str(raised.value)]
    assert (
        report.easy == (str(raised.value).partition("easy: ")[2],)
        and f" of {report.cases} cases" in report.easy[0]
    )
    assert report.easy[0].endswith(
        f", expected {sf.testing.coverage.LEAST[trait]:.0%} or more"
    )


def test_a_run_on_the_strategies_of_the_laws_is_hard_enough():
    report = sf.testing.check_laws(
        halving, meta=MAGNITUDE, laws=on(cases()), max_examples=110
    )
    assert report.ok and report.easy == () and report.cases >= 100


def test_cases_that_are_easy_on_purpose_do_not_count():
    (check,) = [
        check
        for check in sf.testing.laws.EQUIVARIANCE.checks
        if check.name == "permutations_commute"
    ]
    law = sf.testing.laws.Law("mine", (check,))
    report = sf.testing.check_laws(halving, meta=MAGNITUDE, laws=[law], max_examples=8)
    assert report.rows[0].examples == 2 and report.cases == 0 and report.easy is None


def test_a_pattern_that_takes_no_empty_leaf_needs_none():
    form = sf.testing.Form(rows=2, columns=2, least=2)
    layout = sf.testing.Layout(sf.patterns.unstructured(), form=form)
    meta = sf.testing.Meta(pattern=layout)
    assert (
        sf.testing.check_laws(
            halving, meta=meta, laws=on(cases(form)), max_examples=110
        ).easy
        == ()
    )


def test_few_cases_and_those_of_given_params_are_not_judged():
    few = sf.testing.check_laws(halving, laws=on(POOR["nan"]), max_examples=50)
    given = sf.testing.check_laws(
        halving, laws=on(POOR["nan"]), max_examples=110, params={"w": torch.ones(2, 2)}
    )
    for report in (few, given):
        assert report.ok and report.easy is None and report.coverage["nan"] == 0.0


def test_the_first_line_is_short_and_the_rest_stands_below():
    def long(sparsity, key):
        raise ValueError("long " * 100)

    with pytest.raises(sf.testing.Broken) as raised:
        sf.testing.check_laws(long, laws=LAWS[:1], max_examples=2)
    first, empty, whole, *_ = str(raised.value).splitlines()
    assert len(first) == 200 and first.endswith(" ...") and not empty
    assert (
        whole.startswith("long: make raises ValueError: long long") and len(whole) > 500
    )
    report = sf.testing.check_laws(
        long, laws=LAWS[:1], max_examples=2, on_fail="report"
    )
    assert report.failures == [first] and f"\n\n{whole}\n" in str(report)


@pytest.mark.parametrize(
    "made", [None, sf.rigl, (sf.rigl, sf.rigl), sf.optimizers.sgd(0.1), sf.Algorithm]
)
def test_a_function_that_makes_no_algorithm_is_refused(made):
    with pytest.raises(
        TypeError,
        match="expected <lambda> to return an Algorithm, got .*; a pair of functions "
        "is sf.Alg",
    ):
        sf.testing.check_laws(lambda sparsity, key: made)


def test_a_function_that_makes_an_algorithm_at_some_sparsities_alone_is_told():
    def some(sparsity, key):
        return sf.static(sparsity) if sparsity else None

    with pytest.raises(
        sf.testing.Broken,
        match="^some: make raises TypeError: expected some to return an Algorithm, got "
        "N",
    ):
        sf.testing.check_laws(
            some, meta=sf.testing.Meta(when=sf.never()), laws=LAWS[-2:-1]
        )
