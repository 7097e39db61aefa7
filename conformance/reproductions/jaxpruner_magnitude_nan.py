import functools

import jax.numpy as jnp
import jaxpruner

uniform = functools.partial(jaxpruner.sparsity_distributions.uniform, sparsity=0.25)
pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=uniform)
params = {"w": jnp.array([[float("nan"), float("nan"), 2.0, 3.0]])}
mask = pruner.instant_sparsify(params)[1]["w"]
assert mask.tolist()[0][2:] == [1, 1], mask.tolist()
