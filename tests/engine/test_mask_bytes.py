import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

from sparsefn.engine import mask_bytes

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


@pytest.mark.parametrize("backend", ["record", "inductor"])
def test_compiled_masks_are_equal_and_come_from_one_call(backend):
    record = EagerAndRecordGraphs()
    masks, dense = list(MASKS.values()), torch.tensor(True)

    def read(masks, dense):
        *seen, whole = mask_bytes.from_bytes([*masks, dense])
        return seen, [torch.where(mask, 1.0, -0.0) for mask in seen], whole

    compiled = torch.compile(read, fullgraph=True, backend=record if backend == "record" else backend)
    seen, floats, whole = compiled(masks, dense)
    for mask, got, chosen in zip(masks, seen, floats, strict=True):
        assert got.dtype == torch.bool and torch.equal(got, mask)
        assert torch.equal(chosen.signbit(), ~mask)
    assert whole is dense
    if backend == "record":
        assert [calls(graph) for graph in record.graphs] == [1]


def test_a_batch_of_masks_is_a_loop():
    batch, other = FLAGS.reshape(3, 3), FLAGS[:3]

    def read(mask, other):
        return mask_bytes.from_bytes([mask, other])

    for in_dims in ((0, None), (1, 0)):
        batched = torch.vmap(read, in_dims=in_dims)
        rows = torch.compile(batched, fullgraph=True, backend="aot_eager")(batch, other)
        assert all(torch.equal(*pair) for pair in zip(rows, batched(batch, other), strict=True))


def test_exported_programs_and_other_devices_read_bools():
    class Reading(torch.nn.Module):
        def forward(self, mask):
            return torch.where(mask_bytes.from_bytes([mask])[0], 1.0, 0.0)

    assert calls(torch.export.export(Reading(), (FLAGS,)).graph_module) == 0
    record = EagerAndRecordGraphs()
    torch.compile(mask_bytes.from_bytes, fullgraph=True, backend=record)([FLAGS.to("meta"), torch.tensor(True)])
    assert sum(map(calls, record.graphs)) == 0
