"""Private names of torch: docs/torch-releases.md lists each one that the package uses,
and each is there.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "torch-releases.md").read_text(encoding="utf-8")
FILES = [
    *sorted((ROOT / "sparsefn").rglob("*.py")),
    *sorted((ROOT / "kernels" / "sparsefn_kernels").rglob("*.py")),
]
LISTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
OF_TORCH = [name for name in LISTED if name.startswith("torch")]
# Methods of named tuples have an underscore so that no field hides them; they are
# public.
OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
BY_NAME = ("getattr", "hasattr", "setattr")  # builtins that take the name as text


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> set[str]:
    """Names that a module makes itself: functions, classes, variables, arguments and
    its own attributes.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(
            node.ctx, ast.Store
        ):  # vars(x)["name"] = ...
            found.add(str(getattr(node.slice, "value", "")))
    return found


def used(tree: ast.AST) -> set[str]:
    """Private names that a module takes from somewhere: by import, as an attribute, or
    by text.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(
            "sparsefn"
        ):
            found.update((node.module or "").split("."))
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            found.update(
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )
    return {name for name in found if is_private(name)}


def foreign(sources: list[str]) -> set[str]:
    """Private names that the sources use and do not make."""
    trees = [ast.parse(source) for source in sources]
    own = set().union(*map(defined, trees))
    return set().union(*map(used, trees)) - own - OF_NAMED_TUPLES


@pytest.mark.deep
def test_the_page_lists_each_name_and_no_other() -> None:
    found = foreign([file.read_text(encoding="utf-8") for file in FILES])
    listed = {
        part for name in LISTED for part in re.split(r"\W+", name) if is_private(part)
    }
    assert sorted(found) == sorted(listed)


def test_the_rule_sees_every_way_to_name_them() -> None:
    for said in (
        "from torch._C import x",
        "from torch.utils import _x",
        "import torch._dynamo",
        "torch._x()",
        "tensor._version",
        "getattr(layer, '_x')",
    ):
        assert foreign([said]), said
    assert not foreign(
        [
            "def _own(): ...\nclass A:\n    def f(self): self._x = self._x\n"
            "row._replace(a=_own())"
        ]
    )


@pytest.mark.parametrize("name", OF_TORCH)
def test_torch_has_the_name(name: str) -> None:
    module, _, text = name.partition(": ")
    if text:  # an attribute that torch looks for on what it is handed
        assert text in inspect.getsource(importlib.import_module(module))
    elif "(" in name:
        eval(name, {"torch": torch})
    else:
        pkgutil.resolve_name(name)
