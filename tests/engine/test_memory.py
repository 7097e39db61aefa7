"""Which tensors show their memory, and jobs on threads."""

import threading
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sparsefn as sf
from sparsefn.engine import memory


class Named(torch.Tensor):
    pass


HIDDEN = {
    "vmap": lambda see: torch.vmap(see)(torch.ones(2, 3)),
    "grad": lambda see: torch.func.grad(lambda x: see(x).sum())(torch.ones(3)),
    "jvp": lambda see: torch.func.jvp(see, (torch.ones(3),), (torch.ones(3),)),
    "fake": lambda see: see(FakeTensorMode().from_tensor(torch.ones(3))),
    "trace": lambda see: make_fx(see)(torch.ones(3)),
    "functionalize": lambda see: torch.func.functionalize(see)(torch.ones(3)),
    "functionalize of a plain one": lambda see: torch.func.functionalize(lambda _: see(torch.ones(3)))(torch.ones(1)),
    "negative view": lambda see: see(torch._neg_view(torch.ones(3))),
    "zeros": lambda see: see(torch._efficientzerotensor((3,))),
    "subclass": lambda see: see(torch.ones(3).as_subclass(Named)),
    "meta": lambda see: see(torch.ones(3, device="meta")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool])
def test_the_memory_is_shared(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    seen = memory.visible(x)
    x[1, 2] = 0
    assert seen.shape == (2, 3) and not seen[1, 2] and seen.sum() == 5


def test_bfloat16_comes_as_words():
    seen = memory.visible(torch.tensor([1.0, -0.0], dtype=torch.bfloat16))
    assert seen.dtype == np.int16 and seen.tolist() == [0x3F80, -0x8000]


def test_a_tensor_that_requires_grad_shows_its_memory():
    assert memory.visible(torch.nn.Parameter(torch.ones(2))).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_traced_or_elsewhere_stays_hidden(name):
    seen = []

    def see(x):
        seen.append(memory.visible(x))
        return x * 1.0

    HIDDEN[name](see)
    assert seen and all(found is None for found in seen)


def test_layouts_and_dtypes_that_numpy_lacks_stay_hidden():
    x = torch.ones(3, 3)
    lacking = [x.to(torch.float8_e5m2), x.to_sparse(), x.to_mkldnn()]
    assert all(memory.visible_inside(other) is None for other in lacking)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_fresh_tensor_shares_its_memory(dtype):
    like = memory.visible(torch.ones(2, 3, dtype=dtype))
    with torch.device("meta"):
        out, values = memory.fresh(like, dtype)
    values[:] = like
    assert out.dtype == dtype and out.device.type == "cpu" and torch.equal(out, torch.ones(2, 3, dtype=dtype))


def test_a_signalling_nan_is_as_any_other_on_every_thread(monkeypatch):
    monkeypatch.setattr(memory, "_MANY", 1)
    x = np.array([0x7F800001], np.uint32).view(np.float32)
    with np.errstate(all="raise"):
        assert all(np.isnan(y) for y in memory.each(lambda job: x + job, [1.0, 2.0], 1 << 24))


def test_compiled_code_sees_no_memory():
    @torch.compile(backend="eager", fullgraph=True)
    def see(x):
        return x + (0.0 if memory.visible(x) is None else 1.0)

    assert see(torch.ones(2)).tolist() == [1.0, 1.0]


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


def test_inside_an_operator_a_mode_that_looks_on_hides_nothing():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Watch():
        seen += [memory.visible(x), memory.visible_inside(x)]
    assert seen[0] is None and seen[1].tolist() == [1.0, 1.0]


def test_a_recorded_program_does_not_take_a_mask_for_a_constant():
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that recording is old
        torch.jit.trace(lambda x: seen.append(memory.visible(x)) or x + 1.0, (torch.ones(3),))
        with pytest.raises(RuntimeError):
            torch.jit.trace(lambda x: sf.topk_mask(x, 2), (torch.ones(3),))
    assert seen and seen[0] is None
