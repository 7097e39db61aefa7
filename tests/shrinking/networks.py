"""Random networks for Hypothesis: a chain of steps on earlier values, with a readable
repr, and an example.
"""

import torch
from hypothesis import strategies as st
from torch import nn

from tests.shrinking import steps_shapes, steps_sums, steps_tokens  # noqa: F401  (they enter their steps)
from tests.shrinking.steps import KINDS, Step, axis, width
from tests.shrinking.zoo import settled

MOST = 512  # entries of a value
FIRST = {"map": (2, 4, 4, 4), "tokens": (2, 4, 4), "vector": (3, 6), "words": (2, 4)}


class Net(nn.Module):
    """Value 0 is the input; every step reads earlier values; what nothing reads goes
    through a head and comes out.
    """

    def __init__(
        self,
        steps: list[Step],
        reads: list[tuple[int, ...]],
        heads: dict[int, nn.Module],
    ) -> None:
        super().__init__()
        self.steps, self.reads = nn.ModuleList(steps), reads
        self.ends, self.heads = list(heads), nn.ModuleList(heads.values())

    def forward(self, x):
        values = [x]
        for step, reads in zip(self.steps, self.reads, strict=True):
            values.append(step(*[values[i] for i in reads]))
        return [head(values[i]) for i, head in zip(self.ends, self.heads, strict=True)]

    def __repr__(self) -> str:
        lines = [
            f"v{i} = {step.text}  of {', '.join(f'v{k}' for k in reads)}"
            for i, (step, reads) in enumerate(
                zip(self.steps, self.reads, strict=True), 1
            )
        ]
        return "\n".join(
            ["", *lines, f"out: heads of {', '.join(f'v{i}' for i in self.ends)}"]
        )


class Head(nn.Module):
    """Two channels of what is left."""

    def __init__(self, shape):
        super().__init__()
        self.layer, self.axis = nn.Linear(width(shape), 2), axis(shape)

    def forward(self, x):
        return self.layer(x.movedim(self.axis, -1))


def first_step(kind: str, o: int) -> Step:
    if kind == "words":
        return Step(
            f"embedding of {o}", lambda self, x: self.layer(x), layer=nn.Embedding(9, o)
        )
    layer = (
        nn.Conv2d(FIRST[kind][1], o, 3, padding=1)
        if kind == "map"
        else nn.Linear(FIRST[kind][-1], o)
    )
    return Step(f"first layer to {o}", lambda self, x: self.layer(x), layer=layer)


def singles(values, one, names):
    """The steps that can read a value, of these names."""
    shape, kinds = (
        values[one].shape,
        {name: KINDS[name] for name in names if KINDS[name].inputs == 1},
    )
    fits = [
        name
        for name, kind in kinds.items()
        if len(shape) in kind.ranks and kind.fits(shape)
    ]
    return [(name, (one,)) for name in fits or ["dense"]]


def pairs(values, one, names):
    """The steps that can read a value and another one, of these names."""
    made, kinds = [], {name: KINDS[name] for name in names if KINDS[name].inputs == 2}
    for two in range(1, len(values)):
        a, b = values[one].shape, values[two].shape
        fits = [
            name
            for name, kind in kinds.items()
            if len(a) in kind.ranks and kind.fits(a, b)
        ]
        made += [(name, (one, two)) for name in fits if two != one]
    return made


@st.composite
def networks(draw, most_steps=6, names=()):
    """A network in eval mode and float64, of steps of these names if any are given, and
    its example.
    """
    names = list(names or KINDS)

    def pick(*options):
        return options[draw(st.integers(0, len(options) - 1))]

    def evenly(*options):  # Hypothesis likes some numbers more than others
        return options[
            (
                draw(st.integers(0, len(options) - 1))
                + int(torch.randint(len(options), ()))
            )
            % len(options)
        ]

    kind = pick(*FIRST)
    with torch.random.fork_rng():
        torch.manual_seed(draw(st.integers(0, 9999)))
        x = (
            torch.randint(0, 9, FIRST[kind])
            if kind == "words"
            else torch.randn(FIRST[kind]).double()
        )
        steps, reads = [first_step(kind, evenly(6, 4)).double()], [(0,)]
        values = [x, steps[0](x).detach()]
        for _ in range(draw(st.integers(1, most_steps))):
            one = max(1, len(values) - 1 - pick(0, 0, 1, 2))
            both = pairs(values, one, names)
            name, read = evenly(
                *(both if both and evenly(0, 0, 1) else singles(values, one, names))
            )
            step = (
                KINDS[name].make(pick, *[tuple(values[i].shape) for i in read]).double()
            )
            step.kind = name
            out = step(*[values[i] for i in read]).detach()
            if out.numel() > MOST or not 1 < out.ndim < 5 or 0 in out.shape:
                continue
            steps.append(step)
            reads.append(read)
            values.append(out)
        read = {i for some in reads for i in some}
        ends = [i for i in range(1, len(values)) if i not in read]
        model = Net(steps, reads, {i: Head(tuple(values[i].shape)) for i in ends})
        return settled(model, (x,))
