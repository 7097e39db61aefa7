import pytest
import torch

from sparsefn import random, threefry

KEY = random.key(3)


@pytest.mark.parametrize(
    "law, dtype",
    [("pairs", torch.int64), ("words", torch.int64), ("uniform", torch.float32), ("normal", torch.bfloat16)],
)
@pytest.mark.parametrize("index", [None, torch.arange(5, 9)])
def test_the_operator_keeps_to_the_rules_of_custom_operators(law, dtype, index):
    torch.library.opcheck(threefry.draw, (KEY, index, 4, law, dtype))
    torch.library.opcheck(threefry.draw, (random.split(KEY, 3), index, 4, law, dtype))


def test_pairs_hold_both_words_the_first_on_top():
    pair = int(threefry.draw(KEY, None, 1, "pairs", torch.int64)) & 0xFFFFFFFFFFFFFFFF
    assert [pair >> 32, pair & 0xFFFFFFFF] == random.threefry2x32(KEY, torch.tensor([0, 0])).tolist()


def test_keys_and_indices_broadcast():
    keys, index = random.split(KEY, 6).reshape(2, 3, 2), torch.arange(12).reshape(3, 4)
    got = threefry.draw(keys, index, 4, "words", torch.int64)
    assert got.shape == (2, 3, 4)
    assert torch.equal(got[1, 2], threefry.draw(keys[1, 2], index[2], 4, "words", torch.int64))


def test_only_the_low_32_bits_of_a_key_word_count():
    high = KEY + (5 << 32)
    assert torch.equal(threefry.draw(high, None, 3, "words", torch.int64), random.bits(KEY, (3,)))


def test_laws_of_keys_and_of_words_are_apart():
    first = {
        law: int(threefry.draw(KEY, None, 1, law, torch.int64)) for law in ("pairs", "split", "fold int", "fold str")
    }
    assert len(set(first.values())) == 4
