"""Models that never route to some experts, whose logits are -inf."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sparsefn.engine.surroundings import CAST, TorchDispatchMode
from sparsefn.patterns.places import Place

# where experts lie in a leaf, and which of its indices there are not routed to
Router = tuple[Place, Tensor]

_aten = torch.ops.aten
# Where the factors of products begin among the arguments.
_FACTORS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}


class Seen(NamedTuple):
    """What was seen of routers while a model ran."""

    products: set[str]  # the leaves that something was multiplied by
    # by leaf, to how many experts a token was routed after such a product
    most: dict[str, int]


def never_routed(model: nn.Module, routers: Sequence[Router]) -> tuple[nn.Module, Seen]:
    """A copy that runs with logits -inf of some rows of routers, and what is seen of
    these whenever it or a copy runs.

    >>> model, gone = torch.nn.Linear(2, 3), torch.tensor([False, True, False])
    >>> copied, seen = never_routed(
    ...     model, [(Place("weight", (3, 2), dim=0, units=3), gone)]
    ... )
    >>> copied(torch.ones(1, 2)).isinf(), seen.products
    (tensor([[False,  True, False]]), {'weight'})
    """
    seen = Seen(set(), {})

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Logits(self, routers, seen):
            return type(self).forward(self, *args, **kwargs)

    made = copy.deepcopy(model)
    # of a copy of the copy it is the copy's
    made.forward = types.MethodType(forward, made)
    return made, seen


class _Logits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills the outputs of products with some rows of routers with -inf; a router is
    known by its storage.
    """

    def __init__(
        self, module: nn.Module, routers: Sequence[Router], seen: Seen
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = [
            (module.get_parameter(place.path), place, gone) for place, gone in routers
        ]
        self.known = {_storage(router[0]): router for router in own}
        self.seen = seen
        self.last = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and fill its output if it is a product with a router."""
        out = func(*args, **(kwargs or {}))
        op = func.overloadpacket
        if op is CAST and (router := self.known.get(_storage(args[0]))) is not None:
            if (
                args[0].shape == router[0].shape
                and args[0].stride() == router[0].stride()
            ):
                self.known[_storage(out)] = (out, *router[1:])
        elif op in _FACTORS:
            for axis, x in enumerate(args[_FACTORS[op] :][:2], -2):
                self.fill(out, axis, x)
        elif op is _aten.topk and self.last:
            self.seen.most[self.last] = args[1]
            self.last = ""
        return out

    def fill(self, out: Tensor, axis: int, x: Tensor) -> None:
        """Fill the outputs of a product along this axis, if its factor x has the rows
        of a router along it.
        """
        router = self.known.get(_storage(x))
        if router is None:
            return
        leaf, place, gone = router
        if x.shape[axis] == leaf.shape[place.dim] and x.stride(axis) == leaf.stride(
            place.dim
        ):
            out.index_fill_(
                out.ndim + axis, gone.nonzero().flatten().to(out.device), -math.inf
            )
            self.seen.products.add(place.path)
            self.last = place.path


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
