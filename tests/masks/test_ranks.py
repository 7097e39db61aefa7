from pathlib import Path

import pytest
import torch

import sparsefn as sf


def run(rank: int, folder: str) -> None:
    meeting = (Path(folder) / "meeting").as_uri()
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    masks = sf.static(0.5).init({"a": torch.ones(9, 3), "b": {"c": torch.ones(4, 4), "d": torch.ones(4)}}).masks
    sf.masks.check_ranks(masks)
    other = sf.tree.copied(masks)
    other["b"]["c"][0, 0] ^= rank == 1
    with pytest.raises(
        RuntimeError, match="expected the same masks on every rank, got others at 'b.c': do all ranks see"
    ):
        sf.masks.check_ranks(other)
    turned = {**masks, "a": masks["a"] if rank else masks["a"].reshape(3, 9)}
    with pytest.raises(RuntimeError, match="got others at 'a':"):
        sf.masks.check_ranks(turned)
    fewer = masks if rank else {"a": masks["a"]}
    with pytest.raises(RuntimeError, match="expected the same leaves on every rank, got "):
        sf.masks.check_ranks(fewer)
    sf.masks.check_ranks(masks)
    torch.distributed.destroy_process_group()


def test_ranks_with_other_masks_are_found(tmp_path):
    torch.multiprocessing.spawn(run, (str(tmp_path),), nprocs=2)


def test_one_process_has_nothing_to_compare():
    sf.masks.check_ranks({"w": torch.tensor([True])})
