"""Rows of weights that processes deal out among them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sparsefn._engine.processes import dealt
from sparsefn.nn.distributed.ends import everyone


def by_rows() -> AbstractContextManager[None]:
    """Code in which all processes solve and select together, each its own rows.

    >>> weight, hessian = (
    ...     torch.tensor([[1.0, 2.0]]),
    ...     torch.tensor([[2.0, 1.0], [1.0, 2.0]]),
    ... )
    >>> with sf.distributed.by_rows():  # one process has all rows
    ...     sf.solve.obs(weight, hessian, keep=1, damp=0.0)
    (tensor([[0.0000, 2.5000]]), tensor([[False,  True]]))

    For plain tensors of which every process of the default process group has all. The
    solvers `sf.solve.obs`, `obs_exact` and `refit` split a weight into parts of whole
    rows, and algorithms whose pattern has several groups in a leaf, such as
    `row_balanced()` and `nm(2, 4)`, split these. Each process works on its parts, and
    they send each other the weights and masks. Where rows of several parts compete in
    `obs`, they send each other the scores first. Everything else is done by each
    process for itself: scores, competitions of a whole leaf or of several, units that
    are picked together, functions of your own. The bits are as on one process, whose
    parts are the same.

    All processes must enter, and make the same calls with the same values. A checksum
    of some of their bits is compared at each call, and ValueError on all processes says
    what differs, or that one of them is at the end already. An error of one process is
    raised on all; ValueError under `vmap`. `sf.calibration.stream` does this by itself.
    """
    return dealt(everyone())
