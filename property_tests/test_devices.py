"""Every row of the registry on another device: tensors there have shapes and no values, so that none can be read.

The results are where the params are, tensors of two devices do not meet, and updates wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import sparsefn as sf
from property_tests.registry import ROWS, quadratic
from sparsefn.testing import Case, Row
from sparsefn.testing.harness import leaves
from sparsefn.testing.launches import Launches
from sparsefn.testing.strategies import large

# Scores that read data: the data are there, too.
EXAMPLES = torch.zeros(3, device="meta")
FISHER = sf.curvature.fisher(quadratic, (EXAMPLES,), chunk_size=2)
OWN: dict[str, Callable[..., sf.Algorithm]] = {
    "one_shot fisher": lambda s, key, _: sf.one_shot(s, FISHER, when=sf.at([1])),
    "iterative obd": lambda s, key, _: sf.iterative(s, when=sf.every(2), score=sf.curvature.obd(FISHER)),
}
STEPS = {"an int": int, "a tensor": torch.tensor, "a tensor there": lambda i: torch.tensor(i).to("meta")}


def there(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.to("meta"), tree)


def run_of(row: Row) -> Case:
    return large(row.meta.layout.form)


def places(state: sf.State) -> dict[str, set[str]]:
    """The devices of each field of a state, but for keys, which stay where they were given."""
    fields = {name: leaves(tree) for name, tree in state._asdict().items() if name != "key"}
    return {name: {x.device.type for x in found.values()} - {"meta"} for name, found in fields.items()}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_updates_wait_for_nothing(row: Row, step: str) -> None:
    run = run_of(row)
    algorithm = OWN.get(row.name, row.make)(run.sparsity, sf.random.key(run.seed), there(run.params))
    state = algorithm.init(there(run.params))
    assert not any(places(state).values())
    grads = [there(grads) for grads in run.grads]
    steps = [STEPS[step](i) for i in range(len(grads))]
    for i, one in enumerate(grads):
        with Launches() as counted:
            new = algorithm.update(state, one, steps[i])
        assert not counted.waits
        assert not any(places(new).values())
        assert optree.tree_structure(new) == optree.tree_structure(state)
        state = new
