"""Pictures of a run and of masks, with matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import adaptive_avg_pool2d

from sparsefn.algorithms.frame import sparse_leaves
from sparsefn.core.state import State
from sparsefn.nn.modules.calls import check_state
from sparsefn.report.summary import check_counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMES = 15  # leaves named beside the lines
_MOST_CELLS = (
    128  # rows and columns of an image, which are parts of the leaf where it has more
)
# lines: of all leaves, where it is under the lines of leaves, and of each leaf
_THICK = 2.6
_THIN = 1.2
_LONGEST = 34  # characters of a path above an image


def plot(
    history: Sequence[Mapping[str, float]], steps: Sequence[int] | None = None
) -> Figure:
    """A picture of a run: a panel for every quantity, a line for every leaf.

    >>> state = sf.static(0.5).init(
    ...     {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)}
    ... )
    >>> history = [sf.report.scalars(state, state) for step in range(3)]
    >>> figure = sf.report.plot(history, steps=[0, 100, 200])
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['sparsity', 'dead units', 'overlap', 'grown', 'dropped']

    Args:
        history: A dict of `scalars` for each time of logging. Other quantities in the
            dicts, such as `loss`, get panels, too, and a quantity may be missing at
            some times.
        steps: The steps of these times. None: the times are counted.

    Returns:
        A matplotlib Figure that belongs to no window; `figure.savefig("run.png")`
        writes it. The black line is the value of all leaves.

    Raises:
        ImportError: Matplotlib is missing (`pip install 'sparsefn[demo]'`).
        TypeError: `history` is not of dicts.
        ValueError: `history` has no values, or another length than `steps`.
    """
    figure = _figure("plot")
    for i, values in enumerate(history):
        if not isinstance(values, Mapping):
            raise TypeError(
                "plot: expected history of dicts as scalars gives, got "
                f"{type(values).__name__} at {i}"
            )
    times = list(range(len(history)) if steps is None else steps)
    if len(times) != len(history):
        raise ValueError(
            f"plot: expected as many steps as dicts in history, {len(history)}, got "
            f"{len(times)}"
        )
    names = list(dict.fromkeys(name for values in history for name in values))
    if not names:
        raise ValueError(
            "plot: expected a history of one dict or more as scalars gives, got no "
            "values"
        )
    quantities = list(dict.fromkeys(name.split("/", 1)[0] for name in names))
    paths = list(dict.fromkeys(name.split("/", 1)[1] for name in names if "/" in name))
    colours = _colours(len(paths))
    panels = _panels(figure, len(quantities), 4.2, 3.2)
    for axes in panels[1:]:
        # the same steps, also where a quantity is missing at some
        axes.sharex(panels[0])
    for axes, quantity in zip(panels, quantities, strict=True):
        if quantity in names:
            width = _THIN
            if any(name.startswith(f"{quantity}/") for name in names):
                width = _THICK
            axes.plot(*_line(history, quantity, times), color="black", linewidth=width)
        for path, colour in zip(paths, colours, strict=True):
            name = f"{quantity}/{path}"
            if name in names:
                axes.plot(*_line(history, name, times), color=colour, linewidth=_THIN)
        axes.set_xlabel("time of logging" if steps is None else "step")
        axes.set_ylabel(quantity.replace("_", " "), parse_math=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02, y=0.08)
        if (
            quantity in ("sparsity", "overlap")
            or axes.dataLim.ymin == axes.dataLim.ymax == 0
        ):
            # the same for every run; around zeros matplotlib would show tiny numbers
            axes.set_ylim(-0.04, 1.04)
    if paths:
        figure.set_size_inches(figure.get_figwidth() + 2, figure.get_figheight())
        _name_lines(
            figure,
            paths,
            colours,
            total=any(quantity in names for quantity in quantities),
        )
    return figure


def _line(
    history: Sequence[Mapping[str, float]], name: str, times: list[int]
) -> tuple[list[int], list[float]]:
    known = [
        (time, float(values[name]))
        for time, values in zip(times, history, strict=True)
        if name in values
    ]
    return [time for time, _ in known], [value for _, value in known]


def _name_lines(
    figure: Figure,
    paths: list[str],
    colours: list[str],
    total: bool,
) -> None:
    # One legend for all panels; of many leaves only some, evenly chosen.
    from matplotlib.lines import Line2D

    n = min(len(paths), _MOST_NAMES)
    chosen = [round(i * (len(paths) - 1) / max(n - 1, 1)) for i in range(n)]
    lines = [Line2D([], [], color=colours[i]) for i in chosen]
    names = _short([paths[i] for i in chosen])
    if total:
        lines = [Line2D([], [], color="black", linewidth=_THICK), *lines]
        names = ["all leaves", *names]
    title = f"{n} of {len(paths)} leaves" if n < len(paths) else None
    # matplotlib leaves out names that begin with _
    places = [str(i) for i in range(len(lines))]
    sizes = {"fontsize": 8, "title_fontsize": 8}
    legend = figure.legend(
        lines, places, title=title, loc="outside right upper", frameon=False, **sizes
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def plot_masks(state: State) -> Figure:
    """A picture of the masks, with an image for every sparsified leaf.

    >>> figure = sf.report.plot_masks(
    ...     sf.static(0.5).init({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    ... )
    >>> [axes.get_title() for axes in figure.axes]
    ['weight\\nsparsity 0.5000']

    Args:
        state: The state.

    Returns:
        A matplotlib Figure that belongs to no window; `figure.savefig("masks.png")`
        writes it. An image is dark where weights are kept. Rows are the first dimension
        of a leaf, columns are the others in row-major order. Of a leaf of more than 128
        rows or columns the image shows parts of equal size, or nearly, at most 128, and
        the share that is kept in each, with a colour bar.

    Raises:
        ImportError: Matplotlib is missing (`pip install 'sparsefn[demo]'`).
        TypeError: `state` is not a State.
        ValueError: `state` is a stack of states, its masks do not fit its params, or no
            leaf has a mask with entries.
    """
    check_state("plot_masks", state)
    check_counted(state)
    masks = {
        path: mask for path, mask in sparse_leaves(state)[1].items() if mask.numel()
    }
    if not masks:
        raise ValueError(
            "plot_masks: expected a state with a sparsified leaf, got none"
        )
    figure = _figure("plot_masks")
    from matplotlib.ticker import MaxNLocator

    panels = _panels(figure, len(masks), 3.1, 2.9)
    for axes, name, mask in zip(
        panels, _short(list(masks)), masks.values(), strict=True
    ):
        if mask.ndim > 1:
            plane = mask.detach().cpu().reshape(len(mask), -1)
        else:
            plane = mask.detach().cpu()[None]
        rows, columns = plane.shape
        # As many as divide evenly, or nearly: parts of one entry and of two would show
        # a pattern of their own.
        down, across = (math.ceil(n / math.ceil(n / _MOST_CELLS)) for n in plane.shape)
        share = adaptive_avg_pool2d(plane.float()[None], (down, across))[0]
        box = (0, columns, rows, 0)
        top = max(float(share.max()), 1 / plane.numel())
        shown = share.numpy()
        image = axes.imshow(
            shown,
            "Blues",
            aspect="auto",
            interpolation="nearest",
            vmin=0,
            vmax=top,
            extent=box,
        )
        if share.shape != plane.shape:
            bar = figure.colorbar(image, ax=axes, pad=0.03, ticks=MaxNLocator(5))
            bar.set_label("share kept", fontsize=8)
            bar.ax.tick_params(labelsize=7)
        sparsity = 1 - int(torch.count_nonzero(plane)) / plane.numel()
        axes.set_title(f"{name}\nsparsity {sparsity:.4f}", fontsize=9, parse_math=False)
        axes.set_xlabel(f"{columns:,} columns", fontsize=8)
        axes.set_ylabel(f"{rows:,} rows", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.locator_params(integer=True, nbins=4)
    return figure


def _figure(call: str) -> Figure:
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError(
            f"{call} needs matplotlib: pip install 'sparsefn[demo]'"
        ) from error
    return Figure(layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def _panels(figure: Figure, n: int, width: float, height: float) -> list[Axes]:
    # A grid of n axes and a figure that has room for it: about as high as wide, for
    # many axes four times as high.
    if n <= 16:
        columns = math.ceil(math.sqrt(n))
    else:
        columns = max(4, math.ceil(math.sqrt(n) / 2))
    # the fewest empty places
    columns = min(columns, columns + 1, key=lambda count: -n % count)
    rows = math.ceil(n / columns)
    figure.set_size_inches(width * columns, height * rows)
    return [figure.add_subplot(rows, columns, i + 1) for i in range(n)]


def _colours(n: int) -> list[str]:
    # As different as can be; of more leaves than that allows, from the first leaf to
    # the last.
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    few = colormaps["tab10"]
    many = colormaps["viridis"]
    made = []
    for i in range(n):
        colour = few(i) if n <= 10 else many(0.85 * i / (n - 1))
        made.append(to_hex(colour))
    return made


def _short(paths: list[str]) -> list[str]:
    """Paths that fit above an image: long ones without what all begin with, and without
    their middle.

    >>> _short(
    ...     [
    ...         "model.layers.0.self_attention.query.weight",
    ...         "model.layers.1.self_attention.query.weight",
    ...     ]
    ... )
    ['…0.self_attention.query.weight', '…1.self_attention.query.weight']
    """
    parts = [path.split(".") for path in paths]
    begin = os.path.commonprefix(parts)  # noqa: RUF071  # of lists of names
    shared = len(begin) if len(paths) > 1 else 0
    names = []
    for name, own in zip(paths, parts, strict=True):
        if len(name) > _LONGEST and shared:
            name = "…" + ".".join(own[shared:])
        if len(name) > _LONGEST:
            name = f"{name[:13]}…{name[14 - _LONGEST :]}"
        names.append(name)
    return names
