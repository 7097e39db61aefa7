"""Pictures with matplotlib: what they show, that nothing overlaps, and what is
refused.
"""

import subprocess
import sys

import pytest
import torch
from matplotlib.figure import Figure

import sparsefn as sf
from sparsefn.core.state import State
from sparsefn.report.plots import _short, plot, plot_masks


def state_of(shapes, sparsity=0.5):
    params = {
        path: torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for path, shape in shapes.items()
    }
    return sf.gmp(sparsity, where="*").init(params)


def history_of(paths, n=4):
    state = state_of(dict.fromkeys(paths, (4, 4)))
    return [sf.report.scalars(state, state) for _ in range(n)]


def lines(axes):
    return {
        line.get_color(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
    }


def boxes(figure):
    """The places of all titles, labels and fields, once the figure is drawn."""
    figure.draw_without_rendering()
    parts = [
        part
        for axes in figure.axes
        for part in (axes.title, axes.xaxis.label, axes.yaxis.label, axes.patch)
    ]
    found = [part.get_window_extent() for part in parts]
    return [box for box in found if box.width and box.height]


def apart(figure):
    found = boxes(figure)
    return not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])


def test_plot_has_a_panel_for_every_quantity_and_a_line_for_every_leaf():
    history = [
        {"sparsity": 0.1, "sparsity/a": 0.2, "loss": 3},
        {"sparsity": 0.3, "sparsity/a": 0.4, "sparsity/b": 0.5},
    ]
    figure = plot(history, steps=[10, 20])
    assert isinstance(figure, Figure)
    first, second = figure.axes
    assert (first.get_ylabel(), second.get_ylabel(), first.get_xlabel()) == (
        "sparsity",
        "loss",
        "step",
    )
    total, a, b = lines(first).values()
    assert (total, a, b) == (
        ([10, 20], [0.1, 0.3]),
        ([10, 20], [0.2, 0.4]),
        ([20], [0.5]),
    )
    assert lines(second) == {"black": ([10], [3.0])}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "all leaves",
        "a",
        "b",
    ]
    assert lines(plot(history).axes[0])["black"][0] == [0, 1]
    assert not plot([{"loss": 1.0}]).legends


def test_shares_have_the_scale_from_0_to_1_and_zeros_no_tiny_one():
    figure = plot([{"sparsity": 0.1, "dead_units": 0.0, "grown": 30.0}] * 2)
    (level, dead, grown) = (axes.get_ylim() for axes in figure.axes)
    assert level == dead == (-0.04, 1.04)
    assert grown != level


@pytest.mark.deep(but=["3"])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_no_panel_of_a_run_overlaps_another_and_the_legend_is_inside(n):
    paths = [
        f"_orig_mod.layers.{i}.self_attention.$query$_projection.weight"
        for i in range(n)
    ]
    for history in (history_of(paths), [{f"sparsity/{path}": 0.5 for path in paths}]):
        figure = plot(history)
        assert apart(figure)
        legend = figure.legends[0].get_window_extent()
        assert legend.y0 >= 0
        assert legend.x1 <= figure.bbox.x1
        assert len(figure.legends[0].get_texts()) == min(n, 15) + (
            "sparsity" in history[0]
        )
        assert figure.legends[0].get_title().get_text() == (
            "15 of 40 leaves" if n == 40 else ""
        )


SHAPES = {
    "0.weight": (8, 3, 3, 3),
    "1.weight": (300, 200),
    "bias": (9,),
    "2.weight": (2, 1000),
}


def test_plot_masks_shows_every_entry_or_a_share():
    state = state_of(SHAPES, 0.75)
    figure = plot_masks(state)
    titled = {
        axes.get_title().split("\n")[0]: axes
        for axes in figure.axes
        if axes.get_title()
    }
    assert set(titled) == set(SHAPES)
    shown = {
        path: torch.as_tensor(axes.images[0].get_array().data)
        for path, axes in titled.items()
    }
    assert torch.equal(
        shown["0.weight"], state.masks["0.weight"].reshape(8, 27).float()
    )
    assert torch.equal(shown["bias"], state.masks["bias"].reshape(1, 9).float())
    assert (shown["1.weight"].shape, shown["2.weight"].shape) == ((100, 100), (2, 125))
    shares = state.masks["1.weight"].reshape(100, 3, 100, 2).double().mean((1, 3))
    assert torch.allclose(shown["1.weight"].double(), shares)
    assert titled["1.weight"].get_title() == "1.weight\nsparsity 0.7500"
    assert (titled["1.weight"].get_xlabel(), titled["1.weight"].get_ylabel()) == (
        "200 columns",
        "300 rows",
    )
    assert [axes.get_ylabel() for axes in figure.axes if not axes.get_title()] == [
        "share kept"
    ] * 2
    assert apart(figure)


@pytest.mark.deep(but=["1"])
@pytest.mark.parametrize("n", [1, 7])
def test_no_mask_overlaps_another(n):
    names = {
        f"model.encoder.layers.{i}.self_attention.$query$_projection.weight": (200, 8)
        for i in range(n)
    }
    figure = plot_masks(state_of(names))
    assert apart(figure)
    width, height = figure.bbox.x1, figure.bbox.y1
    assert all(
        box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        for box in boxes(figure)
    )


@pytest.mark.deep
def test_many_masks_stay_within_what_a_picture_can_be():
    figure = plot_masks(state_of({f"{i}.weight": (2, 2) for i in range(100)}))
    assert figure.get_figheight() == 20 * 2.9
    assert figure.get_figwidth() == 5 * 3.1


def test_a_mask_that_keeps_nothing_and_one_that_keeps_all():
    params = {"a": torch.ones(2, 3), "b": torch.ones(2, 3), "c": torch.ones(0, 2)}
    masks = {
        "a": torch.zeros(2, 3) > 0,
        "b": torch.ones(2, 3) > 0,
        "c": torch.ones(0, 2) > 0,
    }
    none, full = plot_masks(State(params, masks)).axes
    assert none.images[0].get_array().tolist() == [[0.0] * 3] * 2
    assert full.images[0].get_array().tolist() == [[1.0] * 3] * 2
    assert none.images[0].get_clim()[0] == full.images[0].get_clim()[0] == 0.0


@pytest.mark.parametrize(
    ("n", "cells"), [(128, 128), (129, 65), (256, 128), (257, 86), (576, 116)]
)
def test_parts_are_nearly_equal_and_none_is_left_out(n, cells):
    mask = torch.zeros(n, n, dtype=torch.bool)
    mask[-1, -1] = True
    (axes, *_) = plot_masks(State({"w": torch.ones(n, n)}, {"w": mask})).axes
    found = axes.images[0].get_array()
    assert found.shape == (cells, cells)
    assert found.nonzero() == ([cells - 1], [cells - 1])
    assert 1 / found[-1, -1] == pytest.approx(round((n / cells) + 0.499) ** 2)
    assert axes.images[0].get_extent() == [0, n, n, 0]


@pytest.mark.parametrize(
    ("n", "columns"), [(1, 1), (3, 3), (4, 2), (5, 3), (7, 4), (9, 3), (10, 5), (13, 5)]
)
def test_panels_leave_few_empty_places(n, columns):
    figure = plot([{str(i): float(i) for i in range(n)}] * 2)
    assert figure.get_figwidth() == pytest.approx(4.2 * columns)
    assert len(figure.axes) == n


def test_panels_share_their_steps():
    figure = plot([{"loss": 1.0}, {"loss": 2.0}, {"accuracy": 0.5}], [0, 100, 200])
    loss, accuracy = figure.axes
    assert loss.get_xlim() == accuracy.get_xlim() == (-4.0, 204.0)


def test_short_names_fit_and_stay_different():
    paths = [
        f"model.encoder.layers.{i}.self_attention.with.many.words.query.weight"
        for i in range(12)
    ]
    names = _short(paths)
    assert len(set(names)) == 12
    assert max(map(len, names)) <= 34
    assert _short(["a.weight", "a.bias"]) == ["a.weight", "a.bias"]
    assert len(_short(["x" * 80])[0]) == 34
    assert _short([]) == []


@pytest.mark.deep
def test_pyplot_is_not_loaded():
    script = (
        "import sys, torch, sparsefn as sf\n"
        "state = sf.static(0.5).init({'weight': torch.ones(2, 2)})\n"
        "sf.report.plot([sf.report.scalars(state)]), sf.report.plot_masks(state)\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: plot([{"a": 1.0}]), "plot"),
        (lambda: plot_masks(state_of({"w": (2, 2)})), "plot_masks"),
    ],
)
def test_without_matplotlib_the_error_says_what_to_install(call, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError) as raised:
        call()
    assert str(raised.value) == f"{name} needs matplotlib: pip install 'sparsefn[demo]'"


STATE = state_of({"w": (2, 2)})


NO_VALUES = (
    "plot: expected a history of one dict or more as scalars gives, got no values"
)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: plot([{"a": 1.0}, 0.5]),
            TypeError,
            "plot: expected history of dicts as scalars gives, got float at 1",
        ),
        (lambda: plot([]), ValueError, NO_VALUES),
        (
            lambda: plot([{}]),
            ValueError,
            "plot: expected a history of one dict or more as scalars gives, got no "
            "values",
        ),
        (
            lambda: plot([{"a": 1.0}], steps=[1, 2]),
            ValueError,
            "plot: expected as many steps as dicts in history, 1, got 2",
        ),
        (
            lambda: plot_masks({"w": torch.ones(2)}),
            TypeError,
            "plot_masks: expected a State, as algorithm.init(params) gives it, got "
            "dict",
        ),
        (
            lambda: plot_masks(sf.dense().init({"w": torch.ones(2, 2)})),
            ValueError,
            "plot_masks: expected a state with a sparsified leaf, got none",
        ),
        (
            lambda: plot_masks(STATE._replace(masks={"w": torch.ones(3) > 0})),
            ValueError,
            "expected a mask of shape (2, 2) or () at 'w', got (3,)",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


def test_a_stack_is_refused():
    with pytest.raises(ValueError, match="expected one state, got a stack of 2"):
        plot_masks(sf.ensemble.stack([STATE, STATE]))
