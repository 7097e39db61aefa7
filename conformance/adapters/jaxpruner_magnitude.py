"""JaxPruner: `MagnitudePruning`, at once for masks, and around an optax optimizer for
training.
"""

import functools
from typing import Any

import jax.numpy as jnp
import jaxpruner

FRAMEWORK = "in_jax"


def updater(sparsity: float, schedule: Any) -> Any:
    distribution = functools.partial(
        jaxpruner.sparsity_distributions.uniform, sparsity=sparsity
    )
    return jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=distribution, scheduler=schedule
    )


def prune(params: dict[str, Any], sparsity: float) -> tuple[Any, Any]:
    return updater(
        sparsity, jaxpruner.sparsity_schedules.NoUpdateSchedule()
    ).instant_sparsify(params)


def mask(x: Any, sparsity: float) -> Any:
    return updater(sparsity, None).topk_fn(jnp.abs(x), sparsity)


def optimizer(inner: Any, sparsity: float) -> tuple[Any, Any]:
    rule = updater(
        sparsity, jaxpruner.sparsity_schedules.OneShotSchedule(target_step=1)
    )
    return rule.wrap_optax(inner), rule.post_gradient_update


def masks_of(state: Any) -> Any:
    return state.masks
