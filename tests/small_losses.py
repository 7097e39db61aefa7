"""A small net with a loss, and its derivatives by brute force, for the scores of
`sf.curvature`.
"""

import optree
import torch
from torch import nn

import sparsefn as sf

C = sf.curvature


X = torch.randn(6, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


Y = torch.tensor([0, 2, 1, 1, 0, 2])


def loss(params, x, y, temperature=1.0):
    hidden = torch.tanh(x.to(params["a"].dtype) @ params["a"].T + params["bias"])
    return nn.functional.cross_entropy(hidden @ params["b"].T / temperature, y)


def state_of(seed=0, dtype=torch.float64, masked=True, **fields):
    generator = torch.Generator().manual_seed(seed)
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in (("a", (4, 2)), ("b", (3, 4)), ("bias", (4,)))
    }
    masks = {
        name: (leaf > -0.5 if masked else torch.ones_like(leaf, dtype=torch.bool))
        if leaf.ndim > 1
        else torch.tensor(True)
        for name, leaf in params.items()
    }
    return sf.State(params, masks, **{"key": sf.random.key(seed), **fields})


def flat(tree):
    return torch.cat([leaf.reshape(-1) for leaf in optree.tree_leaves(tree)])


def hessian_and_gradient(state, loss=loss, batch=(X, Y)):
    """Both by the sparsified leaves a and b, at the effective weights, by reverse mode
    twice.
    """
    params = sf.effective(state)
    leaves = [params["a"], params["b"]]
    sizes = [leaf.numel() for leaf in leaves]

    def of_vector(vector):
        parts = [
            part.reshape(leaf.shape)
            for part, leaf in zip(vector.split(sizes), leaves, strict=True)
        ]
        return loss({**params, "a": parts[0], "b": parts[1]}, *batch)

    vector = flat(leaves)
    return (
        torch.autograd.functional.hessian(of_vector, vector),
        torch.autograd.functional.jacobian(of_vector, vector),
    )


def sparse_part(tree):
    """The sparsified leaves come first, in the order of paths: a, b, then the bias."""
    return flat({name: tree[name] for name in ("a", "b")})
