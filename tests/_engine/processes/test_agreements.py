"""Errors of one process: raised on all, told once, and by no message where the others
do not wait for one.
"""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from sparsefn._engine.processes import agreements
from sparsefn._engine.processes.agreements import agree, agreement, is_open, scope, tell
from sparsefn._engine.processes.collectives import Sum, in_step
from sparsefn._engine.processes.lines import GATHER, Lost
from tests.nn.distributed.harness import grid_of_four, on_ranks


def told():
    return (yield Sum([1])).tolist()


def test_one_process_raises_its_own_error():
    agree(())
    with agreement(()):
        assert is_open()
    assert not is_open()
    for code in (agreement(()), scope(())):
        with pytest.raises(KeyError), code:
            raise KeyError
    with pytest.raises(KeyError), scope((), KeyError()), agreement(()):
        pass
    with scope((), KeyError()):
        pass
    start = time.monotonic()
    with pytest.raises(KeyError), mock.patch.object(agreements, "WAIT", 0.0):
        tell((), KeyError())
    assert time.monotonic() - start < 2


def on_a_grid():
    """Cases on two rows and two columns of processes, where each has names of its own
    for its row and its column.
    """
    rank, row, column, world, sent = grid_of_four("all_reduce", GATHER)

    def raises(at):
        kind, text = (
            (ValueError, "^mine$")
            if rank == at
            else (RuntimeError, f"failed: rank {at}, ValueError: mine$")
        )
        return pytest.raises(kind, match=text)

    def fails(at, groups=(row, column)):
        before = time.monotonic()
        sent.clear()
        with raises(at), agreement(groups), agreement(groups):
            if rank == at:
                raise ValueError("mine")
            in_step([(groups, told())])  # in place of which it agrees
        assert sent == {GATHER: 2 * len(groups)}  # and is told once
        assert time.monotonic() - before < 20

    def another_row():
        with (
            pytest.raises(ValueError if rank == 2 else RuntimeError),
            agreement((row, column)),
        ):
            with agreement((row,)):
                if rank == 2:
                    raise ValueError("mine")
            in_step([((row, column), told())])

    def before_a_row():
        # The others are in the exchange of their rows; a process with an error does not
        # know.
        for at in range(4):
            with raises(at), agreement((row, column)):
                if rank == at:
                    raise ValueError("mine")
                in_step([((column,), told())])
                in_step([((row,), told())])

    def differ(at, own, others, text):
        start = time.monotonic()
        with pytest.raises(ValueError, match=f"^{text}$"), agreement((row, column)):
            agree((row,), seen=own if rank == at else others)
        assert time.monotonic() - start < 20

    def not_alike():
        step, leaf, another = (
            {("step", ""): "3"},
            {("params", "w"): "a"},
            {("params", "w"): "b"},
        )
        same = "expected the same "
        differ(
            2,
            {("step", ""): "4"},
            step,
            same + "step on every rank, but rank 0 has 3, and rank 2 has 4",
        )
        differ(
            0,
            {},
            step,
            same + "step on every rank, but rank 0 has none, and rank 1 has 3",
        )
        place = same + "params on every rank, but not at 'w': "
        differ(
            3,
            step | another,
            step | leaf,
            place + "rank 0 has a there, and rank 3 has b there",
        )
        differ(
            1,
            step,
            step | leaf,
            place + "rank 0 has a there, and rank 1 has no leaf there",
        )
        sent.clear()
        agree((row, column), seen=step)
        assert sent == {GATHER: 2}

    def nothing_fails():
        with agreement((row, column)):
            assert in_step([((row,), told())]) == [[2]]

    def two_fail():
        kind, text = (
            (ValueError, "mine")
            if rank in (1, 3)
            else (RuntimeError, "rank 1, ValueError: mine")
        )
        with pytest.raises(kind, match=text), agreement((row, column)):
            if rank in (1, 3):
                raise ValueError("mine")

    def long_words():
        kind = ValueError if rank == 0 else RuntimeError
        with pytest.raises(kind, match="é{100}"), agreement((row, column)):
            if rank == 0:
                raise ValueError("é" * 1000)

    def rehearsed():
        # The error of one process waits for the first agreement, and is raised there on
        # all.
        with (
            raises(2),
            scope((row, column), ValueError("mine") if rank == 2 else None),
            agreement((row,)),
        ):
            in_step([((row,), told())])
        with scope((row, column), ValueError("mine") if rank == 2 else None):
            sent.clear()
        assert not sent

    def told_where_they_wait():
        with raises(1):
            if rank == 1:
                tell((row, column), ValueError("mine"))
            with scope((row, column)):
                time.sleep(0.2)
                with agreement((row,)):
                    pass

    def kept_where_they_do_not():
        sent.clear()
        if rank == 1:
            with raises(1), mock.patch.object(agreements, "WAIT", 0.3):
                tell((row, column), ValueError("mine"))
        dist.barrier()
        assert not sent
        with agreement((row, column)):
            pass

    yield "an error of the last", lambda: fails(3)
    yield "an error of the first", lambda: fails(0)
    yield "an error in the world", lambda: fails(1, (world,))
    yield "an error in one row", another_row
    yield "an error before an exchange of rows", before_a_row
    yield "no error", nothing_fails
    yield "not alike", not_alike
    yield "two errors", two_fail
    yield "long words", long_words
    yield "an error that waits", rehearsed
    yield "told where they wait", told_where_they_wait
    yield "kept where they do not", kept_where_they_do_not
    yield "no error after all", nothing_fails


def test_four_processes():
    on_ranks(4, on_a_grid)


@pytest.mark.deep
def test_who_does_not_come_is_told():
    on_ranks(2, one_stays_away)


def one_stays_away():
    rank, short = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=3))

    def waits():
        start = time.monotonic()
        if rank == 0:
            text = (
                "^rank 0 waited for other processes, which did not come, or have "
                "ended: every process must make"
            )
            with pytest.raises(Lost, match=text), agreement((short.group_name,)):
                agree(())
            assert time.monotonic() - start < 20  # one timeout: it is not told again

    yield "one stays away", waits
