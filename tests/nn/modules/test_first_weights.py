"""First weights are scaled to the inputs that a mask leaves to each output."""

import math

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.nn.modules import scaled_init


class Conv1D(nn.Module):
    """As in transformers: `x @ weight + bias`."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(nx, nf)),
            nn.Parameter(torch.randn(nf)),
        )


def state_of(net, sparsity=0.6, **options):
    return sf.static(sparsity, where=sf.modules.weights_of(net), **options).init(
        sf.modules.params_of(net)
    )


LAYERS = {
    "linear": (nn.Linear(7, 5), "weight"),
    "conv1d": (nn.Conv1d(4, 6, 3), "weight"),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), groups=2), "weight"),
    "conv3d": (nn.Conv3d(2, 3, 2), "weight"),
    "transposed1d": (nn.ConvTranspose1d(4, 3, 3), "weight"),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 3, groups=2), "weight"),
    "bilinear": (nn.Bilinear(3, 4, 5), "weight"),
    "lstm": (nn.LSTM(3, 4), "weight_hh_l0"),
    "attention": (nn.MultiheadAttention(4, 2), "in_proj_weight"),
    "transformers": (Conv1D(5, 7), "weight"),
}


def outputs_of(layer, weight):
    """The weights of each output, by the layers' own definitions."""
    if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d):
        step = layer.in_channels // layer.groups
        return [
            weight[g * step : (g + 1) * step, o]
            for g in range(layer.groups)
            for o in range(weight.shape[1])
        ]
    return list(weight.T if isinstance(layer, Conv1D) else weight)


@pytest.mark.parametrize("name", LAYERS)
def test_each_output_is_scaled_by_its_own_inputs(name):
    layer, path = LAYERS[name]
    state = state_of(layer)
    before = {key: leaf.clone() for key, leaf in state.params.items()}
    scaled = scaled_init(layer, state)
    rows = [
        outputs_of(layer, x[path]) for x in (state.params, scaled.params, state.masks)
    ]
    for old, new, kept in zip(*rows, strict=True):
        factor = math.sqrt(kept.numel() / max(int(kept.sum()), 1))
        assert torch.equal(new, torch.where(kept, (old.double() * factor).float(), old))
    assert all(torch.equal(state.params[key], leaf) for key, leaf in before.items())
    assert all(
        torch.equal(scaled.params[key], leaf)
        for key, leaf in before.items()
        if state.masks[key].ndim == 0
    )
    assert sf.checkpoint.tree_equal(scaled._replace(params=state.params), state)


def test_outputs_without_inputs_dense_leaves_and_embeddings_stay():
    net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    masks = {path: torch.tensor(True) for path in sf.modules.params_of(net)}
    masks |= {
        "0.weight": torch.rand(6, 4) < 0.5,
        "1.weight": torch.tensor([[False] * 4, [True] * 4, [True] + [False] * 3]),
    }
    state = sf.from_masks(masks).init(sf.modules.params_of(net))
    scaled = scaled_init(net, state)
    assert all(
        torch.equal(scaled.params[path], leaf)
        for path, leaf in state.params.items()
        if path != "1.weight"
    )
    assert torch.equal(
        scaled.params["1.weight"],
        state.params["1.weight"] * torch.tensor([[1.0], [1.0], [2.0]]),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_and_weights_off_the_mask_stay(dtype):
    net = nn.Linear(8, 8).to(dtype)
    state = state_of(net, pruned="keep")
    scaled, mask = scaled_init(net, state), state.masks["weight"]
    assert scaled.params["weight"].dtype == dtype
    assert torch.equal(scaled.params["weight"][~mask], state.params["weight"][~mask])
    assert (scaled.params["weight"][~mask] != 0).any()


def test_signals_keep_their_size():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            *[
                layer
                for _ in range(6)
                for layer in (nn.Linear(300, 300, bias=False), nn.ReLU())
            ]
        )
        for layer in net[::2]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        x = torch.randn(64, 300)
    state = state_of(net, 0.9)
    dense, faded, kept = (
        float(sf.modules.call(net, of, x).std())
        for of in (state_of(net, 0.0), state, scaled_init(net, state))
    )
    assert faded < 0.01 * dense and 0.5 * dense < kept < 2 * dense


@pytest.mark.deep
def test_under_vmap_and_compile():
    net = nn.Sequential(nn.Linear(6, 5), nn.ConvTranspose1d(4, 4, 2, groups=2))
    states = [state_of(net, key=sf.random.key(i)) for i in range(3)]
    stacked = torch.func.vmap(lambda state: scaled_init(net, state).params)(
        sf.ensemble.stack(states)
    )
    compiled = torch.compile(
        lambda state: scaled_init(net, state).params, backend="eager", fullgraph=False
    )
    for i, state in enumerate(states):
        alone = scaled_init(net, state).params
        assert all(torch.equal(stacked[path][i], leaf) for path, leaf in alone.items())
        assert all(
            torch.equal(compiled(state)[path], leaf) for path, leaf in alone.items()
        )


def test_what_is_refused():
    net = nn.Linear(4, 3)
    state = state_of(net)
    with pytest.raises(
        TypeError,
        match="scaled_init: expected a State, as algorithm.init.params. gives it, got "
        "dict",
    ):
        scaled_init(net, state.params)
    with pytest.raises(
        ValueError,
        match="scaled_init: expected masks of parameters of the Linear, got 'w'",
    ):
        scaled_init(net, sf.static(0.5).init({"w": torch.ones(3, 4)}))
    with pytest.raises(
        ValueError,
        match=r"expected a mask of shape \(3, 4\) at 'weight', got \(2, 3, 4\)",
    ):
        scaled_init(net, sf.ensemble.stack([state, state]))
    with pytest.raises(ValueError, match="this state trains latents"):
        learned = sf.reparametrised(sf.reparam.soft_threshold())
        scaled_init(net, learned.init(sf.modules.params_of(net)))
