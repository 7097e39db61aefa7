"""Peers that are installed separately, None where one is missing. Their own code runs;
stubs replace their imports.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock


def _missing(name: str, error: Exception) -> None:
    print(
        f"\n{name} is left out ({error}): pip install --no-deps -r "
        "benchmarks/requirements-peers.txt"
    )


def rigl_torch_scheduler() -> Any:
    """rigl-torch's class.

    It imports torchvision for the names of two classes, and torchvision must be built
    for the torch at hand.
    """
    blocks = SimpleNamespace(
        Bottleneck=type("Bottleneck", (), {}), BasicBlock=type("BasicBlock", (), {})
    )
    names = SimpleNamespace(models=SimpleNamespace(resnet=blocks))
    with mock.patch.dict(sys.modules, {"torchvision": names}):
        try:
            return importlib.import_module("rigl_torch.RigL").RigLScheduler
        except ImportError as error:
            return _missing("rigl-torch", error)


def cerebras_sparse() -> ModuleType | None:
    """The functions that make the masks of cerebras.pytorch.sparse.

    The package itself wants torch 2.4 and a client of its computers; this file of it
    wants one answer, that it runs without one.
    """

    def unused(*arguments: Any) -> Any:
        raise NotImplementedError

    pytorch = SimpleNamespace(use_cs=lambda: False)
    names = {
        "cerebras": SimpleNamespace(pytorch=pytorch),
        "cerebras.pytorch": pytorch,
        "cerebras.pytorch.utils": SimpleNamespace(),
        "cerebras.pytorch.utils._decorators": SimpleNamespace(
            lazy_tensor_lru_cache=unused
        ),
        "cerebras.appliance": SimpleNamespace(),
        "cerebras.appliance.utils": SimpleNamespace(),
        "cerebras.appliance.utils.classes": SimpleNamespace(
            retrieve_all_subclasses=unused
        ),
        "cerebras.appliance.utils.typing": SimpleNamespace(
            signature_matches_type_hint=unused
        ),
    }
    try:
        found = importlib.metadata.distribution("cerebras_pytorch")
    except importlib.metadata.PackageNotFoundError as error:
        return _missing("cerebras_pytorch", error)
    file = str(found.locate_file("cerebras/pytorch/sparse/utils.py"))
    spec = importlib.util.spec_from_file_location("cerebras_sparse_utils", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, names):
        spec.loader.exec_module(module)
    return module


def torch_pruning() -> Any:
    """Torch-Pruning's package, which needs torch and numpy alone."""
    try:
        return importlib.import_module("torch_pruning")
    except ImportError as error:
        return _missing("torch-pruning", error)
