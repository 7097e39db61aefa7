"""Kernels in Triton for tensors on a GPU, with the bits of sparsefn: winners, draws,
steps. Importing it turns them on.

With `TRITON_INTERPRET=1` in the environment they take CPU tensors instead: Triton then
runs them in Python, slowly, for tests.
"""

from sparsefn.engine.surroundings.backends import BACKENDS as _BACKENDS
from sparsefn_kernels.seams import DEVICE as _DEVICE
from sparsefn_kernels.seams import backends_for as backends_for

_BACKENDS |= backends_for(_DEVICE)
