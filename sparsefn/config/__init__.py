"""Algorithms from plain data, as JSON or YAML gives it."""

from sparsefn.config.configs import from_config, init_method, level, trigger

__all__ = ["from_config", "init_method", "level", "trigger"]
__dir__ = __all__.copy
