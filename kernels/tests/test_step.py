"""Steps by kernels, run by Triton's interpreter, against the formulas in torch."""

import math
from collections import Counter

import numpy as np
import optree
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_runs import by_interpreter, without

import sparsefn as sf
from sparsefn._engine.leaves import blockwise
from sparsefn_kernels import step as kernels

pytestmark = by_interpreter

sgd, adam, adamw = sf.optimizers.sgd, sf.optimizers.adam, sf.optimizers.adamw
MADE = {
    "sgd": sgd(0.1),
    "sgd decay": sgd(torch.tensor(3.0), weight_decay=0.1),
    "momentum": sgd(0.1, momentum=0.9),
    "heavy": sgd(lambda step: 0.1 / (1 + step), momentum=0.7, weight_decay=2.5),
    "nesterov": sgd(0.1, momentum=0.9, nesterov=True),
    "adam": adam(0.1),
    "adam without memory": adam(
        lambda step: 7.0 / (1 + step), betas=(0.0, 0.0), eps=0.0
    ),
    "adam decay": adam(0.0, weight_decay=0.1, eps=1e-45),
    "adamw": adamw(0.1, betas=(0.5, 0.999999), weight_decay=0.3),
}
ODD = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    2e-38,
    1e-23,
    -4e-20,
    3e19,
    3e38,
    -3e38,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
]
LEAF = st.tuples(
    st.sampled_from(
        [(), (0,), (1,), (7, 3), (1023,), (1024,), (3, 5, 2, 2), (1100, 2)]
    ),
    st.sampled_from(["plain", "plain", "dense", "shifted", "last"]),
)


def laid_out(x, how):
    if how == "shifted":  # memory that starts at no multiple of 16 bytes
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    return (
        x.to(memory_format=torch.channels_last) if how == "last" and x.ndim == 4 else x
    )


def filled(shape, odd, draw):
    x = torch.randn(shape, generator=draw) * 10.0 ** torch.randint(
        -30, 12, shape, generator=draw
    )
    some = torch.tensor(ODD)[torch.randint(0, len(ODD), shape, generator=draw)]
    return torch.where(torch.rand(shape, generator=draw) < 0.3, some, x) if odd else x


def same(got, want):
    assert optree.tree_structure(got) == optree.tree_structure(want)
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(
            a.nan_to_num(7.0), b.nan_to_num(7.0)
        )
        assert torch.equal(a.isnan() | a.signbit(), b.isnan() | b.signbit())


def zeroed(mask, x):
    return torch.where(mask, x, torch.zeros(()))


def by_formula(optimizer, grads, state, params, masks, clear, patch):
    # `update` on masked gradients, leaf by leaf in torch; the updates are added on the
    # masks.
    with without(), patch.context() as off:
        off.setattr(blockwise, "flat_memory", lambda *tensors, **least: None)
        bare = optree.tree_map(zeroed, masks, grads)
        updates, new = optimizer.update(bare, state, params=params)
    if clear:
        moments = [name for name in ("mu", "nu", "momentum") if getattr(new, name, ())]
        for name in moments:
            tree = optree.tree_map(zeroed, masks, getattr(new, name))
            new = new._replace(**{name: tree})
    return {
        path: torch.where(masks[path], p + updates[path], p)
        for path, p in params.items()
    }, new


def by_kernel(optimizer, grads, state, params, masks, clear):
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        return optimizer.under_masks(grads, state, params, masks, clear)


@pytest.fixture(scope="module")
def aligned():
    """How many calls had memory that starts at multiples of 16 bytes, and how many had
    other memory.
    """
    seen = Counter()
    yield seen
    assert min(seen[True], seen[False]) >= 20, seen


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(LEAF, min_size=1, max_size=4),
    st.sampled_from(list(MADE)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_steps_have_the_bits_of_the_formula(aligned, leaves, name, odd, clear, seed):
    patch, draw = pytest.MonkeyPatch(), torch.Generator().manual_seed(seed)
    optimizer, table = MADE[name], kernels._table
    params = {
        str(i): laid_out(filled(shape, odd, draw), how)
        for i, (shape, how) in enumerate(leaves)
    }
    hows = {str(i): how for i, (_, how) in enumerate(leaves)}
    masks = {
        path: laid_out(torch.rand(p.shape, generator=draw) < 0.4, hows[path])
        for path, p in params.items()
    }
    masks |= {
        path: torch.tensor(True)
        for path, p in params.items()
        if hows[path] == "dense" or not p.ndim
    }
    state = optimizer.init(params)
    for _ in range(2):
        grads = {
            path: laid_out(filled(p.shape, odd, draw), hows[path])
            for path, p in params.items()
        }
        want = by_formula(optimizer, grads, state, params, masks, clear, patch)
        with patch.context() as watched:
            watched.setattr(
                kernels,
                "_table",
                lambda *args: (made := table(*args), aligned.update([made[2]]))[0],
            )
            got = by_kernel(optimizer, grads, state, params, masks, clear)
        same(got, want)
        assert all(
            x.untyped_storage().nbytes() == x.nbytes for x in optree.tree_leaves(got)
        )
        params, state = got


X = torch.ones(4, 3)
ROW = (X, X > 0, X, X, X)
NUMBERS = [torch.tensor(1), *[torch.tensor(0.5, dtype=torch.float64)] * 3]
REFUSED = {
    "another dtype": ([(X.double(), X > 0, X, X, X)], NUMBERS),
    "a dtype among them": ([ROW, tuple(x.bfloat16() for x in ROW)], NUMBERS),
    "bytes": ([(X, (X > 0).to(torch.uint8), X, X, X)], NUMBERS),
    "other layouts": ([(X, X > 0, X, X, torch.ones(3, 4).T)], NUMBERS),
    "other shapes": ([(X, X[0] > 0, X, X, X)], NUMBERS),
    "another device": ([(X, X > 0, X, X, X.to("meta"))], NUMBERS),
    "numbers elsewhere": ([ROW], [x.to("meta") for x in NUMBERS]),
    "other numbers": ([ROW], [x.float() for x in NUMBERS]),
    "many numbers": ([ROW], [x[None] for x in NUMBERS]),
    "a gradient": ([(X.clone().requires_grad_(), *ROW[1:])], NUMBERS),
    "a rate's gradient": ([ROW], [*NUMBERS[:3], NUMBERS[3].clone().requires_grad_()]),
    "nothing": ([], NUMBERS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tensors_are_left_to_torch(name):
    assert kernels.takes([ROW, ROW], NUMBERS)
    assert not kernels.takes(*REFUSED[name])
    with torch.no_grad():
        assert kernels.takes(*REFUSED["a gradient"])


def test_under_transforms_they_are_left_to_torch():
    seen = []
    torch.vmap(
        lambda x: seen.append(kernels.takes([(x, x > 0, x, x, x)], NUMBERS)) or x
    )(X[None])
    assert seen == [False]


def test_nothing_is_written_to():
    rows = [tuple(x.clone() for x in ROW)]
    kernels.adam(rows, NUMBERS, (0.9, 0.99), 1e-8, 0.1, True, True)
    kernels.sgd(rows, NUMBERS[:2], 0.9, True, 0.1, True)
    assert all(map(torch.equal, rows[0], ROW)) and [x.item() for x in NUMBERS] == [
        1,
        0.5,
        0.5,
        0.5,
    ]


def test_the_operators_are_what_they_say_they_are():
    tensors = [[x, x.clone()] for x in (X, X * 2, X * 3, X * 4)]
    params, grads, first, second = tensors
    masks = [X > 0, None]
    tests = ("test_schema", "test_faketensor")
    constants = [0.9, 0.99, 1e-8, 0.1]
    args = (params, masks, grads, first, second, NUMBERS, constants, 1, True)
    torch.library.opcheck(
        torch.ops.sparsefn_kernels.adam_under_masks.default, args, test_utils=tests
    )
    for moments, momentum in ((first, 0.9), ([], 0.0)):
        args = (
            params,
            masks,
            grads,
            moments,
            *NUMBERS[:2],
            [momentum, 0.1],
            False,
            True,
        )
        torch.library.opcheck(
            torch.ops.sparsefn_kernels.sgd_under_masks.default, args, test_utils=tests
        )
