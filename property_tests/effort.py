"""The chosen profile of Hypothesis: `default` is small and always the same, `deep`
searches.
"""

from hypothesis import settings


def _current() -> settings:
    assert settings.default is not None
    return settings.default


def tries() -> int:
    """How many examples a law gets."""
    return _current().max_examples


def tries_of_a_row() -> int:
    """How many a law gets on each of a hundred rows: half, but in a quick run."""
    return tries() if tries() < 10 else tries() // 2


def seed() -> int | None:
    """Where they begin; None for others at every run."""
    return 0 if _current().derandomize else None
