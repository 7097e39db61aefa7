"""What a system of Keras models is asked, made of what its adapter says:

wrap(model, first, last, at) -> model     pruned in the training step `at` and, unless
                                          `last` is None, again in the next
CALLBACK                                  the class of the callback that training needs
masks(model), kernels(model) -> variables
scope() -> context                        in which a pruned model can be made of its
                                          config, by a load or a copy

A step is a call in training, or a batch in `fit`, of an epoch of its own.
"""

import copy
import tempfile
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras
from tensorflow.python.eager import context

Arrays = list[np.ndarray]

SHAPES = ((20, 10), (10, 10))  # those of the laws as kernels, (in, out)
tf.random.set_seed(0)  # so that there is a generator of the seeds of operations


def dense(weights: Arrays) -> Any:
    """A chain of linear layers with these kernels."""
    model = keras.Sequential([keras.Input(weights[0].shape[:1])])
    for i, x in enumerate(weights):
        model.add(
            keras.layers.Dense(
                x.shape[1], use_bias=False, kernel_initializer="zeros", name=f"dense{i}"
            )
        )
    model.set_weights(weights)
    return model


def data(weights: Arrays) -> Any:
    """A batch for it."""
    width = weights[0].shape[0]
    return tf.reshape(tf.sin(tf.linspace(-1.0, 1.0, 8 * width)), (8, width))


def optimizer_of(kind: str) -> Any:
    """An optimizer whose steps move weights that have no gradient."""
    if kind == "adam":
        return keras.optimizers.Adam(0.05, weight_decay=0.1)
    return keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1)


def rng() -> bytes:
    """Both of the framework's global generators."""
    return (
        tf.random.get_global_generator().state.numpy().tobytes()
        + repr(context.context()._rng.getstate()).encode()
    )


def subject(adapter: ModuleType) -> SimpleNamespace:
    """An adapter as `laws.py` wants it."""

    def started(weights: Arrays, first: float, last: float | None = None) -> Any:
        model, callback = (
            adapter.wrap(dense(weights), first, last, 1),
            adapter.CALLBACK(),
        )
        callback.set_model(model)
        callback.on_train_begin()
        return model

    def pruned(weights: Arrays, sparsity: float) -> Any:
        model = started(weights, sparsity)
        model(data(weights), training=True)
        return model

    def kept(model: Any) -> Arrays:
        return [x.numpy() != 0 for x in adapter.masks(model)]

    def masks(weights: Arrays, sparsity: float) -> Arrays:
        return kept(pruned(weights, sparsity))

    def twice(weights: Arrays, low: float, high: float) -> tuple[Arrays, Arrays]:
        model, x = started(weights, low, high), data(weights)
        model(x, training=True)
        first = kept(model)
        model(x, training=True)
        return first, kept(model)

    def train(
        weights: Arrays,
        sparsity: float,
        kind: str,
        steps: int,
        save_at: int | None = None,
    ) -> Any:
        model, x, seen = (
            adapter.wrap(dense(weights), sparsity, None, 2),
            data(weights),
            [],
        )
        model.compile(optimizer_of(kind), loss="mse")
        for step in range(steps + 2):
            if step == save_at:
                model = reloaded(model)
            model.fit(
                x,
                tf.zeros_like(x[:, :10]),
                batch_size=8,
                verbose=0,
                callbacks=[adapter.CALLBACK()],
            )
            model(x)
            seen.append((kept(model), [w.numpy() for w in adapter.kernels(model)]))
        return seen[1:]  # dense before

    def reloaded(model: Any) -> Any:
        with tempfile.NamedTemporaryFile(suffix=".h5") as file, adapter.scope():
            model.save(file.name, include_optimizer=True)
            return keras.models.load_model(file.name)

    def compiled(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        x, found = data(weights), []
        for wrap in (tf.function, lambda function: function):
            model = started(weights, sparsity, 0.97)
            step = wrap(lambda x, model=model: model(x, training=True))
            found.append([step(x).numpy(), *kept(model), step(x).numpy(), *kept(model)])
        return found[0], found[1]

    def copied(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        model, x = started(weights, sparsity, 0.97), data(weights)
        model(x, training=True)
        out = model(x).numpy()
        with adapter.scope():
            other = copy.deepcopy(model)
        model(x, training=True)
        return [other(x).numpy()], [out]

    def keys(weights: Arrays, sparsity: float) -> tuple[list[str], list[str]]:
        return [w.name for w in dense(weights).weights], [
            w.name for w in pruned(weights, sparsity).weights
        ]

    made = (masks, twice, train, compiled, copied, keys, rng)
    return SimpleNamespace(
        SHAPES=SHAPES, **{function.__name__: function for function in made}
    )
