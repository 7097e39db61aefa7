"""Compiled updates on a few rows of the registry: compiling is slow, and what can go
wrong is the same in most.
"""

import pytest
import torch

import sparsefn as sf
from property_tests.registry import ROWS
from sparsefn.testing import Row
from sparsefn.testing.harness import assert_same
from sparsefn.testing.laws_transforms import compiling_changes_nothing
from sparsefn.testing.strategies import large

# tests/algorithms/test_frame.py compiles the others
COMPILED = ("gmp erk", "adam rigl")


@pytest.mark.deep
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name in COMPILED], ids=lambda row: row.name
)
def test_compiled_updates_are_eager_ones(row: Row) -> None:
    compiling_changes_nothing(row, large(row.meta.layout.form))


# Algorithms that read sizes and numbers in different ways: budgets by shape, units,
# fixed counts, parts of a tree.
SHAPED = ("gmp erk", "ste nm", "partition of everything")


def model(row: Row, size: int, seed: int) -> dict[str, torch.Tensor]:
    rows, columns, _, _ = row.meta.layout.form
    generator = torch.Generator().manual_seed(seed)
    shapes = {"v": (4 * rows, 6 * columns), "w": (size * rows, (size + 1) * columns)}
    return {
        name: torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }


@pytest.mark.deep
@pytest.mark.parametrize(("dynamic", "sizes"), [(None, (4, 6)), (True, (4,))])
@pytest.mark.parametrize("name", SHAPED)
def test_one_compiled_update_serves_models_of_other_shapes(
    name: str, dynamic: bool | None, sizes: tuple[int]
) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    torch._dynamo.reset()
    algorithm = row.make(0.5, sf.random.key(3), model(row, 4, 0))
    compiled = torch.compile(
        algorithm.update, fullgraph=True, backend="eager", dynamic=dynamic
    )
    for size in sizes:
        state, grads = algorithm.init(model(row, size, 0)), model(row, size, 1)
        assert_same(
            f"size {size}",
            algorithm.update(state, grads, 1),
            compiled(state, grads, torch.tensor(1)),
        )


def test_the_rows_exist() -> None:
    assert {row.name for row in ROWS} >= {*COMPILED, *SHAPED}
