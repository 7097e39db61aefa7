"""Masks at one bit an element."""

import random

import pytest
import torch

from sparsefn import masks as M

T = torch.tensor(True)

X = torch.tensor([[True, True, False], [False, True, False]])


def bits(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


@pytest.mark.parametrize(
    "shape", [(1,), (7,), (8,), (9,), (3, 5), (2, 3, 4), (0, 3), (1, 1, 1)]
)
def test_pack_round_trips(shape):
    masks = {"w": bits(*shape), "b": T}
    packed = M.pack(masks)
    assert packed["w"].dtype == torch.uint8
    assert packed["w"].shape == (-(-masks["w"].numel() // 8),)
    assert packed["b"].dtype == torch.bool
    assert packed["b"].shape == ()
    for like in (masks, {"w": torch.zeros(shape), "b": torch.zeros(4)}):
        back = M.unpack(packed, like)
        assert torch.equal(back["w"], masks["w"])
        assert back["b"].shape == ()


def test_pack_bit_order_and_zero_padding():
    flat = [random.Random(0).random() < 0.5 for _ in range(19)]
    packed = M.pack([torch.tensor(flat)])[0].tolist()
    assert packed == [
        sum(1 << j for j in range(8) if 8 * i + j < 19 and flat[8 * i + j])
        for i in range(3)
    ]
    assert M.pack([torch.ones(9, dtype=torch.bool)])[0].tolist() == [255, 1]


def test_pack_a_view_that_is_not_contiguous():
    mask = bits(5, 3).T
    assert torch.equal(M.unpack(M.pack([mask]), [mask])[0], mask)


@pytest.mark.parametrize(
    "shape", [(1,), (7,), (8,), (9,), (0,), (0, 3), (31, 33), (1003,)]
)
def test_packing_in_memory_and_by_tensor_operations_agree(shape):
    for mask in (
        bits(*shape),
        bits(*shape, 2)[..., 0],
        torch.ones(shape, dtype=torch.bool),
    ):
        packed = M.pack([mask])[0]
        # vmap hides the memory
        assert torch.equal(torch.vmap(M.pack)([mask[None]])[0][0], packed)
        again = torch.vmap(lambda p: M.unpack(p, [torch.zeros(shape)]))([packed[None]])[
            0
        ][0]
        assert torch.equal(again, M.unpack([packed], [mask])[0]) and torch.equal(
            again, mask
        )
        assert again.dtype == torch.bool and again.shape == mask.shape


def test_unpacked_masks_are_memory_of_their_own():
    mask = bits(16)
    packed = M.pack([mask])
    back, again = M.unpack(packed, [mask])[0], M.unpack(packed, [mask])[0]
    back.logical_not_()
    assert torch.equal(again, mask) and torch.equal(M.pack([mask])[0], packed[0])


@pytest.mark.deep
# from inductor's own imports
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_pack_under_vmap_and_compile():
    stacked = [bits(4, 3, 5), torch.ones(4, dtype=torch.bool)]
    packed = torch.vmap(M.pack)(stacked)
    assert torch.equal(
        packed[0], torch.stack([M.pack([mask])[0] for mask in stacked[0]])
    )
    like = [torch.zeros(3, 5), torch.zeros(2)]
    back = torch.vmap(lambda p: M.unpack(p, like))(packed)
    assert torch.equal(back[0], stacked[0])
    one = [stacked[0][0], T]
    trip = torch.compile(
        lambda m: M.unpack(M.pack(m), like), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(trip(one)[0], one[0])
    assert torch.equal(torch.compile(M.pack, fullgraph=True)(one)[0], M.pack(one)[0])


def test_unpack_refuses():
    with pytest.raises(ValueError, match=r"but there is an unknown leaf at 'b'"):
        M.unpack({"w": torch.zeros(1, dtype=torch.uint8)}, {"w": X, "b": T})
    with pytest.raises(
        ValueError, match=r"expected a packed mask of shape \(1,\) at 'w', got \(2,\)"
    ):
        M.unpack({"w": torch.zeros(2, dtype=torch.uint8)}, {"w": X})
    with pytest.raises(
        ValueError,
        match=r"expected a packed mask that is a 0-d bool at 'w', got \(1,\)",
    ):
        M.unpack({"w": torch.zeros(1, dtype=torch.uint8)}, {"w": T})
    with pytest.raises(
        TypeError,
        match=r"expected packed masks to be uint8 or a 0-d bool at 'w', got "
        r"torch.int64",
    ):
        M.unpack({"w": torch.zeros(1, dtype=torch.int64)}, {"w": X})
    with pytest.raises(
        TypeError, match=r"expected a bool mask at 'w', got torch.float32"
    ):
        M.pack({"w": torch.zeros(3)})
    with pytest.raises(TypeError, match=r"unpack: expected tensors, got bytes at 'w'"):
        M.unpack({"w": b"1"}, {"w": X})
    with pytest.raises(TypeError, match=r"unpack: expected tensors, got int at 'w'"):
        M.unpack({"w": torch.zeros(1, dtype=torch.uint8)}, {"w": 6})


@pytest.mark.parametrize("n", [1, 3, 7, 9, 15, 17])
def test_unpack_refuses_unused_bits_that_are_set(n):
    mask = bits(n)
    packed = M.pack([mask])[0]
    for bit in range(n % 8, 8):
        damaged = packed.clone()
        damaged[-1] |= 1 << bit
        with pytest.raises(
            ValueError, match=rf"mask at 'w' to end in {8 - n % 8} zero bits: its bytes"
        ):
            M.unpack({"w": damaged}, {"w": mask})
    assert torch.equal(M.unpack([packed], [mask])[0], mask)
