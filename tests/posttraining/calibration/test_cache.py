"""Calls and outputs with their tensors kept elsewhere."""

import gc
import os
import threading

import pytest
import torch
from torch import nn

from sparsefn.posttraining.calibration import cache
from sparsefn.posttraining.calibration.cache import on_disk
from sparsefn.posttraining.calibration.capture import marked


def test_one_tensor_is_kept_once_and_read_as_one():
    x, kept_ones = torch.ones(3), []

    def keep(y):
        kept_ones.append(y)
        return cache.CachedTensor(y.clone)

    memo = {}
    first = cache.cache_tree((x, {"a": x, "b": None}), keep, memo)
    second = cache.cache_tree([x], keep, memo)
    one, rest = cache.read_tree(first)
    assert len(kept_ones) == 1 and rest["a"] is one and rest["b"] is None
    assert cache.read_tree(second)[0] is not one


def test_objects_are_copied_each_time_and_modules_are_not():
    class KeyValues:
        def __init__(self):
            self.keys = []

    values, layer = KeyValues(), nn.Linear(1, 1)
    cached = cache.cache_tree((values, [values], layer), cache.in_memory)
    one, (again,), same = cache.read_tree(cached)
    assert one is again and one is not values and same is layer
    one.keys.append(1)
    assert not cache.read_tree(cached)[0].keys and not values.keys


def test_objects_that_cannot_be_copied_or_hold_outputs_of_parts():
    class Box:
        def __init__(self, x):
            self.x = x

    for inside in (threading.Lock(), marked(cache.form_of(torch.ones(1)), 0)):
        stowed = cache.cache_tree([Box(inside)], cache.in_memory)
        with pytest.raises(
            cache.BrokenChainError,
            match="gets a Box that cannot be copied or holds outputs of others",
        ):
            cache.read_tree(stowed)


def test_forms_tell_outputs_apart():
    x = torch.ones(1)
    forms = [
        cache.form_of(out)
        for out in (x, (x,), [x], (x, 1), (x, 2), (x, None), {"a": x}, (x, x))
    ]
    assert all(a != b for i, a in enumerate(forms) for b in forms[:i])
    assert (
        cache.form_of((x, 1))
        == cache.cache_tree((torch.zeros(3), 1), cache.in_memory).form()
    )
    with pytest.raises(cache.BrokenChainError, match="returns a object"):
        cache.form_of((x, object()))


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_read_as_it_was(tmp_path, dtype):
    x = (torch.randn(8, 16, 64) * 3).to(dtype)
    views = (
        x,
        x.mT,
        x.permute(2, 0, 1),
        x[:, ::2],
        x[:1].expand(8, 16, 64),
        x[0, 0].expand(3, 64, 64),
        x[None],
    )
    for view in views:
        again = on_disk(tmp_path)(view).read()
        assert again.dtype == dtype and torch.equal(again, view)
        assert again.stride() == view.stride() or view.numel() != x.numel()


def test_small_and_odd_tensors_stay_in_memory(tmp_path):
    for x in (
        torch.ones(3),
        torch.empty(0, 4),
        torch.tensor(1.0),
        torch.ones(99, 99).to_sparse(),
    ):
        kept = on_disk(tmp_path)(x)
        assert kept.read() is x and not os.listdir(tmp_path)


def test_files_go_with_their_tensors_and_writing_changes_none(tmp_path):
    kept = on_disk(tmp_path)(torch.ones(64, 64))
    first = kept.read()
    first.add_(1)
    assert (
        torch.equal(kept.read(), torch.ones(64, 64)) and len(os.listdir(tmp_path)) == 1
    )
    del kept
    gc.collect()
    # which stays mapped
    assert not os.listdir(tmp_path) and float(first.sum()) == 2 * 64 * 64


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(handle, mode):
        os.close(handle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        on_disk(tmp_path)(torch.ones(64, 64))
    assert not os.listdir(tmp_path)
