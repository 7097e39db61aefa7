"""An algorithm whose update writes over the state that it is given."""

from __future__ import annotations

from torch import Tensor

from sparsefn._engine.leaves import donating, empty, unshared_memory
from sparsefn._engine.transforms import differentiated, in_mode, transformed
from sparsefn.algorithms.combine.parts import check_algorithm
from sparsefn.algorithms.frame import framed
from sparsefn.core.checks import described
from sparsefn.core.state import Algorithm, State, Step, UncheckedUpdate, update_of
from sparsefn.core.tree import Tree, leaves_of, opened


@described
def donated(algorithm: Algorithm) -> Algorithm:
    """The algorithm whose update may write into the memory of the state it is given.

    >>> algorithm = sf.donated(
    ...     sf.with_optimizer(sf.rigl(0.5, when=sf.never()), sf.optimizers.adamw(1e-3))
    ... )
    >>> old = algorithm.init({"w": torch.ones(64, 64)})
    >>> at = old.params["w"].data_ptr()
    >>> new = algorithm.update(old, {"w": torch.ones(64, 64)}, 0)
    >>> new.params["w"].data_ptr() == at
    True
    >>> old.params["w"] + 1
    Traceback (most recent call last):
        ...
    ValueError: expected a tensor, got <given away: float32 of shape (64, 64)>: ...

    Args:
        algorithm: Algorithm whose update may write over its state. Put `donated`
            outermost, around `with_optimizer`.

    Returns:
        Algorithm whose new states have the same bits as without. Under `vmap`,
        `torch.compile` and derivatives through the update, with DTensors, and inside
        another algorithm and `sf.attach`, nothing is given away.

    Raises:
        TypeError: `algorithm` is no Algorithm.

    This is what JAX calls donated buffers. The steps of `sf.optimizers.sgd`, `adam` and
    `adamw` on float32 CPU leaves are made in place: beside the state and the gradients,
    such a step needs the memory of a few blocks, where the pure update needs memory for
    a second state. Masks that change are new tensors; most algorithms write their
    weights over the old ones, and work on one leaf after another: such a step needs the
    memory of a second tree of masks and of one leaf.

    The old state is given away, with every tensor in it. You may hold some of these
    tensors under other names: the dense leaves of `sf.effective(old)`, and views such
    as `old.params["w"][0]`, whose values then change. To keep a state, copy it before:
    `optree.tree_map(torch.clone, state)`. Arguments that do not fit leave it as it was;
    an error that a function of yours, such as a score, raises inside the update gives
    it away. Code of your own that calls such an optimizer inside the update reads what
    it needs of the old state before the call: later, reading raises.
    """
    check_algorithm("donated", algorithm)
    record = update_of(algorithm)
    pure = record.around or record.inner  # the update of `captured` is pure, too

    def update(state: State, grads: Tree, step: Step) -> State:
        old = _tensors_of(state)
        given = _tensors_of(grads)
        if transformed() or in_mode() or differentiated(*old, *given):
            return pure(state, grads, step)
        spare = unshared_memory(old, given)
        with donating(spare) as left:
            try:
                new = pure(state, grads, step)
            except BaseException:
                # some weights have moved, and other weights have not
                if any(id(x) not in left for x in spare):
                    empty(old)
                raise
        passed = {id(x) for x in old}
        leaves, rebuild = opened(new)
        kept: State = rebuild([x.detach() if id(x) in passed else x for x in leaves])
        empty(old)
        return kept

    return framed(
        algorithm.init,
        UncheckedUpdate(record.inner, around=update),
        algorithm.view,
        settled=algorithm.settled,
    )


def _tensors_of(tree: Tree) -> list[Tensor]:
    return [x for x in leaves_of(tree) if isinstance(x, Tensor)]
