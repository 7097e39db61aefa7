"""An algorithm whose updates are CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn._engine.transforms import differentiated, in_mode, transformed
from sparsefn.algorithms.combine.cuda_graphs import GRAPHS, stream_of
from sparsefn.algorithms.combine.parts import check_algorithm
from sparsefn.algorithms.combine.replays import Replays, Target
from sparsefn.algorithms.frame import framed
from sparsefn.core.checks import described
from sparsefn.core.state import Algorithm, State, Step, update_of
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.core.triggers import has_host_step

_CPU = torch.device("cpu")
_MOST_NUMBERS = 1 << 10  # of a key: more are copied to a device, which waits


@described
def captured(algorithm: Algorithm) -> Algorithm:
    """The algorithm whose updates on a GPU are CUDA graphs, captured once and replayed.

    >>> algorithm = sf.captured(
    ...     sf.with_optimizer(sf.rigl(0.5), sf.optimizers.adamw(1e-3))
    ... )
    >>> state = algorithm.init({"w": torch.ones(8, 8)})
    >>> algorithm.update(state, {"w": torch.ones(8, 8)}, 0).masks["w"].sum()
    tensor(32)

    Args:
        algorithm: Algorithm to capture. Put `captured` around `with_optimizer`, and
            `donated` around `captured`.

    Returns:
        Algorithm whose new states have the same bits as without, in tensors that no
        later update writes to. It is `algorithm` itself on other devices, with leaves
        on several devices and with DTensors; under `vmap`, `torch.compile`,
        `torch.autocast` and derivatives through the update; and inside another
        algorithm, `sf.attach` and a capture of yours. Copies and pickles hold no
        graphs.

    Raises:
        TypeError: `algorithm` is no Algorithm.
        ValueError: An update waits for the device, as `float(x)` or `if x > 0` do in a
            score or a trigger of yours (the text names the line), or moves a leaf of
            the state to another device.

    Python needs longer to launch the kernels of an update than a GPU to run them. A
    graph launches all of them at once. The first update of each kind is slow: it runs
    twice, and is captured. Updates of one kind have one structure (the trees of state
    and gradients, and the shapes, strides, dtypes and devices of their leaves), run on
    one CUDA stream, and fire the same triggers. Give the step as an int: Python then
    asks the triggers, and an update in which no mask changes computes none. What else
    depends on the step, such as schedules, sees it as a tensor on the device. With a
    step on the device every update computes new masks, as it does without `captured`.
    What the algorithm was made of, such as the data of a score, is read when an update
    is captured: do not write to it.

    Memory holds a copy of the state and of the gradients for each structure, the
    results of each graph, and the temporaries of the largest: of 8 structures, and of
    16 graphs for each. A new one replaces the one that was used longest ago.
    """
    check_algorithm("captured", algorithm)
    record = update_of(algorithm)
    eager = record.around or record.inner
    replays = Replays(algorithm, record.inner)

    def update(state: State, grads: Tree, step: Step) -> State:
        target = None if transformed() else _target_of(leaves_of((state, grads)))
        if target is None:
            return eager(state, grads, step)
        return replays.update(state, grads, step, target)

    return framed(
        algorithm.init,
        record._replace(around=update),
        algorithm.view,
        algorithm.within,
        algorithm.settled,
    )


def _target_of(given: Sequence[Tree]) -> Target | None:
    """Where an update of these leaves is captured; None where it is not."""
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in given):
        return None
    devices = {x.device for x in given}
    others = devices - {_CPU}
    device = next(iter(others), _CPU)
    if len(others) > 1 or device.type not in GRAPHS:
        return None
    if not all(x.device == device or _is_key(x) for x in given):
        return None
    if in_mode() or has_host_step() or differentiated(*given):
        return None
    if torch.is_autocast_enabled(device.type):
        return None
    stream = stream_of(device)
    return None if stream is None else Target(device, stream)


def _is_key(x: Tensor) -> bool:
    return x.dtype == torch.int64 and x.numel() <= _MOST_NUMBERS
