"""Kernels in Triton for tensors on a GPU, with the bits of sparsefn: winners, draws,
steps, and the sweep of SparseGPT.

Where this package is installed they serve CUDA tensors: sparsefn finds them by an entry
point. `SPARSEFN_KERNELS=0` in the environment leaves them out. An import of this
package turns them on in any case. With `TRITON_INTERPRET=1` they then take CPU tensors:
Triton runs them in Python, slowly, for tests.
"""

from sparsefn._engine.backends import BACKENDS as _BACKENDS
from sparsefn_kernels.seams import DEVICE as _DEVICE
from sparsefn_kernels.seams import backends_for as backends_for
from sparsefn_kernels.seams import installed as _installed

_BACKENDS |= _installed(_DEVICE)
