"""Real modules and bare trees through whole training runs; the modules are left as they
were.
"""

import copy
import pickle
from collections import OrderedDict
from typing import NamedTuple

import optree
import pytest
import torch
from torch import nn
from torch.nn import functional

import sparsefn as sf


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, dim_feedforward=16, dropout=0.0, batch_first=True
        )
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.lm_head(self.layer(self.embedding(tokens))).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(5, 7, batch_first=True)
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, 3),
    )


def perceptron():
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)
    )


TOKENS = (torch.arange(40) * 7 % 11).reshape(5, 8)
MODELS = {
    "perceptron": (perceptron, lambda: torch.randn(20, 6), torch.arange(20) % 3),
    "convnet": (convnet, lambda: torch.randn(12, 1, 8, 8), torch.arange(12) % 3),
    "encoder": (Encoder, lambda: TOKENS, TOKENS.roll(1, 1).flatten()),
    "recurrent": (Recurrent, lambda: torch.randn(9, 4, 5), torch.arange(9) % 3),
}
# The leaves that the default `where` sparsifies: no bias, no norm, no embedding, which
# the tied head shares.
SPARSE = {
    "perceptron": {"0.weight", "3.weight"},
    "convnet": {"0.weight", "3.weight", "7.weight"},
    "encoder": {
        "layer.self_attn.in_proj_weight",
        "layer.self_attn.out_proj.weight",
        "layer.linear1.weight",
        "layer.linear2.weight",
    },
    "recurrent": {"cell.weight_ih_l0", "cell.weight_hh_l0", "out.weight"},
}


def build(name):
    torch.manual_seed(0)
    module, inputs, labels = MODELS[name]
    return module(), inputs(), labels


def train(module, x, y, algorithm, steps, params=None):
    """The state, the buffers and the losses of some steps; BatchNorm runs in train
    mode.
    """

    def loss(weights, buffers):
        out, buffers = sf.modules.call_with_buffers(module, weights, buffers, x)
        return functional.cross_entropy(out.float(), y), buffers

    state = algorithm.init(sf.modules.params_of(module) if params is None else params)
    buffers, losses = sf.modules.buffers_of(module), []
    for step in range(steps):
        grads, buffers = torch.func.grad(loss, has_aux=True)(
            sf.effective(state), buffers
        )
        losses.append(loss(sf.effective(state), buffers)[0].item())
        state = algorithm.update(state, grads, step)
    return state, buffers, losses


def adam_rigl(**options):
    inner = sf.rigl(
        0.6,
        drop_fraction=0.3,
        when=sf.every(4, stop=16),
        key=sf.random.key(2),
        **options,
    )
    return sf.with_optimizer(inner, sf.optimizers.adam(0.02))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_under_moving_masks(name):
    module, x, y = build(name)
    algorithm = adam_rigl()
    first = algorithm.init(sf.modules.params_of(module))
    state, buffers, losses = train(module, x, y, algorithm, 25)
    assert losses[-1] < 0.7 * losses[0]
    assert {path for path, mask in state.masks.items() if mask.ndim} == SPARSE[name]
    for path in SPARSE[name]:
        mask = state.masks[path]
        assert int(mask.sum()) == mask.numel() - round(0.6 * mask.numel())
        assert not torch.equal(mask, first.masks[path])
        assert not state.params[path][~mask].any()
        assert not state.opt.mu[path][~mask].any()
    if name == "convnet":
        assert int(buffers["1.num_batches_tracked"]) == 25
        assert buffers["1.running_mean"].any()
    baked = sf.modules.bake(module, state)
    with torch.no_grad():
        baked.eval()
        module.eval()
        torch.testing.assert_close(baked(x), sf.modules.call(module, state, x))


@pytest.mark.parametrize("name", MODELS)
def test_the_module_is_left_as_it_was(name):
    module, x, y = build(name)
    keys, copies = list(module.state_dict()), copy.deepcopy(module.state_dict())
    tensors = [*module.parameters(), *module.buffers()]
    versions, grads = [t._version for t in tensors], [t.grad for t in tensors]
    attributes = {path: set(vars(part)) for path, part in module.named_modules()}
    generator = torch.get_rng_state()
    train(module, x, y, adam_rigl(), 3)
    assert torch.equal(torch.get_rng_state(), generator)
    assert list(module.state_dict()) == keys
    assert sf.checkpoint.tree_equal(dict(module.state_dict()), dict(copies))
    now = [*module.parameters(), *module.buffers()]
    assert all(a is b for a, b in zip(now, tensors, strict=True))
    assert [t._version for t in tensors] == versions
    assert [t.grad for t in tensors] == grads == [None] * len(grads)
    assert {
        path: set(vars(part)) for path, part in module.named_modules()
    } == attributes
    module.eval()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert list(twin.state_dict()) == keys
        assert torch.equal(twin(x), module(x))


def test_a_state_can_be_copied_and_pickled():
    module, x, y = build("perceptron")
    state = train(module, x, y, adam_rigl(), 5)[0]
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert sf.checkpoint.tree_equal(twin, state)


def test_parameters_of_the_module_itself_may_be_given():
    # They are taken without their graph: states of a long run do not grow it.
    module, x, y = build("perceptron")
    named = dict(module.named_parameters())
    given = train(module, x, y, adam_rigl(), 3, params=named)[0]
    assert sf.checkpoint.tree_equal(given, train(module, x, y, adam_rigl(), 3)[0])
    assert not any(leaf.requires_grad for leaf in optree.tree_leaves(given))


def test_a_tied_weight_has_one_mask_for_both_its_uses():
    module, x, y = build("encoder")
    state = train(module, x, y, adam_rigl(where="embedding.weight"), 5)[0]
    assert "lm_head.weight" not in state.params
    mask = state.masks["embedding.weight"]
    assert int(mask.sum()) == 88 - 53
    baked = sf.modules.bake(module, state)
    assert baked.lm_head.weight is baked.embedding.weight
    assert not baked.lm_head.weight[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["perceptron", "convnet", "encoder"])
def test_other_dtypes_train_in_their_own(name, dtype):
    module, x, y = build(name)
    module = module.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    state, _, losses = train(module, x, y, adam_rigl(), 12)
    assert losses[-1] < losses[0]
    assert {
        leaf.dtype for leaf in (*state.params.values(), *state.opt.mu.values())
    } == {dtype}


def test_a_model_with_nothing_to_sparsify_warns_and_trains_densely():
    torch.manual_seed(0)
    module, x, y = (
        nn.Sequential(nn.LayerNorm(3), nn.Tanh()),
        torch.randn(8, 3),
        torch.arange(8) % 3,
    )
    optimizer = sf.optimizers.adam(0.05)
    for algorithm in (
        sf.rigl(0.5, when=sf.always()),
        sf.gmp(0.5),
        sf.snfs(0.5, when=sf.always()),
        sf.gmp(0.5, distribution=sf.budgets.global_()),
    ):
        with pytest.warns(
            UserWarning,
            match=r"no leaf is sparsified: where selects none of the paths \('0.bias', "
            r"'0.we",
        ):
            state, _, losses = train(
                module, x, y, sf.with_optimizer(algorithm, optimizer), 5
            )
        dense = train(module, x, y, sf.with_optimizer(sf.dense(), optimizer), 5)[0]
        assert sf.checkpoint.tree_equal(
            (state.params, state.masks), (dense.params, dense.masks)
        )
        assert losses[-1] < losses[0]


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


TREES = {
    "dict": lambda a, b, c: {"a": a, "deep": {"b": b, "c": c}},
    "list": lambda a, b, c: [a, [b, c]],
    "tuple": lambda a, b, c: (a, (b, (c,))),
    "ordered": lambda a, b, c: OrderedDict(z=a, y=OrderedDict(b=b, a=c)),
    "named": lambda a, b, c: Pair(a, [b, c]),
    "mixed": lambda a, b, c: {
        "x": [a, (b,)],
        "empty": {},
        "none": (),
        "y": Pair(c, []),
    },
    "tensor": lambda a, b, c: a,
}


@pytest.mark.parametrize("name", TREES)
def test_any_tree_of_tensors_is_a_model(name):
    torch.manual_seed(0)
    params = TREES[name](torch.randn(6, 5), torch.randn(4, 5), torch.randn(3))
    targets = optree.tree_map(torch.randn_like, params)

    def loss(weights):
        return sum(
            ((w - t) ** 2).sum()
            for w, t in zip(*map(optree.tree_leaves, (weights, targets)), strict=True)
        )

    for inner in (
        sf.rigl(0.5, when=sf.every(3)),
        sf.snfs(0.5, when=sf.every(3)),
        sf.gmp(
            sf.schedules.polynomial(0.0, 0.5, 0, 8), distribution=sf.budgets.global_()
        ),
        sf.ste(0.5),
        sf.reparametrised(sf.reparam.power(2.0), sf.static(0.5)),
        sf.sequence(sf.gmp(0.5), sf.set("current", when=sf.every(3))),
        sf.partition([("*", sf.iterative(0.1, when=sf.every(2)))]),
    ):
        algorithm = sf.with_optimizer(inner, sf.optimizers.adam(0.1))
        state = algorithm.init(params)
        start = loss(sf.effective(state))
        for step in range(10):
            # Classic autograd takes leaves as they come; torch.func.grad knows fewer
            # containers.
            leaves, treedef = optree.tree_flatten(sf.effective(state))
            leaves = [leaf.requires_grad_() for leaf in map(torch.clone, leaves)]
            grads = torch.autograd.grad(
                loss(optree.tree_unflatten(treedef, leaves)), leaves
            )
            state = algorithm.update(state, optree.tree_unflatten(treedef, grads), step)
        assert optree.tree_structure(state.params) == optree.tree_structure(params)
        assert optree.tree_structure(state.masks) == optree.tree_structure(params)
        assert loss(sf.effective(state)) < start
        total, kept = sf.masks.n_total(state.masks), sf.masks.n_kept(state.masks)
        assert 0.4 * total <= kept <= 0.6 * total


def test_an_ensemble_of_convnets_threads_its_buffers():
    # Two seeds of one model under vmap, each with its own BatchNorm statistics, equal
    # the loop.
    module, x, y = build("convnet")
    seeds = (2, 5)

    def build_for(key):
        return sf.with_optimizer(
            sf.rigl(0.6, when=sf.every(2), key=key),
            sf.optimizers.sgd(0.05, momentum=0.9),
        )

    def advance(key, state, buffers, step):
        def loss(weights):
            out, new = sf.modules.call_with_buffers(module, weights, buffers, x)
            return functional.cross_entropy(out, y), new

        grads, buffers = torch.func.grad(loss, has_aux=True)(sf.effective(state))
        return build_for(key).update(state, grads, step), buffers

    keys, params = (
        torch.stack([sf.random.key(seed) for seed in seeds]),
        sf.modules.params_of(module),
    )
    states = torch.func.vmap(lambda key: build_for(key).init(params))(keys)
    buffers = sf.ensemble.stack([sf.modules.buffers_of(module)] * 2)
    singles = [
        (build_for(key).init(params), sf.modules.buffers_of(module)) for key in keys
    ]
    for step in range(4):
        states, buffers = torch.func.vmap(advance, in_dims=(0, 0, 0, None))(
            keys, states, buffers, step
        )
        singles = [
            advance(key, *single, step)
            for key, single in zip(keys, singles, strict=True)
        ]
    for i, (state, statistics) in enumerate(singles):
        one = sf.ensemble.member((states, buffers), i)
        assert sf.checkpoint.tree_equal(one[0].masks, state.masks)
        torch.testing.assert_close(
            dict(one[0].params), dict(state.params), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(one[1], statistics, rtol=1e-4, atol=1e-5)


def test_gradients_that_overflow_do_not_break_the_masks():
    module, algorithm = build("perceptron")[0], adam_rigl()
    state = algorithm.init(sf.modules.params_of(module))
    for step, bad in enumerate((float("nan"), float("inf"), float("-inf"), 1e38)):
        grads = {
            path: torch.full_like(leaf, bad) for path, leaf in state.params.items()
        }
        state = algorithm.update(state, grads, 4 * step)
        for path in SPARSE["perceptron"]:
            mask = state.masks[path]
            assert int(mask.sum()) == mask.numel() - round(0.6 * mask.numel())
            assert not state.params[path][~mask].any()
