"""One draw by every way there is: numpy on plain keys, an operator, rounds in a
compiled graph, Python ints.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sparsefn import random
from sparsefn._engine.draws import threefry, words

KEY = random.key(3)
NAN, INF = float("nan"), float("inf")
ODD = torch.tensor(
    [[0.0, 0.3, 1.0], [NAN, INF, -INF], [-1.0, 1e308, 1e-310]], dtype=torch.float64
)
FAR = torch.tensor([0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, -(2**63), 2**63 - 1])
KINDS = [
    ("pairs", torch.int64),
    ("split", torch.int64),
    ("fold int", torch.int64),
    ("words", torch.int64),
    *((kind, dtype) for kind in ("uniform", "normal") for dtype in threefry.DIGITS),
]


def as_on_a_device(monkeypatch):
    """Hide the memory of plain tensors, as a device does."""
    for see in ("as_numpy", "as_numpy_inside"):
        monkeypatch.setattr(threefry, see, lambda x: None)


def bit_equal(a, b):
    # no NaN and no -0.0 is drawn
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("pairs", torch.int64),
        ("words", torch.int64),
        ("uniform", torch.float32),
        ("normal", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("index", [None, torch.arange(5, 9)])
def test_the_operator_keeps_to_the_rules_of_custom_operators(kind, dtype, index):
    torch.library.opcheck(threefry.operator, (KEY, index, 4, kind, dtype))
    torch.library.opcheck(
        threefry.operator, (random.split(KEY, 3), index, 4, kind, dtype)
    )


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("n", [0, 1, 7, 1000])
def test_memory_and_tensors_give_the_same_draws(monkeypatch, kind, dtype, n):
    keys = torch.cat(
        (random.split(KEY, 5), torch.tensor([[0, 0], [2**32 - 1, 2**32 - 1]]))
    )
    cases = [
        (KEY, None, n),
        (keys, None, n),
        (keys[:6].reshape(2, 3, 2), None, n),
        (keys.T.contiguous().T, None, n),
    ]
    cases += [
        (KEY, FAR, 9),
        (keys, FAR, 9),
        (keys[:3], FAR.reshape(3, 3), 3),
        (KEY, FAR.reshape(3, 3)[:, :2], 2),
    ]
    cases += [
        (keys[:, None], FAR.reshape(3, 3), 3),
        (keys[:0], None, n),
        (KEY, FAR[::2], 5),
    ]
    fast = [threefry.draw(key, index, m, kind, dtype) for key, index, m in cases]
    as_on_a_device(monkeypatch)
    for got, (key, index, m) in zip(fast, cases, strict=True):
        assert bit_equal(got, threefry.draw(key, index, m, kind, dtype))


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_blocks_of_rows_and_of_columns_give_the_same_draws(monkeypatch, kind, dtype):
    monkeypatch.setattr(words, "BLOCK", 64)
    cases = [
        (KEY, 259),
        (random.split(KEY, 3), 33),
        (random.split(KEY, 3), 129),
        (random.split(KEY, 41), 5),
    ]
    fast = [threefry.draw(key, None, n, kind, dtype) for key, n in cases]
    as_on_a_device(monkeypatch)
    for got, (key, n) in zip(fast, cases, strict=True):
        assert bit_equal(got, threefry.draw(key, None, n, kind, dtype))


def test_two_threads_draw_what_one_draws():
    n, threads = (1 << 20) + 5, torch.get_num_threads()
    want = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        want.append(
            [
                random.uniform(KEY, (n,)),
                random.bits(random.split(KEY, 2), (n,)),
                random.bernoulli(KEY, 0.3, (n,)),
            ]
        )
    torch.set_num_threads(threads)
    assert all(
        bit_equal(a, b)
        for other in want[1:]
        for a, b in zip(want[0], other, strict=True)
    )


@pytest.mark.parametrize("p", [0.0, 2.0**-32, 0.3, 1 - 2.0**-33, 1.0])
def test_coins_in_memory_and_by_tensors_agree(monkeypatch, p):
    keys, index = random.split(KEY, 3), FAR.reshape(3, 3)
    chances = [ODD, *(torch.full((3, 1), p, dtype=dtype) for dtype in threefry.DIGITS)]

    def flips():
        rows = [
            random.bernoulli(key, p, (3, 3), index=places)
            for key in (KEY, keys)
            for places in (None, index)
        ]
        return rows + [
            random.bernoulli(key, q, (3, 3)) for key in (KEY, keys) for q in chances
        ]

    fast = flips()
    as_on_a_device(monkeypatch)
    assert all(bit_equal(a, b) for a, b in zip(fast, flips(), strict=True))


@pytest.mark.deep
def test_compiled_coins_agree():
    def flips(key, chances):
        return (
            random.bernoulli(key, chances),
            *(random.bernoulli(key, p, (50,)) for p in (0.0, 0.3, 1.0)),
        )

    got = torch.compile(flips, fullgraph=True, backend="aot_eager")(KEY, ODD)
    assert all(bit_equal(a, b) for a, b in zip(got, flips(KEY, ODD), strict=True))
    assert not got[1].any() and got[2].any() and not got[2].all() and got[3].all()
    keys, stack = random.split(KEY, 2), torch.stack((ODD, ODD.flip(0)))
    rows = torch.compile(
        torch.vmap(lambda k, q: flips(k, q)[0]), fullgraph=True, backend="aot_eager"
    )(keys, stack)
    assert bit_equal(
        rows,
        torch.stack([random.bernoulli(k, q) for k, q in zip(keys, stack, strict=True)]),
    )


@pytest.mark.parametrize("data", [*FAR.tolist(), "", "0.weight", "é"])
def test_a_plain_key_is_folded_as_any_other(monkeypatch, data):
    for key in (KEY, random.key(2**64 - 1), KEY + (5 << 32)):
        kinds = [data] if isinstance(data, str) else [data, torch.tensor(data)]
        fast = [random.fold_in(key, kind) for kind in kinds]
        fast += [random.fold_in(torch.stack((KEY, key)), kind)[1] for kind in kinds]
        with monkeypatch.context() as patch:
            as_on_a_device(patch)
            assert all(bit_equal(got, random.fold_in(key, data)) for got in fast)


# Rounds in a graph

LARGE = (1 << 20) + 37


def nodes(program):
    return [
        str(node.target) for node in program.graph.nodes if node.op == "call_function"
    ]


class Noise(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def forward(self, key):
        return random.uniform(key, (self.n,))


@pytest.mark.deep
@pytest.mark.parametrize(
    "draw",
    [random.uniform, random.bits, lambda *a, **k: random.bernoulli(a[0], 0.3, *a[1:])],
)
def test_traced_draws_have_the_same_bits(monkeypatch, draw):
    monkeypatch.setattr(threefry, "_LARGE", 30)
    keys = random.split(KEY, 3)
    compiled = torch.compile(
        lambda key: draw(key, (7, 5)), fullgraph=True, backend="aot_eager"
    )
    assert bit_equal(compiled(KEY), draw(KEY, (7, 5)))
    assert bit_equal(compiled(keys), draw(keys, (7, 5)))
    batched = torch.compile(
        torch.vmap(lambda key: draw(key, (35,))), fullgraph=True, backend="eager"
    )
    assert bit_equal(batched(keys), draw(keys, (35,)))


@pytest.mark.deep
def test_traced_draws_are_constants_under_grad(monkeypatch):
    monkeypatch.setattr(threefry, "_LARGE", 30)
    slope = torch.func.grad(lambda w, key: (w * random.uniform(key, (40,))).sum())
    compiled = torch.compile(slope, fullgraph=True, backend="aot_eager")
    assert bit_equal(compiled(torch.ones(40), KEY), random.uniform(KEY, (40,)))


@pytest.mark.deep
# torch's own, when inductor is imported
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_inductor_gives_the_same_bits():
    def draw(key):
        return random.uniform(key, (LARGE,))

    assert bit_equal(torch.compile(draw, fullgraph=True)(KEY), draw(KEY))


def test_only_large_draws_are_traced():
    small, large = (torch.export.export(Noise(n), (KEY,)) for n in (1000, LARGE))
    assert (
        nodes(small).count("sparsefn.threefry2x32.default") == 1
        and len(nodes(small)) < 5
    )
    assert not any("sparsefn" in name for name in nodes(large))
    assert bit_equal(large.module()(KEY), random.uniform(KEY, (LARGE,)))


def test_a_draw_of_unknown_size_stays_an_operator():
    compiled = torch.compile(
        lambda key, n: random.uniform(key, (n,)),
        fullgraph=True,
        backend="eager",
        dynamic=True,
    )
    for n in (5, LARGE, 100):
        assert bit_equal(compiled(KEY, n), random.uniform(KEY, (n,)))


def test_a_trace_and_a_fake_tensor_see_the_operator():
    graph = make_fx(lambda key: random.uniform(key, (3,)))(KEY)
    assert nodes(graph).count("sparsefn.threefry2x32.default") == 1
    assert bit_equal(graph(KEY), random.uniform(KEY, (3,)))
    with FakeTensorMode() as mode:
        drawn = random.uniform(random.fold_in(mode.from_tensor(KEY), 3), (4, 5))
    assert drawn.shape == (4, 5) and drawn.dtype == torch.float32
    assert random.uniform(KEY.to("meta"), (4, 5)).device.type == "meta"


# The values of the words


def test_pairs_hold_both_words_the_first_on_top():
    pair = int(threefry.draw(KEY, None, 1, "pairs", torch.int64)) & 0xFFFFFFFFFFFFFFFF
    assert [pair >> 32, pair & 0xFFFFFFFF] == random.threefry2x32(
        KEY, torch.tensor([0, 0])
    ).tolist()


def test_keys_and_indices_broadcast():
    keys, index = random.split(KEY, 6).reshape(2, 3, 2), torch.arange(12).reshape(3, 4)
    got = threefry.draw(keys, index, 4, "words", torch.int64)
    assert got.shape == (2, 3, 4)
    assert torch.equal(
        got[1, 2], threefry.draw(keys[1, 2], index[2], 4, "words", torch.int64)
    )


def test_only_the_low_32_bits_of_a_key_word_count():
    high = KEY + (5 << 32)
    assert torch.equal(
        threefry.draw(high, None, 3, "words", torch.int64), random.bits(KEY, (3,))
    )


def test_laws_of_keys_and_of_words_are_apart():
    first = {
        kind: int(threefry.draw(KEY, None, 1, kind, torch.int64))
        for kind in ("pairs", "split", "fold int", "fold str")
    }
    assert len(set(first.values())) == 4
