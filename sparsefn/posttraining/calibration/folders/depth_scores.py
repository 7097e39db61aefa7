"""Scores of the layers of a model in a folder, with one layer in memory at a time."""

from __future__ import annotations

import functools
import operator
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from sparsefn._engine.processes import agreement
from sparsefn.core.checks import check_sparsity
from sparsefn.core.rounding import rounded
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.masks.select import topk_mask
from sparsefn.nn.distributed.ends import everyone
from sparsefn.nn.modules.calls import Call, Example, quiet_call
from sparsefn.posttraining.calibration.cache import (
    BrokenChainError,
    CachedTree,
    cache_tree,
)
from sparsefn.posttraining.calibration.capture import guarded_calls
from sparsefn.posttraining.calibration.directions import angle_of, influence_of
from sparsefn.posttraining.calibration.folders.disk import in_the_name_of
from sparsefn.posttraining.calibration.folders.model import open_folder
from sparsefn.posttraining.calibration.folders.resume import Runs
from sparsefn.posttraining.calibration.folders.stream import (
    batch_calls,
    device_of,
    share,
    tokens_of_calls,
)
from sparsefn.posttraining.calibration.inputs import (
    arguments_by_name,
    check_data,
    without_fusion,
)

SCORES = ("influence", "angular")


class LayerScores(NamedTuple):
    """What the layers of a model are worth, from one pass over calibration data.

    >>> scores = sf.calibration.LayerScores(
    ...     ("layers.0", "layers.1", "layers.2", "layers.3"),
    ...     torch.tensor([0.4, 0.1, 0.2, 0.1]),
    ...     torch.tensor([[0.4, 0.2], [torch.nan, 0.3]]),
    ... )
    >>> scores.lowest(0.5)
    ['layers.1', 'layers.3']

    Attributes:
        layers: The paths of the layers, in the order in which data passes them.
        influence: Float64 tensor (layers,): 1 - the mean cosine of what enters a layer
            and what leaves it, as `sf.shrinking.influence` has it.
        angles: Float64 tensor (layers, layers), in half turns: `angles[i, j]` is the
            angular distance of what enters layer i and what leaves layer j, at the last
            token, as `sf.shrinking.angular_distance` has it. NaN where j is before i,
            or in another list of layers.
    """

    layers: tuple[str, ...]
    influence: Tensor
    angles: Tensor

    def lowest(self, fraction: float, score: str = "influence") -> list[str]:
        """The layers that change the hidden states least, for `drop_layers`.

        Args:
            fraction: The fraction of all layers, a float from 0 to 1:
                `sf.budgets.rounded` makes it a count.
            score: "influence" takes the layers of lowest influence, as ShortGPT;
                "angular" takes layers that follow one another, the span with the
                smallest angle.

        Returns:
            Exactly so many paths, in the order of the layers. Ties go to the first
            layer, or to the span that starts first.

        Raises:
            TypeError: `fraction` is no float.
            ValueError: It is not from 0 to 1, or takes all layers, `score` is another
                word, or no list of layers has a span of so many.
        """
        if score not in SCORES:
            raise ValueError(
                "LayerScores.lowest: expected score to be 'influence' or 'angular', "
                f"got {score!r}"
            )
        total = len(self.layers)
        count = int(rounded(check_sparsity(fraction, "fraction"), total))
        if not count:
            return []
        if count == total:
            raise ValueError(
                "LayerScores.lowest: expected a fraction that leaves a layer or more, "
                f"but {fraction} of {total} layers are all: give a smaller one"
            )
        if score == "influence":
            lowest = topk_mask(-self.influence, count).tolist()
            return [
                path for path, goes in zip(self.layers, lowest, strict=True) if goes
            ]
        spans = self.angles.diagonal(count - 1).nan_to_num(torch.inf)
        start = int(spans.argmin())
        if spans[start] == torch.inf:
            raise ValueError(
                "LayerScores.lowest: expected a list of layers with a span of "
                f"{count}, got {total} layers in shorter lists: give a smaller "
                "fraction, or score='influence'"
            )
        return list(self.layers[start : start + count])


def layer_scores(
    folder: str | os.PathLike[str],
    batches: Sequence[Example],
    *,
    tokens: Sequence[Tensor] | None = None,
    make: Callable[[], nn.Module] | None = None,
) -> LayerScores:
    """Score the layers of a model that need not fit in memory, in one pass.

    >>> sf.calibration.layer_scores("/nowhere", [{"input_ids": torch.arange(8)[None]}])
    Traceback (most recent call last):
        ...
    ValueError: layer_scores: expected the folder of a model, got '/nowhere', which is
    no folder

    Args:
        folder: The folder of the model, as in `stream`.
        batches: What the model is called with, as in `stream`. Layers run on the device
            of the batches.
        tokens: For each batch a bool tensor that says which tokens count, where they
            are padded. None: all count.
        make: A function that returns the model, as in `stream`. None: the class that
            config.json names.

    Returns:
        The scores of the members of the model's lists of layers. `scores.lowest(0.25)`
        names a quarter of them, which `drop_layers` leaves out of a new folder.

    Raises:
        OSError: The disk is full: make room, and call again.
        TypeError: `batches` is no list, or `make` gives no module.
        ValueError: The folder is as `stream` refuses it, the model does not call its
            layers one after the other, or a layer gives hidden states that are not
            finite, or of another shape than it takes.

    The scores are the means over batches, each of which counts the same, and with the
    same batches the numbers of `sf.shrinking.influence` and
    `sf.shrinking.angular_distance` of layers by "module". In memory are one layer and
    one batch's activations, and of all batches the last tokens. Activations of the
    other batches are in a temporary folder, about three times the hidden states of all
    batches: the environment variable TMPDIR says where. A pass that was killed starts
    again from the first layer. Several processes of `torch.distributed` share the
    batches, and get the bits of one process.

    Men et al. 2024, arXiv 2403.03853, eq. 1; Gromov et al. 2024, arXiv 2403.17887.
    """
    with in_the_name_of("layer_scores"):
        calls = batch_calls(batches)
        counted = tokens_of_calls(tokens, len(calls))
        device = device_of(calls)
        with agreement(everyone()):
            source = open_folder(Path(folder), None, make, device)
            data = zip(calls, counted, strict=True)
            check_data("layer_scores", source.model.module, data)
        with tempfile.TemporaryDirectory() as work, agreement(everyone()):
            scratch = Path(work, "calls")
            scratch.mkdir()
            try:
                runs = Runs(source, share(calls), scratch, device)
                found = _scored(runs, share(counted))
            except BrokenChainError as error:
                raise ValueError(
                    "layer_scores: expected layers that run one after the other, but "
                    f"{error}: score the model in memory, with sf.shrinking.influence"
                ) from None
            except OSError as error:
                raise OSError(
                    "layer_scores: the activations could not be kept in "
                    f"{work!r}: {error.__cause__ or error}. Make room, or name another "
                    "folder by TMPDIR, and call again"
                ) from error
            every = _of_all(found)
    total = functools.reduce(operator.add, every)
    return LayerScores(
        tuple(source.order), total[0] / len(every), total[1:] / len(every)
    )


def _scored(runs: Runs, counted: Sequence[Tensor | None]) -> list[Tensor]:
    # Of each batch the influence of all layers, in a row, and below it their angles.
    order = runs.folder.order
    total = len(order)
    made = [
        torch.full((1 + total, total), torch.nan, dtype=torch.float64, device="cpu")
        for _ in counted
    ]
    # what entered the layers of a list, at the last tokens of a batch
    entered: list[list[Tensor]] = [[] for _ in counted]
    starts: dict[str, int] = {}
    for number, path in enumerate(order):
        first = starts.setdefault(path.rpartition(".")[0], number)
        if first == number:
            entered = [[] for _ in counted]
        runs.advance(number)
        weights, _ = runs.folder.load(path, runs.device)
        part = runs.chain.parts[path]
        run = quiet_call(part, weights)
        outputs = list[CachedTree]()
        for i, call in enumerate(guarded_calls(runs.paused, number, again=False)):
            given = _hidden(part.module, call)
            with torch.no_grad(), without_fusion():
                out = run(call)
            outputs.append(cache_tree(out, runs.paused[i].cache))
            before, after = _pair(path, given, out, counted[i])
            made[i][0, number] = influence_of(before, after)
            entered[i].append(_last(given[0], counted[i]))
            end = _last(_floats(out)[0], counted[i])
            for start, begin in enumerate(entered[i], first):
                made[i][1 + start, number] = angle_of(begin, end)
        del weights, run
        runs.finish(number, outputs)
    return made


def _floats(tree: Tree) -> list[Tensor]:
    return [
        x for x in leaves_of(tree) if isinstance(x, Tensor) and x.is_floating_point()
    ]


def _hidden(part: nn.Module, call: Call) -> list[Tensor]:
    # The floats that a layer takes, by the order of its arguments. A layer may write
    # into what enters it.
    given: Mapping[str, Any] = arguments_by_name(part, call)
    return [x.clone() for arg in given.values() for x in _floats(arg)][:1]


def _pair(
    path: str, given: Sequence[Tensor], out: Tree, counted: Tensor | None
) -> tuple[Tensor, Tensor]:
    # What enters a layer and what leaves it, at the tokens that count.
    left = _floats(out)
    shapes = [tuple(x.shape) for x in (*given, *left[:1])]
    if len(shapes) < 2 or shapes[0] != shapes[1]:
        raise ValueError(
            "layer_scores: expected layers that give hidden states of the shape that "
            f"they take, but of {path!r} these are {shapes}"
        )
    before = given[0]
    after = left[0]
    if not bool(after.isfinite().all()):
        raise ValueError(
            f"layer_scores: expected finite hidden states, but {path!r} gives others: "
            "run the model in a wider dtype, or look at its inputs"
        )
    if counted is None:
        return before, after
    if not bool(counted.any()):
        raise ValueError(
            "layer_scores: expected tokens that count in each batch, but one has none"
        )
    return before[counted], after[counted]


def _last(x: Tensor, counted: Tensor | None) -> Tensor:
    # The last token of each sequence, which takes little memory.
    if counted is None:
        return x[..., -1:, :].clone().cpu()
    places = torch.arange(counted.shape[-1], device=counted.device)
    last = torch.where(counted, places, -1).amax(-1)
    rows = (last >= 0).nonzero()[:, 0]
    return x[rows, last[rows]].cpu()


def _of_all(found: list[Tensor]) -> list[Tensor]:
    # The scores of the batches of all processes, in the order of the batches.
    if not everyone():
        return found
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, found)
    return [one for own in gathered for one in own]
