"""Structured methods on the groups of whole models: held against brute force, and the
shrunk model.
"""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsefn as sf

methods, budgets = sf.methods, sf.budgets
SGD = sf.optimizers.sgd


class Attention(nn.Module):
    """Two heads, a residual stream and an inner width."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(3, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.last = (
            nn.Linear(8, 6),
            nn.Linear(6, 8),
            nn.Linear(8, 2),
        )

    def forward(self, x):
        x = self.stem(x)
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, 8)
        )
        return self.last((x + self.down(F.gelu(self.up(x)))).mean(1))


class Residual(nn.Module):
    """A stream to which two convolutions write, each with a norm, and an inner
    width.
    """

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(2, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
        )
        self.conv2, self.bn2 = nn.Conv2d(5, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(x + self.bn3(self.conv3(F.relu(self.bn2(self.conv2(x))))))
        return self.fc(x.mean((2, 3)))


def made(kind):
    torch.manual_seed(0)
    if kind == "attention":
        model, x = Attention(), torch.randn(4, 5, 3)
    elif kind == "residual":
        model, x = Residual(), torch.randn(4, 2, 6, 6)
    else:
        # the kernels in the middle are in two sets, and nothing else is in the second
        layers = [
            nn.Linear(3, 6, bias=False),
            nn.ReLU(),
            nn.Linear(6, 5, bias=False),
            nn.ReLU(),
        ]
        model, x = (
            nn.Sequential(
                *layers, nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)
            ),
            torch.randn(4, 3),
        )
    for p in model.parameters():
        nn.init.normal_(p)
    groups = sf.shrinking.groups(model.eval(), x, counted=True)
    return model, x, groups, sf.modules.params_of(model)


def chosen(groups):
    return [group for group in groups if group.preferred]


def vectors(group, tree):
    """The entries of each unit of a group in a tree of params, by brute force."""
    members = [member for member in group.members if member.leaf in tree]
    some = [
        [
            tree[m.leaf].movedim(m.dim, 0)[torch.from_numpy(m.units) == u]
            for m in members
        ]
        for u in range(group.size)
    ]
    return torch.stack(
        [torch.cat([part.flatten() for part in parts]) for parts in some]
    )


def gone(groups, state):
    kept = groups.alive(
        {p: m.expand_as(state.params[p]) for p, m in state.masks.items()}
    )
    return [
        set((~own).nonzero().flatten().tolist())
        for own, group in zip(kept, groups, strict=True)
        if group.preferred
    ]


def lowest(scores, counts):
    """The units of least score, `counts` of each group or one number of all; one stays,
    of equal ones the first.
    """
    order = sorted(
        (float(x), -u, i) for i, own in enumerate(scores) for u, x in enumerate(own)
    )
    left = counts if isinstance(counts, list) else [len(own) - 1 for own in scores]
    total, found = (
        counts if isinstance(counts, int) else sum(counts),
        [set() for _ in scores],
    )
    for _, u, i in order:
        if len(found[i]) < left[i] and total:
            found[i].add(-u)
            total -= 1
    return found


def smaller(model, x, state):
    small = sf.shrink(model, state, x)
    torch.testing.assert_close(
        small(x), sf.modules.call(model, state, x), rtol=1e-4, atol=1e-4
    )
    return sum(p.numel() for p in small.parameters())


MODELS = ["attention", "residual", "no biases"]


def grads_of(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        path: torch.randn(x.shape, generator=generator) for path, x in params.items()
    }


@pytest.mark.deep(but=["global-residual"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "distribution", [budgets.global_(), budgets.uniform()], ids=["global", "uniform"]
)
def test_taylor_squares_the_sum_over_all_members(kind, distribution):
    model, x, groups, params = made(kind)
    algorithm = methods.taylor(
        1,
        when=sf.at([2]),
        pattern=groups.pattern(),
        distribution=distribution,
        where="*",
    )
    state = algorithm.init(params)
    for step in range(3):
        state = algorithm.update(state, grads_of(params, step), step)
    products = [
        {p: w * grads_of(params, step)[p] for p, w in params.items()}
        for step in range(3)
    ]
    means = [
        sum(vectors(group, tree).sum(1).square() for tree in products) / 3
        for group in chosen(groups)
    ]
    counts = 1 if distribution == budgets.global_() else [1] * len(means)
    assert gone(groups, state) == lowest(means, counts)
    smaller(model, x, state)


@pytest.mark.deep(but=["residual"])
@pytest.mark.parametrize("kind", MODELS)
def test_taylor_as_a_score_with_shares_by_path(kind):
    model, x, groups, params = made(kind)
    pattern, first = groups.pattern(), chosen(groups)[0].members[0].leaf
    score = sf.scores.mean(
        sf.scores.by_unit(
            sf.scores.movement, pattern, lambda rows: rows.sum(-1).square()
        )
    )
    shares = budgets.by_path({first: 0.0})
    algorithm = sf.one_shot(0.5, score, pattern=pattern, distribution=shares, where="*")
    state = algorithm.update(algorithm.init(params), grads_of(params, 0), 0)
    products = {p: w * grads_of(params, 0)[p] for p, w in params.items()}
    means = [vectors(group, products).sum(1).square() for group in chosen(groups)]
    counts = [0, *(round(group.size / 2) for group in chosen(groups)[1:])]
    assert gone(groups, state) == lowest(means, counts)
    assert smaller(model, x, state) < sum(p.numel() for p in model.parameters())


@pytest.mark.deep(but=["global-residual"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("distribution", ["uniform", "global", "by path"])
def test_fpgm_compares_the_vectors_of_whole_units(kind, distribution):
    model, x, groups, params = made(kind)
    first, sizes = (
        chosen(groups)[0].members[0].leaf,
        [group.size for group in chosen(groups)],
    )
    shares = {
        "uniform": budgets.uniform(),
        "global": budgets.global_(),
        "by path": budgets.by_path({first: 0.0}),
    }
    algorithm = methods.fpgm(
        0.5,
        epoch=2,
        steps=4,
        pattern=groups.pattern(),
        distribution=shares[distribution],
    )
    state = algorithm.init(params)
    sums = [
        torch.cdist(v, v).sum(1)
        for v in (vectors(group, params) for group in chosen(groups))
    ]
    counts = [round(size / 2) for size in sizes]
    counts = {
        "uniform": counts,
        "global": round(sum(sizes) / 2),
        "by path": [0, *counts[1:]],
    }
    for step in range(2):
        state = algorithm.update(state, params, step)
    zeros = [
        (vectors(group, state.params) == 0).all(1).nonzero().flatten().tolist()
        for group in chosen(groups)
    ]
    assert list(map(set, zeros)) == lowest(sums, counts[distribution])
    assert all(mask.all() for mask in state.masks.values())
    for step in range(2, 4):
        state = algorithm.update(state, params, step)
    assert sum(map(len, gone(groups, state))) == sum(map(len, zeros))
    assert smaller(model, x, state) < sum(p.numel() for p in model.parameters())


def scales_of(groups, params):
    """The mean of |scale| of each unit, of the groups that have one."""
    scales = {
        path: x.abs()
        for path, x in params.items()
        if ".bn" in f".{path}" and path.endswith("weight")
    }
    return [
        vectors(group, scales).mean(1)
        for group in chosen(groups)
        if any(m.leaf in scales for m in group.members)
    ]


@pytest.mark.parametrize("distribution", ["global", "uniform", "by path"])
def test_slimming_takes_the_mean_of_the_scales_of_a_channel(distribution):
    model, x, groups, params = made("residual")
    params |= {
        f"bn{i}.weight": torch.linspace(0.1 + low, 0.5 + low, n)
        for i, n, low in ((1, 5, 0), (2, 4, 0.1), (3, 5, 0))
    }
    model.load_state_dict(params, strict=False)
    means = scales_of(groups, params)
    assert [len(own) for own in means] == [5, 4]
    # the sums: the first have two scales each
    assert lowest(means, 4) != lowest([2 * means[0], means[1]], 4)
    shares = {
        "uniform": budgets.uniform(),
        "global": budgets.global_(),
        "by path": budgets.by_path({"*conv1.*": 0.2}),
    }
    algorithm = methods.slimming(
        0.4,
        "*bn*.weight",
        steps=2,
        strength=0.01,
        pattern=groups.pattern(),
        distribution=shares[distribution],
    )
    state = algorithm.init(params)
    zeros = {path: torch.zeros_like(x) for path, x in params.items()}
    pulled = algorithm.view.grads(state, zeros, 0)
    assert {path for path, x in pulled.items() if x.any()} == {
        "bn1.weight",
        "bn2.weight",
        "bn3.weight",
    }
    for step in range(2):
        assert all(mask.all() for mask in state.masks.values())
        state = algorithm.update(state, zeros, step)
    counts = {"global": round(9 * 0.4), "uniform": [2, 2], "by path": [1, 2]}[
        distribution
    ]
    assert gone(groups, state) == lowest(means, counts)
    assert smaller(model, x, state) < sum(p.numel() for p in model.parameters())


def test_slimming_leaves_sets_without_a_scale():
    model, x, groups, params = made("residual")
    algorithm = methods.slimming(0.5, "bn2.weight", steps=1, pattern=groups.pattern())
    state = algorithm.update(algorithm.init(params), params, 0)
    assert [len(units) for units in gone(groups, state)] == [0, 2]
    smaller(model, x, state)


def test_training_with_the_optimizer():
    model, x, groups, params = made("residual")
    y = torch.tensor([0, 1, 2, 0])

    def loss(params):
        return F.cross_entropy(sf.modules.call(model, params, x), y)

    for method in (
        methods.taylor(1, when=sf.at([1, 3]), pattern=groups.pattern()),
        methods.fpgm(0.5, epoch=2, steps=4, pattern=groups.pattern()),
        methods.slimming(0.5, "*bn*.weight", steps=3, pattern=groups.pattern()),
    ):
        algorithm = sf.with_optimizer(method, SGD(0.01), skip=sf.never())
        state = algorithm.init(params)
        for step in range(4):
            state = algorithm.update(
                state, torch.func.grad(loss)(sf.effective(state)), step
            )
        assert sum(map(len, gone(groups, state))) in (2, 4)
        smaller(model, x, state)


def test_errors():
    pattern = made("residual")[2].pattern()
    params = sf.modules.params_of(made("residual")[0])
    with pytest.raises(
        TypeError,
        match=re.escape(
            "slimming: expected where to be globs of the scales of tied sets"
        ),
    ):
        methods.slimming(0.5, lambda path, leaf: "bn" in path, steps=1, pattern=pattern)
    algorithm = methods.slimming(0.5, "*.weight", steps=1, pattern=pattern)
    text = (
        "slimming: expected scales of one dimension, got shape (5, 2, 3, 3) at "
        "'conv1.weight'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        algorithm.view.grads(algorithm.init(params), params, 0)
    with pytest.raises(ValueError, match=re.escape(text)):
        algorithm.update(algorithm.init(params), params, 0)
    with pytest.raises(ValueError, match="expected distribution to be uniform"):
        methods.taylor(
            1, pattern=pattern, distribution=budgets.by_path({"conv1.weight": 0.5})
        )
    for name, make in (
        ("taylor", methods.taylor),
        ("fpgm", lambda pattern: methods.fpgm(0.5, epoch=1, steps=1, pattern=pattern)),
        (
            "slimming",
            lambda pattern: methods.slimming(0.5, "*", steps=1, pattern=pattern),
        ),
    ):
        text = (
            f"{name}: expected pattern to be one such as sf.patterns.channel(0) or "
            "groups.pattern(), got Groups"
        )
        with pytest.raises(TypeError, match=re.escape(text)):
            make(pattern=made("residual")[2])
    with pytest.raises(
        ValueError,
        match="by_unit: expected a pattern whose units have several entries, got unstr",
    ):
        methods.taylor(1, pattern=sf.patterns.unstructured())
    with pytest.raises(
        ValueError,
        match="distance: expected a pattern whose units have several entries, got "
        "unstr",
    ):
        methods.fpgm(0.5, epoch=1, steps=1, pattern=sf.patterns.unstructured())
