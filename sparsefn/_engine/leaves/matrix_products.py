"""Products of matrices that have the same bits in every surrounding."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from sparsefn._engine.leaves.member_operators import one_by_one
from sparsefn._engine.transforms import transformed


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """A context without autocast on a kind of device.

    >>> from sparsefn._engine.leaves import without_autocast
    >>> with torch.autocast("cpu"), without_autocast("cpu"):
    ...     print(torch.is_autocast_enabled("cpu"))
    False
    """
    # torch 2.11 does not compile the question, which "meta" needs
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(
        device
    )
    if has_autocast and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def plain_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, also under autocast, which would round both to 16 bits.

    >>> from sparsefn._engine.leaves import plain_product
    >>> with torch.autocast("cpu"):
    ...     product = plain_product(torch.eye(2), torch.full((2,), 0.1))
    >>> product
    tensor([0.1000, 0.1000])
    """
    with without_autocast(a.device.type):
        return a @ b


def member_product(a: Tensor, b: Tensor) -> Tensor:
    """`plain_product` without a derivative. Under `vmap` each member has the bits that
    it has alone, which a product of batches does not promise.

    >>> from sparsefn._engine.leaves import member_product
    >>> member_product(torch.eye(2), torch.ones(2))
    tensor([1., 1.])
    """
    made: Tensor = _member_product(a, b) if transformed() else plain_product(a, b)
    return made


_member_product = torch.library.custom_op(
    "sparsefn::member_product", plain_product, mutates_args=()
)
_member_product.register_fake(torch.matmul)
one_by_one(_member_product)
