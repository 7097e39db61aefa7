"""Edges to the trainers and adapters of other libraries.

Each is loaded when it is first asked for.
"""

from importlib import import_module
from types import ModuleType

__all__ = ["lightning", "peft", "transformers"]
__dir__ = __all__.copy


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(
            f"module 'sparsefn.nn.integrations' has no attribute {name!r}"
        )
    return import_module(f"sparsefn.nn.integrations.{name}")
