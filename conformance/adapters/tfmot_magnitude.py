"""TF-MOT: `prune_low_magnitude` of a Keras model, by its schedules and its callback."""

from typing import Any

import tensorflow_model_optimization as tfmot

FRAMEWORK = "in_tf"
CALLBACK = tfmot.sparsity.keras.UpdatePruningStep
scope = tfmot.sparsity.keras.prune_scope


def wrap(model: Any, first: float, last: float | None, at: int) -> Any:
    if last is None:
        schedule = tfmot.sparsity.keras.ConstantSparsity(
            first, begin_step=at, end_step=at, frequency=1
        )
    else:
        schedule = tfmot.sparsity.keras.PolynomialDecay(
            first, last, begin_step=at, end_step=at + 1, frequency=1
        )
    return tfmot.sparsity.keras.prune_low_magnitude(model, schedule)


def masks(model: Any) -> list[Any]:
    return [mask for layer in model.layers for _, mask, _ in layer.pruning_vars]


def kernels(model: Any) -> list[Any]:
    return [weight for layer in model.layers for weight, _, _ in layer.pruning_vars]
