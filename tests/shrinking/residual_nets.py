"""Residual networks, and what a smaller one has to give."""

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import sparsefn as sf
from sparsefn.shrinking.residuals import without_branches
from sparsefn.shrinking.trace import with_tensors
from sparsefn.shrinking.values import tensors_of
from tests.shrinking.compare import check_outputs, outputs
from tests.shrinking.small import drawn

X = torch.linspace(-1, 1, 15).reshape(5, 3)
IMAGE = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8).sin()
WORDS = torch.tensor([[0, 1, 2], [2, 1, 0]])
TOKENS = torch.linspace(-2, 2, 2 * 5 * 8).reshape(2, 5, 8).cos()


class Mlp(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self, width=4, inner=8):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Conv(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + x), as ResNets write it; with a stride a sum
    of two branches.
    """

    def __init__(self, inputs=4, outputs=4, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = None
        if stride > 1:
            self.short = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x):
        out = F.relu_(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x if self.short is None else self.short(x)
        return F.relu(out) if self.short is not None else out


class Block(nn.Module):
    """Attention and MLP behind norms."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x):
        b, n, _ = x.shape
        rows = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1)
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, -1))
        return x + self.mlp(self.norm2(x))


class Outer(nn.Module):
    """x + b(inner(a(x))), and inner is residual."""

    def __init__(self):
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(4, 4), Mlp(), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.b(self.inner(self.a(x)))


def mlp(count=4):
    blocks = [Mlp() for _ in range(count)]
    return nn.Sequential(nn.Linear(3, 4), *blocks, nn.Linear(4, 2)).eval()


def convnet():
    blocks = [Conv(), Conv(), Conv(4, 8, 2), Conv(8, 8)]
    head = [nn.Flatten(), nn.Linear(128, 2)]
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *blocks, *head)
    return drawn(net).float()


def transformer():
    blocks = [Block() for _ in range(3)]
    return nn.Sequential(*blocks, nn.LayerNorm(8), nn.Linear(8, 2)).eval()


def nested():
    return nn.Sequential(nn.Linear(3, 4), Outer(), Outer(), nn.Linear(4, 2)).eval()


NETS = {
    "mlp": (mlp, X),
    "convnet": (convnet, IMAGE),
    "transformer": (transformer, TOKENS),
    "nested": (nested, X),
}


def removed(net, x, gone, **options):
    """What shrink makes without some layers, once its outputs are seen to be those of
    the masked model in float64.
    """
    layers = sf.shrinking.layers(net, x, **options)
    state = sf.State(sf.modules.params_of(net), layers.masks(gone))
    made = sf.shrinking.smaller(net, state, x, groups=layers)
    check_equal(net, state, x, made.module)
    count = sum(p.numel() for p in made.module.parameters())
    assert count == layers.cost(gone)
    return made


def check_equal(net, state, x, small):
    with torch.no_grad():
        given = x.double() if x.is_floating_point() else x
        wanted = sf.modules.bake(net, state).double()(given)
        got = small.double()(given)
        small.float()
        whole = net.double()(given)
        net.float()
    size = wanted.abs().max()
    assert (got - wanted).abs().max() <= 1e-10 * size
    assert (whole - wanted).abs().max() > 1e-6 * size  # the masks change something


def random_layers(net, seed, widths=None):
    """The layers of a network with random weights, and some of their numbers: of the
    layers that go, and of the layers inside these. Nothing where none can go.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter)
    try:
        layers = sf.shrinking.layers(net, WORDS, widths=widths)
    except ValueError as error:
        assert "got none of such layers" in str(error)
        return None
    numbers = range(len(layers))
    draw = torch.Generator().manual_seed(seed)
    goes = torch.rand(len(layers), generator=draw) < 0.5
    gone = {i for i in numbers if goes[i]}
    inner = {i for i in numbers if layers[i].inside & gone}
    if not gone or len(gone | inner) == len(layers):
        return None
    return layers, gone, inner


def check_without_layers(net, seed, form=None):
    """A network without random layers gives the outputs of the masked one, and costs
    what its layers say.
    """
    drawn = random_layers(net, seed)
    if drawn is None:
        return
    layers, gone, inner = drawn
    state = sf.State(sf.modules.params_of(net), layers.masks(gone))
    alive = layers.alive(state.masks).tolist()
    assert alive == [i not in gone | inner for i in range(len(layers))]
    check_branches(net, state, layers, gone)
    made = sf.shrinking.smaller(net, state, WORDS, groups=layers, form=form)
    check_equal(net, state, WORDS, made.module)
    params = sum(p.numel() for p in made.module.parameters())
    assert params == layers.cost(gone)
    flops = sf.shrinking.weights(made.module, WORDS).priced("flops", None, False, None)
    assert flops.cost(list(flops.sizes.values())) == layers.cost(gone, "flops")


def check_branches(net, state, layers, gone):
    """Masks of layers make their branches 0, and change nothing else. Parameters that
    the outputs then do not need are gone.
    """
    branches = [one for i in sorted(gone) for one in layers[i].branches]
    whole = layers.analysis.graph
    without = without_branches(whole, branches)
    held = {id(x) for x in without.parameters()}
    assert held.isdisjoint(_needed(whole) - _needed(without))
    wanted = outputs(without, (WORDS,))
    check_outputs(wanted, sf.modules.bake(net, state), (WORDS,), "the masked model")


def _needed(program):
    made = with_tensors(program)
    made.graph.eliminate_dead_code()
    held = tensors_of(made)
    return {id(held[node.target]) for node in made.graph.find_nodes(op="get_attr")}


@st.composite
def residual_nets(draw, only=()):
    """A trunk of residual blocks of several kinds, or of these, some of them inside
    others, and tensors that have several names.
    """
    ties = draw(st.sets(st.sampled_from(["head", "blocks", "buffer"])))
    kinds = draw(st.lists(st.sampled_from([*(only or _KINDS)]), min_size=2, max_size=5))
    inside = draw(st.lists(st.booleans(), min_size=len(kinds), max_size=len(kinds)))
    parts = []
    for kind, wrapped in zip(kinds, inside, strict=True):
        part = Of(kind)
        parts.append(Wrapped(part) if wrapped else part)
    head = nn.Linear(4, 3, bias=False)
    net = nn.Sequential(nn.Embedding(3, 4), *parts, Shift(), Shift(), head).eval()
    if "head" in ties:
        head.weight = net[0].weight
    if "blocks" in ties:
        first, *_, last = (
            part.part if wrapped else part
            for part, wrapped in zip(parts, inside, strict=True)
        )
        last.up.weight = first.up.weight
    if "buffer" in ties:
        net[-2].shift = net[-3].shift
    return net


class Shift(nn.Module):
    """x + shift, a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, 4))

    def forward(self, x):
        return x + self.shift


_KINDS = {
    "plain": lambda net, x: x + net.down(net.up(x).tanh()),
    "minus": lambda net, x: x - net.down(net.up(x).relu()),
    "behind a norm": lambda net, x: net.down(net.up(net.norm(x)).relu()) + x,
    "before a norm": lambda net, x: net.norm(x + net.down(net.up(x).relu())),
    "gated": lambda net, x: x + x.sigmoid() * net.down(net.up(x).relu()),
    "scaled": lambda net, x: x + net.gate * net.down(net.up(x)),
    "reversed": lambda net, x: net.down(net.up(x).relu()) - x,
    "twice x": lambda net, x: torch.add(net.down(net.up(x).relu()), x, alpha=2),
    "not zero": lambda net, x: x + net.down(net.up(x).relu()).sigmoid(),
    "half": lambda net, x: x + _half(net.down(net.up(x).relu()), x),
    "read outside": lambda net, x: _read_outside(x, net.up(x), net.down),
    "beside": lambda net, x: x + net.down(net.up(x)) + net.down2(net.up2(x)),
    "two": lambda net, x: _mixed(net, x + net.down(net.up(x).relu())),
    "attention": lambda net, x: x + _attention(net, net.down(net.up(x).tanh())),
    "recurrent": lambda net, x: x + _recurrent(net, net.down(net.up(x).tanh())),
    "not read": lambda net, x: x + _not_read(net, net.up(x), net.up2(x)),
    "none": lambda net, x: net.down(net.up(x)),
}


def _attention(net, x):
    return net.attention(x, x, x)[0]  # with the mean of the attention weights


def _recurrent(net, x):
    return net.gru(x, x.new_zeros(1, len(x), 4))[0]  # with the last state


def _not_read(net, inner, other):
    net.down2(other * inner).mean()
    return net.down(inner.tanh())


def _mixed(net, x):
    return x + net.down2(net.up2(x).tanh())


def _half(a, b):
    return torch.cat([a[..., :2] - a[..., 2:], b[..., 2:]], -1)


def _read_outside(x, inner, down):
    return (x + down(inner.relu())) * inner.mean()


class Of(nn.Module):
    """A block of one kind, with the layers that it reads."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        if kind in ("two", "beside", "not read"):
            self.up2 = nn.Linear(4, 6)
            self.down2 = nn.Linear(6, 4)
        if "norm" in kind:
            self.norm = nn.LayerNorm(4)
        if kind == "attention":
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        if kind == "recurrent":
            self.gru = nn.GRU(4, 4, batch_first=True)
        if kind == "scaled":
            self.gate = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return _KINDS[self.kind](self, x)

    def extra_repr(self):
        return self.kind


class Wrapped(nn.Module):
    """x + out(part(x)), around another block."""

    def __init__(self, part):
        super().__init__()
        self.part, self.out = part, nn.Linear(4, 4)

    def forward(self, x):
        return x + self.out(self.part(x).tanh())
