"""Bands of rows in which units change places: units of any size, which compete inside
of a row of units or with the units of other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.sums import Pooling, pool
from sparsefn._engine.transforms import read
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
        group: The lines of a group, which are those of a band, and its units in a line.
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
        lost = w.masked_fill(kept, 0.0).reshape(-1, columns)
        self.pull = (lost @ h).reshape(self.w.shape)  # D H
        self.h_of_groups = _diagonal_blocks(h, width)
        self.alone = self._alone()
        self.kept = kept.reshape(self.w.shape)[:, 0, ::b].clone()  # (lines, units)
        self.open = torch.ones_like(self.kept)
        if allowed is not None:
            self.open = allowed.reshape(self.kept.shape)
        self.cost = torch.empty_like(self.alone)  # of pruning a unit, inf if it cannot
        self.gain = torch.empty_like(self.alone)  # of bringing it back, the same
        self.inside = torch.empty_like(self.alone)  # with the best q in the line
        every = torch.arange(len(self.w), device=w.device)
        self.n_at_once = max(1, at_once // (columns * width))
        self.table: Tensor | None = None
        if self.n_lines == 1 or len(every) <= self.n_at_once:
            self.table = self._products(every)
        self._work_out(every)

    @property
    def mask(self) -> Tensor:
        """The mask by now, of the weights' shape."""
        bands, rows, columns = self.shape
        elements = over_elements(self.kept, self.unit, (bands * rows, columns))
        return elements.reshape(self.shape)

    def step(self, limit: Tensor) -> bool:
        """Make the best swap of each band where it adds less than `limit` to the error;
        return whether there is one.
        """
        swap = self._best_swap()
        moves = swap.change < limit
        if not read(moves.any()):
            return False
        self._make(Swap(*(x[moves] for x in swap)))
        return True

    def _alone(self) -> Tensor:
        # (U_p H, U_p) of each unit
        b = self.unit[1]
        rows = self.w.reshape(-1, self.w.shape[2] // b, b).transpose(0, 1)
        pulled = (rows @ _diagonal_blocks(self.h, b)).transpose(0, 1)
        return self._of_units(pulled.reshape(self.w.shape) * self.w)

    def _of_units(self, x: Tensor) -> Tensor:
        # The sum over each unit of some lines: (lines, units).
        return pool(x, (1, *self.unit), SUM)[:, 0]

    def _products(self, lines: Tensor) -> Tensor:
        # 2 (U_p H, U_q) of the units of each group in some lines: (lines, groups, p, q)
        a, b = self.unit
        n_groups, width, _ = self.h_of_groups.shape
        if self.n_places == 1:
            return self.w.new_zeros(len(lines), n_groups, 1, 1)
        w = self.w[lines].reshape(-1, a, n_groups, width).permute(0, 2, 3, 1)
        return pool(2 * (w @ w.mT) * self.h_of_groups, (1, 1, b, b), SUM)

    def _crossed(self, lines: Tensor) -> Tensor:
        return self._products(lines) if self.table is None else self.table[lines]

    def _work_out(self, lines: Tensor) -> None:
        # What swaps add, for lines that have changed.
        for some in torch.split(lines, self.n_at_once):
            pulled = self._of_units(2 * self.w[some] * self.pull[some])
            kept = self.kept[some]
            shut = ~self.open[some]
            cost = (self.alone[some] + pulled).masked_fill(~kept | shut, torch.inf)
            gain = (self.alone[some] - pulled).masked_fill(kept | shut, torch.inf)
            self.cost[some] = cost
            self.gain[some] = gain
            in_groups = (len(some), -1, self.n_places)
            of_p = cost.reshape(in_groups)[..., :, None]
            of_q = gain.reshape(in_groups)[..., None, :]
            change = (of_p + of_q).sub_(self._crossed(some))
            self.inside[some] = change.amin(-1).flatten(1)

    def _best_swap(self) -> Swap:
        n_units = self.kept.shape[1]
        sizes = (self.shape[0], self.n_lines, -1, self.n_places)
        cost = self.cost.reshape(sizes)
        gain = self.gain.reshape(sizes)
        of_p = self.inside.reshape(sizes)
        if self.n_lines > 1:
            beside = _least_of_others(gain.amin(-1, keepdim=True))
            of_p = torch.minimum(of_p, cost + beside)
        of_p = of_p.flatten(1)
        least = of_p.amin(1)
        p = _first(of_p, least)
        band = torch.arange(len(p), device=p.device)
        line = p // n_units
        group = p % n_units // self.n_places
        place = p % self.n_places
        of_q = cost.flatten(1)[band, p][:, None, None] + gain[band, :, group]
        crossed = self._crossed(band * self.n_lines + line)
        of_q[band, line] -= crossed[band, group, place]
        of_q = of_q.flatten(1)
        at = _first(of_q, of_q.amin(1))
        q_in_line = group * self.n_places + at % self.n_places
        return Swap(least, band, p, at // self.n_places * n_units + q_in_line)

    def _make(self, swap: Swap) -> None:
        a, b = self.unit
        n_units = self.kept.shape[1]
        lines = []
        for flat, back in ((swap.p, False), (swap.q, True)):
            line = swap.band * self.n_lines + flat // n_units
            unit = flat % n_units
            weights = self.w.reshape(-1, a, n_units, b)[line, :, unit]
            pull = weights @ self.h.reshape(n_units, b, -1)[unit]
            self.pull[line] += -pull if back else pull
            self.kept[line, unit] = back
            lines.append(line)
        self._work_out(lines[0] if self.n_lines == 1 else torch.cat(lines))


def _diagonal_blocks(h: Tensor, size: int) -> Tensor:
    n = len(h) // size
    return h.reshape(n, size, n, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _first(x: Tensor, value: Tensor) -> Tensor:
    # The lowest index in each row of x where it has the value of the row.
    last = x.shape[1] - 1
    at = torch.arange(last + 1, device=x.device)
    return torch.where(x == value[:, None], at, last).amin(1)


def _least_of_others(x: Tensor) -> Tensor:
    # The minimum over all other indices of dimension 1.
    least, at = x.min(1, keepdim=True)
    second = x.scatter(1, at, torch.inf).amin(1, keepdim=True)
    is_least = torch.arange(x.shape[1], device=x.device)[:, None, None] == at
    return torch.where(is_least, second, least)
