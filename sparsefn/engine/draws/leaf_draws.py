"""The draws of all leaves of a tree: on a device in one pass over the words, whatever
the number of leaves.

A pass makes a hundred launches, and a key is folded by as many. So the keys of leaves
are folded together, on the CPU if the key and the step are there, and the words of
leaves laid end to end are drawn at once. A backend draws all of them by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsefn.engine.draws.draws import (
    as_keys,
    check_key,
    digest,
    drawn_like,
    folded_key,
)
from sparsefn.engine.draws.threefry import draw, finished, halves, told
from sparsefn.engine.draws.words import rounds
from sparsefn.engine.leaves import MOST, apart, brought, packs, pays, repeated, written
from sparsefn.engine.processes import any_sharded
from sparsefn.engine.surroundings import asked

Step = int | Tensor


def unchecked_key(key: Tensor, path: str, step: Step | None = None) -> Tensor:
    """The key of one leaf at one step, from a key and steps that were checked.

    >>> from sparsefn.engine.draws.leaf_draws import unchecked_key
    >>> torch.equal(
    ...     unchecked_key(sf.random.key(0), "w", 5),
    ...     sf.random.leaf_key(sf.random.key(0), "w", 5),
    ... )
    True
    """
    own = folded_key(key, digest(path), "fold str")
    return own if step is None else folded_key(own, step, "fold int")


def drawn_leaves(
    key: Tensor,
    leaves: Mapping[str, Tensor],
    step: Step | None,
    kind: str,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Draws like each leaf, from its own key at a step, as `drawn_like` gives.

    >>> from sparsefn.engine.draws.leaf_draws import drawn_leaves
    >>> drawn_leaves(
    ...     sf.random.key(0), {"w": torch.zeros(1)}, None, "uniform", torch.float32
    ... )
    {'w': tensor([0.3044])}
    """
    check_key(key)
    tensors = [x.detach() for x in leaves.values()]
    if key.ndim != 1 or any_sharded(tensors) or not pays(tensors):
        return {
            path: drawn_like(unchecked_key(key, path, step), leaf, kind, dtype)
            for path, leaf in leaves.items()
        }
    return dict(
        zip(
            leaves,
            draws_laid(key, list(leaves), tensors, step, kind, dtype),
            strict=True,
        )
    )


def draws_laid(
    key: Tensor,
    paths: Sequence[str],
    leaves: Sequence[Tensor],
    step: Step | None,
    kind: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    """`drawn_leaves` of leaves that are laid end to end wherever they are.

    >>> from sparsefn.engine.draws.leaf_draws import draws_laid
    >>> draws_laid(
    ...     sf.random.key(0),
    ...     ["w", "b"],
    ...     [torch.zeros(1), torch.zeros(0)],
    ...     None,
    ...     "uniform",
    ...     torch.float32,
    ... )
    [tensor([0.3044]), tensor([])]
    """
    made: dict[int, Tensor] = {}
    devices = [x.device for x in leaves]
    for pack in packs(devices, [x.numel() for x in leaves]):
        alike = [leaves[i] for i in pack]
        device = leaves[pack[0]].device
        if len(pack) == 1:
            own = unchecked_key(key, paths[pack[0]], step)
            made[pack[0]] = drawn_like(own, alike[0], kind, dtype)
            continue
        sizes = [x.numel() for x in alike]
        keys = keys_on_device(key, [paths[i] for i in pack], step, device)
        drawn: list[Tensor] | None = asked(
            "draws_of_leaves", device.type, keys, sizes, *told(kind, dtype)
        )
        if drawn is not None:
            for i, x in zip(pack, drawn, strict=True):
                made[i] = x.view(leaves[i].shape)
            continue
        largest = min(max(sizes), MOST)
        counter = torch.arange(largest, dtype=torch.int32, device=device)
        k0, k1 = (repeated(half, sizes) for half in halves(keys, kind))
        index = torch.cat([counter[:n] for n in sizes])
        x0, x1 = rounds(k0, k1, torch.zeros_like(index[:1]), index)
        row = finished(x0, x1, kind, dtype)
        made |= zip(pack, apart(row, alike), strict=True)
    return [made[i] for i in range(len(leaves))]


def keys_on_device(
    key: Tensor,
    paths: Sequence[str],
    step: Step | None,
    device: torch.device,
) -> Tensor:
    """The keys of leaves on a device, (leaves, 2).

    >>> from sparsefn.engine.draws.leaf_draws import keys_on_device
    >>> keys_on_device(sf.random.key(0), ["w", "b"], None, torch.device("cpu"))
    tensor([[2208770095,  878172157],
            [3887166867, 3151049267]])
    """
    if key.device.type == "cpu":
        made = torch.stack([unchecked_key(key, path) for path in paths])
    else:
        digests = [digest(path) for path in paths]
        index = written(digests, key.device).reshape(-1, 1)
        drawn = draw(key, index, 1, "fold str", torch.int64)
        made = as_keys(drawn[..., 0])
    if step is None:
        return brought(made, device)
    if isinstance(step, Tensor) and step.device.type != "cpu":
        return folded_key(brought(made, device), step, "fold int")
    return brought(folded_key(made, step, "fold int"), device)
