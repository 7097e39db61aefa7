"""Traits of cases, their shares, and what is said of too few."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from sparsefn.testing import Case, coverage

EVEN = torch.tensor([[1.0, 2.0, 3.0, 4.0]])


def case(*leaves: Tensor, grad: Tensor | None = None, sparsity: float = 0.5) -> Case:
    params = list(leaves)
    grads = [x * 1.0 for x in leaves] if grad is None else [grad, *leaves[1:]]
    return Case(params, (grads,), sparsity, 0)


@pytest.mark.parametrize(
    ("drawn", "traits"),
    [
        (case(EVEN), set()),
        (case(torch.tensor([[1.0, -1.0]])), {"ties"}),
        (case(torch.tensor([[torch.nan, torch.nan]])), {"nan"}),
        (case(EVEN, grad=torch.zeros(1, 4)), {"ties"}),
        (case(EVEN, grad=torch.tensor([[1.0, 2.0, 3.0, torch.nan]])), {"nan"}),
        (case(EVEN, torch.ones(3)), set()),  # a bias is not sparsified
        (case(EVEN, torch.empty(0, 3)), {"empty leaf"}),
        (case(EVEN, torch.empty(0)), {"empty leaf"}),
        (case(EVEN, torch.tensor(1.0)), {"0-d leaf"}),
        (case(EVEN, sparsity=0.375), {"half of a unit"}),
        (case(EVEN, sparsity=0.25), set()),
        (
            case(EVEN, EVEN[:, :3] * 2, sparsity=1.5 / 7),
            {"half of a unit"},
        ),  # of both together
        (
            case(torch.arange(1.0, 102.0)[None], sparsity=49.5 / 101),
            {"half of a unit"},
        ),  # though it rounds
        (case(EVEN, EVEN.double()), set()),
        (case(EVEN, EVEN * 2, EVEN * 3), set()),
        (case(EVEN, EVEN * 2, EVEN.double()), {"three leaves of several dtypes"}),
    ],
)
def test_traits(drawn: Case, traits: set[str]) -> None:
    assert coverage.traits(drawn) == traits
    assert traits <= set(coverage.LEAST)


def test_shares_of_counted_cases() -> None:
    found = coverage.trait_shares(
        coverage.of_cases([case(EVEN), case(EVEN, sparsity=0.375)])
    )
    assert (
        found["half of a unit"] == 0.5
        and found["ties"] == 0.0
        and set(found) == set(coverage.LEAST)
    )
    assert coverage.trait_shares(coverage.of_cases([]))["ties"] == 0.0


def test_too_few_of_a_trait_are_told_with_room_for_chance() -> None:
    counted = Counter({coverage.CASES: 400, "half of a unit": 200})
    assert coverage.missing(counted, {"half of a unit": 0.5}) == []
    assert coverage.missing(counted, {"half of a unit": 0.6, "ties": 0.1}) == [
        "half of a unit in 50% of 400 cases, expected 60% or more",
        "ties in 0% of 400 cases, expected 10% or more",
    ]
    # Of 100 draws with the least share 0.5 one has less than 35 once in a thousand
    # times.
    for n, told in ((36, 0), (34, 1)):
        assert (
            len(
                coverage.missing(
                    Counter({coverage.CASES: 100, "ties": n}), {"ties": 0.5}
                )
            )
            == told
        )


def test_of_few_cases_nothing_is_told() -> None:
    assert coverage.ENOUGH == 100
    assert (
        coverage.missing(Counter({coverage.CASES: 99}))
        == coverage.missing(Counter())
        == []
    )
    assert len(coverage.missing(Counter({coverage.CASES: 100}))) == len(coverage.LEAST)
