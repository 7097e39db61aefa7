"""Ranks in rows of few units choose what the reference chooses."""

import tracemalloc

import pytest
import torch

from sparsefn._engine.selection import dispatch, narrow_rows
from sparsefn._engine.selection.dispatch import Entry
from sparsefn._engine.selection.reference import rank_keys
from sparsefn._engine.selection.reference import top_of_rows as reference

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
KINDS = [
    "signed",
    "positive",
    "ties",
    "nan",
    "negative nan",
    "zeros",
    "inf",
    "subnormal",
    "equal",
    "all nan",
]


def made(kind: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, kind)) + sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    some = torch.rand(shape, generator=generator) < 0.4
    tiny = torch.finfo(dtype).smallest_normal
    return {
        "signed": lambda: x,
        "positive": lambda: x.abs(),
        "ties": lambda: x.round(),
        "nan": lambda: torch.where(some, torch.nan, x.abs()),
        "negative nan": lambda: torch.where(some, -torch.full_like(x, torch.nan), x),
        "zeros": lambda: torch.where(some, 0.0, -torch.zeros_like(x)),
        "inf": lambda: torch.where(
            some, x.sign() * torch.inf, torch.where(x > 1, torch.nan, x)
        ),
        "subnormal": lambda: x.round() * (tiny / 4),
        "equal": lambda: torch.full_like(x, -2.0),
        "all nan": lambda: torch.full_like(x, torch.nan),
    }[kind]()


def wanted(scores, eligible, count, absolute=False):
    """The reference: rows of (rows, units) or of each column of (rows, units,
    columns).
    """
    scores = scores.abs() if absolute else scores
    if scores.ndim == 2:
        return reference(rank_keys(scores, eligible), count)
    rows, units, columns = scores.shape
    flat = (
        None if x is None else x.transpose(1, 2).reshape(rows * columns, units)
        for x in (scores, eligible)
    )
    return (
        reference(rank_keys(*flat), count).reshape(rows, columns, units).transpose(1, 2)
    )


def top(scores, eligible, count, absolute=False):
    return dispatch.winners([Entry(scores, eligible, None, absolute)], [count])[0]


def traced(scores, eligible, count, absolute=False):
    """The same by operations that see no memory."""
    args = [x for x in (scores, eligible, count) if isinstance(x, torch.Tensor)]

    def call(*given):
        rest = iter(given)
        taken = [
            next(rest) if isinstance(x, torch.Tensor) else x
            for x in (scores, eligible, count)
        ]
        return top(*taken, absolute=absolute)

    return torch.func.vmap(call)(*(x.unsqueeze(0) for x in args))[0]


def elsewhere(scores, eligible, count, absolute=False):
    """The same by operations for any device."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "_in_memory", lambda *rest: None)
        return traced(scores, eligible, count, absolute)


@pytest.mark.deep(
    but=["ties-torch.float32", "nan-torch.float32", "subnormal-torch.float32"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_score_has_the_winners_of_the_reference(kind, dtype):
    for shape in ((7, 1), (5, 8), (3, 17), (6, 4, 3)):
        scores = made(kind, dtype, *shape)
        before = scores.clone()
        allowed = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
        rows = scores.numel() // shape[1]
        counts = [0, shape[1] // 2, shape[1], torch.tensor(1), torch.full((rows,), 2)]
        counts.append(torch.arange(rows) % (shape[1] + 3) - 1)
        for eligible in (None, allowed):
            for count in counts:
                for absolute in (False, True):
                    want = wanted(scores, eligible, count, absolute)
                    for run in (top, traced, elsewhere):
                        got = run(scores, eligible, count, absolute=absolute)
                        assert got.dtype == torch.bool and torch.equal(got, want), (
                            shape,
                            count,
                            absolute,
                            run,
                        )
        assert torch.equal(scores.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(
    "count",
    [-3, 99, torch.tensor(-3), torch.tensor(99), torch.tensor([99, -1])],
    ids=str,
)
def test_counts_of_any_value(count):
    scores = made("signed", torch.float32, 2, 4)
    every = torch.as_tensor(count).clamp(0, 4).expand(2).tolist()
    for run in (top, traced, elsewhere):
        assert run(scores, None, count).sum(1).tolist() == every


@pytest.mark.parametrize(
    "shape", [(0, 4), (3, 0), (0, 0), (0, 4, 3), (2, 0, 3), (2, 4, 0)]
)
def test_nothing_has_no_winners(shape):
    many = torch.ones(
        shape[0] * (shape[2] if len(shape) == 3 else 1), dtype=torch.int64
    )
    for count in (2, torch.tensor(2), many):
        for scores in (torch.ones(shape), torch.ones((*shape, 2))[..., 0]):
            assert top(scores, None, count).shape == shape


def test_scores_and_flags_in_any_layout():
    scores, allowed = (
        made("ties", torch.float32, 8, 12),
        made("signed", torch.float32, 8, 12) > 0,
    )
    views = [
        lambda x: x.T,
        lambda x: x[:, ::3],
        lambda x: x[1:, 2:6],
        lambda x: x[:1].expand(5, 12),
    ]
    views += [
        lambda x: x.view(2, 4, 12),
        lambda x: x.view(8, 3, 4).transpose(0, 2),
        lambda x: x.T.view(3, 4, 8),
    ]
    for view in views:
        for eligible in (None, view(allowed), view(allowed).contiguous()):
            for absolute in (False, True):
                got = top(view(scores), eligible, 2, absolute=absolute)
                assert (
                    torch.equal(got, wanted(view(scores), eligible, 2, absolute))
                    and got.is_contiguous()
                )


@pytest.mark.parametrize("size", [1, 8, 50])
@pytest.mark.parametrize("shape", [(41, 4), (13, 9), (7, 4, 5), (2, 4, 30)])
def test_blocks_of_any_size_give_the_same_winners(shape, size, monkeypatch):
    monkeypatch.setattr(narrow_rows, "_BLOCK", size)
    scores, allowed = (
        made("nan", torch.float32, *shape),
        made("signed", torch.float32, *shape) > 0,
    )
    counts = torch.arange(scores.numel() // shape[1]) % shape[1]
    for x in (scores, scores.abs(), torch.where(allowed, scores, -1.0)):
        for eligible in (None, allowed):
            assert torch.equal(top(x, eligible, counts), wanted(x, eligible, counts))


def test_any_number_of_threads_gives_the_same_winners():
    scores, threads = made("signed", torch.float32, 300_001, 4), torch.get_num_threads()
    try:
        masks = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            masks.append(top(scores, None, 2, absolute=True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(mask, wanted(scores, None, 2, True)) for mask in masks)


def test_winners_inside_transforms():
    scores = made("ties", torch.float32, 3, 6, 4)
    counts = torch.tensor([1, 2, 3])
    want = torch.stack([top(x, None, n) for x, n in zip(scores, counts, strict=True)])
    assert torch.equal(
        torch.func.vmap(lambda x, n: top(x, None, n))(scores, counts), want
    )
    many = torch.func.vmap(lambda x, n: top(x, None, n), in_dims=(2, 0))(
        scores.permute(1, 2, 0), counts
    )
    assert torch.equal(many, want)
    one = scores[0]
    only_counts = torch.func.vmap(lambda n: top(one, None, n))(counts)
    assert torch.equal(
        only_counts, torch.stack([top(one, None, int(n)) for n in counts])
    )
    flags = scores > 0
    only_flags = torch.func.vmap(lambda allowed: top(one, allowed, 2))(flags)
    assert torch.equal(
        only_flags, torch.stack([top(one, allowed, 2) for allowed in flags])
    )
    own = torch.arange(18).reshape(3, 6) % 5
    want = torch.stack([top(x, None, n) for x, n in zip(scores, own, strict=True)])
    assert torch.equal(torch.func.vmap(lambda x, n: top(x, None, n))(scores, own), want)
    twice = torch.func.vmap(
        torch.func.vmap(lambda x, n: top(x, None, n)), in_dims=(0, 1)
    )
    pairs = torch.stack([counts, counts + 1], 1)
    got = twice(torch.stack([scores, -scores]), pairs)
    for i, x in enumerate((scores, -scores)):
        for j in range(3):
            assert torch.equal(got[i, j], top(x[j], None, int(pairs[j, i])))
    assert torch.func.vmap(lambda x: top(x, None, 1))(torch.ones(3, 0, 4)).shape == (
        3,
        0,
        4,
    )
    gradient = torch.func.grad(lambda x: (x * top(x, None, 2)).sum())(one)
    assert torch.equal(gradient, top(one, None, 2).float())


@pytest.mark.deep
# wide rows go through an operator
@pytest.mark.parametrize("shape", [(6, 4), (6, 9), (2, 4, 3)])
@pytest.mark.parametrize("absolute", [False, True])
def test_compiled_winners(shape, absolute):
    scores, count = made("inf", torch.float32, *shape), torch.tensor(2)
    compiled = torch.compile(
        lambda x, e, n: top(x, e, n, absolute=absolute),
        fullgraph=True,
        backend="aot_eager",
    )
    for eligible in (None, scores > 0):
        for n in (2, count):
            assert torch.equal(
                compiled(scores, eligible, n),
                top(scores, eligible, n, absolute=absolute),
            )


@pytest.mark.deep
def test_winners_of_the_default_compiler():
    scores = made("inf", torch.float32, 64, 4)
    compiled = torch.compile(lambda x: top(x, None, 2), fullgraph=True)
    assert torch.equal(compiled(scores), top(scores, None, 2))


def test_no_copy_of_the_scores_is_made():
    scores = made("positive", torch.float32, 1 << 20, 4)
    tracemalloc.start()
    try:
        top(scores, None, 2, absolute=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < scores.nbytes // 2 + scores.numel()  # blocks, and the mask


@pytest.mark.deep
@pytest.mark.parametrize("units", [4, 9])
def test_compiled_ensembles_and_exported_programs(units):
    scores, counts = made("ties", torch.float32, 3, 5, units), torch.tensor([1, 2, 3])
    want = torch.stack(
        [top(x, None, int(n)) for x, n in zip(scores, counts, strict=True)]
    )
    every = torch.func.vmap(lambda x, n: top(x, None, n))
    assert torch.equal(
        torch.compile(every, fullgraph=True, backend="eager")(scores, counts), want
    )

    class Winners(torch.nn.Module):
        def forward(self, x):
            return top(x, None, 2)

    program = torch.export.export(Winners(), (scores[0],))
    assert torch.equal(program.module()(scores[1]), want[1])
    assert "sparsefn" not in str(program.graph)  # it needs no operator of ours
