"""Every test starts from the same process-wide state of torch, and leaves it as it was."""

import sys
from collections.abc import Iterator

import pytest
import torch

from tests.deep import pytest_collection_modifyitems as pytest_collection_modifyitems


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    # torch.compile counts recompilations per function and gives up after a few: each test has its own count.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
