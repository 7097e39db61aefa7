"""Bands of rows in which units change places: units of any size, which compete inside
of a row of units or with the units of other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.sums import Pooling, pool
from sparsefn._engine.transforms import read_number
from sparsefn.masks.patterns.boxes import over_elements

SUM = Pooling("sum")


class Swap(NamedTuple):
    """A swap of some bands: what it adds to the error, and the units that it prunes and
    brings back, as flat indices in the units of the band.
    """

    change: Tensor
    band: Tensor
    p: Tensor
    q: Tensor


class Bands:
    """Bands of rows that no unit and no group leaves, so that none depends on another.

    A line is a row of units, and each group has `group[1]` units in each of the
    `group[0]` lines of its band. With D = w off the mask and U_p the weights of unit p,
    the error of a band is sum(D H * D), and (x, y) here is sum(x * y). Pruning p and
    bringing q back adds to it
      2 (D H, U_p) + (U_p H, U_p) - 2 (D H, U_q) + (U_q H, U_q) - 2 (U_p H, U_q),
    of which the last term is 0 for units of different lines, which share no row. So a
    line is worked out again only once a swap has changed it.

    Args:
        w: The weights, (bands, rows of a band, columns), of whole units.
        kept: Their mask, which keeps whole units.
        h: The hessian.
        allowed: Which units may change places, (bands, units of a band). None: all.
        unit: The rows and columns of a unit.
        group: The lines of a group, as many as a band has, and its units in a line.
        at_once: How many products of two weights are held at a time.
    """

    def __init__(
        self,
        w: Tensor,
        kept: Tensor,
        h: Tensor,
        allowed: Tensor | None,
        unit: Sequence[int],
        group: Sequence[int],
        at_once: int,
    ) -> None:
        a, b = unit
        self.unit = (a, b)
        self.n_lines, self.n_places = group
        self.shape = w.shape
        columns = w.shape[2]
        width = self.n_places * b
        self.w = w.reshape(-1, a, columns)  # (lines, rows of a line, columns)
        self.h = h
        lost = w.masked_fill(kept, 0.0)
        pull = lost.reshape(-1, columns) @ h
        self.pull = pull.reshape(self.w.shape)  # D H
        self.h_of_groups = _diagonal_blocks(h, width)
        in_lines = kept.reshape(self.w.shape)
        self.kept = in_lines[:, 0, ::b].clone()  # (lines, units)
        self.alone = self._alone()  # (U_p H, U_p), inf where p does not change places
        if allowed is not None:
            shut = ~allowed.reshape(self.kept.shape)
            self.alone.masked_fill_(shut, torch.inf)
        self.cost = torch.empty_like(self.alone)  # of pruning a unit, inf if it cannot
        self.gain = torch.empty_like(self.alone)  # of bringing it back, the same
        self.inside = torch.empty_like(self.alone)  # with the best q in the line
        n_lines = len(self.w)
        every = torch.arange(n_lines, device=w.device)
        self.n_at_once = max(1, at_once // (columns * width))
        self.table: Tensor | None = None
        if self.n_lines == 1 or n_lines <= self.n_at_once:
            self.table = self._products(every)
        self._work_out(every)

    @property
    def mask(self) -> Tensor:
        """The mask by now, of the weights' shape."""
        bands, rows, columns = self.shape
        shape = (bands * rows, columns)
        elements = over_elements(self.kept, self.unit, shape)
        return elements.reshape(self.shape)

    def step(self, limit: Tensor) -> bool:
        """Make the best swap of each band where it adds less than `limit` to the error;
        return whether there is one.
        """
        swap = self._best_swap()
        moves = swap.change < limit
        if not read_number(moves.any()):
            return False
        self._make(Swap(*(x[moves] for x in swap)))
        return True

    def _alone(self) -> Tensor:
        n_units = self.kept.shape[1]
        b = self.unit[1]
        rows = self.w.reshape(-1, n_units, b)
        blocks = _diagonal_blocks(self.h, b)
        pulled = rows.transpose(0, 1) @ blocks
        pulled = pulled.transpose(0, 1)
        pulled = pulled.reshape(self.w.shape)
        return self._of_units(self.w * pulled)

    def _of_units(self, x: Tensor) -> Tensor:
        # The sum over each unit of some lines: (lines, units).
        box = (1, *self.unit)
        return pool(x, box, SUM).squeeze(1)

    def _products(self, lines: Tensor) -> Tensor:
        # 2 (U_p H, U_q) of the units of each group in some lines: (lines, groups, p, q)
        a, b = self.unit
        n_groups, width, _ = self.h_of_groups.shape
        if self.n_places == 1:
            return self.w.new_zeros(len(lines), n_groups, 1, 1)
        w = self.w[lines]
        w = w.reshape(-1, a, n_groups, width)
        w = w.permute(0, 2, 3, 1)
        of_weights = 2 * (w @ w.mT) * self.h_of_groups
        box = (1, 1, b, b)
        return pool(of_weights, box, SUM)

    def _crossed(self, lines: Tensor) -> Tensor:
        if self.table is None:
            return self._products(lines)
        return self.table[lines]

    def _work_out(self, lines: Tensor) -> None:
        # What swaps add, for lines that have changed.
        for some in torch.split(lines, self.n_at_once):
            w = self.w[some]
            kept = self.kept[some]
            alone = self.alone[some]
            pulled = self._of_units(2 * w * self.pull[some])
            cost = alone + pulled
            gain = alone - pulled
            cost = cost.masked_fill(~kept, torch.inf)
            gain = gain.masked_fill(kept, torch.inf)
            self.cost[some] = cost
            self.gain[some] = gain
            in_groups = (len(some), -1, self.n_places)
            of_p = cost.reshape(in_groups)[..., :, None]
            of_q = gain.reshape(in_groups)[..., None, :]
            change = of_p + of_q
            change -= self._crossed(some)
            least = change.amin(-1)
            self.inside[some] = least.flatten(1)

    def _best_swap(self) -> Swap:
        n_bands = self.shape[0]
        n_units = self.kept.shape[1]
        sizes = (n_bands, self.n_lines, -1, self.n_places)
        cost = self.cost.reshape(sizes)
        gain = self.gain.reshape(sizes)
        of_p = self.inside.reshape(sizes)
        if self.n_lines > 1:
            of_line = gain.amin(-1, keepdim=True)
            beside = _least_of_others(of_line)
            of_p = torch.minimum(of_p, cost + beside)
        of_p = of_p.flatten(1)
        least = of_p.amin(1)
        p = _first(of_p, least)
        band = torch.arange(n_bands, device=p.device)
        line = p // n_units
        group = p % n_units // self.n_places
        place = p % self.n_places
        cost_of_p = cost.flatten(1)[band, p]
        of_q = cost_of_p[:, None, None] + gain[band, :, group]
        lines = band * self.n_lines + line
        crossed = self._crossed(lines)
        of_q[band, line] -= crossed[band, group, place]
        of_q = of_q.flatten(1)
        at = _first(of_q, of_q.amin(1))
        line = at // self.n_places
        place = at % self.n_places
        q = line * n_units + group * self.n_places + place
        return Swap(least, band, p, q)

    def _make(self, swap: Swap) -> None:
        a, b = self.unit
        n_units = self.kept.shape[1]
        w = self.w.reshape(-1, a, n_units, b)
        h = self.h.reshape(n_units, b, -1)
        lines = []
        for flat, sign in ((swap.p, 1), (swap.q, -1)):
            line = swap.band * self.n_lines + flat // n_units
            unit = flat % n_units
            weights = w[line, :, unit]
            self.pull[line] += sign * (weights @ h[unit])
            self.kept[line, unit] = sign < 0
            lines.append(line)
        if self.n_lines == 1:
            del lines[1:]  # both are in the same line
        self._work_out(torch.cat(lines))


def _diagonal_blocks(h: Tensor, size: int) -> Tensor:
    n = len(h) // size
    blocks = h.reshape(n, size, n, size)
    diagonal = blocks.diagonal(dim1=0, dim2=2)
    return diagonal.permute(2, 0, 1)


def _first(x: Tensor, value: Tensor) -> Tensor:
    # The lowest index in each row of x where it has the value of the row.
    n = x.shape[1]
    at = torch.arange(n, device=x.device)
    found = x == value[:, None]
    return torch.where(found, at, n - 1).amin(1)


def _least_of_others(x: Tensor) -> Tensor:
    # The minimum over all other indices of dimension 1.
    least, at = x.min(1, keepdim=True)
    others = x.scatter(1, at, torch.inf)
    second = others.amin(1, keepdim=True)
    index = torch.arange(x.shape[1], device=x.device)
    is_least = index[:, None, None] == at
    return torch.where(is_least, second, least)
