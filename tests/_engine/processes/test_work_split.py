"""Rows that processes deal out."""

import pytest
import torch
from nn.distributed.harness import on_ranks
from torch import distributed

from sparsefn._engine.processes import check_alike, dealing, dealt, gathered, own

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64)


def test_one_process_has_all_and_tells_nobody():
    x = torch.ones(2)
    with dealt(()):
        check_alike("a call", x)
        assert not dealing() and own(3) == range(3) and gathered(x)[0] is x


def cases():
    rank, world = distributed.get_rank(), (distributed.group.WORLD.group_name,)

    def parts_follow_each_other():
        assert own(7) == range(7) and not dealing()
        parts = {
            7: [range(3), range(3, 5), range(5, 7)],
            1: [range(1), range(1, 1), range(1, 1)],
        }
        with dealt(world):
            assert (
                dealing()
                and all(own(n) == given[rank] for n, given in parts.items())
                and not own(0)
            )
        assert not dealing()

    def rows_come_in_order():
        with dealt(world):
            for dtype in DTYPES:
                whole = torch.arange(14).reshape(7, 2).remainder(5).to(dtype)
                part = slice(own(7).start, own(7).stop)
                turned = whole.T.contiguous().T[part]
                found = gathered(turned, whole[part, 0], whole[:0] if rank else whole)
                assert all(x.dtype == dtype for x in found)
                assert [x.tolist() for x in found] == [
                    x.tolist() for x in (whole, whole[:, 0], whole)
                ]

    def others_values_are_told():
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        large = torch.arange(2.0**19).reshape(512, 1024)
        swapped, negative = x[[1, 0]] if rank else x, -0.0 * x if rank else 0.0 * x
        other = (
            r"a tensor of \(2, 2\), torch.float32 with checksum \S+ on process 0, and "
            r"a tensor of \(2, 2\), "
        )
        for mine, text in (
            (("a call", swapped), "in a call: " + other),
            (("a call", x.T.contiguous() if rank else x), "in a call: " + other),
            (("a call", negative), "in a call: " + other),
            (
                ("a call", large + rank // 2),
                r"in a call: a tensor of \(512, 1024\), torch.float32 with checksum",
            ),
            (
                ("a call", large.flip(0) if rank else large),
                r"in a call: a tensor of \(512, 1024\), torch.float32 with",
            ),
            (
                ("a call", (x > rank + 1)[:, 1:]),
                r"in a call: a tensor of \(2, 1\), torch.bool with checksum",
            ),
            (
                ("a call", (x > rank + 1).view(-1)[1:]),
                r"in a call: a tensor of \(3,\), torch.bool with checksum",
            ),
            (("a call", x, rank // 2), "in a call: 0 on process 0, and 1 on process 2"),
            (
                ("a call", *["x"] * rank),
                "they are at: nothing on process 0, and x on process 1",
            ),
            (
                (f"the call {rank}", x),
                "they are at: the call 0 on process 0, and the call 1 on process 1",
            ),
        ):
            told = (
                "by_rows: expected the same calls with the same values on all "
                f"processes, but {text}"
            )
            with pytest.raises(ValueError, match=told), dealt(world):
                check_alike(*mine)
        with dealt(world):
            check_alike("a call", x, torch.ones(()), torch.ones(0, 2), print, object())

    def who_leaves_first_is_told():
        told = "but they are at: a call on process 0, and the end on process 1"
        with pytest.raises(ValueError, match=told), dealt(world):
            if not rank:
                check_alike("a call")

    def an_error_is_one_on_all():
        with (
            pytest.raises((KeyError, RuntimeError), match="nothing there"),
            dealt(world),
        ):
            if rank == 1:
                raise KeyError("nothing there")
            gathered(torch.ones(2))
        assert not dealing()

    def transforms_are_refused():
        told = "by_rows: expected calls outside of vmap and other transforms"
        with pytest.raises(ValueError, match=told), dealt(world):
            torch.vmap(lambda x: x * len(own(2)))(torch.ones(2))

    yield "parts", parts_follow_each_other
    yield "rows", rows_come_in_order
    yield "other values", others_values_are_told
    yield "who leaves first", who_leaves_first_is_told
    yield "an error", an_error_is_one_on_all
    yield "transforms", transforms_are_refused


def test_three_processes():
    on_ranks(3, cases)
