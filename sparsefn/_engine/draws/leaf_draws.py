"""The draws of all leaves of a tree: on a device in one pass over the words for any
number of leaves.

A pass makes a hundred launches, and a key is folded by as many. So the keys of leaves
are folded together, in Python where the key can be read, and the words of leaves laid
end to end are drawn at once. A backend draws all of them by itself. Small leaves on the
CPU are drawn so, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsefn._engine.backends import call_backend
from sparsefn._engine.draws.draws import (
    as_keys,
    check_key,
    digest,
    drawn_like,
    folded_key,
)
from sparsefn._engine.draws.threefry import draw, finished, halves, kind_for_backend
from sparsefn._engine.draws.words import rounds
from sparsefn._engine.leaves import (
    MOST,
    brought,
    foreach_at_once,
    packs,
    pays,
    repeated,
    small_packs,
    split_like,
    written,
)
from sparsefn._engine.processes import any_sharded

Step = int | Tensor


def unchecked_key(key: Tensor, path: str, step: Step | None = None) -> Tensor:
    """The key of one leaf at one step, from a key and steps that were checked.

    >>> from sparsefn._engine.draws.leaf_draws import unchecked_key
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

    >>> from sparsefn._engine.draws.leaf_draws import drawn_leaves
    >>> drawn_leaves(
    ...     sf.random.key(0), {"w": torch.zeros(1)}, None, "uniform", torch.float32
    ... )
    {'w': tensor([0.3044])}
    """
    check_key(key)
    paths = list(leaves)
    tensors = list(leaves.values())
    alone = key.ndim != 1 or any_sharded(tensors)
    if not alone and pays(tensors):
        rows = draws_laid(key, paths, tensors, step, kind, dtype)
        return dict(zip(paths, rows, strict=True))
    drawn: dict[str, Tensor] = {}
    if not alone and key.is_cpu and not (isinstance(step, Tensor) and not step.is_cpu):
        for pack in small_packs([(x,) for x in tensors]):
            some = [paths[i] for i in pack]
            keys = keys_on_device(key, some, step, key.device)
            made = _small_draws(keys, [tensors[i] for i in pack], kind, dtype)
            drawn |= zip(some, made, strict=True)
    found = {}
    for path, leaf in leaves.items():
        if path in drawn:
            found[path] = drawn[path]
        else:
            found[path] = drawn_like(unchecked_key(key, path, step), leaf, kind, dtype)
    return found


def _small_draws(
    keys: Tensor, leaves: Sequence[Tensor], kind: str, dtype: torch.dtype
) -> list[Tensor]:
    # Each entry has a key and a place of its own.
    sizes = [x.numel() for x in leaves]
    lengths = written(sizes, keys.device)
    ends = lengths.cumsum(0)
    index = torch.arange(sum(sizes), device=keys.device)
    index -= (ends - lengths).repeat_interleave(lengths)
    own = keys.repeat_interleave(lengths, 0)
    return split_like(draw(own, index[:, None], 1, kind, dtype), leaves)


def flipped_leaves(
    key: Tensor, chances: Mapping[str, Tensor], step: Step | None
) -> dict[str, Tensor]:
    """Where entries come true by their chances, as `flips` gives for each leaf and its
    own key at a step.

    >>> from sparsefn._engine.draws.leaf_draws import flipped_leaves
    >>> flipped_leaves(sf.random.key(0), {"w": torch.tensor([0.0, 1.0])}, 3)
    {'w': tensor([False,  True])}
    """
    drawn = drawn_leaves(key, chances, step, "uniform", torch.float64)
    rows = [(drawn[path], x.detach()) for path, x in chances.items()]
    return dict(zip(chances, foreach_at_once(_comes_true, rows), strict=True))


def _comes_true(drawn: Tensor, chance: Tensor) -> Tensor:
    # A whole word is below a number where it is below the next whole number. So the
    # lower digits of the draw, which come after the word, decide nothing.
    words = (chance.double() * 2.0**32).ceil_()
    return drawn < words.mul_(2.0**-32)


def draws_laid(
    key: Tensor,
    paths: Sequence[str],
    leaves: Sequence[Tensor],
    step: Step | None,
    kind: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    """`drawn_leaves` of leaves that are laid end to end wherever they are.

    >>> from sparsefn._engine.draws.leaf_draws import draws_laid
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
    numbers = list(map(Tensor.numel, leaves))
    for pack in packs(devices, numbers):
        alike = [leaves[i] for i in pack]
        device = leaves[pack[0]].device
        if len(pack) == 1:
            own = unchecked_key(key, paths[pack[0]], step)
            made[pack[0]] = drawn_like(own, alike[0], kind, dtype)
            continue
        sizes = [numbers[i] for i in pack]
        keys = keys_on_device(key, [paths[i] for i in pack], step, device)
        drawn: list[Tensor] | None = call_backend(
            "draws_of_leaves", device.type, keys, sizes, *kind_for_backend(kind, dtype)
        )
        if drawn is not None:
            for i, x in zip(pack, drawn, strict=True):
                made[i] = x.view(leaves[i].shape)
            continue
        largest = min(max(sizes), MOST)
        counter = torch.arange(largest, dtype=torch.int32, device=device)
        k0, k1 = repeated(torch.stack(halves(keys, kind)).squeeze(-1), sizes)
        index = torch.cat([counter[:n] for n in sizes])
        x0, x1 = rounds(k0, k1, torch.zeros_like(index[:1]), index)
        row = finished(x0, x1, kind, dtype)
        made |= zip(pack, split_like(row, alike), strict=True)
    return [made[i] for i in range(len(leaves))]


@functools.lru_cache(maxsize=64)  # an update asks again and again
def _digests(paths: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(map(digest, paths))


def keys_on_device(
    key: Tensor,
    paths: Sequence[str],
    step: Step | None,
    device: torch.device,
) -> Tensor:
    """The keys of leaves on a device, (leaves, 2).

    >>> from sparsefn._engine.draws.leaf_draws import keys_on_device
    >>> keys_on_device(sf.random.key(0), ["w", "b"], None, torch.device("cpu"))
    tensor([[2208770095,  878172157],
            [3887166867, 3151049267]])
    """
    index = written(_digests(tuple(paths)), key.device).reshape(-1, 1)
    drawn = draw(key, index, 1, "fold str", torch.int64)
    made = as_keys(drawn[..., 0])
    if step is None:
        return brought(made, device)
    if isinstance(step, Tensor) and step.device.type != "cpu":
        return folded_key(brought(made, device), step, "fold int")
    return brought(folded_key(made, step, "fold int"), device)
