"""Which layer of a teacher a student's layer learns from, and losses over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsefn.core.checks import check_call, is_sequence
from sparsefn.posttraining.calibration.targets import Compare


def layer_map(
    student: Sequence[str], teacher: Sequence[str], removed: Sequence[str] = ()
) -> dict[str, str]:
    """The teacher's layer for each layer of a student that has fewer.

    >>> sf.recovery.layer_map(["0", "1"], ["0", "1", "2", "3"])
    {'0': '1', '1': '3'}
    >>> sf.recovery.layer_map(["0", "1"], ["0", "1", "2", "3"], removed=["1", "2"])
    {'0': '2', '1': '3'}

    Args:
        student: The paths of the student's layers, in the order of the data.
        teacher: The paths of the teacher's layers.
        removed: The teacher's paths that the student lacks, where layers were pruned.
            Empty: the student's layers are spread evenly.

    Returns:
        A dict from each path of the student to a path of the teacher.

    Raises:
        TypeError: An argument is no sequence of paths.
        ValueError: One has no layer, the student has more than the teacher, a path is
            there twice, `removed` names other paths, or it does not leave as many
            layers as the student has.

    Where layers were removed, a layer answers as the last removed layer after it, since
    the next layer expects that as its input. Spread evenly, layer m of M answers as
    layer floor(m N / M) of N, counted from 1, so the last layers belong together.

    Jiao et al. 2019, arXiv 1909.10351, sec. 3, for the layers that are spread evenly.
    """
    for name, paths in (
        ("student", student),
        ("teacher", teacher),
        ("removed", removed),
    ):
        if not is_sequence(paths) or not all(isinstance(path, str) for path in paths):
            raise TypeError(
                f"layer_map: expected {name} to be a list of paths, got {paths!r}"
            )
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(
                    f"layer_map: expected each path of {name} once, got {path!r} "
                    f"{paths.count(path)} times: leave out the others"
                )
    if not teacher:
        raise ValueError("layer_map: expected a layer of the teacher or more, got none")
    if not 1 <= len(student) <= len(teacher):
        raise ValueError(
            f"layer_map: expected from 1 to {len(teacher)} layers of the student, as "
            f"many as the teacher has, got {len(student)}"
        )
    if not removed:
        ends = [(m + 1) * len(teacher) // len(student) - 1 for m in range(len(student))]
        return {path: teacher[n] for path, n in zip(student, ends, strict=True)}
    unknown = [path for path in removed if path not in teacher]
    if unknown:
        raise ValueError(
            f"layer_map: expected removed to name layers of the teacher, got "
            f"{unknown}; the first is {teacher[0]!r}"
        )
    kept = [n for n, path in enumerate(teacher) if path not in removed]
    if len(kept) != len(student):
        raise ValueError(
            f"layer_map: expected {len(kept)} layers of the student, as {len(removed)} "
            f"of {len(teacher)} were removed, got {len(student)}"
        )
    ends = [*(n - 1 for n in kept[1:]), len(teacher) - 1]
    return {path: teacher[n] for path, n in zip(student, ends, strict=True)}


def over_layers(
    loss: Compare,
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    layers: Mapping[str, str],
    tokens: Tensor | None = None,
) -> Tensor:
    """The mean of a loss over pairs of layers.

    >>> student, teacher = {"0": torch.ones(1, 2)}, {"5": torch.zeros(1, 2)}
    >>> sf.recovery.over_layers(sf.recovery.mean_square, student, teacher, {"0": "5"})
    tensor(1.)

    Args:
        loss: A loss of (student, teacher, tokens), such as `mean_square`.
        student: What the student's layers returned, by path, as `outputs` gives it.
        teacher: What the teacher's layers returned, by path.
        layers: The teacher's path for each path of the student that is compared, as
            `layer_map` gives it.
        tokens: Which tokens count, for all layers. None: all.

    Returns:
        0-d tensor.

    Raises:
        TypeError: `loss` is no such function, or `student`, `teacher` or `layers` no
            dict by path.
        ValueError: `layers` is empty, or names a path without an output. What `loss`
            raises, with both paths.
    """
    check_call("loss", loss, "student", "teacher", "tokens")
    for name, given in (("student", student), ("teacher", teacher)):
        if not isinstance(given, Mapping):
            raise TypeError(
                f"over_layers: expected {name} to be a dict of tensors by path, got "
                f"{type(given).__name__}: outputs gives it second, as in result, "
                f"{name} = sf.recovery.outputs(model, None, x, paths=[...])"
            )
    if not isinstance(layers, Mapping):
        raise TypeError(
            "over_layers: expected layers to be a dict from paths of the student to "
            f"paths of the teacher, got {type(layers).__name__}: write "
            "sf.recovery.layer_map(student_paths, teacher_paths)"
        )
    if not layers:
        raise ValueError("over_layers: expected pairs of layers, got none")
    for name, known, asked in (
        ("student", student, layers.keys()),
        ("teacher", teacher, layers.values()),
    ):
        missing = [path for path in asked if path not in known]
        if missing:
            raise ValueError(
                f"over_layers: expected the {name} to have outputs of {missing}, got "
                f"{list(known)}; ask for them: outputs(..., paths={missing})"
            )
    losses = []
    for own, other in layers.items():
        try:
            losses.append(loss(student[own], teacher[other], tokens))
        except (TypeError, ValueError) as error:
            raise type(error)(f"at {own!r} and {other!r}, {error}") from None
    return torch.stack(losses).mean()
