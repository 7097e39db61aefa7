"""What the host hands to kernels is what they take: all launches are compiled as they
would be, and none is made.
"""

import pytest
import torch
from kernel_runs import by_compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import sparsefn as sf
from sparsefn._engine.draws import threefry
from sparsefn._engine.selection import Entry
from sparsefn.posttraining.solve.sweep import Rounding
from sparsefn_kernels import draw, select, step, sweep

pytestmark = by_compiler

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Absent:
    """A driver of a GPU that is not here."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were to be launched, once for each time one was
    compiled.
    """
    before, run = driver._active, JITFunction.run
    names, made = [], {}

    def compiled(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in made:
            made[id(kernel)] = kernel  # kept, so that no other has its id
            names.append(self.__name__)
        assert all(isinstance(size, int) and size > 0 for size in grid)

    driver.set_active(Absent())
    monkeypatch.setattr(JITFunction, "run", compiled)
    yield names
    driver._active = before


def entries(*tensors):
    return [Entry(x) for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_winners_are_launched_as_they_are_written(dtype, launched):
    one, rows = (
        torch.zeros(1, 100_000, dtype=dtype),
        torch.zeros(3, 20_000, dtype=dtype),
    )
    few, small = torch.zeros(9, 16, dtype=dtype), torch.zeros(2, 500, dtype=dtype)
    counts = torch.arange(7)
    for joint in (False, True):
        spans = [1] if joint else [1, 3, 1, 2]
        masks = select.winners(entries(one, rows, few, small), counts, spans, joint)
        assert [mask.shape for mask in masks] == [
            x.shape for x in (one, rows, few, small)
        ]
    large = {"bracket", "divide", "count_digits", "finish"}
    assert set(launched) == {"write_table", "select_whole", "select_narrow", *large}


def test_more_calls_need_few_more_kernels(launched):
    for n in (10_001, 50_000, 100_016, 1_000_000):
        for k in (0, 1, 16, n):
            select.winners(entries(torch.zeros(1, n)), torch.tensor([k]), [1], False)
    large = [name for name in launched if name != "write_table"]
    assert len(large) <= 2 * 4, launched  # of aligned tables and scores, and of others


def test_draws_are_launched_as_they_are_written(launched):
    keys = sf.random.split(sf.random.key(0), 3)
    for kind, dtype in (
        ("words", torch.int64),
        ("pairs", torch.int64),
        ("uniform", torch.bfloat16),
    ):
        assert draw.draws(keys, None, 100, kind, dtype, (1, 2), 8).shape == (3, 100)
    for dtype in DTYPES[:3]:
        assert draw.draws(
            keys[0], torch.arange(9), 9, "normal", dtype, (0, 0), 24
        ).shape == (9,)
    for below in (0, 1 << 31, 1 << 32, torch.rand(9)):
        assert draw.coins(keys, below, None, 9).shape == (3, 9)
    for kind, dtype in [("uniform", dtype) for dtype in DTYPES] + [
        ("normal", dtype) for dtype in DTYPES[:3]
    ]:
        digits = threefry.DIGITS[dtype]
        made = draw.draws_of_leaves(keys, [5000, 0, 7], kind, dtype, (0, 0), digits)
        assert [x.shape for x in made] == [(5000,), (0,), (7,)]
    assert set(launched) == {"draw", "draw_leaves", "write_table"}


def test_steps_are_launched_as_they_are_written(launched):
    params, grads = (
        [torch.zeros(3000), torch.zeros(5, 7)],
        [torch.ones(3001)[1:], torch.ones(5, 7)],
    )
    count, number = torch.tensor(0), torch.tensor(0.5, dtype=torch.float64)
    masks = [params[0] > 0, torch.tensor(True)]
    # memory that starts at multiples of 16 bytes, and other memory
    for some in (params, grads):
        rows = list(zip(params, masks, some, params, params, strict=True))
        for decay, decoupled in ((0.0, False), (0.1, False), (0.1, True)):
            moved, new = step.adam(
                rows,
                [count, number, number, number],
                (0.9, 0.99),
                1e-8,
                decay,
                decoupled,
                True,
            )
            assert [x.shape for x in moved[1]] == [(5, 7)] * 3 and [
                x.ndim for x in new
            ] == [0] * 3
        for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True)):
            cut = [row[: 4 if momentum else 3] for row in rows]
            moved, _ = step.sgd(cut, [count, number], momentum, nesterov, 0.1, False)
            assert [len(row) for row in moved] == [2 if momentum else 1] * 2
    assert set(launched) == {"adam", "sgd", "write_table"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sweeps_are_launched_as_they_are_written(dtype, launched):
    for columns, rows, span, best in ((64, 100, 4, 2), (12, 7, 12, None)):
        due, changes = torch.zeros(2, columns, rows, dtype=dtype)
        factor = torch.zeros(columns, 256, dtype=dtype)[:, :columns]
        scale = torch.ones(columns, dtype=dtype)
        rounding = Rounding(due + 1, due, -8, 7)
        for grid in (None, rounding):
            some = (due, changes, due > 0, factor, scale, grid)
            assert sweep.sweep(*some, span, best)
    assert launched == ["sweep"] * 4
