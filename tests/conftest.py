"""Every test starts from the same process-wide state of torch, and leaves it as it was; profiles of Hypothesis.

`quick` and `default` are always the same; `--hypothesis-profile=deep` searches. No example has a deadline: the first
one may load a compiler, and other processes may be at work.
"""

import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.deep import pytest_collection_modifyitems as pytest_collection_modifyitems

# A check that tries a quarter of them has two: Hypothesis begins with the simplest.
settings.register_profile("quick", derandomize=True, max_examples=5, deadline=None)
settings.register_profile("default", derandomize=True, max_examples=25, deadline=None)
settings.register_profile("deep", max_examples=500, deadline=None)
settings.load_profile("default")


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
