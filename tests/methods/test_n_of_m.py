"""N of every m: held against recordings and all masks."""

import itertools
import re

import pytest
import torch
from golden_data import cases

import sparsefn as sf

methods = sf.methods


@pytest.mark.parametrize("case", cases("srste", "Sparse"), ids=lambda case: case.id)
def test_sr_ste_has_the_weights_and_gradients_of_its_authors(case):
    algorithm = methods.sr_ste(case.args["n"], case.args["m"], decay=case.args["decay"])
    state = algorithm.init({"w": case.inputs["weight"]})
    assert torch.equal(sf.effective(state)["w"], case.outputs["forward"])
    found = algorithm.view.grads(state, {"w": case.inputs["upstream"]}, 0)["w"]
    torch.testing.assert_close(found, case.outputs["grad"])


def test_sr_ste_by_hand():
    # Zhou et al. 2021, eq. 8, with a decay of 0.1.
    algorithm = methods.sr_ste(decay=0.1)
    state = algorithm.init({"w": torch.tensor([[3.0, -1.0, 0.5, 2.0]])})
    assert state.masks["w"].tolist() == [[True, False, False, True]]
    found = algorithm.view.grads(state, {"w": torch.ones(1, 4)}, 0)["w"]
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.9, 1.05, 1.0]]))


def test_groups_of_a_convolution_lie_along_its_inputs():
    weight = torch.randn(3, 8, 2, 2)
    for algorithm in (methods.sr_ste(), methods.asp()):
        state = algorithm.init({"w": weight})
        state = algorithm.update(state, {"w": torch.zeros_like(weight)}, 0)
        assert (state.masks["w"].reshape(3, 2, 4, 2, 2).sum(2) == 2).all()


def test_masks_of_sr_ste_follow_the_weights_and_pruned_ones_decay():
    algorithm = sf.with_optimizer(
        methods.sr_ste(1, 2, decay=0.5), sf.optimizers.sgd(1.0)
    )
    state = algorithm.init({"w": torch.tensor([[1.0, 0.8]])})
    state = algorithm.update(state, {"w": torch.tensor([[0.0, -1.0]])}, 0)
    torch.testing.assert_close(state.params["w"], torch.tensor([[1.0, 1.4]]))
    assert state.masks["w"].tolist() == [[False, True]]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 6)])
def test_asp_keeps_more_than_any_other_mask(n, m):
    weight = torch.randn(5, 2 * m)
    algorithm = methods.asp(n, m)
    state = algorithm.update(algorithm.init({"w": weight}), {"w": weight}, 0)
    groups = weight.abs().reshape(-1, m)
    every = torch.stack(
        [groups[:, list(kept)].sum(1) for kept in itertools.combinations(range(m), n)]
    )
    torch.testing.assert_close(
        state.params["w"].abs().reshape(-1, m).sum(1), every.max(0).values
    )
    trained = sf.with_optimizer(algorithm, sf.optimizers.sgd(0.1))
    after = trained.init(state.params)
    for step in range(3):
        after = trained.update(after, {"w": torch.randn(5, 2 * m)}, step)
        assert torch.equal(after.masks["w"].sum(1), torch.full((5,), 2 * n))
        assert not after.params["w"][~after.masks["w"]].any()


@pytest.mark.parametrize("make", [methods.sr_ste, methods.asp])
def test_bad_arguments_of_n_m(make):
    with pytest.raises(
        ValueError, match=re.escape("nm: expected n <= m, got n=5, m=4")
    ):
        make(5, 4)
    text = (
        "nm(2, 4, axis=1): expected axis 1 divisible by 4, got shape (2, 3, 3, 3) at "
        "'conv'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        make().init({"conv": torch.ones(2, 3, 3, 3)})
