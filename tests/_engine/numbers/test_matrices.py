"""A weight as the matrix that statistics belong to."""

import pytest
import torch

from sparsefn._engine.numbers.matrices import as_matrix


def stats(count, *shape):
    return {
        "count": torch.ones(count, dtype=torch.int64),
        "square": torch.ones((*count, *shape)),
    }


@pytest.mark.parametrize(
    ("weight", "of", "matrix"),
    [
        ((5, 3), stats((), 3), (5, 3)),
        ((3, 5), stats((), 3, 1), (5, 3)),
        ((3, 3), stats((), 3, 1), (3, 3)),
        ((5, 2, 3, 3), stats((), 18), (5, 18)),
        ((4, 2, 3), stats((2,), 6), (2, 2, 6)),
        ((6, 2), stats((3,), 2), (3, 2, 2)),
        ((4, 5, 3), stats((4,), 3), (4, 5, 3)),
        ((4, 3, 5), stats((4,), 3, 1), (4, 5, 3)),
        ((5, 3, 1), stats((), 3, 1), (5, 3)),
    ],
)
def test_outputs_by_inputs_and_back(weight, of, matrix):
    w = torch.arange(float(torch.Size(weight).numel())).reshape(weight)
    found, restore = as_matrix(w, of)
    assert found.shape == matrix and torch.equal(restore(found), w)
    if of["square"].ndim == of["count"].ndim + 2:  # stored as inputs by outputs
        assert torch.equal(found.flatten(), w.mT.flatten())


@pytest.mark.parametrize(
    ("weight", "of", "text"),
    [
        (
            (5, 4),
            stats((), 3),
            r"expected the statistics of a weight of shape \(5, 4\), got statistics of "
            r"3 inputs$",
        ),
        ((5, 4), stats((2,), 4), r"got statistics of 4 inputs in 2 groups"),
        ((4,), stats((), 4), r"a weight of shape \(4,\), got statistics of 4 inputs"),
        ((5, 4), stats(()), "got statistics of 0 inputs"),
    ],
)
def test_statistics_of_another_weight(weight, of, text):
    with pytest.raises(ValueError, match=text):
        as_matrix(torch.ones(weight), of)


@pytest.mark.parametrize("name", ["count", "square"])
def test_statistics_that_lack_one(name):
    given = stats((), 4)
    del given[name]
    rest = ", ".join(given)
    text = f"expected '{name}' in the statistics, got {rest}: make them with"
    with pytest.raises(ValueError, match=text):
        as_matrix(torch.ones(5, 4), given)
