"""Reports: what is planned, kept and changed, what that costs in time, outputs and
perplexity, numbers and pictures.
"""

from sparsefn.report.flop_count import Cost as Cost
from sparsefn.report.flop_count import Flops as Flops
from sparsefn.report.flop_count import flops
from sparsefn.report.latency import Latency as Latency
from sparsefn.report.latency import latency
from sparsefn.report.output_errors import OutputErrors as OutputErrors
from sparsefn.report.output_errors import output_errors
from sparsefn.report.perplexity import perplexity
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
    "output_errors",
    "perplexity",
    "plan",
    "plot",
    "plot_masks",
    "scalars",
    "summary",
]
__dir__ = __all__.copy
