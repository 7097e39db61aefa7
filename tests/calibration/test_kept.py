"""Calls and outputs with their tensors kept elsewhere."""

import threading

import pytest
import torch
from torch import nn

from sparsefn.calibration import kept


def test_one_tensor_is_kept_once_and_read_as_one():
    x, kept_ones = torch.ones(3), []

    def keep(y):
        kept_ones.append(y)
        return kept.KeptTensor(y.clone)

    memo = {}
    first = kept.stow((x, {"a": x, "b": None}), keep, memo)
    second = kept.stow([x], keep, memo)
    one, rest = kept.unstow(first)
    assert len(kept_ones) == 1 and rest["a"] is one and rest["b"] is None
    assert kept.unstow(second)[0] is not one


def test_objects_are_copied_each_time_and_modules_are_not():
    class Cache:
        def __init__(self):
            self.keys = []

    cache, layer = Cache(), nn.Linear(1, 1)
    stowed = kept.stow((cache, [cache], layer), kept.in_memory)
    one, (again,), same = kept.unstow(stowed)
    assert one is again and one is not cache and same is layer
    one.keys.append(1)
    assert not kept.unstow(stowed)[0].keys and not cache.keys


def test_objects_that_cannot_be_copied_or_hold_outputs_of_parts():
    class Box:
        def __init__(self, x):
            self.x = x

    for inside in (threading.Lock(), kept.marked(kept.form_of(torch.ones(1)), 0)):
        stowed = kept.stow([Box(inside)], kept.in_memory)
        with pytest.raises(
            kept.BrokenChainError,
            match="gets a Box that cannot be copied or holds outputs of others",
        ):
            kept.unstow(stowed)


def test_forms_tell_outputs_apart():
    x = torch.ones(1)
    forms = [
        kept.form_of(out)
        for out in (x, (x,), [x], (x, 1), (x, 2), (x, None), {"a": x}, (x, x))
    ]
    assert all(a != b for i, a in enumerate(forms) for b in forms[:i])
    assert kept.form_of((x, 1)) == kept.stow((torch.zeros(3), 1), kept.in_memory).form()
    with pytest.raises(kept.BrokenChainError, match="returns a object"):
        kept.form_of((x, object()))
