"""Published methods by name: short compositions of the library's parts, with the defaults of their papers."""

from sparsefn.methods.dynamic import rigl as rigl
from sparsefn.methods.dynamic import set as set
from sparsefn.methods.dynamic import snfs as snfs
