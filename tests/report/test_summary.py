"""Tables of what a state keeps and of what changed."""

import pytest
import torch

import sparsefn as sf
from sparsefn import ensemble
from sparsefn.core import schedules
from sparsefn.core.state import State
from sparsefn.report.summary import Change, Observed, Row, changed, observe, summary

T = torch.tensor(True)


def mask(*rows):
    return torch.tensor([[x == "1" for x in row] for row in rows])


STATE = State(
    {
        "1": {"weight": torch.ones(40, 50), "bias": torch.ones(40)},
        "0": {"weight": torch.ones(2, 4)},
    },
    {
        "1": {"weight": torch.arange(2000).reshape(40, 50) < 500, "bias": T},
        "0": {"weight": mask("1100", "0001")},
    },
)


def test_summary_counts():
    report = summary(STATE)
    assert report.rows == (
        Row("0.weight", (2, 4), 3, 8, 5 / 8, dead=(0, 1)),
        Row("1.bias", (40,), 40, 40, 0.0),
        Row("1.weight", (40, 50), 500, 2000, 0.75, dead=(30, 0)),
    )
    assert report.total == Row("all", (), 543, 2048, 1505 / 2048, dead=(30, 1))
    assert report.sparsified == Row(
        "sparsified", (), 503, 2008, 1505 / 2008, dead=(30, 1)
    )
    assert report.dense == ("1.bias",)


def test_summary_is_an_aligned_table():
    assert str(summary(STATE)).splitlines() == [
        "path        shape     kept  total  sparsity               dead",
        "0.weight    (2, 4)       3      8    0.6250           1 column",
        "1.bias      (40,)       40     40     dense",
        "1.weight    (40, 50)   500  2,000    0.7500            30 rows",
        "sparsified             503  2,008    0.7495  30 rows, 1 column",
        "all                    543  2,048    0.7349  30 rows, 1 column",
    ]


def test_rows_and_columns_that_keep_nothing_are_counted():
    masks = {
        "conv": torch.zeros(4, 3, 2, 2, dtype=torch.bool),
        "cube": torch.ones(2, 3, 4, dtype=torch.bool),
        "line": mask("0100")[0],
        "full": T,
        "none": torch.zeros(0, 3, dtype=torch.bool),
        "all": torch.zeros(2, 2, dtype=torch.bool),
    }
    masks["conv"][1, 2, 1, 0] = masks["conv"][3, 2, 0, 0] = True
    masks["cube"][1] = False
    sizes = {path: m.shape if m.ndim else (2, 2) for path, m in masks.items()}
    found = summary(
        State({path: torch.ones(shape) for path, shape in sizes.items()}, masks)
    )
    assert {row.path: row.dead for row in found.rows if any(row.dead)} == {
        "conv": (2, 2),
        "cube": (1, 0),
        "all": (2, 2),
    }
    assert found.total.dead == found.sparsified.dead == (5, 4)


def test_uniform_at_one_percent_leaves_outputs_without_inputs():
    state = sf.static(0.99, where="w").init({"w": torch.ones(10, 60)})
    empty = int((~state.masks["w"].any(1)).sum())
    assert empty and summary(state).rows[0].dead[0] == empty


def test_rows_are_in_the_order_of_the_layers():
    params = {f"layers.{i}.w": torch.ones(2, 2) for i in (10, 2, 1)} | {
        "layers.2.b": torch.ones(2),
        "a": torch.ones(1),
    }
    state = sf.static(0.5, where="*.w").init(params)
    paths = ["a", "layers.1.w", "layers.2.b", "layers.2.w", "layers.10.w"]
    assert [row.path for row in summary(state).rows] == paths
    assert [row.path for row in changed(state, state).rows] == [
        path for path in paths if path.endswith("w")
    ]
    assert [
        row.path for row in sf.report.plan(sf.static(0.5, where="*.w"), params).rows
    ] == paths
    assert summary(state).dense == ("a", "layers.2.b")


def test_dense_leaves_may_be_left_out():
    whole, some = summary(STATE), summary(STATE, only="sparsified")
    assert some == whole._replace(
        rows=tuple(row for row in whole.rows if row.path != "1.bias")
    )
    with pytest.raises(
        ValueError,
        match="summary: expected only to be 'sparsified' or None, got 'dense'",
    ):
        summary(STATE, only="dense")


def test_summary_reads_masks_and_not_weights():
    state = State({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([True, True])})
    assert summary(state).total.sparsity == 0.0
    assert summary(state).dense == ()


def test_summary_of_nothing():
    report = summary(State({}, {}))
    assert report.rows == ()
    assert report.total == Row("all", (), 0, 0, 0.0)
    empty = summary(
        State({"w": torch.zeros(0, 3)}, {"w": torch.zeros(0, 3, dtype=torch.bool)})
    )
    assert empty.sparsified.sparsity == 0.0


def test_summary_refuses():
    with pytest.raises(
        ValueError,
        match=r"expected a mask of shape \(40, 50\) or \(\) at '1.weight', got \(40, "
        r"1\)",
    ):
        summary(
            STATE._replace(
                masks={
                    "1": {"weight": mask(*["1"] * 40), "bias": T},
                    "0": {"weight": T},
                }
            )
        )
    with pytest.raises(
        ValueError,
        match="expected masks with the structure of params, but there is no leaf at "
        "'0.weight'",
    ):
        summary(STATE._replace(masks={"1": STATE.masks["1"]}))
    with pytest.raises(
        ValueError,
        match="got a stack of 2: sf.ensemble.summary counts the members of a stack",
    ):
        summary(ensemble.stack([STATE, STATE]))
    assert str(summary(ensemble.member(ensemble.stack([STATE, STATE]), 1))) == str(
        summary(STATE)
    )


def test_changed_counts_and_table():
    old = State(
        {"a": torch.ones(2, 3), "b": torch.ones(2), "c": torch.ones(4)},
        {"a": mask("110", "011"), "b": T, "c": T},
    )
    new = old._replace(
        masks={
            "a": mask("100", "111"),
            "b": T,
            "c": torch.tensor([True, False, False, True]),
        }
    )
    report = changed(old, new)
    assert report.rows == (Change("a", 3, 1, 1, 3 / 5), Change("c", 2, 0, 2, 0.5))
    assert report.total == Change("total", 5, 1, 3, 5 / 9)
    assert str(report).splitlines() == [
        "path   kept  grown  dropped  overlap",
        "a         3      1        1   0.6000",
        "c         2      0        2   0.5000",
        "total     5      1        3   0.5556",
    ]
    back = changed(new, old)
    assert (back.total.grown, back.total.dropped, back.total.kept) == (3, 1, 5)


def test_changed_of_a_state_with_itself_and_of_empty_masks():
    assert changed(STATE, STATE).total == Change("total", 503, 0, 0, 1.0)
    none = State({"w": torch.ones(3)}, {"w": torch.zeros(3, dtype=torch.bool)})
    assert changed(none, none).rows == (Change("w", 0, 0, 0, 1.0),)
    assert changed(State({}, {}), State({}, {})).total.overlap == 1.0


def test_changed_refuses_states_that_differ():
    with pytest.raises(
        ValueError,
        match="expected the new params .* but there is an unknown leaf at 'b'",
    ):
        changed(
            State({"a": torch.ones(2)}, {"a": T}),
            State({"a": torch.ones(2), "b": torch.ones(1)}, {"a": T, "b": T}),
        )
    with pytest.raises(
        ValueError, match=r"expected the new params of shape \(2,\) at 'a', got \(3,\)"
    ):
        changed(
            State({"a": torch.ones(2)}, {"a": T}), State({"a": torch.ones(3)}, {"a": T})
        )
    with pytest.raises(
        TypeError, match=r"expected a bool mask at 'a', got torch.float32"
    ):
        changed(
            State({"a": torch.ones(2)}, {"a": T}),
            State({"a": torch.ones(2)}, {"a": torch.ones(2)}),
        )


def test_observe_shows_leaves_that_have_a_mask():
    assert observe(STATE) == {
        "0.weight": Observed(5 / 8, None),
        "1.weight": Observed(0.75, None),
    }


def test_observe_shows_the_target_at_a_step_as_algorithms_read_it():
    schedule = schedules.linear(0.0, 0.4)
    for step, target in ((0, 0.0), (2, 0.8), (3, 1.0)):
        assert observe(STATE, schedule, step)["1.weight"] == Observed(0.75, target)
    assert observe(STATE, 0.75)["1.weight"] == Observed(0.75, 0.75)


def test_observe_works_where_values_are_hidden():
    stack = ensemble.stack([STATE, STATE])
    seen = torch.func.vmap(
        lambda state, step: observe(state, schedules.linear(0.0, 0.4), step)["1.weight"]
    )(stack, torch.tensor([1, 2]))
    assert seen.computed.tolist() == [0.75, 0.75]
    assert seen.target.tolist() == [0.4, 0.8]


def test_observe_refuses():
    with pytest.raises(
        ValueError, match=r"expected a mask of shape \(2,\) or \(\) at 'w', got \(3,\)"
    ):
        observe(State({"w": torch.ones(2)}, {"w": torch.ones(3, dtype=torch.bool)}))
    with pytest.raises(TypeError, match="expected sparsity to be a float in"):
        observe(STATE, 1)
