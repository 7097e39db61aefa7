"""The conformance matrix: its page, its adapters, and that each law rejects a subject
that breaks it.
"""

import ast
import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
HERE = ROOT / "conformance"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Modules of conformance/, as its runner finds them."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("laws", "page", "in_torch", "adapters"):
            del sys.modules[name]


def results() -> dict[str, Any]:
    return json.loads((HERE / "results.json").read_text(encoding="utf-8"))


def systems() -> dict[str, Any]:
    return tomllib.loads((HERE / "systems.toml").read_text(encoding="utf-8"))


def test_adapters_are_thin() -> None:
    files = [
        file for file in (HERE / "adapters").glob("*.py") if file.name != "__init__.py"
    ]
    assert {file.stem for file in files} == set(systems()) == set(results()["systems"])
    assert [
        file.name for file in files if len(file.read_text().splitlines()) >= 60
    ] == []


def test_the_page_is_made_of_the_results(found: Callable[[str], Any]) -> None:
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert page == found("page").text(results(), systems())


def test_no_folder_of_another_library_is_read_otherwise_than_it_reads_it() -> None:
    rows = results()["legacy"]["rows"]
    assert {format for format, *_ in rows} == {"sparse-bitmask", "sparse-24-bitmask"}
    assert {equal for *_, equal in rows} == {"yes"}


def test_every_no_has_a_short_reproduction_and_nothing_else_has_one() -> None:
    rows = results()["systems"].items()
    wanted = {
        f"{name}_{law}"
        for name, row in rows
        for law, cell in row["cells"].items()
        if cell["status"] == "no"
    }
    files = [*(HERE / "reproductions").glob("*.py")]
    assert {file.stem for file in files} == wanted

    def length(file: Path) -> int:
        """The number of statements, without imports."""
        found = ast.walk(ast.parse(file.read_text("utf-8")))
        return sum(
            isinstance(node, ast.stmt)
            and not isinstance(node, ast.Import | ast.ImportFrom)
            for node in found
        )

    assert [file.name for file in files if length(file) > 5] == []


@pytest.mark.deep
def test_our_own_row_keeps_every_law(found: Callable[[str], Any]) -> None:
    subject = found("in_torch").subject(found("adapters.sparsefn_attach"))
    cells = found("laws").check(subject)
    assert {law: cell for law, cell in cells.items() if cell[0] != "yes"} == {}
    ours = results()["systems"]["sparsefn_attach"]["cells"]
    assert {law: cell["status"] for law, cell in ours.items()} == dict.fromkeys(
        cells, "yes"
    )


def top(x: np.ndarray, count: int) -> np.ndarray:
    """The largest magnitudes: NaN last, ties by the lowest index."""
    order = np.argsort(-np.nan_to_num(np.abs(x), nan=-1.0).reshape(-1), kind="stable")
    mask = np.zeros(x.size, bool)
    mask[order[:count]] = True
    return mask.reshape(x.shape)


def right() -> SimpleNamespace:
    """A subject in numpy that keeps every law."""

    def masks(weights: list[np.ndarray], sparsity: float) -> list[np.ndarray]:
        return [top(x, x.size - round(x.size * sparsity)) for x in weights]

    def twice(weights: list[np.ndarray], low: float, high: float) -> Any:
        first = masks(weights, low)
        left = [
            np.where(mask, np.abs(x) + 1, 0)
            for mask, x in zip(first, weights, strict=True)
        ]
        return first, masks(left, high)

    def train(
        weights: Any,
        sparsity: float,
        optimizer: str,
        steps: int,
        save_at: int | None = None,
    ) -> Any:
        kept = masks(weights, sparsity)
        return [(kept, [x * mask for x, mask in zip(weights, kept, strict=True)])] * (
            steps + 1
        )

    def pair(weights: Any, sparsity: float) -> Any:
        return masks(weights, sparsity), masks(weights, sparsity)

    return SimpleNamespace(
        masks=masks,
        twice=twice,
        inputs=lambda weights, sparsity: weights,
        train=train,
        vmapped=pair,
        compiled=pair,
        copied=pair,
        keys=lambda weights, sparsity: (["w"], ["w"]),
    )


def mutant(law: str) -> SimpleNamespace:
    """The same with one planted bug."""
    made = right()
    masks, train = made.masks, made.train

    def drawn(weights: Any, sparsity: float) -> Any:
        np.random.random()
        return masks(weights, sparsity)

    def forgets(*given: Any, save_at: int | None = None) -> Any:
        return [(m, [x + (save_at is not None) for x in w]) for m, w in train(*given)]

    def leaks(*given: Any, **options: Any) -> Any:
        return [(m, [x + 1e-9 for x in w]) for m, w in train(*given)]

    def other(weights: Any, sparsity: float) -> Any:
        return masks(weights, sparsity), [~mask for mask in masks(weights, sparsity)]

    def threshold(weights: Any, sparsity: float) -> Any:
        return [
            np.abs(x) >= np.sort(np.abs(x), axis=None)[round(x.size * sparsity)]
            for x in weights
        ]

    bugs = {
        "count": {"masks": lambda w, s: [top(x, x.size - int(x.size * s)) for x in w]},
        "ties": {"masks": threshold},
        "nan": {"masks": lambda w, s: masks([np.nan_to_num(x, nan=9.0) for x in w], s)},
        "monotone": {
            "twice": lambda w, low, high: (
                masks(w, low),
                masks([1 / (x + 9) for x in w], high),
            )
        },
        "inputs": {"inputs": lambda w, s: [x * 0 for x in w]},
        "rng": {"masks": drawn},
        "resume": {"train": forgets},
        "zeros": {"train": leaks},
        "vmap": {"vmapped": other},
        "compile": {"compiled": other},
        "deepcopy": {"copied": other},
        "keys": {"keys": lambda w, s: (["w"], ["w_orig", "w_mask"])},
    }
    return SimpleNamespace(**(vars(made) | bugs[law]))


LAWS = [
    "count",
    "ties",
    "nan",
    "monotone",
    "inputs",
    "rng",
    "resume",
    "zeros",
    "vmap",
    "compile",
    "deepcopy",
    "keys",
]


def test_a_right_subject_keeps_every_law(found: Callable[[str], Any]) -> None:
    cells = found("laws").check(right())
    assert {law: status for law, (status, _) in cells.items()} == dict.fromkeys(
        LAWS, "yes"
    )


@pytest.mark.parametrize("law", LAWS)
def test_each_law_rejects_its_bug(law: str, found: Callable[[str], Any]) -> None:
    status, remark = found("laws").check(mutant(law))[law]
    assert status == "no" and remark


def test_what_a_subject_lacks_is_not_applicable(found: Callable[[str], Any]) -> None:
    cells = found("laws").check(
        SimpleNamespace(masks=right().masks, EXEMPT={"count": "no counts"})
    )
    assert cells["count"] == ("not applicable", "no counts")
    assert cells["inputs"] == ("not applicable", "in place by design")
