"""Modules: read and never written; weights in and out; gradients with and without a
transform.
"""

import copy
import pickle

import optree
import pytest
import torch
from torch import nn

import sparsefn.nn.modules as M
from sparsefn import ensemble
from sparsefn.core.state import State, effective
from sparsefn.nn.checkpoint import tree_equal


class TiedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embedding(x))))


class LastOfLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


class Counting(nn.Module):
    """Assigns a buffer anew in place of changing it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("last", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        self.last = x.detach().mean(0)
        return x * self.weight


def convnet():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    )


def encoder():
    return nn.TransformerEncoderLayer(
        4, 2, dim_feedforward=8, dropout=0.0, batch_first=True
    )


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (5, 3)),
    "convnet": (convnet, (4, 2, 4, 4)),
    "encoder": (encoder, (2, 3, 4)),
    "tied": (TiedLM, "tokens"),
    "lstm": (LastOfLSTM, (2, 4, 3)),
}
everywhere = pytest.mark.parametrize("name", MODELS)


def build(name, seed=0, train=True):
    make, shape = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = make().train(train)
        x = torch.randint(7, (3, 5)) if shape == "tokens" else torch.randn(shape)
    return module, x


def half_masked(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = M.params_of(module)
    masks = {
        path: torch.rand(p.shape, generator=generator) < 0.5
        if p.ndim >= 2
        else torch.tensor(True)
        for path, p in params.items()
    }
    return State(params, masks)


def snapshot(module):
    return (
        {name: value.clone() for name, value in module.state_dict().items()},
        {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)},
        {name: id(b) for name, b in module.named_buffers(remove_duplicate=False)},
        [p.grad for p in module.parameters()],
        module.training,
    )


def assert_untouched(module, before):
    after = snapshot(module)
    assert tree_equal(after[0], before[0])
    assert after[1:] == before[1:]
    assert tree_equal(dict(copy.deepcopy(module).state_dict()), before[0])
    assert tree_equal(dict(pickle.loads(pickle.dumps(module)).state_dict()), before[0])


@everywhere
def test_params_and_buffers_are_detached_copies_in_the_modules_order(name):
    module, _ = build(name)
    params, buffers = M.params_of(module), M.buffers_of(module)
    assert list(params) == [name for name, _ in module.named_parameters()]
    assert list(buffers) == [name for name, _ in module.named_buffers()]
    for tensors, own in (
        (params, dict(module.named_parameters())),
        (buffers, dict(module.named_buffers())),
    ):
        for path, tensor in tensors.items():
            assert type(tensor) is torch.Tensor
            assert not tensor.requires_grad
            assert torch.equal(tensor, own[path])
            assert tensor.data_ptr() != own[path].data_ptr()


def test_tied_weights_appear_once():
    assert list(M.params_of(TiedLM())) == [
        "embedding.weight",
        "body.weight",
        "body.bias",
    ]


@pytest.mark.filterwarnings("ignore:the forward changed buffers:UserWarning")
@everywhere
@pytest.mark.parametrize("train", [True, False])
def test_call_runs_on_effective_weights_and_bake_gives_the_same(name, train):
    module, x = build(name, train=train)
    state, before = half_masked(module), snapshot(module)
    with torch.no_grad():
        out = M.call(module, state, x)
        dense = M.call(module, state.params, x)
        assert torch.equal(M.call(module, effective(state), x), out)
        assert not torch.equal(dense, out)
        assert_untouched(module, before)
        baked = M.bake(module, state)
        assert_untouched(module, before)
        # Close, as torch.matmul folds its arguments one way or another by their
        # requires_grad.
        torch.testing.assert_close(baked(x), out)
        torch.testing.assert_close(copy.deepcopy(module)(x), dense)
    for path, param in baked.named_parameters():
        assert torch.equal(param, effective(state)[path])


def test_bake_keeps_ties_flags_and_independence():
    module, _ = build("tied")
    module.body.bias.requires_grad_(False)
    state = half_masked(module)
    baked = M.bake(module, state)
    assert baked.head.weight is baked.embedding.weight
    assert baked.head.weight is not module.head.weight
    assert [p.requires_grad for p in baked.parameters()] == [True, True, False]
    before = effective(state)["body.weight"].clone()
    with torch.no_grad():
        baked.body.weight.add_(1.0)
    assert torch.equal(effective(state)["body.weight"], before)
    assert torch.equal(module.body.weight, state.params["body.weight"])
    half = M.bake(nn.Linear(2, 2).bfloat16(), M.params_of(nn.Linear(2, 2).bfloat16()))
    assert half.weight.dtype == torch.bfloat16


def test_params_may_be_any_tree_with_the_modules_names():
    module, x = build("mlp")
    params = M.params_of(module)
    nested = {
        part: {kind: params[f"{part}.{kind}"] for kind in ("bias", "weight")}
        for part in ("2", "0")
    }
    assert torch.equal(M.call(module, nested, x), M.call(module, params, x))


def test_names_and_shapes_are_checked():
    module, x = build("mlp")
    params = M.params_of(module)
    renamed = {**params, "0.wieght": params["0.weight"]}
    del renamed["0.weight"]
    text = (
        r"expected the parameters of the Sequential, but missing are \['0.weight'\] "
        r"and unknown \['0.wieght'\]$"
    )
    for broken in (lambda: M.call(module, renamed, x), lambda: M.bake(module, renamed)):
        with pytest.raises(ValueError, match=text):
            broken()
    with pytest.raises(ValueError, match=r"missing are \['2.bias'\] and unknown \[\]"):
        M.call(module, {path: p for path, p in params.items() if path != "2.bias"}, x)
    with pytest.raises(
        ValueError,
        match=r"expected parameters of shape \(4,\) at '0.bias', got \(2, 4\)",
    ):
        M.call(module, {**params, "0.bias": params["0.bias"].expand(2, 4)}, x)
    tied, tokens = build("tied")
    both = {**M.params_of(tied), "head.weight": tied.head.weight}
    with pytest.raises(
        ValueError,
        match=r"unknown \['head.weight'\]; 'head.weight' is tied to 'embedding.weight'",
    ):
        M.call(tied, both, tokens)
    norm, image = build("convnet")
    buffers = M.buffers_of(norm)
    for broken in (
        lambda given: M.call(norm, M.params_of(norm), image, buffers=given),
        lambda given: M.call_with_buffers(norm, M.params_of(norm), given, image),
    ):
        text = (
            r"expected the buffers of the Sequential, but missing are "
            r"\['1.running_var'\] and unknown \['mean'\]"
        )
        with pytest.raises(ValueError, match=text):
            broken(
                {
                    "1.running_mean": torch.zeros(3),
                    "1.num_batches_tracked": torch.tensor(0),
                    "mean": torch.ones(3),
                }
            )
        with pytest.raises(
            ValueError,
            match=r"expected buffers of shape \(3,\) at '1.running_var', got \(2, 3\)",
        ):
            broken({**buffers, "1.running_var": torch.ones(2, 3)})


def test_keyword_arguments_reach_the_forward():
    module, x = build("encoder", train=False)
    mask = torch.full((3, 3), -1e9).triu(1)
    with torch.no_grad():
        out = M.call(module, M.params_of(module), x, src_mask=mask)
        torch.testing.assert_close(out, module(x, src_mask=mask))
        assert (out - module(x)).abs().max() > 1e-3


def test_an_exception_in_the_forward_leaves_the_module_untouched():
    module, _ = build("convnet")
    before = snapshot(module)
    with pytest.raises(RuntimeError):
        M.call(module, half_masked(module), torch.zeros(1, 9, 9, 9))
    assert_untouched(module, before)


def test_call_with_buffers_returns_what_the_module_itself_would_hold():
    module, x = build("convnet")
    params, buffers, before = (
        M.params_of(module),
        M.buffers_of(module),
        snapshot(module),
    )
    kept = {path: b.clone() for path, b in buffers.items()}
    out, new = M.call_with_buffers(module, params, buffers, x)
    _, newer = M.call_with_buffers(module, params, new, x)
    assert_untouched(module, before)
    assert tree_equal(buffers, kept)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), out)
    assert tree_equal(new, M.buffers_of(twin))
    twin(x)
    assert tree_equal(newer, M.buffers_of(twin))
    assert newer["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.filterwarnings("ignore:the forward changed buffers:UserWarning")
def test_call_reads_the_buffers_given_and_drops_what_the_forward_leaves():
    module, x = build("convnet", train=False)
    params = M.params_of(module)
    other = {**M.buffers_of(module), "1.running_mean": torch.full((3,), 5.0)}
    with torch.no_grad():
        assert not torch.equal(
            M.call(module, params, x, buffers=other), M.call(module, params, x)
        )
        twin = copy.deepcopy(module)
        twin[1].running_mean.fill_(5.0)
        assert torch.equal(M.call(module, params, x, buffers=other), twin(x))
        kept = {path: b.clone() for path, b in other.items()}
        M.call(module.train(), params, x, buffers=other)
    assert tree_equal(other, kept)


def test_buffers_that_the_forward_assigns_anew():
    module = Counting()
    before = snapshot(module)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out, new = M.call_with_buffers(module, M.params_of(module), M.buffers_of(module), x)
    assert new["calls"].item() == 1
    assert new["last"].tolist() == [2.0, 3.0]
    with pytest.warns(
        UserWarning,
        match="the forward changed buffers, 'calls', 'last', and sf.modules.call drops",
    ):
        assert torch.equal(M.call(module, M.params_of(module), x), out)
    assert_untouched(module, before)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:the forward changed buffers:UserWarning")
def test_batchnorm_in_train_mode_under_grad_vmap_and_compile():
    module, x = build("convnet")
    before = snapshot(module)

    def loss(params, buffers, x):
        out, new = M.call_with_buffers(module, params, buffers, x)
        return out.square().mean(), new

    def step(params, buffers, x):
        return torch.func.grad(loss, has_aux=True)(params, buffers, x)

    members = [
        optree.tree_map(lambda p, i=i: p + 0.1 * i, M.params_of(module))
        for i in range(3)
    ]
    buffers = M.buffers_of(module)
    loop = [step(params, buffers, x) for params in members]
    batched = torch.vmap(step, in_dims=(0, 0, None))(
        ensemble.stack(members), ensemble.stack([buffers] * 3), x
    )
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(
        members[0], buffers, x
    )
    for got, want in ((ensemble.member(batched, 1), loop[1]), (compiled, loop[0])):
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    outs = torch.vmap(
        lambda params, buffers: M.call(module, params, x, buffers=buffers)
    )(ensemble.stack(members), ensemble.stack([buffers] * 3))
    torch.testing.assert_close(outs[2], M.call(module, members[2], x))
    # A plain call drops the buffers, also where autograd and grad would refuse to write
    # them.
    gradient = torch.func.grad(
        lambda params: M.call(module, params, x).square().mean()
    )(members[0])
    assert tree_equal(gradient, loop[0][0])
    assert_untouched(module, before)


def mean_square(module):
    return lambda params, x: (
        M.call_with_buffers(module, params, M.buffers_of(module), x)[0]
        .float()
        .square()
        .mean()
    )


@everywhere
def test_value_and_grad_is_the_same_with_and_without_a_transform(name):
    module, x = build(name)
    state, before = half_masked(module), snapshot(module)
    f = M.value_and_grad(mean_square(module))
    value, grads = f(effective(state), x)
    want_grads, want = torch.func.grad_and_value(mean_square(module))(
        effective(state), x
    )
    assert torch.equal(value, want)
    for path, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[path], rtol=1e-6, atol=1e-7)
    assert not value.requires_grad
    assert not any(grad.requires_grad for grad in grads.values())
    assert optree.tree_structure(grads) == optree.tree_structure(state.params)
    off = [
        path
        for path, mask in state.masks.items()
        if mask.ndim and grads[path][~mask].count_nonzero()
    ]
    assert off, "the gradient at the effective weights is dense"
    assert_untouched(module, before)


# torch's own attention under vmap
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", ["mlp", "encoder", "tied"])
def test_value_and_grad_under_vmap_over_members(name):
    module, x = build(name)
    before = snapshot(module)
    f = M.value_and_grad(mean_square(module))
    states = [half_masked(module, seed) for seed in range(3)]
    values, grads = torch.vmap(lambda state: f(effective(state), x))(
        ensemble.stack(states)
    )
    for i, state in enumerate(states):
        value, grad = f(effective(state), x)
        torch.testing.assert_close(values[i], value)
        for path in grad:
            torch.testing.assert_close(grads[path][i], grad[path], rtol=1e-5, atol=1e-6)
    assert_untouched(module, before)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["mlp", "convnet", "encoder", "tied"])
def test_value_and_grad_under_compile(name):
    module, x = build(name)
    state, before = half_masked(module), snapshot(module)
    f = M.value_and_grad(mean_square(module))
    value, grads = torch.compile(
        lambda state, x: f(effective(state), x), fullgraph=True, backend="aot_eager"
    )(state, x)
    want, want_grads = f(effective(state), x)
    torch.testing.assert_close(value, want)
    for path in want_grads:
        torch.testing.assert_close(grads[path], want_grads[path], rtol=1e-5, atol=1e-6)
    assert_untouched(module, before)
