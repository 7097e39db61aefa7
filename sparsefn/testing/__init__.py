"""Laws of sparse training algorithms, for the library's and for your own.

Needs Hypothesis.
"""

from sparsefn.testing import coverage, laws, strategies
from sparsefn.testing.byte_trees import Case, Form
from sparsefn.testing.check import Broken, check_laws, check_row
from sparsefn.testing.launches import Launches
from sparsefn.testing.laws import LAWS
from sparsefn.testing.laws import Check as Check
from sparsefn.testing.laws import Law as Law
from sparsefn.testing.meta import Exchange, Meta, Row
from sparsefn.testing.oracle import Layout
from sparsefn.testing.parametrize import parametrize_laws
from sparsefn.testing.passive import passive
from sparsefn.testing.report import Report
from sparsefn.testing.suggest import Suggestion
from sparsefn.testing.trial import Outcome

__all__ = [
    "LAWS",
    "Broken",
    "Case",
    "Exchange",
    "Form",
    "Launches",
    "Layout",
    "Meta",
    "Outcome",
    "Report",
    "Row",
    "Suggestion",
    "check_laws",
    "check_row",
    "coverage",
    "laws",
    "parametrize_laws",
    "passive",
    "strategies",
]
__dir__ = __all__.copy
