"""What a run on ranks says when a case fails, and that it ends."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.nn.distributed.harness import on_ranks


def some_fail(word):
    rank = dist.get_rank()

    def add():
        counts = torch.ones(2)
        dist.all_reduce(counts)
        assert int(counts[0]) == 2

    def fail(*ranks):
        assert rank not in ranks, f"{word} of rank {rank}"

    yield "sum", add
    yield "both", lambda: fail(0, 1)
    yield "sum again", add
    yield "one", lambda: fail(1)
    yield "never reached", lambda: fail(0, 1)


def test_a_failure_names_its_case_and_rank():
    with pytest.raises(AssertionError) as caught:
        on_ranks(2, some_fail, "the word")
    text = str(caught.value)
    assert (
        "rank 0, both:" in text and "rank 1, both:" in text and "rank 1, one:" in text
    )
    assert "AssertionError: the word of rank 1" in text
    assert (
        "sum" not in text and "rank 0, one:" not in text and "never reached" not in text
    )


def some_stop(how):
    yield "at ease", lambda: None
    if how == "hang" or dist.get_rank() == 0:
        yield "at work", lambda: time.sleep(600)
    yield "broken", lambda: os._exit(3)


def test_a_rank_that_hangs_says_where():
    start = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"(?s)exit code 1; .*case at work\nTimeout.*test_harness"
    ):
        on_ranks(2, some_stop, "hang", seconds=2)
    assert time.monotonic() - start < 100


def test_a_rank_that_dies_ends_the_run():
    start = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"(?s)rank 1, ended with exit code 3; .*case broken"
    ):
        on_ranks(2, some_stop, "die")
    assert time.monotonic() - start < 100
