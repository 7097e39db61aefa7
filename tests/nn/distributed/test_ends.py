"""Scripts that leave their process groups, and end as other scripts do."""

import os
import subprocess
import sys

import pytest

import sparsefn as sf

# The last thing before the end is a message over the group of a mesh, which the mesh
# keeps alive.
SCRIPT = """
import sys, time
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import sparsefn as sf

rank, folder = int(sys.argv[1]), sys.argv[2]
store = distributed.FileStore(f"{folder}/store", 2)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
params = {"w": distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])}
state = sf.gmp(0.5, distribution=sf.budgets.global_()).init(params)
if rank:
    time.sleep(0.5)
    open(f"{folder}/done", "w").close()
sf.distributed.leave()
open(f"{folder}/done")  # the other process was waited for
print(not distributed.is_initialized(), state.masks["w"].to_local().shape)
"""


def test_one_process_has_nothing_to_leave():
    sf.distributed.leave()


@pytest.mark.deep
def test_two_processes_end(tmp_path):
    command = [sys.executable, "-c", SCRIPT]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, errors = rank.communicate(timeout=200)
        assert (rank.returncode, said) == (0, "True torch.Size([4, 6])\n"), errors
