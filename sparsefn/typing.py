"""The types in signatures, for the annotations of your own code.

>>> from sparsefn.typing import Score, Step, Tree
>>> def absolute(state: sf.State, grads: Tree, step: Step) -> Tree:
...     return sf.tree.map_with_path(lambda path, leaf: leaf.abs(), state.params)
>>> score: Score = absolute
"""

from sparsefn._engine.numbers import Real
from sparsefn.algorithms.drop_grow import Target
from sparsefn.algorithms.memory import Pruned
from sparsefn.algorithms.start import Init
from sparsefn.core.checks import Level, Schedule, Step
from sparsefn.core.state import PlainScore, Score, Term, Trigger, Where
from sparsefn.core.tree import Leaves, Tree
from sparsefn.masks.budgets.distributions import Distribution
from sparsefn.masks.patterns.kinds import Reduce
from sparsefn.masks.scores.data import Stats
from sparsefn.posttraining.curvature.derivatives import Loss

__all__ = [
    "Distribution",
    "Init",
    "Leaves",
    "Level",
    "Loss",
    "PlainScore",
    "Pruned",
    "Real",
    "Reduce",
    "Schedule",
    "Score",
    "Stats",
    "Step",
    "Target",
    "Term",
    "Tree",
    "Trigger",
    "Where",
]
__dir__ = __all__.copy
