"""Nothing reads the default device, and tensors of two devices do not meet."""

import ast
import math
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import sparsefn as sf
from sparsefn.engine.selection import winners
from sparsefn.engine.selection.winners import Entry

PACKAGE = Path(sf.__file__).parent
FACTORIES = {factory.__name__ for factory in _device_constructors()}  # of torch, which ask for the default device
KEY = sf.random.key(0)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
META = X.to("meta")


def unplaced(source: str) -> list[str]:
    """The calls of torch's factories that do not say where."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in FACTORIES
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_factory_names_its_device(file):
    assert not unplaced(file.read_text(encoding="utf-8"))
    assert "from torch import tensor" not in file.read_text(encoding="utf-8")  # which the rule would not see


def test_the_rule_finds_what_it_looks_for():
    said, other = "torch.as_tensor(x, device=x.device)", "np.zeros(2) + torch.where(x, 1, 2)"
    source = f"def f(x):\n    return torch.tensor(1) + {said} + {other}"
    assert unplaced(source) == ["line 2: torch.tensor(1)"]
    assert {"tensor", "as_tensor", "arange", "full", "zeros", "ones", "empty", "eye", "sparse_csr_tensor"} <= FACTORIES


REFUSED = {
    "a count": (lambda: sf.topk_mask(X, torch.tensor(3, device="meta")), "scores and counts"),
    "counts": (
        lambda: sf.topk_mask(X, torch.ones(4, dtype=torch.int64, device="meta"), pattern=sf.patterns.row_balanced()),
        "scores and counts",
    ),
    "a count of short rows": (
        lambda: winners.winners([Entry(X)], [torch.tensor(3, device="meta")]),
        "scores and counts",
    ),
    "a mask": (lambda: sf.drop_lowest(X, META > 0, 2), "scores and flags"),
    "flags of short rows": (lambda: winners.winners([Entry(X, META > 0)], [2]), "scores and flags"),
    "leaves": (lambda: sf.topk_masks([X, META], 2), "all scores of one competition"),
    "an index": (
        lambda: sf.random.uniform(KEY, (2,), index=torch.ones(2, device="meta").long()),
        "a key and its indices",
    ),
    "chances": (lambda: sf.bernoulli_mask(META.sigmoid(), KEY), "a key and its probabilities"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_two_devices_are_refused_by_name(name):
    call, what = REFUSED[name]
    with pytest.raises(ValueError, match=rf"expected {what} on one device, got (cpu and meta|meta and cpu)"):
        call()


def test_counts_on_the_cpu_go_where_the_scores_are():
    for count, pattern in (
        (torch.tensor(3), sf.patterns.unstructured()),
        (torch.ones(4).long(), sf.patterns.row_balanced()),
    ):
        assert sf.topk_mask(META, count, pattern=pattern).is_meta
    won = winners.winners([Entry(X), Entry(META)], [1, torch.tensor(2)])
    assert [mask.device.type for mask in won] == ["cpu", "meta"]


def test_what_is_made_from_numbers_alone_lies_on_the_cpu():
    with torch.device("meta"):
        made = [sf.random.key(1), sf.masks.checkerboard((2, 8), 0.5), sf.budgets.spread(7, 3), winners.totals([])]
        assert sf.budgets.erk()({"a": (64, 32, 3, 3), "b": (10, 64)}, 0.9) == {"a": 1267, "b": 640}
    assert {x.device.type for x in made} == {"cpu"}
    assert sf.masks.checkerboard((2, 8), 0.5, device="meta").is_meta
    assert math.prod(sf.topk_mask(META, 1).shape) == 32
