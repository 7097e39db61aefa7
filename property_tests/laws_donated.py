"""The law of `donated`: an update that may write over its state has the bits of the
pure one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sparsefn as sf
from sparsefn.core.state import has_optimizer, masked_view
from sparsefn.testing import Row
from sparsefn.testing.harness import algorithm_of, assert_same, bits_of, leaves
from sparsefn.testing.introspection import first_state
from sparsefn.testing.strategies import large

STEPS = 12

OPTIMIZERS = {
    "sgd": sf.optimizers.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "bare sgd": sf.optimizers.sgd(0.1),
    "adamw": sf.optimizers.adamw(1e-2, weight_decay=0.1),
}


def check(
    row: Row,
    optimizer: str,
    donate: Callable[[sf.Algorithm], sf.Algorithm] = sf.donated,
) -> None:
    """The same bits at every step, an old state that cannot be used, and weights and
    moments written in place.
    """
    case = large(row.meta.layout.form)
    algorithm = algorithm_of(row, case)
    whole = algorithm
    bare = not has_optimizer(first_state(row))
    if bare:
        whole = sf.with_optimizer(algorithm, OPTIMIZERS[optimizer], skip=sf.never())
    giving = donate(whole)
    pure, state = whole.init(case.params), giving.init(case.params)
    in_place = 0
    for step in range(STEPS):
        # gradients that are tensors of the state: they are read when weights have been
        # written
        own = step % 3 == 0
        wanted = whole.update(
            pure, pure.params if own else case.grads[step % len(case.grads)], step
        )
        old, places = (
            leaves(state),
            {path: x.data_ptr() for path, x in leaves(state).items()},
        )
        grads = state.params if own else case.grads[step % len(case.grads)]
        given = [] if own else [(x, x.clone()) for x in leaves(grads).values()]
        pure, state = wanted, giving.update(state, grads, step)
        assert_same(f"step {step} of donated and of the pure update", state, wanted)
        for x, copy in given:
            assert torch.equal(bits_of(x), bits_of(copy)), (
                "a donated update writes to its gradients"
            )
        for path, x in old.items():
            with pytest.raises(
                ValueError, match="a donated algorithm has updated the state"
            ):
                pytest.fail(f"the old state has {x.shape} at {path}")
        in_place += sum(
            places[path] == x.data_ptr()
            for path, x in leaves(state).items()
            if path.startswith("opt.")
        )
    one_pass = (
        algorithm.view.put is masked_view.put
        and algorithm.view.grads is masked_view.grads
    )
    momenta = bare and optimizer != "bare sgd"
    assert in_place or not momenta or not one_pass, "no moment was written in place"
