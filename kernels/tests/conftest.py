"""Every test starts from one seed."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    # torch.compile counts recompilations per function and gives up after a few: each
    # test has its own count.
    torch._dynamo.reset()
