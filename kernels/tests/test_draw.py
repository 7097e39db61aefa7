"""Draws by kernels, run by Triton's interpreter, against those on tensors."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_runs import by_interpreter, without

import sparsefn as sf
from sparsefn._engine.draws import draws as engine_draws
from sparsefn._engine.draws import leaf_draws, threefry
from sparsefn_kernels import draw as draws
from sparsefn_kernels.source import threefry as source

pytestmark = by_interpreter

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
KINDS = [
    ("words", torch.int64),
    ("split", torch.int64),
    ("fold int", torch.int64),
    ("fold str", torch.int64),
]
KINDS += [("uniform", dtype) for dtype in FLOATS] + [
    ("normal", dtype) for dtype in FLOATS[:3]
]
KEY = sf.random.key(7)
KEYS = sf.random.split(KEY, 6).reshape(2, 3, 2)
PLACES = torch.tensor([0, 5, (1 << 32) + 3, -1, 1 << 62, 5, 4_000_000_000])
CASES = {
    "a key": (KEY, None, 3000),
    "keys": (KEYS, None, 5),
    "a key at places": (KEY, PLACES, 7),
    "keys at places": (KEYS, PLACES, 7),
    "keys at places of their own": (KEYS, PLACES + torch.arange(3)[:, None], 7),
    "a key at rows of places": (KEY, PLACES + torch.arange(3)[:, None], 7),
    "nothing": (KEYS, None, 0),
}


def by_kernel(key, index, n, kind, dtype):
    xor0, xor1, finish = threefry._KINDS[kind]
    name = "pairs" if finish is threefry._pairs else kind
    return draws.draws(
        key, index, n, name, dtype, (xor0, xor1), threefry.DIGITS.get(dtype, 0)
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
def test_draws_have_the_bits_of_the_definition(kind, dtype, case):
    key, index, n = CASES[case]
    got = by_kernel(key, index, n, kind, dtype)
    with without():
        want = threefry.draw(key, index, n, kind, dtype)
    assert got.dtype == want.dtype and torch.equal(got, want)


@triton.jit
def _finished(first, angle, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(
        out + i,
        tl.sqrt(source._log(tl.load(first + i)) * -2.0)
        * source._cospi(tl.load(angle + i)),
    )


def test_the_ends_of_the_range_have_the_bits_of_the_definition():
    # Words that are all zeros or all ones are drawn once in 2^32: the last operations
    # are compared by themselves.
    rng = np.random.default_rng(0)
    ends = np.array(
        [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, 2**30], np.uint32
    )
    x0 = np.concatenate([np.repeat(ends, 8), rng.integers(0, 2**32, 192, np.uint32)])
    x1 = np.concatenate([np.tile(ends, 8), rng.integers(0, 2**32, 192, np.uint32)])
    first = (torch.from_numpy(x0.astype(np.int64)) + 1).double() * 2.0**-32
    angle = torch.from_numpy(x1.astype(np.int64)).double() * 2.0**-31
    out = torch.empty(256, dtype=torch.float64)
    _finished[(1,)](first, angle, out, N=256)
    words = [torch.from_numpy(x.view(np.int32)) for x in (x0, x1)]
    assert torch.equal(out.float(), threefry._normals(*words, torch.float32))


LEAVES = {"a": (40, 61), "b": (0, 3), "c": (), "d": (1024,), "e": (2, 3, 5)}


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_leaves_are_drawn_in_one_launch_with_the_bits_of_each(
    kind, dtype, monkeypatch
):
    leaves, seen, by_kernel = (
        [torch.empty(shape) for shape in LEAVES.values()],
        [],
        leaf_draws.call_backend,
    )
    monkeypatch.setattr(
        leaf_draws,
        "call_backend",
        lambda *args: seen.append(by_kernel(*args)) or seen[-1],
    )
    got = leaf_draws.draws_laid(KEY, list(LEAVES), leaves, 3, kind, dtype)
    assert len(seen) == 1 and (seen[0] is None) == (
        kind == "normal" and dtype == torch.float64
    )
    draw = {"uniform": sf.random.uniform, "normal": sf.random.normal}[kind]
    for made, (path, shape) in zip(got, LEAVES.items(), strict=True):
        with without():
            want = draw(sf.random.leaf_key(KEY, path, 3), shape, dtype)
        assert made.dtype == dtype and torch.equal(made, want), path
        assert made.untyped_storage().nbytes() == made.nbytes


def test_normals_of_float64_are_left_to_torch():
    assert by_kernel(KEY, None, 3, "normal", torch.float64) is None


CHANCES = torch.tensor(
    [0.0, -0.0, -1.0, 1.0, 2.0, float("nan"), float("inf"), 2.0**-32, 0.5, 0.3, 0.7]
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("key", [KEY, KEYS], ids=["a key", "keys"])
def test_coins_fall_as_in_the_definition(key, dtype):
    for below, n in (
        (0, 100),
        (1, 100),
        (1 << 31, 100),
        (1 << 32, 100),
        (CHANCES.to(dtype), 11),
    ):
        got = draws.coins(key, below, None, n)
        with without():
            want = threefry.coins(key, below, None, n)
        assert got.dtype == torch.bool and torch.equal(got, want)


def test_the_doors_lead_to_them(monkeypatch):
    launches, launch = [], draws._launch
    monkeypatch.setattr(
        draws, "_launch", lambda *args: launches.append(args[5]) or launch(*args)
    )
    chances = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))

    def call(key):
        own = (
            sf.random.uniform(key, (3, 2)),
            sf.random.normal(key, (3,)),
            sf.random.split(key, 2),
        )
        return (
            *own,
            sf.random.bernoulli(key, 0.3, (9,)),
            sf.random.bernoulli(key, chances, (3, 4)),
        )

    keys = KEYS.reshape(6, 2)
    want = [torch.stack(parts) for parts in zip(*map(call, keys), strict=True)]
    assert not launches  # keys in sight are read as they are
    got = torch.vmap(call)(keys)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert set(launches) == {"uniform", "normal", "pairs", "below", "chances"}
    compiled = torch.compile(torch.vmap(call), backend="aot_eager", fullgraph=True)(
        keys
    )
    assert all(torch.equal(a, b) for a, b in zip(compiled, want, strict=True))
    of_each = torch.vmap(lambda p: engine_draws.flips(KEY, p, None, 4))(chances)
    assert torch.equal(
        of_each, torch.stack([engine_draws.flips(KEY, p, None, 4) for p in chances])
    )


def test_the_operators_are_what_they_say_they_are():
    leaves = torch.ops.sparsefn_kernels.draws_of_leaves.default
    args = (KEYS[0], [3, 0, 5], "uniform", torch.bfloat16, 1, 2, 8)
    torch.library.opcheck(leaves, args, test_utils=("test_schema", "test_faketensor"))
    args = (KEYS, 0, CHANCES, PLACES[:1].expand(11), 11)
    torch.library.opcheck(
        torch.ops.sparsefn_kernels.coins.default,
        args,
        test_utils=("test_schema", "test_faketensor"),
    )
