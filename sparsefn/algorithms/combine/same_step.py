"""Scores that multiply weights by gradients, which have to be of one step."""

from __future__ import annotations

from sparsefn.core.checks import parts_of
from sparsefn.core.state import Algorithm, Trigger
from sparsefn.masks.scores import movement, saliency

_PAIRED = (saliency, movement)


def check_paired(call: str, algorithm: Algorithm, skip: Trigger | None) -> None:
    """Raise ValueError for an algorithm with such a score where no `skip` is given.

    >>> check_paired("attach", sf.one_shot(0.5, sf.scores.saliency), None)
    Traceback (most recent call last):
        ...
    ValueError: attach: saliency multiplies weights by gradients of the same step, and
    the optimizer's step would move the weights before: give skip=, the trigger at which
    masks change, such as skip=sf.at([0]), or skip=sf.never() to score the moved weights
    """
    if skip is not None:
        return
    parts = list(parts_of(algorithm))
    for score in _PAIRED:
        if any(part is score for part in parts):
            raise ValueError(
                f"{call}: {score.__name__} multiplies weights by gradients of the "
                "same step, and the optimizer's step would move the weights before: "
                "give skip=, the trigger at which masks change, such as "
                "skip=sf.at([0]), or skip=sf.never() to score the moved weights"
            )
