"""What a system of JAX is asked, made of what its adapter says:

prune(params, sparsity) -> params, masks        trees of arrays
mask(x, sparsity) -> mask                       the function below it
optimizer(inner, sparsity) -> optimizer, after  optax's, which prunes in its second
                                                step; `after(params, state)`
masks_of(state) -> masks                        of that optimizer's state
"""

import copy
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Arrays = list[np.ndarray]


def tree(weights: Arrays) -> dict[str, Any]:
    """A chain of linear layers."""
    return {str(i): jnp.asarray(x) for i, x in enumerate(weights)}


def arrays(params: dict[str, Any]) -> Arrays:
    """Its weights."""
    return [np.asarray(params[key]) for key in sorted(params)]


def subject(adapter: ModuleType) -> SimpleNamespace:
    """An adapter as `laws.py` wants it."""

    def kept(found: dict[str, Any]) -> Arrays:
        return [x != 0 for x in arrays(found)]

    def masks(weights: Arrays, sparsity: float) -> Arrays:
        return kept(adapter.prune(tree(weights), sparsity)[1])

    def twice(weights: Arrays, low: float, high: float) -> tuple[Arrays, Arrays]:
        params, first = adapter.prune(tree(weights), low)
        return kept(first), kept(adapter.prune(params, high)[1])

    def inputs(weights: Arrays, sparsity: float) -> Arrays:
        params = tree(weights)
        adapter.prune(params, sparsity)
        return arrays(params)

    def train(
        weights: Arrays,
        sparsity: float,
        kind: str,
        steps: int,
        save_at: int | None = None,
    ) -> Any:
        inner = optax.adam(0.05) if kind == "adam" else optax.sgd(0.05, momentum=0.9)
        optimizer, after = adapter.optimizer(
            optax.chain(optax.add_decayed_weights(0.1), inner), sparsity
        )
        x = jnp.sin(jnp.linspace(-1, 1, 8 * weights[0].shape[1])).reshape(8, -1)
        params, seen = tree(weights), []
        state = optimizer.init(params)
        for step in range(steps + 2):
            if step == save_at:
                params, state = pickle.loads(pickle.dumps((params, state)))
            grads = jax.grad(lambda p: jnp.square(x @ p["0"].T @ p["1"].T).mean())(
                params
            )
            updates, state = optimizer.update(grads, state, params)
            params = after(optax.apply_updates(params, updates), state)
            seen.append((kept(adapter.masks_of(state)), arrays(params)))
        return seen[1:]  # dense before

    def vmapped(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        stack = jnp.stack([jnp.roll(weights[0], i) for i in range(3)])
        loop = [np.asarray(adapter.mask(x, sparsity)) for x in stack]
        return [*np.asarray(jax.vmap(lambda x: adapter.mask(x, sparsity))(stack))], loop

    def compiled(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        fast = jax.jit(lambda x: adapter.mask(x, sparsity))
        return [np.asarray(fast(weights[0]))], [
            np.asarray(adapter.mask(weights[0], sparsity))
        ]

    def copied(weights: Arrays, sparsity: float) -> tuple[Arrays, Arrays]:
        params = adapter.prune(tree(weights), sparsity)[0]
        return arrays(copy.deepcopy(params)), arrays(params)

    def keys(weights: Arrays, sparsity: float) -> tuple[list[str], list[str]]:
        return [*tree(weights)], [*adapter.prune(tree(weights), sparsity)[0]]

    made = (masks, twice, inputs, train, vmapped, compiled, copied, keys)
    return SimpleNamespace(**{function.__name__: function for function in made})
