"""`inputs`: which leaves of a module have statistics, what stays as it was, and what is
refused.
"""

import copy

import optree
import pytest
import torch
from torch import nn
from torch.nn import functional

import sparsefn as sf

inputs = sf.calibration.inputs


def added(*trees):
    total = trees[0]
    for tree in trees[1:]:
        total = optree.tree_map(torch.add, total, tree)
    return total


def check(stats, x):
    x = x.double()
    assert int(stats["count"]) == len(x)
    assert torch.allclose(stats["square"].flatten(), x.square().sum(0), rtol=1e-5)
    assert torch.allclose(stats["gram"].double(), x.T @ x, rtol=1e-4, atol=1e-4)


def convnet():
    first, last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2)
    return nn.Sequential(
        first, nn.BatchNorm2d(4), nn.ReLU(), last, nn.Flatten(), nn.Linear(36, 2)
    )


def test_each_layer_has_the_inputs_that_it_gets():
    net, x = (
        nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)),
        torch.randn(5, 7, 4),
    )
    stats = inputs(net, None, x)
    assert list(stats) == ["0.weight", "2.weight"] and list(stats["0.weight"]) == [
        "count",
        "square",
        "gram",
    ]
    assert stats["0.weight"]["count"].dtype == torch.int64
    check(stats["0.weight"], x.reshape(-1, 4))
    check(stats["2.weight"], net[1](net[0](x)).detach().reshape(-1, 6))


def test_the_weights_are_the_effective_ones_of_a_state():
    net, x = (
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3)),
        torch.randn(5, 4),
    )
    state = sf.static(0.5, where="0.weight", init="magnitude").init(
        sf.modules.params_of(net)
    )
    check(
        inputs(net, state, x)["1.weight"],
        functional.linear(x, sf.effective(state)["0.weight"]),
    )
    assert not torch.equal(
        inputs(net, state, x)["1.weight"]["gram"],
        inputs(net, None, x)["1.weight"]["gram"],
    )


def test_nothing_of_the_module_changes_also_in_train_mode():
    net = convnet().train()
    before, hooks = (
        copy.deepcopy(net.state_dict()),
        sum(len(part._forward_hooks) for part in net.modules()),
    )
    x = torch.randn(2, 3, 5, 5)
    given = x.clone()
    stats = inputs(net, None, x)
    assert optree.tree_all(
        optree.tree_map(torch.equal, before, net.state_dict())
    ) and torch.equal(x, given)
    assert hooks == sum(len(part._forward_hooks) for part in net.modules()) == 0
    assert (
        all(p.grad is None and p.requires_grad for p in net.parameters())
        and net.training
    )
    assert not any(
        value.requires_grad for of in stats.values() for value in of.values()
    )
    assert torch.backends.mha.get_fastpath_enabled()


def test_batches_in_any_split_give_the_same_moments():
    net, x = convnet().eval(), torch.randn(12, 3, 5, 5)
    whole = inputs(net, None, x)
    for size in (1, 5, 12):
        split = added(*(inputs(net, None, part) for part in x.split(size)))
        for path, of in whole.items():
            assert torch.equal(split[path]["count"], of["count"])
            # The first layer's inputs are the same numbers; those of later ones come
            # from products of other sizes.
            exact = path == "0.weight"
            rtol = 1e-13 if exact else 1e-5
            assert torch.allclose(split[path]["square"], of["square"], rtol=rtol)
            assert torch.allclose(split[path]["gram"], of["gram"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_projections_inside_attention(batch_first, training):
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first).train(training)
    q, k = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    one = inputs(attention, None, q, q, q)
    assert list(one) == ["in_proj_weight", "out_proj.weight"]
    check(one["in_proj_weight"], q.flatten(0, 1))
    two = inputs(attention, None, q, k, k)["in_proj_weight"]
    for part, x in enumerate((q, k, k)):
        check({key: value[part] for key, value in two.items()}, x.flatten(0, 1))
    # The statistics of both add up, as those of three parts.
    both = added(one["in_proj_weight"], two)
    check(
        {key: value[1] for key, value in both.items()}, torch.cat([q, k]).flatten(0, 1)
    )
    weights = inputs(
        nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
        None,
        q,
        torch.randn(3, 5, 4),
        torch.randn(3, 5, 6),
    )
    assert [of["square"].numel() for of in weights.values()] == [8, 4, 6, 8]


def test_what_leaves_attention_is_seen_also_where_torch_would_fuse_it():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    stats = inputs(layer, None, x)
    assert list(stats) == [
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    ]
    weight = layer.self_attn.out_proj.weight.detach()
    heads = (
        layer.self_attn(x, x, x, need_weights=False)[0].detach()
        - layer.self_attn.out_proj.bias.detach()
    )
    check(
        stats["self_attn.out_proj.weight"],
        torch.linalg.solve(weight, heads.flatten(0, 1).T).T,
    )


def test_compiled_parts_run_uncompiled():
    def fused(graph, example):
        raise AssertionError("this would hide the products")

    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(5, 4)
    net[0] = torch.compile(net[0], backend=fused)
    check(inputs(net, None, x)["0.weight"], x)
    check(inputs(torch.compile(net, backend=fused), None, x)["0.weight"], x)


def test_16_bit_models_are_summed_in_float32():
    layer, x = nn.Linear(4, 3).bfloat16(), torch.randn(5, 4).bfloat16()
    stats = inputs(layer, None, x)["weight"]
    assert (
        stats["square"].dtype == torch.float64 and stats["gram"].dtype == torch.float32
    )
    check(stats, x)


def test_paths_and_of_choose():
    net, x = convnet().eval(), torch.randn(2, 3, 5, 5)
    assert list(inputs(net, None, x, paths="3.*")) == ["3.weight"]
    assert list(inputs(net, None, x, paths=["0.weight", "5.*"])) == [
        "0.weight",
        "5.weight",
    ]
    assert list(inputs(net, None, x, paths=lambda path, leaf: leaf.ndim == 2)) == [
        "5.weight"
    ]
    for of in ("square", ["count", "square"], "count"):
        assert list(inputs(net, None, x, of=of)["0.weight"]) == ["count", "square"]
    assert list(inputs(net, None, x, of=["gram"])["0.weight"]) == [
        "count",
        "square",
        "gram",
    ]


def test_a_tied_weight_is_there_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.words(ids))

    net, ids = Tied(), torch.tensor([[1, 2, 3]])
    stats = inputs(net, None, ids)
    assert list(stats) == ["words.weight"]
    check(stats["words.weight"], net.words(ids[0]).detach())


def test_weights_in_one_memory_are_told_apart():
    net, flat = (
        nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)),
        torch.randn(18),
    )
    net[0].weight.data, net[1].weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
    x = torch.randn(4, 3)
    stats = inputs(net, None, x)
    check(stats["0.weight"], x)
    check(stats["1.weight"], net[0](x).detach())


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x, which):
        return self.experts[which](x)


def test_a_layer_that_no_input_reached_has_a_count_of_zero_that_adds():
    net, x = Router(), torch.randn(4, 3)
    first, second = (inputs(net, None, x, which) for which in (0, 1))
    assert [int(of["count"]) for of in first.values()] == [4, 0]
    both = added(first, second)
    for of in both.values():
        check(of, x)
    with pytest.raises(
        ValueError, match=r"no product was seen with 'experts\.1\.weight' \(Linear\)"
    ):
        inputs(net, None, x, 0, paths="experts.1.weight")


def test_a_leaf_without_data_is_named_with_its_layer():
    net, ids = nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 3)), torch.tensor([[1, 2]])
    with pytest.raises(
        ValueError, match=r"inputs: no product was seen with '0\.weight' \(Embedding\)"
    ):
        inputs(net, None, ids, paths=["0.weight"])
    with pytest.raises(
        ValueError, match=r"no product was seen with '0\.weight' \(ConvTranspose1d\)"
    ):
        inputs(
            nn.Sequential(nn.ConvTranspose1d(1, 1, 1)),
            None,
            torch.ones(1, 1, 2),
            paths="0.weight",
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_named_with_their_layer(value):
    net, x = nn.Sequential(nn.Identity(), nn.Linear(2, 2)), torch.tensor([[1.0, value]])
    with pytest.raises(
        ValueError,
        match=r"expected finite inputs of '1\.weight' \(Linear\), got NaN or infinity",
    ):
        inputs(net, None, x)
    # whose products overflow float32
    with pytest.raises(ValueError, match="expected finite inputs"):
        inputs(net, None, torch.full((1, 2), 1e30))


def test_dropout_is_told():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1))
    with pytest.warns(
        UserWarning,
        match=r"inputs: dropout is on in '1': call eval\(\) of the model first",
    ):
        sf.calibration.inputs(model, None, torch.randn(5, 3))
    sf.calibration.inputs(model.eval(), None, torch.randn(5, 3))
    sf.calibration.inputs(
        nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)), None, torch.randn(5, 3)
    )


def test_dropout_of_attention_which_is_a_number_is_told():
    layer, x = nn.MultiheadAttention(4, 2, dropout=0.1), torch.randn(3, 1, 4)
    with pytest.warns(
        UserWarning,
        match=r"inputs: dropout is on in '': call eval\(\) of the model first",
    ):
        sf.calibration.inputs(layer, None, x, x, x)
    sf.calibration.inputs(layer.eval(), None, x, x, x)
    sf.calibration.inputs(nn.MultiheadAttention(4, 2), None, x, x, x)


def test_a_padding_mask_of_torch_is_seen():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    x, hidden = (
        torch.randn(2, 3, 4),
        torch.tensor([[False, False, False], [False, False, True]]),
    )
    with pytest.raises(
        ValueError,
        match=r"'src_key_padding_mask' hides 1 of 6 .*=~src_key_padding_mask.bool\(\)",
    ):
        sf.calibration.inputs(layer, None, x, src_key_padding_mask=hidden)
    stats = sf.calibration.inputs(
        layer, None, x, src_key_padding_mask=hidden, tokens=~hidden, paths="linear1.*"
    )
    assert int(stats["linear1.weight"]["count"]) == 5
    with pytest.raises(
        ValueError,
        match=r"of 'self_attn.in_proj_weight' in the order of the \(2, 3\) tokens, got "
        r"\(3, 2",
    ):
        sf.calibration.inputs(
            layer, None, x, src_key_padding_mask=hidden, tokens=~hidden
        )


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm]
)
@pytest.mark.parametrize("training", [False, True])
def test_what_a_spectral_norm_multiplies_by_is_no_input(norm, training):
    model = nn.Sequential(nn.Linear(3, 3), norm(nn.Linear(3, 2))).train(training)
    assert [*inputs(model, None, torch.randn(5, 3))] == ["0.weight"]
    computed = (
        r"'1.*weight.*' \('1.weight' is computed from it: make it a parameter with "
        r"torch.nn.utils.*remove_.*\)"
    )
    with pytest.raises(ValueError, match=f"no product was seen with .*{computed}"):
        inputs(model, None, torch.randn(5, 3), paths="1.*")
    with pytest.warns(
        UserWarning,
        match=rf"in_order: no product was seen with {computed}, so it stays dense",
    ):
        state = sf.calibration.in_order(
            model, None, ["*"], sf_wanda, torch.randn(5, 3), of="square"
        )
    assert [path for path, mask in state.masks.items() if mask.ndim] == ["0.weight"]


def sf_wanda(stats):
    return sf.one_shot(0.5, sf.scores.wanda(stats))


def test_other_bad_arguments():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(
        TypeError, match="expected state to be a State from init, or None, got dict"
    ):
        inputs(layer, dict(layer.named_parameters()), x)
    with pytest.raises(
        ValueError,
        match="expected of to name some of 'count', 'square', 'gram', got 'norm'",
    ):
        inputs(layer, None, x, of="norm")
    with pytest.raises(ValueError, match="paths"):
        inputs(layer, None, x, paths="none.*")
    with pytest.raises(TypeError, match="expected a module first"):
        inputs(x, None, x)
    state = sf.dense().init(sf.modules.params_of(layer))
    with pytest.raises(ValueError, match="expected one state, got a stack of 2"):
        inputs(layer, sf.ensemble.stack([state, state]), x)
    with pytest.raises(ValueError, match="missing are"):
        inputs(layer, sf.dense().init({"weight": torch.ones(2, 2)}), x)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        inputs(layer, None, torch.ones(1, 3))


class Tied(nn.Module):
    """A language model whose head has the table of an embedding with max_norm."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.head = (
            nn.Embedding(6, 4, max_norm=0.5),
            nn.Linear(4, 4),
            nn.Linear(4, 6),
        )
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.layer(self.table(tokens))))


@pytest.mark.parametrize("with_state", [False, True])
def test_a_table_with_max_norm_stays_as_it_was_and_its_products_are_seen(with_state):
    torch.manual_seed(0)
    model, tokens = Tied().eval(), torch.tensor([[0, 1, 2], [2, 3, 4]])
    before = copy.deepcopy(model.state_dict())
    state = sf.dense().init(sf.modules.params_of(model)) if with_state else None
    stats = inputs(model, state, tokens)
    sf.calibration.in_order(
        model, state, ["layer.*"], lambda stats: sf.methods.wanda(0.5, stats), tokens
    )
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert state is None or torch.equal(
        state.params["table.weight"], before["table.weight"]
    )
    rows = model.table(tokens).detach().reshape(-1, 4)
    check(stats["layer.weight"], rows)
    check(stats["table.weight"], torch.tanh(model.layer(rows)).detach())


@pytest.mark.parametrize("through_data", [False, True])
def test_a_forward_that_writes_into_its_weight_is_refused_before_it_does(through_data):
    class Centred(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                weight = self.weight.data if through_data else self.weight
                weight.sub_(weight.mean(1, keepdim=True))
            return super().forward(x)

    model, x = nn.Sequential(Centred(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError,
        match="leaves its weights as they are, but it writes into '0.weight'",
    ):
        inputs(model, None, x)
    with pytest.raises(
        ValueError,
        match="leaves its weights as they are, but it writes into '0.weight'",
    ):
        sf.calibration.in_order(
            model, None, ["0.*"], lambda stats: sf.methods.wanda(0.5, stats), x
        )
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
