"""Random words in memory, against the block function one block at a time."""

import numpy as np
import pytest
import torch

from sparsefn._engine.draws import words
from sparsefn._engine.leaves import buffers

# Random123's known answers: key, counter -> words.
KNOWN = {
    ((0, 0), (0, 0)): (0x6B200159, 0x99BA4EFE),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2): (0x1CB996FC, 0xBB002BE7),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)): (0xC4923A9C, 0x483DF7A0),
}


def drawn(keys, index, n, second=True):
    out = np.full((2, len(keys), n), 7, np.uint32)

    def use(place, x0, x1):
        out[(0, *place)] = x0
        out[(1, *place)] = x1

    words.words(np.array(keys, np.int64).reshape(-1, 2), index, n, use, second)
    return out if second else out[0]


def one_by_one(keys, index, n):
    wide = np.broadcast_to(
        np.arange(n) if index is None else index, (len(keys), n)
    ).tolist()
    return np.array(
        [
            [words.pair(*key, i >> 32 & 0xFFFFFFFF, i & 0xFFFFFFFF)[word] for i in row]
            for word in (0, 1)
            for key, row in zip(keys, wide, strict=True)
        ]
    ).reshape(2, len(keys), n)


@pytest.mark.parametrize("case", KNOWN)
def test_known_answers(case):
    (key, counter), expected = case, KNOWN[case]
    assert words.pair(*key, *counter) == expected
    index = np.full(
        (1, 100), (counter[0] << 32 | counter[1]) - (counter[0] >> 31 << 64), np.int64
    )
    assert (drawn([key], index, 100) == np.array(expected)[:, None, None]).all()


KEYS = [(0, 0), (0xFFFFFFFF, 1), (0x12345678, 0x9ABCDEF0)]


@pytest.mark.parametrize("n", [1, 5, 64, 65, 300])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cut", [64, 1 << 17])
def test_words_are_those_of_each_block(n, rows, cut, monkeypatch):
    monkeypatch.setattr(words, "BLOCK", cut)
    keys = KEYS[:rows]
    far = np.arange(n) * 0x1_0000_0001 - 3
    for index in (None, far[None], np.stack([far + i for i in range(rows)])):
        want = one_by_one(keys, index, n)
        np.testing.assert_array_equal(drawn(keys, index, n), want)
        np.testing.assert_array_equal(drawn(keys, index, n, second=False), want[0])


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(words, "BLOCK", 64)
    monkeypatch.setattr(buffers, "_MANY", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        np.testing.assert_array_equal(
            drawn(KEYS, None, 500), one_by_one(KEYS, None, 500)
        )
    finally:
        torch.set_num_threads(threads)


def test_batches_of_keys_and_indices_broadcast():
    keys, index = np.arange(12).reshape(2, 3, 2), np.arange(12).reshape(3, 4)
    flat, wide, batch = words.rows(keys, index)
    assert batch == (2, 3) and flat.tolist() == keys.reshape(6, 2).tolist()
    assert wide.tolist() == index.tolist() * 2
    assert words.rows(keys[0, 0], None)[2] == ()
