"""Published methods by name: short compositions of the library's parts, with the defaults of their papers."""

from sparsefn.methods.at_start import force as force
from sparsefn.methods.at_start import grasp as grasp
from sparsefn.methods.at_start import snip as snip
from sparsefn.methods.at_start import synflow as synflow
from sparsefn.methods.dynamic import granet as granet
from sparsefn.methods.dynamic import mest as mest
from sparsefn.methods.dynamic import rigl as rigl
from sparsefn.methods.dynamic import set as set
from sparsefn.methods.dynamic import snfs as snfs
from sparsefn.methods.dynamic import top_kast as top_kast
from sparsefn.methods.fan_in import srigl as srigl
from sparsefn.methods.gradual import ac_dc as ac_dc
from sparsefn.methods.gradual import gmp as gmp
from sparsefn.methods.lottery import imp as imp
from sparsefn.methods.rewiring import chts as chts
from sparsefn.methods.rewiring import deep_rewiring as deep_rewiring
from sparsefn.methods.rewiring import dsr as dsr
