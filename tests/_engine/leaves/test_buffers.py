"""Memory for results, and jobs on threads."""

import threading

import numpy as np
import pytest
import torch

from sparsefn._engine.leaves import buffers
from sparsefn._engine.transforms import foreach_add_
from sparsefn.testing import Launches
from sparsefn.testing.launches import counted


def test_a_signalling_nan_is_as_any_other_on_every_thread(monkeypatch):
    monkeypatch.setattr(buffers, "_MANY", 1)
    x = np.array([0x7F800001], np.uint32).view(np.float32)
    with np.errstate(all="raise"):
        assert all(
            np.isnan(y)
            for y in buffers.run_jobs(lambda job: x + job, [1.0, 2.0], 1 << 24)
        )


@pytest.mark.parametrize("work", [1, 1 << 24])
def test_every_job_runs_and_the_first_error_is_raised(work):
    lock, done = threading.Lock(), []

    def run(job):
        if job == 3:
            raise RuntimeError("job 3")
        with lock:
            done.append(job)

    buffers.run_jobs(run, [0, 1, 2], work)
    assert sorted(done) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="job 3"):
        buffers.run_jobs(run, [3, 4], work)


def test_much_work_is_done_on_the_threads_that_torch_has():
    threads, together = torch.get_num_threads(), threading.Barrier(2, timeout=20)
    torch.set_num_threads(2)
    try:
        # each waits for the other
        buffers.run_jobs(lambda job: together.wait() and None, [0, 1], 1 << 24)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("numbers", [[], [3], [2**62 + 1, -(2**63), 0]], ids=str)
def test_numbers_are_written_exactly(numbers):
    made = buffers.written(numbers, torch.device("cpu"))
    assert made.tolist() == numbers and made.dtype == torch.int64
    # What a device does, on the CPU.
    there = torch.zeros(len(numbers), dtype=torch.int64)
    if numbers:
        foreach_add_(list(there.unbind()), numbers)
    assert there.tolist() == numbers
    found = counted(lambda: buffers.written(numbers, torch.device("meta")))
    assert found.launches <= 2 and not found.waits


def test_a_cpu_tensor_is_brought_to_a_device_without_a_copy():
    meta = torch.device("meta")
    found = counted(lambda: buffers.brought(torch.ones(2, 3, dtype=torch.int64), meta))
    assert not found.waits and buffers.brought(
        torch.ones(2, 3, dtype=torch.int64), meta
    ).shape == (2, 3)
    # no whole numbers
    assert counted(lambda: buffers.brought(torch.ones(2), meta)).waits
    here = torch.ones(2)
    assert buffers.brought(here, here.device) is here
    assert (
        buffers.as_tensor_on(3, meta).is_meta
        and buffers.as_tensor_on(torch.tensor(3), meta).shape == ()
    )
    with pytest.raises(
        ValueError, match="expected scores and counts on one device, got cpu and meta"
    ):
        buffers.as_tensor_on(torch.ones((), device="meta"), torch.device("cpu"))


def test_one_float_is_written_to_a_device_and_not_copied():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with Launches() as counted:
            made = buffers.brought(torch.tensor(0.3, dtype=dtype), torch.device("meta"))
        assert (made.dtype, made.shape, made.device.type) == (dtype, (), "meta")
        assert not counted.waits
    slope = torch.tensor(0.3, requires_grad=True)
    assert buffers.brought(slope, torch.device("meta")).requires_grad
