"""What a system of torch modules is asked, made of what its adapter says:

    sparsify(model, sparsity, optimizer) -> model, handle  pruned by magnitude; the
                                                           optimizer may be None
    masks(model, handle) -> tensors                        one a layer, not zero
                                                           where a weight is kept
    again(model, handle, sparsity) -> handle               pruned further; None is
                                                           the handle as before
    step(model, handle, optimizer)                         one step after gradients;
                                                           else `optimizer.step()`
    save(model, handle), load(model, handle, saved)        else the state dict of
                                                           the model, strictly
    weights(model) -> tensors                              of the forward; else
                                                           `layer.weight`
    NEW_OPTIMIZER                                          pruning replaces parameters
    mask(weight, sparsity) -> mask                         instead of all these, for
                                                           functions of tensors

A name of `laws.py` in an adapter goes before the one made here.
"""

import copy
import functools
import io
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Arrays = list[np.ndarray]


class Chain(nn.Module):
    """Layers in a row. Not `nn.Sequential`, which would call the modules that a system
    adds beside them.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def linears(weights: Arrays) -> nn.Module:
    """A chain of linear layers with these weights."""
    with torch.random.fork_rng(devices=[]):
        layers: list[Any] = [
            nn.Linear(x.shape[1], x.shape[0], bias=False) for x in weights
        ]
    for layer, x in zip(layers, weights, strict=True):
        layer.weight.data.copy_(torch.from_numpy(x))
    return Chain(layers)


def layers_of(model: nn.Module) -> list[Any]:
    """The layers whose weights are pruned."""
    return [part for part in model.modules() if isinstance(part, nn.Linear)]


def data(weights: Arrays) -> Tensor:
    """A batch for a chain of linear layers."""
    width = weights[0].shape[1]
    return torch.linspace(-1, 1, 8 * width).sin().reshape(8, width)


def array(x: Tensor) -> np.ndarray:
    """A copy outside torch."""
    return np.array(x.detach().float().numpy())


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose steps move weights that have no gradient."""
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def tensors(adapter: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions of a system whose masks are functions of tensors."""

    def masks(weights: Arrays, sparsity: float) -> Arrays:
        return [
            array(adapter.mask(torch.from_numpy(x.copy()), sparsity)) != 0
            for x in weights
        ]

    def inputs(weights: Arrays, sparsity: float) -> Arrays:
        own = [torch.from_numpy(x) for x in weights]
        for x in own:
            adapter.mask(x, sparsity)
        return weights

    def vmapped(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        stack = torch.stack(
            [torch.from_numpy(np.roll(weights[0], i)) for i in range(3)]
        )
        loop = [array(adapter.mask(x, sparsity)) for x in stack]
        return [
            *array(torch.func.vmap(lambda x: adapter.mask(x, sparsity))(stack))
        ], loop

    def compiled(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        x = torch.from_numpy(weights[0])
        fast = torch.compile(adapter.mask, backend="eager", fullgraph=True)
        return [array(fast(x, sparsity))], [array(adapter.mask(x, sparsity))]

    return {"masks": masks, "inputs": inputs, "vmapped": vmapped, "compiled": compiled}


def modules(adapter: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions of a system that prunes modules."""

    def start(weights: Arrays, sparsity: float) -> tuple[nn.Module, Any]:
        return adapter.sparsify(linears(weights), sparsity, None)

    def read(model: nn.Module, handle: Any) -> Arrays:
        return [array(mask) != 0 for mask in adapter.masks(model, handle)]

    def effective(model: nn.Module) -> Arrays:
        found = (
            adapter.weights(model)
            if hasattr(adapter, "weights")
            else [x.weight for x in layers_of(model)]
        )
        return [array(x) for x in found]

    def masks(weights: Arrays, sparsity: float) -> Arrays:
        return read(*start(weights, sparsity))

    def twice(weights: Arrays, low: float, high: float) -> tuple[Arrays, Arrays]:
        model, handle = start(weights, low)
        first = read(model, handle)
        handle = adapter.again(model, handle, high) or handle
        return first, read(model, handle)

    def train(
        weights: Arrays,
        sparsity: float,
        kind: str,
        steps: int,
        save_at: int | None = None,
    ) -> list[tuple[Arrays, Arrays]]:
        model, x, own = linears(weights), data(weights), hasattr(adapter, "step")
        optimizer = optimizer_of(kind, model)

        def step(move: Callable[[], Any]) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            move()

        step(optimizer.step)  # dense, so that moments are not zero
        model, handle = adapter.sparsify(model, sparsity, optimizer)
        optimizer = (
            optimizer_of(kind, model)
            if hasattr(adapter, "NEW_OPTIMIZER")
            else optimizer
        )
        seen = [(read(model, handle), effective(model))]
        for i in range(steps):
            if i == save_at:
                model, handle, optimizer = reloaded(
                    weights, sparsity, kind, model, handle, optimizer
                )
            step(
                functools.partial(adapter.step, model, handle, optimizer)
                if own
                else optimizer.step
            )
            model(x)  # a hook or a parametrization makes the weights
            seen.append((read(model, handle), effective(model)))
        return seen

    def reloaded(
        weights: Arrays, sparsity: float, kind: str, *parts: Any
    ) -> tuple[nn.Module, Any, Any]:
        model, handle, optimizer = parts
        saved = (
            adapter.save(model, handle)
            if hasattr(adapter, "save")
            else model.state_dict()
        )
        torch.save((saved, optimizer.state_dict()), file := io.BytesIO())
        file.seek(0)
        saved, moments = torch.load(file, weights_only=False)
        model = linears([x[::-1].copy() for x in weights])
        optimizer = optimizer_of(kind, model)
        model, handle = adapter.sparsify(model, sparsity, optimizer)
        if hasattr(adapter, "load"):
            adapter.load(model, handle, saved)
        else:
            model.load_state_dict(saved)
        optimizer = (
            optimizer_of(kind, model)
            if hasattr(adapter, "NEW_OPTIMIZER")
            else optimizer
        )
        optimizer.load_state_dict(moments)
        return model, handle, optimizer

    def vmapped(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        x, models = (
            data(weights),
            [start([np.roll(w, i) for w in weights], sparsity)[0] for i in range(3)],
        )
        loop = [array(model(x)) for model in models]
        stacked = torch.func.stack_module_state(models)  # type: ignore[arg-type]
        together = torch.func.vmap(
            lambda *state: torch.func.functional_call(models[0], state, (x,))
        )(*stacked)
        return [*array(together)], loop

    def compiled(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        (model, handle), x = start(weights, sparsity), data(weights)
        fast = torch.compile(model, backend="eager", fullgraph=True)
        outputs = [(array(fast(x)), array(model(x)))]
        if hasattr(adapter, "again"):
            adapter.again(model, handle, 0.97)
            outputs.append((array(fast(x)), array(model(x))))
        fast_outputs, slow_outputs = zip(*outputs, strict=True)
        return [*fast_outputs], [*slow_outputs]

    def copied(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        (model, handle), x = start(weights, sparsity), data(weights)
        model(x).sum().backward()
        out, other = array(model(x)), copy.deepcopy(model)
        if hasattr(adapter, "again"):
            adapter.again(model, handle, 0.97)
        return [array(other(x))], [out]

    def keys(weights: Arrays, sparsity: float) -> tuple[list[str], list[str]]:
        return [*linears(weights).state_dict()], [
            *start(weights, sparsity)[0].state_dict()
        ]

    made = [masks, train, vmapped, compiled, copied, keys] + [twice] * hasattr(
        adapter, "again"
    )
    return {function.__name__: function for function in made}


def subject(adapter: ModuleType) -> SimpleNamespace:
    """An adapter as `laws.py` wants it."""
    made = (tensors if hasattr(adapter, "mask") else modules)(adapter)
    own = {
        name: value
        for name, value in vars(adapter).items()
        if name not in ("masks", "SimpleNamespace")
    }
    return SimpleNamespace(
        **{"rng": lambda: torch.get_rng_state().numpy().tobytes()} | made | own
    )
