"""sparsefn: `attach` for modules; `init` and `update` for functions of tensors."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from in_torch import modules, optimizer_of, tensors
from torch import Tensor, nn

import sparsefn as sf

Arrays = list[np.ndarray]


def sparsify(model: nn.Module, sparsity: float, optimizer: Any) -> Any:
    algorithm = sf.gmp(sparsity, when=sf.never())
    optimizer = optimizer or optimizer_of("sgd", model)
    return model, sf.attach(algorithm, model, optimizer, hooks=True)


def masks(model: nn.Module, attached: Any) -> list[Tensor]:
    return [*attached.masks.values()]


def again(model: nn.Module, attached: Any, sparsity: float) -> Any:
    params = attached.state.params
    grads = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
    state = sf.gmp(sparsity).update(attached.state, grads, 0)
    attached.detach()
    return sf.attach(sf.from_masks(state.masks), model, optimizer_of("sgd", model))


def save(model: nn.Module, attached: Any) -> tuple[Any, Any]:
    return model.state_dict(), attached.state_dict()


def load(model: nn.Module, attached: Any, saved: tuple[Any, Any]) -> None:
    model.load_state_dict(saved[0])
    attached.load_state_dict(saved[1])


def both(name: str) -> Any:
    of_modules, of_tensors = modules(ADAPTER)[name], tensors(ADAPTER)[name]
    return lambda *given: tuple(
        [*a, *b] for a, b in zip(of_modules(*given), of_tensors(*given), strict=True)
    )


ADAPTER: Any = SimpleNamespace(
    sparsify=sparsify,
    masks=masks,
    again=again,
    mask=lambda w, s: sf.gmp(s).init({"w": w}).masks["w"],
)
inputs = tensors(ADAPTER)["inputs"]
vmapped = both("vmapped")
compiled = both("compiled")
