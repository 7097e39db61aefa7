"""The calls of torch.cuda that make a graph, in their order, on a stand-in for it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import sparsefn as sf
from sparsefn.algorithms.combine import cuda_graphs
from sparsefn.algorithms.combine.cuda_graphs import GRAPHS, Waits, line_of, stream_of

DEVICE = torch.device("cuda", 0)
X = torch.ones(2)


class FakeCuda:
    """What `cuda_graphs` uses of torch.cuda; it writes down what is called."""

    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self):
        self.calls = []
        self.mode = 1
        self.capturing = False

    def say(self, text):
        self.calls.append(text)

    @contextlib.contextmanager
    def during(self, text):
        self.say(text)
        try:
            yield
        finally:
            self.say(f"end of {text}")

    def device(self, device):
        return self.during(f"device {device.index}")

    def Stream(self, device):
        self.say(f"stream on {device}")
        return SimpleNamespace(wait_stream=lambda other: self.say("side waits"))

    def current_stream(self, device=None):
        return SimpleNamespace(
            wait_stream=lambda other: self.say("current waits"), cuda_stream=7
        )

    def stream(self, stream):
        return self.during("side stream")

    def graph(self, graph, *, pool, stream, capture_error_mode):
        return self.during(f"capture in {pool}, {capture_error_mode}")

    def graph_pool_handle(self):
        return "pool"

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.say("replay"))

    def is_current_stream_capturing(self):
        return self.capturing

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode
        self.say(f"mode {mode}")


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_a_function_runs_twice_and_is_captured(cuda):
    graph = GRAPHS["cuda"](DEVICE)()

    def run():
        cuda.say("run")
        return X

    assert graph.capture(run) is X
    graph.replay()
    checked = ["mode error", "run", "mode 1"]
    assert cuda.calls == [
        "stream on cuda:0",
        "device 0",
        "side waits",
        "side stream",
        "run",
        *checked,
        "end of side stream",
        "current waits",
        "capture in pool, thread_local",
        *checked,
        "end of capture in pool, thread_local",
        "end of device 0",
        "replay",
    ]


def waiting(cuda):
    if cuda.mode == "error":
        raise RuntimeError("called a synchronizing CUDA operation\nmore")


def test_a_function_that_waits_is_refused_with_its_line(cuda):
    graph = GRAPHS["cuda"](DEVICE)()
    with pytest.raises(Waits, match=r"^line \d+ of .*_cuda_graphs.py: called a syn"):
        graph.capture(lambda: waiting(cuda))
    assert cuda.mode == 1
    assert not [call for call in cuda.calls if call.startswith("capture")]


def test_errors_of_the_function_are_its_own(cuda):
    with pytest.raises(ZeroDivisionError):
        GRAPHS["cuda"](DEVICE)().capture(lambda: 1 / 0)

    def memory_is_out():
        if cuda.mode == "error":
            raise torch.OutOfMemoryError("out")

    with pytest.raises(torch.OutOfMemoryError):
        GRAPHS["cuda"](DEVICE)().capture(memory_is_out)
    assert cuda.mode == 1


def test_a_stream_that_a_user_captures_is_left_alone(cuda):
    assert stream_of(DEVICE) == 7
    assert stream_of(torch.device("cpu")) == 0
    cuda.capturing = True
    assert stream_of(DEVICE) is None


def test_the_place_of_an_error_is_not_in_torch():
    with pytest.raises(RuntimeError) as error:
        torch.vmap(lambda x: x.item())(X)
    assert line_of(error.value).startswith(f"line {error.traceback[0].lineno + 1} of")


def test_graphs_are_for_cuda_alone():
    assert list(GRAPHS) == ["cuda"]
    assert cuda_graphs.Graph.capture.__doc__


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_replays_on_a_gpu_have_the_bits_of_eager_updates():
    algorithm = sf.with_optimizer(
        sf.set(0.5, when=sf.every(2), key=sf.random.key(0)), sf.optimizers.adamw(0.1)
    )
    captured = sf.captured(algorithm)
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(64, 32, generator=generator).cuda()}
    eager = replayed = algorithm.init(params)
    for step in range(8):
        grads = {"w": torch.randn(64, 32, generator=generator).cuda()}
        eager = algorithm.update(eager, grads, step)
        replayed = captured.update(replayed, grads, step)
        one, other = map(sf.checkpoint.state_dict, (eager, replayed))
        assert all(torch.equal(x, other[path]) for path, x in one.items())
