"""torch.ao.pruning beside sparsefn, step by step on the same weights: masks and levels
are equal.

Scores are distinct, as ties are unspecified there, and weights are float64, so that two
ways to sum never disagree about an order. Each combination that the original gets wrong
is named where it is avoided.
"""

import functools
import math
import warnings

import optree
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.pruning import (
    CubicSL,
    LambdaSL,
    NearlyDiagonalSparsifier,
    WeightNormSparsifier,
)
from torch.ao.pruning._experimental.data_sparsifier import DataNormSparsifier
from torch.ao.pruning._experimental.pruner import (
    FPGMPruner,
    LSTMSaliencyPruner,
    SaliencyPruner,
)

import sparsefn as sf

live = functools.partial(settings, max_examples=25, deadline=None, derandomize=True)
TOP = float("inf")
NORMS = {
    None: torch.square,
    1: torch.abs,
    2: torch.square,
    "callable": lambda x: x.abs() ** 1.5 + x.abs(),
}

seeds = st.integers(0, 2**31)
levels = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]) | st.floats(
    0.0, 1.0
)


def normal(shape, seed):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


class Holder(nn.Module):
    """A module of one bare weight."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w.clone())


def play(sparsifier, weights, settings):
    """The mask of theirs after each step: on one of the weights, with settings of its
    own.
    """
    module = Holder(weights[0])
    sparsifier.prepare(module, [{"tensor_fqn": "w"}])
    for w, setting in zip(weights, settings, strict=True):
        module.parametrizations.w.original.data.copy_(w)
        sparsifier.groups[0].update(setting)
        sparsifier.step()
        yield module.parametrizations.w[0].mask != 0


def one_mask(sparsifier, w):
    (mask,) = play(sparsifier, [w], [{}])
    return mask


def update(algorithm, w, step=0, state=None):
    state = (
        algorithm.init({"w": w}) if state is None else sf.with_params(state, {"w": w})
    )
    return algorithm.update(state, {"w": torch.zeros_like(w)}, step)


def effective_score(norm):
    return lambda state, grads, step: optree.tree_map(norm, sf.effective(state))


def n_blocks(shape, box):
    return math.prod(-(-n // b) for n, b in zip(shape, box, strict=True))


@st.composite
def blocks(draw, whole):
    """A shape, a block, and zeros_per_block; with `whole`, blocks divide the shape."""
    box = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    if whole:
        shape = tuple(b * draw(st.integers(1, 4)) for b in box)
    else:
        shape = tuple(draw(st.integers(2, 13)) for _ in box)
    return shape, box, draw(st.integers(0, math.prod(box)))


@st.composite
def weight_norms(draw):
    # Theirs fails with zeros_per_block where a border block is partial.
    shape, box, zeros = draw(
        st.one_of(
            blocks(whole=True),
            blocks(whole=False).map(lambda c: (*c[:2], math.prod(c[1]))),
        )
    )
    return shape, box, zeros, draw(st.sampled_from(list(NORMS)))


def weight_norm(level, box, zeros, norm):
    norm = NORMS[norm] if norm == "callable" else norm
    return WeightNormSparsifier(
        level, box, None if zeros == math.prod(box) else zeros, norm
    )


@live(max_examples=60)
@given(weight_norms(), levels, seeds)
def test_weight_norm(case, level, seed):
    shape, box, zeros, norm = case
    w, n = normal(shape, seed), n_blocks(shape, box)
    theirs = one_mask(weight_norm(level, box, zeros, norm), w)
    lost = round(level * n)
    # theirs leaves one block whole below level 1
    kept = n - (lost if level == 1 else min(lost, n - 1))
    pattern = sf.patterns.block(box, zeros=zeros)
    assert torch.equal(
        sf.masks.topk_mask(NORMS[norm](w), kept, pattern=pattern), theirs
    )
    if lost == n - kept:
        algorithm = sf.one_shot(level, effective_score(NORMS[norm]), pattern=pattern)
        assert torch.equal(update(algorithm, w).masks["w"], theirs)


@live()
@given(weight_norms(), st.lists(levels, min_size=2, max_size=4), seeds)
def test_weight_norm_step_after_step(case, steps, seed):
    shape, box, zeros, norm = case
    n = n_blocks(shape, box)
    if zeros == math.prod(box):
        # where the level falls, theirs grows any of the pruned blocks, which all score
        # 0
        steps = sorted(steps)
    # theirs leaves one block whole
    assume(all(level == 1 or round(level * n) < n for level in steps))
    weights = [normal(shape, seed + i) for i in range(len(steps))]
    sparsifier = weight_norm(0.0, box, zeros, norm)
    algorithm = sf.gmp(
        sf.schedules.piecewise(dict(enumerate(steps))),
        score=effective_score(NORMS[norm]),
        pattern=sf.patterns.block(box, zeros=zeros),
        init="dense",
        pruned="train",
        regrow=True,
    )
    state = None
    for i, mask in enumerate(
        play(sparsifier, weights, [{"sparsity_level": level} for level in steps])
    ):
        state = update(algorithm, weights[i], i, state)
        assert torch.equal(state.masks["w"], mask)
        assert torch.equal(state.params["w"], weights[i])


@live()
@given(blocks(whole=False), st.lists(levels, min_size=1, max_size=3), seeds)
def test_whole_blocks_only_ever_go(case, steps, seed):
    shape, box, _ = case
    steps, n = sorted(steps), n_blocks(shape, box)
    # theirs leaves one block whole
    assume(all(level == 1 or round(level * n) < n for level in steps))
    weights = [normal(shape, seed + i) for i in range(len(steps))]
    sparsifier = WeightNormSparsifier(0.0, box, norm=1)
    algorithm = sf.gmp(
        sf.schedules.piecewise(dict(enumerate(steps))),
        pattern=sf.patterns.block(box),
        init="dense",
    )
    state = None
    for i, mask in enumerate(
        play(sparsifier, weights, [{"sparsity_level": level} for level in steps])
    ):
        state = update(algorithm, weights[i], i, state)
        assert torch.equal(state.masks["w"], mask)


@live(max_examples=40)
@given(
    blocks(whole=False),
    st.sampled_from(["L1", "L2"]),
    st.lists(levels, min_size=1, max_size=3),
    seeds,
)
def test_data_norm(case, norm, steps, seed):
    # The shape has no side of 1, which theirs squeezes off its mask, and no level is
    # below 0, where it counts wrong.
    shape, box, zeros = case
    score = torch.abs if norm == "L1" else torch.square
    sparsifier = DataNormSparsifier(
        sparse_block_shape=box, zeros_per_block=zeros, norm=norm
    )
    algorithm = sf.gmp(
        sf.schedules.piecewise(dict(enumerate(steps))),
        score=lambda state, grads, step: optree.tree_map(score, state.params),
        pattern=sf.patterns.block(box, zeros=zeros),
        init="dense",
        pruned="train",
        regrow=True,
    )
    state = None
    for i, level in enumerate(steps):
        data = normal(shape, seed + i)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the name is there already
            sparsifier.add_data("w", data)
        sparsifier.data_groups["w"]["sparsity_level"] = level
        sparsifier.step()
        state = update(algorithm, data, i, state)
        assert torch.equal(state.masks["w"], sparsifier.get_mask("w") != 0)
        assert torch.equal(
            sf.effective(state)["w"], sparsifier.get_data("w", return_original=False)
        )


@live(max_examples=60)
@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(-3, 19), seeds)
def test_nearly_diagonal(shape, nearliness, seed):
    w = normal(shape, seed)

    def ours():
        return (
            sf.static(None, pattern=sf.patterns.nearly_diagonal(nearliness))
            .init({"w": w})
            .masks["w"]
        )

    try:
        theirs = one_mask(NearlyDiagonalSparsifier(nearliness), w)
    except ValueError:
        with pytest.raises(ValueError, match="nearliness"):
            ours()
    else:
        assert torch.equal(ours(), theirs)


def rows(mask):
    assert torch.equal(mask.flatten(1).any(1), mask.flatten(1).all(1))
    return mask.flatten(1).any(1)


weights = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 14), seeds
).map(lambda drawn: normal((drawn[1], *drawn[0]), drawn[2]))
# Functions of the rows that give their distances; the names say what theirs takes.
DISTANCES = {None: 2, 1: 1, 2: 2, "callable": lambda x: -torch.cdist(x, x, p=3.0)}


@live(max_examples=40)
@given(weights, st.sampled_from(list(DISTANCES)), levels)
def test_fpgm(w, dist, level):
    # Ties: two rows are equally far from each other, and the two middle ones of numbers
    # from all others.
    assume(len(w) != 2 and w[0].numel() > 1)
    # One step: the scores of a second one are of masked rows there, and no row ever
    # comes back.
    theirs = one_mask(
        FPGMPruner(level, DISTANCES[dist] if dist == "callable" else dist), w
    )
    algorithm = sf.one_shot(
        level,
        sf.scores.distance(DISTANCES[dist]),
        pattern=sf.patterns.channel(0, norm=TOP),
    )
    assert torch.equal(rows(update(algorithm, w).masks["w"]), theirs)


@live(max_examples=40)
@given(weights, levels)
def test_saliency(w, level):
    theirs = one_mask(SaliencyPruner({"sparsity_level": level}), w)
    lost, pattern = int(len(w) * level), sf.patterns.channel(0)  # theirs truncates
    assert torch.equal(
        rows(sf.masks.topk_mask(w, len(w) - lost, pattern=pattern)), theirs
    )
    assert torch.equal(
        rows(update(sf.iterative(count=lost, pattern=pattern), w).masks["w"]), theirs
    )
    if round(len(w) * level) == lost:
        assert torch.equal(
            rows(update(sf.one_shot(level, pattern=pattern), w).masks["w"]), theirs
        )


@live()
@given(st.integers(1, 6), st.integers(1, 6), levels, seeds)
def test_gates_of_an_lstm(hidden, inputs, level, seed):
    w, pattern = normal((4 * hidden, inputs), seed), sf.patterns.channel(0, groups=4)
    sparsifier = LSTMSaliencyPruner({"sparsity_level": level})
    theirs = one_mask(sparsifier, w)
    lost = int(hidden * level)  # theirs truncates
    assert torch.equal(
        rows(sf.masks.topk_mask(w, hidden - lost, pattern=pattern)), theirs
    )
    if 4 * lost == round(4 * hidden * level):
        assert torch.equal(
            rows(update(sf.one_shot(level, pattern=pattern), w).masks["w"]), theirs
        )


def scheduled(make, base, epochs):
    """The levels that one of their schedulers gives at each epoch."""
    sparsifier = WeightNormSparsifier(base)
    sparsifier.prepare(Holder(torch.ones(2, 4)), [{"tensor_fqn": "w"}])
    with warnings.catch_warnings():
        # that the scheduler steps before the sparsifier
        warnings.simplefilter("ignore")
        scheduler = make(sparsifier)
        found = list(scheduler.get_last_sl())
        for _ in range(epochs):
            scheduler.step()
            found += scheduler.get_last_sl()
    return found


@live()
@given(
    levels,
    levels,
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
def test_cubic_sl(first, last, begin, delta, total, initially_zero):
    first, last = sorted((first, last))  # theirs stays at a level above the last
    args = {
        "init_sl": first,
        "init_t": begin,
        "delta_t": delta,
        "total_t": total,
        "initially_zero": initially_zero,
    }
    theirs = scheduled(functools.partial(CubicSL, **args), last, 30)
    cubic = sf.schedules.polynomial(first, last, begin=begin, end=begin + delta * total)
    begun = sf.schedules.piecewise(
        {0: 0.0, begin: 1.0} if initially_zero and begin else {0: 1.0}
    )
    assert [cubic(step) * begun(step) for step in range(31)] == pytest.approx(
        theirs, abs=1e-12
    )


@live(max_examples=10)
@given(levels, st.floats(0.1, 1.0))
def test_lambda_sl(base, decay):
    theirs = scheduled(lambda s: LambdaSL(s, lambda epoch: decay**epoch), base, 10)
    assert [base * decay**step for step in range(11)] == pytest.approx(
        theirs, abs=1e-12
    )
    assert [
        sf.schedules.power(base, decay)(step) for step in range(11)
    ] == pytest.approx(theirs, abs=1e-12)
