"""shrink: smaller layers, the masked model's outputs; recorded, beside torch.ao, and on drawn networks."""

import copy
import functools
import itertools
import pickle
import warnings

import optree
import pytest
import torch
from golden_data import cases
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.pruning._experimental.pruner import SaliencyPruner
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import sparsefn as sf

# Channels that must be kept are tested below.
pytestmark = pytest.mark.filterwarnings("ignore:shrink could not remove all:UserWarning")
drawn = functools.partial(settings, max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def pruned(net, gone, biases=False):
    """The state of a module that prunes whole rows: `{path of a weight: its rows}`; all else is dense."""
    params = sf.modules.params_of(net)
    masks = optree.tree_map(lambda p: torch.tensor(True), params)
    for path, rows in gone.items():
        masks[path] = torch.ones_like(params[path], dtype=torch.bool)
        masks[path][(slice(None), 1) if rows == "column" else list(rows)] = False
    return sf.from_masks(sf.prune_biases(net, masks) if biases else masks).init(params)


def checked(net, state, *xs, atol=1e-6):
    """The small module, after comparing outputs and names with the masked one."""
    small = sf.shrink(net, state)
    assert type(small) is type(net) and list(small.state_dict()) == list(net.state_dict())
    with torch.no_grad():
        wanted, got = sf.modules.call(net, state, *xs), small(*xs)
    for a, b in zip(optree.tree_leaves(wanted), optree.tree_leaves(got), strict=True):
        torch.testing.assert_close(b, a, atol=atol, rtol=atol)
    return small


def shape(module, path):
    return tuple(module.get_parameter(path).shape)


def n_params(module):
    return sum(p.numel() for p in module.parameters())


# Results recorded from torch.ao.


def network(case, p):
    kind = case.id.split("_")[1]
    if kind == "linear":
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 3))
    pools = [nn.MaxPool2d(2)] * (kind == "convpool")
    second = nn.Conv2d(6, 4, p[f"{2 + len(pools)}.weight"].shape[-1], padding=int(kind == "convpad"))
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), *pools, second)


def rows_like(mask, p):
    return mask.bool().reshape(-1, *[1] * (p.ndim - 1)).expand(p.shape)


@pytest.mark.parametrize("case", cases("torch_ao", "structured shrink"), ids=lambda case: case.id)
def test_recorded(case):
    params = {name[2:]: p for name, p in case.inputs.items() if name.startswith("p_")}
    masks = optree.tree_map(lambda p: torch.tensor(True), params)
    for path in case.args["targets"]:
        masks[path] = rows_like(case.outputs[f"m_{path}"], params[path])
    if case.args["prune_bias"]:
        masks = sf.prune_biases(network(case, params), masks)
    net, x = network(case, params), case.inputs["x"]
    state = sf.from_masks(masks).init(params)
    small = checked(net, state, x)
    torch.testing.assert_close(sf.modules.call(net, state, x), case.outputs["y_masked"], atol=1e-6, rtol=0)
    torch.testing.assert_close(small(x).detach(), case.outputs["y_small"], atol=1e-6, rtol=0)
    weights = small.state_dict()
    assert set(weights) == {name[2:] for name in case.outputs if name.startswith("q_")}
    if "convpad" in case.id and case.args["prune_bias"]:
        # The original never shrinks before a padded convolution; removed channels that hold 0 can go, as zeros pad too.
        assert shape(small, "0.weight") == (3, 3, 3, 3) and case.outputs["q_0.weight"].shape == (6, 3, 3, 3)
        assert shape(small, "2.weight") == (4, 3, 3, 3) and case.outputs["q_2.weight"].shape == (4, 6, 3, 3)
        return
    for name, w in weights.items():
        torch.testing.assert_close(w, case.outputs[f"q_{name}"], atol=1e-6, rtol=0)


def test_padding_with_a_constant_keeps_shapes_as_the_original_does():
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, padding=1))
    small = checked(net, pruned(net, {"0.weight": [0, 2, 5]}), torch.randn(2, 3, 8, 8))
    assert n_params(small) == n_params(net)
    assert not small[0].weight[[0, 2, 5]].any() and small[0].bias[0] == net[0].bias[0]


# Beside torch.ao itself.


def dense_layers(widths, act):
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def conv_layers(widths, act):
    layers = [nn.Conv2d(widths[0], widths[1], 3), act(), nn.MaxPool2d(2), nn.Conv2d(widths[1], widths[2], 3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * widths[2], 3))


@given(
    make=st.sampled_from([dense_layers, conv_layers]),
    widths=st.lists(st.integers(2, 7), min_size=4, max_size=4),
    act=st.sampled_from([nn.ReLU, nn.Tanh, nn.Sigmoid]),
    level=st.floats(0.0, 0.8),
    biases=st.booleans(),
    seed=seeds,
)
@drawn(max_examples=15, phases=[Phase.generate])
def test_live_saliency_pruner(make, widths, act, level, biases, seed):
    assume(not (biases and act is nn.Sigmoid))  # theirs takes sigmoid(0) for 0
    torch.manual_seed(seed)
    net = make(widths, act)  # float32: theirs folds constants of an image in no other
    x = torch.randn(3, widths[0], *([] if make is dense_layers else [12, 12]))
    paths = [name for name, p in net.named_parameters() if p.ndim > 1][:2]
    # Theirs, end to end: prepare, step, prune.
    theirs = copy.deepcopy(net)
    pruner = SaliencyPruner({"sparsity_level": level, "prune_bias": biases})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner.prepare(theirs, [{"tensor_fqn": path} for path in paths])
        pruner.enable_mask_update = True
        pruner.step()
        theirs = pruner.prune()
    # Ours, end to end: rows by their L1 norm with the truncated count, the biases of the rows, shrink.
    params = sf.modules.params_of(net)
    rows = sf.patterns.channel(0)
    algorithm = sf.iterative(level, count=lambda share, n: int(share * int(n)), where=paths, pattern=rows)
    state = algorithm.update(algorithm.init(params), params, 0)
    if biases:
        state = sf.from_masks(sf.prune_biases(net, state.masks)).init(params)
    small = checked(net, state, x)
    torch.testing.assert_close(theirs(x), small(x), atol=1e-6, rtol=1e-6)
    assert {name: p.shape for name, p in theirs.named_parameters()} == {
        name: p.shape for name, p in small.named_parameters()
    }


@given(units=st.integers(1, 6), data=st.data(), seed=seeds)
@drawn(max_examples=10, phases=[Phase.generate])
def test_live_lstm(units, data, seed):
    torch.manual_seed(seed)
    net = Last(nn.LSTM, READS["all"], units=units).double()
    # Biases of the gates: theirs drops them with their rows, which only changes nothing if they are zero.
    for name in ("bias_ih_l0", "bias_hh_l0"):
        net.rnn.get_parameter(name).data.zero_()
    gone = data.draw(st.sets(st.integers(0, units - 1), max_size=units - 1))
    keep = torch.tensor([unit not in gone for unit in range(units)]).repeat(4)
    theirs = copy.deepcopy(net)
    pruner = SaliencyPruner({"sparsity_level": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = [{"tensor_fqn": f"rnn.weight_{part}_l0", "mask": keep.clone()} for part in ("ih", "hh")]
        pruner.prepare(theirs, config)
        theirs = pruner.prune()
    rows = (~keep).nonzero()[:, 0].tolist()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    small = checked(net, pruned(net, {"rnn.weight_ih_l0": rows, "rnn.weight_hh_l0": rows}), x, atol=1e-12)
    torch.testing.assert_close(theirs(x), small(x), atol=1e-12, rtol=0)
    assert small.rnn.hidden_size == theirs.rnn.hidden_size == units - len(gone)


# Drawn networks.


class Residual(nn.Module):
    def __init__(self, width, act):
        super().__init__()
        self.first, self.act = nn.Linear(5, width), act
        self.inner, self.outer = nn.Linear(width, width + 1), nn.Linear(width + 1, width)
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        x = self.act(self.first(x))
        return self.last(x + self.outer(self.act(self.inner(x))))


class Branching(nn.Module):
    """One tensor with two readers; their outputs are joined by `how`."""

    def __init__(self, width, act, how):
        super().__init__()
        self.stem, self.act, self.how = nn.Linear(5, width), act, how
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.last = nn.Linear(2 * width if how == "cat" else width, 2)

    def forward(self, x):
        x = self.act(self.stem(x))
        a, b = self.act(self.left(x)), self.right(x)
        return self.last(torch.cat([a, b], dim=1) if self.how == "cat" else a * b if self.how == "mul" else a - b)


class Images(nn.Module):
    def __init__(self, width, act, padding):
        super().__init__()
        self.a, self.norm, self.act = nn.Conv2d(2, width, 3, padding=padding), nn.BatchNorm2d(width), act
        self.b, self.c = nn.Conv2d(width, width, 3, padding=padding), nn.Conv2d(width, width + 1, 1, bias=False)
        self.pool, self.head = nn.AvgPool2d(2, padding=padding), nn.Linear(9 * (width + 1), 2)

    def forward(self, x):
        x = self.act(self.norm(self.a(x)))
        x = F.adaptive_max_pool2d(self.pool(self.c(self.act(self.b(x)))), 3)
        return self.head(x.view(x.size(0), -1))


NETS = {
    "mlp": lambda width, act: nn.Sequential(
        nn.Linear(5, width), act, nn.Linear(width, width), act, nn.Linear(width, 2)
    ),
    "residual": Residual,
    "cat": lambda width, act: Branching(width, act, "cat"),
    "mul": lambda width, act: Branching(width, act, "mul"),
    "sub": lambda width, act: Branching(width, act, "sub"),
    "valid": lambda width, act: Images(width, act, 0),
    "padded": lambda width, act: Images(width, act, 1),
}


def randomised(net):
    """Norms with statistics and weights of their own, as after training; in eval mode."""
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            layer.weight.data.normal_()
            layer.bias.data.normal_()
    return net.eval()


@pytest.mark.parametrize("name", NETS)
@given(width=st.integers(1, 6), data=st.data(), biases=st.booleans(), seed=seeds, double=st.booleans())
@drawn(max_examples=15)
def test_drawn_rows(name, width, data, biases, seed, double):
    torch.manual_seed(seed)
    act = data.draw(st.sampled_from([nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.ELU(), nn.GELU(), nn.SiLU()]))
    dtype = torch.float64 if double else torch.float32
    net = randomised(NETS[name](width, act)).to(dtype)
    weights = {path: len(p) for path, p in net.named_parameters() if path.endswith("weight")}
    gone = {path: data.draw(st.sets(st.integers(0, n - 1))) for path, n in weights.items()}
    x = torch.randn(3, 2, 10, 10, dtype=dtype) if name in ("valid", "padded") else torch.randn(3, 5, dtype=dtype)
    small = checked(net, pruned(net, gone, biases), x, atol=1e-12 if double else 1e-5)
    assert n_params(small) <= n_params(net)
    if name == "mlp":
        for path, n in (("0.weight", width), ("2.weight", width)):
            assert len(small.get_parameter(path)) <= max(1, n - len(gone[path]))
        assert n_params(small) < n_params(net) or width == 1 or not (gone["0.weight"] or gone["2.weight"])


@pytest.mark.parametrize("name", NETS)
@given(width=st.integers(1, 6), sparsity=st.floats(0.5, 1.0), seed=seeds)
@drawn(max_examples=10)
def test_drawn_masks_without_structure(name, width, sparsity, seed):
    torch.manual_seed(seed)
    net = randomised(NETS[name](width, nn.Tanh())).double()
    x = torch.randn(3, *([2, 10, 10] if name in ("valid", "padded") else [5]), dtype=torch.float64)
    state = sf.static(sparsity, where="*", init="random", key=sf.random.key(seed)).init(sf.modules.params_of(net))
    checked(net, state, x, atol=1e-12)


# Each kind of layer and each way that channels meet.


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride > 1:
            self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        identity = x if self.down is None else self.down(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(BasicBlock(6, 6), BasicBlock(6, 6))
        self.layer2 = nn.Sequential(BasicBlock(6, 8, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.layer2(self.layer1(self.stem(x))))
        return self.fc(torch.flatten(x, 1))


def test_resnet():
    net, x = randomised(ResNet()), torch.randn(2, 3, 8, 8)
    net.layer1[0].bn1.bias.data.abs_()
    gone = {
        # Inside a block a channel goes with its convolution and its norm.
        "layer1.0.conv1.weight": [0, 1],
        "layer1.0.bn1.weight": [0, 1],
        # On the skip path only channel 3 is gone from all that are added to it.
        **{path: [3] for path in ("stem.1.weight", "layer1.0.bn2.weight", "layer1.1.bn2.weight")},
        "layer1.1.conv2.weight": [4],
        # After the last block a flattened linear layer takes the constant.
        **{path: [2, 5] for path in ("layer2.0.bn2.weight", "layer2.0.down.1.weight")},
    }
    small = checked(net, pruned(net, gone, biases=True), x, atol=1e-5)
    assert shape(small, "layer1.0.conv1.weight") == (4, 5, 3, 3)
    assert shape(small, "layer1.0.conv2.weight") == (5, 4, 3, 3)
    assert small.layer1[0].bn1.num_features == 4 and small.layer1[0].bn1.running_var.shape == (4,)
    assert shape(small, "layer1.1.conv1.weight") == (6, 5, 3, 3)
    assert shape(small, "stem.0.weight") == (5, 3, 3, 3)
    assert shape(small, "layer2.0.down.0.weight") == (6, 5, 1, 1)
    assert shape(small, "fc.weight") == (5, 6)
    # A norm's shift that is kept is a constant which no padded convolution can take: there all channels stay.
    kept = checked(net, pruned(net, gone), x, atol=1e-5)
    assert shape(kept, "layer1.0.conv1.weight")[0] == 6 and shape(kept, "fc.weight") == (5, 6)


class Mobile(nn.Module):
    def __init__(self, padding_mode="zeros"):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6, padding_mode=padding_mode)
        self.last = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        return self.last(F.relu6(self.deep(F.relu6(self.first(x))))).mean((2, 3))


def test_depthwise_convolutions_pass_their_channels_on():
    net, x = Mobile(), torch.randn(2, 2, 5, 5)
    small = checked(net, pruned(net, {"first.weight": [0, 1], "deep.weight": [2]}, biases=True), x)
    assert (small.deep.groups, small.deep.in_channels, small.deep.out_channels) == (3, 3, 3)
    assert shape(small, "first.weight") == (3, 2, 1, 1) and shape(small, "last.weight") == (3, 3, 1, 1)
    net.first.bias.data[:] = 1.0  # a border of zeros around ones is not constant
    small = checked(net, pruned(net, {"first.weight": [0, 1], "deep.weight": [2]}), x)
    assert small.deep.groups == 5
    net = Mobile("replicate")
    net.first.bias.data[:] = 1.0
    assert checked(net, pruned(net, {"first.weight": [0, 1]}), x).deep.groups == 4


def test_other_groups_stay_as_they_are():
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 6, 1, groups=2), nn.Conv2d(6, 2, 1))
    small = checked(net, pruned(net, {"0.weight": [0], "1.weight": [0, 1]}), torch.randn(2, 2, 3, 3))
    assert n_params(small) == n_params(net)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("padding", ["valid", "same", 0, 1])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_convolutions_of_all_dimensions(n, padding, mode):
    conv, norm = getattr(nn, f"Conv{n}d"), getattr(nn, f"BatchNorm{n}d")
    net = nn.Sequential(conv(2, 5, 2), norm(5), nn.Sigmoid(), conv(5, 3, 3, padding=padding, padding_mode=mode))
    small = checked(randomised(net), pruned(net, {"0.weight": [1, 4]}), torch.randn(2, 2, *[6] * n))
    bordered = padding in ("same", 1) and mode == "zeros"
    assert shape(small, "3.weight")[1] == (5 if bordered else 3)


class Last(nn.Module):
    """A recurrent layer between two linear ones, read by `read`."""

    def __init__(self, kind, read, units=6, **kwargs):
        super().__init__()
        self.embed, self.rnn = nn.Linear(3, 4), kind(4, units, **kwargs)
        self.head, self.read = nn.Linear(units, 2), read

    def forward(self, x):
        out, state = self.rnn(torch.tanh(self.embed(x)))
        return self.head(self.read(out, state))


READS = {
    "all": lambda out, state: out,
    "last": lambda out, state: out[:, -1],
    "state": lambda out, state: (state[0] if isinstance(state, tuple) else state)[-1],
    "mean": lambda out, state: out.mean(1),
}


def candidates_gone(net, units, biases=True):
    """Prunes the rows of the candidate gate of some units, in both weights."""
    block = {nn.LSTM: 2, nn.GRU: 2, nn.RNN: 0}[type(net.rnn)] * 6
    rows = [block + unit for unit in units]
    return pruned(net, {"rnn.weight_ih_l0": rows, "rnn.weight_hh_l0": rows, "embed.weight": [3]}, biases)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_hidden_units_that_stay_zero_go(kind, read):
    net, x = Last(kind, READS[read], batch_first=True), torch.randn(2, 5, 3)
    small = checked(net, candidates_gone(net, [1, 4]), x)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    assert (small.rnn.input_size, small.rnn.hidden_size) == (3, 4)
    assert shape(small, "rnn.weight_ih_l0") == (gates * 4, 3) and shape(small, "rnn.weight_hh_l0") == (gates * 4, 4)
    assert shape(small, "head.weight") == (2, 4)
    # With their biases kept the units move: they are masked, and as large as before.
    kept = checked(net, candidates_gone(net, [1, 4], biases=False), x)
    assert kept.rnn.hidden_size == 6 and kept.rnn.input_size == 3


def test_lstm_without_biases():
    net = Last(nn.LSTM, READS["all"], bias=False)
    small = checked(net, candidates_gone(net, [0]), torch.randn(5, 2, 3))
    # A channel whose constant no later bias can take is kept; a channel of zeros is removed.
    assert small.rnn.hidden_size == 5 and small.rnn.input_size == 3
    assert checked(net, candidates_gone(net, [0], biases=False), torch.randn(5, 2, 3)).rnn.input_size == 4


def test_gates_that_prune_different_units_leave_the_size():
    net = Last(nn.LSTM, READS["all"])
    state = pruned(net, {"rnn.weight_ih_l0": [0, 7, 14, 21], "rnn.weight_hh_l0": [1, 8, 15, 22]}, biases=True)
    assert checked(net, state, torch.randn(5, 2, 3)).rnn.hidden_size == 6


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kwargs", [{"num_layers": 2}, {"bidirectional": True}, {"proj_size": 3}], ids=str)
def test_recurrent_layers_of_other_kinds_stay_as_they_are(kwargs):
    net = Last(nn.LSTM, READS["all"], **kwargs)
    net.head = nn.Linear({"bidirectional": 12, "proj_size": 3}.get(next(iter(kwargs)), 6), 2)
    assert n_params(checked(net, candidates_gone(net, [0]), torch.randn(5, 2, 3))) == n_params(net)


def test_a_layer_norm_keeps_its_features():
    # torch.ao removes columns behind LSTM -> LayerNorm, whose statistics are then others: its output differs.
    net = Last(nn.LSTM, READS["all"])
    net.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2))
    small = checked(net, candidates_gone(net, [0, 1]), torch.randn(5, 2, 3))
    assert small.rnn.hidden_size == 6 and small.rnn.input_size == 3


class Of(nn.Module):
    """Named layers and a function of them."""

    def __init__(self, fn, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.fn = fn

    def forward(self, x):
        return self.fn(self, x)


def ends(a, b, **layers):
    return {"a": a, "b": b, **layers}


def image_net(fn, features=12, **layers):
    return Of(fn, a=nn.Conv2d(2, 3, 1), b=nn.Linear(features, 2), **layers)


FLAT = {
    "flatten": lambda m, x: m.b(torch.flatten(m.a(x), 1)),
    "method": lambda m, x: m.b(m.a(x).flatten(start_dim=1)),
    "from the end": lambda m, x: m.b(m.a(x).flatten(-3)),
    "module": lambda m, x: m.b(m.f(m.a(x))),
    "view": lambda m, x: m.b(m.a(x).view(x.size(0), -1)),
    "shape": lambda m, x: m.b(m.a(x).reshape((x.shape[0], -1))),
    "unpacked": lambda m, x: m.b(view_unpacked(m.a(x))),
    "twice": lambda m, x: m.b(m.f(m.a(x).flatten(2).relu())),
    "norm": lambda m, x: m.b(m.n(torch.relu(m.f(m.a(x))))),
    "length": lambda m, x: (lambda h: m.b(h.flatten(1)) * h.size(-1) * h.shape[2])(m.a(x)),
}


def view_unpacked(h):
    n, _channels, _height, _width = h.shape
    return h.view(n, -1)


@pytest.mark.parametrize("name", FLAT)
def test_images_flattened(name):
    net = randomised(image_net(FLAT[name], f=nn.Flatten(), n=nn.BatchNorm1d(12)))
    small = checked(net, pruned(net, {"a.weight": [1]}), torch.randn(5, 2, 2, 2))
    assert shape(small, "a.weight")[0] == 2 and shape(small, "b.weight") == (2, 8)


AS_THEY_ARE = {
    "sizes as numbers": (lambda m, x: m.b(m.a(x).view(-1, 12)), 12),
    "the number of channels": (lambda m, x: m.b(m.a(x).view(x.size(0), m.a(x).size(1) * 4)), 12),
    "last axis": (lambda m, x: m.b(m.a(x)), 2),
    "flattened from the front": (lambda m, x: m.b(m.a(x).flatten(0, 1).flatten(1)), 4),
    "one channel": (lambda m, x: m.b(m.a(x)[:, 1].flatten(1)), 4),
    "some channels": (lambda m, x: m.b(m.a(x)[:, 1:].flatten(1)), 8),
    "moved": (lambda m, x: m.b(m.a(x).permute(0, 2, 3, 1).flatten(1)), 12),
    "mean over channels": (lambda m, x: m.b(m.a(x).mean(1).flatten(1)), 4),
    "softmax": (lambda m, x: m.b(m.a(x).softmax(1).flatten(1)), 12),
    "scaled by an input": (lambda m, x: m.b((m.a(x) * x.sum()).flatten(1)), 12),
    "masked by a tensor": (lambda m, x: m.b((m.a(x) + torch.ones(3, 1, 1)).flatten(1)), 12),
    "joined along the images": (lambda m, x: m.b(torch.cat([m.a(x), m.a(x)], 2).flatten(1)), 24),
    "joined with an input": (lambda m, x: m.b(torch.cat([m.a(x), x], 1).flatten(1)), 20),
    "joined when flat": (lambda m, x: m.b(torch.cat([m.a(x).flatten(1), x.flatten(1)], 1)), 20),
    "chunks": (lambda m, x: m.b(m.a(x).chunk(3, 1)[0].flatten(1)), 4),
    "indices": (lambda m, x: m.b(F.max_pool2d(m.a(x), 2, return_indices=True)[0].flatten(1)), 3),
    "filled": (lambda m, x: m.b(m.a(x).fill_(1.0).flatten(1)), 12),
    "weight read elsewhere": (lambda m, x: m.b(m.a(x).flatten(1)) + m.a.weight.sum(), 12),
    "run twice": (lambda m, x: m.b((m.a(x) + m.a(x.flip(0))).flatten(1)), 12),
    "an argument unknown here": (lambda m, x: m.b(torch.flatten(input=m.a(x), start_dim=1)), 12),
    "a dtype": (lambda m, x: m.b(m.a(x).mean((2, 3), dtype=torch.float32)), 3),
    "a slope for each channel": (lambda m, x: m.b(m.f(m.a(x)).flatten(1)), 12),
    "an attribute": (lambda m, x: m.b(m.a(x).flatten(1).T.T), 12),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_what_is_not_understood_keeps_its_channels(name):
    fn, features = AS_THEY_ARE[name]
    net = image_net(fn, features, f=nn.PReLU(3))
    small = checked(net, pruned(net, {"a.weight": [1]}), torch.randn(5, 2, 2, 2))
    assert shape(small, "a.weight") == (3, 2, 1, 1) and shape(small, "b.weight") == (2, features)


POOLS = {
    "max": (nn.MaxPool2d(2, padding=1), True),
    "average": (nn.AvgPool2d(2), True),
    "average with borders": (nn.AvgPool2d(2, padding=1), False),
    "average without borders": (nn.AvgPool2d(2, padding=1, count_include_pad=False), True),
    "average by a number": (nn.AvgPool2d(2, divisor_override=3), False),
    "average rounded up": (nn.AvgPool2d(3, ceil_mode=True), True),
    "adaptive": (nn.AdaptiveAvgPool2d((2, 3)), True),
    "adaptive max": (nn.AdaptiveMaxPool2d(2), True),
    "functional": (lambda h: F.max_pool2d(h, 2, padding=1), True),
    "functional average": (lambda h: F.avg_pool2d(h, 2, 2, 1), False),
    "functional average without borders": (lambda h: F.avg_pool2d(h, 2, 2, 1, count_include_pad=False), True),
    "functional adaptive": (lambda h: F.adaptive_avg_pool2d(h, 2), True),
    "mean": (lambda h: h.mean([-1, -2], keepdim=True), True),
    "other axes": (nn.MaxPool1d(1), False),
}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", POOLS)
def test_pools(name, biases):
    pool, even = POOLS[name]
    fn = lambda m, x: m.b(pool(m.a(x)))  # noqa: E731
    if isinstance(pool, nn.Module):
        fn = lambda m, x: m.b(m.pool(m.a(x)))  # noqa: E731
    x = torch.randn(2, 2, 6, 6)
    if name == "other axes":
        net = Of(lambda m, x: m.b(m.pool(m.a(x))), a=nn.Linear(6, 3), pool=pool, b=nn.Linear(3, 2))
        assert n_params(checked(net, pruned(net, {"a.weight": [0]}, biases), x[0])) == n_params(net)
        return
    layers = {"pool": pool} if isinstance(pool, nn.Module) else {}
    net = Of(fn, a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(3, 2, 1), **layers)
    small = checked(net, pruned(net, {"a.weight": [0]}, biases), x)
    assert shape(small, "b.weight")[1] == (2 if even or biases else 3)


ACTIVATIONS = {
    "functions": lambda h: F.hardtanh(F.gelu(F.leaky_relu(h, 0.1), approximate="tanh"), -2, 2),
    "methods": lambda h: h.abs().sigmoid().neg().clamp(min=-0.7),
    "scalars": lambda h: 2 * (1 - h) * 0.5 + 3,
    "in place": lambda h: F.relu(h, inplace=True).mul_(2).add_(1),
    "dropout": lambda h: F.dropout(h, 0.5, training=False),
    "no dropout": lambda h: F.dropout(h, 0.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    net = Of(lambda m, x: m.b(ACTIVATIONS[name](m.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert shape(checked(net, pruned(net, {"a.weight": [1, 2]}), torch.randn(5, 3)), "b.weight") == (2, 2)


OTHERS = """
    ReLU6 RReLU PReLU SELU CELU Mish Hardsigmoid Hardswish Softplus Softsign LogSigmoid Hardshrink Softshrink
    Tanhshrink
"""


@pytest.mark.parametrize("name", [*OTHERS.split(), "Identity", "Dropout"])
def test_activation_modules(name):
    net = nn.Sequential(nn.Linear(3, 4), getattr(nn, name)(), nn.Linear(4, 2)).eval()
    assert shape(checked(net, pruned(net, {"0.weight": [1, 2]}), torch.randn(5, 3)), "2.weight") == (2, 2)


class Skips(nn.Module):
    """An operation in place on a tensor that others read too."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.relu, self.steps = nn.ReLU(inplace=True), forward

    def forward(self, x):
        return self.steps(self, self.a(x))


def later(m, h):
    y = m.relu(h)
    return m.b(y) + m.c(h)


def augmented(m, h):
    y = h
    y += 1.0
    return m.b(y) + m.c(h)


def assigned(m, h):
    y = h.flatten(1)
    y[:, 0] = 5.0
    return m.b(y) + m.c(h)


def aliased(m, h):
    flat = h.flatten(1)
    h.mul_(3.0)
    return m.b(flat) + m.c(h)


def through_a_view(m, h):
    h.view(-1).clamp_(-0.1, 0.1)
    return m.b(h)


def into_another(m, h):
    torch.add(h, 1.0, out=h)
    return m.b(h)


@pytest.mark.parametrize("steps", [later, augmented, assigned, aliased, through_a_view, into_another])
def test_operations_in_place_on_what_others_read(steps):
    net = Skips(steps)
    net.a.bias.data[:] = torch.tensor([-1.0, -2.0, 3.0, 4.0])
    with torch.no_grad():
        assert shape(checked(net, pruned(net, {"a.weight": [0, 2]}), torch.randn(5, 3)), "a.weight") == (4, 3)


def test_weights_that_two_layers_share_stay():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    net[2].weight = net[0].weight
    small = sf.shrink(net, pruned(net, {"0.weight": [1]}))
    assert small[2].weight is small[0].weight and shape(small, "0.weight") == (4, 4)
    state, x = pruned(net, {"0.weight": [1]}), torch.randn(3, 4)
    torch.testing.assert_close(small(x), sf.modules.call(net, state, x))


def test_layers_with_hooks_and_parametrizations_stay():
    state = None
    for change in (
        lambda layer: layer.register_forward_hook(lambda module, args, out: out + 1),
        lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        parametrizations.weight_norm,
        lambda layer: setattr(layer, "forward", torch.exp),
    ):
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        state = pruned(net, {"0.weight": [0], "1.weight": [1]})
        if change is parametrizations.weight_norm:
            change(net[1])
            state = sf.dense().init(sf.modules.params_of(net))
        else:
            change(net[1])
        small = sf.shrink(net, state)
        x = torch.randn(2, 3)
        torch.testing.assert_close(small(x), sf.modules.call(net, state, x))
        assert n_params(small) == n_params(net)


def test_pruned_modules_of_torch():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    made = copy.deepcopy(net)
    prune.ln_structured(made[0], "weight", amount=2, n=2, dim=0)
    small = checked(net, sf.State(*sf.modules.from_pruned(made)), torch.randn(5, 3))
    assert shape(small, "0.weight") == (2, 3)


# Which channels count as dead.


def test_constants_run_on_through_rows_that_read_nothing_else():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    params = sf.modules.params_of(net)
    masks = optree.tree_map(lambda p: torch.ones_like(p, dtype=torch.bool), params)
    masks["0.weight"][:2] = False
    masks["2.weight"][0, 2:] = False  # row 0 keeps weights on constants alone
    small = checked(net, sf.from_masks(masks).init(params), torch.randn(5, 3))
    assert [shape(small, f"{i}.weight") for i in (0, 2, 4)] == [(2, 3), (3, 2), (2, 3)]


def test_channels_that_nobody_keeps_a_weight_on_go():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    params = sf.modules.params_of(net)
    masks = optree.tree_map(lambda p: torch.ones_like(p, dtype=torch.bool), params)
    masks["2.weight"][:, 1] = False
    assert shape(checked(net, sf.from_masks(masks).init(params), torch.randn(5, 3)), "0.weight") == (3, 3)


def test_weights_that_are_kept_and_zero_are_weights():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    nn.init.zeros_(net[0].weight)
    params = sf.modules.params_of(net)
    assert shape(sf.shrink(net, sf.dense().init(params)), "0.weight") == (4, 3)
    assert shape(sf.shrink(net, sf.State(params, sf.masks.from_zeros(params))), "0.weight") == (1, 3)


def test_one_channel_stays_where_all_are_dead():
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Linear(12, 2))
    small = checked(net, pruned(net, {"0.weight": [0, 1, 2], "2.weight": [0, 1, 2]}), torch.randn(3, 2, 2, 2))
    assert [shape(small, f"{i}.weight") for i in (0, 2, 4)] == [(1, 2, 1, 1), (1, 1, 1, 1), (2, 4)]


def test_a_layer_without_bias_keeps_a_constant_that_is_not_zero():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    net[0].bias.data[:] = torch.tensor([1.0, -1.0, 2.0, -2.0])
    small = checked(net, pruned(net, {"0.weight": [0, 1]}), torch.randn(5, 3))
    assert shape(small, "2.weight") == (2, 3) and small[2].bias is None


def test_the_outputs_of_the_module_keep_their_shape():
    # torch.ao removes rows of the last layer too.
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
    small = checked(net, pruned(net, {"2.weight": [0, 1]}), torch.randn(5, 3))
    assert n_params(small) == n_params(net)
    layer = nn.Linear(3, 4)
    assert torch.equal(sf.shrink(layer, pruned(layer, {"weight": [0]})).weight[0], torch.zeros(3))


def test_sequences_and_features_are_told_apart_by_the_readers():
    # The rank of a linear layer's output is not known; a width that does not fit says that dim 1 was time.
    joined = lambda m, x: m.b(torch.cat([m.a(x), m.c(x)], 1))  # noqa: E731
    net = Of(joined, a=nn.Linear(3, 4), c=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert shape(checked(net, pruned(net, {"a.weight": [0]}), torch.randn(2, 5, 3)), "a.weight") == (4, 3)
    net = Of(joined, a=nn.Linear(3, 4), c=nn.Linear(3, 4), b=nn.Linear(8, 2))
    assert shape(checked(net, pruned(net, {"a.weight": [0]}), torch.randn(2, 3)), "b.weight") == (2, 7)
    net = Of(lambda m, x: m.b(m.a(x).flatten(1)), a=nn.Linear(3, 4), b=nn.Linear(20, 2))
    assert shape(checked(net, pruned(net, {"a.weight": [0]}), torch.randn(2, 5, 3)), "a.weight") == (4, 3)


def test_a_view_by_the_size_of_another_batch_keeps_channels():
    def frames(m, x):  # (N, T, C, H, W): the frames of a film are images of their own, its features are of all frames
        return m.b(m.a(x.flatten(0, 1)).view(x.size(0), -1))

    net = Of(frames, a=nn.Conv2d(2, 3, 1), b=nn.Linear(5 * 12, 2))
    assert shape(checked(net, pruned(net, {"a.weight": [0]}), torch.randn(2, 5, 2, 2, 2)), "a.weight")[0] == 3


def test_optional_arguments_are_followed_at_their_defaults():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x, scale=None, twice=False):
            x = self.a(x)
            if scale is not None:
                x = x * scale
            return self.b(x + x if twice else x)

    net = Optional()
    assert shape(checked(net, pruned(net, {"a.weight": [0]}), torch.randn(2, 3)), "a.weight") == (3, 3)


# Properties of the small module.


def test_nothing_given_is_changed_and_the_copy_is_a_plain_module():
    net, x = randomised(ResNet()), torch.randn(2, 3, 8, 8)
    net.fc.weight.requires_grad_(False)
    gone = {"layer1.0.conv1.weight": [0, 1], "layer1.0.bn1.weight": [0, 1]}
    state = pruned(net, gone, biases=True)
    before, masked = copy.deepcopy(net.state_dict()), optree.tree_map(torch.clone, state)
    rng = torch.get_rng_state()
    small = sf.shrink(net, state)
    assert torch.equal(rng, torch.get_rng_state())
    assert sf.checkpoint.tree_equal(masked, state)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not small.training and not small.fc.weight.requires_grad and small.fc.bias.requires_grad
    assert not {id(p) for p in small.parameters()} & {id(p) for p in net.parameters()}
    assert torch.equal(pickle.loads(pickle.dumps(small))(x), small(x))
    small.train()(x).sum().backward()
    assert shape(small, "layer1.0.conv1.weight") == small.layer1[0].conv1.weight.grad.shape == (4, 6, 3, 3)


def test_shrinking_goes_on_from_a_shrunk_module():
    net, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(5, 3)
    small = sf.shrink(net, pruned(net, {"0.weight": [0, 1]}))
    assert shape(checked(small, pruned(small, {"0.weight": [0]}), x), "0.weight") == (3, 3)


def test_a_forward_that_draws_is_followed_without_drawing():
    net = Of(lambda m, x: m.b(m.a(x)) + torch.rand(2), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    state, rng = pruned(net, {"a.weight": [0]}), torch.get_rng_state()
    assert shape(sf.shrink(net, state), "b.weight") == (2, 3)
    assert torch.equal(rng, torch.get_rng_state())


def test_constants_of_a_forward_do_not_become_attributes():
    net = Of(lambda m, x: m.b(m.a(x)) + torch.ones(2), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    small = checked(net, pruned(net, {"a.weight": [0]}), torch.randn(5, 3))
    assert set(vars(small)) == set(vars(net)) and shape(small, "b.weight") == (2, 3)


# Messages.


def test_a_state_is_expected():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(TypeError) as error:
        sf.shrink(net, sf.modules.params_of(net))
    assert str(error.value) == (
        "expected a State, got dict; of zeros in params make one by sf.State(params, sf.masks.from_zeros(params))"
    )


def test_unknown_names_are_refused():
    net = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="missing are .* and unknown \\['w'\\]"):
        sf.shrink(net, sf.dense().init({"w": torch.ones(2, 2)}))


def test_a_forward_that_torch_fx_cannot_follow():
    net = Of(lambda m, x: m.a(x) if x.sum() > 0 else m.b(x), a=nn.Linear(3, 4), b=nn.Linear(3, 4))
    with pytest.raises(ValueError) as error:
        sf.shrink(net, sf.dense().init(sf.modules.params_of(net)))
    text = str(error.value)
    assert text.startswith("expected a Of that torch.fx can follow, but: symbolically traced variables cannot be used")
    assert text.endswith(
        "; shrink the parts that it can follow one at a time, or put what it cannot into a function marked with "
        "torch.fx.wrap"
    )


@pytest.mark.parametrize(
    ("layer", "kind"), [(nn.BatchNorm1d(4), "BatchNorm1d"), (nn.Dropout(), "Dropout")], ids=["norm", "dropout"]
)
def test_layers_in_train_mode_are_refused(layer, kind):
    net = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2))
    with pytest.raises(ValueError) as error:
        sf.shrink(net, pruned(net, {"0.weight": [0]}))
    assert str(error.value) == (
        f"expected '1' ({kind}) in eval mode, as its outputs depend on the batch or on chance in train mode: "
        "call module.eval() first"
    )
    checked(net.eval(), pruned(net, {"0.weight": [0]}), torch.randn(5, 3))


def test_functional_dropout_in_train_mode_is_refused():
    net = Of(lambda m, x: m.b(F.dropout(m.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"expected 'dropout' \(dropout\) in eval mode, as its outputs depend"):
        sf.shrink(net, pruned(net, {"a.weight": [0]}))


BY_SIZE = {
    "a number": (lambda m, x: m.b(m.a(x)) / m.a.out_features, "args = (%b, 4)", "args = (%b, 3)"),
    "another path": (
        lambda m, x: m.b(torch.relu(m.a(x)) if m.a.out_features > 3 else m.a(x)),
        "torch.relu",
        "call_module[target=b]",
    ),
    "a longer path": (lambda m, x: [h := m.b(m.a(x)), h + 1][m.a.out_features > 3], "num_users=1", "num_users=2"),
    "a tensor": (lambda m, x: m.b(m.n(m.a(x))) + m.n.running_mean.sum(), "_tensor_constant0", "another tensor"),
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_a_forward_that_computes_with_sizes_is_refused(name):
    fn, before, after = BY_SIZE[name]
    net = Of(fn, a=nn.Linear(3, 4), n=nn.BatchNorm1d(4), b=nn.Linear(4, 2)).eval()
    net.n.running_mean[:] = 1.0
    with pytest.raises(ValueError) as error:
        sf.shrink(net, pruned(net, {"a.weight": [0]}))
    head, _, tail = str(error.value).partition(" into ")
    start = "expected a forward that does not compute with the sizes of its layers, but shrinking them turns "
    assert head.startswith(start) and before in head
    assert after in tail and tail.endswith("; take sizes from tensors")
    checked(net, sf.dense().init(sf.modules.params_of(net)), torch.randn(5, 3))  # nothing to remove


# prune_biases.


def dense_like(module):
    return optree.tree_map(lambda p: torch.tensor(True), sf.modules.params_of(module))


def test_biases_of_rows():
    net = nn.ModuleDict(
        {"conv": nn.Conv1d(1, 3, 1), "own": nn.Linear(1, 3), "dense": nn.Linear(1, 3), "lstm": nn.RNN(1, 3)}
    )
    net["norm"] = nn.LayerNorm(2)
    net["alone"] = nn.Linear(1, 1)
    rows = torch.tensor([[True], [False], [True]])
    masks = dense_like(net)
    masks["conv.weight"], masks["own.weight"], masks["lstm.weight_ih_l0"] = rows[..., None], rows, rows
    masks["own.bias"], masks["norm.weight"] = torch.tensor([False, True, True]), torch.tensor([True, False])
    del masks["alone.weight"]
    got = sf.prune_biases(net, masks)
    wanted = dict(masks)
    wanted["conv.bias"] = wanted["lstm.bias_ih_l0"] = rows[:, 0]
    wanted["own.bias"] = torch.tensor([False, False, True])
    wanted["norm.bias"] = masks["norm.weight"]
    assert sf.checkpoint.tree_equal(got, wanted)
    nested = {"conv": {"weight": rows[..., None], "bias": torch.tensor(True)}}
    assert torch.equal(sf.prune_biases(net, nested)["conv"]["bias"], rows[:, 0])


class Conv1D(nn.Module):  # as in transformers
    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize("inputs, outputs", [(4, 4), (2, 6), (6, 2)])
@pytest.mark.parametrize(
    ("kind", "groups"),
    [(nn.Linear, 1), (Conv1D, 1)]
    + [(kind, n) for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.Conv2d) for n in (1, 2)],
)
def test_a_bias_goes_with_its_output_channel_and_no_other(kind, inputs, outputs, groups):
    layer = {nn.Linear: lambda: nn.Linear(inputs, outputs), Conv1D: lambda: Conv1D(outputs, inputs)}.get(
        kind, lambda: kind(inputs, outputs, 2, groups=groups)
    )()
    x = torch.randn(3, inputs, *[5] * (layer.weight.ndim - 2))
    params, gone = sf.modules.params_of(layer), outputs - 1
    # The weights of one output channel are those with a gradient from it.
    one = torch.func.grad(lambda w: sf.modules.call(layer, {**params, "weight": w}, x)[:, gone].sum())(params["weight"])
    masks = sf.prune_biases(layer, {"weight": one == 0, "bias": torch.tensor(True)})
    assert masks["bias"].tolist() == [i != gone for i in range(outputs)]
    out, dense = sf.modules.call(layer, sf.State(params, masks), x), layer(x)
    assert not out[:, gone].any() and torch.equal(out[:, :gone], dense[:, :gone])


def test_a_bias_that_is_not_of_the_outputs_stays():
    layer = nn.Linear(2, 3)
    layer.bias = nn.Parameter(torch.zeros(1))
    masks = {"weight": torch.zeros(3, 2, dtype=torch.bool), "bias": torch.tensor(True)}
    assert sf.prune_biases(layer, masks)["bias"].item() is True


def test_wrong_masks_of_biases():
    layer = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="expected a bool mask at 'bias', got torch.float32"):
        sf.prune_biases(layer, {"bias": torch.ones(1)})
    with pytest.raises(TypeError, match="expected the module whose masks these are, got dict"):
        sf.prune_biases({"bias": torch.ones(1) > 0}, layer)
    with pytest.raises(ValueError, match="expected masks of parameters of the Linear, but '0.bias' is none"):
        sf.prune_biases(layer, {"0.bias": torch.ones(1) > 0})


# Channels that are kept.


def stayed(net, state, *xs):
    """The lines of the warning."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        checked(net, state, *xs)
    assert len(seen) == 1 and seen[0].category is UserWarning
    assert seen[0].filename == __file__  # the line that called shrink
    head, *lines = str(seen[0].message).split("\n  ")
    assert head == "shrink could not remove all that is pruned:"
    return lines


class Steps(nn.Module):
    def __init__(self, forward, **layers):
        super().__init__()
        self.steps = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.steps(self, x)


LINEARS = {"a": (4, 4), "b": (4, 4), "c": (4, 2)}


def linears(forward, **more):
    return Steps(forward, **{name: nn.Linear(*sizes) for name, sizes in LINEARS.items()}, **more)


@pytest.mark.parametrize(
    ("net", "gone", "x", "lines"),
    [
        (
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
            {"2.weight": [1]},
            (2, 3),
            ["'2' keeps 1 of 1 pruned channels: they are outputs of the module"],
        ),
        (
            nn.Linear(3, 4),
            {"weight": [0, 1]},
            (2, 3),
            ["'' keeps 2 of 2 pruned channels: they are outputs of the module"],
        ),
        (
            linears(lambda net, x: net.c(x + net.b(net.a(x).relu()))),
            {"a.weight": [0], "b.weight": [1, 2]},
            (2, 4),
            ["'b' keeps 2 of 2 pruned channels: add() joins them with a tensor whose channels are not known"],
        ),
        (
            Steps(
                lambda net, x: net.c((x := net.a(x)) + net.b(x.relu())),
                **{name: nn.Linear(*sizes) for name, sizes in LINEARS.items()},
            ),
            {"a.weight": [0], "b.weight": [0, 1, 2]},
            (2, 4),
            ["'b' keeps 2 of 3 pruned channels: add() joins them with a branch where they vary"],
        ),
        (
            linears(lambda net, x: net.c(net.b(x).view(-1, 4))),
            {"b.weight": [1, 2]},
            (2, 4),
            ["'b' keeps 2 of 2 pruned channels: view(), which reads them, is not followed"],
        ),
        (
            linears(lambda net, x: net.c(net.norm(net.b(x))), norm=nn.LayerNorm(4)),
            {"b.weight": [3]},
            (2, 4),
            ["'b' keeps 1 of 1 pruned channels: 'norm' (LayerNorm), which reads them, is not followed"],
        ),
        (
            linears(lambda net, x: net.c(net.a(net.a(x)))),
            {"a.weight": [3]},
            (2, 4),
            ["'a' keeps 1 of 1 pruned channels: the layer is called twice, or shares its weights"],
        ),
        (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)),
            {"0.weight": [0, 1]},
            (2, 3),
            ["'0' keeps 2 of 2 pruned channels: '1' (Linear) has no bias to take their constant, which is not 0"],
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3, padding=1)),
            {"0.weight": [0, 1]},
            (2, 3, 8, 8),
            ["'0' keeps 2 of 2 pruned channels: '1' (Conv2d) pads with zeros around their constant, which is not 0"],
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2, padding=1), nn.Conv2d(4, 2, 3)),
            {"0.weight": [0]},
            (2, 3, 8, 8),
            [
                "'0' keeps 1 of 1 pruned channels: '1' (AvgPool2d) counts zeros around the image, "
                "and their constant is not 0"
            ],
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 1)),
            {"0.weight": [0], "1.weight": [1, 3]},
            (2, 3, 8, 8),
            [
                "'0' keeps 1 of 1 pruned channels: '1' (Conv2d), which reads them, is a grouped convolution",
                "'1' keeps 2 of 2 pruned channels: the layer is a grouped convolution",
            ],
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.Conv2d(4, 2, 1)),
            {"0.weight": [0]},
            (2, 3, 8, 8),
            ["'0' keeps 1 of 1 pruned channels: '1' (Conv2d) pads with zeros around their constant, which is not 0"],
        ),
        (
            nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2)), nn.Linear(2, 2)),
            {"0.weight": [0]},
            (2, 3),
            ["'0' keeps 1 of 1 pruned channels: '1' (Unflatten), which reads them, is not followed"],
        ),
        (
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
            {"0.weight": [0, 1, 2, 3]},
            (2, 3),
            ["'0' keeps 1 of 4 pruned channels: one channel always stays"],
        ),
        (
            nn.Sequential(nn.ConvTranspose2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)),
            {"0.weight": "column"},
            (2, 3, 8, 8),
            ["'0' keeps 1 of 1 pruned channels: the layer is not followed"],
        ),
        (
            linears(lambda net, x: net.c(net.t(x[None])[0]), t=nn.TransformerEncoderLayer(4, 2, 8, 0.0)),
            {"t.linear1.weight": [0]},
            (2, 4),
            ["'t.linear1' keeps 1 of 1 pruned channels: the layer is not called on its own"],
        ),
        (
            nn.Sequential(Conv1D(4, 3), nn.Linear(4, 2)),
            {"0.weight": "column"},
            (2, 3),
            [
                "'0' keeps 1 of 1 pruned channels: a Conv1D is not followed, so cut its units as a tied set, "
                "only=sf.tied(...)"
            ],
        ),
        (
            linears(lambda net, x: net.c(net.r(x[None])[0][0]), r=nn.RNN(4, 4)),
            {"r.weight_ih_l0": [0], "r.weight_hh_l0": [0]},
            (2, 4),
            ["'r' keeps 1 of 1 pruned channels: 'r' (RNN) reads them again, and they are not 0"],
        ),
        (
            linears(lambda net, x: net.c(net.r(x[None])[0][0]), r=nn.LSTM(4, 4, 2)),
            {"r.weight_ih_l0": [8], "r.weight_hh_l0": [8], "a.weight": []},
            (2, 4),
            ["'r' keeps 1 of 1 pruned channels: the layer is of several layers or directions, or projects"],
        ),
    ],
)
def test_what_stays_is_named_with_its_reason(net, gone, x, lines):
    net = net.eval()
    assert stayed(net, pruned(net, gone), torch.randn(x)) == lines


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_all_went_or_nothing_was_pruned():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2), nn.LayerNorm(2)).eval()
    checked(net, pruned(net, {"0.weight": [0], "2.weight": [1, 2]}), torch.randn(2, 3))
    checked(net, sf.dense().init(sf.modules.params_of(net)), torch.randn(2, 3))
    embedding = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    checked(embedding, pruned(embedding, {"0.weight": [1, 2]}), torch.tensor([[0, 4]]))  # its rows are no channels


# Buffers.


def test_buffers_of_the_copy_may_be_given():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    state = pruned(net, {"0.weight": [1]})
    _, buffers = sf.modules.call_with_buffers(net, state, sf.modules.buffers_of(net), 5 * torch.randn(64, 3) + 1)
    x, own = torch.randn(6, 3), {name: b.clone() for name, b in net.named_buffers()}
    net.eval()
    small, other = sf.shrink(net, state, buffers=buffers), sf.shrink(net, state)
    torch.testing.assert_close(small(x), sf.modules.call(net, state, x, buffers=buffers), atol=1e-6, rtol=1e-6)
    assert not torch.allclose(small(x), other(x))
    assert small[1].num_features == 3 and small[1].num_batches_tracked == 1
    assert all(torch.equal(b, own[name]) for name, b in net.named_buffers())
    kept = buffers["1.running_mean"].clone()
    small[1].running_mean.zero_()
    assert torch.equal(buffers["1.running_mean"], kept)
    with pytest.raises(ValueError, match="expected the buffers of the Sequential, but missing are"):
        sf.shrink(net, state, buffers={})
