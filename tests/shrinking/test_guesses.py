"""Numbers that modules keep about sizes, and what becomes of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.classes import drawn, same, small_of


def tokens():
    return torch.randn(2, 5, 6)


class Heads(nn.Module):
    """As many heads as entries of a head, both kept as numbers."""

    def __init__(self, width=6, heads=4, size=4):
        super().__init__()
        self.heads, self.size, self.scale = heads, size, size**-0.5
        self.qkv, self.out = (
            nn.Linear(width, 3 * heads * size),
            nn.Linear(heads * size, width),
        )
        self.stride = 4  # of something else

    def forward(self, x):
        q, k, v = (
            self.qkv(x).view(2, -1, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        )
        y = (q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(2, -1, self.heads * self.size)) + x


@pytest.mark.parametrize(("prefer", "heads", "size"), [(True, 2, 4), (False, 4, 2)])
def test_of_two_equal_numbers_the_one_that_works_changes(prefer, heads, size):
    model = drawn(nn.Sequential(Heads(), Heads()))
    made, whole, runs = same(model, tokens(), gone=halves(model, prefer))
    for layer in made.model:
        assert (layer.heads, layer.size, layer.stride) == (heads, size, 4)
    torch.testing.assert_close(made.model(tokens()).shape, whole(tokens()).shape)
    assert len(runs) < 20


def halves(model, prefer):
    # Half of the heads, or half of the entries of each.
    from sparsefn.shrinking.groups import groups

    found = groups(model, tokens())
    if prefer:
        return {i: range(2) for i, g in enumerate(found) if g.preferred}
    return {i: range(2) for i, g in enumerate(found) if not g.preferred}


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes, self.shape = [6, 4, 6], (2, 3)
        self.into, self.out = nn.Linear(6, 16), nn.Linear(6, 6)
        self.gate = nn.Linear(4, 6)

    def forward(self, x):
        a, b, c = self.into(x).split(self.sizes, -1)
        y = (a * c).unflatten(-1, self.shape).tanh().flatten(-2) * self.gate(b)
        return self.out(y)


def test_numbers_in_lists_and_tuples():
    model = drawn(Split())
    small, whole = small_of(model, tokens())
    assert type(small.sizes) is list and type(small.shape) is tuple
    assert (
        sum(small.sizes) == small.into.out_features < 16
        and small.sizes[0] == small.out.in_features
    )
    torch.testing.assert_close(small(tokens()).shape, whole(tokens()).shape)
    assert model.sizes == [6, 4, 6]


def test_modules_of_torch_that_keep_shapes():
    model = drawn(
        nn.Sequential(
            nn.Linear(6, 12),
            nn.Unflatten(-1, (3, 4)),
            nn.Tanh(),
            nn.Flatten(-2),
            nn.Linear(12, 2),
        )
    )
    small, _ = small_of(model, tokens())
    assert small[1].unflattened_size in [(2, 4), (3, 2), (1, 4)]


class Tripled(nn.Module):
    """A number of which only a multiple is a size."""

    def __init__(self):
        super().__init__()
        self.width, self.into, self.out = 4, nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, x):
        return self.out(F.relu(self.into(x)).reshape(2, -1, 3 * self.width))


def test_numbers_of_which_a_multiple_is_a_size():
    small, _ = small_of(drawn(Tripled()), tokens())
    assert small.width == 2


class Layers(nn.Module):
    """Layers of one class with other numbers, and a number of them that is a size as
    well.
    """

    def __init__(self):
        super().__init__()
        self.depth = 4
        self.layers = nn.ModuleList([Heads(heads=h, size=3) for h in (4, 6, 2, 8)])

    def forward(self, x):
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return x


def test_every_layer_gets_its_own_number():
    small, _ = small_of(drawn(Layers()), tokens())
    assert small.depth == 4 and [layer.heads for layer in small.layers] == [2, 3, 1, 4]
    assert [layer.size for layer in small.layers] == [3] * 4


class Derived(nn.Module):
    """The width of a head is that of the input."""

    def __init__(self):
        super().__init__()
        self.heads, self.q, self.out = 2, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.q(x).view(2, -1, self.heads, x.shape[-1] // self.heads)
        return self.out((y.softmax(1) * y).flatten(2))


def test_code_that_takes_a_size_from_elsewhere_has_no_smaller_model_of_its_class():
    made, _, runs = same(drawn(nn.Sequential(Derived())), tokens())
    assert made.model is None and len(runs) < 30
    assert made.why.startswith("the Derived at '0' fails: shape '[2, -1, ")


class Silent(nn.Module):
    """Runs with fewer entries, but gives something else."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        y = self.into(x)
        return self.out(y * len(self.into.bias) ** -0.5)


def test_other_outputs_are_never_let_through():
    made, _, _ = same(drawn(nn.Sequential(nn.Linear(6, 6), Silent())), tokens())
    assert (
        made.model is None and made.why == "the Linear at '1.out' gives other outputs"
    )


def test_a_number_that_need_not_change_stays_where_it_is_also_one_that_stays():
    small, _ = small_of(drawn(nn.Sequential(Unused())), tokens())
    assert small[0].kernel == 3 and small[0].into.out_features == 2


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.into, self.out = 3, nn.Linear(6, 3), nn.Linear(3, 6)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        return self.out(self.into(x).relu()) * self.scale.exp().sum(0)


class Masked(Heads):
    def forward(self, x, mask=None):
        q, k, v = (
            self.qkv(x).view(2, -1, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(2, -1, self.heads * self.size)) + x


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Masked(heads=4, size=3), Masked(heads=2, size=6)

    def forward(self, x):
        return self.two(self.one(x), torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype))


def test_modules_that_are_called_with_more_or_less_are_alike():
    small, _ = small_of(drawn(Two()), tokens())
    assert (small.one.heads, small.two.heads) == (2, 1) and (
        small.one.size,
        small.two.size,
    ) == (3, 6)


def test_shuffles_keep_whole_columns():
    shuffle = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ChannelShuffle(4), nn.ReLU(), nn.Conv2d(8, 2, 1)
    )
    small, _ = small_of(drawn(shuffle), torch.randn(2, 3, 4, 4))
    assert small[0].out_channels == 4 and small[1].groups in (2, 4)


class Short(nn.Module):
    """Keeps the longest input that it takes, which is a size by chance."""

    def __init__(self):
        super().__init__()
        self.longest, self.inner = 8, 8
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.out(
            self.into(x[:, : self.longest]).relu().reshape(len(x), -1, self.inner)
        )


def test_what_is_a_size_by_chance_stays():
    model = drawn(nn.Sequential(Short()))
    small, whole = small_of(model, tokens())
    assert (small[0].longest, small[0].inner) == (8, 4)
    torch.testing.assert_close(small(x := torch.randn(2, 7, 6)), whole(x))
