"""Published methods by name: short compositions of the library's parts, with the defaults of their papers."""

from sparsefn.methods.dynamic import rigl as rigl
from sparsefn.methods.dynamic import set as set
from sparsefn.methods.dynamic import snfs as snfs
from sparsefn.methods.learned import continuous_sparsification as continuous_sparsification
from sparsefn.methods.learned import edge_popup as edge_popup
from sparsefn.methods.learned import hard_concrete as hard_concrete
from sparsefn.methods.learned import movement as movement
from sparsefn.methods.learned import powerprop as powerprop
from sparsefn.methods.learned import soft_movement as soft_movement
from sparsefn.methods.learned import str_ as str_
from sparsefn.methods.semi_structured import asp as asp
from sparsefn.methods.semi_structured import sr_ste as sr_ste
from sparsefn.methods.structured import fpgm as fpgm
from sparsefn.methods.structured import proximal as proximal
from sparsefn.methods.structured import slimming as slimming
from sparsefn.methods.structured import taylor as taylor
from sparsefn.methods.trained import obd as obd
from sparsefn.methods.trained import obs as obs
from sparsefn.methods.trained import ria as ria
from sparsefn.methods.trained import sparsegpt as sparsegpt
from sparsefn.methods.trained import wanda as wanda
from sparsefn.methods.trained import woodfisher as woodfisher
