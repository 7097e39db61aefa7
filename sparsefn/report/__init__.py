"""Reports: tables of what is planned, kept and changed, numbers to log, FLOPs of a model, and pictures."""

from sparsefn.report.flop_count import Cost as Cost
from sparsefn.report.flop_count import Flops as Flops
from sparsefn.report.flop_count import flops
from sparsefn.report.latency import Latency as Latency
from sparsefn.report.latency import latency
from sparsefn.report.picture import braille
from sparsefn.report.plan import plan
from sparsefn.report.plots import plot, plot_masks
from sparsefn.report.scalars import itop, scalars
from sparsefn.report.summary import Change as Change
from sparsefn.report.summary import Changes as Changes
from sparsefn.report.summary import Observed as Observed
from sparsefn.report.summary import Row as Row
from sparsefn.report.summary import Summary as Summary
from sparsefn.report.summary import changed, observe, summary

__all__ = [
    "braille",
    "changed",
    "flops",
    "itop",
    "latency",
    "observe",
    "plan",
    "plot",
    "plot_masks",
    "scalars",
    "summary",
]
__dir__ = __all__.copy
