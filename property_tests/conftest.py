"""Hypothesis profiles: `default` is small and always the same; `--hypothesis-profile=deep` searches."""

from hypothesis import settings

from tests.conftest import isolated as isolated

settings.register_profile("default", derandomize=True, max_examples=25, deadline=None)
settings.register_profile("deep", max_examples=500, deadline=None)
settings.load_profile("default")
