"""Tensors in files."""

import gc
import os

import pytest
import torch

from sparsefn.calibration.stored import on_disk

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_read_as_it_was(tmp_path, dtype):
    x = (torch.randn(8, 16, 64) * 3).to(dtype)
    views = (
        x,
        x.mT,
        x.permute(2, 0, 1),
        x[:, ::2],
        x[:1].expand(8, 16, 64),
        x[0, 0].expand(3, 64, 64),
        x[None],
    )
    for view in views:
        again = on_disk(tmp_path)(view).read()
        assert again.dtype == dtype and torch.equal(again, view)
        assert again.stride() == view.stride() or view.numel() != x.numel()


def test_small_and_odd_tensors_stay_in_memory(tmp_path):
    for x in (
        torch.ones(3),
        torch.empty(0, 4),
        torch.tensor(1.0),
        torch.ones(99, 99).to_sparse(),
    ):
        kept = on_disk(tmp_path)(x)
        assert kept.read() is x and not os.listdir(tmp_path)


def test_files_go_with_their_tensors_and_writing_changes_none(tmp_path):
    kept = on_disk(tmp_path)(torch.ones(64, 64))
    first = kept.read()
    first.add_(1)
    assert (
        torch.equal(kept.read(), torch.ones(64, 64)) and len(os.listdir(tmp_path)) == 1
    )
    del kept
    gc.collect()
    # which stays mapped
    assert not os.listdir(tmp_path) and float(first.sum()) == 2 * 64 * 64


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(handle, mode):
        os.close(handle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        on_disk(tmp_path)(torch.ones(64, 64))
    assert not os.listdir(tmp_path)
