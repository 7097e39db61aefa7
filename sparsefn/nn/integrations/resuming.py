"""What the callbacks share: which algorithm runs, and whether saved masks fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from sparsefn._engine.processes import is_sharded
from sparsefn.core.checks import uncalled
from sparsefn.core.state import Algorithm
from sparsefn.nn.modules.wrappers import tensors_by_name

Source = Algorithm | Callable[[int], Algorithm]
Saved = Mapping[str, Any]  # the state_dict() of what attach returned

__all__: list[str] = []
__dir__ = __all__.copy


def check_source(algorithm: object) -> None:
    """Raise TypeError for what is no algorithm, nor a function of the steps to one.

    >>> check_source(sf.rigl(0.9))
    """
    if not isinstance(algorithm, Algorithm) and (
        uncalled(algorithm) or not callable(algorithm)
    ):
        got = uncalled(algorithm) or type(algorithm).__name__
        raise TypeError(
            "SparsityCallback: expected an Algorithm such as sf.rigl(0.9), or a "
            f"function of the number of steps that returns one, got {got}"
        )


def made(algorithm: Source, steps: Callable[[], int]) -> Algorithm:
    """The algorithm for a run of so many steps, which are asked for where it is a
    function of them.

    >>> made(lambda steps: sf.rigl(0.9, steps=steps), lambda: 100)
    rigl(0.9, steps=100)
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    return algorithm(steps())


def check_plain_model(model: nn.Module) -> None:
    """Raise ValueError for a model of DTensors, of which a process saves a part alone.

    >>> check_plain_model(torch.nn.Linear(2, 1))
    """
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                "SparsityCallback: expected plain tensors, got a DTensor at "
                f"{name!r}: call sf.attach in a loop of your own, and save as "
                "docs/distributed.md has it"
            )


def check_same_run(model: nn.Module, saved: Saved, step: int) -> None:
    """Raise ValueError for saved masks that prune weights which are not zero, or are of
    another step.

    >>> layer = torch.nn.Linear(2, 1)
    >>> sparse = sf.attach(
    ...     sf.static(0.5, where="weight"),
    ...     layer,
    ...     torch.optim.SGD(layer.parameters(), lr=0.1),
    ... )
    >>> check_same_run(layer, sparse.state_dict(), -1)
    """
    if saved["step"] != step:
        raise ValueError(
            f"SparsityCallback: expected masks of step {step}, got masks of step "
            f"{saved['step']}"
        )
    for name, weight in tensors_by_name(model).items():
        mask = saved["tensors"].get(f"masks.{name}")
        if (
            mask is not None
            and mask.shape == weight.shape
            and bool((weight.detach() != 0)[~mask.to(weight.device)].any())
        ):
            raise ValueError(
                f"SparsityCallback: the saved mask of {name!r} prunes weights that "
                "are not zero in the model: masks and weights are of two runs"
            )
