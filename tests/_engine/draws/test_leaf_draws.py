"""The draws of all leaves at once have the bits of one leaf after the other."""

import pytest
import torch

import sparsefn as sf
from sparsefn._engine.draws.draws import as_keys, digest
from sparsefn._engine.draws.leaf_draws import (
    drawn_leaves,
    draws_laid,
    keys_on_device,
    unchecked_key,
)
from sparsefn._engine.draws.threefry import draw
from sparsefn._engine.leaves import lists
from sparsefn.testing.launches import counted

KEY = sf.random.key(5)
LEAVES = {
    "a": torch.zeros(3, 7),
    "b.weight": torch.zeros(0, 4),
    "c": torch.zeros(()),
    "d": torch.zeros(50),
}


@pytest.mark.parametrize("step", [None, 0, 7, torch.tensor(7)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("most", [5, 25, 1000])
def test_leaves_that_are_laid_end_to_end_have_the_same_draws(
    kind, dtype, step, most, monkeypatch
):
    monkeypatch.setattr(lists, "MOST", most)
    draw = {"uniform": sf.random.uniform_like, "normal": sf.random.normal_like}[kind]
    want = [
        draw(sf.random.leaf_key(KEY, path, step), leaf, dtype)
        for path, leaf in LEAVES.items()
    ]
    made = draws_laid(KEY, list(LEAVES), list(LEAVES.values()), step, kind, dtype)
    one_by_one = drawn_leaves(KEY, LEAVES, step, kind, dtype)
    for path, got, other, expected in zip(
        LEAVES, made, one_by_one.values(), want, strict=True
    ):
        assert torch.equal(got, expected) and torch.equal(other, expected), path
        assert got.dtype == dtype and got.shape == expected.shape


@pytest.mark.parametrize("step", [None, 3, torch.tensor(3)], ids=str)
def test_keys_of_leaves(step):
    want = torch.stack([sf.random.leaf_key(KEY, path, step) for path in LEAVES])
    assert torch.equal(keys_on_device(KEY, list(LEAVES), step, KEY.device), want)
    assert torch.equal(unchecked_key(KEY, "a", step), want[0])


def test_keys_that_are_folded_on_a_device_have_the_same_bits():
    index = torch.tensor([digest(path) for path in LEAVES])[:, None]
    made = as_keys(draw(KEY, index, 1, "fold str", torch.int64)[..., 0])
    made = as_keys(draw(made, torch.tensor([9]), 1, "fold int", torch.int64)[..., 0])
    assert torch.equal(
        made, torch.stack([sf.random.leaf_key(KEY, path, 9) for path in LEAVES])
    )


THERE = torch.empty((), dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("key", "step", "most"),
    [
        (KEY, 3, 150),
        (KEY, torch.tensor(3), 150),
        (KEY, THERE, 300),
        (KEY.to("meta"), 3, 450),
    ],
    ids=["all on the CPU", "a step in a tensor", "a step there", "a key there"],
)
def test_launches_do_not_grow_with_leaves_and_nothing_waits(key, step, most):
    def drawn(n):
        leaves = {str(i): torch.empty(4, 5, device="meta") for i in range(n)}
        return counted(
            lambda: drawn_leaves(key, leaves, step, "uniform", torch.float32)
        )

    few, many = drawn(2), drawn(60)
    assert few.launches == many.launches <= most and not many.waits


def test_draws_are_where_the_leaves_are():
    leaves = {"a": torch.zeros(3, device="meta"), "b": torch.zeros(3)}
    made = drawn_leaves(KEY, leaves, 0, "uniform", torch.float32)
    assert [x.device.type for x in made.values()] == ["meta", "cpu"]
    assert (
        sf.random.uniform_like(KEY, leaves["a"]).is_meta
        and sf.random.normal_like(KEY, leaves["a"]).is_meta
    )


def test_several_keys_draw_for_each():
    keys = sf.random.split(KEY, 2)
    made = drawn_leaves(keys, {"a": torch.zeros(3)}, None, "uniform", torch.float32)[
        "a"
    ]
    assert torch.equal(
        made[1],
        drawn_leaves(keys[1], {"a": torch.zeros(3)}, None, "uniform", torch.float32)[
            "a"
        ],
    )
