"""Sweeps by the kernel, run by Triton's interpreter, against the sweep in torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import by_interpreter, without

import sparsefn as sf
from sparsefn._engine.backends import BACKENDS
from sparsefn._engine.selection import best_of_columns
from sparsefn.posttraining.solve import sweep as solve_sweep
from sparsefn.posttraining.solve.sweep import Choice, Columns, Rounding, sweep_by_sums
from sparsefn_kernels.sweep import sweep

pytestmark = by_interpreter

nm = sf.patterns.nm

ODD = torch.tensor([0.0, -0.0, 1.0, 1e-45, -3e19, 3e38, torch.inf, torch.nan])


def choice_of(span, best):
    choose = best_of_columns(span, best, torch.device("cpu"))
    return Choice(span, 1, lambda scores, i: choose(scores), best)


def rounding_of(old, grid, draw, seed):
    if grid is None:
        return None
    low, high = grid
    scale = 2.0 ** torch.randint(-3, 3, old.shape, generator=draw).to(old.dtype)
    if seed % 2:  # halves are rare, and divisions round
        scale *= 1.3
    zero = torch.randint(low, high + 1, old.shape, generator=draw).to(old.dtype)
    return Rounding(scale, zero, low, high)


def columns_of(columns, rows, dtype, odd, grid, seed):
    draw = torch.Generator().manual_seed(seed)
    due, old = torch.randn(2, columns, rows, generator=draw, dtype=dtype)
    if grid is not None:  # halves between the numbers of the grid, too
        due, old = (due * 16).round() / 16, (old * 16).round() / 16
    if odd:  # ties, and numbers that overflow
        some = ODD[torch.randint(len(ODD), old.shape, generator=draw)].to(dtype)
        old = torch.where(torch.rand(old.shape, generator=draw) < 0.4, some, old)
        due = due * 0.0
    mask = torch.rand(columns, rows, generator=draw) < 0.5
    square = torch.randn(columns, columns + 3, generator=draw, dtype=dtype)
    factor = square[:, :columns].tril(-1) if odd else square.tril(-1)[:, :columns]
    scale = torch.rand(columns, generator=draw, dtype=dtype)
    return Columns(due, old, mask, factor, scale, rounding_of(old, grid, draw, seed))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 31, 32, 33, 70]),
    st.sampled_from([(1, 1), (4, 2), (4, 0), (4, 4), (8, 3), (20, 11)]),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, (-8, 7), (0, 3), (-128, 127)]),
)
def test_the_bits_are_those_of_torch(
    seed, rows, pattern, groups, dtype, odd, given_, grid
):
    span, best = pattern
    at = columns_of(span * groups, rows, dtype, odd, grid, seed)
    due, changes, mask = (x.clone() for x in at[:3])
    choice = None if given_ else choice_of(span, best)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        n_best = None if given_ else best
        assert sweep(due, changes, mask, *at[3:], span, n_best)
    sweep_by_sums(at, choice)
    torch.testing.assert_close(changes, at.changes, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(
        changes.signbit() | changes.isnan(), at.changes.signbit() | at.changes.isnan()
    )
    assert torch.equal(mask, at.mask)


X = torch.ones(3, 5)
TAKEN = (X, X, X > 0, torch.eye(3), torch.ones(3), None, 3, None)
REFUSED = {
    "another dtype": [x.half() for x in (X, X)],
    "columns that are not adjacent": [X.T.contiguous().T] * 2,
}


def test_groups_of_fewer_columns_are_left_to_torch():
    assert not sweep(*(x.clone() for x in TAKEN[:5]), None, 2, 1)


def test_large_grids_are_left_to_torch():
    for high in (1 << 24, 1 << 25):
        grid = Rounding(X, X, 0, high)
        some = [x.clone() for x in TAKEN[:5]]
        assert sweep(*some, grid, *TAKEN[6:]) is (high == 1 << 24)


@pytest.mark.parametrize("name", REFUSED)
def test_other_tensors_are_left_to_torch(name):
    assert sweep(*(x.clone() for x in TAKEN[:5]), *TAKEN[5:])
    assert not sweep(*REFUSED[name], *TAKEN[2:])


def test_under_transforms_they_are_left_to_torch():
    seen = []
    torch.vmap(lambda x: seen.append(sweep(x, *TAKEN[1:])) or x)(X[None])
    assert seen == [False]


@pytest.mark.parametrize("best", [0, 2])
def test_the_operator_is_what_it_says_it_is(best):
    tensors = [x.clone() for x in TAKEN[:5]]
    torch.library.opcheck(
        torch.ops.sparsefn_kernels.sweep.default,
        (*tensors, *[tensors[0].clone()] * 2, -8, 7, 3, best, bool(best)),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0.4},
        {"pattern": nm(2, 4)},
        {"pattern": nm(7, 20), "block": 20},
        {"keep": 0.5, "round_to": 1},
        {"pattern": nm(2, 4), "round_to": 8},
    ],
)
def test_obs_has_the_same_bits_with_and_without(options, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 160, generator=draw)
    weight, hessian = torch.randn(40, 160, generator=draw), x.T @ x
    if "round_to" in options:
        group = 160 // options["round_to"]
        options = {**options, "round_to": sf.solve.grid(weight, 4, group=group)}
    monkeypatch.setattr(solve_sweep, "by_products", lambda device: False)
    with without():
        want = sf.solve.obs(weight, hessian, **options)
    calls = []

    def counted(*args):
        calls.append(sweep(*args))
        return calls[-1]

    monkeypatch.setitem(BACKENDS, ("sweep", "cpu"), counted)
    got = sf.solve.obs(weight, hessian, **options)
    assert calls == [True] * 3
    assert all(map(torch.equal, got, want))
