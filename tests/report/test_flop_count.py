"""FLOPs of a sparse model: exact numbers, whatever the model does, and nothing left
behind.
"""

import re

import optree
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import sparsefn as sf
from sparsefn.report import flop_count as counting
from sparsefn.report.flop_count import Cost, Flops, flops


def everything(path, leaf):
    return leaf.ndim > 0


def matrices(path, leaf):
    return leaf.ndim > 1


def state_of(module, sparsity=0.75, where=matrices, seed=0):
    return sf.static(sparsity, where=where, key=sf.random.key(seed)).init(
        sf.modules.params_of(module)
    )


def kept(state, path):
    return int(state.masks[path].sum())


def dense_total(module, *args):
    with FlopCounterMode(display=False) as mode:
        module(*args)
    return mode.get_total_flops()


FLAGS = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
X = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(0))


# ---- numbers -------------------------------------------------------------------------


def test_a_linear_layer():
    layer = nn.Linear(8, 6)
    state = state_of(layer, 0.7)
    assert kept(state, "weight") == 14  # 48 - round(33.6)
    report = flops(layer, state, X)
    assert report == Flops((), Cost("total", 2 * 15 * 48, 2 * 15 * 14), ())
    assert dense_total(layer, X) == report.total.dense


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(4, 6, 3),
    "padded": lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2, dilation=2),
    "grouped": lambda: nn.Conv2d(4, 6, (3, 1), groups=2, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 4, 2, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2),
}


@pytest.mark.parametrize("make", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(make):
    layer = make()
    state = state_of(layer, 0.7)
    total = flops(layer, state, IMAGE).total
    # each weight is used equally often
    uses, rest = divmod(total.dense, 2 * layer.weight.numel())
    assert not rest and uses > 1
    assert total == Cost(
        "total", dense_total(layer, IMAGE), 2 * uses * kept(state, "weight")
    )


def test_rows_are_modules_in_their_order_and_contain_their_submodules():
    model = nn.Sequential(
        nn.Conv2d(4, 3, 3),
        nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(105, 2)),
        nn.Softmax(1),
    )
    state = state_of(model)
    report = flops(model, state, IMAGE)
    assert [row.path for row in report.rows] == ["0", "1", "1.2"]
    conv, head, linear = report.rows
    assert head[1:] == linear[1:] == (2 * 2 * 210, 2 * 2 * 52)
    assert report.total == Cost(
        "total", conv.dense + head.dense, conv.sparse + head.sparse
    )
    assert str(report).splitlines() == [
        "module   dense  sparse   ratio",
        "0       15,120   3,780  0.2500",
        "1          840     208  0.2476",
        "1.2        840     208  0.2476",
        "total   15,960   3,988  0.2499",
    ]


def test_nothing_sparsified_is_dense():
    layer = nn.Linear(8, 6)
    total = flops(layer, sf.dense().init(sf.modules.params_of(layer)), X).total
    assert total.dense == total.sparse == 2 * 15 * 48


def test_a_sparsified_bias_is_added_and_not_multiplied():
    layer = nn.Linear(8, 6)
    state = state_of(layer, 0.5, where="bias")
    assert flops(layer, state, X) == Flops((), Cost("total", 1440, 1440), ("bias",))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(self.first(x)))


def test_a_weight_used_twice_counts_twice():
    model = Twice()
    state = state_of(model)
    first, last = flops(model, state, X).rows
    assert first == Cost("first", 2 * 2 * 15 * 64, 2 * 2 * 15 * 16)
    assert last == Cost("last", 2 * 15 * 64, 2 * 15 * 16)


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, 8))
        self.b = nn.Parameter(torch.ones(8, 4))

    def forward(self, x):
        return (
            x @ (self.a.T[:, :3]),
            torch.einsum("bti,oi->bto", x, self.a),
            self.a @ self.b,
            self.b @ self.a,
        )


def test_views_count_their_own_entries_and_the_sparser_factor_decides():
    model = Products()
    masks = {
        "a": sf.random.bernoulli(sf.random.key(0), 0.5, (4, 8)),
        "b": torch.arange(32).reshape(8, 4) == 0,
    }
    state = sf.from_masks(masks).init(sf.modules.params_of(model))
    report = flops(model, state, X)
    rows = int(masks["a"][:3].sum()), int(masks["a"].sum())
    square, other = 2 * 4 * 8 * 4, 2 * 8 * 4 * 8
    assert report.total.dense == 2 * 15 * (24 + 32) + square + other
    assert report.total.sparse == 2 * 15 * sum(rows) + (square + other) // 32

    def turned(tree):
        return {name: leaf.T.contiguous().T for name, leaf in tree.items()}

    assert flops(model, sf.State(turned(state.params), turned(masks)), X) == report


def test_layouts_do_not_matter():
    layer = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    mask = torch.zeros(6, 4, 3, 3, dtype=torch.bool)
    mask[:, 0] = True
    state = sf.from_masks({"weight": mask, "bias": torch.tensor(True)}).init(
        sf.modules.params_of(layer)
    )
    full = state._replace(masks=optree.tree_map(torch.ones_like, state.masks))
    # views with an offset
    stacked = optree.tree_map(lambda leaf: leaf[1], sf.ensemble.stack([full, state]))
    for member in (state, stacked):
        total = flops(layer, member, IMAGE.to(memory_format=torch.channels_last)).total
        assert total.sparse * 4 == total.dense


# ---- models that hide their products -------------------------------------------------


class DependsOnValues(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        if args[0].sum().item() > -1e9:
            return self.inner(*args)
        raise AssertionError


LSTM = 2 * 15 * 4 * 6 * (8 + 6)
# two products of (3, 4) and (4, 3) for each of 2 heads of 5
ATTENTION = 2 * 5 * 2 * 3 * 3 * 8
HIDDEN = {
    "lstm": (lambda: nn.LSTM(8, 6, batch_first=True), 1, LSTM, 0),
    "gru": (lambda: nn.GRU(8, 6, batch_first=True), 1, LSTM * 3 // 4, 0),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        3,
        2 * 15 * 256,
        ATTENTION,
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        1,
        2 * 15 * 512,
        ATTENTION,
    ),
}


@pytest.mark.parametrize(
    ("make", "inputs", "thinned", "rest"), HIDDEN.values(), ids=HIDDEN
)
@pytest.mark.parametrize(
    "guard", [torch.enable_grad, torch.no_grad, torch.inference_mode]
)
def test_kernels_that_hide_their_products(make, inputs, thinned, rest, guard):
    # In eval mode, without gradients and on a CPU the counter by itself finds 0 in all
    # but the GRU.
    model = make().eval()
    wrapped = DependsOnValues(model)
    plain, inner = state_of(model), state_of(wrapped)
    with guard():
        quick, real = (
            flops(model, plain, *[X] * inputs),
            flops(wrapped, inner, *[X] * inputs),
        )
    assert (
        quick.total == real.total == Cost("total", thinned + rest, thinned // 4 + rest)
    )
    assert quick.uncounted == real.uncounted == ()


def test_slices_of_a_packed_projection():
    model = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
    masks = optree.tree_map(
        lambda p: torch.ones_like(p, dtype=torch.bool), sf.modules.params_of(model)
    )
    masks["in_proj_weight"][8:16] = False  # the keys'
    state = sf.from_masks(masks).init(sf.modules.params_of(model))
    keys = X[:, :2]
    total = flops(model, state, X, keys, keys.clone()).total
    assert total.dense - total.sparse == 2 * 5 * 2 * 64


# ---- leaves that are not counted are named -------------------------------------------


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        return functional.linear(x.double(), self.linear.weight.double())


def test_a_weight_that_was_cast_counts_as_dense_and_is_named():
    model = Cast()
    report = flops(model, state_of(model), X)
    assert report == Flops((), Cost("total", 1440, 1440), ("linear.weight",))
    assert str(report).splitlines()[-1] == "not counted: linear.weight"


def test_what_torch_has_no_formula_for_is_named():
    model = nn.ModuleDict({"e": nn.Embedding(9, 4)})["e"]
    report = flops(model, state_of(model), torch.tensor([1, 2]))
    assert report == Flops((), Cost("total", 0, 0), ("weight",))
    assert str(report).splitlines() == [
        "module  dense  sparse  ratio",
        "total       0       0",
        "not counted: weight",
    ]


# ---- how it runs ---------------------------------------------------------------------


def test_no_compute_is_spent_where_values_do_not_matter():
    layer = nn.Linear(2**15, 2**15, device="meta")
    params = {
        name: torch.empty_like(p, device="meta") for name, p in layer.named_parameters()
    }
    state = sf.dense().init(params)
    assert (
        flops(layer, state, torch.empty(2**10, 2**15, device="meta")).total.dense
        == 2**41
    )


class Remembers(nn.Module):
    """Where it ran, under which flags, and the weights that it had."""

    def __init__(self, needs_values):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))
        self.needs_values, self.seen = needs_values, []

    def forward(self, x, *, scale, more):
        flags = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
        self.seen.append((x.device.type, flags))
        x.add_(1)  # of its own copy
        self.shift.mul_(2)
        if self.needs_values:
            assert int((self.linear.weight == 0).sum()) == 48
        return self.linear(x * scale * more["list"][0] + torch.arange(8.0) + self.shift)


def test_inputs_of_any_structure_go_to_the_meta_device_unless_values_are_needed():
    kept = sf.static(0.75, pruned="keep")
    for needs_values, (device, flags) in (
        (False, ("meta", FLAGS)),
        (True, ("cpu", (False, False))),
    ):
        model, x = Remembers(needs_values), X.clone().requires_grad_()
        state = kept.init(sf.modules.params_of(model))
        report = flops(
            model, state, x, scale=2.0, more={"list": [torch.ones(8), None, "text"]}
        )
        assert model.seen[-1] == (device, flags)
        assert report.total == Cost("total", 2 * 15 * 64, 2 * 15 * 16)
        assert torch.equal(x, X) and torch.equal(model.shift, torch.ones(8))


def test_a_shared_module_has_one_row():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    report = flops(model, state_of(model), X)
    assert [row.path for row in report.rows if row.dense == report.total.dense] == [
        "1.0"
    ]
    assert report.total == Cost("total", 2 * 2 * 15 * 64, 2 * 2 * 15 * 16)


@pytest.mark.parametrize("wrap", [lambda m: m, DependsOnValues], ids=["meta", "real"])
def test_the_module_and_the_world_stay_as_they_were(wrap):
    model = wrap(
        nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.LazyLinear(4)
        )
    )
    model.train()
    model(IMAGE)  # makes the lazy layer
    state = state_of(model)
    saved = optree.tree_map(torch.clone, dict(model.state_dict()))
    pointers = [p.data_ptr() for p in model.parameters()]
    x = IMAGE.clone().requires_grad_()
    random = torch.get_rng_state()
    report = flops(model, state, x)
    assert report.total.sparse * 4 == report.total.dense > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled) == FLAGS
    assert sf.checkpoint.tree_equal(dict(model.state_dict()), saved)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert x.grad is None and not x._backward_hooks
    for part in model.modules():
        assert part.training and not part._forward_hooks and not part._forward_pre_hooks
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


# ---- errors --------------------------------------------------------------------------


def test_errors():
    layer = nn.Linear(8, 6)
    state = state_of(layer)
    with pytest.raises(
        TypeError, match="expected state to be a State from init, got dict"
    ):
        flops(layer, state.params, X)
    with pytest.raises(
        ValueError,
        match=re.escape("expected a mask of shape (6, 8) or () at 'weight', got (2,)"),
    ):
        flops(
            layer,
            state._replace(
                masks={**state.masks, "weight": torch.ones(2, dtype=torch.bool)}
            ),
            X,
        )
    with pytest.raises(
        ValueError, match=re.escape("missing are ['weight', 'bias'] and unknown ['w']")
    ):
        flops(layer, sf.dense().init({"w": torch.ones(2)}), X)


def test_a_fault_of_the_call_is_raised_as_it_is_and_all_is_put_back():
    layer = nn.Linear(8, 6)
    with pytest.raises(
        RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"
    ) as raised:
        flops(layer, state_of(layer), X[..., :5])
    assert raised.value.__context__ is None
    assert (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled) == FLAGS
    assert counting.flops is sf.report.flops


def test_buffers_may_be_given():
    class Gated(nn.Module):  # the forward needs the value, so that it runs as it is
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("times", torch.tensor(1))

        def forward(self, x):
            return sum(self.layer(x) for _ in range(int(self.times)))

    module = Gated()
    state = sf.dense().init(sf.modules.params_of(module))
    x = torch.ones(1, 4)
    assert sf.report.flops(module, state, x).total.dense == 16
    assert (
        sf.report.flops(
            module, state, x, buffers={"times": torch.tensor(3)}
        ).total.dense
        == 48
    )
    assert module.times == 1
    with pytest.raises(
        ValueError,
        match=r"expected the buffers of the Gated, but missing are \['times'\]",
    ):
        sf.report.flops(module, state, x, buffers={})


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_with_activation_checkpointing_is_counted(grad):
    class Checkpointing(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    with torch.set_grad_enabled(grad):
        module = Checkpointing()
        report = flops(module, state_of(module), X)
    assert (report.total.dense, report.total.sparse) == (2 * 15 * 64, 2 * 15 * 16)
