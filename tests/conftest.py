"""Every test starts from the same process-wide state of torch, and leaves it as it was;
profiles of Hypothesis.

`quick` and `default` are always the same; `--hypothesis-profile=deep` searches. No
example has a deadline: the first one may load a compiler, and other processes may be at
work.
"""

import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import settings

# A check that tries a quarter of them has two: Hypothesis begins with the simplest.
settings.register_profile("quick", derandomize=True, max_examples=5, deadline=None)
settings.register_profile("default", derandomize=True, max_examples=12, deadline=None)
settings.register_profile("deep", max_examples=500, deadline=None)
settings.load_profile("default")


def stays(item: pytest.Item) -> bool:
    """Whether `make test` runs an item of a deep test:
    `@pytest.mark.deep(but=["rigl-*"])` names such parameters.
    """
    name = item.name.partition("[")[2].removesuffix("]")
    return any(
        fnmatchcase(name, row)
        for mark in item.iter_markers("deep")
        for row in mark.kwargs.get("but", ())
    )


def starts_processes(item: pytest.Item) -> bool:
    code = getattr(getattr(item, "function", None), "__code__", None)
    return code is not None and "on_ranks" in code.co_names


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if stays(item):
            item.own_markers = [
                mark for mark in item.own_markers if mark.name != "deep"
            ]
        elif starts_processes(item) and not any(item.iter_markers("quick")):
            item.add_marker("deep")


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    # torch.manual_seed asks every kind of device
    torch.default_generator.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    # torch.compile counts recompilations per function and gives up after a few: each
    # test has its own count.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
