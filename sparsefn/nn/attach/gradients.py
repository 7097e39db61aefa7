"""The gradients of a module: dense ones, and the gradients that its optimizer sees."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsefn._engine.processes import full_tensors, redistributed
from sparsefn.core.tree import Leaves
from sparsefn.nn.attach.records import (
    Record,
    addresses,
    set_gradients,
    with_other_gradients,
)


def dense_gradient(parameter: Tensor, like: Tensor) -> Tensor:
    """The gradient of a parameter, dense and laid out as a leaf.

    It is zeros where the parameter has none.

    >>> dense_gradient(torch.nn.Parameter(torch.ones(2)), torch.ones(2))
    tensor([0., 0.])
    """
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(like)
    grad = grad if grad.layout == torch.strided else grad.to_dense()
    # quick, as every step asks
    grad = grad if type(grad) is Tensor else redistributed(grad, like)
    # it does after backward(create_graph=True)
    return grad.detach() if grad.requires_grad else grad


def gradients_of(model: nn.Module) -> list[tuple[Tensor | None, int]]:
    """The gradients of a module's parameters, each with its version.

    >>> layer = torch.nn.Linear(2, 1)
    >>> gradients_of(layer)
    [(None, -1), (None, -1)]
    """
    grads = [parameter.grad for parameter in model.parameters()]
    return [(grad, -1 if grad is None else grad._version) for grad in grads]


def are_untouched(
    model: nn.Module, before: Sequence[tuple[Tensor | None, int]]
) -> bool:
    """Whether a module has the gradients that it had, and nobody has written to them.

    >>> layer = torch.nn.Linear(2, 1)
    >>> before = gradients_of(layer)
    >>> layer(torch.ones(2)).backward()
    >>> are_untouched(layer, before)
    False
    """
    rows = zip(gradients_of(model), before, strict=True)
    return all(
        grad is old and version == known for (grad, version), (old, known) in rows
    )


def dense_gradients(records: Collection[Record]) -> dict[str, Tensor]:
    """The gradients of some weights by name.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> dense_gradients([Record("w", weight, torch.optim.SGD([weight], lr=0.1))])
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: no parameter has a new gradient: call it after backward()
    and before zero_grad(), on what attach returned for this very module; a copy of a
    module has parameters of its own, and several optimizers with closures need an
    attach each

    Raises RuntimeError where no parameter has a gradient, or each gradient is a masked
    one that an optimizer was given.
    """
    if not with_other_gradients(records):
        raise RuntimeError(
            "before_step: no parameter has a new gradient: call it after backward() "
            "and before zero_grad(), on what attach returned for this very module; a "
            "copy of a module has parameters of its own, and several optimizers with "
            "closures need an attach each"
        )
    return {
        record.name: dense_gradient(record.parameter, record.parameter)
        for record in records
    }


def give(
    records: Iterable[Record],
    trained: Sequence[Record],
    seen: Sequence[Tensor],
    dense: Leaves,
) -> None:
    """Make gradients what optimizers see, in memory of their own.

    An empty list gives no gradients.

    >>> weight, latent = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> optimizer = torch.optim.SGD([weight, latent], lr=0.1)
    >>> weight.grad = torch.ones(2)
    >>> weights, dense = [Record("w", weight, optimizer)], {"w": weight.grad}
    >>> give(
    ...     weights,
    ...     [Record("latent.w", latent, optimizer, weights[0], trains=True)],
    ...     [weight.grad],
    ...     dense,
    ... )
    >>> weight.grad, latent.grad, latent.grad is dense["w"]
    (None, tensor([1., 1.]), False)

    A parameter without a gradient stays without one. A gradient that is handed on as it
    is stays the parameter's own, and the dense one becomes a copy: what clips or zeroes
    it does not reach the algorithm.
    """
    held = dict(zip(addresses(dense.values()), dense, strict=True))
    given: dict[str, Tensor | None] = dict.fromkeys([r.name for r in trained])
    rows = zip(trained, seen, addresses(seen), strict=bool(seen))
    for record, grad, at in rows:
        own = record.parameter.grad
        if own is None and not record.beside:
            continue
        if at not in held:
            given[record.name] = grad
            held[at] = ""
        elif held[at] != record.name:
            given[record.name] = grad.clone()
        else:
            given[record.name] = own
            # a sparse one was made dense, in memory of its own
            if own is not None and own.layout == torch.strided:
                dense[record.name] = grad.clone()
    others = [record for record in records if not record.trains]
    none = [None] * len(others)
    set_gradients([*trained, *others], [*given.values(), *none])


def warn_of_zeros(dense: Mapping[str, Tensor], step: int) -> None:
    """Warn where every gradient is zero, from which a change of masks learns nothing.

    >>> warn_of_zeros({"w": torch.ones(2)}, 3)
    """
    counts = full_tensors([grad.count_nonzero() for grad in dense.values()])
    if not any(bool(count) for count in counts):
        warnings.warn(
            f"after_step: every gradient was zero at step {step}, where masks "
            "changed: call before_step before zero_grad(set_to_none=False)",
            stacklevel=4,
        )
