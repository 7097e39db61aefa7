"""Entries of a competition as arrays, and when their memory is visible."""

import numpy as np
import torch

from sparsefn._engine.selection import entries


def arrays(*fields, absolute=False):
    seen = entries.arrays([entries.Entry(*fields, absolute=absolute)])
    return None if seen is None else seen[0]


def test_arrays_share_the_memory_of_wide_scores_and_flags():
    x, allow, deny = torch.ones(3), torch.ones(3) > 0, torch.ones(3) > 1
    at = arrays(x, allow, deny)
    x[0], allow[0], deny[0] = 5.0, False, True
    assert (at.wide[0], at.allow[0], at.deny[0]) == (5.0, False, True)
    assert at.narrow is None and at.out.shape == (3,) and at.out.dtype == bool


def test_narrow_scores_come_as_a_tensor():
    for dtype in (torch.float16, torch.bfloat16):
        at = arrays(torch.ones(3, dtype=dtype))
        assert at.wide is None and at.narrow.dtype == dtype


def test_flat_arrays_have_the_same_memory():
    flat = entries.reshaped(
        at := arrays(torch.arange(6.0).reshape(2, 3), None, torch.eye(2, 3) > 0)
    )
    assert flat.wide.tolist() == [0, 1, 2, 3, 4, 5] and flat.deny.tolist() == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert (
        flat.narrow is None
        and flat.allow is None
        and np.shares_memory(flat.out, at.out)
        and flat.out.shape == (6,)
    )


def test_memory_that_is_not_visible_makes_no_arrays():
    x, flags = torch.ones(2, 3), torch.ones(2, 3) > 0
    for hidden in (lambda x, f: arrays(x), lambda x, f: arrays(torch.ones(3), f)):
        seen = []
        torch.vmap(
            lambda x, f, hidden=hidden, seen=seen: seen.append(hidden(x, f)) or x
        )(x, flags)
        assert seen == [None]
    assert arrays(torch.ones(3), None, torch.ones(3, device="meta") > 0) is None
