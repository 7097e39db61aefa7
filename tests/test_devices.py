"""Nothing reads the default device, and tensors of two devices do not meet."""

import ast
import math
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import sparsefn as sf
from sparsefn._engine.selection import dispatch, spread
from sparsefn._engine.selection.dispatch import Entry
from sparsefn._engine.transforms import host_number, read_number
from sparsefn.core.tree import choose
from sparsefn.testing import Launches

PACKAGE, ROOT = Path(sf.__file__).parent, Path(__file__).parents[1]
FILES = [
    *sorted(PACKAGE.rglob("*.py")),
    *sorted((ROOT / "kernels" / "sparsefn_kernels").rglob("*.py")),
]
# of torch, which ask for the default device
FACTORIES = {factory.__name__ for factory in _device_constructors()}
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


def test_every_factory_names_its_device():
    sources = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in FILES}
    assert {
        name: unplaced(source) for name, source in sources.items() if unplaced(source)
    } == {}
    assert [
        name for name, source in sources.items() if "from torch import tensor" in source
    ] == []  # it would not see


def test_the_rule_finds_what_it_looks_for():
    said, other = (
        "torch.as_tensor(x, device=x.device)",
        "np.zeros(2) + torch.where(x, 1, 2)",
    )
    source = f"def f(x):\n    return torch.tensor(1) + {said} + {other}"
    assert unplaced(source) == ["line 2: torch.tensor(1)"]
    assert {
        "tensor",
        "as_tensor",
        "arange",
        "full",
        "zeros",
        "ones",
        "empty",
        "eye",
        "sparse_csr_tensor",
    } <= FACTORIES


def copied(source: str) -> list[str]:
    """The calls that copy Python numbers to a device, which waits until it has done all
    before.
    """
    found = []
    for call in (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
    ):
        name = ast.unparse(call.func)
        device = next(
            (ast.unparse(k.value) for k in call.keywords if k.arg == "device"), "'cpu'"
        )
        if name in ("torch.tensor", "torch.as_tensor") and device not in (
            "'cpu'",
            "torch.device('cpu')",
        ):
            found.append(name)
    return found


# Where numbers are copied: for the CPU alone, from files, in solvers, which wait in
# any case, and where a state is made or read.
COPIES = {
    "algorithms/reparam/mask_choices.py",
    "_engine/leaves/buffers.py",
    "_engine/selection/tiling.py",
    "masks/patterns/places.py",
    "masks/patterns/tied_sets.py",
}
COPIES |= {
    "nn/checkpoint/states.py",
    "nn/checkpoint/n_of_m.py",
    "posttraining/solve/greedy.py",
}


def test_numbers_are_not_copied_to_a_device():
    found = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if copied(file.read_text("utf-8"))
    }
    assert found == COPIES


def test_the_rule_finds_copies():
    source = (
        "torch.tensor(1, device='cpu'), torch.tensor([1], device=x.device), "
        "torch.as_tensor(x, device=d)"
    )
    assert copied(source) == ["torch.tensor", "torch.as_tensor"]


REFUSED = {
    "a count": (
        lambda: sf.masks.topk_mask(X, torch.tensor(3, device="meta")),
        "scores and counts",
    ),
    "counts": (
        lambda: sf.masks.topk_mask(
            X,
            torch.ones(4, dtype=torch.int64, device="meta"),
            pattern=sf.patterns.row_balanced(),
        ),
        "scores and counts",
    ),
    "a count of short rows": (
        lambda: dispatch.winners([Entry(X)], [torch.tensor(3, device="meta")]),
        "scores and counts",
    ),
    "a mask": (lambda: sf.masks.drop_lowest(X, META > 0, 2), "scores and flags"),
    "flags of short rows": (
        lambda: dispatch.winners([Entry(X, META > 0)], [2]),
        "scores and flags",
    ),
    "leaves": (
        lambda: sf.masks.topk_masks([X, META], 2),
        "all scores of one competition",
    ),
    "an index": (
        lambda: sf.random.uniform(KEY, (2,), index=torch.ones(2, device="meta").long()),
        "a key and its indices",
    ),
    "chances": (
        lambda: sf.masks.bernoulli_mask(META.sigmoid(), KEY),
        "a key and its probabilities",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_two_devices_are_refused_by_name(name):
    call, what = REFUSED[name]
    with pytest.raises(
        ValueError,
        match=rf"expected {what} on one device, got (cpu and meta|meta and cpu)",
    ):
        call()


def test_counts_on_the_cpu_go_where_the_scores_are():
    for count, pattern in (
        (torch.tensor(3), sf.patterns.unstructured()),
        (torch.ones(4).long(), sf.patterns.row_balanced()),
    ):
        assert sf.masks.topk_mask(META, count, pattern=pattern).is_meta
    won = dispatch.winners([Entry(X), Entry(META)], [1, torch.tensor(2)])
    assert [mask.device.type for mask in won] == ["cpu", "meta"]


def test_what_is_made_from_numbers_alone_lies_on_the_cpu():
    with torch.device("meta"):
        made = [
            sf.random.key(1),
            sf.masks.checkerboard((2, 8), 0.5),
            spread(7, 3),
            dispatch.totals([]),
        ]
        assert sf.budgets.erk()({"a": (64, 32, 3, 3), "b": (10, 64)}, 0.9) == {
            "a": 1267,
            "b": 640,
        }
    assert {x.device.type for x in made} == {"cpu"}
    assert sf.masks.checkerboard((2, 8), 0.5, device="meta").is_meta
    assert math.prod(sf.masks.topk_mask(META, 1).shape) == 32


def test_an_int_count_is_clamped_where_looking_would_wait():
    for call in (sf.masks.drop_lowest, sf.masks.grow_highest):
        found = Launches()
        with found:
            assert call(META, META > 0, 1000).is_meta
        assert not found.waits
        with pytest.raises(ValueError, match="expected 0 <= n_(drop|grow) <= "):
            call(X, X > 0, 1000)


def test_given_masks_go_where_the_params_are():
    masks = {"w": X > 0, "b": torch.tensor(True)}
    params = {"w": META, "b": torch.empty(3, device="meta")}
    for algorithm in (sf.from_masks(masks), sf.static(None, init=masks)):
        state = algorithm.init(params)
        assert {mask.device.type for mask in state.masks.values()} == {"meta"}


def test_a_step_on_a_device_is_not_read_and_one_on_the_cpu_is():
    step = torch.tensor(3)
    assert (
        host_number(step) == read_number(step) == 3
        and host_number(step.to("meta")) is None
    )
    assert choose(torch.tensor(False), lambda x: 1 / 0, META) is META
    asked = []
    old = {"w": META, "key": KEY}
    chosen = choose(
        META.sum() > 0,
        lambda x: asked.append(x) or {"w": META + 1, "key": KEY + 1},
        old,
    )
    assert asked and chosen["w"].is_meta and chosen["key"].is_meta
