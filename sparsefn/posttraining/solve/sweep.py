"""The sweep of SparseGPT: columns get their mask and change, from left to right.

Tensors are (columns, out), so that what is done to a column is done to adjacent memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.backends import call_backend
from sparsefn._engine.leaves import member_product
from sparsefn.posttraining.solve.grid import Grid, nearest

# How many columns are swept together: changes of other columns reach them by products
# of matrices. Columns of the last width are swept one after another.
WIDTHS = 256, 64, 16
WIDTHS_BY_SUMS = 256, 64

# (scores of some columns as (columns, out), which of the blocks they are) -> their mask
Choose = Callable[[Tensor, int], Tensor]


class Choice(NamedTuple):
    """How the mask of some columns is chosen when the first of them is reached."""

    span: int  # columns
    rows: int  # that compete with each other
    choose: Choose
    # of the span's weights so many of each row are kept, if scores alone decide
    n_best: int | None = None


class Rounding(NamedTuple):
    """What rounds the kept weights of some columns."""

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    @classmethod
    def of(cls, columns: int, grid: Grid) -> Rounding:
        """The rounding of so many columns to a grid of (out, groups)."""
        each = columns // grid.scale.shape[1]
        scale = grid.scale.T.repeat_interleave(each, 0)
        zero = grid.zero.T.repeat_interleave(each, 0)
        return cls(scale, zero, grid.low, grid.high)

    def part(self, a: int, b: int) -> Rounding:
        """The rounding of columns a to b."""
        return self._replace(scale=self.scale[a:b], zero=self.zero[a:b])

    def error(self, i: int, weights: Tensor) -> Tensor:
        """What rounding takes from the weights of a column."""
        rounded = nearest(weights, self.scale[i], self.zero[i], self.low, self.high)
        return weights - rounded


class Columns(NamedTuple):
    """Some columns of some rows; R is the factor of the hessian in `obs`."""

    due: Tensor  # the changes of kept weights, as far as earlier columns cause them
    changes: Tensor  # old - new; before, the old weights
    mask: Tensor  # of the weights to keep
    factor: Tensor  # F[i, j] = -R[j, i] / R[i, i] for j < i, and 0 elsewhere
    scale: Tensor  # R[i, i]
    rounding: Rounding | None

    def part(self, a: int, b: int) -> Columns:
        """Columns a to b."""
        rounding = self.rounding
        return Columns(
            self.due[a:b],
            self.changes[a:b],
            self.mask[a:b],
            self.factor[a:b, a:b],
            self.scale[a:b],
            None if rounding is None else rounding.part(a, b),
        )

    def kept_change(self, i: int, due: Tensor, old: Tensor) -> Tensor:
        """What the kept ones of a column's old weights change by, when its due is
        complete.
        """
        if self.rounding is None:
            return due
        return due + self.rounding.error(i, old - due)

    def pass_on(self, due: Tensor, i: int, change: Tensor) -> None:
        """Add what follows from the change of a column to the due of later columns."""
        due[i + 1 :].add_(self.factor[i + 1 :, i, None] * change)

    def scores(self, due: Tensor) -> Tensor:
        """w^2 / [H^-1]_jj, of the weights as they are by now, if `due` is what they
        change by; the scores take its memory.
        """
        # signs are flipped, and then they are squared
        now = due.sub_(self.changes).mul_(self.scale[:, None])
        return now.mul_(now)


def by_products(device: torch.device) -> bool:
    """Whether columns of the last width are swept by products of matrices and vectors,
    which is fast in a CPU's caches, or by sums, which take a GPU fewer launches.
    """
    return device.type == "cpu"


def widths_of(choice: Choice, device: torch.device) -> list[int]:
    """How columns are cut, in falling order: for large products, for the choice of a
    mask, and for products inside the caches.

    Where `choice.span` is not among them, the mask is chosen between columns.
    """
    usual = WIDTHS if by_products(device) else WIDTHS_BY_SUMS
    span = choice.span
    large = [span * max(width // span, 1) for width in usual]
    small = [width for width in usual if width < span]
    widths = {*large, *small}
    if by_products(device) or choice.n_best is None:
        widths.add(span)
    return sorted(widths, reverse=True)


def sweep(
    parts: Sequence[Columns], choice: Choice, widths: Sequence[int], first: int
) -> None:
    """Write the mask and the changes of some columns, no more than `widths[0]`, of all
    parts of the rows; the mask of the first columns is the choice of number `first`.
    """
    inverses: list[Tensor] = []
    if choice.span in widths:
        inverses = _inverses(parts[0].factor, choice.span)
    _sweep(parts, choice, widths, first, inverses)


def _sweep(
    parts: Sequence[Columns],
    choice: Choice,
    widths: Sequence[int],
    first: int,
    inverses: Sequence[Tensor],
) -> None:
    factor = parts[0].factor
    if widths[0] == choice.span:
        scores = [at.scores(member_product(inverses[0], at.due)) for at in parts]
        mask = choice.choose(
            scores[0] if len(parts) == 1 else torch.cat(scores, 1), first
        )
        rows = [at.mask.shape[1] for at in parts]
        for at, own_mask in zip(parts, torch.split(mask, rows, 1), strict=True):
            at.mask.copy_(own_mask)
    if len(widths) == 1:
        for at in parts:
            if by_products(at.due.device):
                _sweep_by_products(at)
            else:
                _sweep_on_device(at, choice if choice.span < widths[0] else None)
        return
    for a in range(0, len(factor), widths[1]):
        b = min(a + widths[1], len(factor))
        some = [at.part(a, b) for at in parts]
        for at, part in zip(parts, some, strict=True):
            if a:
                part.due.add_(member_product(factor[a:b, :a], at.changes[:a]))
        after = a // choice.span
        _sweep(some, choice, widths[1:], first + after, inverses[after:])


def _inverses(factor: Tensor, span: int) -> list[Tensor]:
    # For each `span` columns of a factor F, (I - F)^-1: if all of them are kept, they
    # change by what is due plus F times their changes.
    columns = len(factor)
    many = columns // span
    rest = columns - many * span
    made: list[Tensor] = []
    if many:
        end = many * span
        square = factor[:end, :end].reshape(many, span, many, span)
        made += _inverse(square.diagonal(dim1=0, dim2=2).permute(2, 0, 1)).unbind()
    if rest:
        made.append(_inverse(factor[-rest:, -rest:]))
    return made


def _inverse(factor: Tensor) -> Tensor:
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(
        -factor, eye, upper=False, unitriangular=True
    )
    return inverse


def _sweep_by_products(at: Columns) -> None:
    # A pruned weight changes by all that it is, a kept one by what is due.
    kept = at.mask.to(at.due.dtype)
    old = at.changes if at.rounding is None else at.changes.clone()
    at.changes.mul_(1.0 - kept)
    # The factor is 0 for the column itself and for the columns after it, whose changes
    # are not known yet. Fused operations would be a little faster, but vmap has none of
    # them.
    before = at.changes.T
    columns = zip(at.due, at.factor, at.changes, kept, old, strict=True)
    for i, (due, factors, change, keep, weights) in enumerate(columns):
        due.add_(member_product(before, factors))
        change.add_(keep * at.kept_change(i, due, weights))


def _sweep_on_device(at: Columns, choice: Choice | None) -> None:
    span = len(at.due) if choice is None else choice.span
    n_best = None if choice is None else choice.n_best
    if not call_backend("sweep", at.due.device.type, *at, span, n_best):
        sweep_by_sums(at, choice)


def sweep_by_sums(at: Columns, choice: Choice | None) -> None:
    """Write the changes of some columns, and with a choice the mask of these columns.

    Each product of numbers and each sum is rounded, from the first column to the last,
    so that a backend can have the same bits.
    """
    columns = len(at.due)
    span = columns if choice is None else choice.span
    changes = []
    for a in range(0, columns, span):
        b = min(a + span, columns)
        if choice is not None:
            some = at.part(a, b)
            some.mask.copy_(choice.choose(some.scores(_due_if_kept(some)), 0))
        for i in range(a, b):
            old = at.changes[i]
            change = torch.where(at.mask[i], at.kept_change(i, at.due[i], old), old)
            at.pass_on(at.due, i, change)
            changes.append(change)
    at.changes.copy_(torch.stack(changes))


def _due_if_kept(at: Columns) -> Tensor:
    # What these columns change by if all of them are kept.
    due = at.due.clone()
    for i in range(len(due)):
        at.pass_on(due, i, due[i])
    return due
