"""Kernels of selection, run by Triton's interpreter, against the definition."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import by_interpreter

from sparsefn._engine.backends import BACKENDS
from sparsefn._engine.selection import dispatch, reference
from sparsefn._engine.selection.dispatch import Entry
from sparsefn_kernels import select as kernels
from sparsefn_kernels.tables import Tuning

pytestmark = by_interpreter

CASES = 400
TINY = Tuning(chunk=64, small=48, sample=64, reach=2.0, room=8, workers=5)
MISSING = TINY._replace(reach=-0.5, room=2)  # the bracket mostly misses
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
WAYS = {0: "settled", 2: "held", 3: "missed", 6: "tied"}
ODD = [
    0.0,
    -0.0,
    np.nan,
    np.inf,
    -np.inf,
    1e-45,
    -1e-45,
    1e-310,
    3.4e38,
    1.0,
    1.0000001,
    -1.0,
]
FILLS = {
    "normal": lambda n, rng: rng.standard_normal(n),
    "same": lambda n, rng: np.full(
        n, rng.choice([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, 1e-42])
    ),
    "two": lambda n, rng: rng.choice([1.0, -2.0], n),
    "zeros": lambda n, rng: rng.standard_normal(n) * (rng.random(n) < 0.1),
    "signed zeros": lambda n, rng: (
        np.where(rng.random(n) < 0.5, 0.0, -0.0) + (rng.random(n) < 0.05)
    ),
    "odd": lambda n, rng: rng.choice(ODD, n),
    "few": lambda n, rng: rng.integers(-3, 3, n).astype(float),
    "sorted": lambda n, rng: np.sort(rng.standard_normal(n)),
    "periodic": lambda n, rng: np.sin(np.arange(n) * 2 * np.pi / 32),
    "nan": lambda n, rng: np.where(rng.random(n) < 0.6, np.nan, rng.standard_normal(n)),
}
COUNTS = ["none", "all", "over", "negative", "one", "most", "any", "any", "any", "any"]
LEAF = st.tuples(
    st.sampled_from(list(FILLS)),
    st.integers(1, 2),
    st.sampled_from([0, 1, 2, 17, 40, 48, 64, 100, 256, 500]),
)


def filled(kind, shape, dtype, rng):
    x = torch.tensor(FILLS[kind](int(np.prod(shape)), rng)).to(dtype)
    if kind in ("odd", "nan", "same") and x.numel():  # NaN of either sign
        word = WORDS[x.element_size()]
        flip = torch.tensor(rng.random(x.numel()) < 0.5) & x.isnan()
        sign = torch.tensor(torch.iinfo(word).min, dtype=word)
        x = torch.where(flip, x.view(word) ^ sign, x.view(word)).view(dtype)
    return x.reshape(shape)


def counted(kind, n, rng):
    given = {
        "none": 0,
        "all": n,
        "over": n + 7,
        "negative": -3,
        "one": 1,
        "most": max(n - 1, 0),
    }
    return given.get(kind, int(rng.integers(0, n + 1)))


def expected(entries, counts, joint):
    scores = [e.scores.abs() if e.absolute else e.scores for e in entries]
    open_ = [
        (torch.ones_like(e.scores, dtype=torch.bool) if e.allow is None else e.allow)
        & (torch.ones_like(e.scores, dtype=torch.bool) if e.deny is None else ~e.deny)
        for e in entries
    ]
    if joint:
        whole, may = (
            torch.cat([x.reshape(1, -1) for x in some], -1)
            for some in ([x.double() for x in scores], open_)
        )
        won = reference.top_of_rows(reference.rank_keys(whole, may), counts)
        parts = torch.split(won.reshape(-1), [x.numel() for x in scores])
        return [part.reshape(x.shape) for part, x in zip(parts, scores, strict=True)]
    own = torch.split(counts, [len(x) for x in scores])
    return [
        reference.top_of_rows(reference.rank_keys(x, o), n)
        for x, o, n in zip(scores, open_, own, strict=True)
    ]


@pytest.fixture(scope="module")
def taken():
    """How many segments went which way; at the end, every way was taken."""
    ways = Counter()
    yield ways
    assert (
        min(ways[way] for way in ("small", "settled", "held", "missed", "tied"))
        >= CASES // 20
    ), ways


@pytest.fixture
def watched(taken, monkeypatch):
    select_large, select_small = kernels._select_large, kernels._select_small

    def large(*args):
        states = select_large(*args)
        taken.update(WAYS[mode] for mode in states[:, 0].tolist())
        return states

    monkeypatch.setattr(kernels, "_select_large", large)
    monkeypatch.setattr(
        kernels,
        "_select_small",
        lambda *args: taken.update(["small"]) or select_small(*args),
    )


@settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(st.tuples(LEAF, st.sampled_from(COUNTS)), min_size=1, max_size=3),
    *(
        st.sampled_from(DTYPES),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.integers(0, 2**32 - 1),
    ),
)
def test_winners_are_those_of_the_definition(
    watched, leaves, dtype, flags, joint, held, seed
):
    rng = np.random.default_rng(seed)
    entries, counts = [], []
    for (kind, rows, width), count in leaves:
        shape = (rows, width)
        some = [
            None
            if not flags or rng.random() < 0.3
            else torch.tensor(rng.random(shape) < p)
            for p in (0.6, 0.3)
        ]
        entries.append(
            Entry(filled(kind, shape, dtype, rng), *some, bool(rng.random() < 0.5))
        )
        counts += [counted(count, width, rng) for _ in range(rows)]
    if joint:
        counts = [counted(leaves[0][1], sum(e.scores.numel() for e in entries), rng)]
        spans = [1]
    else:
        spans = [len(e.scores) for e in entries]
    counts = torch.tensor(counts)
    tuning = TINY if held else MISSING
    got = kernels.winners(entries, counts, spans, joint, tuning)
    for mask, want in zip(got, expected(entries, counts, joint), strict=True):
        assert torch.equal(mask, want)


@pytest.mark.parametrize("columns", [0, 1, 3])
@pytest.mark.parametrize("units", [1, 2, 4, 13, 32])
def test_rows_of_few_units_are_those_of_the_definition(units, columns):
    rng = np.random.default_rng(units)
    for dtype in DTYPES:
        for fill in ("normal", "odd"):
            x = filled(fill, (70, units, *[columns] * bool(columns)), dtype, rng)
            flags = [
                None if rng.random() < 0.3 else torch.tensor(rng.random(x.shape) < p)
                for p in (0.7, 0.3)
            ]
            n = x.numel() // units
            for counts in (
                torch.tensor([units // 2]),
                torch.tensor(rng.integers(-1, units + 2, n)),
            ):
                entry = Entry(x, *flags, bool(rng.random() < 0.5))
                (got,) = kernels.winners([entry], counts, [counts.numel()], False)
                rows = [
                    None if f is None else f.mT.reshape(n, units) if columns else f
                    for f in entry[:3]
                ]
                (want,) = expected(
                    [Entry(*rows, entry.absolute)], counts.expand(n), False
                )
                assert torch.equal(got.mT.reshape(n, units) if columns else got, want)


def test_each_kind_of_tensor_may_be_in_one_call():
    tensors = [
        torch.randn(2, 100),
        torch.randn(40, 4).double(),
        torch.randn(1, 60).half(),
        torch.randn(3, 0),
    ]
    tensors += [
        torch.randn(1, 1),
        torch.randn(100, 2).mT,
        torch.randn(1, 90).bfloat16(),
    ]
    counts = [
        torch.tensor([50, 7]),
        torch.tensor([2]),
        torch.tensor([9]),
        torch.tensor([1]),
    ]
    counts += [torch.tensor([1]), torch.tensor([20, 30]), torch.tensor([30])]
    entries = [Entry(x, absolute=i % 2 == 1) for i, x in enumerate(tensors)]
    spans = [n.numel() for n in counts]
    for tuning in (TINY, Tuning()):
        got = kernels.winners(entries, torch.cat(counts), spans, False, tuning)
        whole = torch.cat(
            [n.expand(len(x)) for n, x in zip(counts, tensors, strict=True)]
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(got, expected(entries, whole, False), strict=True)
        )
        joint = kernels.winners(entries, torch.tensor([200]), [1], True, tuning)
        assert all(
            torch.equal(a, b)
            for a, b in zip(joint, expected(entries, 200, True), strict=True)
        )


def test_many_tensors_are_found_in_the_tables():
    tensors = [torch.randn(1 + i % 3, 40 + 7 * i) for i in range(20)]
    counts = torch.arange(sum(len(x) for x in tensors)) * 5 % 60
    entries = [Entry(x) for x in tensors]
    got = kernels.winners(entries, counts, [len(x) for x in tensors], False, TINY)
    assert all(
        torch.equal(a, b)
        for a, b in zip(got, expected(entries, counts, False), strict=True)
    )
    got = kernels.winners(entries, torch.tensor([1000]), [1], True, TINY)
    assert all(
        torch.equal(a, b)
        for a, b in zip(got, expected(entries, 1000, True), strict=True)
    )


def test_counts_are_integers_of_any_kind_in_any_layout():
    x = torch.randn(4, 90)
    for counts in (
        torch.tensor([3, 9, 90, 1], dtype=torch.int32),
        torch.tensor([[3, 0], [9, 0], [90, 0], [1, 0]])[:, 0],
    ):
        (got,) = kernels.winners([Entry(x)], counts, [4], False, TINY)
        assert torch.equal(got, *expected([Entry(x)], counts, False))


def test_more_units_than_places_have_numbers_are_left_to_the_definition(monkeypatch):
    monkeypatch.setattr(kernels, "MOST", 5)
    assert (
        kernels.winners([Entry(torch.ones(1, 6))], torch.tensor([1]), [1], False)
        is None
    )


def test_the_door_leads_to_them(monkeypatch):
    calls, way = [], kernels.winners
    monkeypatch.setitem(
        BACKENDS, ("winners", "cpu"), lambda *args: calls.append(args[-1]) or way(*args)
    )
    x, counts = torch.randn(2, 3, 60), torch.tensor([4, 30, 2])

    def call(x):
        own = dispatch.winners([Entry(x, absolute=True), Entry(x[:, :4])], [counts, 2])
        return [*own, *dispatch.winners([Entry(x)], [50], joint=True)]

    want = [torch.stack(masks) for masks in zip(*map(call, x), strict=True)]
    assert not calls  # memory in sight is read as it is
    for got in (
        torch.vmap(call)(x),
        torch.compile(torch.vmap(call), backend="aot_eager", fullgraph=True)(x),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert set(calls) == {False, True}
