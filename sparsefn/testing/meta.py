"""The promises of an algorithm, which decide the laws that bind it, and its row."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from sparsefn.algorithms import dense
from sparsefn.core.checks import call_of, check_keywords, shown
from sparsefn.core.schedules import constant
from sparsefn.core.state import Algorithm
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import always
from sparsefn.masks.budgets.distributions import Global, uniform
from sparsefn.masks.patterns.kinds import Pattern
from sparsefn.testing.oracle import ELEMENTS, Layout, computed_layout
from sparsefn.typing import (
    Distribution,
    Level,
    Pruned,
    Schedule,
    Score,
    Tree,
    Trigger,
    Where,
)


class Exchange(NamedTuple):
    """How weights are exchanged at a trigger: the arguments of `sf.drop_grow`.

    >>> exchange = sf.testing.Exchange(
    ...     sf.scores.magnitude, sf.scores.gradient, sf.schedules.constant(0.3)
    ... )
    >>> exchange.conserves
    True

    Attributes:
        drop: Score whose worst go.
        grow: Score whose best come. None where they are drawn.
        fraction: Schedule of the fraction of kept units that goes.
        exclude: Whether none comes back at once.
        conserves: Whether as many come as go, and start at zero.
    """

    drop: Score
    grow: Score | None = None
    fraction: Schedule = constant(0.0)
    exclude: bool = False
    conserves: bool = True

    def __repr__(self) -> str:
        return _named(self)


_WORDS: dict[str, tuple[object, ...]] = {
    "exact_count": (True, False, "total", "relative"),
    "start": ("dense", "random", "magnitude", "other"),
    "stochastic": (True, False, "anew"),
    "pruned": (None, "zero", "keep", "train"),
}


def _checked(make: Callable[..., Any]) -> Callable[..., Any]:
    """`Meta.__new__` or `Meta._replace`, which refuses a field that is gone, and says
    what to write instead.
    """

    @functools.wraps(make)
    def checked(self: Any, *args: Any, **fields: Any) -> Any:
        for name, value in fields.items():
            if value not in _WORDS.get(name, (value,)) and not callable(value):
                raise ValueError(
                    f"Meta: expected {name} to be one of {_WORDS[name]}, got {value!r}"
                )
        check_keywords("Meta", fields, self._fields)
        return make(self, *args, **fields)

    return checked


class Meta(NamedTuple):
    """The promises of an algorithm; laws read these flags and never a name.

    >>> meta = sf.testing.Meta(
    ...     when=sf.every(2), choose=sf.scores.magnitude, monotone=True
    ... )
    >>> meta.needs_grads, meta.exact_count
    (False, True)

    Attributes:
        when: Trigger: the steps at which masks may change.
        pattern: Pattern or `sf.testing.Layout`: what is kept or pruned as one.
        distribution: How many of each leaf are kept.
        where: Which leaves are sparsified.
        pruned: What becomes of weights off the mask: they are set to "zero", "keep"
            their values or "train" on. Where some of these train, a function from the
            sparsity asked for to the schedule of the sparsity of mask and trained
            weights together.
        level: Function from the sparsity asked for to the schedule that the counts
            follow.
        exact_count: Where counts hold to the unit, after init and every trigger. True:
            in every leaf, as `distribution` says; "total": over all leaves alone;
            "relative": the sparsity is of what remains; False: it says no count.
        start: How the first mask comes about: "dense", "random", "magnitude" or
            "other".
        choose: The score whose best make the mask at a trigger, or the
            `sf.testing.Exchange` of weights. None where nothing is said.
        monotone: Whether masks only shrink.
        needs_grads: Whether masks depend on gradients.
        stochastic: Whether masks depend on the key; "anew": by a new draw at every
            trigger.
        scale_free: Whether masks do not depend on the scale of weights and gradients.
        permutes: Whether permuted weights without ties have permuted masks (a score
            must not tie where weights do not).
        idle: Whether a step without a trigger leaves the state alone and does no tensor
            work, unless an optimizer is inside or latents are.
        baseline: Function that makes the algorithm that it equals at sparsity 0, bit
            for bit. None where the sparsity has no ends.

    Raises:
        TypeError: There is no such field; the text names the closest one.
        ValueError: A field has a word that it does not know.

    The call that made an algorithm of this library says the first five, where they are
    not declared. Else their defaults are every step, single weights, uniform,
    `sf.default_where` and zeros.
    """

    when: Trigger = always()
    pattern: Pattern | Layout = ELEMENTS
    distribution: Distribution = uniform()
    where: Where = default_where
    pruned: Pruned | Callable[[float], Schedule] | None = None
    level: Callable[[float], Schedule] = constant
    exact_count: bool | Literal["total", "relative"] = True
    start: Literal["dense", "random", "magnitude", "other"] = "other"
    choose: Score | Exchange | None = None
    monotone: bool = False
    needs_grads: bool = False
    stochastic: bool | Literal["anew"] = False
    scale_free: bool = True
    permutes: bool = True
    idle: bool = True
    baseline: Callable[[], Algorithm] | None = dense

    def __repr__(self) -> str:
        return _named(self)

    @property
    def layout(self) -> Layout:
        """The pattern as the oracle reads it."""
        if isinstance(self.pattern, Layout):
            return self.pattern
        return computed_layout(self.pattern)

    @property
    def score(self) -> Score | None:
        """The score whose best make the mask, where weights are not exchanged."""
        return None if isinstance(self.choose, Exchange) else self.choose

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of weights, where there is one."""
        return self.choose if isinstance(self.choose, Exchange) else None

    @property
    def joint(self) -> bool:
        """Whether all leaves meet in one competition."""
        return isinstance(self.distribution, Global)

    @property
    def total(self) -> bool:
        """Whether only the total over all leaves is promised."""
        return self.joint or self.exact_count == "total"

    @property
    def independent(self) -> bool:
        """Whether masks depend on nothing but the leaf itself: neither do its counts,
        then.
        """
        return not self.total and _by_leaf(self.distribution)

    @property
    def zeroes(self) -> bool:
        """Whether weights off the mask are zero."""
        return self.pruned in (None, "zero")

    @property
    def support(self) -> Callable[[float], Schedule] | None:
        """The sparsity of the weights that train, where these are more than the mask
        and less than all.
        """
        return self.pruned if callable(self.pruned) else None


setattr(Meta, "__new__", staticmethod(_checked(Meta.__new__)))  # noqa: B010 (a named tuple has no such methods to write)
setattr(Meta, "_replace", _checked(Meta._replace))  # noqa: B010


def declared(promises: Meta | Exchange) -> dict[str, object]:
    """The fields that differ from their defaults.

    >>> declared(sf.testing.Meta(start="dense", when=sf.every(2)))
    {'when': every(2), 'start': 'dense'}
    """
    defaults = type(promises)._field_defaults
    return {
        name: value
        for name, value in zip(promises._fields, promises, strict=True)
        if name not in defaults or not same(value, defaults[name])
    }


def _named(promises: Meta | Exchange) -> str:
    fields = [f"{name}={shown(value)}" for name, value in declared(promises).items()]
    return f"{type(promises).__name__}({', '.join(fields)})"


def same(a: object, b: object) -> bool:
    """Whether two declarations say the same.

    >>> same(sf.budgets.uniform(), sf.budgets.uniform())
    True
    """
    a, b = (x.pattern if isinstance(x, Layout) else x for x in (a, b))
    if call_of(a) is not None:
        return repr(a) == repr(b)
    return a == b


def _by_leaf(distribution: Distribution) -> bool:
    """Whether another leaf changes no count of a leaf.

    Where only some leaves have a count, it may.

    >>> _by_leaf(sf.budgets.uniform()), _by_leaf(sf.budgets.erk())
    (True, False)
    """
    shapes = {"t.w": (4, 6)}
    # The second one leaves a remainder, which some distributions share out.
    others = [({"a": (64, 64)}, 0.5), ({"z": (5, 7)}, 0.45)]
    try:
        return all(
            bool(
                distribution(shapes, sparsity)["t.w"]
                == distribution({**other, **shapes}, sparsity)["t.w"]
            )
            for other, sparsity in others
        )
    except ValueError:
        return False


class Row(NamedTuple):
    """An algorithm under test, which `make(sparsity, key, params)` gives.

    >>> row = sf.testing.Row(
    ...     "static",
    ...     lambda sparsity, key, params: sf.static(sparsity, key=key),
    ...     sf.testing.Meta(),
    ... )
    >>> row.make(0.5, sf.random.key(0), {}).init({"w": torch.ones(2, 2)}).masks[
    ...     "w"
    ... ].sum()
    tensor(2)

    Attributes:
        name: Name of the algorithm in reports and tests.
        make: The function that gives the algorithm.
        meta: What it promises.
        reference: Where another process imports a function that `check_laws` takes, as
            "module:name". Without it processes are not compared.
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
        raise TypeError(
            f"expected meta to be a sf.testing.Meta, got {type(meta).__name__}"
        )
    meta = meta._replace(pattern=meta.layout)  # computing a layout takes a while
    return Row(
        _name(make_algorithm),
        _with_params(make_algorithm),
        meta,
        import_name(make_algorithm),
    )


def import_name(make: Callable[..., object]) -> str | None:
    """`module:name` of a function that another process can import; None for a lambda or
    one made inside another.

    >>> import_name(sf.static), import_name(lambda: None)
    ('sparsefn.algorithms.static:static', None)
    """
    module = getattr(make, "__module__", "__main__")
    name = getattr(make, "__qualname__", "<lambda>")
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


def _with_params(
    make: Callable[..., Algorithm],
) -> Callable[[Level, Tensor, Tree], Algorithm]:
    if not callable(make):
        raise TypeError(
            f"expected make_algorithm(sparsity, key), got {type(make).__name__}"
        )
    signature = inspect.signature(make)
    free = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    needed = [p for p in free if p.default is p.empty]
    if len(needed) > 3 or len(free) < 2:
        expected = (
            "expected make_algorithm to take (sparsity, key) or (sparsity, key, params)"
        )
        raise TypeError(f"{expected}, got {_name(make)}{signature}")
    if len(needed) == 3:
        return make
    return partial(_without_params, make)


def _without_params(
    make: Callable[..., Algorithm],
    sparsity: Level,
    key: Tensor,
    params: Tree,
) -> Algorithm:
    return make(sparsity, key)
