"""Steps on tokens and vectors: attentions, mixtures, products of channels."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.steps import MAP, TOKENS, VECTOR, Step, divisors, step, width


@step(TOKENS)
def attention(pick, shape):
    """Queries may share the heads of keys and values, and only part of a head may
    turn.
    """
    c, heads, size = width(shape), pick(2, 4, 1), pick(2, 4, 3)
    groups, by_hand, turned = (
        pick(*divisors(heads)),
        pick(False, True),
        pick(False, True),
    )
    q, k, v = (nn.Linear(c, n * size) for n in (heads, groups, groups))
    angles = torch.arange(float(shape[1])).double()[:, None]

    def turn(self, x):
        a, b, rest = x[..., :1], x[..., 1:2], x[..., 2:]
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)

    def run(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, size)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        if turned:
            q, k = turn(self, q), turn(self, k)
        if not by_hand:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=groups != heads)
        else:
            k, v = (
                y[:, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(1, 2)
                for y in (k, v)
            )
            y = (q @ k.transpose(-2, -1) / size**0.5).softmax(-1) @ v
        return x + self.o(y.transpose(1, 2).flatten(2))

    text = (
        f"{heads} heads of {size}, {groups} of "
        f"keys{', by hand' if by_hand else ''}{', turned' if turned else ''}"
    )
    return Step(text, run, q=q, k=k, v=v, o=nn.Linear(heads * size, c), angles=angles)


@step(TOKENS)
def fused_attention(pick, shape):
    c, heads, size, how = (
        width(shape),
        pick(2, 1),
        pick(2, 3),
        pick("unbind", "chunk", "side by side"),
    )
    width_ = heads * size
    qkv, o = nn.Linear(c, 3 * width_, bias=pick(True, False)), nn.Linear(width_, c)

    def run(self, x):
        b, n, _ = x.shape
        y = self.qkv(x)
        if how == "unbind":
            q, k, v = y.reshape(b, n, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        elif how == "chunk":
            q, k, v = (
                z.view(b, n, heads, size).transpose(1, 2) for z in y.chunk(3, -1)
            )
        else:
            q, k, v = y.view(b, n, heads, 3 * size).transpose(1, 2).split(size, -1)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return x + self.o(y.transpose(1, 2).reshape(b, n, width_))

    return Step(f"fused attention of {heads} heads of {size}, {how}", run, qkv=qkv, o=o)


@step(TOKENS)
def linear_attention(pick, shape):
    c, kind = width(shape), pick("elu + 1", "softmax", "relu")
    q, k, v, o = nn.Linear(c, 4), nn.Linear(c, 4), nn.Linear(c, 3), nn.Linear(3, c)
    maps = {
        "elu + 1": lambda x: F.elu(x) + 1,
        "softmax": lambda x: x.softmax(-1),
        "relu": F.relu,
    }

    def run(self, x):
        q, k = maps[kind](self.q(x)), maps[kind](self.k(x))
        y = (
            q
            @ (k.transpose(1, 2) @ self.v(x))
            / ((q * k.sum(1, keepdim=True)).sum(-1, keepdim=True) + 0.5)
        )
        return x + self.o(y)

    return Step(f"linear attention, {kind}", run, q=q, k=k, v=v, o=o)


@step(TOKENS)
def mixed_tokens(pick, shape):
    layer = nn.Linear(shape[1], shape[1])
    return Step(
        "tokens mixed",
        lambda self, x: x + self.layer(x.transpose(1, 2)).transpose(1, 2),
        layer=layer,
    )


@step(TOKENS)
def table_of_positions(pick, shape):
    values = nn.Parameter(torch.ones(1, *shape[1:]))
    return Step("positions added", lambda self, x: x + self.values, values=values)


@step(TOKENS)
def token_in_front(pick, shape):
    token = nn.Parameter(torch.ones(1, 1, shape[2]))
    return Step(
        "a token in front",
        lambda self, x: torch.cat([self.token.expand(len(x), -1, -1), x], 1)[:, :5],
        token=token,
    )


@step(TOKENS)
def experts(pick, shape):
    c, n, inner = width(shape), 3, pick(4, 5)
    up, down = (
        nn.Parameter(torch.ones(n, c, inner)),
        nn.Parameter(torch.ones(n, inner, c)),
    )

    def run(self, x):
        shares = self.route(x).softmax(-1)
        y = torch.einsum("btc,eci->btei", x, self.up).relu()
        return x + torch.einsum("btei,eic,bte->btc", y, self.down, shares)

    return Step(f"{n} experts of {inner}", run, route=nn.Linear(c, n), up=up, down=down)


@step(TOKENS)
def scores_of_tokens(pick, shape):
    """How tokens resemble each other, from values that need not be 0."""
    act = pick(torch.sigmoid, torch.tanh, F.relu)

    def run(self, x):
        y = act(x)
        return (y @ y.transpose(1, 2)) @ x / shape[1]

    return Step(f"likeness of tokens after {act.__name__}", run)


@step(TOKENS)
def halves_of_heads(pick, shape):
    c = width(shape)
    layer = nn.Linear(c, 8)

    def run(self, x):
        y = self.layer(x).view(*x.shape[:2], 2, 2, 2)
        return (y.permute(0, 1, 4, 2, 3) if how == "permuted" else y).flatten(
            2
        ) * y.sum((2, 4)).mean(-1, keepdim=True)

    how = pick("permuted", "as it is")
    return Step(f"two by two by two, {how}", run, layer=layer)


@step((2, 3))
def tied_weight(pick, shape):
    weight, o = (
        nn.Parameter(torch.ones(pick(5, 4), width(shape))),
        pick("relu", "sigmoid"),
    )
    return Step(
        f"weight and its transpose, {o}",
        lambda self, x: getattr(x @ self.weight.t(), o)() @ self.weight,
        weight=weight,
    )


@step(VECTOR)
def bilinear(pick, shape):
    layer = nn.Bilinear(width(shape), width(shape), 4)
    act = pick(torch.sigmoid, F.relu)
    return Step(
        f"bilinear with {act.__name__}",
        lambda self, x: self.layer(x, act(x)),
        layer=layer,
    )


@step(VECTOR)
def weights_made_by_a_layer(pick, shape):
    c, o = width(shape), pick(3, 4)
    maker = nn.Linear(c, c * o)

    def run(self, x):
        return torch.einsum("bi,boi->bo", x, self.maker(x.tanh()).view(-1, o, c))

    return Step(f"weights {o} x {c} made by a layer", run, maker=maker)


@step(MAP)
def gram_matrix(pick, shape):
    act = pick(torch.sigmoid, F.relu, lambda x: x.softmax(1))

    def run(self, x):
        x, y = x.flatten(2), act(x).flatten(2)
        return x @ y.transpose(1, 2) / x.shape[-1]

    return Step("gram matrix", run)


@step(MAP)
def gram_matrix_of_pixels(pick, shape):
    one, two = (
        pick(torch.sigmoid, F.relu, torch.tanh),
        pick(torch.cos, F.relu, torch.sigmoid),
    )

    def run(self, x):
        return torch.einsum(
            "bcp,bcq->bpq", one(x).flatten(2)[..., :3], two(x).flatten(2)[..., :4]
        )

    return Step(f"gram matrix of pixels, {one.__name__} by {two.__name__}", run)
