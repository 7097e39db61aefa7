"""Triggers and schedules: pure functions of the step."""

from sparsefn.timing import schedules, triggers

__all__ = ["schedules", "triggers"]
__dir__ = __all__.copy
