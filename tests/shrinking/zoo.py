"""A zoo of small models in the style of known families, each with an example to call it
with.

`MODELS[name]()` makes one: in eval mode, in float64, always the same, with biases,
norms and statistics drawn at random, so that nothing is 0 or 1 by chance.
"""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import nn

Made = tuple[nn.Module, tuple | dict]
MODELS: dict[str, Callable[[], Made]] = {}
PARTS = (
    "zoo_convnets",
    "zoo_gates",
    "zoo_shapes",
    "zoo_attention",
    "zoo_sequences",
    "zoo_own_code",
    "zoo_products",
    "zoo_hugging",
)


def in_the_zoo(build: Callable[[], Made]) -> Callable[[], Made]:
    """Enters a factory of a model and its example under its name."""

    @functools.wraps(build)
    def made() -> Made:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return settled(*build())

    MODELS[build.__name__.replace("_", " ")] = made
    return made


def settled(model: nn.Module, example: tuple | dict) -> Made:
    """The model in eval mode and float64 with every number drawn at random, and the
    example in float64.
    """
    model = model.eval().double()
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_var"):
                x.uniform_(0.5, 1.5)
            elif name.endswith("running_mean"):
                x.normal_(0, 0.3)
            elif isinstance(x, nn.Parameter):
                x.copy_(
                    torch.randn(x.shape) * 0.3 + (0 if "bias" in name else 1)
                    if x.ndim < 2
                    else spread(x)
                )
    parts = example.items() if isinstance(example, dict) else enumerate(example)
    doubled = {
        k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for k, x in parts
    }
    return model, doubled if isinstance(example, dict) else tuple(doubled.values())


def spread(x: torch.Tensor) -> torch.Tensor:
    """Weights that keep the size of what they are multiplied with."""
    return torch.randn(x.shape) / max(x[0].numel(), 1) ** 0.5


def image(
    channels: int = 3, size: int = 8, batch: int = 2, dims: int = 2
) -> torch.Tensor:
    return torch.randn(batch, channels, *[size] * dims)


for part in PARTS:
    importlib.import_module(f"tests.shrinking.{part}")
