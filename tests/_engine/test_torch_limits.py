"""Workarounds for torch; the tests hold for every release."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._inductor.utils import run_and_get_code
from torch.func import vmap

import sparsefn as sf
from sparsefn._engine import torch_limits


@torch_limits.replaceable
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
    new = torch_limits._replace(pair, a=pair.b)
    assert type(new) is Pair and new.a is pair.b and new.b is pair.b
    with pytest.raises(ValueError, match=r"Got unexpected field names: \['c'\]"):
        torch_limits._replace(pair, c=0)


def test_exporting_is_not_compiling():
    class Shift(torch.nn.Module):
        def forward(self, x):
            return x + int(torch_limits.is_exporting())

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
    assert asking == {"torch_limits.py"}


@pytest.mark.parametrize("made_inside", [False, True])
def test_derivatives_are_true_in_inference_mode(made_inside):
    marked = torch_limits.differentiating(torch.func.grad(lambda x: x.square().sum()))
    outside = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        x = torch.ones(2) if made_inside else outside
        slope = marked(x)
        assert torch.is_inference_mode_enabled()
        assert torch.equal(torch.vmap(marked)(x.reshape(2, 1)), torch.full((2, 1), 2.0))
    assert torch.equal(slope, torch.full((2,), 2.0)) and not slope.requires_grad


@pytest.mark.deep
@pytest.mark.parametrize("rule", [True, False])
def test_bits_are_read_as_another_dtype_where_torch_has_no_rule_for_vmap_too(
    rule, monkeypatch
):
    if rule and not torch_limits.VMAP_REINTERPRETS:
        pytest.skip("torch has no rule")
    monkeypatch.setattr(torch_limits, "VMAP_REINTERPRETS", rule)
    x = torch.tensor([[1.0, -0.0, float("nan")], [2.0, 0.0, -float("inf")]])
    want = x.view(torch.int32)

    def bits(row):
        return torch_limits.reinterpreted(row, torch.int32)

    torch._dynamo.reset()
    assert torch.equal(bits(x), want)
    for dim in (0, 1):
        each = vmap(bits, in_dims=dim, out_dims=dim)
        for way in (each, torch.compile(each, fullgraph=True, backend="aot_eager")):
            assert torch.equal(way(x), want)
    assert torch.equal(
        torch.compile(bits, fullgraph=True, backend="aot_eager")(x), want
    )


@pytest.mark.deep
def test_compiled_loops_read_what_was_computed_once():
    def scaled(x, y, number):
        number = torch_limits.computed_once((number + 1).sqrt())
        return x * number, y * number

    given = torch.ones(300), torch.ones(40), torch.tensor(3.0)
    assert torch_limits.computed_once(given[2]) is given[2]
    doubles, (code,) = run_and_get_code(torch.compile(scaled, fullgraph=True), *given)
    assert code.count("std::sqrt(") == 1 and all(
        torch.equal(x, 2 * y) for x, y in zip(doubles, given, strict=False)
    )
    batched = torch.compile(vmap(scaled, in_dims=(None, None, 0)), fullgraph=True)
    assert batched(*given[:2], torch.tensor([0.0, 3.0]))[0].sum(1).tolist() == [
        300.0,
        600.0,
    ]
    exported = torch.export.export(Scaling(scaled), given).graph_module
    assert not any("as_strided" in str(node.target) for node in exported.graph.nodes)


class Scaling(torch.nn.Module):
    """A function as a module."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *args):
        return self.run(*args)


@pytest.mark.deep
def test_sixteen_bits_are_rounded_before_they_are_widened():
    x, y = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()

    def product(x, y):
        return torch_limits.widened(x * y)

    expected = (x * y).float()
    assert (
        torch.equal(product(x, y), expected)
        and torch_limits.widened(x.double()).dtype == torch.float64
    )
    assert torch.equal(torch.compile(product)(x, y), expected)
    assert torch.equal(
        torch.compile(torch.vmap(product), backend="aot_eager")(x, y), expected
    )


# ---- bools in compiled code ----------------------------------------------------------

FLAGS = torch.tensor([True, False, True, True, False, False, True, False, True])
MASKS = {
    "2-D": FLAGS.reshape(3, 3),
    "odd": FLAGS[:7],
    "a part that starts at an odd byte": FLAGS[1:8],
    "transposed": FLAGS.reshape(3, 3).T,
    "strided": FLAGS[::2],
    "empty": FLAGS[:0],
}


def calls(graph):
    """How often a graph calls an operator of the library."""
    return sum("mask_bytes" in str(node.target) for node in graph.graph.nodes)


def test_masks_are_themselves_where_nothing_is_compiled():
    masks = [*MASKS.values(), torch.tensor(True)]
    assert all(
        x is y for x, y in zip(torch_limits.from_bytes(masks), masks, strict=True)
    )


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["record", "inductor"])
def test_compiled_masks_are_equal_and_come_from_one_call(backend):
    record = EagerAndRecordGraphs()
    masks, dense = list(MASKS.values()), torch.tensor(True)

    def read(masks, dense):
        *seen, whole = torch_limits.from_bytes([*masks, dense])
        return seen, [torch.where(mask, 1.0, -0.0) for mask in seen], whole

    compiled = torch.compile(
        read, fullgraph=True, backend=record if backend == "record" else backend
    )
    seen, floats, whole = compiled(masks, dense)
    for mask, got, chosen in zip(masks, seen, floats, strict=True):
        assert got.dtype == torch.bool and torch.equal(got, mask)
        assert torch.equal(chosen.signbit(), ~mask)
    assert whole is dense
    if backend == "record":
        assert [calls(graph) for graph in record.graphs] == [1]


@pytest.mark.deep
def test_a_batch_of_masks_is_a_loop():
    batch, other = FLAGS.reshape(3, 3), FLAGS[:3]

    def read(mask, other):
        return torch_limits.from_bytes([mask, other])

    for in_dims in ((0, None), (1, 0)):
        batched = torch.vmap(read, in_dims=in_dims)
        rows = torch.compile(batched, fullgraph=True, backend="aot_eager")(batch, other)
        assert all(
            torch.equal(*pair) for pair in zip(rows, batched(batch, other), strict=True)
        )


def test_exported_programs_and_other_devices_read_bools():
    class Reading(torch.nn.Module):
        def forward(self, mask):
            return torch.where(torch_limits.from_bytes([mask])[0], 1.0, 0.0)

    assert calls(torch.export.export(Reading(), (FLAGS,)).graph_module) == 0
    record = EagerAndRecordGraphs()
    torch.compile(torch_limits.from_bytes, fullgraph=True, backend=record)(
        [FLAGS.to("meta"), torch.tensor(True)]
    )
    assert sum(map(calls, record.graphs)) == 0


@pytest.mark.deep
def test_inductor_reads_them_where_they_lie_and_sees_that_the_memory_is_the_masks():
    values = torch.arange(9.0)

    def read(mask):
        (seen,) = torch_limits.from_bytes([mask])
        chosen = torch.where(seen, values, -1.0)
        mask.logical_not_()  # after the reading
        (later,) = torch_limits.from_bytes([mask])
        bytes_of_the_same_size = (
            (chosen > 2).to(torch.uint8).cumsum(0, dtype=torch.uint8)
        )
        return chosen, torch.where(later, values, -1.0), bytes_of_the_same_size

    for mask in (FLAGS.clone(), FLAGS.repeat(2)[1:10]):
        torch.compiler.reset()
        before = mask.clone()
        (chosen, later, _), (code, *_) = run_and_get_code(
            torch.compile(read, fullgraph=True), mask
        )
        assert torch.equal(mask, ~before)
        assert torch.equal(chosen, torch.where(before, values, -1.0))
        assert torch.equal(later, torch.where(before, -1.0, values))
        assert code.count("torch.ops.aten.view.dtype(") and not code.count(
            "torch.ops.sparsefn.mask_bytes.default("
        )
