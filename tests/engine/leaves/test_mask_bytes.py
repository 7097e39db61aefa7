import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._inductor.utils import run_and_get_code

from sparsefn.engine.leaves import mask_bytes

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
    assert all(x is y for x, y in zip(mask_bytes.from_bytes(masks), masks, strict=True))


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["record", "inductor"])
def test_compiled_masks_are_equal_and_come_from_one_call(backend):
    record = EagerAndRecordGraphs()
    masks, dense = list(MASKS.values()), torch.tensor(True)

    def read(masks, dense):
        *seen, whole = mask_bytes.from_bytes([*masks, dense])
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
        return mask_bytes.from_bytes([mask, other])

    for in_dims in ((0, None), (1, 0)):
        batched = torch.vmap(read, in_dims=in_dims)
        rows = torch.compile(batched, fullgraph=True, backend="aot_eager")(batch, other)
        assert all(
            torch.equal(*pair) for pair in zip(rows, batched(batch, other), strict=True)
        )


def test_exported_programs_and_other_devices_read_bools():
    class Reading(torch.nn.Module):
        def forward(self, mask):
            return torch.where(mask_bytes.from_bytes([mask])[0], 1.0, 0.0)

    assert calls(torch.export.export(Reading(), (FLAGS,)).graph_module) == 0
    record = EagerAndRecordGraphs()
    torch.compile(mask_bytes.from_bytes, fullgraph=True, backend=record)(
        [FLAGS.to("meta"), torch.tensor(True)]
    )
    assert sum(map(calls, record.graphs)) == 0


@pytest.mark.deep
def test_inductor_reads_them_where_they_lie_and_sees_that_the_memory_is_the_masks():
    values = torch.arange(9.0)

    def read(mask):
        (seen,) = mask_bytes.from_bytes([mask])
        chosen = torch.where(seen, values, -1.0)
        mask.logical_not_()  # after the reading
        (later,) = mask_bytes.from_bytes([mask])
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
