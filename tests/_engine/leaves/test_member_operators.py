"""Operators under `vmap`: each member has the bits that it has alone."""

import torch

import sparsefn as sf
from sparsefn._engine.leaves.member_operators import hidden


def test_what_hides_values():
    seen = []

    def run(x):
        seen.append(hidden(x))
        return x

    run(torch.ones(2))
    torch.vmap(run)(torch.ones(3, 2))
    torch.func.grad(lambda x: run(x).sum())(torch.ones(2))
    torch.compile(run, backend="eager", fullgraph=False)(torch.ones(2))
    assert seen[:3] == [False, True, False]


def test_members_along_any_dimension_and_in_two_batches():
    weights, hessian = torch.randn(2, 4, 3, 5), torch.eye(5) + 0.1
    masks = torch.rand(4, 3, 5) < 0.5
    both = torch.vmap(
        torch.vmap(sf.solve.refit, in_dims=(0, None, 0)), in_dims=(0, None, None)
    )
    made = both(weights, hessian, masks)
    for i in range(2):
        for j in range(4):
            assert torch.equal(
                made[i, j], sf.solve.refit(weights[i, j], hessian, masks[j])
            )
    last = torch.vmap(
        lambda w: sf.solve.obs_exact(w, hessian, 4), in_dims=2, out_dims=2
    )
    turned = weights[0].permute(1, 2, 0).contiguous()
    new, kept = last(turned)
    for j in range(4):
        one = sf.solve.obs_exact(turned[..., j], hessian, 4)
        assert torch.equal(new[..., j], one[0]) and torch.equal(kept[..., j], one[1])
