"""Modules that have moved are found where they were."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Moved(MetaPathFinder, Loader):
    """Finds a module by the path that it had, and hands on the one and only module."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = paths

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.paths else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.paths[module.__name__])


def find_moved(paths: Mapping[str, str]) -> None:
    """Let modules be imported by their old paths, too, when someone asks for one.

    >>> import sparsefn.schedules
    >>> sparsefn.schedules is sf.schedules
    True

    `paths` maps an old dotted path to the one of today.
    """
    sys.meta_path.insert(0, _Moved(paths))  # before finders that may know files of an older release
