"""Elementwise work on plain tensors is handed on. (On DTensors: tests/distributed.)"""

import torch

from sparsefn.engine.local import each_local, localized


def test_plain_lists_are_handed_on():
    given = [torch.ones(2)], [torch.zeros(2)]
    seen = []

    @each_local
    def fn(*lists):
        seen.append(lists)
        return list(lists[-1])

    assert fn(*given)[0] is given[1][0]
    assert all(a is b for a, b in zip(seen[0], given, strict=True))
    assert fn([], []) == []


def test_plain_rows_are_handed_on():
    rows = [(torch.ones(2), torch.zeros(2))]
    found, rebuild = localized(rows, tuple)
    assert found is rows and rebuild is tuple
