"""Hypothesis profiles: `quick` and `default` are always the same; `--hypothesis-profile=deep` searches."""

from hypothesis import settings

from tests.conftest import isolated as isolated
from tests.deep import pytest_collection_modifyitems as pytest_collection_modifyitems

# A check that tries a quarter of them has two: Hypothesis begins with the simplest.
settings.register_profile("quick", derandomize=True, max_examples=5, deadline=None)
settings.register_profile("default", derandomize=True, max_examples=25, deadline=None)
settings.register_profile("deep", max_examples=500, deadline=None)
settings.load_profile("default")
