"""Every row of the registry on another device: tensors there have shapes and no values,
so that none can be read.

The results are where the params are, tensors of two devices do not meet, and updates
wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import sparsefn as sf
from benchmarks._models import resnet50_shapes
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
    "iterative obd": lambda s, key, _: sf.iterative(
        s, when=sf.every(2), score=sf.curvature.obd(FISHER)
    ),
}
STEPS = {
    "an int": int,
    "a tensor": torch.tensor,
    "a tensor there": lambda i: torch.tensor(i).to("meta"),
}


def there(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.to("meta"), tree)


def run_of(row: Row) -> Case:
    return large(row.meta.layout.form)


def places(state: sf.State) -> dict[str, set[str]]:
    """The devices of each leaf of a state, keys among them, but for the one where the
    params are.
    """
    return {path: {x.device.type} - {"meta"} for path, x in leaves(state).items()}


@pytest.mark.deep(
    but=[
        "gmp-a tensor there",
        "rigl-a tensor there",
        "ste-a tensor there",
        "supermask-a tensor there",
        "gmp nm-a tensor there",
        "one_shot-a tensor there",
        "partition-a tensor there",
    ]
)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_updates_wait_for_nothing(row: Row, step: str) -> None:
    run = run_of(row)
    algorithm = OWN.get(row.name, row.make)(
        run.sparsity, sf.random.key(run.seed), there(run.params)
    )
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


def resnet50() -> dict[str, torch.Tensor]:
    """The 54 weights of a ResNet-50, without values."""
    return {
        f"{i:02d}": torch.empty(shape, device="meta")
        for i, shape in enumerate(resnet50_shapes())
    }


THERE = torch.empty((), dtype=torch.int64, device="meta")
GLOBAL, ROWS_ALIKE = sf.budgets.global_(), sf.patterns.row_balanced()
SGD, ADAM = sf.optimizers.sgd(0.1, momentum=0.9), sf.optimizers.adam(0.1)
BUDGETS: dict[
    str, tuple[sf.Algorithm, Any, int, int]
] = {  # launches, and bytes a weight
    "gmp": (sf.gmp(0.9), 100, 35, 180),
    "gmp global": (sf.gmp(0.9, distribution=GLOBAL), 100, 30, 140),
    "rigl": (sf.rigl(0.9), 100, 85, 350),
    "rigl, a step there": (sf.rigl(0.9), THERE, 220, 380),
    "rigl of rows": (sf.rigl(0.9, pattern=ROWS_ALIKE), 100, 800, 280),
    "set": (sf.set(0.9), 100, 640, 1700),
    "set, a step there": (sf.set(0.9), THERE, 750, 1720),
    "snfs": (sf.snfs(0.9), 100, 690, 580),
    "snfs, a step there": (sf.snfs(0.9), THERE, 900, 600),
    "rigl with sgd": (sf.with_optimizer(sf.rigl(0.9), SGD), 100, 115, 530),
    "rigl with adam": (sf.with_optimizer(sf.rigl(0.9), ADAM), 100, 170, 680),
    "masks stay, sgd": (sf.with_optimizer(sf.rigl(0.9), SGD), 101, 20, 125),
    "masks stay, adam": (sf.with_optimizer(sf.rigl(0.9), ADAM), 101, 75, 280),
}


def counted_update(algorithm: sf.Algorithm, step: Any) -> tuple[int, float]:
    """The launches of an update of 54 leaves, and its bytes a weight."""
    params = resnet50()
    state = algorithm.init(params)
    with Launches() as counted:
        algorithm.update(state, params, step)
    assert not counted.waits
    return counted.launches, counted.bytes / sum(x.numel() for x in params.values())


@pytest.mark.deep
@pytest.mark.parametrize("name", BUDGETS)
def test_an_update_of_54_leaves_stays_in_its_budget(name: str) -> None:
    algorithm, step, launches, size = BUDGETS[name]
    counted = counted_update(algorithm, step)
    assert counted[0] <= launches and counted[1] <= size


R = sf.redistribute
SHARES = {
    "mean_active": R.mean_active,
    "active": R.active,
    "survivors": R.survivors,
    "lost": R.lost,
}


@pytest.mark.parametrize("most", [1.0, 0.99])
@pytest.mark.parametrize("share", SHARES)
def test_launches_of_shares_do_not_grow_with_leaves(share: str, most: float) -> None:
    def launches(n: int) -> int:
        scores = {f"{i:02d}": torch.empty(50 + i, device="meta") for i in range(n)}
        before = {path: x > 0 for path, x in scores.items()}
        with Launches() as counted:
            parts = SHARES[share](scores, before, before)
            R.allocate(
                parts,
                torch.empty((), dtype=torch.int64, device="meta"),
                R.active({}, before, before),
                most,
            )
            R.careful(SHARES[share])(0.3, scores, before)
        assert not counted.waits
        return counted.launches

    assert launches(5) == launches(54)


def test_coins_of_54_leaves_are_thrown_at_once() -> None:
    launches, _ = counted_update(sf.supermask("bernoulli"), 100)
    assert launches <= 430


@pytest.mark.parametrize("name", ["set", "supermask bernoulli"])
def test_members_that_draw_copy_nothing(name: str) -> None:
    params = there({"w": torch.ones(4, 8, 6), "v": torch.ones(4, 4, 3)})
    keys = sf.random.split(KEY, 4)
    make: dict[str, Callable[[torch.Tensor], sf.Algorithm]] = {
        "set": lambda key: sf.set(0.5, when=sf.always(), key=key),
        "supermask bernoulli": lambda key: sf.supermask("bernoulli", key=key),
    }
    state = torch.func.vmap(lambda x, key: make[name](key).init(x))(params, keys)
    assert state.key.is_meta and state.key.shape == (4, 2)
    update = torch.func.vmap(lambda s, g: make[name](KEY).update(s, g, 3))
    with Launches() as counted:
        update(state, params)
    assert not counted.waits


def test_a_key_of_params_on_several_devices_stays() -> None:
    params = {"w": torch.ones(3, 4), "v": torch.empty(3, 4, device="meta")}
    state = sf.set(0.5, key=KEY, init="magnitude").init(params)
    assert torch.equal(state.key, KEY)


KEY = sf.random.key(1)
DRAWING: dict[str, sf.Algorithm] = {
    "set": sf.set(0.5, when=sf.always(), key=KEY),
    "one_shot random": sf.one_shot(0.5, sf.scores.random, when=sf.always(), key=KEY),
    "supermask bernoulli": sf.supermask("bernoulli", key=KEY),
    "chts": sf.methods.chts(0.5, steps=5, when=sf.always(), key=KEY),
    "above a schedule": sf.gmp(
        sf.counts.above(sf.schedules.linear(0.1, 0.2)), when=sf.always()
    ),
    "deep_rewiring": sf.methods.deep_rewiring(0.5, key=KEY),
}


@pytest.mark.deep(but=["set-*", "chts-*"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", DRAWING)
def test_updates_that_draw_copy_nothing(name: str, step: str) -> None:
    algorithm = sf.with_optimizer(DRAWING[name], sf.optimizers.sgd(0.1))
    params = there({"w": torch.ones(8, 6), "v": torch.ones(4, 3), "b": torch.ones(8)})
    now = STEPS[step](3)
    with Launches() as counted:
        algorithm.update(algorithm.init(params), params, now)
    assert not counted.waits
