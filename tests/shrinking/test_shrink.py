"""Smaller models: the masked model's outputs, the sizes that masks allow, and texts of
what stays and of bad input.
Training goes on with the smaller model, from the state and the optimizer of the old
one."""

import copy
import pickle
import pkgutil
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsefn as sf
from tests.shrinking.small import Of, drawn

# What is masked and stays is tested below.
pytestmark = pytest.mark.filterwarnings(
    "ignore:shrink could not remove all:UserWarning"
)
X = torch.linspace(-1, 1, 6).reshape(2, 3)
IMAGE = torch.linspace(-1, 1, 150).cos().reshape(2, 3, 5, 5)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def mlp():
    return nn.Sequential(
        nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)
    ).eval()


def pruned(net, **gone):
    """The state without slices: `{name of a parameter: indices}` with `__` for dots;
    "name/1" for another dimension.
    """
    params = sf.modules.params_of(net)
    masks = {name: torch.tensor(True) for name in params}
    for key, indices in gone.items():
        name, _, dim = key.removeprefix("p").replace("__", ".").partition("/")
        masks[name] = masks[name].expand(params[name].shape).clone()
        masks[name].movedim(int(dim or 0), 0)[indices] = False
    return sf.State(params, masks)


def checked(net, state, *xs, atol=1e-6, **options):
    """The smaller module, after comparing its outputs with the masked one."""
    small = sf.shrink(net, state, xs, **options)
    with torch.no_grad():
        wanted, got = sf.modules.call(net, state, *xs), small(*xs)
    torch.testing.assert_close(got, wanted, atol=atol, rtol=atol)
    return small


def test_a_mean_over_all_dimensions():
    net = Of(
        lambda net, x: net.b(net.a(x).relu()) * x.mean(),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
    ).eval()
    small = checked(net, pruned(net, a__weight=[1], a__bias=[1]), X)
    assert type(small) is Of and small.a.out_features == 3


def shapes(module):
    return [
        tuple(p.shape)
        for name, p in module.named_parameters()
        if name.endswith("weight")
    ]


# Which units go.


@pytest.mark.parametrize("form", ["class", "program"])
@pytest.mark.parametrize(
    "gone", [{"p0__weight": [0, 1]}, {"p2__weight/1": [0, 1]}], ids=["rows", "columns"]
)
def test_rows_alone_or_their_readers_alone_are_enough(gone, form):
    net = mlp()
    small = checked(net, pruned(net, **gone), X, form=form)
    assert shapes(small) == [(4, 3), (4, 4), (2, 4)]
    assert list(small.state_dict()) == list(net.state_dict())


def test_constants_are_folded_through_layers_that_read_nothing_else():
    net = mlp()
    state = pruned(net, p0__weight=[0, 1])
    state.masks["2.weight"] = torch.ones(4, 6, dtype=torch.bool)
    state.masks["2.weight"][0, 2:] = False  # row 0 reads constants alone
    assert shapes(checked(net, state, X)) == [(4, 3), (3, 4), (2, 3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_stay(dtype):
    net = mlp().to(dtype)
    small = checked(
        net,
        pruned(net, p0__weight=[0, 1]),
        X.to(dtype),
        atol=1e-12 if dtype == torch.float64 else 1e-2,
    )
    assert shapes(small)[0] == (4, 3) and {p.dtype for p in small.parameters()} == {
        dtype
    }


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 1.0])
def test_masks_without_structure(sparsity):
    net = mlp().double()
    algorithm = sf.static(sparsity, where="*", init="random", key=sf.random.key(1))
    checked(net, algorithm.init(sf.modules.params_of(net)), X.double(), atol=1e-12)


def test_masks_that_differ_by_entry_keep_a_unit_of_which_any_is_left():
    net = mlp()
    state = pruned(net, p0__weight=[0, 1])
    state.masks["0.weight"][0, 2] = True
    assert shapes(checked(net, state, X))[0] == (5, 3)


def test_0d_masks_are_those_of_dense_leaves():
    net = mlp()
    state = pruned(net)
    state.masks["0.weight"] = torch.tensor(False)  # as everywhere in the library
    assert shapes(checked(net, state, X)) == [(6, 3), (4, 6), (2, 4)]


@pytest.mark.parametrize("every", [True, False])
def test_one_unit_always_stays(every):
    net = mlp()
    gone = [
        name for name, _ in net.named_parameters() if every or name.startswith("0.")
    ]
    state = pruned(net, **{name: slice(None) for name in gone})
    assert shapes(checked(net, state, X)) == [(1, 3), (1, 1), (2, 1)]


NETS = {
    "padding refuses what is not 0": (
        nn.Conv2d(3, 4, 1),
        nn.Tanh(),
        nn.Conv2d(4, 2, 3, padding=1),
        False,
    ),
    "no padding": (nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 3), True),
    "padded by what is there": (
        nn.Conv2d(3, 4, 1),
        nn.Tanh(),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"),
        True,
    ),
    "transposed": (nn.Conv2d(3, 4, 1), nn.Tanh(), nn.ConvTranspose2d(4, 2, 3), False),
    "no bias": (nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 1, bias=False), False),
    "average pool": (nn.Conv2d(3, 4, 1), nn.AvgPool2d(2), nn.Conv2d(4, 2, 1), True),
    "average pool that counts the border": (
        nn.Conv2d(3, 4, 1),
        nn.AvgPool2d(2, padding=1),
        nn.Conv2d(4, 2, 1),
        False,
    ),
    "average pool by a number": (
        nn.Conv2d(3, 4, 1),
        nn.AvgPool2d(2, divisor_override=3),
        nn.Conv2d(4, 2, 1),
        True,
    ),
    "max pool": (
        nn.Conv2d(3, 4, 1),
        nn.MaxPool2d(3, padding=1),
        nn.Conv2d(4, 2, 1),
        True,
    ),
    "batch norm": (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), True),
    "flattened": (nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(100, 2), True),
    "grouped": (nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2), False),
}


@pytest.mark.parametrize("name", NETS)
def test_constants_that_a_later_bias_takes(name):
    *layers, goes = copy.deepcopy(NETS[name])
    net = drawn(nn.Sequential(*layers))
    small = checked(net, pruned(net, p0__weight=[1]), IMAGE.double(), atol=1e-12)
    assert shapes(small)[0][0] == (3 if goes else 4)


ZEROS = {
    **NETS,
    "hardshrink": (nn.Conv2d(3, 4, 1), nn.Hardshrink(), nn.Conv2d(4, 2, 1), True),
}


@pytest.mark.parametrize("name", sorted(ZEROS.keys() - {"batch norm", "grouped"}))
def test_units_that_are_zero_go_whatever_reads_them(name):
    net = drawn(nn.Sequential(*copy.deepcopy(ZEROS[name][:3])))
    small = checked(
        net, pruned(net, p0__weight=[1], p0__bias=[1]), IMAGE.double(), atol=1e-12
    )
    assert shapes(small)[0][0] == 3


ADDED = {
    "add": lambda net, x: net.b(net.a(x) + net.a(x).sigmoid()),
    "in place": lambda net, x: net.b(F.relu(net.a(x), inplace=True).mul_(2).add_(1)),
    "scalars": lambda net, x: net.b(2 * (1 - net.a(x)) * 0.5 + 3),
    "gate": lambda net, x: net.b(net.a(x) * net.a(x).sigmoid()),
    "without dropout": lambda net, x: net.b(F.dropout(net.a(x), 0.5, training=False)),
    "side by side": lambda net, x: net.b(
        torch.cat([net.a(x)[:, :2], net.a(x)[:, 2:]], 1)
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_constants_are_followed_through(name):
    net = Of(ADDED[name], a=nn.Linear(3, 4), b=nn.Linear(4, 2)).eval()
    assert shapes(checked(net, pruned(net, a__weight=[0, 2]), X)) == [(2, 3), (2, 2)]


@pytest.mark.deep(but=["plain-*", "two-LSTM-4-2"])
@pytest.mark.parametrize(
    ("kind", "gates", "candidate"), [(nn.LSTM, 4, 2), (nn.GRU, 3, 2), (nn.RNN, 1, 0)]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2}, {"bidirectional": True}],
    ids=["plain", "two", "both ways"],
)
def test_hidden_units_that_stay_zero_go(kind, gates, candidate, options):
    net = Of(
        lambda net, x: net.b(net.r(x)[0]),
        r=kind(3, 4, **options),
        b=nn.Linear(8 if "bid" in str(options) else 4, 2),
    )
    rows, state = [candidate * 4 + 1], pruned(net.eval())
    for name, p in net.r.named_parameters():
        state.masks[f"r.{name}"] = torch.ones_like(p, dtype=torch.bool)
        state.masks[f"r.{name}"][rows] = False
    small = checked(net, state, torch.linspace(-1, 1, 30).reshape(5, 2, 3))
    assert small.r.hidden_size == 3 and len(small.r.weight_hh_l0) == 3 * gates
    state.masks["r.bias_hh_l0"] = torch.tensor(True)  # the unit moves
    assert (
        checked(net, state, torch.linspace(-1, 1, 30).reshape(5, 2, 3)).r.hidden_size
        == 4
    )


def test_linear_layers_with_turned_weights():
    class Conv1D(nn.Module):  # as in transformers
        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.randn(inputs, outputs)),
                nn.Parameter(torch.randn(outputs)),
            )

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight)

    net = nn.Sequential(Conv1D(3, 4), nn.GELU(), Conv1D(4, 2)).eval()
    assert shapes(checked(net, pruned(net, **{"p0__weight/1": [1]}), X)) == [
        (3, 3),
        (3, 2),
    ]
    assert shapes(checked(net, pruned(net, p2__weight=[1]), X)) == [(3, 3), (3, 2)]


def test_parts_of_a_model():
    parts = (
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)),
        nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)),
    )
    net = nn.Sequential(nn.Linear(3, 3), *parts).eval()
    state = pruned(net, p0__weight=[0], p1__0__weight=[0], p2__0__weight=[1])
    assert shapes(checked(net, state, X, only="1")) == [
        (3, 3),
        (5, 3),
        (4, 5),
        (2, 4),
        (3, 2),
    ]
    assert shapes(checked(net, state, X, only=["1", "2"])) == [
        (3, 3),
        (5, 3),
        (4, 5),
        (1, 4),
        (3, 1),
    ]


class Tabled(nn.Module):
    """A network with a buffer, a tensor that is none, and one that only its trace
    knows.
    """

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.table = torch.linspace(0, 1, 2)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).relu()) * self.table + torch.tensor(
            [1.0, 2.0]
        )


@pytest.mark.parametrize("form", ["class", "program"])
def test_groups_that_were_made_before_spare_a_trace(form, monkeypatch):
    net, exports = Tabled().eval(), []
    groups = sf.shrinking.groups(net, X)

    def export(*args, real=torch.export.export, **kwargs):
        exports.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    with torch.no_grad():  # trained since
        for x in (*net.parameters(), net.norm.running_mean, net.table):
            x.add_(torch.rand(x.shape))
    net.table = net.table * 2
    state = sf.State(sf.modules.params_of(net), groups.masks({0: [1, 4]}))
    small = checked(net, state, X, form=form, groups=groups)
    assert len(exports) == (form == "program")  # with sizes that may change
    assert shapes(small) == [(4, 3), (4,), (2, 4)]
    other = checked(net, state, X, form=form)
    assert all(
        a.equal(b) for a, b in zip(small.parameters(), other.parameters(), strict=True)
    )
    assert len(exports) == (1 if form == "class" else 3)


def test_an_example_of_one_size_is_traced_once(monkeypatch):
    exports = []

    def export(*args, real=torch.export.export, **kwargs):
        exports.append(kwargs["dynamic_shapes"])
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ChannelShuffle(2), nn.Conv2d(4, 2, 3)
    ).eval()
    state = pruned(net, p0__weight=[0, 1], p0__bias=[0, 1])
    small = checked(net, state, IMAGE[:1], form="program")
    assert len(exports) == 1 and small.get_parameter("0.weight").shape == (2, 3, 3, 3)
    checked(net, state, IMAGE, form="program")
    assert len(exports) == 3


def test_buffers_of_the_copy_may_be_given():
    net = drawn(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    ).float()
    state, buffers = (
        pruned(net, p0__weight=[1]),
        {name: b + 1 for name, b in net.named_buffers()},
    )
    small, other = sf.shrink(net, state, X, buffers=buffers), sf.shrink(net, state, X)
    torch.testing.assert_close(
        small(X), sf.modules.call(net, state, X, buffers=buffers), atol=1e-6, rtol=1e-6
    )
    assert not torch.allclose(small(X), other(X)) and small[1].num_features == 3
    with pytest.raises(
        ValueError, match="expected the buffers of the Sequential, but missing are"
    ):
        sf.shrink(net, state, X, buffers={})


def test_nothing_given_is_changed_and_the_copy_is_a_plain_module():
    net = drawn(
        nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
        )
    ).float()
    net[3].weight.requires_grad_(False)
    state = pruned(net, p0__weight=[0], p1__weight=[0], p1__bias=[0])
    before, masked, rng = (
        copy.deepcopy(net.state_dict()),
        copy.deepcopy(state),
        torch.get_rng_state(),
    )
    small = sf.shrink(net, state, IMAGE)
    assert torch.equal(rng, torch.get_rng_state()) and sf.checkpoint.tree_equal(
        masked, state
    )
    assert all(torch.equal(before[name], x) for name, x in net.state_dict().items())
    assert (
        not small.training
        and not small[3].weight.requires_grad
        and small[3].bias.requires_grad
    )
    assert not {p.untyped_storage().data_ptr() for p in small.parameters()} & {
        p.untyped_storage().data_ptr() for p in net.parameters()
    }
    assert torch.equal(pickle.loads(pickle.dumps(small))(IMAGE), small(IMAGE))
    small.train()(IMAGE).sum().backward()
    assert small[0].weight.grad.shape == (3, 3, 1, 1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
    ).double()


A = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(2))


def trained(model, optimizer, steps, sparse=None):
    for step in range(steps):
        nn.functional.cross_entropy(model(A), Y).backward()
        if sparse is not None:
            sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        if sparse is not None:
            sparse.after_step(step)


def attached(model, optimizer):
    pattern = sf.shrinking.groups(model.eval(), A).pattern()
    return sf.attach(
        sf.static(0.5, pattern=pattern, init="magnitude"), model, optimizer
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_of_the_smaller_model_are_those_of_the_masked_one(kind):
    options = {"lr": 1e-2} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    model = network()
    optimizer = kind(model.parameters(), **options)
    sparse = attached(model, optimizer)
    trained(model, optimizer, 5, sparse)
    made = sf.shrinking.smaller(model, sparse.state, A)
    after = kind(made.module.parameters(), **options)
    after.load_state_dict(sf.shrinking.carry_optimizer(optimizer, model, made))
    for step in range(5, 10):  # both go on
        for part, its in ((model, optimizer), (made.module, after)):
            nn.functional.cross_entropy(part(A), Y).backward()
            if part is model:
                sparse.before_step()
            its.step()
            its.zero_grad()
            if part is model:
                sparse.after_step(step)
    assert made.form == "class" and [
        layer.out_features for layer in made.module[::2]
    ] == [4, 3, 2]
    torch.testing.assert_close(made.module(A), model(A), rtol=1e-12, atol=1e-12)


def test_what_attach_saves_loads_beside_the_smaller_model():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    sparse = attached(model, optimizer)
    trained(model, optimizer, 2, sparse)
    made = sf.shrinking.smaller(model, sparse.state, A)
    saved = sf.shrinking.carry(sparse.state_dict(), made)
    assert {
        k: tuple(v.shape)
        for k, v in saved["tensors"].items()
        if k.startswith("masks.") and v.ndim
    } == {
        "masks.0.weight": (4, 4),
        "masks.0.bias": (4,),
        "masks.2.weight": (3, 4),
        "masks.2.bias": (3,),
        "masks.4.weight": (2, 3),
    }


def test_a_state_gets_the_params_of_the_smaller_model():
    model = nn.Sequential(nn.Linear(3, 2), nn.Sigmoid(), nn.Linear(2, 2)).eval()
    masks = {name: torch.tensor(True) for name, _ in model.named_parameters()}
    masks["0.weight"] = torch.tensor([[True], [False]]).expand(2, 3)
    state = sf.State(
        sf.modules.params_of(model), masks, {"average": sf.modules.params_of(model)}
    )
    made = sf.shrinking.smaller(model, state, torch.ones(1, 3))
    carried = sf.shrinking.carry(state, made)
    assert torch.equal(carried.params["2.bias"], made.module[2].bias)
    # it took in the constant
    assert not torch.equal(carried.params["2.bias"], state.params["2.bias"])
    assert (
        carried.scores["average"]["0.weight"].shape
        == carried.masks["0.weight"].shape
        == (1, 3)
    )
    assert carried.masks["2.bias"].ndim == 0 and state.params["0.weight"].shape == (
        2,
        3,
    )


def test_other_shapes_and_other_parameters_are_refused():
    model = network().eval()
    made = sf.shrinking.smaller(
        model, sf.static(0.5, where="0.weight").init(sf.modules.params_of(model)), A
    )
    with pytest.raises(
        ValueError,
        match=r"carry: expected a tensor of the old shape \(8, 4\) at 'm.0.weight', "
        r"got \(3,\)",
    ):
        sf.shrinking.carry({"m": {"0.weight": torch.ones(3)}}, made)
    pattern = sf.shrinking.groups(model, A).pattern()
    state = sf.methods.taylor(1, pattern=pattern).init(sf.modules.params_of(model))
    text = (
        r"of the old shape \(8, 4\) at 'scores.score.sum.0.weight', got \(8,\); a "
        r"score of tied units is not cut: start"
    )
    with pytest.raises(ValueError, match=text):
        sf.shrinking.carry(state, made)
    other = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    other.param_groups[0]["params"][0].sum().backward()
    other.step()
    with pytest.raises(
        ValueError, match=r"its parameter 0 of shape \(2,\) is none of them"
    ):
        sf.shrinking.carry_optimizer(other, model, made)
    with pytest.raises(
        ValueError,
        match=r"at 'scores.0.weight:1', got \(4,\); a score of tied units is not cut",
    ):
        sf.shrinking.carry({"scores": {"0.weight:1": torch.ones(4)}}, made)
    with pytest.raises(ValueError, match=r"at '0.bias', got \(3,\)$"):
        sf.shrinking.carry({"0.bias": torch.ones(3)}, made)


def test_the_package_says_what_each_of_its_files_is_for():
    package = sf.shrinking
    files = [part.name for part in pkgutil.iter_modules(package.__path__)]
    assert sorted(re.findall(r"`(\w+)`", package.__doc__)) == sorted(files)
