"""What torch 2.11 does otherwise; the tests hold for every release."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import sparsefn as sf
from sparsefn.engine.surroundings import older


@older.replaceable
class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def test_compiled_code_changes_a_marked_named_tuple():
    def changed(pair):
        return pair._replace(b=2 * pair.b)

    pair = Pair(torch.ones(2), torch.ones(3))
    for way in (changed, torch.compile(changed, fullgraph=True, backend="eager")):
        new = way(pair)
        assert type(new) is Pair and new.a is pair.a and torch.equal(new.b, 2 * pair.b)
    assert pair.b.sum() == 3
    with pytest.raises(
        (ValueError, TypeError), match=r"unexpected field names: \['c'\]"
    ):
        pair._replace(c=0)


def test_the_replacement_for_older_torch_does_what_every_named_tuple_does():
    pair = Pair(torch.ones(2), torch.ones(3))
    new = older._replace(pair, a=pair.b)
    assert type(new) is Pair and new.a is pair.b and new.b is pair.b
    with pytest.raises(ValueError, match=r"Got unexpected field names: \['c'\]"):
        older._replace(pair, c=0)


def test_exporting_is_not_compiling():
    class Shift(torch.nn.Module):
        def forward(self, x):
            return x + int(older.is_exporting())

    x = torch.zeros(1)
    assert (
        Shift()(x) == 0
        and torch.compile(Shift(), fullgraph=True, backend="eager")(x) == 0
    )
    for strict in (False, True):
        assert torch.export.export(Shift(), (x,), strict=strict).module()(x) == 1


def test_no_other_module_asks_torch_itself():
    package = Path(sf.__file__).parent
    asking = {
        p.name
        for p in package.rglob("*.py")
        if "torch.compiler.is_exporting()" in p.read_text(encoding="utf-8")
    }
    assert asking == {"older.py"}


@pytest.mark.parametrize("made_inside", [False, True])
def test_derivatives_are_true_in_inference_mode(made_inside):
    marked = older.differentiating(torch.func.grad(lambda x: x.square().sum()))
    outside = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        x = torch.ones(2) if made_inside else outside
        slope = marked(x)
        assert torch.is_inference_mode_enabled()
        assert torch.equal(torch.vmap(marked)(x.reshape(2, 1)), torch.full((2, 1), 2.0))
    assert torch.equal(slope, torch.full((2,), 2.0)) and not slope.requires_grad
