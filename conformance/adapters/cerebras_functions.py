"""cerebras.pytorch.sparse: the function that makes a mask, without the package around
it.
"""

import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class Absent(ModuleType):
    """A module of the package that is not loaded; any name of it is a function that is
    not called here.
    """

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: False


def functions() -> ModuleType:
    """cerebras/pytorch/sparse/utils.py alone."""
    file = importlib.metadata.distribution("cerebras_pytorch").locate_file(
        "cerebras/pytorch/sparse/utils.py"
    )
    spec = importlib.util.spec_from_file_location("cerebras_sparse_utils", str(file))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    parts = "pytorch pytorch.utils pytorch.utils._decorators"
    parts += " appliance appliance.utils appliance.utils.classes appliance.utils.typing"
    names = ["cerebras", *(f"cerebras.{name}" for name in parts.split())]
    absent = {name: Absent(name) for name in names}
    for name in names[1:]:
        above, _, last = name.rpartition(".")
        setattr(absent[above], last, absent[name])
    with mock.patch.dict(sys.modules, absent):
        spec.loader.exec_module(module)
    return module


make = functions().make_mask_topk_sparsity


def mask(weight: Tensor, sparsity: float) -> Tensor:
    return make(weight.abs(), torch.tensor(sparsity))
