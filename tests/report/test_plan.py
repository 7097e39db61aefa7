"""Plans: what an algorithm will keep, before training."""

import pytest
import torch

import sparsefn as sf
from sparsefn.report.plan import plan
from sparsefn.report.summary import Row

GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    "0": {"weight": torch.randn(32, 48, generator=GENERATOR), "bias": torch.zeros(32)},
    "emb": torch.randn(9, 8, generator=GENERATOR),
    "1": {"weight": torch.randn(4, 32, generator=GENERATOR)},
    "head": torch.randn(4, 4, generator=GENERATOR),
}


KEY = next(
    key
    for key in map(sf.random.key, range(100))
    if not any(plan(sf.rigl(0.25, where="1.weight", key=key), PARAMS).total.dead)
)


def counts(found):
    return {row.path: row.kept for row in found.rows}


def test_counts_are_those_of_the_budget_and_dense_leaves_say_why():
    budget, where = sf.budgets.erk(), ["?.weight", "head"]
    found = plan(sf.rigl(0.8, distribution=budget, where=where), PARAMS)
    kept = budget({"0.weight": (32, 48), "1.weight": (4, 32), "head": (4, 4)}, 0.8)
    assert kept["head"] == 16
    assert tuple(row._replace(dead=(0, 0)) for row in found.rows) == (
        Row("0.bias", (32,), 32, 32, 0.0, why="fewer than 2 dimensions"),
        Row(
            "0.weight",
            (32, 48),
            kept["0.weight"],
            1536,
            1 - kept["0.weight"] / 1536,
            why="",
        ),
        Row(
            "1.weight",
            (4, 32),
            kept["1.weight"],
            128,
            1 - kept["1.weight"] / 128,
            why="",
        ),
        Row("emb", (9, 8), 72, 72, 0.0, why="'emb' in its name"),
        Row("head", (4, 4), 16, 16, 0.0, why="its mask keeps all"),
    )
    assert found.dense == ("0.bias", "emb")
    assert (
        found.sparsified.kept
        == sf.budgets.n_kept(1680, 0.8)
        == found.total.kept - 32 - 72
    )


def test_a_leaf_that_the_default_takes_and_where_does_not_is_not_chosen():
    rows = plan(sf.static(0.5, where="0.weight"), PARAMS).rows
    why = {row.path: row.why for row in rows}
    assert why["head"] == why["1.weight"] == "not chosen"
    assert why["0.weight"] == ""


def test_a_plan_is_an_aligned_table():
    assert str(plan(sf.rigl(0.25, where="1.weight", key=KEY), PARAMS)).splitlines() == [
        "path        shape      kept  total  sparsity  dense because",
        "0.bias      (32,)        32     32     dense  fewer than 2 dimensions",
        "0.weight    (32, 48)  1,536  1,536     dense  not chosen",
        "1.weight    (4, 32)      96    128    0.2500",
        "emb         (9, 8)       72     72     dense  'emb' in its name",
        "head        (4, 4)       16     16     dense  not chosen",
        "sparsified               96    128    0.2500",
        "all                   1,752  1,784    0.0179",
    ]
    assert (
        str(plan(sf.dense(), {})).splitlines()[0]
        == "path        shape  kept  total  sparsity"
    )


RISING = {
    "gmp": sf.gmp(sf.schedules.polynomial(0.0, 0.9, begin=0, end=5), when=sf.every(2)),
    "iterative": sf.iterative(0.2),
    "one_shot": sf.one_shot(0.9),
    "optimizer": sf.with_optimizer(
        sf.gmp(0.75, init="dense"), sf.optimizers.adamw(1e-2)
    ),
}


@pytest.mark.parametrize("name", RISING)
def test_with_steps_it_counts_what_training_with_any_gradients_ends_with(name):
    algorithm, state = RISING[name], RISING[name].init(PARAMS)
    assert counts(plan(algorithm, PARAMS)) == counts(sf.report.summary(state))
    for step in range(5):
        grads = sf.tree.map_with_path(
            lambda _, leaf: torch.randn(leaf.shape, generator=GENERATOR), PARAMS
        )
        state = algorithm.update(state, grads, step)
    assert counts(plan(algorithm, PARAMS, 5)) == counts(sf.report.summary(state))


def test_gradients_decide_where_scores_do():
    params = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}
    snip = sf.one_shot(0.5, sf.scores.saliency, distribution=sf.budgets.global_())
    grads = {"a": torch.zeros(2, 2), "b": torch.tensor([[3.0, 0.0], [2.0, 1.0]])}
    found = plan(snip, params, steps=1, grads=grads)
    assert counts(found) == {"a": 1, "b": 3}
    assert found.sparsified.kept == plan(snip, params, steps=1).sparsified.kept == 4


def test_nothing_is_changed():
    params = {"w": torch.nn.Parameter(torch.ones(4, 4))}
    plan(sf.with_optimizer(sf.set(0.5), sf.optimizers.sgd(0.1)), params, 2)
    assert torch.equal(params["w"], torch.ones(4, 4))
    assert params["w"].grad is None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: plan(0.9, PARAMS),
            TypeError,
            "plan: expected an algorithm such as sf.rigl(0.9), got float",
        ),
        (
            lambda: plan(sf.rigl(0.9), PARAMS, 1.0),
            TypeError,
            "plan: expected steps to be an int, got float",
        ),
        (
            lambda: plan(sf.rigl(0.9), PARAMS, -1),
            ValueError,
            "plan: expected steps >= 0, got -1",
        ),
        (
            lambda: plan(
                sf.rigl(0.9), {"w": torch.ones(2, 2)}, 1, {"w": torch.ones(2, 3)}
            ),
            ValueError,
            "expected grads of shape (2, 2) at 'w', got (2, 3)",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


def test_notes_say_what_a_run_of_that_length_does_not_finish():
    late = sf.gmp(sf.schedules.polynomial(0.0, 0.9, 0, 20), where="1.weight")
    assert plan(late, PARAMS).notes == plan(late, PARAMS, steps=21).notes == ()
    found = plan(late, PARAMS, steps=5)
    note = (
        "polynomial(0.0, 0.9, 0, 20) ends at step 20, after the run of 5 steps: its "
        "last value there is 0.439, not 0.9"
    )
    assert found.notes == (note,)
    assert str(found).splitlines()[-1] == f"note: {note}"
    assert plan(sf.rigl(0.5, steps=300), PARAMS, steps=3).notes == (
        "rigl(0.5, steps=300) takes 300 steps, more than the run of 3 steps",
    )
