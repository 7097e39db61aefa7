"""The CPU's steps take plain float32 leaves, and leave others to the formula."""

import pytest
import torch

from sparsefn._engine.leaves import steps

ONE = torch.ones((), dtype=torch.float64)
ADAM = ((0.5, 0.5), 1e-8, 0.0, False)


def numbers():
    return torch.tensor(0), ONE, ONE, ONE


def test_a_leaf_that_is_not_plain_is_left_to_the_formula():
    x = torch.full((5,), 2.0)
    rows = [
        [x, x, x, x],
        [x, x, x.clone().requires_grad_(), x],
        [x.bfloat16()] * 4,
        [x.double()] * 4,
    ]
    made, (count, *powers) = steps.adam_updates(rows, numbers(), *ADAM)
    assert [done is None for done in made] == [False, True, True, True]
    update, mu, nu = made[0]
    assert torch.equal(mu, x) and torch.equal(nu, x + 1)
    assert (update < 0).all() and count == 1 and powers == [0.5, 0.5]


@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
@pytest.mark.parametrize("moments", [0, 1, 2])
def test_under_masks_the_mask_of_a_dense_leaf_is_true_everywhere(moments, shape):
    x = torch.full(shape, 2.0)
    rows = [(x, mask, x, *[x] * moments) for mask in (torch.tensor(True), x > 0)]
    if moments == 2:
        made, _ = steps.adam_step(rows, numbers(), *ADAM, True)
    else:
        made, _ = steps.sgd_step(rows, numbers()[::3], 0.9 * moments, False, 0.0, True)
    for got, want in zip(*made, strict=True) if x.numel() else ():
        assert got.shape == x.shape and torch.equal(got, want)


def test_hidden_numbers_are_declined():
    def run(rate):
        given = torch.tensor(0), rate
        assert steps.sgd_step([], given, 0.0, False, 0.0, False) is None
        assert steps.adam_step([], (*numbers()[:3], rate), *ADAM, False) is None
        assert steps.adam_updates([], (*numbers()[:3], rate), *ADAM) is None
        return rate

    torch.vmap(run)(torch.ones(2, dtype=torch.float64))
    run(ONE.clone().requires_grad_())
