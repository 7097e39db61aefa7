"""Weights under N:M masks in compressed form: the bits that come back, the layout, the
bytes, the errors.
"""

import io
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import sparsefn as sf
from sparsefn.masks.patterns import nm
from sparsefn.nn.checkpoint import compress, decompress, tree_equal

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def made(seed, shape, dtype, pattern, fewer=0.2):
    """Weights of random bits, NaNs of every kind among them, and a mask of which some
    groups keep fewer than n.
    """
    generator = torch.Generator().manual_seed(seed)
    integer = INTEGERS[dtype.itemsize]
    least = torch.iinfo(integer)
    bits = torch.randint(
        least.min, least.max, shape, generator=generator, dtype=integer
    )
    mask = sf.masks.topk_mask(
        torch.rand(shape, generator=generator), None, pattern=pattern
    )
    return bits.view(dtype), mask & (torch.rand(shape, generator=generator) >= fewer)


def under(weight, mask):
    integer = INTEGERS[weight.element_size()]
    return torch.where(mask, weight.view(integer), 0).view(weight.dtype)


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


@st.composite
def cases(draw):
    m = draw(st.integers(1, 9))
    n = draw(st.integers(0, m))
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    shape[axis] *= m
    return (
        nm(n, m, axis=axis),
        tuple(shape),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 2**32)),
    )


@settings(derandomize=True, max_examples=100, deadline=None)
@given(cases())
def test_bits_and_masks_come_back(case):
    pattern, shape, dtype, seed = case
    weight, mask = made(seed, shape, dtype, pattern)
    state = sf.State(
        {"w": weight, "b": weight.flatten()}, {"w": mask, "b": torch.tensor(True)}
    )
    tensors = compress(state, pattern)
    restored = decompress(tensors)
    assert restored.params["w"].dtype == dtype and restored.params["w"].shape == shape
    wanted = sf.State({"w": under(weight, mask), "b": weight.flatten()}, state.masks)
    assert tree_equal(restored, wanted)
    assert all(
        tensor.is_contiguous()
        for tensor in [*tensors.values(), *sf.tree.leaves_of(restored)]
    )
    n, m, axis = tensors["w.nm"].tolist()
    assert tensors["w.values"].shape[axis] * m == shape[axis] * n
    assert tensors["w.bitmask"].nbytes == -(-weight.numel() // 8)


@pytest.mark.parametrize(
    ("pattern", "dtype", "sixteenths"),
    [
        (nm(2, 4), torch.float16, 9),
        (nm(2, 4), torch.bfloat16, 9),
        (nm(4, 8), torch.float16, 9),
        (nm(1, 4), torch.float16, 5),
        (nm(2, 4, axis=0), torch.float32, 8.5),
    ],
    ids=str,
)
def test_bytes(pattern, dtype, sixteenths):
    weight, mask = made(0, (64, 128), dtype, pattern)
    tensors = compress(sf.State({"w": weight}, {"w": mask}), pattern)
    metadata = nbytes({name: tensors.pop(name) for name in ("w.shape", "w.nm")})
    assert metadata == 8 * 2 + 8 * 3
    assert nbytes(tensors) == weight.nbytes * sixteenths / 16


def test_the_layout_by_hand():
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]).mul(
        torch.tensor([[1.0], [10.0]])
    )
    mask = torch.tensor([[0, 1, 0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]) > 0
    tensors = compress(sf.State({"a": {"w": weight}}, {"a": {"w": mask}}), nm(2, 4))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "a.w.values": [[2.0, 4.0, 5.0, 6.0], [30.0, 0.0, 0.0, 0.0]],
        "a.w.bitmask": [0b00111010, 0b00000100],
        "a.w.shape": [2, 8],
        "a.w.nm": [2, 4, 1],
    }
    turned = compress(sf.State({"w": weight.T}, {"w": mask.T}), nm(2, 4, axis=0))
    assert turned["w.values"].tolist() == tensors["a.w.values"].T.tolist()
    assert (turned["w.nm"].tolist(), turned["w.shape"].tolist()) == ([2, 4, 0], [8, 2])


def test_axes_by_layer_and_the_module_that_comes_back():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3),
        torch.nn.ReLU(),
        torch.nn.ConvTranspose2d(8, 4, 3),
        torch.nn.Linear(6, 2),
    )
    params = sf.modules.params_of(net)
    rules = [("2.weight", nm(1, 4, axis=0)), (["0.weight"], nm(2, 4, axis=1))]
    algorithm = sf.partition(
        [
            (where, sf.ste(None, pattern=pattern, where=where))
            for where, pattern in rules
        ]
    )
    state = algorithm.init(params)
    tensors = compress(state, [*rules, ("*", nm(2, 4))])
    assert tensors["0.weight.values"].shape == (8, 2, 3, 3) and tensors[
        "2.weight.values"
    ].shape == (2, 4, 3, 3)
    restored = decompress(tensors)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(
        sf.modules.bake(net, restored)(x), sf.modules.call(net, state, x)
    )
    assert tree_equal(restored.masks, state.masks)
    fixed = sf.from_masks(restored.masks).init(restored.params)
    assert tree_equal(fixed.params, sf.effective(state))


def test_a_nested_tree_and_an_ensemble():
    weight, mask = made(0, (3, 8), torch.float32, nm(2, 4))
    state = sf.State([{"w": weight}], [{"w": mask}])
    restored = decompress(compress(state, nm(2, 4)))
    assert list(restored.params) == ["0.w"]
    nested = sf.checkpoint.load_state_dict(state.params, restored.params)
    assert tree_equal(nested, [{"w": under(weight, mask)}])
    stack = sf.ensemble.stack([sf.State({"w": weight}, {"w": mask})] * 2)
    assert tree_equal(decompress(compress(stack, nm(2, 4))).masks, stack.masks)


def test_a_single_tensor_and_a_count_in_a_tensor():
    weight, mask = made(0, (8,), torch.float32, nm(2, 4))
    tensors = compress(sf.State(weight, mask), nm(torch.tensor(2), 4))
    assert list(tensors) == [".values", ".bitmask", ".shape", ".nm"]
    assert tree_equal(decompress(tensors).params, {"": under(weight, mask)})


def test_a_lazy_negative_is_computed():
    x, mask = torch.arange(8.0) - 4, torch.tensor([True, False, True, False] * 2)
    state = sf.State(
        {"w": torch._neg_view(x), "b": torch._neg_view(x)},
        {"w": mask, "b": torch.tensor(True)},
    )
    tensors = compress(state, nm(2, 4))
    assert not any(tensor.is_neg() for tensor in tensors.values())
    expected = {"w": torch.where(mask, -x, 0.0), "b": -x}
    assert tree_equal(decompress(tensors).params, expected)


def test_through_a_weights_only_file():
    weight, mask = made(0, (16, 8), torch.float16, nm(2, 4))
    tensors = compress(sf.State({"w": weight}, {"w": mask}), nm(2, 4))
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    assert tree_equal(
        decompress(torch.load(file, weights_only=True)), decompress(tensors)
    )


def test_through_safetensors(tmp_path):
    weight, mask = made(0, (16, 8), torch.float16, nm(2, 4))
    state = sf.State(
        {"w": weight, "b": torch.ones(2, 3).T}, {"w": mask, "b": torch.tensor(True)}
    )
    save_file(compress(state, nm(2, 4)), tmp_path / "w.safetensors")
    restored = decompress(load_file(tmp_path / "w.safetensors"))
    assert tree_equal(
        restored,
        sf.State({"w": under(weight, mask), "b": state.params["b"]}, state.masks),
    )


def test_nothing_is_shared_or_mutated():
    weight, mask = made(0, (4, 8), torch.float32, nm(2, 4))
    state = sf.State(
        {"w": weight.requires_grad_(), "b": torch.ones(3)},
        {"w": mask, "b": torch.tensor(True)},
    )
    before = {
        path: leaf.clone() for path, leaf in sf.checkpoint.state_dict(state).items()
    }
    tensors = compress(state, nm(2, 4))
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    restored = decompress(tensors)
    assert not any(tensor.requires_grad for tensor in tensors.values())
    for tensor in sf.tree.leaves_of(restored):
        tensor.zero_()
    assert tree_equal(tensors, kept)
    for tensor in tensors.values():
        tensor.zero_()
    assert tree_equal(sf.checkpoint.state_dict(state), before)


WEIGHT, MASK = made(0, (4, 8), torch.float32, nm(2, 4), fewer=0.0)
STATE = sf.State({"w": WEIGHT}, {"w": MASK})
META = torch.ones(4, 8, device="meta")
STRANGE = sf.patterns.Pattern(
    "mine", lambda shape: (1, 1), lambda grid: (2, 2), fixed=2
)


def dense(path):
    return sf.State({path: WEIGHT}, {path: torch.tensor(True)})


REFUSED = [
    (
        lambda: compress(STATE.params, nm(2, 4)),
        TypeError,
        "compress: expected a State, got dict",
    ),
    (
        lambda: compress(STATE, "2:4"),
        TypeError,
        "compress: expected a list of pairs, got str at position 0",
    ),
    (
        lambda: compress(STATE, 2),
        TypeError,
        "compress: expected a pattern or a list of (where, pattern), got int",
    ),
    (
        lambda: compress(STATE, [("*", 2)]),
        TypeError,
        "compress: expected a pattern at position 0, got int",
    ),
    (lambda: compress(STATE, [("v", nm(2, 4))]), ValueError, "'v'"),
    (
        lambda: compress(STATE, []),
        ValueError,
        "compress: no rule matches 'w' with a mask; end with ('*', a pattern)",
    ),
    (
        lambda: compress(STATE, nm(1, 4)),
        ValueError,
        "compress: expected a mask of nm(1, 4, axis=-1) at 'w', got a group that "
        "keeps 2",
    ),
    (
        lambda: compress(STATE, nm(2, 3)),
        ValueError,
        "nm(2, 3, axis=-1): expected axis -1 divisible by 3, got shape (4, 8) at 'w'",
    ),
    (
        lambda: compress(STATE, nm(2, 4, axis=2)),
        ValueError,
        "no axis 2 in shape (4, 8) at 'w'",
    ),
    *(
        (
            lambda pattern=pattern: compress(STATE, pattern),
            ValueError,
            "compress: expected a pattern such as sf.patterns.nm(2, 4), got "
            f"{pattern!r} at 'w'",
        )
        for pattern in (
            sf.patterns.row_balanced(),
            sf.patterns.nearly_diagonal(1),
            STRANGE,
        )
    ),
    (
        lambda: compress(sf.State({"w": META}, {"w": MASK}), nm(2, 4)),
        ValueError,
        "expected the state to hold values, got a tensor of the meta device at 'w'",
    ),
    (
        lambda: compress(sf.State({"w": WEIGHT}, {"w": META > 0}), nm(2, 4)),
        ValueError,
        "expected the masks to hold values, got a tensor of the meta device at 'w'",
    ),
    (
        lambda: compress(sf.State({"w": WEIGHT}, {"w": torch.tensor(False)}), nm(2, 4)),
        ValueError,
        "expected a mask of full shape or 0-d True at 'w', got 0-d False",
    ),
    (
        lambda: compress(sf.State({"w": MASK}, {"w": MASK}), nm(2, 4)),
        TypeError,
        "expected floating-point params",
    ),
    (
        lambda: compress(
            sf.State({"w": WEIGHT.to_sparse()}, {"w": torch.tensor(True)}), nm(2, 4)
        ),
        TypeError,
        "expected the state to hold dense tensors, got a torch.sparse_coo one at 'w'",
    ),
    (
        lambda: compress(
            sf.State(
                {"w": WEIGHT, "w.shape": WEIGHT},
                {"w": MASK, "w.shape": torch.tensor(True)},
            ),
            nm(2, 4),
        ),
        ValueError,
        "compress: the name 'w.shape' is taken: rename the leaf of that path",
    ),
    (
        lambda: compress(dense("a.nm"), nm(2, 4)),
        ValueError,
        "compress: the name 'a.nm' is taken",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "text"), REFUSED, ids=[row[2] for row in REFUSED]
)
def test_compress_refuses(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


def int64(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


BAD = [
    (
        {"w.nm": int64(2, 4)},
        ValueError,
        "n, m and an axis of shape (4, 8) at 'w.nm', got [2, 4]",
    ),
    (
        {"w.nm": int64(5, 4, 1)},
        ValueError,
        "n, m and an axis of shape (4, 8) at 'w.nm', got [5, 4, 1]",
    ),
    (
        {"w.nm": int64(-1, 4, 1)},
        ValueError,
        "n, m and an axis of shape (4, 8) at 'w.nm', got [-1, 4, 1]",
    ),
    (
        {"w.nm": int64(0, 0, 1)},
        ValueError,
        "n, m and an axis of shape (4, 8) at 'w.nm', got [0, 0, 1]",
    ),
    (
        {"w.nm": int64(2, 4, 2)},
        ValueError,
        "n, m and an axis of shape (4, 8) at 'w.nm', got [2, 4, 2]",
    ),
    (
        {"w.nm": int64(2, 3, 1)},
        ValueError,
        "n, m and an axis of shape (4, 8) at 'w.nm', got [2, 3, 1]",
    ),
    (
        {"w.nm": int64(2, 4, 0)},
        ValueError,
        "a tensor of shape (2, 8) at 'w.values', got (4, 4)",
    ),
    (
        {"w.nm": torch.ones(3)},
        TypeError,
        "a vector of int64 at 'w.nm', got torch.float32 of shape (3,)",
    ),
    (
        {"w.shape": int64(4, 8)[None]},
        TypeError,
        "a vector of int64 at 'w.shape', got torch.int64 of shape (1, 2)",
    ),
    (
        {"w.shape": int64(8, 8)},
        ValueError,
        "a tensor of shape (8, 4) at 'w.values', got (4, 4)",
    ),
    (
        {"w.values": int64(1)},
        TypeError,
        "floating-point weights at 'w.values', got torch.int64",
    ),
    (
        {"w.values": META},
        ValueError,
        "the dict to hold values, got a tensor of the meta device at 'w.values'",
    ),
    (
        {"w.bitmask": torch.zeros(4)},
        TypeError,
        "packed masks to be uint8 or a 0-d bool at 'w.bitmask'",
    ),
    (
        {"w.bitmask": torch.zeros(3).byte()},
        ValueError,
        "a packed mask of shape (4,) at 'w.bitmask', got (3,)",
    ),
    (
        {"w.bitmask": torch.full((4,), 255).byte()},
        ValueError,
        "a mask of 2:4 along axis 1 at 'w', got a group that keeps 4",
    ),
    ({"w.bitmask": 3}, TypeError, "the dict to hold tensors, got int at 'w.bitmask'"),
    ({3: WEIGHT}, TypeError, "names that are strings, got 3, a int"),
    ({"w": WEIGHT}, ValueError, "'w' or 'w.nm', got both"),
    ({"w.shape": int64(-4, 8)}, ValueError, "sizes >= 0 at 'w.shape', got (-4, 8)"),
    (
        {"v": torch.ones(1).expand(2**40)},
        ValueError,
        f"{2**42} bytes at 'v', got 4, which the tensor repeats",
    ),
]


@pytest.mark.parametrize(("changed", "error", "text"), BAD, ids=[row[2] for row in BAD])
def test_decompress_refuses(changed, error, text):
    with pytest.raises(error, match=re.escape("expected " + text)):
        decompress({**compress(STATE, nm(2, 4)), **changed})


def test_decompress_refuses_a_dict_with_a_hole_and_no_dict():
    tensors = compress(STATE, nm(2, 4))
    with pytest.raises(
        ValueError, match="decompress: expected 'w.bitmask', 'w.shape' beside 'w.nm'"
    ):
        decompress({name: tensors[name] for name in ("w.nm", "w.values")})
    without = {name: tensor for name, tensor in tensors.items() if name != "w.nm"}
    with pytest.raises(
        TypeError,
        match=r"decompress: expected floating-point weights at 'w\.\w+', got "
        r"torch\.\w*int",
    ):
        decompress(without)
    with pytest.raises(
        TypeError, match="decompress: expected a dict of tensors by name, got list"
    ):
        decompress([WEIGHT])


def test_decompress_refuses_damaged_bits():
    state = sf.State(
        {"w": torch.ones(1, 4)}, {"w": torch.tensor([[True, False, False, False]])}
    )
    tensors = compress(state, nm(2, 4))
    assert tree_equal(
        decompress(tensors),
        state._replace(params={"w": torch.tensor([[1.0, 0.0, 0.0, 0.0]])}),
    )
    for slot in (99.0, -0.0, float("nan")):
        with pytest.raises(
            ValueError,
            match="zeros at 'w.values' where a group keeps fewer than 2, got others",
        ):
            decompress({**tensors, "w.values": torch.tensor([[1.0, slot]])})
    with pytest.raises(
        ValueError,
        match="mask at 'w.bitmask' to end in 4 zero bits: its bytes are damaged",
    ):
        decompress({**tensors, "w.bitmask": torch.tensor([0xF1], dtype=torch.uint8)})


def test_a_small_file_asks_for_no_large_memory():
    n = 2**34  # 64 GiB of weights
    tensors = {
        "w.values": torch.zeros(1).expand(n, 2),
        "w.bitmask": torch.full((1,), 0x33, dtype=torch.uint8).expand(n // 2),
        "w.shape": int64(n, 4),
        "w.nm": int64(2, 4, 1),
    }
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    with pytest.raises(
        ValueError,
        match=rf"expected {8 * n} bytes at 'w.values', got 4, which the tensor repeats",
    ):
        decompress(torch.load(file, weights_only=True))
    # Shapes alone ask for as much where nothing is kept; the mask then lacks the bytes.
    tensors |= {
        "w.values": torch.zeros(n, 0),
        "w.nm": int64(0, 4, 1),
        "w.bitmask": torch.zeros(1, dtype=torch.uint8),
    }
    for size in ((n, 4), (2**29, 2**29, 4)):
        huge = {
            **tensors,
            "w.shape": int64(*size),
            "w.values": torch.zeros(*size[:-1], 0),
        }
        huge["w.nm"] = int64(0, 4, len(size) - 1)
        with pytest.raises(
            ValueError,
            match=r"expected a packed mask of shape \(\d+,\) at 'w.bitmask', got "
            r"\(1,\)",
        ):
            decompress(huge)
