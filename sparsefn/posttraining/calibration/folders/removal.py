"""A model without some of its layers, from a folder to a folder."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from sparsefn._engine.processes import agreement
from sparsefn.nn.checkpoint.folders import read_json, some, stored_in
from sparsefn.nn.distributed.ends import everyone
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.folders.disk import (
    in_the_name_of,
    without_sparsity,
)
from sparsefn.posttraining.calibration.folders.model import (
    OUTSIDE,
    Leaf,
    ModelFolder,
    finish,
    open_folder,
    read_leaves,
    write_part,
)
from sparsefn.posttraining.calibration.folders.model_configs import Cut, smaller_config
from sparsefn.posttraining.calibration.folders.resume import (
    Part,
    digest_of_model,
    journal_in,
    only_run_in,
)
from sparsefn.posttraining.calibration.folders.stream import (
    check_other_folder,
    check_read,
    place,
)

_CPU = torch.device("cpu")


def drop_layers(
    folder: str | os.PathLike[str],
    layers: Sequence[str],
    out: str | os.PathLike[str],
) -> dict[str, str | None]:
    """Write the folder of a model without some of its layers.

    >>> sf.calibration.drop_layers("/nowhere", ["model.layers.3"], "shorter")
    Traceback (most recent call last):
        ...
    ValueError: drop_layers: expected the folder of a model, got '/nowhere', which is no
    folder

    Args:
        folder: The folder of the model, with config.json and safetensors, as
            `save_pretrained` writes it. Its config names a class of transformers.
        layers: The paths of the layers that go, members of the model's lists of layers,
            as "model.layers.3"; `layer_scores(...).lowest(0.25)` gives such paths.
        out: The new folder, which `from_pretrained` loads. The layers that stay are
            numbered again, config.json says how many and of which kinds they are, and
            other files are as they were.

    Returns:
        The new name of each tensor by its old one, None where it is gone.

    Raises:
        OSError: The disk is full: make room, and call again.
        TypeError: `layers` is no sequence of strings.
        ValueError: The folder is as `stream` refuses it, there is no such layer, none
            or all of a list would go, or `out` is the folder or holds anything else. No
            number in config.json makes a model with these layers, as where layers
            differ in shape by a rule. The class has no list of layers, or is none of
            transformers. Something differs from the run that was killed.

    In memory is one layer at a time, or the leaves outside of all layers. Layers are
    found as in `stream`, which prunes what is left: `stream(out, prune, batches,
    another)`. The new config is the one with which the class makes the model that is
    left: all modules, their shapes, buffers and plain attributes, but for the numbers
    of layers. **Killed at any moment**, the same call goes on, with the same bits, and
    until all is written the folder has no index, so that nothing loads it. Of several
    processes of `torch.distributed` the first one writes.

    Men et al. 2024, arXiv 2403.03853; Gromov et al. 2024, arXiv 2403.17887.
    """
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise TypeError(
            "drop_layers: expected layers to be a sequence of paths, as "
            f"['model.layers.3'], got {layers!r}"
        )
    target = Path(out)
    with in_the_name_of("drop_layers"):
        with agreement(everyone()):
            check_other_folder(Path(folder), target)
            _check_class(Path(folder))
            whole = open_folder(Path(folder), None, None, _CPU)
            cuts = _cuts(whole, layers)
            said = read_json("stream", whole.path / "config.json")
            config, small = smaller_config(
                without_sparsity(said), whole.model.module, cuts
            )
            names = {
                name: _moved(name, cuts)
                for leaves in whole.leaves.values()
                for leaf in leaves
                for name in leaf.names
            }
            kept = _kept(whole, cuts)
            left = _renamed(kept, Named.of(small), names, cuts)
        with agreement(everyone()), contextlib.ExitStack() as stack:
            if not place()[0]:
                stack.enter_context(only_run_in(target))
                _write(kept, left, target, config, names)
    return names


def _check_class(folder: Path) -> None:
    import transformers

    stored_in("stream", folder)  # which says what is missing
    said = read_json("stream", folder / "config.json")
    name = (said.get("architectures") or [None])[0]
    if not hasattr(transformers, str(name)):
        raise ValueError(
            "stream: expected config.json to name a class of transformers, which makes "
            f"the model with fewer layers, got {name!r}: remove the layers in memory, "
            "with sf.shrink"
        )


def _cuts(whole: ModelFolder, layers: Sequence[str]) -> list[Cut]:
    unknown = [path for path in layers if path not in whole.order]
    if unknown:
        wrong = [path for path in unknown if not isinstance(path, str)]
        if wrong:
            raise TypeError(
                "stream: expected paths of layers, as "
                f"{whole.order[0]!r}, got {wrong[0]!r}"
            )
        raise ValueError(
            f"stream: expected layers of {some(whole.order)}, got {some(unknown)}"
        )
    if not layers:
        raise ValueError("stream: expected a layer to drop, got none")
    members: dict[str, list[str]] = defaultdict(list)
    for path in whole.order:
        members[path.rpartition(".")[0]].append(path)
    cuts = []
    for owner, paths in members.items():
        kept = tuple(i for i, path in enumerate(paths) if path not in layers)
        if not kept:
            raise ValueError(
                f"stream: expected one layer of {owner!r} to stay, but all of its "
                f"{len(paths)} go"
            )
        if len(kept) < len(paths):
            cuts.append(Cut(owner, len(paths), kept))
    return cuts


def _moved(name: str, cuts: Iterable[Cut]) -> str | None:
    new: str | None = name
    for cut in cuts:
        new = None if new is None else cut.moved(new)
    return new


def _kept(whole: ModelFolder, cuts: Sequence[Cut]) -> ModelFolder:
    # The folder, with the parts that stay.
    leaves = {
        path: own
        for path, own in whole.leaves.items()
        if path == OUTSIDE or _moved(path, cuts) is not None
    }
    return whole._replace(leaves=leaves)


def _renamed(
    kept: ModelFolder,
    small: Named,
    names: Mapping[str, str | None],
    cuts: Sequence[Cut],
) -> ModelFolder:
    # What is written: the tensors under their new names, in the new model.
    leaves: dict[str, list[Leaf]] = {}
    stored = {}
    for path, own in kept.leaves.items():
        moved = []
        for leaf in own:
            name = leaf.stored[0]
            new = _stored_as(name, leaf, names)
            stored[new] = kept.stored[name]
            now = [names[one] for one in leaf.names]
            moved.append(Leaf(tuple(map(str, now)), (new,), leaf.dtype))
        leaves[str(_moved(path, cuts))] = moved
    order = [path for path in leaves if path != OUTSIDE]
    return ModelFolder(kept.path, stored, small, order, {}, leaves)


def _stored_as(name: str, leaf: Leaf, names: Mapping[str, str | None]) -> str:
    # A folder may have the names of the model with a prefix more, or less.
    for old in leaf.names:
        new = str(names[old])
        if name.endswith(old):
            return f"{name.removesuffix(old)}{new}"
        if old.endswith(f".{name}"):
            return new.removeprefix(old.removesuffix(name))
    return name


def _write(
    kept: ModelFolder,
    left: ModelFolder,
    out: Path,
    config: Mapping[str, object],
    names: Mapping[str, str | None],
) -> None:
    run = {
        "model": digest_of_model(kept.path / "config.json", kept.stored),
        "layers": repr(list(left.order) + list(kept.leaves)),
    }
    journal = journal_in(out, run)
    check_read(journal, kept, _CPU)
    parts = list(zip(kept.leaves, left.leaves, strict=True))
    for path, new in parts[len(journal.parts) :]:
        weights, digest = read_leaves(kept.path, kept.stored, kept.leaves[path])
        moved = {str(names[name]): x for name, x in weights.items()}
        write_part(left, out, new, moved)
        journal = journal.done(Part(digest, {}))
    finish(left, out, config)
