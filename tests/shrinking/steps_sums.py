"""Steps that sum up channels, and gates of such sums."""

from collections.abc import Callable

import torch
from torch import nn

from tests.shrinking.steps import ANY, MAP, Step, axis, step, width

REDUCTIONS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda x, d: x.sum(d, keepdim=True),
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "max": lambda x, d: x.amax(d, keepdim=True),
    "sum of sigmoids": lambda x, d: x.sigmoid().sum(d, keepdim=True),
    "sum of tanhs": lambda x, d: x.tanh().sum(d, keepdim=True),
    "sum of squares": lambda x, d: x.square().sum(d, keepdim=True),
    "mean of exps": lambda x, d: x.tanh().exp().mean(d, keepdim=True),
    "logsumexp": lambda x, d: x.logsumexp(d, keepdim=True),
    "sum of products with a softmax": lambda x, d: (x * x.softmax(d)).sum(
        d, keepdim=True
    ),
    "product": lambda x, d: x.tanh().prod(d, keepdim=True),
    "norm": lambda x, d: x.norm(dim=d, keepdim=True),
    "spread": lambda x, d: x.std(d, keepdim=True),
}
HOW: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x * ": lambda x, y: x * y.tanh(),
    "x + ": lambda x, y: x + y,
    "x - ": lambda x, y: x - y,
    "only ": lambda x, y: y,
    "expanded ": lambda x, y: y.expand_as(x),
}


@step(ANY)
def reduction(pick, shape):
    name, how = pick(*REDUCTIONS), pick(*HOW)
    return Step(
        how + name, lambda self, x: HOW[how](x, REDUCTIONS[name](x, axis(shape)))
    )


@step(ANY)
def gate_of_concatenated_reductions(pick, shape):
    d, names = axis(shape), [pick(*REDUCTIONS) for _ in range(pick(2, 3))]
    layer = nn.Conv2d(len(names), 1, 1) if len(shape) == 4 else nn.Linear(len(names), 1)

    def run(self, x):
        return (
            x
            * self.layer(
                torch.cat([REDUCTIONS[name](x, d) for name in names], d)
            ).sigmoid()
        )

    return Step(f"gate of {names}", run, layer=layer)


@step(ANY, lambda shape: width(shape) <= 4)
def channels_one_by_one(pick, shape):
    """Each channel out of a layer of its own, side by side."""
    d, c = axis(shape), width(shape)
    kind = (
        (lambda: nn.Conv2d(c, 1, 1)) if len(shape) == 4 else (lambda: nn.Linear(c, 1))
    )
    layers, join = nn.ModuleList([kind() for _ in range(c)]), pick("cat", "stack")

    def run(self, x):
        ys = [layer(x) for layer in self.layers]
        return x * (
            torch.cat(ys, d)
            if join == "cat"
            else torch.stack([y.squeeze(d) for y in ys], d)
        )

    return Step(f"x * {join} of {c} layers of one channel", run, layers=layers)


@step(ANY)
def softmax(pick, shape):
    d = pick(axis(shape), *[d for d in range(1, len(shape)) if d != axis(shape)])
    return Step(f"softmax over {d}", lambda self, x: x.softmax(d) * 3)


@step(MAP)
def squeeze(pick, shape):
    one, two = nn.Conv2d(width(shape), 3, 1), nn.Conv2d(3, width(shape), 1)

    def run(self, x):
        return x * self.two(self.one(x.mean((2, 3), True)).relu()).sigmoid()

    return Step("squeeze and excitation", run, one=one, two=two)
