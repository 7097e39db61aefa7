"""Layers are removed: lists become shorter where the class allows it, else the
program."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sparsefn as sf
from tests.shrinking.residual_nets import (
    IMAGE,
    NETS,
    TOKENS,
    Conv,
    Mlp,
    X,
    check_equal,
    convnet,
    mlp,
    nested,
    removed,
    transformer,
)
from tests.shrinking.small import Of

V = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    ("build", "x", "gone"),
    [(mlp, X, [0, 2]), (mlp, X, [1, 2, 3]), (convnet, IMAGE, [1]), (nested, X, [1])],
)
def test_lists_become_shorter(build, x, gone):
    net = build()
    made = removed(net, x, gone)
    assert made.form == "class" and type(made.module) is nn.Sequential
    assert len(made.module) == len(net) - len(gone) and made.stays == made.notes == ()
    assert [*made.module._modules] == [str(i) for i in range(len(made.module))]
    assert len(net) == len(build())  # the model stays


def test_a_layer_of_two_branches_goes_as_an_item():
    made = removed(transformer(), TOKENS, [1], by="module")
    assert made.form == "class" and len(made.module) == 4
    assert made.names["2.norm1.weight"] == "1.norm1.weight"
    assert made.names["1.norm1.weight"] is None and "0.norm1.weight" not in made.names


def test_one_branch_of_a_block_goes_from_the_program():
    net = transformer()
    made = removed(net, TOKENS, [0, 3])
    assert made.form == "program"
    names = [name for name, _ in made.module.named_parameters()]
    assert "0.mlp.0.weight" in names and "0.qkv.weight" not in names
    assert made.notes == ("pruned branches are no whole items of a list, in '0', '1'",)
    assert made.names["0.qkv.weight"] is None
    with torch.no_grad():
        more = torch.cat([TOKENS, TOKENS])
        assert torch.equal(made.module(more)[:2], made.module(more)[2:])


def test_one_branch_of_a_block_in_a_module_of_the_class():
    net = transformer()
    layers = sf.shrinking.layers(net, TOKENS)
    state = sf.State(sf.modules.params_of(net), layers.masks([0]))
    made = sf.shrinking.smaller(net, state, TOKENS, form="class", groups=layers)
    assert made.form == "class"
    check_equal(net, state, TOKENS, made.module)


def test_the_item_of_no_list_becomes_an_identity():
    made = removed(nested(), X, [0])
    assert isinstance(made.module[1].inner, nn.Identity) and made.form == "class"
    assert made.names["1.inner.up.bias"] is None


@pytest.mark.parametrize("name", NETS)
def test_as_a_program(name):
    build, x = NETS[name]
    net = build()
    layers = sf.shrinking.layers(net, x)
    state = sf.State(sf.modules.params_of(net), layers.masks([1]))
    made = sf.shrinking.smaller(net, state, x, form="program")
    assert made.form == "program"
    check_equal(net, state, x, made.module)
    assert sum(p.numel() for p in made.module.parameters()) == layers.cost([1])


def test_all_layers_pruned_by_hand_leave_the_rest():
    net = mlp(3)
    layers = sf.shrinking.layers(net, X)
    masks = {
        name: torch.full_like(mask, name.split(".")[0] in "04")
        for name, mask in layers.masks([0]).items()
    }
    small = sf.shrink(net, sf.State(sf.modules.params_of(net), masks), X)
    assert len(small) == 2


def test_a_layer_that_is_pruned_in_part_stays():
    net = mlp(3)
    masks = sf.shrinking.layers(net, X).masks([1])
    masks["2.down.bias"] = torch.tensor([True, False, False, False])
    state = sf.State(sf.modules.params_of(net), masks)
    small = sf.shrinking.smaller(net, state, X).module
    assert len(small) == 5
    check_equal(net, state, X, small)


class Numbered(nn.Module):
    """Items that keep their place, and a list that is read by number."""

    def __init__(self, count=4):
        super().__init__()
        self.parts = nn.ModuleList([Item(i) for i in range(count)])
        self.count, self.width = count, 4

    def forward(self, x):
        seen = []
        for i in range(self.count):
            x = self.parts[i](x, seen)
        return x


class Item(Mlp):
    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x, seen):
        assert len(seen) == self.place  # as the index into a cache
        seen.append(self.place)
        return super().forward(x)


class Flat(nn.Module):
    """Items without a forward of their own, which the module around adds up."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Module() for _ in range(3)])
        for part in self.parts:
            part.norm, part.a, part.b = (
                nn.LayerNorm(4),
                nn.Linear(4, 6),
                nn.Linear(6, 4),
            )

    def forward(self, x):
        for part in self.parts:
            x = x + 0.5 * part.b(part.a(part.norm(x)).relu())
        return x


def test_items_without_a_forward():
    made = removed(Flat().eval(), V, [1])
    assert made.form == "class" and len(made.module.parts) == 2


class Unread(nn.Module):
    """Two layers, and nothing reads the sum of the second."""

    def __init__(self):
        super().__init__()
        self.first = Mlp()
        self.second = Mlp()

    def forward(self, x):
        x = self.first(x)
        self.second(x)
        return x


@pytest.mark.parametrize(("gone", "left"), [(0, "second"), (1, "first")])
def test_a_layer_that_nothing_reads_stays_and_goes_as_any_other(gone, left):
    net = Unread().eval()
    layers = sf.shrinking.layers(net, V)
    state = sf.State(sf.modules.params_of(net), layers.masks([gone]))
    small = sf.shrinking.smaller(net, state, V, groups=layers, form="program").module
    assert {name.split(".")[0] for name, _ in small.named_parameters()} == {left}
    assert sum(p.numel() for p in small.parameters()) == layers.cost([gone]) == 76
    flops = sf.shrinking.weights(small, V).priced("flops", None, False, None)
    assert flops.cost(list(flops.sizes.values())) == layers.cost([gone], "flops")
    torch.testing.assert_close(small(V), sf.modules.bake(net, state)(V))


def add(fn, **parts):
    return Of(lambda net, x: x + fn(net, x), **parts)


def lin(inputs=8, outputs=8):
    return nn.Linear(inputs, outputs)


def _with_a_head(net, x):
    inner = net.f(x)
    net.head(inner).mean()
    return net.g(inner)


# Each computes what nothing reads: weights, states, a half of the channels, a mean.
UNREAD = {
    "attention": lambda: add(
        lambda net, x: net.f(x, x, x)[0], f=nn.MultiheadAttention(8, 2)
    ),
    "gru": lambda: add(lambda net, x: net.f(x)[0], f=nn.GRU(8, 8)),
    "lstm": lambda: add(lambda net, x: net.f(x)[0], f=nn.LSTM(8, 8)),
    "out of a gru": lambda: add(
        lambda net, x: net.g(net.f(x)[0]), f=nn.GRU(8, 8), g=lin()
    ),
    "chunk": lambda: add(
        lambda net, x: net.g(net.f(x).chunk(2, -1)[0]), f=lin(8, 16), g=lin()
    ),
    "head": lambda: add(_with_a_head, f=lin(), head=lin(8, 2), g=lin()),
    "mean": lambda: add(lambda net, x: (x.mean(-1).exp(), net.f(x))[1], f=lin()),
}


@pytest.mark.parametrize("by", ["branch", "module"])
@pytest.mark.parametrize("name", UNREAD)
def test_what_nothing_reads_goes_with_the_branch_that_computes_it(name, by):
    blocks = [UNREAD[name]() for _ in range(3)]
    # in float64 from the start, as a program keeps the dtype of the first state
    net = nn.Sequential(*blocks, lin(8, 3)).eval().double()
    x = TOKENS.double()
    layers = sf.shrinking.layers(net, x, by=by)
    for i, (block, layer) in enumerate(zip(blocks, layers, strict=True)):
        assert {*layer.leaves} == {name for name, _ in block.named_parameters(f"{i}")}
    state = sf.State(sf.modules.params_of(net), layers.masks([1]))
    made = sf.shrinking.smaller(net, state, x, groups=layers)
    assert made.form == "class" and len(made.module) == 3
    assert sum(p.numel() for p in made.module.parameters()) == layers.cost([1])
    flops = sf.shrinking.weights(made.module, x).priced("flops", None, False, None)
    assert flops.cost(list(flops.sizes.values())) == layers.cost([1], "flops")
    with torch.no_grad():
        wanted = sf.modules.call(net, state, x)
        torch.testing.assert_close(made.module(x), wanted, rtol=1e-10, atol=1e-10)


def test_what_nothing_reads_of_two_branches_goes_with_the_first():
    def forward(net, x):
        f = net.f(x)
        g = net.g(x)
        (f * g).mean()
        return x + f + g

    net = Of(forward, f=lin(4, 4), g=lin(4, 4)).eval()
    layers = sf.shrinking.layers(net, V)
    assert [layer.leaves[0] for layer in layers] == ["f.weight", "g.weight"]
    masks = {name: mask & False for name, mask in layers.masks([]).items()}
    small = sf.shrink(net, sf.State(sf.modules.params_of(net), masks), V)
    assert not [*small.parameters()] and torch.equal(small(V), V)


class Cut(nn.Module):
    """A norm outside of the list that a branch is made of."""

    def __init__(self):
        super().__init__()
        self.norm, self.f = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.other = Mlp()

    def forward(self, x):
        return self.other(x + self.f(self.norm(x)))


def test_nothing_of_a_branch_is_left():
    made = removed(Cut().eval(), V, [0])
    assert made.form == "program" and "norm.weight" in made.names


def test_places_and_lengths_follow():
    net = Numbered().eval()
    small = removed(net, V, [0, 2]).module
    assert [part.place for part in small.parts] == [0, 1]
    assert small.count == 2 and (net.count, net.parts[3].place) == (4, 3)


class Alternating(nn.Module):
    """A number of each item that is its place and does something else."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Scaled(i) for i in range(3)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Scaled(Mlp):
    def __init__(self, power):
        super().__init__()
        self.power = power

    def forward(self, x):
        return x + self.down(self.up(x).relu()) * 2**self.power


def test_numbers_that_outputs_need_stay():
    small = removed(Alternating().eval(), V, [0]).module
    assert [part.power for part in small.parts] == [1, 2]


def test_an_encoder_of_torch():
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
    net = nn.TransformerEncoder(encoder, 3, enable_nested_tensor=False).eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    small = removed(net, TOKENS, [0, 2], by="module").module
    assert (len(small.layers), small.num_layers) == (1, 1)


class TwoLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList([Mlp(), Mlp()])
        self.second = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x):
        for part in (*self.first, *self.second):
            x = part(x)
        return x


def test_all_items_of_a_list_go():
    made = removed(TwoLists().eval(), V, [0, 1, 2])
    assert made.form == "class"
    assert (len(made.module.first), len(made.module.second)) == (0, 1)
    assert made.names["second.1.up.bias"] == "second.0.up.bias"


class Flattened(Mlp):
    """As OPT does: another shape before the sum, and the old one after it."""

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return super().forward(rows).view(x.shape)


def test_items_that_are_left_with_shapes_alone_go():
    net = nn.Sequential(Flattened(), Flattened(), nn.Linear(4, 2)).eval()
    made = removed(net, V.reshape(1, 3, 4), [0])
    assert made.form == "class" and len(made.module) == 2


def test_names_of_a_list_by_words_stay():
    parts = {"first": nn.Linear(3, 4), "a": Mlp(), "b": Mlp(), "last": nn.Linear(4, 2)}
    net = nn.Sequential()
    for name, part in parts.items():
        net.add_module(name, part)
    made = removed(net.eval(), X, [0])
    assert [*made.module._modules] == ["first", "b", "last"]
    assert {*made.names.values()} == {None}


def test_lists_inside_lists():
    net = nn.Sequential(nn.Sequential(Mlp(), Mlp()), nn.Sequential(Mlp(), Mlp()))
    made = removed(net.eval(), V, [0, 2, 3])
    assert len(made.module) == 1 and len(made.module[0]) == 1
    assert made.names["0.1.up.bias"] == "0.0.up.bias"


def test_widths_go_too():
    net = mlp(3)
    layers = sf.shrinking.layers(net, X)
    masks = layers.masks([1])
    masks["3.up.weight"][:4] = False
    masks["3.up.bias"][:4] = False
    state = sf.State(sf.modules.params_of(net), masks)
    made = sf.shrinking.smaller(net, state, X)
    assert made.module[2].up.weight.shape == (4, 4)
    assert made.kept["3.up.weight"].indices[0].tolist() == [4, 5, 6, 7]
    assert "2.up.weight" not in made.kept
    check_equal(net, state, X, made.module)


def test_a_submodule_alone():
    net = nn.Sequential(mlp(3), nn.Tanh()).eval()
    layers = sf.shrinking.layers(net, X)
    state = sf.State(sf.modules.params_of(net), layers.masks([0]))
    made = sf.shrinking.smaller(net, state, X, only="0")
    assert len(made.module[0]) == 4 and made.names["0.2.up.bias"] == "0.1.up.bias"
    assert made.names["0.1.up.bias"] is None
    check_equal(net, state, X, made.module)


def test_training_goes_on():
    net = mlp(3)
    layers = sf.shrinking.layers(net, X)
    optimizer = torch.optim.Adam(net.parameters())
    net(X).sum().backward()
    optimizer.step()
    params = sf.modules.params_of(net)
    algorithm = sf.with_optimizer(
        sf.one_shot(1 / 3, pattern=layers.pattern()), sf.optimizers.adam(0.1)
    )
    state = algorithm.init(params)
    grads = {name: torch.ones_like(x) for name, x in params.items()}
    state = algorithm.update(state, grads, 0)
    made = sf.shrinking.smaller(net, state, X, groups=layers)
    (gone,) = (~layers.alive(state.masks)).nonzero().flatten().tolist()
    carried = sf.shrinking.carry(state, made)
    own = sf.modules.params_of(made.module)
    assert list(carried.params) == list(carried.masks) == list(own)
    for old, new in made.names.items():
        if new is not None:
            assert torch.equal(carried.masks[new], state.masks[old])
    after = torch.optim.Adam(made.module.parameters())
    after.load_state_dict(sf.shrinking.carry_optimizer(optimizer, net, made))
    old = dict(net.named_parameters())
    new_names = {made.names.get(name, name): name for name in old}
    for name, x in made.module.named_parameters():
        wanted = optimizer.state[old[new_names[name]]]["exp_avg"]
        assert torch.equal(after.state[x]["exp_avg"], wanted)
    assert layers[gone].leaves[0] not in made.kept
    algorithm.update(carried, {name: torch.ones_like(x) for name, x in own.items()}, 1)


def test_moments_by_path_are_carried():
    net = mlp(3)
    masks = sf.shrinking.layers(net, X).masks([0])
    state = sf.State(sf.modules.params_of(net), masks)
    made = sf.shrinking.smaller(net, state, X)
    tree = {"average": state.params, "step": 3, "rows": [state.params["0.bias"]]}
    carried = sf.shrinking.carry(tree, made)
    assert carried["step"] == 3 and len(carried["rows"]) == 1
    assert torch.equal(carried["average"]["1.up.bias"], state.params["2.up.bias"])
    assert "3.up.bias" not in carried["average"]


def test_groups_of_another_type_are_refused():
    net = mlp(2)
    state = sf.dense().init(sf.modules.params_of(net))
    with pytest.raises(TypeError, match="expected groups as sf.shrinking.groups makes"):
        sf.shrink(net, state, X, groups=[0])
    layers = sf.shrinking.layers(net, X)
    with pytest.raises(ValueError, match="expected groups of the whole module"):
        sf.shrink(net, state, X, groups=layers, only="1")
    with pytest.raises(ValueError, match="expected the groups of an example of these"):
        sf.shrink(net, state, X[:2], groups=layers)


def test_a_convnet_in_half_precision():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), Conv(), Conv()).eval().bfloat16()
    layers = sf.shrinking.layers(net, IMAGE.bfloat16())
    state = sf.State(sf.modules.params_of(net), layers.masks([0]))
    assert len(sf.shrink(net, state, IMAGE.bfloat16())) == 2


class Mixed(nn.Module):
    """Blocks of kinds that its config names, and heads as many as there are blocks."""

    def __init__(self):
        super().__init__()
        kinds = ["tanh", "relu", "tanh", "relu"]
        self.config = SimpleNamespace(kinds=kinds, heads=4)
        self.layers = nn.ModuleList([Kinded() for _ in kinds])

    def forward(self, x):
        for layer, kind in zip(self.layers, self.config.kinds, strict=True):
            x = layer(x, kind)
        return x * self.config.heads


class Kinded(Mlp):
    def forward(self, x, kind):
        hidden = getattr(self.up(x), kind)()
        return x + self.down(hidden)


def test_lists_of_configs_lose_the_entries_of_layers_where_outputs_need_it():
    net = Mixed().eval()
    made = removed(net, V, [1])
    assert made.form == "class" and len(made.module.layers) == 3
    assert made.module.config.kinds == ["tanh", "tanh", "relu"]
    assert made.module.config.heads == 4
    assert net.config.kinds == ["tanh", "relu", "tanh", "relu"]


class Told(nn.Module):
    """As many blocks as its config says."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([Mlp() for _ in range(config.depth)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_numbers_and_lists_of_configs_that_are_as_long_by_chance_stay():
    config = SimpleNamespace(depth=3, window=3, tokens=[5, 6, 7])
    made = removed(Told(config).eval(), V, [0])
    assert made.form == "class" and made.notes == ()
    left = {"depth": 2, "window": 3, "tokens": [5, 6, 7]}
    assert vars(made.module.config) == left


class Kinds:
    """A config that cannot be made of other kinds than it has layers."""

    def __init__(self, depth, kinds, tokens):
        if len(kinds) != depth:
            raise ValueError(f"expected {depth} kinds, got {len(kinds)}")
        self.depth = depth
        self.kinds = kinds
        self.tokens = tokens

    def to_dict(self):
        return dict(vars(self))

    @classmethod
    def from_dict(cls, given):
        return cls(**given)


def test_configs_can_be_made_again():
    config = Kinds(3, ["a", "b", "c"], [5, 6, 7])
    made = removed(Told(config).eval(), V, [1])
    assert made.form == "class" and made.notes == ()
    left = {"depth": 2, "kinds": ["a", "c"], "tokens": [5, 6, 7]}
    assert made.module.config.to_dict() == left


class Fixed(nn.Module):
    """Code that needs every item of its list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mlp() for _ in range(3)])

    def forward(self, x):
        x = self.layers[0](x)
        x = self.layers[1](x)
        return self.layers[2](x)


def test_the_note_says_that_whole_items_cannot_go():
    made = removed(Fixed().eval(), V, [1])
    assert made.form == "program"
    assert made.notes == (
        "a Fixed whose lists lose 'layers.1' has other outputs than the masked one, or "
        "does not run",
    )


class Stages(nn.Module):
    """Stages of which only those after the first have a layer before their blocks."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(depths=[1, 1])
        self.stages = nn.ModuleList([Stage(False), Stage(True)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Stage(nn.Module):
    def __init__(self, begins):
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(4, 4)] if begins else [])
        self.blocks = nn.ModuleList([Mlp()])

    def forward(self, x):
        for layer in (*self.first, *self.blocks):
            x = layer(x)
        return x


def test_a_stage_that_goes_has_other_modules_than_the_next():
    made = removed(Stages().eval(), V, [0])
    assert made.form == "class" and len(made.module.stages) == 1
    (note,) = made.notes
    assert note.startswith("the config of the Stages keeps its numbers: ")
    assert made.module.config.depths == [1, 1]
