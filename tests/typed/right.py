"""A user's code that is right: mypy has nothing to say about it, and it runs."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import assert_type

import torch
from torch import Tensor, nn

import sparsefn as sf
from sparsefn.typing import Level, PlainScore, Schedule, Score, Step, Tree

net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
params = sf.modules.params_of(net)
assert_type(params, dict[str, Tensor])


# ---- algorithms ----------------------------------------------------------------------


def halfway(step: Step) -> float:
    return 0.5 if isinstance(step, int) and step > 10 else 0.0


def weighted(state: sf.State, grads: Tree, step: Step) -> Tree:
    return sf.tree.map_with_path(lambda path, leaf: 2 * leaf.abs(), state.params)


def a_third(fraction: float | Tensor, active: Tensor) -> Tensor:
    return active // 3


def run(algorithm: sf.Algorithm) -> sf.State:
    state = algorithm.init(params)
    return algorithm.update(
        state, {path: torch.ones_like(leaf) for path, leaf in params.items()}, 0
    )


levels: list[Level] = [0.5, torch.tensor(0.5), halfway, sf.schedules.linear(0.1, 0.01)]
schedule: Schedule = sf.schedules.polynomial(0.0, 0.9, begin=0, end=100)
scores: list[Score] = [
    sf.scores.magnitude,
    weighted,
    sf.scores.ema(weighted, 0.9),
    sf.scores.momentum(0.9),
]
plain: list[PlainScore] = [
    weighted,
    lambda state, grads, step: grads,
    sf.scores.distance(),
]
for level in levels:
    for one in (
        sf.gmp(level),
        sf.static(level),
        sf.rigl(level),
        sf.supermask(level),
        sf.iterative(level),
    ):
        assert_type(run(one), sf.State)
for score in [*scores, *plain]:
    run(sf.one_shot(0.5, score))
    run(sf.one_shot(0.5, score, distribution=sf.budgets.global_(floor=0.1)))
    run(sf.gmp(schedule, score=score, when=sf.every(2), pruned="keep"))

sf.set(
    0.9,
    drop=sf.scores.ranked(sf.scores.magnitude),
    steps=100,
    where="*.weight",
    key=sf.random.key(0),
)
sf.gmp(0.9, steps=100)
sf.rigl(
    0.9,
    drop_fraction=0.3,
    when=sf.every(100, stop=1000),
    distribution=sf.budgets.erk(),
    pruned="train",
)
sf.rigl(
    "current",
    drop_fraction=sf.schedules.cosine_decay(0.3, 100),
    init=sf.static(0.5),
    count=a_third,
)
sf.rigl(None, pattern=sf.patterns.nm(2, 4), redistribute=None, where=["0.*", "1.*"])
sf.snfs(
    0.9,
    grow=sf.scores.momentum(0.9),
    redistribute=sf.redistribute.Redistribute(sf.redistribute.mean_active, most=0.9),
)
sf.drop_grow(
    0.9,
    drop=sf.scores.magnitude,
    grow=weighted,
    grow_count=sf.redistribute.independently,
)
sf.iterative(count=3, init="dense")
sf.iterative(0.2, count=a_third, when=lambda step: step % 2 == 0)
sf.static(0.5, init={"0.weight": torch.ones(4, 4) > 0})
sf.static(
    0.5,
    init=lambda params: sf.masks.from_zeros(params),
    where=lambda path, leaf: leaf.ndim == 2,
)
sf.ste(0.5, pattern=sf.patterns.block((2, 2), "max"), init="magnitude")
widths: sf.patterns.Pattern = sf.patterns.tied(
    [["0.weight", 0], ["1.weight", 1]], reduce="l2"
)
sets = sf.patterns.tied(
    [[["0.weight", 0], ["1.weight", 1, [0, 1, -1]]], [["1.weight", 0, 2, 3]]]
)
sf.supermask("bernoulli", link=torch.sigmoid, init=lambda params: params)
sf.supermask(0.5, mode="joint", init="zeros")

# ---- composition ---------------------------------------------------------------------


class Plain:
    """An optimizer of one's own."""

    def init(self, params: Tree) -> Tree:
        return ()

    def update(
        self, updates: Tree, state: Tree, *, params: Tree, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        return sf.tree.map_with_path(lambda path, leaf: -0.1 * leaf, updates), state


inner = sf.chain(
    sf.static(0.5), sf.partition([("0.*", sf.gmp(0.5)), (sf.default_where, sf.dense())])
)
for optimizer in (
    sf.optimizers.sgd(0.1, momentum=0.9),
    sf.optimizers.adamw(halfway, betas=(0.9, 0.99)),
    Plain(),
):
    trained = run(sf.with_optimizer(sf.rigl(0.5), optimizer, reset=sf.at([3])))
    assert_type(trained, sf.State)
run(inner)
mixed = sf.optimizers.by_path(
    [("*.bias", sf.optimizers.sgd(0.1)), (sf.default_where, sf.optimizers.adam(1e-3))]
)
assert_type(mixed, sf.optimizers.Optimizer)
two_rates = sf.optimizers.parts({"params": mixed, "scores": sf.optimizers.sgd(halfway)})
run(sf.with_optimizer(sf.supermask(0.5, mode="joint"), two_rates, skip_nonfinite=True))
run(sf.phases([(0, sf.dense()), (10, sf.static(0.5))]))
run(sf.sequence(sf.gmp(schedule, init="dense"), sf.rigl("current", drop_fraction=0.5)))
sf.with_terms(sf.dense(), sf.terms.l1(1e-3), sf.terms.on("*.weight", sf.terms.l2(1e-3)))
sf.reparametrised(sf.reparam.power(2.0), sf.static(0.5))

# ---- states, modules and the rest ----------------------------------------------------

state = run(sf.static(0.5))
moved = state._replace(params=sf.apply_masks(state.params, state.masks))
again = sf.with_params(moved, params)
assert_type(again, sf.State)
lean: sf.Algorithm = sf.donated(sf.rigl(0.9))
replayed: sf.Algorithm = sf.captured(lean)
averaged: Tree = sf.optimizers.ema(
    again, torch.tensor(0.9), sf.optimizers.ema(again, 0.9)
)
clipped: Tree = sf.optimizers.clip_norm(params, 1.0, masks=again.masks)
x = torch.ones(2, 4)
out: Tensor = sf.modules.call(net, again, x)
sf.modules.call(net, sf.effective(again), x)
assert_type(sf.modules.bake(net, again), nn.Module)
sf.modules.to_sparse(net, again, "csr")
assert_type(sf.modules.to_sparse(net, sf.dense().init(params), "semi"), nn.Module)
assert_type(sf.modules.buffers_of(net), dict[str, Tensor])
sparse_average, dropped = sf.modules.mask_average(net, again.masks)
assert_type(sparse_average, nn.Module)
share: float = dropped.all.norm
shipped: dict[str, Tensor] = sf.modules.mask_average(net.state_dict(), again.masks)[0]
assert_type(sf.shrink(net, run(sf.one_shot(0.5, pattern=widths)), x), nn.Module)
gradients: Callable[..., tuple[Tree, Tree]] = sf.modules.value_and_grad(
    lambda p: (p["0.weight"] ** 2).sum()
)
value, grads = gradients(params)
assert_type(sf.checkpoint.state_dict(again), dict[str, Tensor])
sf.checkpoint.load_state_dict(again, sf.checkpoint.state_dict(again))
pairs = sf.static(None, pattern=sf.patterns.nm(2, 4)).init(params)
compressed = sf.checkpoint.compress(pairs, sf.patterns.nm(2, 4))
assert_type(compressed, dict[str, Tensor])
assert_type(sf.checkpoint.decompress(compressed), sf.State)
sf.checkpoint.compress(
    pairs,
    [("0.*", sf.patterns.nm(2, 4, axis=1)), (sf.default_where, sf.patterns.nm(2, 4))],
)
assert_type(sf.masks.topk_mask(x, 2, pattern=sf.patterns.nm(2, 4)), Tensor)
assert_type(sf.masks.gate(x, x, x > 0, mode="ste"), Tensor)
assert_type(sf.random.split(sf.random.key(0), 2), Tensor)
kept = sf.report.summary(again).total.kept
assert_type(kept, int)
assert_type(sf.report.plan(sf.rigl(0.9), params).rows[0].why, str)
assert_type(sf.report.scalars(again, old=again), dict[str, float])
assert_type(sf.report.changed(again, again).total.grown, int)
assert_type(sf.report.itop(sf.masks.explored(None, again)), float | Tensor)
sf.report.plot([sf.report.scalars(again)], steps=[0]).savefig(io.BytesIO())
sf.report.plot_masks(again).savefig(io.BytesIO())
assert_type(
    sf.config.from_config({"algorithm": "static", "sparsity": 0.5}), sf.Algorithm
)
sf.curvature.fisher(lambda params, batch: (params["0.weight"] * batch).sum(), (x,))


# ---- in a loop of torch.optim --------------------------------------------------------

torchs = torch.optim.AdamW(net.parameters())
sparse = sf.attach(
    sf.supermask(0.5, mode="joint"), net, torchs, extra_group={"lr": 1e-2}
)
net(torch.ones(2, 4)).sum().backward()
sparse.before_step()
torchs.step()
sparse.after_step(0)
assert_type(sparse.state, sf.State)
sparse.load_state_dict(sparse.state_dict())
sparse.detach()
