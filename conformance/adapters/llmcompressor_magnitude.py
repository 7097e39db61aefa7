"""llm-compressor: `MagnitudePruningModifier`, given the events of a training loop."""

from types import SimpleNamespace
from typing import Any

from in_torch import layers_of
from llmcompressor.core import Event, EventType, State
from llmcompressor.modifiers.pruning.magnitude import MagnitudePruningModifier
from torch import Tensor, nn


def sparsify(
    model: nn.Module, sparsity: float, optimizer: Any
) -> tuple[nn.Module, SimpleNamespace]:
    handle = SimpleNamespace(state=State(model=model), modifier=None)
    again(model, handle, sparsity)
    return model, handle


def masks(model: nn.Module, handle: SimpleNamespace) -> list[Tensor]:
    return [layer.get_buffer("mask") for layer in layers_of(model)]


def again(model: nn.Module, handle: SimpleNamespace, sparsity: float) -> None:
    if handle.modifier is not None:
        handle.modifier.finalize(handle.state)
    handle.modifier = MagnitudePruningModifier(
        targets=["Linear"],
        init_sparsity=sparsity,
        final_sparsity=sparsity,
        start=0,
        end=100,
    )
    handle.modifier.initialize(handle.state, save_masks=True)
    send(handle, EventType.OPTIM_POST_STEP)


def send(handle: SimpleNamespace, kind: EventType) -> None:
    handle.modifier.update_event(handle.state, Event(type_=kind))


def step(model: nn.Module, handle: SimpleNamespace, optimizer: Any) -> None:
    send(handle, EventType.OPTIM_PRE_STEP)
    optimizer.step()
    send(handle, EventType.OPTIM_POST_STEP)
