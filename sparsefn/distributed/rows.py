"""Rows of weights that processes deal out among them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sparsefn.distributed.ends import everyone
from sparsefn.engine.processes import dealt


def by_rows() -> AbstractContextManager[None]:
    """Code in which all processes solve and select together: each the rows of its own, which all get.

    >>> weight, hessian = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> with sf.distributed.by_rows():  # one process has all rows
    ...     sf.solve.obs(weight, hessian, keep=1, damp=0.0)
    (tensor([[0.0000, 2.5000]]), tensor([[False,  True]]))

    For plain tensors of which every process of the default process group has all. The solvers `sf.solve.obs`,
    `obs_exact` and `refit` split a weight into parts of whole rows, and so does every algorithm whose pattern has
    several groups in a leaf, such as `row_balanced()` and `nm(2, 4)`. Each process works on its parts, and they send
    each other the weights and masks. Where the groups of `obs` reach over several parts, they send each other scores of
    these, too, before they choose. Everything else is done by each process for itself: scores, competitions of a whole
    leaf or of several, units that are picked together, functions of your own. The bits are those of one process.

    All processes must make the same calls with the same values, and call this. Each call compares them by a checksum,
    and so does the end; ValueError on all processes says which differ. An error of one process is raised on all.
    `sf.calibration.stream` does this by itself.
    """
    return dealt(everyone())
