"""Layers that a model runs several times: the statistics of all calls, pruned once, and
told.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import sparsefn as sf


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Looped(nn.Module):
    """All layers in turn, and again; or each layer so often, before the next."""

    def __init__(self, times, each=False):
        super().__init__()
        self.layers, self.times, self.each = (
            nn.ModuleList(Layer() for _ in range(2)),
            times,
            each,
        )

    def forward(self, x):
        order = (
            [0] * self.times + [1] * self.times if self.each else [0, 1] * self.times
        )
        for number in order:
            x = self.layers[number](x)
        return x


class Shared(nn.Module):
    """A list that has one layer under several names."""

    def __init__(self, times):
        super().__init__()
        self.layers = nn.ModuleList([Layer()] * times)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    "looped": (lambda: Looped(3), ["layers.0.*", "layers.1.*"]),
    "each": (lambda: Looped(3, each=True), ["layers.0.*", "layers.1.*"]),
    "one of two": (lambda: Looped(3), ["layers.1.*"]),
    "shared": (lambda: Shared(3), ["layers.0.*"]),
}


def called_with(model, path, x):
    """The inputs of all calls of a layer, as rows."""
    found = []
    handle = model.get_submodule(path).register_forward_pre_hook(
        lambda _, args: found.append(args[0].flatten(0, -2))
    )
    with torch.no_grad():
        model(x)
    handle.remove()
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_of_all_calls_and_weights_are_pruned_once(name):
    torch.manual_seed(0)
    make, blocks = MODELS[name]
    model, x, seen = make(), torch.randn(4, 5, 6), []

    def prune(stats):
        seen.append(stats)
        return sf.methods.wanda(0.5, stats)

    steps = sf.calibration.by_block(model, None, blocks, prune, x)
    text = (
        r"as 'layers\.\d' is called 3 times: the statistics of its weights are the "
        r"sums over all calls$"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        *_, last = steps = list(steps)
    assert (
        len(caught) == 1
        and len(seen) == len(blocks)
        and all("3 times" in done.why for done in steps)
    )
    for stats, block, before in zip(seen, blocks, [None, *steps], strict=False):
        run = model if before is None else sf.modules.bake(model, before.state)
        for path, of in stats.items():
            assert path.startswith(block[:-1])
            rows = called_with(run, path.rpartition(".")[0], x)
            assert int(of["count"]) == len(rows) == 3 * 20
            torch.testing.assert_close(of["gram"], rows.T @ rows)
    sparse = {path for path, mask in last.state.masks.items() if mask.ndim}
    assert sparse == {path for stats in seen for path in stats}
    assert all((last.state.masks[path].float().mean(1) == 0.5).all() for path in sparse)


def test_layers_that_run_once_are_not_told():
    sf.calibration.in_order(
        Looped(1),
        None,
        ["layers.0.*"],
        lambda stats: sf.methods.wanda(0.5, stats),
        torch.ones(3, 6),
    )


def test_albert():
    torch.manual_seed(0)
    sizes = {
        "embedding_size": 8,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    config = transformers.AlbertConfig(
        vocab_size=32, num_hidden_layers=4, num_hidden_groups=1, **sizes
    )
    model = transformers.AlbertModel(config).eval()
    words = torch.randint(2, 32, (4, 6))
    counts = []

    def prune(stats):
        counts.extend(int(of["count"]) for of in stats.values())
        return sf.methods.wanda(0.5, stats)

    with pytest.warns(
        UserWarning, match=r"albert_layer_groups\.0.* is called 4 times: the statistics"
    ):
        state = sf.calibration.in_order(
            model, None, ["encoder.albert_layer_groups.*"], prune, {"input_ids": words}
        )
    assert set(counts) == {4 * 24} and len(counts) == 6
    assert sf.masks.n_kept(state.masks) < sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: Looped(2),
            r"layers that run one after the other, but 'layers\.0' is called 2 times:",
        ),
        (
            lambda: Shared(2),
            r"the leaves of a layer to be its own, but 'layers\.0\.up\.weight', "
            r"'layers\.1\.up\.w.*",
        ),
    ],
)
def test_stream_sends_them_to_in_order(make, why, tmp_path):
    model, (folder, out) = make(), (tmp_path / "in", tmp_path / "out")
    folder.mkdir()
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    batches = [torch.randn(2, 3, 6) for _ in range(2)]
    with pytest.raises(
        ValueError,
        match=f"stream: expected {why} prune the model in memory, with .*in_order",
    ):
        sf.calibration.stream(
            folder, lambda stats: sf.methods.wanda(0.5, stats), batches, out, make=make
        )
