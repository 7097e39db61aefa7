"""Memory for results, and jobs on threads."""

import threading

import numpy as np
import pytest
import torch

from sparsefn.engine import memory


def test_a_signalling_nan_is_as_any_other_on_every_thread(monkeypatch):
    monkeypatch.setattr(memory, "_MANY", 1)
    x = np.array([0x7F800001], np.uint32).view(np.float32)
    with np.errstate(all="raise"):
        assert all(np.isnan(y) for y in memory.each(lambda job: x + job, [1.0, 2.0], 1 << 24))


@pytest.mark.parametrize("work", [1, 1 << 24])
def test_every_job_runs_and_the_first_error_is_raised(work):
    lock, done = threading.Lock(), []

    def run(job):
        if job == 3:
            raise RuntimeError("job 3")
        with lock:
            done.append(job)

    memory.each(run, [0, 1, 2], work)
    assert sorted(done) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="job 3"):
        memory.each(run, [3, 4], work)


def test_much_work_is_done_on_the_threads_that_torch_has():
    threads, together = torch.get_num_threads(), threading.Barrier(2, timeout=20)
    torch.set_num_threads(2)
    try:
        memory.each(lambda job: together.wait() and None, [0, 1], 1 << 24)  # each waits for the other
    finally:
        torch.set_num_threads(threads)
