"""Values as code: what is written gives the value again."""

import collections

import pytest
import torch

import sparsefn as sf
from sparsefn.testing.values import WeightAndBias
from sparsefn.testing.written import code_of, declarations, meta_code, tensor_code


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.5, "train"),
        *(sf.every(3, start=1), sf.never(), sf.at([1, 2]), sf.always()),
        *(
            sf.scores.magnitude,
            sf.scores.lamp,
            sf.budgets.global_(floor=0.25),
            sf.patterns.nm(2, 4),
        ),
        sf.scores.ranked(sf.scores.magnitude),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_code_gives_the_value_again(value):
    made = eval(code_of(value), {"sf": sf, "torch": torch})
    assert made == value or repr(made) == repr(value)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 3),
        torch.ones(1, 2, dtype=torch.float64),
        torch.tensor([[0.0, -0.0]]),
        torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.bfloat16),
        torch.zeros(0, 3, dtype=torch.float16),
        torch.tensor(2.5),
        torch.tensor([0.1, 1e-40]),
    ],
    ids=tensor_code,
)
def test_tensors_keep_their_bits(x):
    made = eval(tensor_code(x), {"torch": torch})
    assert made.dtype == x.dtype and sf.checkpoint.tree_equal(made, x)


def test_trees():
    tree = {
        "a": [torch.zeros(1)],
        "b": (torch.ones(1),),
        "c": WeightAndBias(torch.zeros(1), torch.zeros(1)),
    }
    tree["d"] = collections.OrderedDict(x=torch.zeros(2))
    made = eval(code_of(tree), {"sf": sf, "torch": torch, "collections": collections})
    assert sf.checkpoint.tree_equal(made, tree)


def test_what_has_no_name_has_no_code():
    assert code_of(lambda: 0) is None and code_of({"a": [lambda: 0]}) is None
    assert code_of(sf.scores.ranked(lambda state, grads, step: grads)) is None


def test_promises():
    meta = sf.testing.Meta(
        pattern=sf.patterns.nm(2, 4),
        when=sf.at([1]),
        choose=sf.scores.magnitude,
        baseline=None,
    )
    code = (
        "when=sf.at([1]), pattern=sf.patterns.nm(2, 4), choose=sf.scores.magnitude, "
        "baseline=None"
    )
    assert meta_code(meta) == f"sf.testing.Meta({code})"
    hidden = sf.testing.Meta(level=lambda s: lambda step: s)
    assert meta_code(hidden) == "meta"
    assert declarations(hidden._replace(start="dense"), hidden) == (
        "meta._replace",
        {"start": '"dense"'},
    )
