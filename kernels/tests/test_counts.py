"""What updates launch where kernels serve, counted on tensors that have shapes and no
values.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import sparsefn as sf
from benchmarks._models import resnet50_shapes
from sparsefn._engine.backends import BACKENDS
from sparsefn._engine.draws.leaf_draws import drawn_leaves
from sparsefn.testing.launches import Launches
from sparsefn_kernels import backends_for

SGD, ADAM = sf.optimizers.sgd(0.1, momentum=0.9), sf.optimizers.adam(0.1)
BUDGETS: dict[
    str, tuple[sf.Algorithm, int, int, int]
] = {  # a step, launches (an operator is one), bytes a weight
    "gmp": (sf.gmp(0.9), 100, 8, 25),
    "rigl": (sf.rigl(0.9), 100, 60, 60),
    "set": (sf.set(0.9), 100, 60, 65),
    "rigl with sgd": (sf.with_optimizer(sf.rigl(0.9), SGD), 100, 60, 160),
    "rigl with adam": (sf.with_optimizer(sf.rigl(0.9), ADAM), 100, 60, 190),
    "masks stay, sgd": (sf.with_optimizer(sf.rigl(0.9), SGD), 101, 2, 22),
    "masks stay, adam": (sf.with_optimizer(sf.rigl(0.9), ADAM), 101, 2, 30),
}


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels serve tensors without values: their operators are counted, and nothing is
    launched.
    """
    for at, kernel in backends_for("meta").items():
        monkeypatch.setitem(BACKENDS, at, kernel)


def resnet50() -> dict[str, torch.Tensor]:
    """The 54 weights of a ResNet-50, without values."""
    return {
        f"{i:02d}": torch.empty(shape, device="meta")
        for i, shape in enumerate(resnet50_shapes())
    }


@pytest.mark.parametrize("name", BUDGETS)
def test_an_update_of_54_leaves_stays_in_its_budget(name: str) -> None:
    algorithm, step, launches, size = BUDGETS[name]
    params = resnet50()
    state = algorithm.init(params)
    with Launches() as counted:
        algorithm.update(state, params, step)
    assert counted.launches <= launches and not counted.waits
    assert counted.bytes / sum(x.numel() for x in params.values()) <= size


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_a_step_under_masks_is_two_launches(optimizer: Any) -> None:
    params = resnet50()
    masks = {path: x > 0 for path, x in params.items()}
    state = optimizer.init(params)
    with Launches() as counted:
        made = optimizer.under_masks(params, state, params, masks)
    # the rate is one
    assert made is not None and counted.launches == 2 and not counted.waits
    assert optree.tree_structure(made) == optree.tree_structure((params, state))


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_all_leaves_are_drawn_in_three_launches(kind: str) -> None:
    with Launches() as counted:
        drawn_leaves(sf.random.key(0), resnet50(), 3, kind, torch.float32)
    assert counted.launches <= 3 and not counted.waits
