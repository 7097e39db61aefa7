"""Recurrent and temporal networks, embeddings, expert mixtures."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.shrinking.zoo import in_the_zoo
from tests.shrinking.zoo_attention import words


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embed, self.cells = (
            nn.Embedding(12, 6),
            kind(6, 5, batch_first=True, **options),
        )
        self.hidden, self.head = (
            nn.Linear(10 if options.get("bidirectional") else 5, 6),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        return self.head(self.hidden(self.cells(self.embed(x))[0][:, -1]).relu())


@in_the_zoo
def lstm_classifier():
    return Recurrent(nn.LSTM, num_layers=2), (words(),)


@in_the_zoo
def gru_classifier():
    return Recurrent(nn.GRU, bidirectional=True), (words(),)


@in_the_zoo
def recurrent_cell_by_hand():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gates, self.head = (
                nn.Embedding(12, 6),
                nn.Linear(11, 20),
                nn.Linear(5, 3),
            )

        def forward(self, x):
            x = self.embed(x)
            h = c = x.new_zeros(len(x), 5)
            for step in range(x.shape[1]):
                i, f, g, o = self.gates(torch.cat([x[:, step], h], 1)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return self.head(h)

    return Net(), (words(length=3),)


@in_the_zoo
def temporal_convolutions():
    class Causal(nn.Module):
        def __init__(self, i, o, dilation):
            super().__init__()
            self.conv, self.dilation = nn.Conv1d(i, o, 3, dilation=dilation), dilation
            self.shortcut = nn.Conv1d(i, o, 1) if i != o else nn.Identity()

        def forward(self, x):
            y = F.relu(self.conv(F.pad(x, (2 * self.dilation, 0))))
            return F.relu(y + self.shortcut(x))

    return nn.Sequential(
        Causal(3, 6, 1), Causal(6, 6, 2), Causal(6, 5, 4), nn.Conv1d(5, 2, 1)
    ), (torch.randn(2, 3, 9),)


@in_the_zoo
def gated_temporal_convolutions():
    class Gated(nn.Module):
        """As in WaveNet: a gate, a residual and a skip."""

        def __init__(self, width, skip):
            super().__init__()
            self.conv, self.out, self.skip = (
                nn.Conv1d(width, 2 * width, 2),
                nn.Conv1d(width, width, 1),
                nn.Conv1d(width, skip, 1),
            )

        def forward(self, x):
            a, b = self.conv(F.pad(x, (1, 0))).split(x.shape[1], 1)
            y = a.tanh() * b.sigmoid()
            return x + self.out(y), self.skip(y)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.one, self.two, self.last = (
                nn.Conv1d(3, 6, 1),
                Gated(6, 5),
                Gated(6, 5),
                nn.Conv1d(5, 2, 1),
            )

        def forward(self, x):
            x, first = self.one(self.first(x))
            return self.last((first + self.two(x)[1]).relu())

    return Net(), (torch.randn(2, 3, 7),)


@in_the_zoo
def tied_embedding_and_head():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.hidden, self.back = (
                nn.Embedding(12, 8),
                nn.Linear(8, 10),
                nn.Linear(10, 8),
            )
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            x = self.embed(x)
            return self.head(x + self.back(self.hidden(x).relu()))

    return Net(), (words(),)


@in_the_zoo
def one_layer_used_three_times():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again, self.head = (
                nn.Linear(6, 8),
                nn.Linear(8, 8),
                nn.Linear(8, 3),
            )

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = x + self.again(x).relu()
            return self.head(x) + F.linear(x.tanh(), self.first.weight.t()).sum(
                1, keepdim=True
            )

    return Net(), (torch.randn(3, 6),)


@in_the_zoo
def siamese():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = (
                nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)),
                nn.Linear(5, 1),
            )

        def forward(self, pair):
            one, two = self.body(pair["one"]), self.body(pair["two"])
            return {
                "gap": self.head((one - two).abs()),
                "likeness": F.cosine_similarity(one, two),
            }

    return Net(), (
        {"one": torch.randn(3, 6).double(), "two": torch.randn(3, 6).double()},
    )


@in_the_zoo
def bilinear_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (
                nn.Sequential(nn.Linear(4, 5), nn.Sigmoid()),
                nn.Sequential(nn.Linear(3, 6), nn.ReLU()),
            )
            self.both, self.head = nn.Bilinear(5, 6, 7), nn.Linear(7, 2)

        def forward(self, x, y):
            return self.head(self.both(self.one(x), self.two(y)).relu())

    return Net(), (torch.randn(2, 4), torch.randn(2, 3))


@in_the_zoo
def bag_of_words():
    layers = [
        nn.EmbeddingBag(12, 8, mode="sum"),
        nn.LayerNorm(8),
        nn.Linear(8, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    ]
    return nn.Sequential(*layers), (words(),)


@in_the_zoo
def two_towers_of_categories():
    class Net(nn.Module):
        """As recommenders do: embeddings of categories, all their inner products, and a
        factorisation machine.
        """

        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(7, 6) for _ in range(3)])
            self.dense, self.head = (
                nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)),
                nn.Linear(12, 1),
            )
            self.register_buffer("pairs", torch.triu_indices(4, 4, 1))

        def forward(self, x, categories):
            fields = [
                self.dense(x),
                *(table(categories[:, i]) for i, table in enumerate(self.tables)),
            ]
            fields = torch.stack(fields, 1)
            products = (fields @ fields.transpose(1, 2))[
                :, self.pairs[0], self.pairs[1]
            ]
            machine = fields.sum(1).square() - fields.square().sum(1)
            return self.head(torch.cat([products, fields[:, 0]], 1)) + machine.sum(
                1, keepdim=True
            )

    return Net(), (torch.randn(2, 4), torch.randint(0, 7, (2, 3)))


@in_the_zoo
def experts_by_einsum():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.route, self.head = (
                nn.Embedding(12, 8),
                nn.Linear(8, 4),
                nn.Linear(8, 3),
            )
            self.up, self.down = (
                nn.Parameter(torch.ones(4, 8, 6)),
                nn.Parameter(torch.ones(4, 6, 8)),
            )

        def forward(self, x):
            x = self.embed(x)
            shares = self.route(x).softmax(-1)
            y = torch.einsum("bnc,eci->bnei", x, self.up).relu()
            y = torch.einsum("bnei,eic->bnec", y, self.down)
            return self.head(x + torch.einsum("bnec,bne->bnc", y, shares))

    return Net(), (words(),)


@in_the_zoo
def experts_by_index_add():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.route, self.head = nn.Linear(6, 3), nn.Linear(6, 2)
            self.up, self.down = (
                nn.Parameter(torch.ones(3, 5, 6)),
                nn.Parameter(torch.ones(3, 6, 5)),
            )

        def forward(self, x):
            shares, chosen = self.route(x).softmax(-1).topk(2, -1)
            out, rows = torch.zeros_like(x), torch.arange(len(x))
            for expert in range(3):
                weight = torch.where(chosen == expert, shares, 0.0).sum(-1)
                y = F.linear(F.linear(x, self.up[expert]).relu(), self.down[expert])
                out = out.index_add(0, rows, y * weight[:, None])
            return self.head(out)

    return Net(), (torch.randn(4, 6),)


@in_the_zoo
def graph_convolutions():
    class Net(nn.Module):
        """Messages along edges, and a mean over neighbours."""

        def __init__(self):
            super().__init__()
            self.first, self.second, self.own = (
                nn.Linear(4, 6),
                nn.Linear(12, 8),
                nn.Linear(6, 8),
            )
            self.head = nn.Linear(8, 2)

        def forward(self, x, edges):
            x = self.first(x).relu()
            told = self.second(
                torch.cat([x[edges[0]], x[edges[1]] - x[edges[0]]], 1)
            ).relu()
            heard = torch.zeros(len(x), 8, dtype=x.dtype).index_add(0, edges[1], told)
            return self.head(heard + self.own(x))

    return Net(), (torch.randn(5, 4), torch.randint(0, 5, (2, 7)))


@in_the_zoo
def points():
    class Net(nn.Module):
        """As PointNet: the same layers for every point, the largest over points, beside
        the points again.
        """

        def __init__(self):
            super().__init__()
            self.local, self.wide, self.head = (
                nn.Conv1d(3, 6, 1),
                nn.Conv1d(6, 8, 1),
                nn.Conv1d(14, 2, 1),
            )
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            x = self.norm(self.local(x)).relu()
            whole = self.wide(x).amax(2, keepdim=True).expand(-1, -1, x.shape[2])
            return self.head(torch.cat([x, whole], 1))

    return Net(), (torch.randn(2, 3, 5),)


@in_the_zoo
def state_space_scan():
    class Net(nn.Module):
        """As Mamba: a state for every channel, driven by what the channels say."""

        def __init__(self, width=6, inner=8, state=3):
            super().__init__()
            self.into, self.conv = (
                nn.Linear(width, 2 * inner),
                nn.Conv1d(inner, inner, 3, groups=inner, padding=2),
            )
            self.params, self.steps, self.out = (
                nn.Linear(inner, 2 + 2 * state),
                nn.Linear(2, inner),
                nn.Linear(inner, width),
            )
            self.rates, self.skip, self.state = (
                nn.Parameter(torch.ones(inner, state)),
                nn.Parameter(torch.ones(inner)),
                state,
            )

        def forward(self, x):
            y, gate = self.into(x).chunk(2, -1)
            y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            steps, b, c = self.params(y).split([2, self.state, self.state], -1)
            steps = F.softplus(self.steps(steps))
            h, outs = y.new_zeros(len(x), y.shape[-1], self.state), []
            for t in range(x.shape[1]):
                decay = torch.exp(-steps[:, t, :, None] * self.rates.exp())
                h = decay * h + (steps[:, t] * y[:, t])[..., None] * b[:, t, None]
                outs.append((h * c[:, t, None]).sum(-1))
            return self.out((torch.stack(outs, 1) + self.skip * y) * F.silu(gate))

    return Net(), (torch.randn(2, 4, 6),)
