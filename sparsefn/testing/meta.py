"""The promises of an algorithm, which decide the laws that bind it, and the row of an algorithm under test."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from sparsefn.algorithms import dense
from sparsefn.algorithms.memory import Pruned
from sparsefn.budgets.distributions import Distribution, Global, uniform
from sparsefn.patterns.kinds import Pattern
from sparsefn.state import Algorithm, Level, Schedule, Score, Trigger, Where
from sparsefn.testing.oracle import ELEMENTS, Layout, computed_layout
from sparsefn.timing.schedules import constant
from sparsefn.timing.triggers import always
from sparsefn.tree import Tree
from sparsefn.tree.chosen import default_where


class Meta(NamedTuple):
    """The promises of an algorithm; laws read these flags and never a name.

    >>> meta = sf.testing.Meta(when=sf.every(2), choose=sf.scores.magnitude, monotone=True)
    >>> meta.needs_grads, meta.exact_count
    (False, True)

    How many are kept, and when:
    `exact_count`     as many as `level` says, to the unit, after init and after every trigger
    `global_budget`   that is the total over all leaves; else of every leaf, as `distribution` says
    `level`           the sparsity asked for -> the schedule that the counts follow
    `relative`        the sparsity is of what remains
    `when`            the steps at which masks may change
    `pattern`, `distribution`, `where`     as the algorithm has them

    Which ones:
    `start`           how the first mask comes about: "dense", "random", "magnitude" or "other"
    `choose`          the score whose best make the mask at a trigger
    `drop`, `grow`, `fraction`, `exclude`     scores and share of an exchange of weights, as in `sf.drop_grow`
    `conserves_count` an exchange leaves the counts as they are, and grown weights start at zero
    `monotone`        masks only shrink

    Masks depend on:
    `needs_grads`     gradients
    `stochastic`      the key; `redraws`: a new draw at every trigger
    `independent`     nothing but the leaf itself
    `scale_free`      not the scale of weights and gradients
    `permutes`        permuted weights without ties have permuted masks (a score must not tie where weights do not)

    Pruned weights, and the rest:
    `pruned`          weights off the mask are set to "zero", "keep" their values or "train" on
    `support`         the sparsity asked for -> the schedule of the sparsity of the weights that train, where these are
                      more than the mask and less than all (with pruned="train"); the others keep their bits
    `idle`            a step without a trigger leaves the state alone and does no tensor work
    `trains`          the tree that an optimizer moves: "params", or something else
    `optimizer`       it has an optimizer inside
    `baseline`        the algorithm that it equals at sparsity 0, bit for bit; None where the sparsity has no ends
    `tensor_sparsity` the sparsity may be a tensor
    """

    pattern: Pattern | Layout = ELEMENTS
    distribution: Distribution = uniform()
    where: Where = default_where
    exact_count: bool = True
    global_budget: bool = False
    level: Callable[[float], Schedule] = constant
    relative: bool = False
    when: Trigger = always()
    start: str = "other"
    choose: Score | None = None
    drop: Score | None = None
    grow: Score | None = None
    fraction: Schedule = constant(0.0)
    exclude: bool = False
    conserves_count: bool = False
    monotone: bool = False
    needs_grads: bool = False
    stochastic: bool = False
    redraws: bool = False
    independent: bool = True
    scale_free: bool = True
    permutes: bool = True
    pruned: Pruned = "zero"
    support: Callable[[float], Schedule] | None = None
    idle: bool = True
    trains: str = "params"
    optimizer: bool = False
    baseline: Callable[[], Algorithm] | None = dense
    tensor_sparsity: bool = True

    @property
    def layout(self) -> Layout:
        """The pattern as the oracle reads it."""
        return self.pattern if isinstance(self.pattern, Layout) else computed_layout(self.pattern)

    @property
    def joint(self) -> bool:
        """Whether all leaves meet in one competition."""
        return isinstance(self.distribution, Global)


class Row(NamedTuple):
    """An algorithm under test: `make(sparsity, key, params)` gives it, `reference` is where to import it from.

    >>> row = sf.testing.Row("static", lambda sparsity, key, params: sf.static(sparsity, key=key), sf.testing.Meta())
    >>> row.make(0.5, sf.random.key(0), {}).init({"w": torch.ones(2, 2)}).masks["w"].sum()
    tensor(2)
    """

    name: str
    make: Callable[[Level, Tensor, Tree], Algorithm]
    meta: Meta
    reference: str | None = None


def row_of(make_algorithm: Callable[..., Algorithm], meta: Meta = Meta()) -> Row:
    """The row of an algorithm as `check_laws` takes it.

    >>> row_of(lambda sparsity, key: sf.static(sparsity)).name
    '<lambda>'
    """
    if not isinstance(meta, Meta):
        raise TypeError(f"expected meta to be a sf.testing.Meta, got {type(meta).__name__}")
    meta = meta._replace(pattern=meta.layout)  # computing a layout takes a while
    return Row(_name(make_algorithm), _with_params(make_algorithm), meta, import_name(make_algorithm))


def import_name(make: Callable[..., object]) -> str | None:
    """`module:name` of a function that another process can import; None for a lambda or one made inside another.

    >>> import_name(sf.static), import_name(lambda: None)
    ('sparsefn.algorithms.static:static', None)
    """
    module, name = getattr(make, "__module__", "__main__"), getattr(make, "__qualname__", "<lambda>")
    return None if module == "__main__" or "<" in name else f"{module}:{name}"


def imported(target: str) -> Any:
    """What `module:name` names.

    >>> imported("sparsefn.algorithms.static:static") is sf.static
    True
    """
    module, _, name = target.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))


def _name(make: object) -> str:
    return str(getattr(make, "__name__", type(make).__name__))


def _with_params(make: Callable[..., Algorithm]) -> Callable[[Level, Tensor, Tree], Algorithm]:
    if not callable(make):
        raise TypeError(f"expected make_algorithm(sparsity, key), got {type(make).__name__}")
    signature = inspect.signature(make)
    free = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in free if p.default is p.empty]
    if len(needed) > 3 or len(free) < 2:
        expected = "expected make_algorithm to take (sparsity, key) or (sparsity, key, params)"
        raise TypeError(f"{expected}, got {_name(make)}{signature}")
    return make if len(needed) == 3 else partial(_without_params, make)


def _without_params(make: Callable[..., Algorithm], sparsity: Level, key: Tensor, params: Tree) -> Algorithm:
    return make(sparsity, key)


def given_function(row: Row) -> tuple[Callable[..., Algorithm], bool]:
    """The function that a row was made of, and whether it takes params.

    >>> given_function(row_of(lambda sparsity, key: sf.dense()))[1]
    False
    """
    make: object = row.make
    if isinstance(make, partial) and make.func is _without_params:
        return make.args[0], False
    return row.make, True
