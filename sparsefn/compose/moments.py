"""Where the moments of an optimizer are kept after an update of masks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from sparsefn.engine import lists
from sparsefn.engine.donation import Emptied

Row: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def live_entries(
    support: Tensor,
    before: Tensor,
    weight: Tensor,
    stepped: Tensor,
    *,
    mask_moments: bool = True,
    reset_grown: bool = True,
) -> Tensor | None:
    """The entries of a leaf at which moments are kept; None for all.

    >>> before, after = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    >>> weight = torch.tensor([1.0, 0.0, 0.0])
    >>> live_entries(after, before, weight, weight)
    tensor([ True, False, False])

    `support` and `weight` are read after the update, `before` and `stepped` between optimizer and update. Moments
    are kept on the support (`mask_moments`), but not where it has just turned on or where the update itself set the
    weight (`reset_grown`).
    """
    changed, moved = reset_grown and before is not support, reset_grown and _is_moved(weight, stepped)
    if not (mask_moments or changed or moved):
        return None
    others = [before] * changed + [weight, stepped] * moved
    return _live(mask_moments, changed, moved, support, *others)


def live_leaves(rows: Sequence[Row], *, mask_moments: bool = True, reset_grown: bool = True) -> list[Tensor | None]:
    """`live_entries` of each row of (support, before, weight, stepped).

    >>> x, mask = torch.zeros(2), torch.tensor([True, False])
    >>> live_leaves([(mask, mask, x, x)])
    [tensor([ True, False])]
    """
    if len(rows) < 2 or not lists.pays([x for row in rows for x in row]):
        return [live_entries(*row, mask_moments=mask_moments, reset_grown=reset_grown) for row in rows]
    made: dict[int, Tensor] = {}
    kinds = [(reset_grown and row[1] is not row[0], reset_grown and _is_moved(row[2], row[3])) for row in rows]
    for changed, moved in dict.fromkeys(kinds):
        if mask_moments or changed or moved:
            alike = [i for i, kind in enumerate(kinds) if kind == (changed, moved)]
            used = [rows[i][:1] + rows[i][1:2] * changed + rows[i][2:] * moved for i in alike]
            run = functools.partial(_live, mask_moments, changed, moved)
            formula = mask_moments and not moved
            live = lists.laid(run, used, formula) if changed or moved else [support for (support,) in used]
            made |= zip(alike, live, strict=True)
    return [made.get(i) for i in range(len(rows))]


def _is_moved(weight: Tensor, stepped: Tensor) -> bool:
    # A stepped leaf that gave its memory to the new one had the same values on the support.
    return weight is not stepped and not isinstance(stepped, Emptied)


def _live(masked: bool, changed: bool, moved: bool, support: Tensor, *others: Tensor) -> Tensor:
    # The others: the support before if it has changed, and the weight and the stepped one if it has moved.
    parts = [support] if masked else []
    if changed:
        parts.append(others[0] if masked else others[0] | ~support)
    if moved:
        weight, stepped = others[-2:]
        # Weights that the update itself set start with zero moments, such as weights pruned and regrown.
        same = (weight == stepped) | (weight.isnan() & stepped.isnan())
        parts.append(same if masked else same | ~support)
    return functools.reduce(lists.both, parts)
