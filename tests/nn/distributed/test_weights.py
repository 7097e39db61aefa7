"""Weights into a module and gradients out of it, in one process; test_edges.py has
several.
"""

import re

import pytest
import torch
from torch import nn

import sparsefn as sf


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head, self.unused = (
            nn.Linear(4, 6),
            nn.Linear(6, 2),
            nn.Linear(3, 3),
        )

    def forward(self, x):
        return self.head(self.inner(x).relu())


def made():
    torch.manual_seed(0)
    net = Net()
    return net, sf.static(0.5, where="*.weight").init(sf.modules.params_of(net))


def test_the_loop_is_that_of_call_and_value_and_grad():
    net, state = made()
    x = torch.randn(5, 4)
    loss = sf.modules.value_and_grad(
        lambda params: sf.modules.call(net, params, x).square().sum()
    )
    value, wanted = loss(sf.effective(state))
    sf.distributed.commit(net, state)
    assert sf.checkpoint.tree_equal(sf.modules.params_of(net), sf.effective(state))
    found = net(x).square().sum()
    found.backward()
    grads = sf.distributed.grads_of(net, state)
    assert torch.equal(found, value)
    assert sf.checkpoint.tree_equal(grads, wanted)
    assert not grads["unused.weight"].any()
    assert all(p.grad is None for p in net.parameters())


def test_a_state_is_not_shared_with_the_module():
    net, state = made()
    before = sf.tree.copied(state)
    sf.distributed.commit(net, state)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert sf.checkpoint.tree_equal(state, before)


def test_names_are_those_without_wrappers_and_tied_weights_are_written_once():
    net, state = made()
    wrapped = torch.compile(net, backend="eager")
    sf.distributed.commit(wrapped, state)
    assert torch.equal(net.inner.weight, sf.effective(state)["inner.weight"])
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    other = sf.dense().init({"0.weight": torch.full((3, 3), 2.0)})
    sf.distributed.commit(tied, other)
    tied(torch.ones(3)).sum().backward()
    (grad,) = sf.distributed.grads_of(tied, other).values()
    assert torch.equal(tied[1].weight, other.params["0.weight"])
    assert grad.shape == (3, 3) and tied[1].weight.grad is None


def test_parameters_that_the_state_lacks_stay():
    net, _ = made()
    net.unused.requires_grad_(False)
    part = sf.dense().init(
        {name: p + 1 for name, p in sf.modules.params_of(net, trainable=True).items()}
    )
    kept = net.unused.weight.clone()
    with pytest.raises(
        ValueError,
        match=re.escape("missing are ['unused.weight', 'unused.bias'] and unknown []"),
    ):
        sf.distributed.commit(net, part)
    sf.distributed.commit(net, part, partial=True)
    assert torch.equal(net.inner.bias, part.params["inner.bias"])
    assert torch.equal(net.unused.weight, kept)
    net(torch.ones(4)).sum().backward()
    assert list(sf.distributed.grads_of(net, part)) == list(part.params)


def test_gradients_of_embeddings_may_be_sparse():
    words = nn.Embedding(5, 2, sparse=True)
    state = sf.dense().init(sf.modules.params_of(words))
    words(torch.tensor([1, 1])).sum().backward()
    assert sf.distributed.grads_of(words, state)["weight"].sum(1).tolist() == [
        0,
        4,
        0,
        0,
        0,
    ]


REFUSED = {
    "params": (
        lambda net, state: sf.distributed.commit(net, state.params),
        TypeError,
        "commit: expected a State second, as algorithm.init(params) gives it, got dict",
    ),
    "no module": (
        lambda net, state: sf.distributed.commit(state, state),
        TypeError,
        "expected a module first, as in call(module, state, x), got State",
    ),
    "an unknown name": (
        lambda net, state: sf.distributed.commit(net.inner, state),
        ValueError,
        "expected the parameters of the Linear, but missing are ['weight', 'bias'] "
        "and unknown ['head.bias', ",
    ),
    "another shape": (
        lambda net, state: sf.distributed.commit(
            net.inner, sf.dense().init({"weight": X[:3], "bias": X[0, :1]})
        ),
        ValueError,
        "expected parameters of shape (6, 4) at 'weight', got (3, 4)",
    ),
    "another dtype": (
        lambda net, state: sf.distributed.commit(
            net.inner, sf.dense().init({"weight": X.double(), "bias": X[:, 0]})
        ),
        TypeError,
        "commit: expected params of dtype torch.float32 at 'weight', got torch.float64",
    ),
    "gradients for params": (
        lambda net, state: sf.distributed.grads_of(net, state.params),
        TypeError,
        "grads_of: expected a State second, as algorithm.init(params) gives it, got "
        "dict",
    ),
    "gradients of unknown params": (
        lambda net, state: sf.distributed.grads_of(
            net.inner, sf.dense().init({"weight": X, "other": X})
        ),
        ValueError,
        "grads_of: expected params of the Linear, but unknown are ['other']",
    ),
    "gradients of another shape": (
        lambda net, state: sf.distributed.grads_of(
            net.inner, sf.dense().init({"weight": X[:3]})
        ),
        ValueError,
        "expected params of shape (6, 4) at 'weight', got (3, 4)",
    ),
    "gradients of another dtype": (
        lambda net, state: sf.distributed.grads_of(
            net.inner, sf.dense().init({"weight": X.double()})
        ),
        TypeError,
        "grads_of: expected params of dtype torch.float32 at 'weight', got "
        "torch.float64",
    ),
    "no gradients": (
        lambda net, state: sf.distributed.grads_of(net, state),
        ValueError,
        "grads_of: expected gradients, but no parameter has one: call it after "
        "backward(), and when gradients are accumulated, after the backward() that "
        "reduces them over the processes",
    ),
}
X = torch.ones(6, 4)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_is_written(name):
    broken, error, text = REFUSED[name]
    net, state = made()
    if "another" in name or "unknown" in name:
        net(X).sum().backward()
    before = {path: (p.detach().clone(), p.grad) for path, p in net.named_parameters()}
    with pytest.raises(error, match=re.escape(text)):
        broken(net, state)
    for path, p in net.named_parameters():
        assert torch.equal(p, before[path][0]) and p.grad is before[path][1]
