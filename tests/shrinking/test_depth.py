"""Layers: which sums are residual, what they cost, and how they are pruned."""

import itertools
import math

import pytest
import torch
from torch import nn

import sparsefn as sf
from tests.shrinking.residual_nets import (
    IMAGE,
    NETS,
    TOKENS,
    Mlp,
    X,
    convnet,
    mlp,
    nested,
    transformer,
)
from tests.shrinking.small import Of

V = torch.ones(2, 4).cumsum(1)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def found(fn, x=V, **parts):
    net = Of(fn, **parts).eval()
    return [layer.leaves for layer in sf.shrinking.layers(net, x)]


def lin(size=4):
    return nn.Linear(size, size, bias=False)


@pytest.mark.parametrize("name", NETS)
def test_masks_of_a_layer_make_its_branch_zero(name):
    build, x = NETS[name]
    net = build()
    layers = sf.shrinking.layers(net, x)
    for i, layer in enumerate(layers):
        masks = layers.masks({i})
        inner = {k for k in range(len(layers)) if layers[k].inside & {i}}
        lost = {leaf for leaf, mask in masks.items() if not mask.any()}
        assert lost == {leaf for k in {i, *inner} for leaf in layers[k].leaves}
        state = sf.State(sf.modules.params_of(net), masks)
        (one,) = layer.branches
        run = layers.trace.of(sf.modules.bake(net, state), x)
        seen = Seen(run, one.branch.name)
        seen.run(x)
        assert seen.value.shape and not seen.value.any()


class Seen(torch.fx.Interpreter):
    def __init__(self, module, name):
        super().__init__(module)
        self.name = name

    def run_node(self, n):
        out = super().run_node(n)
        if n.name == self.name:
            self.value = out.clone()
        return out


def test_layers_of_a_convnet_are_blocks_that_add_their_input():
    layers = sf.shrinking.layers(convnet(), IMAGE)
    assert [layer.path for layer in layers] == ["1", "2", "4"]
    names = ["conv1.weight", "norm1.weight", "norm1.bias"]
    names += ["conv2.weight", "norm2.weight", "norm2.bias"]
    assert layers[1].leaves == tuple(f"2.{name}" for name in names)


def test_a_transformer_has_two_branches_a_block_or_one_layer():
    net = transformer()
    layers = sf.shrinking.layers(net, TOKENS)
    assert [layer.path for layer in layers] == ["0", "0", "1", "1", "2", "2"]
    assert [len(layer.leaves) for layer in layers] == [6, 6] * 3
    whole = sf.shrinking.layers(net, TOKENS, by="module")
    assert [layer.leaves for layer in whole] == [
        (*layers[i].leaves, *layers[i + 1].leaves) for i in (0, 2, 4)
    ]
    assert whole[0].entries == layers[0].entries + layers[1].entries


def test_layers_by_module_that_an_outer_forward_adds_up():
    def forward(net, x):
        for part in net.parts:
            x = x + part.a(x)
            x = x + part.b(x)
        return x

    parts = nn.ModuleList([Of(None, a=lin(), b=lin()) for _ in range(2)])
    net = Of(forward, parts=parts).eval()
    layers = sf.shrinking.layers(net, V, by="module")
    assert [layer.leaves for layer in layers] == [
        (f"parts.{i}.a.weight", f"parts.{i}.b.weight") for i in (0, 1)
    ]
    branches = [Of(lambda net, x: x + net.a(x) + net.b(x), a=lin(), b=lin())]
    layers = sf.shrinking.layers(branches[0].eval(), V, by="module")
    assert len(layers) == 2  # in no list


@pytest.mark.parametrize(
    "fn",
    [
        lambda net, x: x + net.f(x),
        lambda net, x: net.f(x) + x,
        lambda net, x: x - net.f(x),
        lambda net, x: x + net.f(x.tanh()) * x.sigmoid(),
        lambda net, x: x.double().float() + net.f(x),
        lambda net, x: (x + net.f(x)).relu(),
        lambda net, x: net.f(x).add_(x),
        lambda net, x: x + nn.functional.gelu(net.f(x)),
        lambda net, x: x + net.f(x).reshape(-1, 2, 2).transpose(1, 2).flatten(1),
        lambda net, x: x + 0.5 * nn.functional.dropout(net.f(x), 0.5, False),
    ],
)
def test_forms_of_a_sum(fn):
    assert found(fn, f=lin()) == [("f.weight",)]


def test_branches_beside_each_other():
    parts = {"f": lin(), "g": lin(), "norm": nn.LayerNorm(4)}

    def after(net, x):
        shared = net.norm(x)
        return x + net.f(shared) + net.g(shared)

    def before(net, x):
        shared = net.norm(x)
        return net.f(shared) + net.g(shared) + x

    assert found(after, **parts) == [("f.weight",), ("g.weight",)]
    together = ("f.weight", "g.weight", "norm.weight", "norm.bias")
    assert found(before, **parts) == [together]


def test_a_gate_without_dimensions_is_no_leaf():
    gate = nn.Parameter(torch.tensor(2.0))
    assert found(lambda net, x: x + net.g * net.f(x), f=lin(), g=gate) == [
        ("f.weight",)
    ]


def test_layers_inside_others_say_so_and_go_with_them():
    layers = sf.shrinking.layers(nested(), X)
    assert [layer.inside for layer in layers] == [{1}, set(), {3}, set()]
    assert {*layers[0].leaves} < {*layers[1].leaves}
    assert layers.alive(layers.masks([1])).tolist() == [False, False, True, True]


def test_printed():
    assert str(sf.shrinking.layers(mlp(2), X)) == (
        "0: 76 weights and 640 FLOPs at '1': 1.up, 1.down\n"
        "1: 76 weights and 640 FLOPs at '2': 2.up, 2.down"
    )
    text = str(sf.shrinking.layers(nested(), X)[0])
    assert text == "76 weights at '1.inner': 1.inner.up, 1.inner.down; inside 1"
    text = str(sf.shrinking.layers(transformer(), TOKENS, by="module")[0])
    assert text.endswith("0.norm1, 0.qkv, 0.out, 0.norm2 and 2 more")


SHARED = lin()


@pytest.mark.parametrize(
    ("fn", "parts", "why"),
    [
        (
            lambda net, x: x + net.f(x).exp(),
            {"f": lin()},
            "exp is added in the module itself, but it is not known to be 0 where the "
            "parameters that it alone reads are 0",
        ),
        (
            lambda net, x: x + net.f(net.f(x)) + net.f(x),
            {"f": SHARED},
            "linear at 'f' is added in the module itself, but it has no parameters "
            "that it alone reads",
        ),
        (
            lambda net, x: x + net.f(x),
            {"f": nn.utils.parametrizations.weight_norm(lin())},
            "torch.nn.utils.parametrize.remove_parametrizations",
        ),
    ],
)
def test_what_is_no_layer_is_named_with_the_reason(fn, parts, why):
    def forward(net, x):
        x = fn(net, x)
        return x + net.other(x)

    net = Of(forward, other=lin(), **parts).eval()
    layers = sf.shrinking.layers(net, V)
    assert [layer.leaves for layer in layers] == [("other.weight",)]
    assert why in layers.stays[0]
    assert str(layers).endswith(f"stays:\n  {layers.stays[0]}")


def test_sums_without_parameters_are_not_mentioned():
    layers = sf.shrinking.layers(nn.Sequential(Gelu(), Mlp(), Gelu()).eval(), V)
    assert len(layers) == 1 and not layers.stays


class Gelu(nn.Module):
    def forward(self, x):
        return x * (x + 0.04 * x**3 + 0.5).tanh()


def test_models_without_layers_are_refused():
    with pytest.raises(ValueError, match="layers: expected a model that adds") as error:
        sf.shrinking.layers(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), V)
    assert str(error.value).endswith(
        "x + f(x), got none of such layers in the Sequential"
    )
    net = Of(lambda net, x: x + net.f(x).exp(), f=lin()).eval()
    with pytest.raises(ValueError, match=r"layers in the Of:\n  exp is added in the"):
        sf.shrinking.layers(net, V)


def test_a_shared_branch_is_named():
    block = Mlp()
    net = nn.Sequential(nn.Linear(3, 4), block, block).eval()
    with pytest.raises(ValueError, match="but it has no parameters that it alone"):
        sf.shrinking.layers(net, X)


def test_parameters_that_weights_are_computed_from_get_no_masks():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    net = nn.Sequential(nn.Linear(3, 4), Mlp(), Mlp(), head).eval()
    layers = sf.shrinking.layers(net, X)
    masks = layers.masks([0])
    originals = [f"3.parametrizations.weight.original{i}" for i in range(2)]
    assert [masks[name].ndim for name in originals] == [0, 0]
    state = sf.State(sf.modules.params_of(net), masks)
    assert len(sf.shrink(net, state, X, groups=layers)) == 3


def test_an_example_may_be_a_slice():
    net = mlp(3)
    wide = torch.linspace(-1, 1, 20).reshape(5, 4)
    x = wide[:, :3]
    layers = sf.shrinking.layers(net, x)
    state = sf.State(sf.modules.params_of(net), layers.masks([1]))
    small = sf.shrink(net, state, x, groups=layers, form="program")
    masked = sf.modules.bake(net, state)
    for given in (x, x.contiguous()):
        torch.testing.assert_close(small(given), masked(given))


def test_bad_arguments():
    net = mlp(2)
    with pytest.raises(TypeError, match="expected a module first, got Tensor"):
        sf.shrinking.layers(X, net)
    with pytest.raises(ValueError, match="expected by to be 'branch' or 'module', got"):
        sf.shrinking.layers(net, X, by="block")
    with pytest.raises(TypeError, match=r"widths as sf.shrinking.groups makes .* int"):
        sf.shrinking.layers(net, X, widths=1)
    other = sf.shrinking.groups(mlp(3), X)
    with pytest.raises(ValueError, match="expected the groups of this model"):
        sf.shrinking.layers(net, X, widths=other)
    layers = sf.shrinking.layers(net, X)
    with pytest.raises(ValueError, match=r"at least one of the model's 2 layers to st"):
        layers.masks([0, 1])
    with pytest.raises(ValueError, match=r"model's 2 layers, from 0, got 2"):
        layers.masks([2])
    with pytest.raises(TypeError, match="number of a layer to be an int, got True"):
        layers.cost([True])
    with pytest.raises(TypeError, match=r"got a bool tensor: pass gone.nonzero\(\)"):
        layers.masks(torch.tensor([False, True]))
    with pytest.raises(TypeError, match="numbers of the layers that go, got '0'"):
        layers.cost("0")
    with pytest.raises(TypeError, match="only to be a sequence of numbers of layers"):
        layers.pattern("0")
    with pytest.raises(ValueError, match="number of a layer in only, got none"):
        layers.pattern([])
    with pytest.raises(ValueError, match="unit to be 'params', 'flops' or 'bytes'"):
        layers.cost(unit="time")
    with pytest.raises(ValueError, match="but none of '1.up.weight'"):
        layers.alive({})
    with pytest.raises(ValueError, match=r"layers to stay, but all go"):
        sf.shrinking.layers(nested(), X).cost([1, 3])


def pruned(algorithm, net):
    params = sf.modules.params_of(net)
    return algorithm.update(algorithm.init(params), params, 0)


@pytest.mark.parametrize(
    ("sparsity", "kept"), [(0.0, 4), (0.25, 3), (0.5, 2), (0.75, 1), (1.0, 1)]
)
def test_exact_counts_of_the_best_layers_and_one_stays(sparsity, kept):
    net = mlp(4)
    layers = sf.shrinking.layers(net, X)
    state = pruned(sf.one_shot(sparsity, pattern=layers.pattern()), net)
    params = state.params
    means = []
    for layer in layers:
        entries = torch.cat([params[leaf].abs().flatten() for leaf in layer.leaves])
        means.append(entries.mean().item())
    best = sorted(range(4), key=lambda i: -means[i])[:kept]
    assert layers.alive(state.masks).nonzero().flatten().tolist() == sorted(best)
    for layer, alive in zip(layers, layers.alive(state.masks), strict=True):
        assert {bool(state.masks[leaf].all()) for leaf in layer.leaves} == {bool(alive)}
    assert not {"0.weight", "5.weight"} & {
        path for path, mask in state.masks.items() if mask.ndim and not mask.all()
    }


def test_some_layers_alone_may_go():
    net = mlp(4)
    layers = sf.shrinking.layers(net, X)
    state = pruned(sf.one_shot(0.5, pattern=layers.pattern([3, 1])), net)
    assert layers.alive(state.masks)[[0, 2]].all()
    assert layers.alive(state.masks).sum() == 3


def test_layers_go_one_after_another():
    net = mlp(4)
    layers = sf.shrinking.layers(net, X)
    ramp = sf.schedules.linear(0.25, 0.25)
    algorithm = sf.gmp(ramp, when=sf.every(1), pattern=layers.pattern(), init="dense")
    params = sf.modules.params_of(net)
    state = algorithm.init(params)
    counts = []
    for step in range(3):
        before = layers.alive(state.masks) if step else torch.ones(4, dtype=torch.bool)
        state = algorithm.update(state, params, step)
        alive = layers.alive(state.masks)
        assert not (alive & ~before).any()
        counts.append(int(alive.sum()))
    assert counts == [3, 2, 1]


class Uneven(nn.Module):
    """Blocks of several widths, one inside another."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Mlp(4, n) for n in (2, 8, 5)])
        self.last, self.inner = nn.Linear(4, 4), Mlp(4, 3)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x + self.last(self.inner(x.relu()))


@pytest.mark.parametrize("unit", ["params", "flops", "bytes"])
def test_as_many_layers_as_fit_whatever_ones(unit):
    net = Uneven().eval()
    layers = sf.shrinking.layers(net, V)
    whole = layers.cost((), unit)
    priced = layers.priced(unit, None, False, None)
    (size,) = priced.sizes.values()
    assert size == 5 and priced.cost([5]) == whole
    for kept in range(1, 6):
        costs = [
            layers.cost(gone, unit)
            for gone in itertools.combinations(range(5), 5 - kept)
            if len({*gone} | {i for i in range(5) if layers[i].inside & {*gone}}) < 5
        ]
        assert priced.cost([kept]) >= max(costs)
    for limit in (0.5 * whole, 0.7 * whole, 0.9 * whole):
        budget = sf.budgets.within(limit, layers, unit)
        algorithm = sf.one_shot(1.0, pattern=layers.pattern(), distribution=budget)
        state = pruned(algorithm, net)
        gone = (~layers.alive(state.masks)).nonzero().flatten().tolist()
        assert layers.cost(gone, unit) <= budget.cost <= limit
    with pytest.raises(ValueError, match="within: expected a limit of"):
        sf.budgets.within(1, layers, unit).counts  # noqa: B018


def test_costs_are_exact_where_layers_are_alike():
    net = mlp(4)
    layers = sf.shrinking.layers(net, X)
    priced = layers.priced("flops", None, False, None)
    for kept in range(1, 5):
        assert priced.cost([kept]) == layers.cost(range(kept, 4), "flops")
    budget = sf.budgets.within(layers.cost([0]), layers)
    assert budget.counts == {"1.up.weight": 3} and budget.cost == layers.cost([0])
    assert layers.cost([0], "bytes") == 4 * layers.cost([0])
    assert layers.cost([0], "bytes", bits=3) == math.ceil(3 * layers.cost([0]) / 8)


def test_a_table_of_measured_times():
    layers = sf.shrinking.layers(mlp(4), X)
    table = {"1.up.weight": [1.0, 2.0, 3.5, 4.0, 4.5]}
    assert sf.budgets.within(3.9, layers, table).counts == {"1.up.weight": 2}


@pytest.mark.parametrize("unit", ["params", "flops"])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_layers_and_widths_at_once(unit, share):
    net = mlp(4)
    groups = sf.shrinking.groups(net, X)
    layers = sf.shrinking.layers(net, X, widths=groups)
    limit = share * layers.cost((), unit)
    budget = sf.budgets.within(limit, layers, unit)
    assert len(budget.counts) == len(groups) + 1
    algorithm = sf.one_shot(1.0, pattern=layers.pattern(), distribution=budget)
    state = pruned(algorithm, net)
    alive = layers.alive(state.masks)
    assert int(alive.sum()) == list(budget.counts.values())[-1] < 4
    small = sf.shrink(net, state, X, groups=layers)
    assert len(small) == 2 + int(alive.sum())
    made = sf.shrinking.weights(small, X).priced(unit, None, False, None)
    assert made.cost(list(made.sizes.values())) <= budget.cost <= limit


@pytest.mark.parametrize("unit", ["params", "flops"])
def test_rounds_with_regrow_keep_the_counts_of_layers_and_widths(unit):
    x = torch.ones(2, 8).cumsum(1)
    blocks = [Mlp(8, n) for n in (12, 16, 20, 24)]
    net = nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 3)).eval()
    groups = sf.shrinking.groups(net, x)
    layers = sf.shrinking.layers(net, x, widths=groups)
    limit = 0.5 * layers.cost((), unit)
    budget = sf.budgets.within(limit, layers, unit)
    algorithm = sf.gmp(
        sf.schedules.polynomial(0.0, 1.0, begin=0, end=6),
        pattern=layers.pattern(),
        distribution=budget,
        regrow=True,
        pruned="keep",
    )
    params = sf.modules.params_of(net)
    state = algorithm.init(params)
    for step in range(7):
        state = algorithm.update(state, params, step)
    small = sf.shrink(net, state, x, groups=layers)
    made = sf.shrinking.weights(small, x).priced(unit, None, False, None)
    assert made.cost(list(made.sizes.values())) <= budget.cost <= limit
    once = sf.one_shot(1.0, pattern=layers.pattern(), distribution=budget)
    assert sf.checkpoint.tree_equal(state.masks, pruned(once, net).masks)


def test_a_table_of_times_for_layers_and_widths():
    net = mlp(4)
    groups = sf.shrinking.groups(net, X)
    layers = sf.shrinking.layers(net, X, widths=groups)
    whole = sf.budgets.within(layers.cost(), layers)
    key = [*whole.counts][-1]
    first = layers[0].leaves[0]
    assert key == f"{first}:1" and first in whole.counts
    table = {path: [float(i) for i in range(n + 1)] for path, n in whole.counts.items()}
    table[key] = [0.0, 10.0, 20.0, 30.0, 40.0]
    total = sum(row[-1] for row in table.values())
    budget = sf.budgets.within(0.6 * total, layers, table)
    counts = budget.counts
    assert counts[key] < 4
    # widths of layers that go count as those of the others
    assert len(counts) == len(groups) + 1
    assert budget.cost == sum(table[path][n] for path, n in counts.items())


def test_layers_and_widths_compete():
    net = mlp(4)
    groups = sf.shrinking.groups(net, X)
    layers = sf.shrinking.layers(net, X, widths=groups)
    both = sf.budgets.global_()
    state = pruned(sf.one_shot(0.5, pattern=layers.pattern(), distribution=both), net)
    # an inner width of a layer that goes counts as kept, and has no entries
    alive = int(layers.alive(state.masks).sum())
    assert 1 <= alive < 4
    assert int(groups.alive(state.masks)[0].sum()) < 4


def test_groups_of_submodules_with_layers():
    net = mlp(3)
    groups = sf.shrinking.groups(net, X, only=["1", "2"])
    layers = sf.shrinking.layers(net, X, widths=groups)
    assert [layer.path for layer in layers] == ["1", "2"] and layers.trace is None


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        net = mlp(2)
    layers = sf.shrinking.layers(net, X)
    assert [layer.path for layer in layers] == ["1", "2"]
    assert layers.masks([0])["1.up.weight"].device.type == "cpu"


def test_the_model_stays_as_it_is():
    net = convnet()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    assert len(sf.shrinking.layers(net, IMAGE)) == 3
    for name, x in net.state_dict().items():
        assert torch.equal(x, before[name])
