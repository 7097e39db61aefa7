"""Shuffles of channels as one operation, as views tie what a permutation does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from sparsefn.shrinking.traced import with_tensors
from sparsefn.shrinking.values import hint, opname

_VIEWS = [
    "view",
    "_unsafe_view",
    "reshape",
    "flatten",
    "unflatten",
    "permute",
    "transpose",
]
_STEPS = frozenset([*_VIEWS, "clone", "contiguous", "channel_shuffle"])


def without_shuffles(program: fx.GraphModule) -> fx.GraphModule:
    """A copy of the program in which views and transposes that permute one dimension
    are one `index_select`.

    Of a view in groups every group would have to lose the same channels, of a
    permutation any may go; but grouped convolutions may be better off with the views.
    """
    program = with_tensors(program)
    graph = program.graph
    for first in list(graph.nodes):
        for chain in _chains(first):
            dim, places = _permuted(chain) or (0, None)
            if places is not None:
                last = chain[-1]
                device = chain[-1].meta["val"].device
                # the analysis reads them
                places = places if device.type == "meta" else places.to(device)
                program.register_buffer(
                    f"_{last.name}_places", places, persistent=False
                )
                with graph.inserting_before(last):
                    index = graph.get_attr(f"_{last.name}_places")
                    made = graph.call_function(
                        torch.ops.aten.index_select.default, (first.args[0], dim, index)
                    )
                made.meta = last.meta
                last.replace_all_uses_with(made)
                for node in reversed(chain):
                    graph.erase_node(node)
                break
    program.recompile()
    return program


def has_shuffles(program: fx.GraphModule) -> bool:
    """Whether a program has views and transposes that permute one dimension."""
    return any(
        _permuted(chain) for first in program.graph.nodes for chain in _chains(first)
    )


def _chains(first: fx.Node) -> Iterator[list[fx.Node]]:
    # Operations that follow in one line, and give the shape that the first one takes.
    chain = list[fx.Node]()
    following = [first]
    size = _size(first.args[0]) if first.args else None
    while (
        len(following) == 1
        and following[0].op == "call_function"
        and opname(following[0]) in _STEPS
    ):
        chain.append(following[0])
        if _size(chain[-1]) == size:
            yield chain
        following = list(chain[-1].users)


def _size(node: Any) -> list[str] | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return list(map(str, val.shape)) if isinstance(val, Tensor) else None


def _permuted(chain: list[fx.Node]) -> tuple[int, Tensor] | None:
    # Which dimension operations permute, and from which places; None where they do
    # anything else.
    shape = tuple(hint(n) for n in chain[-1].meta["val"].shape)
    made = cells = torch.arange(math.prod(shape), device="cpu").reshape(shape)
    for node in chain:
        run: Any = node.target
        made = run(
            made,
            *fx.map_arg(node.args[1:], lambda n: hint(n.meta["val"])),
            **node.kwargs,
        )
    for d, size in enumerate(shape):
        places = (
            made.movedim(d, 0).reshape(size, -1)[:, 0]
            // math.prod(shape[d + 1 :])
            % size
        )
        if not places.equal(torch.arange(size, device="cpu")) and made.equal(
            cells.index_select(d, places)
        ):
            return d, places
    return None
