"""Dynamic sparse training: the masks move while the weights train."""

from __future__ import annotations

from sparsefn.algorithms import rigl as rigl
from sparsefn.algorithms import set as set
from sparsefn.algorithms import snfs as snfs
