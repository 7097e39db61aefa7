"""Distances of slices."""

import math

import pytest
import torch

import sparsefn as sf
from sparsefn.scores import distances as module

S = sf.scores


def leaf_state(w):
    return sf.State({"w": w}, {"w": torch.ones_like(w, dtype=torch.bool)})


def distances(w, *args, **kwargs):
    return S.distance(*args, **kwargs)(leaf_state(w), (), 0)["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", [1, 2, 3.0, math.inf])
@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 7), 0), ((5, 7), -1), ((4, 3, 2, 2), 0), ((4, 3, 2, 2), 1), ((6,), 0)]
)
def test_distance_sums_over_the_other_slices(shape, axis, norm, dtype):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = distances(w, norm, axis=axis)
    flat = w.movedim(axis, 0).reshape(w.shape[axis], -1)
    want = torch.cdist(flat, flat, p=norm).sum(1)
    assert found.shape == w.shape
    assert found.dtype == dtype
    for entry in found.movedim(axis, 0).reshape(w.shape[axis], -1).unbind(1):
        torch.testing.assert_close(entry, want)


def test_distance_takes_a_function_of_the_slices():
    w = torch.tensor([[[1.0, 2.0]], [[3.0, 5.0]]])
    seen = []

    def signed(rows):
        seen.append(rows.tolist())
        return rows[:, :1] - rows[None, :, 0]

    assert distances(w, signed).tolist() == [[[2.0, 2.0]], [[2.0, 2.0]]]
    assert seen == [[[1.0, 2.0], [3.0, 5.0]]]
    with pytest.raises(ValueError, match=r"distance: expected norm to give shape \(2, 2\) at 'w', got \(2, 1\)"):
        distances(w, lambda rows: rows[:, :1])


def test_distance_looks_at_sparsified_leaves_alone():
    params = {"b": torch.ones(9), "s": torch.ones(()), "w": torch.eye(2)}
    masks = {"b": torch.tensor(True), "s": torch.tensor(True), "w": torch.ones(2, 2, dtype=torch.bool)}
    found = S.distance(1)(sf.State(params, masks), (), 0)
    assert not found["b"].any()
    assert not found["s"].any()
    assert found["w"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_distance_of_16_bit_weights_is_summed_in_32(dtype):
    w = torch.tensor([[1.0], [1.0078125], [256.0]], dtype=dtype)
    found = distances(w, 1)
    assert found.dtype == torch.float32
    assert found.flatten().tolist() == distances(w.float(), 1).flatten().tolist()


def test_distance_errors():
    with pytest.raises(ValueError, match=r"distance: no axis 2 in shape \(2, 2\) at 'w'"):
        distances(torch.ones(2, 2), axis=2)
    for bad in ("2", True, None):
        with pytest.raises(TypeError, match=f"expected norm to be a number or a function of the slices, got {bad!r}"):
            S.distance(bad)


@pytest.mark.parametrize("norm", [1, 2])
def test_distance_is_the_same_bits_whatever_runs_it(norm, monkeypatch):
    w = torch.randn(6, 37, 33, generator=torch.Generator().manual_seed(0))
    want = torch.stack([distances(x, norm) for x in w])

    def score(x):
        return distances(x, norm)

    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(torch.stack([score(x) for x in w]), want)
    assert torch.equal(torch.func.vmap(score)(w), want)
    assert torch.equal(torch.func.vmap(score, in_dims=2)(w.permute(1, 2, 0)), want)
    assert torch.equal(torch.compile(score, fullgraph=True, backend="aot_eager")(w[0]), want[0])
    monkeypatch.setattr(module, "_PIECE", 5000)
    assert torch.equal(score(w[1]), want[1])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 4)])
def test_distance_of_few_slices(shape):
    assert not distances(torch.ones(shape)).any()


def test_the_slices_nearest_to_all_others_are_pruned():
    w = torch.tensor([[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [-9.0, 9.0]])
    algorithm = sf.one_shot(0.5, score=S.distance(), pattern=sf.patterns.channel(0, norm=math.inf))
    mask = algorithm.update(algorithm.init({"w": w}), {"w": w}, 0).masks["w"]
    assert mask.all(1).tolist() == [False, True, False, True]
    assert mask.any(1).tolist() == [False, True, False, True]
