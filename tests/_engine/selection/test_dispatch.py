"""One selection under every transform, on every way through it."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsefn._engine.leaves import buffers
from sparsefn._engine.selection import (
    block_passes,
    dispatch,
    fixed_counts,
    narrow_rows,
    reference,
)
from sparsefn._engine.selection.dispatch import Entry


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(scores, counts, allow=None, deny=None, absolute=False):
    open_ = torch.ones_like(scores, dtype=torch.bool)
    open_ = (open_ if allow is None else allow) & (open_ if deny is None else ~deny)
    return reference.top_of_rows(
        reference.rank_keys(scores.abs() if absolute else scores, open_), counts
    )


X = drawn(0, 6, 50)
FLAGS = drawn(1, 2, 6, 50) > 0
COUNTS = torch.tensor([0, 3, 50, 7, -1, 60])
CASES = {
    "an int": (X, 5, None, None, False),
    "a count for all": (X, torch.tensor(7), None, FLAGS[1], False),
    "a count each": (X, COUNTS, FLAGS[0], FLAGS[1], True),
    "absolute": (X, COUNTS, None, None, True),
    "one row": (X.reshape(1, -1), 31, FLAGS[0].reshape(1, -1), None, True),
    "narrow": (X.reshape(100, 3), 1, FLAGS[0].reshape(100, 3), None, True),
    "narrow, a count each": (
        X.reshape(100, 3),
        torch.arange(100) % 5 - 1,
        None,
        None,
        False,
    ),
}


def joint_winners(tensors, count, allow=None, deny=None, absolute=False):
    allow, deny = (
        [None] * len(tensors) if flags is None else flags for flags in (allow, deny)
    )
    entries = [Entry(*row, absolute) for row in zip(tensors, allow, deny, strict=True)]
    return dispatch.winners(entries, [count], joint=True)


def called(scores, count, allow, deny, absolute):
    return dispatch.winners([Entry(scores, allow, deny, absolute)], [count])[0]


WAYS = {
    "eager": lambda fn, x: fn(x),
    "compile": lambda fn, x: torch.compile(fn, backend="aot_eager", fullgraph=True)(x),
    "vmap": lambda fn, x: torch.vmap(fn)(torch.stack([x, x]))[1],
    "vmap of vmap": lambda fn, x: torch.vmap(torch.vmap(fn))(x.expand(2, 3, *x.shape))[
        1, 2
    ],
    "compiled vmap": lambda fn, x: torch.compile(
        torch.vmap(fn), backend="aot_eager", fullgraph=True
    )(x[None])[0],
    "grad": lambda fn, x: torch.func.grad(lambda x: (x * fn(x)).sum())(x) != 0,
    "jvp": lambda fn, x: (
        torch.func.jvp(lambda x: x * fn(x), (x,), (torch.ones_like(x),))[1] != 0
    ),
    "a parameter": lambda fn, x: fn(torch.nn.Parameter(x)),
    "float64": lambda fn, x: fn(x.double()),
}


@pytest.mark.deep(but=["*-eager", "*-vmap", "*-grad", "*-float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_winners_are_the_same_everywhere(case, way):
    scores, *rest = CASES[case]
    assert torch.equal(
        WAYS[way](lambda x: called(x, *rest), scores),
        expected(scores, *rest[:3], rest[3]),
    )


@pytest.mark.parametrize("case", CASES)
def test_memory_is_looked_at_where_there_is_any(case, monkeypatch):
    scores, *rest = CASES[case]
    want = expected(scores, *rest[:3], rest[3])
    monkeypatch.setattr(fixed_counts, "of_rows", None)  # in the operator, too
    monkeypatch.setattr(fixed_counts, "jointly", None)
    assert torch.equal(WAYS["vmap"](lambda x: called(x, *rest), scores), want)
    monkeypatch.setattr(dispatch, "_operator", None)
    assert torch.equal(called(scores, *rest), want)
    joint = [scores[:2], scores[2:].double()]
    assert all(
        mask.all() for mask in joint_winners(joint, torch.tensor(scores.numel()))
    )


def test_the_operator_sees_memory_where_a_mode_looks_on(monkeypatch):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(fixed_counts, "of_rows", None)
    with Watch():
        got = called(X, COUNTS, FLAGS[0], FLAGS[1], True)
    assert torch.equal(got, expected(X, COUNTS, FLAGS[0], FLAGS[1], True))


@pytest.mark.parametrize("joint", [False, True])
def test_the_operator_is_what_it_says_it_is(joint):
    counts = torch.tensor([9]) if joint else COUNTS
    spans = [1] if joint else [2, 4]
    args = (
        [X[:2], X[2:].double()],
        [None, FLAGS[0][2:]],
        [FLAGS[1][:2], None],
        [True, False],
        counts,
        spans,
        joint,
    )
    torch.library.opcheck(
        torch.ops.sparsefn.winners.default,
        args,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_rows_of_few_units_are_ranked_and_others_are_not(monkeypatch):
    few, many, one = (
        drawn(5, 2, narrow_rows.WIDEST),
        drawn(6, 2, narrow_rows.WIDEST + 1),
        drawn(7, 1, 5),
    )
    columns = drawn(8, 2, narrow_rows.WIDEST, 3), drawn(9, 2, narrow_rows.WIDEST + 1, 3)
    ranked, top = [], narrow_rows.top_of_groups
    monkeypatch.setattr(
        narrow_rows,
        "top_of_groups",
        lambda at, n: ranked.append(at.out.shape) or top(at, n),
    )
    tensors = [many, few, one, *columns]
    for mask, x in zip(
        dispatch.winners([Entry(x) for x in tensors], [3] * 5), tensors, strict=True
    ):
        assert torch.equal(
            mask,
            expected(x, 3)
            if x.ndim == 2
            else expected(x.mT.flatten(0, 1), 3).reshape(x.mT.shape).mT,
        )
    assert ranked == [(2, narrow_rows.WIDEST, 1), (2, narrow_rows.WIDEST, 3)]


@pytest.mark.parametrize("way", [way for way in WAYS if "compile" not in way])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_one_competition_without_flags_is_the_same_everywhere(dtype, way):
    x = drawn(4, 1, 90).to(dtype)
    for count in (20, torch.tensor(20), torch.tensor([20])):
        got = WAYS[way](
            lambda x, count=count: dispatch.winners([Entry(x)], [count])[0], x
        )
        assert torch.equal(got, expected(x, 20))
    got = torch.vmap(lambda n: dispatch.winners([Entry(x, absolute=True)], [n])[0])(
        torch.tensor([3, 4])
    )
    assert torch.equal(
        got, torch.stack([expected(x, n, absolute=True) for n in (3, 4)])
    )


def test_counts_and_flags_may_be_batched_alone():
    counts = torch.stack([COUNTS, COUNTS + 1])
    got = torch.vmap(lambda n: called(X, n, FLAGS[0], None, False))(counts)
    assert torch.equal(got, torch.stack([expected(X, n, FLAGS[0]) for n in counts]))
    got = torch.vmap(lambda flags: called(X, COUNTS, None, flags, False), in_dims=2)(
        FLAGS.permute(1, 2, 0)
    )
    assert torch.equal(
        got, torch.stack([expected(X, COUNTS, None, flags) for flags in FLAGS])
    )


def whole(tensors):
    return torch.cat([x.double().reshape(1, -1) for x in tensors], -1)


@pytest.mark.deep(but=["*-eager"])
@pytest.mark.parametrize("way", ["eager", "compile", "vmap", "grad"])
@pytest.mark.parametrize("k", [0, 40, 10_000, torch.tensor(77)], ids=str)
def test_several_tensors_are_one_competition(k, way):
    def joint(x):
        tensors = [x[:2], x[2:3].double(), x[3:].bfloat16(), x[:0]]
        flags = [FLAGS[0][:2], None, FLAGS[0][3:], None]
        won = joint_winners(tensors, k, flags, None, True)
        return torch.cat([mask.reshape(-1) for mask in won]).reshape(x.shape)

    tensors = [X[:2], X[2:3], X[3:].bfloat16()]
    open_ = FLAGS[0].clone()
    open_[2] = True
    want = expected(whole(tensors), k, open_.reshape(1, -1), None, True).reshape(
        X.shape
    )
    assert torch.equal(WAYS[way](joint, X), want)


def test_members_of_a_joint_competition_have_counts_of_their_own():
    counts = torch.tensor([3, 200])
    got = torch.vmap(lambda x, n: torch.cat(joint_winners([x[:1], x[1:]], n)))(
        torch.stack([X, -X]), counts
    )
    for i, x in enumerate((X, -X)):
        assert torch.equal(
            got[i], expected(x.reshape(1, -1), counts[i]).reshape(X.shape)
        )


def test_many_leaves_in_one_call():
    leaves = [drawn(i, 1 + i % 3, 5 + 50 * (i % 7)) for i in range(50)]
    for leaf, mask in zip(
        leaves,
        dispatch.winners([Entry(leaf) for leaf in leaves], [4] * 50),
        strict=True,
    ):
        assert torch.equal(mask, expected(leaf, 4))


@pytest.mark.deep
def test_an_exported_program_has_fixed_shapes_and_no_operator_of_ours():
    class Model(torch.nn.Module):
        def forward(self, x, k):
            own = dispatch.winners([Entry(x[:4]), Entry(x[4:])], k + torch.arange(6))
            return (
                called(x, k, None, None, True),
                joint_winners([x], 9)[0],
                torch.cat(own),
            )

    program = torch.export.export(Model(), (X, torch.tensor(3)))
    assert "sparsefn" not in str(program.graph)
    # an int count, a count in a tensor
    assert "topk" in str(program.graph) and "sort" in str(program.graph)
    one, joint, own = program.module()(X, torch.tensor(4))
    assert torch.equal(own, expected(X, torch.arange(4, 10)))
    assert torch.equal(one, expected(X, 4, absolute=True))
    assert torch.equal(joint, expected(X.reshape(1, -1), 9).reshape(X.shape))


def test_meta_tensors_have_shapes():
    assert called(torch.empty(2, 300, device="meta"), 3, None, None, True).shape == (
        2,
        300,
    )
    assert joint_winners([torch.empty(2, 3, device="meta")], 3)[0].device.type == "meta"


def test_numbers_that_are_flushed_to_zero_elsewhere_still_have_an_order():
    x = torch.tensor([[1e-45, 3e-45, 0.0, 2e-45] * 20])
    want = expected(x, 25)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps subnormal numbers")
    try:
        assert torch.equal(called(x, 25, None, None, False), want)
        assert torch.equal(dispatch.winners([Entry(x)], [25])[0], want)
        assert torch.equal(joint_winners([x], 25)[0], want)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("way", ["eager", "vmap"])
@pytest.mark.parametrize("absolute", [False, True])
def test_such_numbers_have_an_order_among_many_others(absolute, way):
    x = (3 * X).round() * 1e-45
    counts, ns = torch.arange(-1, 5), [2, torch.tensor([0, 3])]
    want = [expected(x, counts, FLAGS[0], FLAGS[1], absolute)]
    want += [
        expected(x[:4], 2, FLAGS[0][:4], None, absolute),
        expected(x[4:], ns[1], None, None, absolute),
    ]
    joint = expected(
        x.reshape(1, -1), 30, None, FLAGS[1].reshape(1, -1), absolute
    ).reshape(X.shape)

    def masks(x):
        won = dispatch.winners([Entry(x, *FLAGS, absolute)], [counts])
        won += dispatch.winners(
            [
                Entry(x[:4], FLAGS[0][:4], None, absolute),
                Entry(x[4:], absolute=absolute),
            ],
            ns,
        )
        return torch.cat(
            [
                *won,
                *joint_winners(
                    [x[:4], x[4:]], 30, None, [FLAGS[1][:4], FLAGS[1][4:]], absolute
                ),
            ]
        )

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps subnormal numbers")
    try:
        assert torch.equal(WAYS[way](masks, x), torch.cat([*want, joint]))
    finally:
        torch.set_flush_denormal(False)


def test_totals_of_columns_are_those_of_each_column_of_each_row():
    flags = torch.arange(24).reshape(2, 4, 3) % 5 == 0
    want = [*flags.sum(1).reshape(-1).tolist(), 2]
    found = dispatch.totals([flags, torch.tensor([[True, False, True]])])
    assert found.tolist() == want
    assert dispatch.totals([flags[:, :0]]).tolist() == [0] * 6


def test_totals():
    flags = [FLAGS[0], FLAGS[1][:1], FLAGS[0][:0]]
    want = torch.cat([row.sum(-1) for row in flags])
    assert torch.equal(dispatch.totals(flags), want)
    assert torch.equal(torch.vmap(lambda x: dispatch.totals([x]))(FLAGS), FLAGS.sum(-1))
    for none in ([], [FLAGS[0][:0]]):
        assert (
            dispatch.totals(none).tolist() == []
            and dispatch.totals(none).dtype == torch.int64
        )


@pytest.mark.parametrize("way", ["eager", "vmap", "grad"])
def test_empty_tensors_have_empty_masks(way):
    def masks(x):
        entries = [Entry(x[:0]), Entry(x), Entry(x[:, :0])]
        won = dispatch.winners(entries, [2, 3, torch.tensor(1)]) + dispatch.winners(
            entries[:1], [1]
        )
        won += joint_winners([x[:0], x[:, :0]], 2)
        assert all(mask.dtype == torch.bool for mask in won)
        assert [tuple(mask.shape) for mask in won] == [
            (0, 50),
            (6, 50),
            (6, 0),
            (0, 50),
            (0, 50),
            (6, 0),
        ]
        return won[1]

    assert torch.equal(WAYS[way](masks, X), expected(X, 3))
    for counts in (torch.tensor([9, *COUNTS]), [9, COUNTS]):
        got = WAYS[way](
            lambda x, counts=counts: dispatch.winners(
                [Entry(x[:1, :0]), Entry(x)], counts
            )[1],
            X,
        )
        assert torch.equal(got, expected(X, COUNTS))


def test_scores_are_floats_and_nothing_gives_nothing():
    with pytest.raises(
        TypeError, match="expected floating-point scores, got torch.int64"
    ):
        dispatch.winners([Entry(torch.tensor([[1]]))], [1])
    assert dispatch.winners([], []) == [] == joint_winners([], 0)


@pytest.mark.deep
def test_one_tensor_may_have_the_counts_of_all_rows():
    leaves, counts = [X, X[:0], X[:1], X.reshape(100, 3)], torch.arange(107) % 60 - 1
    want = [
        expected(leaf, n)
        for leaf, n in zip(leaves, torch.split(counts, [6, 0, 1, 100]), strict=True)
    ]
    leaves = [Entry(leaf) for leaf in leaves]
    for some in (slice(0, 3), slice(0, 4)):
        own = counts[: sum(len(leaf.scores) for leaf in leaves[some])]
        calls = {
            "eager": dispatch.winners(leaves[some], own),
            "compile": torch.compile(
                dispatch.winners, backend="aot_eager", fullgraph=True
            )(leaves[some], own),
            "vmap": [
                m[0]
                for m in torch.vmap(
                    lambda n, some=some: dispatch.winners(leaves[some], n)
                )(own[None])
            ],
        }
        for won in calls.values():
            assert all(torch.equal(a, b) for a, b in zip(won, want[some], strict=True))


def signalling(x):
    """The tensor with one NaN that a processor reports."""
    word, bits = {
        torch.float32: (torch.int32, 0x7F800001),
        torch.float64: (torch.int64, 0x7FF0000000000001),
        torch.float16: (torch.int16, 0x7C01),
        torch.bfloat16: (torch.int16, 0x7F81),
    }[x.dtype]
    x.view(-1).view(word)[3] = bits
    return x


@pytest.mark.deep(but=["(4, 100)-*", "(300, 64)-*"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize(
    "shape", [(4, 100), (300, 64), (1, 1000), (1, 40_000), (2, 70_000)], ids=str
)
def test_a_signalling_nan_is_as_any_other(shape, dtype, monkeypatch):
    monkeypatch.setattr(buffers, "_MANY", 1)
    monkeypatch.setattr(block_passes, "_THREADED", 1)
    threads, quiet = (
        torch.get_num_threads(),
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype),
    )
    x, k = signalling(quiet.clone()), shape[1] // 2
    quiet.view(-1)[3] = torch.nan
    mask = torch.zeros(shape, dtype=torch.bool)
    calls = {
        "rows": lambda x, absolute: dispatch.winners(
            [Entry(x, absolute=absolute)], [k]
        ),
        "denied": lambda x, absolute: dispatch.winners(
            [Entry(x, None, mask, absolute)], [k]
        ),
        "joint": lambda x, absolute: joint_winners(
            [x, x.double()], k, absolute=absolute
        ),
        "short rows": lambda x, absolute: dispatch.winners(
            [Entry(x.reshape(-1, 4), absolute=absolute)], [2]
        ),
        "vmap": lambda x, absolute: [
            torch.vmap(lambda row: dispatch.winners([Entry(row[None])], [k])[0])(x)
        ],
    }
    for number in (1, 2):
        torch.set_num_threads(number)
        try:
            for name, call in calls.items():
                for absolute in (False, True):
                    with np.errstate(all="raise"):
                        got = call(x, absolute)
                    assert all(
                        torch.equal(a, b)
                        for a, b in zip(got, call(quiet, absolute), strict=True)
                    ), name
        finally:
            torch.set_num_threads(threads)
