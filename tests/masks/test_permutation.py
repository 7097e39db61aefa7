"""Orders of channels under which N:M masks keep more."""

import itertools
import re

import pytest
import torch

import sparsefn as sf


def draw(*shape, seed=0):
    make = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*shape, generator=make)
        * torch.rand(1, shape[1], *(1 for _ in shape[2:]), generator=make).exp()
    )


def kept(weight, n, m, axis=1):
    size = weight.abs()
    return (
        size[sf.masks.topk_mask(size, None, pattern=sf.patterns.nm(n, m, axis))]
        .double()
        .sum()
        .item()
    )


@pytest.mark.deep(but=["2-4"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (1, 2), (2, 8), (5, 8)])
def test_more_is_kept_and_no_pair_of_groups_gains(n, m):
    weight = draw(12, 8 * m)
    found = sf.permutation.channels(weight, n, m)
    assert (
        sorted(found.order.tolist()) == list(range(8 * m))
        and found.order.dtype == torch.int64
    )
    moved = weight[:, found.order]
    assert found.before == kept(weight, n, m) < found.after == kept(moved, n, m)
    for i, j in itertools.combinations(range(8 * m), 2):
        if i // m != j // m and (i + j) % 3 == 0:  # some of all exchanges
            other = moved.clone()
            other[:, [i, j]] = other[:, [j, i]]
            assert kept(other, n, m) <= found.after + 1e-3


def test_two_groups_of_four_are_shared_out_as_well_as_can_be():
    weight = draw(5, 8)
    best = max(
        kept(weight[:, [*first, *(i for i in range(8) if i not in first)]], 2, 4)
        for first in itertools.combinations(range(8), 4)
    )
    assert sf.permutation.channels(weight, 2, 4).after == pytest.approx(best, rel=1e-6)


@pytest.mark.deep
def test_escapes_and_rounds():
    weight = draw(16, 48)
    one, more, other = (
        sf.permutation.channels(weight, 2, 4, escapes=n) for n in (0, 12, 12)
    )
    assert more.after >= one.after and torch.equal(more.order, other.order)
    key = sf.random.key(5)
    assert sf.permutation.channels(weight, 2, 4, escapes=12, key=key).after >= one.after
    short = sf.permutation.channels(weight, 2, 4, rounds=2)
    assert short.before < short.after < one.after


def test_it_is_the_same_for_threads_layouts_scales_and_kernels():
    weight = draw(8, 24, 3)
    found = sf.permutation.channels(weight, 2, 4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads % 2 + 1)
        again = sf.permutation.channels(
            weight.transpose(0, 2).contiguous().transpose(0, 2), 2, 4
        )
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again.order, found.order)
    assert torch.equal(
        sf.permutation.channels(weight * 2.0**-40, 2, 4).order, found.order
    )
    last = sf.permutation.channels(weight.movedim(1, 2), 2, 4, axis=-1)
    assert sorted(last.order.tolist()) == list(range(24)) and last.after > last.before
    flat = weight.movedim(1, 2).reshape(-1, 24)
    assert torch.equal(sf.permutation.channels(flat, 2, 4).order, found.order)


def test_a_permuted_network_has_the_same_outputs():
    torch.manual_seed(0)
    first, second = torch.nn.Linear(6, 16), torch.nn.Linear(16, 4)
    x = torch.randn(3, 6)
    expected = second(torch.relu(first(x)))
    order = sf.permutation.channels(second.weight, 2, 4).order
    with torch.no_grad():
        second.weight.copy_(second.weight[:, order])
        first.weight.copy_(first.weight[order])
        first.bias.copy_(first.bias[order])
    torch.testing.assert_close(second(torch.relu(first(x))), expected)


@pytest.mark.parametrize(
    "weight", [torch.zeros(3, 8), torch.ones(3, 4), torch.ones(0, 8)]
)
def test_where_nothing_can_gain_the_order_stays(weight):
    found = sf.permutation.channels(weight, 2, 4, escapes=1)
    assert (
        found.order.tolist() == list(range(weight.shape[1]))
        and found.before == found.after
    )
    assert sf.permutation.channels(weight, 4, 4).order.tolist() == found.order.tolist()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: sf.permutation.channels(torch.ones(2, 6), 2, 4),
            "expected axis 1 divisible by 4, got shape (2, 6)",
        ),
        (
            lambda: sf.permutation.channels(torch.tensor([[1.0, float("nan")]]), 1, 2),
            "permutation.channels: expected finite weights, got NaN or inf",
        ),
        (lambda: sf.permutation.channels(torch.ones(2, 4), 2, 4, rounds=0), "rounds"),
        (
            lambda: sf.permutation.channels(torch.ones(2, 4), 2, 4, escapes=-1),
            "escapes",
        ),
    ],
)
def test_bad_arguments(call, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        call()
