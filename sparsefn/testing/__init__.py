"""Laws of sparse training algorithms, for the library's and for your own; needs Hypothesis."""

from sparsefn.testing import laws as laws
from sparsefn.testing import strategies as strategies
from sparsefn.testing.check import Broken as Broken
from sparsefn.testing.check import check_laws as check_laws
from sparsefn.testing.check import check_row as check_row
from sparsefn.testing.launches import Launches as Launches
from sparsefn.testing.laws import LAWS as LAWS
from sparsefn.testing.laws import Check as Check
from sparsefn.testing.laws import Law as Law
from sparsefn.testing.meta import Meta as Meta
from sparsefn.testing.meta import Row as Row
from sparsefn.testing.oracle import Layout as Layout
from sparsefn.testing.values import Case as Case
from sparsefn.testing.values import Form as Form
