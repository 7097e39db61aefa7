"""Maps from latents to weights, for `reparametrised`."""

from sparsefn.reparam.base import Reparametrisation as Reparametrisation
from sparsefn.reparam.gates import chance_kept as chance_kept
from sparsefn.reparam.gates import hard_concrete as hard_concrete
from sparsefn.reparam.gates import sigmoid_gate as sigmoid_gate
from sparsefn.reparam.selections import faded as faded
from sparsefn.reparam.selections import soft_nm as soft_nm
from sparsefn.reparam.selections import soft_topk as soft_topk
from sparsefn.reparam.thresholds import power as power
from sparsefn.reparam.thresholds import soft_threshold as soft_threshold
