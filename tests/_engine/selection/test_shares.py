"""Largest remainders, caps and overflow."""

import math

import pytest
import torch

import sparsefn as sf

B = sf.budgets


def test_largest_remainder():
    assert B.apportion({"a": 1.0, "b": 1.0, "c": 1.0}, 2) == {"a": 1, "b": 1, "c": 0}
    assert B.apportion({"a": 5.0, "b": 3.0, "c": 1.0}, 7) == {"a": 4, "b": 2, "c": 1}
    assert B.apportion({}, 0) == {}


def test_the_example_of_a_float_loop():
    # Shares .9/.05/.05 of 30 with 15, 110 and 110 places: 15 and the rest in equal
    # parts, 8 and 7.
    assert B.apportion(
        {"a": 0.9, "b": 0.05, "c": 0.05}, 30, {"a": 15, "b": 110, "c": 110}
    ) == {
        "a": 15,
        "b": 8,
        "c": 7,
    }


def test_overflow_cascades_by_share():
    got = B.apportion(
        {"a": 10.0, "b": 2.0, "c": 1.0, "d": 1.0},
        20,
        {"a": 2, "b": 3, "c": 50, "d": 50},
    )
    assert got == {"a": 2, "b": 3, "c": 8, "d": 7}


def test_zero_shares_come_last():
    assert B.apportion({"a": 1.0, "b": 0.0}, 5, {"a": 9, "b": 9}) == {"a": 5, "b": 0}
    assert B.apportion({"a": 1.0, "b": 0.0, "c": 0.0}, 7, {"a": 3, "b": 2, "c": 6}) == {
        "a": 3,
        "b": 1,
        "c": 3,
    }
    assert B.apportion({"a": 0.0, "b": 0.0}, 4, {"a": 4, "b": 4}) == {"a": 2, "b": 2}
    assert B.apportion({"a": math.nan, "b": 1.0}, 4, {"a": 4, "b": 3}) == {
        "a": 1,
        "b": 3,
    }


def test_all_full():
    caps = {"a": 3, "b": 0, "c": 5}
    assert B.apportion({"a": 0.1, "b": 9.0, "c": 0.2}, 8, caps) == caps


@pytest.mark.deep
def test_tensors_give_what_numbers_give():
    shares, caps = {"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 4, "b": 9, "c": 9}
    totals = torch.arange(23)
    got = torch.func.vmap(lambda t: B.apportion(shares, t, caps))(totals)
    for i, total in enumerate(totals.tolist()):
        want = B.apportion(shares, total, caps)
        assert {k: int(v[i]) for k, v in got.items()} == want and sum(
            want.values()
        ) == total
    compiled = torch.compile(
        lambda t: B.apportion(shares, t, caps), fullgraph=True, backend="aot_eager"
    )
    assert {k: int(v) for k, v in compiled(torch.tensor(17)).items()} == B.apportion(
        shares, 17, caps
    )


def test_shares_of_any_size_get_the_same():
    # Remainders tie here, and would not if a share were rounded on the way.
    shares, caps = (
        {"a": 1.0, "b": 3.0, "c": 6.0, "d": 0.0},
        {"a": 9, "b": 9, "c": 2, "d": 9},
    )
    for total in range(30):
        want = B.apportion(shares, total, caps)
        assert sum(want.values()) == total
        for power in (-1000, -401, -400, 400, 401, 1000):
            scaled = {name: math.ldexp(share, power) for name, share in shares.items()}
            assert B.apportion(scaled, total, caps) == want
    assert (
        B.apportion({"a": 1.0, "b": 3.0}, 2)
        == B.apportion({"a": 2.0**900, "b": 3 * 2.0**900}, 2)
        == {"a": 1, "b": 1}
    )


def test_totals_are_exact_up_to_the_largest():
    for total in (2**53, 2**53 - 1, 2**52 + 1):
        assert sum(B.apportion({"a": 1.0, "b": 1.0, "c": 1.0}, total).values()) == total
    with pytest.raises(
        ValueError,
        match=r"expected a total of at most 2\*\*53, up to which counts are exact .*, "
        r"got 9007199254740993",
    ):
        B.apportion({"a": 1.0, "b": 1.0, "c": 1.0}, 2**53 + 1)


def test_errors():
    with pytest.raises(ValueError, match="cannot hand out 9 among caps that sum to 8"):
        B.apportion({"a": 1.0}, 9, {"a": 8})
    with pytest.raises(
        ValueError, match="expected finite shares >= 0, got -1.0 at 'a'"
    ):
        B.apportion({"a": -1.0}, 1)


def test_room_of_others_is_no_room():
    with pytest.raises(ValueError, match="cannot hand out 3 among caps that sum to 2"):
        B.apportion({"a": 1.0}, 3, {"a": 2, "b": 5})
