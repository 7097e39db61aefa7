import copy
import math
import os
import random as python_random
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from torch.func import grad, vmap

from sparsefn import random

KEY = random.key(3)
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def everything(key, step, p):
    """One draw of every kind, at a leaf and a step."""
    key = random.leaf_key(key, "0.weight", step)
    return (
        key,
        random.split(key, 2),
        random.bits(key, (3, 2)),
        random.uniform(key, (5,)),
        random.uniform(key, (5,), torch.float64),
        random.normal(key, (5,)),
        random.bernoulli(key, p, (64,)),
        random.permutation(key, 6),
    )


def same(got, want):
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True)
    )


def stacked(rows):
    return [torch.stack(column) for column in zip(*rows, strict=True)]


# The generator


@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_known_answers_of_random123_hold(key, counter, words):
    assert (
        tuple(random.threefry2x32(torch.tensor(key), torch.tensor(counter)).tolist())
        == words
    )


def test_threefry_broadcasts_keys_against_counters():
    keys, counters = random.split(KEY, 3), torch.tensor([[0, 5], [1, 0]])
    got = random.threefry2x32(keys[:, None], counters)
    assert got.shape == (3, 2, 2)
    assert torch.equal(got[2, 1], random.threefry2x32(keys[2], counters[1]))


def test_a_draw_takes_the_block_of_the_global_index():
    words = random.bits(KEY, (4,))
    blocks = random.threefry2x32(KEY, torch.tensor([[0, i] for i in range(4)]))
    assert torch.equal(words, blocks[:, 0])
    far = torch.tensor([(7 << 32) + 9])
    assert (
        random.bits(KEY, (1,), index=far).item()
        == random.threefry2x32(KEY, torch.tensor([7, 9]))[0].item()
    )


def test_streams_are_pinned():
    key = random.key(0)
    assert random.bits(key, (1,)).item() == 0x6B200159
    assert random.key((5 << 32) + 6).tolist() == [5, 6]
    assert random.split(key, 1).tolist() == [[1918353091, 1334857961]]
    assert random.fold_in(key, 1).tolist() == [3520574224, 438507793]
    assert random.fold_in(key, "a").tolist() == [2515978831, 2820018318]
    assert random.normal(key, (2,), torch.float64).tolist() == [
        -1.065452424215552,
        0.5836949546010874,
    ]
    assert random.permutation(key, 5).tolist() == [4, 3, 2, 1, 0]


# The arguments that a draw depends on


@pytest.mark.parametrize("draw", [random.bits, random.uniform, random.normal])
def test_a_shard_draws_its_part_of_the_whole(draw):
    whole = draw(KEY, (7, 5))
    index = torch.arange(35).reshape(7, 5)
    assert torch.equal(draw(KEY, (7, 2), index=index[:, 3:]), whole[:, 3:])
    assert torch.equal(draw(KEY, (5, 5), index=index[2:]), whole[2:])
    assert torch.equal(draw(KEY, (3,)), whole.reshape(-1)[:3])


def test_large_draws_do_not_depend_on_how_they_are_cut_into_blocks():
    n = (1 << 17) + 5
    index = torch.arange(n - 20, n)
    keys = random.split(KEY, 3)
    assert torch.equal(
        random.bits(KEY, (n,))[-20:], random.bits(KEY, (20,), index=index)
    )
    assert torch.equal(random.bits(keys, (n,))[2], random.bits(keys[2], (n,)))
    assert torch.equal(
        random.bits(KEY, (n,), index=torch.arange(n)), random.bits(KEY, (n,))
    )


def test_thread_count_does_not_matter():
    torch.set_num_threads(1)
    want = random.normal(KEY, (200_000,)), random.permutation(KEY, 50_000)
    torch.set_num_threads(3)
    assert same((random.normal(KEY, (200_000,)), random.permutation(KEY, 50_000)), want)


def test_global_generators_are_neither_read_nor_advanced():
    torch.manual_seed(0)
    want, states = (
        everything(KEY, 1, 0.5),
        (torch.get_rng_state(), python_random.getstate()),
    )
    assert (
        torch.equal(torch.get_rng_state(), states[0])
        and python_random.getstate() == states[1]
    )
    torch.manual_seed(1)
    python_random.seed(1)
    before = torch.get_rng_state(), python_random.getstate()
    assert same(everything(KEY, 1, 0.5), want)
    assert (
        torch.equal(torch.get_rng_state(), before[0])
        and python_random.getstate() == before[1]
    )


def test_default_dtype_and_default_device_do_not_matter():
    want = everything(random.key(3), 1, 0.5)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        got = everything(random.key(3), 1, 0.5)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert same(got, want)


@pytest.mark.deep
def test_the_hash_seed_does_not_matter():
    code = (
        "from sparsefn import random; print(random.leaf_key(random.key(3), "
        "'0.weight', 5).tolist())"
    )
    env = dict(os.environ, PYTHONHASHSEED="12345", PYTHONPATH=os.pathsep.join(sys.path))
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == str(random.leaf_key(KEY, "0.weight", 5).tolist())


def test_inputs_stay_as_they_are():
    key, index, p = random.key(3), torch.arange(4), torch.full((4,), 0.5)
    kept = copy.deepcopy((key, index, p))
    random.bernoulli(key, p, (4,), index=index)
    everything(key, torch.tensor(1), p[0])
    assert same((key, index, p), kept)


# Keys


def test_a_number_gives_the_same_key_as_its_tensor():
    for data in (0, 1, -1, 2**40, -(2**63), 2**63 - 1):
        assert torch.equal(
            random.fold_in(KEY, data), random.fold_in(KEY, torch.tensor(data))
        )


def test_keys_and_words_never_coincide():
    n = 500
    counters = torch.stack((torch.zeros(n, dtype=torch.int64), torch.arange(n)), -1)
    made = {
        "words": random.threefry2x32(KEY, counters),
        "split": random.split(KEY, n),
        "ints": torch.stack([random.fold_in(KEY, i) for i in range(n)]),
        "names": torch.stack([random.fold_in(KEY, str(i)) for i in range(n)]),
    }
    pairs = {tuple(pair) for keys in made.values() for pair in keys.tolist()}
    assert len(pairs) == 4 * n
    assert all(
        int(keys.min()) >= 0 and int(keys.max()) < 2**32 for keys in made.values()
    )


def test_split_keys_do_not_depend_on_their_number():
    assert torch.equal(random.split(KEY, 2), random.split(KEY, 5)[:2])
    assert random.split(KEY, 0).shape == (0, 2)


def test_a_leaf_key_folds_in_the_path_and_then_the_step():
    named = random.fold_in(KEY, "a.b")
    assert torch.equal(random.leaf_key(KEY, "a.b"), named)
    assert torch.equal(random.leaf_key(KEY, "a.b", 4), random.fold_in(named, 4))


def test_leaf_keys_depend_on_paths_and_not_on_order():
    tree = {"b": torch.zeros(2), "a": {"w": torch.zeros(3)}}
    keys = random.leaf_keys(KEY, tree, 4)
    assert torch.equal(keys["a"]["w"], random.leaf_key(KEY, "a.w", 4))
    other = random.leaf_keys(
        KEY, {"a": {"w": tree["a"]["w"]}, "c": tree["b"], "b": tree["b"]}, 4
    )
    assert torch.equal(other["b"], keys["b"]) and torch.equal(
        other["a"]["w"], keys["a"]["w"]
    )


def test_batched_keys_draw_what_each_key_draws():
    keys = random.split(KEY, 6).reshape(2, 3, 2)
    for draw in (
        lambda key: random.uniform(key, (4, 2)),
        lambda key: random.normal(key, (4,), index=torch.arange(4, 8)),
        lambda key: random.bernoulli(key, 0.5, (9,)),
        lambda key: random.permutation(key, 5),
        lambda key: random.split(key, 3),
        lambda key: random.leaf_key(key, "a", torch.tensor(2)),
    ):
        got = draw(keys)
        assert all(
            torch.equal(got[i, j], draw(keys[i, j])) for i in range(2) for j in range(3)
        )


# Distributions


@pytest.mark.parametrize("dtype", DIGITS)
def test_uniform_is_the_leading_bits_and_never_one(dtype):
    n, digits = 1 << 14, DIGITS[dtype]
    words = random.threefry2x32(
        KEY, torch.stack((torch.zeros(n, dtype=torch.int64), torch.arange(n)), -1)
    )
    whole = [(w0 << 32 | w1) >> (64 - digits) for w0, w1 in words.tolist()]
    got = random.uniform(KEY, (n,), dtype)
    assert got.dtype == dtype
    assert got.double().tolist() == [w * 2.0**-digits for w in whole]
    assert max(whole) > 0.99 * 2**digits and float(got.max()) < 1


def test_uniform_numbers_are_uniform():
    counts = torch.bincount(
        (random.uniform(KEY, (100_000,)) * 64).long(), minlength=64
    ).double()
    chi2 = float(((counts - 100_000 / 64) ** 2).sum() / (100_000 / 64))
    assert 28 < chi2 < 115  # 63 degrees of freedom, about 1e-5 on either side


def test_streams_of_neighbouring_keys_are_uncorrelated():
    keys = torch.cat(
        (random.split(KEY, 20), torch.stack([random.key(i) for i in range(20)]))
    )
    x = random.normal(keys, (4000,), torch.float64)
    x = torch.cat((x, random.normal(KEY, (1, 4000), torch.float64)))
    corr = torch.corrcoef(x) - torch.eye(len(x), dtype=torch.float64)
    keep = ~torch.eye(len(x), dtype=torch.bool)
    keep[20 + 3, -1] = keep[-1, 20 + 3] = False  # key(3) is KEY itself
    assert float(corr[keep].abs().max()) < 6 / math.sqrt(4000)


def test_normal_is_box_muller_on_the_two_words():
    n = 2000
    words = random.threefry2x32(
        KEY, torch.stack((torch.zeros(n, dtype=torch.int64), torch.arange(n)), -1)
    )
    want = [
        math.sqrt(-2 * math.log((a + 1) / 2**32)) * math.cos(2 * math.pi * b / 2**32)
        for a, b in words.tolist()
    ]
    got = random.normal(KEY, (n,), torch.float64)
    torch.testing.assert_close(
        got, torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=1e-14
    )
    for dtype in DIGITS:
        assert torch.equal(random.normal(KEY, (n,), dtype), got.to(dtype))


def test_normal_numbers_have_the_moments_of_a_normal():
    x = random.normal(KEY, (50_000,), torch.float64)
    for power, want, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((x**power).mean()) - want) < 5 * math.sqrt(spread / 50_000)


def test_bernoulli_compares_the_word_with_p():
    words = random.bits(KEY, (1000,))
    for p in (0.0, 2**-32, 0.1, 0.5, 1 - 2**-32, 1.0):
        want = [word < p * 2**32 for word in words.tolist()]
        assert random.bernoulli(KEY, p, (1000,)).tolist() == want
        assert (
            random.bernoulli(
                KEY, torch.tensor(p, dtype=torch.float64), (1000,)
            ).tolist()
            == want
        )
    lowest = words.argmin()
    p = float(words[lowest]) * 2**-32  # not below itself, but below the next number
    index = lowest.reshape(1)
    assert not random.bernoulli(KEY, p, (1,), index=index)
    assert random.bernoulli(KEY, math.nextafter(p, 1), (1,), index=index)


def test_bernoulli_takes_a_probability_for_each_element():
    p = torch.tensor([[0.0, 1.0, 0.3], [float("nan"), 2.0, -1.0]])
    got = random.bernoulli(KEY, p)
    assert got.dtype == torch.bool and got.shape == (2, 3)
    assert got[:, :2].tolist() == [[False, True], [False, True]] and not got[1, 2]
    rows = (
        random.bernoulli(KEY, torch.tensor([[0.25], [0.75]]), (2, 20_000))
        .double()
        .mean(1)
    )
    torch.testing.assert_close(
        rows, torch.tensor([0.25, 0.75], dtype=torch.float64), atol=0.015, rtol=0
    )
    assert random.bernoulli(KEY, 1.0).shape == ()


def test_permutations_are_permutations_and_every_place_is_as_likely():
    keys = random.split(KEY, 3000)
    orders = random.permutation(keys, 5)
    assert torch.equal(orders.sort(-1).values, torch.arange(5).expand(3000, 5))
    counts = torch.stack([(orders == i).sum(0) for i in range(5)])
    assert int((counts - 600).abs().max()) < 110  # five standard deviations
    assert random.permutation(KEY, 0).shape == (0,)


def test_empty_draws_are_empty():
    assert random.uniform(KEY, (0, 3)).shape == (0, 3)
    assert random.bits(random.split(KEY, 0), (4,)).shape == (0, 4)
    assert random.normal(KEY, ()).shape == ()


# Transforms

STEPS, CHANCES = torch.arange(4), torch.tensor([0.0, 0.2, 0.5, 1.0])
KEYS = random.split(KEY, 4)


def test_vmap_equals_a_loop_whatever_is_batched():
    loop = stacked(
        [everything(k, int(s), p) for k, s, p in zip(KEYS, STEPS, CHANCES, strict=True)]
    )
    assert same(vmap(everything)(KEYS, STEPS, CHANCES), loop)
    loop = stacked([everything(k, 2, 0.5) for k in KEYS])
    assert same(vmap(everything, (0, None, None))(KEYS, 2, 0.5), loop)
    assert same(vmap(everything, (1, None, None))(KEYS.T, torch.tensor(2), 0.5), loop)
    loop = stacked([everything(KEY, int(s), 0.5) for s in STEPS])
    assert same(vmap(everything, (None, 0, None))(KEY, STEPS, 0.5), loop)


def test_nested_vmap_equals_two_loops():
    def draw(key, index):
        return (random.uniform(key, (3,), index=index),)

    index = torch.arange(15).reshape(5, 3)
    loop = stacked([stacked([draw(k, i) for i in index]) for k in KEYS])
    assert same(vmap(vmap(draw, (None, 0)), (0, None))(KEYS, index), loop)
    assert same(vmap(vmap(draw, (0, None)), (None, 0), out_dims=1)(KEYS, index), loop)
    both = vmap(vmap(draw), (0, None))(torch.stack((KEYS, KEYS.flip(0))), index[:4])
    assert same(
        both,
        stacked(
            [
                stacked([draw(k, i) for k, i in zip(ks, index[:4], strict=True)])
                for ks in (KEYS, KEYS.flip(0))
            ]
        ),
    )


def test_draws_are_constants_under_grad():
    noise = random.normal(KEY, (3,))
    assert torch.equal(
        grad(lambda w: (w * random.normal(KEY, (3,))).sum())(torch.ones(3)), noise
    )
    per_key = vmap(
        grad(lambda w, key: (w * random.normal(key, (3,))).sum()), (None, 0)
    )(torch.ones(3), KEYS)
    assert torch.equal(per_key, random.normal(KEYS, (3,)))


@pytest.mark.deep
# torch's own, when inductor is imported
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_draws_have_the_same_bits(backend):
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    assert same(compiled(KEY, torch.tensor(5), 0.5), everything(KEY, 5, 0.5))
    if backend != "inductor":
        batched = torch.compile(vmap(everything), fullgraph=True, backend=backend)
        assert same(
            batched(KEYS, STEPS, CHANCES), vmap(everything)(KEYS, STEPS, CHANCES)
        )


def test_one_graph_serves_every_step():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda key, step: random.leaf_key(key, "a", step),
        fullgraph=True,
        backend=counter,
    )
    for step in range(6):
        assert torch.equal(
            compiled(KEY, torch.tensor(step)), random.leaf_key(KEY, "a", step)
        )
    assert counter.frame_count == 1
    for step in range(6):
        assert torch.equal(compiled(KEY, step), random.leaf_key(KEY, "a", step))
    assert counter.frame_count <= 4


def test_draws_can_be_exported():
    class Noise(torch.nn.Module):
        def forward(self, key):
            return random.uniform(random.fold_in(key, "a"), (3,))

    program = torch.export.export(Noise(), (KEY,))
    assert torch.equal(program.module()(KEYS[1]), Noise()(KEYS[1]))


# Errors


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: random.key(True), TypeError, "expected seed to be an int, got bool"),
        (lambda: random.key(1.0), TypeError, "expected seed to be an int, got float"),
        (lambda: random.key(-1), ValueError, r"expected 0 <= seed < 2\*\*64, got -1"),
        (
            lambda: random.key(1 << 64),
            ValueError,
            r"expected 0 <= seed < 2\*\*64, got 18446744073709551616",
        ),
        (
            lambda: random.bits(0, (1,)),
            TypeError,
            r"expected a key from sf.random.key\(seed\), got int",
        ),
        (
            lambda: random.bits(torch.zeros(2), (1,)),
            TypeError,
            r"expected a key of dtype torch.int64, got torch.float32; make one by "
            r"sf.random.key\(seed\)",
        ),
        (
            lambda: random.split(torch.tensor([1, 2, 3]), 2),
            ValueError,
            r"expected a key of shape \(2,\) or \(..., 2\), got \(3,\)",
        ),
        (
            lambda: random.fold_in(torch.tensor(1), 2),
            ValueError,
            r"expected a key of shape .*, got \(\)",
        ),
        (
            lambda: random.split(KEY, 2.0),
            TypeError,
            r"split\(key, n\): expected n to be an int, got float",
        ),
        (
            lambda: random.split(KEY, -1),
            ValueError,
            r"split\(key, n\): expected n >= 0, got -1",
        ),
        (
            lambda: random.permutation(KEY, True),
            TypeError,
            r"permutation\(key, n\): expected n to be an int, got bool",
        ),
        (
            lambda: random.permutation(KEY, -2),
            ValueError,
            r"permutation\(key, n\): expected n >= 0, got -2",
        ),
        (
            lambda: random.fold_in(KEY, True),
            TypeError,
            "expected data to be an int, a str or .* tensor, got bool",
        ),
        (
            lambda: random.fold_in(KEY, 0.5),
            TypeError,
            "expected data to be an int, a str or .* tensor, got float",
        ),
        (
            lambda: random.fold_in(KEY, torch.tensor(0.5)),
            TypeError,
            "expected data to be an int, a str or a 0-d int64 tensor, got a tensor of "
            "torch.float32",
        ),
        (
            lambda: random.fold_in(KEY, torch.tensor([1])),
            ValueError,
            r"expected data to be a 0-d tensor, got shape \(1,\)",
        ),
        (
            lambda: random.fold_in(KEY, 1 << 63),
            ValueError,
            r"expected data in \[-2\*\*63, 2\*\*63\), got 9223372036854775808",
        ),
        (
            lambda: random.uniform(KEY, 3),
            TypeError,
            r"expected shape to be a sequence of ints, got 3; write \(3,\)",
        ),
        (
            lambda: random.normal(KEY, (2, -1)),
            ValueError,
            r"expected a shape without negative sizes, got \(2, -1\)",
        ),
        (
            lambda: random.uniform(KEY, (1,), torch.int64),
            TypeError,
            "expected dtype float16, bfloat16, .*, got torch.int64",
        ),
        (
            lambda: random.normal(KEY, (1,), torch.bool),
            TypeError,
            "expected dtype float16, bfloat16, .*, got torch.bool",
        ),
        (
            lambda: random.bits(KEY, (2,), index=torch.tensor([0.0, 1.0])),
            TypeError,
            "expected index to be an int64 tensor of global element indices, got "
            "torch.float32",
        ),
        (
            lambda: random.bits(KEY, (2,), index=[0, 1]),
            TypeError,
            "expected index to be an int64 tensor .*, got list",
        ),
        (
            lambda: random.bits(KEY, (2,), index=torch.arange(3)),
            ValueError,
            r"expected index of the draw's shape \(2,\), got \(3,\)",
        ),
        (
            lambda: random.bernoulli(KEY, 1.5),
            ValueError,
            "expected 0 <= p <= 1, got 1.5",
        ),
        (
            lambda: random.bernoulli(KEY, -0.1),
            ValueError,
            "expected 0 <= p <= 1, got -0.1",
        ),
        (
            lambda: random.bernoulli(KEY, float("nan")),
            ValueError,
            "expected 0 <= p <= 1, got nan",
        ),
        (
            lambda: random.bernoulli(KEY, True),
            TypeError,
            "expected p to be a number or a float tensor, got bool",
        ),
        (
            lambda: random.bernoulli(KEY, torch.tensor([1])),
            TypeError,
            "expected p to be a float tensor, got torch.int64",
        ),
        (
            lambda: random.bernoulli(KEY, torch.full((3,), 0.5), (2,)),
            ValueError,
            r"expected p to broadcast to shape \(2,\), got \(3,\)",
        ),
        (
            lambda: random.bernoulli(KEY, torch.full((3,), 0.5), ()),
            ValueError,
            r"expected p to broadcast to shape \(\), got \(3,\)",
        ),
        (
            lambda: random.threefry2x32(KEY, torch.tensor([1, 2, 3])),
            ValueError,
            r"expected counter to be an int64 tensor of shape \(..., 2\), got "
            r"torch.int64 \(3,\)",
        ),
        (
            lambda: random.threefry2x32(KEY, 0),
            ValueError,
            "expected counter to be an int64 tensor .*, got int",
        ),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
