"""Reports: tables of what is planned, kept and changed, numbers to log, FLOPs of a model, and pictures."""

from sparsefn.report.flop_count import Cost as Cost
from sparsefn.report.flop_count import Flops as Flops
from sparsefn.report.flop_count import flops as flops
from sparsefn.report.picture import braille as braille
from sparsefn.report.plan import plan as plan
from sparsefn.report.plots import plot as plot
from sparsefn.report.plots import plot_masks as plot_masks
from sparsefn.report.scalars import itop as itop
from sparsefn.report.scalars import scalars as scalars
from sparsefn.report.summary import Change as Change
from sparsefn.report.summary import Changes as Changes
from sparsefn.report.summary import Observed as Observed
from sparsefn.report.summary import Row as Row
from sparsefn.report.summary import Summary as Summary
from sparsefn.report.summary import changed as changed
from sparsefn.report.summary import observe as observe
from sparsefn.report.summary import summary as summary
