"""Steps that cut, move, pad, repeat and reshape channels, and steps on two values."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.steps import (
    ANY,
    MAP,
    TOKENS,
    Step,
    axis,
    divisors,
    even,
    step,
    table,
    wide,
    width,
)


# ---------------------------------------------------------------- cuts
@step(ANY, even)
def gate_of_halves(pick, shape):
    how = pick("chunk", "split", "glu", "slices")
    d, half = axis(shape), width(shape) // 2

    def run(self, x):
        if how == "glu":
            return F.glu(x, d)
        cuts = {"chunk": lambda: x.chunk(2, d), "split": lambda: x.split(half, d)}
        a, b = (
            cuts[how]()
            if how in cuts
            else (x.narrow(d, 0, half), x.narrow(d, half, half))
        )
        return a * b.sigmoid()

    return Step(f"gate of halves by {how}", run)


@step(ANY, wide)
def parts_changed(pick, shape):
    """Uneven parts, one of them through a layer, put together in another order."""
    d, c = axis(shape), width(shape)
    first = pick(*range(1, c))
    layer = nn.Conv2d(first, first, 1) if len(shape) == 4 else nn.Linear(first, first)
    turned = pick(False, True)

    def run(self, x):
        a, b = x.split([first, c - first], d)
        parts = [self.layer(a), b]
        return torch.cat(parts[::-1] if turned else parts, d)

    return Step(
        f"parts of {first} and {c - first}{', turned round' if turned else ''}",
        run,
        layer=layer,
    )


@step(ANY, wide)
def slices(pick, shape):
    d, c = axis(shape), width(shape)
    start, stop = pick(0, 1), pick(c - 1, c)
    by = pick(1, 2) if c > 3 else 1
    cut = (slice(None),) * d + (slice(start, stop, by),)
    return Step(f"channels {start}:{stop}:{by}", lambda self, x: x[cut])


@step(ANY)
def one_channel_more(pick, shape):
    d, c = axis(shape), width(shape)
    which = pick(*range(c))
    how = pick("x * ", "x + ", "only ", "beside ")

    def run(self, x):
        y = x.select(d, which).unsqueeze(d)
        ways = {
            "x * ": lambda: x * y,
            "x + ": lambda: x + y,
            "only ": lambda: y,
            "beside ": lambda: torch.cat([x, y], d),
        }
        return ways[how]()

    return Step(f"{how}channel {which}", run)


@step(ANY, wide)
def in_another_order(pick, shape):
    d, c = axis(shape), width(shape)
    how, by = pick("roll", "flip", "index", "shuffle"), pick(1, 2)
    groups = pick(*[g for g in divisors(c) if g > 1])
    order = torch.randperm(c, generator=torch.Generator().manual_seed(by))

    def run(self, x):
        if how == "roll":
            return x.roll(by, d)
        if how == "flip":
            return x.flip(d)
        if how == "index":
            return x.index_select(d, self.order)
        return x.unflatten(d, (groups, -1)).transpose(d, d + 1).flatten(d, d + 1)

    plus = pick("", "x + ", "x * ")
    ways = {"": lambda x, y: y, "x + ": lambda x, y: x + y, "x * ": lambda x, y: x * y}
    return Step(
        f"{plus}{how} by {groups if how == 'shuffle' else by}",
        lambda self, x: ways[plus](x, run(self, x)),
        order=order,
    )


@step(ANY)
def padded(pick, shape):
    before, after, value = pick(0, 1), pick(1, 2), pick(0.0, 1.0)
    dims = [0, 0] * (len(shape) - 1 - axis(shape)) + [before, after]
    return Step(
        f"{before} + {after} channels of {value}",
        lambda self, x: F.pad(x, dims, value=value),
    )


@step(ANY, lambda shape: width(shape) <= 4)
def repeated(pick, shape):
    d, how = axis(shape), pick("repeat", "interleave", "cat", "expand")

    def run(self, x):
        if how == "repeat":
            return x.repeat([2 if i == d else 1 for i in range(x.ndim)])
        if how == "interleave":
            return x.repeat_interleave(2, d)
        if how == "cat":
            return torch.cat([x, x.sigmoid()], d)
        sizes = list(x.shape)
        return x.unsqueeze(d).expand(*sizes[:d], 2, *sizes[d:]).flatten(d, d + 1)

    return Step(f"twice the channels by {how}", run)


@step(ANY)
def constant_table(pick, shape):
    values = pick("0, 1, 2, ...", "ones", "cos", "0, 1, 0, 1, ...")
    steps = torch.arange(float(width(shape)))
    made = {
        "0, 1, 2, ...": steps,
        "ones": torch.ones_like(steps),
        "cos": steps.cos(),
        "0, 1, 0, 1, ...": steps % 2,
    }
    how = pick("x * ", "x + ", "beside ")

    def run(self, x):
        rows = self.values.expand_as(x)
        ways = {"x * ": lambda: x * rows, "x + ": lambda: x + self.values}
        return ways[how]() if how in ways else torch.cat([x, rows], axis(shape))

    kind = pick("buffer", "parameter")
    made = table(shape, made[values]).double()
    return Step(
        f"{how}a {kind} of {values}",
        run,
        values=nn.Parameter(made) if kind == "parameter" else made,
    )


@step(MAP)
def places(pick, shape):
    """The coordinates of pixels as further channels."""
    rows = torch.linspace(-1, 1, shape[2]).double()[:, None].expand(shape[2:])
    columns = torch.linspace(-1, 1, shape[3]).double()[None].expand(shape[2:])
    how = pick("one table", "stack", "cat")

    def run(self, x):
        maps = {
            "one table": lambda: self.both[None],
            "stack": lambda: torch.stack([self.both[0], self.both[1]])[None],
        }
        grid = maps.get(how, lambda: torch.cat([self.both[:1], self.both[1:]])[None])()
        return torch.cat([x, grid.expand(len(x), -1, -1, -1)], 1)

    return Step(f"places beside, {how}", run, both=torch.stack([rows, columns]))


# ---------------------------------------------------------------- shapes
@step(MAP, lambda shape: width(shape) % 4 == 0)
def pixel_shuffle(pick, shape):
    return Step("pixel shuffle", lambda self, x: F.avg_pool2d(F.pixel_shuffle(x, 2), 2))


@step(MAP, lambda shape: width(shape) <= 4 and shape[2] % 2 == 0 and shape[3] % 2 == 0)
def pixel_unshuffle(pick, shape):
    return Step("pixel unshuffle", lambda self, x: F.pixel_unshuffle(x, 2))


@step(MAP, lambda shape: min(shape[2:]) > 1)
def resampled(pick, shape):
    ways = {
        "max": lambda x: F.max_pool2d(x, 3, 1, 1),
        "average": lambda x: F.avg_pool2d(x, 3, 1, 1),
    }
    ways |= {
        "up": lambda x: F.interpolate(x, scale_factor=2.0)[..., ::2, 1::2],
        "shift": lambda x: x.roll((1, 1), (2, 3)),
    }
    ways |= {"around": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")[..., 1:-1, :-2]}
    name = pick(*ways)
    return Step(f"{name} of pixels", lambda self, x: ways[name](x))


@step(MAP, even)
def channels_become_rows(pick, shape):
    c, h, w = shape[1:]
    ways = {
        "view": lambda x: x.reshape(-1, c // 2, 2 * h, w),
        "permuted": lambda x: x.unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4),
    }
    name = pick(*ways)
    return Step(
        f"channels become rows, {name}",
        lambda self, x: ways[name](x).reshape(-1, c // 2, 2 * h, w)[:, :, :h],
    )


@step(ANY, lambda shape: len(shape) > 2)
def to_vector(pick, shape):
    if len(shape) == 4:
        ways = {
            "mean": lambda x: x.mean((2, 3)),
            "max": lambda x: x.amax((2, 3)),
            "flat": lambda x: x[:, :, :2, 0].flatten(1),
        }
    else:
        ways = {
            "mean": lambda x: x.mean(1),
            "first": lambda x: x[:, 0],
            "flat": lambda x: x[:, :2].flatten(1),
        }
    name = pick(*ways)
    return Step(f"{name} over places", lambda self, x: ways[name](x))


@step(MAP)
def to_tokens(pick, shape):
    n = shape[2] * shape[3]
    ways = {
        "transposed": lambda x: x.flatten(2).transpose(1, 2),
        "view": lambda x: x.permute(0, 2, 3, 1).reshape(-1, n, shape[1]),
    }
    name = pick(*ways)
    return Step(f"tokens, {name}", lambda self, x: ways[name](x)[:, :5])


@step(TOKENS)
def to_map(pick, shape):
    return Step("a map of tokens", lambda self, x: x.transpose(1, 2).unsqueeze(-1))


@step(ANY, lambda shape: len(shape) != 3 and width(shape) in (4, 6, 8))
def to_tokens_of_channels(pick, shape):
    flat = (lambda x: x) if len(shape) == 2 else (lambda x: x.mean((2, 3)))
    return Step(
        "two tokens of channels", lambda self, x: flat(x).view(-1, 2, width(shape) // 2)
    )


@step(ANY, lambda shape: len(shape) != 3 and width(shape) in (4, 6, 8))
def mean_of_padded_tokens(pick, shape):
    tokens = to_tokens_of_channels(pick, shape)
    value = pick(0.0, 1.0)
    return Step(
        f"mean of two tokens of channels with one more channel of {value}",
        lambda self, x: F.pad(tokens(x), [0, 1], value=value).mean(1),
    )


# ---------------------------------------------------------------- two values
def same(a, b):
    return a == b


@step(ANY, same, inputs=2)
def together(pick, one, two):
    ways = {
        "a + b": torch.add,
        "a * b": torch.mul,
        "max(a, b)": torch.maximum,
        "a - b": torch.sub,
    }
    ways |= {
        "where(a > b, a, 1)": lambda a, b: torch.where(a > b, a, 1.0),
        "a * sigmoid(b)": lambda a, b: a * b.sigmoid(),
    }
    ways |= {
        "a / (1 + b ** 2)": lambda a, b: a / (1 + b.square()),
        "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    }
    ways |= {
        "sum of a stack": lambda a, b: torch.stack([a, b]).sum(0),
        "addcmul": lambda a, b: torch.addcmul(a, a, b),
    }
    name = pick(*ways)
    return Step(name, lambda self, a, b: ways[name](a, b))


def beside_fits(a, b):
    return len(a) == len(b) and all(
        m == n for d, (m, n) in enumerate(zip(a, b, strict=True)) if d != axis(a)
    )


@step(ANY, beside_fits, inputs=2)
def beside(pick, one, two):
    return Step("beside each other", lambda self, a, b: torch.cat([a, b], axis(one)))


@step(
    ANY,
    lambda a, b: (
        len(a) == len(b)
        and a[1:] != b[1:]
        and beside_fits(a, b)
        and width(b) > 1
        and width(a) > 1
    ),
    inputs=2,
)
def products_of_channels(pick, one, two):
    """The Gram matrix of two values' channels, or an outer product of vectors."""
    words = {2: "bi,bj->bij", 3: "bni,bnj->bij", 4: "bihw,bjhw->bij"}[len(one)]
    flat = pick(True, False)
    return Step(
        f"{words}{', flat' if flat else ''}",
        lambda self, a, b: torch.einsum(words, a, b).flatten(1 if flat else 2),
    )


@step(TOKENS, lambda a, b: len(a) == len(b), inputs=2)
def looks_at(pick, one, two):
    q, k, v = nn.Linear(one[2], 4), nn.Linear(two[2], 4), nn.Linear(two[2], 3)

    def run(self, a, b):
        return F.softmax(self.q(a) @ self.k(b).transpose(1, 2), -1) @ self.v(b)

    return Step("cross attention", run, q=q, k=k, v=v)


@step(
    (2, 3, 4),
    lambda a, b: len(b) == 2 and len(a) > 2 and width(a) == width(b),
    inputs=2,
)
def scaled_by_a_vector(pick, one, two):
    how = pick("x * ", "x + ")

    def run(self, a, b):
        b = b[:, None] if len(one) == 3 else b[..., None, None]
        return a * b if how == "x * " else a + b

    return Step(f"{how}a vector", run)
