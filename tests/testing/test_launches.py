"""The counter of launches, bytes and waits."""

import contextlib

import pytest
import torch

from sparsefn.testing import Launches
from sparsefn.testing.launches import counted

META = torch.empty(4, 6, device="meta")
FLAGS = META > 0


@pytest.mark.parametrize(
    ("call", "launches", "size"),
    [
        (lambda: META + 1, 1, 192),
        (
            lambda: META.t().reshape(2, 12).unsqueeze(0)[:, 1:].select(2, 0).detach(),
            1,
            192,
        ),  # the reshape copies
        (lambda: META[0].expand(9, 6).sum(), 1, 28),
        (lambda: torch.empty(9, device="meta"), 0, 0),
        (lambda: torch.zeros(9, device="meta"), 1, 36),
        (lambda: META.clone().copy_(META), 2, 384),
        (lambda: META.clone().add_(1), 2, 384),
        (lambda: torch.add(META, 1, out=torch.empty(4, 6, device="meta")), 1, 192),
        (lambda: META.double(), 1, 96 + 192),
        (lambda: torch.ones(3) + 1, 0, 0),
        (lambda: META * torch.tensor(2.0), 1, 196),
        (lambda: META.topk(2), 1, 96 + 4 * 2 * 12),
        (lambda: torch._foreach_add_([META, META[0]], 1.0), 1, 2 * (96 + 24)),
        (
            lambda: torch._foreach_copy_([META, META[0]], [FLAGS, FLAGS[0]]),
            1,
            96 + 24 + 24 + 6,
        ),
    ],
    ids=range(14),
)
def test_operations_and_bytes(call, launches, size):
    found = counted(call)
    assert (found.launches, found.bytes, found.waits) == (launches, size, [])


@pytest.mark.parametrize(
    ("call", "wait"),
    [
        (lambda: META.sum().item(), "_local_scalar_dense"),
        (lambda: bool(FLAGS.any()), "_local_scalar_dense"),
        (lambda: FLAGS.nonzero(), "nonzero"),
        (lambda: META.masked_select(FLAGS), "masked_select"),
        (lambda: torch.equal(META, META + 1), "equal"),
        (lambda: FLAGS.unique(), "_unique2"),
        (lambda: META[FLAGS], "index by flags or by indices on the CPU"),
        (lambda: META[torch.tensor([0, 1])], "index by flags or by indices on the CPU"),
        (lambda: META.to("cpu"), "copy of (4, 6) from meta to cpu"),
        (lambda: torch.ones(3).to("meta"), "copy of (3,) from cpu to meta"),
        (lambda: META[0].clone().copy_(torch.ones(6)), "copy of (6,) from cpu to meta"),
    ],
    ids=range(11),
)
def test_waits(call, wait):
    found = Launches()
    # a meta tensor has no values
    with found, contextlib.suppress(RuntimeError, NotImplementedError):
        call()
    assert found.waits == [wait]


def test_operations_are_counted_by_name():
    assert counted(lambda: (META + 1).abs() + META).operations == {"add": 2, "abs": 1}
