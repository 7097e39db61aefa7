"""SRigL by name: its recordings are in test_golden_dynamic."""

import pytest
import torch

import sparsefn as sf

KEY = sf.random.key(0)
PARAMS = {
    "a": torch.randn(8, 13, generator=torch.Generator().manual_seed(0)),
    "last": torch.randn(6, 8, generator=torch.Generator().manual_seed(1)),
}


def gradients(step):
    made = torch.Generator().manual_seed(step)
    grads = {path: torch.randn(w.shape, generator=made) for path, w in PARAMS.items()}
    grads["a"][:3] *= 1e-3  # three neurons that do not matter
    return grads


@pytest.mark.parametrize("ablation", [0.0, 0.9])
def test_every_neuron_has_the_same_fan_in(ablation):
    params = {
        **PARAMS,
        "a": PARAMS["a"] * torch.tensor([1e-3] * 3 + [1.0] * 5)[:, None],
    }
    options = {"drop_fraction": 0.3, "when": sf.always(), "ablate": "a", "key": KEY}
    algorithm = sf.methods.srigl(0.7, steps=10, ablation=ablation, **options)
    state = algorithm.init(params)
    assert (
        state.masks["a"].sum(1).tolist() == [3] * 8
        and state.masks["last"].sum(1).tolist() == [2] * 6
    )
    for step in range(3):
        state = algorithm.update(state, gradients(step), step)
        rows = state.masks["a"].sum(1).tolist()
        assert (
            set(rows) - {0} == {31 // (8 - rows.count(0))}
            and sf.budgets.n_kept(104, 0.7) == 31
        )
        assert state.masks["last"].sum(1).tolist() == [2] * 6  # 14 of 48, in six rows
    assert rows.count(0) == 0 if ablation == 0.0 else rows[:3] == [0, 0, 0]


def test_an_ablated_neuron_comes_back():
    weights = {
        "w": torch.tensor(
            [[8.0, 1, 0, 0], [7, 1, 0, 0], [0.1, 0.1, 0, 0], [6, 5, 0, 0]]
        )
    }
    options = {
        "drop_fraction": 0.5,
        "when": sf.always(),
        "init": {"w": weights["w"] != 0},
    }
    algorithm = sf.methods.srigl(0.5, steps=10, **options)
    grads = torch.tensor([[0.0, 0, 3, 0], [0, 0, 3, 0], [0, 0, 0, 0], [0, 0, 2, 2]])
    state = algorithm.update(algorithm.init(weights), {"w": grads}, 0)
    assert (
        state.masks["w"].sum(1).tolist() == [2, 2, 0, 2]
        and not state.params["w"][2].any()
    )
    grads = torch.tensor([[0.0], [0], [9], [0]]).expand(4, 4)
    state = algorithm.update(state, {"w": grads.contiguous()}, 1)
    assert state.masks["w"][2].sum() == 2


def test_masks_change_in_the_first_three_quarters():
    algorithm = sf.methods.srigl(0.7, steps=400, ablation=0.0, key=KEY)
    state = algorithm.init(PARAMS)
    changed = []
    for step in (0, 50, 100, 200, 300):
        before, state = state, algorithm.update(state, gradients(step), step)
        changed.append(not torch.equal(before.masks["a"], state.masks["a"]))
    assert changed == [True, False, True, True, False]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: sf.methods.srigl(1.5, steps=9),
            ValueError,
            r"expected sparsity .*in \[0, 1\]",
        ),
        (
            lambda: sf.methods.srigl(0.5, steps=9, ablation=2.0),
            ValueError,
            r"expected ablation .*in \[0, 1\]",
        ),
        (
            lambda: sf.methods.srigl(0.5, steps=9, drop_fraction=2.0),
            ValueError,
            r"expected drop_fraction",
        ),
        (
            lambda: sf.methods.srigl(0.5, steps=0),
            ValueError,
            "srigl: expected steps >= 1, got 0",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
