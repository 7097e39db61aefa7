"""Gradual pruning, and training that is sparse and dense by turns."""

from __future__ import annotations

from sparsefn.algorithms import gmp as gmp
from sparsefn.budgets import global_
from sparsefn.engine.checks import check_trigger
from sparsefn.engine.described import described
from sparsefn.engine.numbers import Real
from sparsefn.engine.rounding import as_fraction
from sparsefn.state import Algorithm, Level, Step, Trigger, Where
from sparsefn.where import default_where


@described
def ac_dc(sparsity: Level, *, sparse: Trigger, dense: Trigger, where: Where = default_where) -> Algorithm:
    """AC/DC: training is dense and sparse by turns, with masks by magnitude; it ends sparse.

    >>> sparse, dense = sf.at([1, 3]), sf.at([2])
    >>> turns = sf.methods.ac_dc(0.5, sparse=sparse, dense=dense)
    >>> algorithm = sf.with_optimizer(turns, sf.optimizers.sgd(1.0, momentum=0.9), reset=dense)
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> for step in range(4):
    ...     state = algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 0.0, -1.0]])}, step)
    ...     print(state.masks["w"].tolist()[0], state.params["w"].tolist()[0])
    [True, True, True, True] [4.0, 3.0, 2.0, 2.0]
    [True, False, False, True] [4.0, 0.0, 0.0, 3.9000000953674316]
    [True, True, True, True] [4.0, 0.0, 0.0, 6.610000133514404]
    [True, False, False, True] [4.0, 0.0, 0.0, 7.610000133514404]

    Training starts dense. Where `sparse` fires, the largest weights of all leaves together are kept, and the mask stays
    as it is until `dense` fires; then every weight trains, the pruned ones from zero. Where both fire it is dense. The
    optimizer must forget its moments at the start of each dense phase: `reset=dense`. For a run of 100 epochs of E
    steps the paper prunes at epochs 10, 20, ..., 70 and 85 and is dense again from 15, 25, ..., 65 and from 75 on:
    `sparse=sf.at([10 * E, ..., 85 * E])`.

    Raises TypeError for a trigger that is no function, and TypeError or ValueError for a sparsity outside [0, 1].

    Differs from the authors' code: exactly the asked number is kept where magnitudes tie.

    Verified by a worked example, identities (at the start of a dense phase weights off the old mask are zero, and all
    moments are), and laws.

    Peste, Iofinova, Vladu and Alistarh 2021, arXiv 2106.12379.
    """
    for name, trigger in (("sparse", sparse), ("dense", dense)):
        check_trigger(name, trigger)
    level = as_fraction(sparsity)

    def sparsity_at(step: Step) -> Real:
        return level(step) * (1 - 1 * dense(step))  # the product of a bool tensor is an integer

    return gmp(
        sparsity_at,
        when=lambda step: sparse(step) | dense(step),
        where=where,
        distribution=global_(),
        init="dense",
        regrow=True,
    )
