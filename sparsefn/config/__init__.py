"""Algorithms from plain data, as JSON or YAML gives it."""

from sparsefn.config.configs import from_config, init_method, level, trigger
from sparsefn.config.shorthand import from_shorthand, to_shorthand

__all__ = [
    "from_config",
    "from_shorthand",
    "init_method",
    "level",
    "to_shorthand",
    "trigger",
]
__dir__ = __all__.copy
