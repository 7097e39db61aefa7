"""The law of `attach`: around a torch optimizer, an algorithm does what it does in `with_optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import sparsefn as sf
from sparsefn.testing import Case, Row
from sparsefn.testing.harness import algorithm_of, leaves
from sparsefn.testing.strategies import large
from sparsefn.tree import Tree

STEPS = 60
CLOSE = 1e-4  # relative to 1 + size: torch's optimizers round their sums another way


class Pair(NamedTuple):
    """An optimizer of this library, and torch's of that name."""

    pure: sf.optimizers.Optimizer
    torchs: Callable[[Iterable[Tensor]], Optimizer]


# A large eps: Adam's first step is as large for every weight, and ties would be broken by rounding.
PAIRS = {
    "sgd": Pair(
        sf.optimizers.sgd(0.1, momentum=0.9, weight_decay=1e-3),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    ),
    "adam": Pair(sf.optimizers.adam(1e-2, eps=0.1), lambda params: torch.optim.Adam(params, lr=1e-2, eps=0.1)),
    "adamw": Pair(
        sf.optimizers.adamw(1e-2, eps=0.1, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=1e-2, eps=0.1, weight_decay=0.1),
    ),
}


class Holder(nn.Module):
    """A module with the leaves of a tree as its parameters, under their dotted paths."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__()
        for path, leaf in params.items():
            owner: nn.Module = self
            *parts, name = path.split(".")
            for part in parts:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(name, nn.Parameter(leaf.clone()))


def flat(case: Case) -> Case:
    """The case with params as a module names them."""
    return case._replace(params=dict(leaves(case.params)), grads=tuple(dict(leaves(tree)) for tree in case.grads))


def loss(params: dict[str, Tensor], slopes: Tree) -> Tensor:
    """A loss whose gradients depend on the weights."""
    return torch.stack([(slopes[path] * leaf + 0.05 * leaf**2).sum() for path, leaf in params.items()]).sum()


def check(row: Row, pair: Pair, steps: int = STEPS, attach: Callable[..., Any] = sf.attach) -> None:
    """Masks equal, weights to rounding, at every step."""
    case = flat(large(row.meta.layout.form))
    algorithm = algorithm_of(row, case)
    alone = sf.with_optimizer(algorithm, pair.pure)
    state = alone.init(case.params)
    holder = Holder(case.params)
    weights = dict(holder.named_parameters())
    optimizer = pair.torchs(holder.parameters())
    sparse = attach(algorithm, holder, optimizer)
    for step in range(steps):
        slopes = case.grads[step % len(case.grads)]
        state = alone.update(state, sf.modules.value_and_grad(loss)(sf.effective(state), slopes)[1], step)
        optimizer.zero_grad()
        loss(weights, slopes).backward()
        sparse.before_step()
        optimizer.step()
        sparse.after_step(step)
        wanted, shown = sf.effective(state), sf.effective(sparse.state)
        for path, weight in weights.items():
            what = f"{path} after step {step}"
            assert torch.equal(sparse.state.masks[path], state.masks[path]), f"another mask of {what}"
            assert torch.equal(weight, shown[path]), f"the module does not show the effective weights of {what}"
            assert near(weight, wanted[path]), f"other weights of {what}"
            assert near(sparse.state.params[path], state.params[path]), f"other params of {what}"


def near(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= CLOSE * (1 + b.abs())).all())
