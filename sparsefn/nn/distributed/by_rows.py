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

    Returns:
        A context. All processes of the default process group must enter it, and make
        the same calls with the same values.

    Raises:
        ValueError: In it, processes make other calls or give other values, or one is at
            the end already; it is raised on all, and says what differs. A call under
            `vmap` raises it, too.

    For plain tensors of which every process has all. The solvers `sf.solve.obs`,
    `obs_exact` and `refit` split a weight into parts of whole rows, and algorithms
    whose pattern has several groups in a leaf, such as `row_balanced()` and `nm(2, 4)`,
    split these. Each process works on its parts, and they send each other the weights
    and masks. Where rows of several parts compete in `obs`, they send each other the
    scores first. Everything else is done by each process for itself: scores,
    competitions of a whole leaf or of several, units that are picked together,
    functions of your own. The bits are as on one process, whose parts are the same.

    At each call a checksum of some of the bits of its arguments is compared. An error
    of one process is raised on all. `sf.calibration.stream` splits rows by itself.
    """
    return dealt(everyone())
