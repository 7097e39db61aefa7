"""What the callbacks of trainers share."""

from pathlib import Path

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.nn.integrations import resuming


def test_algorithms_and_functions_to_them_are_taken():
    made = []
    for algorithm in (sf.rigl(0.5, steps=7), lambda steps: sf.rigl(0.5, steps=steps)):
        resuming.check_source(algorithm)
        made.append(resuming.made(algorithm, lambda: 7))
    assert repr(made[0]) == repr(made[1])


@pytest.mark.parametrize("algorithm", [0.5, sf.rigl, None])
def test_others_are_refused(algorithm):
    text = (
        r"SparsityCallback: expected an Algorithm such as sf.rigl\(0.9\), or a "
        r"function of the number of steps.*, got"
    )
    with pytest.raises(TypeError, match=text):
        resuming.check_source(algorithm)


def test_masks_of_another_run_or_step_are_refused():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    sparse = sf.attach(
        sf.static(0.5), model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    resuming.check_same_run(model, sparse.state_dict(), -1)
    with pytest.raises(
        ValueError, match="expected masks of step 3, got masks of step -1"
    ):
        resuming.check_same_run(model, sparse.state_dict(), 3)
    with pytest.raises(
        ValueError,
        match="the saved mask of '0.weight' prunes weights that are not zero in the "
        "model",
    ):
        resuming.check_same_run(
            nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), sparse.state_dict(), -1
        )


@pytest.mark.filterwarnings("ignore")
def test_sharded_models_are_refused(tmp_path: Path):
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(
            ValueError,
            match="SparsityCallback: expected plain tensors, got a DTensor at "
            "'weight': call",
        ):
            resuming.check_plain_model(model)
    finally:
        dist.destroy_process_group()


def test_only_what_there_is_can_be_asked_for():
    assert dir(sf.integrations) == ["lightning", "peft", "transformers"]
    with pytest.raises(
        AttributeError,
        match="module 'sparsefn.nn.integrations' has no attribute 'keras'",
    ):
        getattr(sf.integrations, "keras")  # noqa: B009
