"""What an algorithm says of itself, so that nobody declares it: by its call, by its
state, by what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from sparsefn.core.checks import Call, shown
from sparsefn.core.random import key
from sparsefn.core.state import Algorithm, State, update_of
from sparsefn.masks.budgets.distributions import Global
from sparsefn.testing.byte_trees import Case
from sparsefn.testing.harness import algorithm_of, check_made
from sparsefn.testing.meta import Meta, Row, same
from sparsefn.testing.oracle import computed_layout
from sparsefn.testing.strategies import large
from sparsefn.typing import Distribution, Tree, Trigger

_SAID = ("when", "pattern", "distribution", "where", "pruned")


def run_of(row: Row, params: Tree = None) -> Case:
    """One fixed run of a row, over these params where there are any.

    >>> row = sf.testing.Row(
    ...     "dense", lambda sparsity, key, params: sf.dense(), sf.testing.Meta()
    ... )
    >>> run_of(row, {"w": torch.tensor([1.0, 2.0])}).grads[0]
    {'w': tensor([2., 1.])}
    """
    run = large(row.meta.layout.form)
    if params is None:
        return run
    other = optree.tree_map(lambda x: x.flip(0) if x.ndim else -x, params)
    return run._replace(params=params, grads=(other, params, other))


def completed(row: Row, params: Tree = None) -> Row:
    """The row with what the call of its algorithm says of the fields that its promises
    leave open.

    >>> row = sf.testing.Row(
    ...     "gmp", lambda s, key, params: sf.gmp(s, when=sf.every(2)), sf.testing.Meta()
    ... )
    >>> completed(row).meta.when
    every(2)

    ValueError where they say something else, TypeError where it is no algorithm.
    """
    run = run_of(row, params)
    try:
        algorithm = row.make(run.sparsity, key(run.seed), run.params)
    except Exception:  # the checks tell of it
        return row
    check_made(row.name, algorithm)
    return row._replace(meta=completed_meta(row.name, row.meta, algorithm))


def completed_meta(name: str, meta: Meta, algorithm: Algorithm) -> Meta:
    """The promises of one algorithm, as `completed` has them.

    >>> completed_meta(
    ...     "mine", sf.testing.Meta(when=sf.at([1])), sf.gmp(0.5, when=sf.every(2))
    ... )
    Traceback (most recent call last):
        ...
    ValueError: mine: Meta says when=at([1]), but the algorithm was made with
    when=every(2); leave it out of Meta
    """
    new: dict[str, Any] = {}
    for field, value in said_by(algorithm).items():
        own = getattr(meta, field)
        plain = Meta._field_defaults[field]
        if own is plain:
            new |= {} if field == "pattern" and same(value, plain) else {field: value}
        elif _DIFFER.get(field, lambda own, value: False)(own, value):
            raise ValueError(
                f"{name}: Meta says {field}={shown(own)}, but the algorithm was made "
                f"with {field}={shown(value)}; leave it out of Meta"
            )
    if "pattern" in new:
        new["pattern"] = computed_layout(new["pattern"])  # which takes a while
    return meta._replace(**new)


def said_by(algorithm: Algorithm, names: Sequence[str] = _SAID) -> dict[str, Any]:
    """Arguments of the call that made an algorithm.

    For one around another, they are of the call of that.

    >>> said_by(
    ...     sf.with_terms(
    ...         sf.gmp(0.5, when=sf.every(2), pruned="keep"), sf.terms.l2(0.1)
    ...     )
    ... )["pruned"]
    'keep'
    """
    recipe = update_of(algorithm).recipe
    found: dict[str, Any] = (
        {} if recipe is None or "when" not in names else {"when": recipe.when}
    )  # of `steps=`
    # The outer call goes before one inside it.
    for call in (algorithm.made_of, algorithm.made_by):
        named = call.arguments() if isinstance(call, Call) else {}
        inside = [value for value in named.values() if isinstance(value, Algorithm)]
        if inside:
            said = said_by(inside[0], names)
        else:
            said = {name: named.get(name) for name in names}
        found |= {name: value for name, value in said.items() if value is not None}
    return found


def _fires_otherwise(one: Trigger, other: Trigger) -> bool:
    return any(bool(one(step)) != bool(other(step)) for step in range(100))


def _counts_otherwise(one: Distribution, other: Distribution) -> bool:
    if isinstance(one, Global) or isinstance(other, Global):
        return one != other
    shapes = {"a": (64, 64), "b": (4, 6)}
    return bool(one(shapes, 0.5) != other(shapes, 0.5))


# Patterns and choices of leaves may be written in other ways.
_DIFFER: dict[str, Callable[[Any, Any], bool]] = {
    "when": _fires_otherwise,
    "distribution": _counts_otherwise,
    "pruned": lambda one, other: not callable(one) and one != other,
}


def takes_tensor(row: Row, case: Case) -> bool:
    """Whether the sparsity that a row is made with may be a tensor of a batch: one that
    reads its value takes none.

    >>> row = sf.testing.Row(
    ...     "mine", lambda s, key, params: sf.static(float(s)), sf.testing.Meta()
    ... )
    >>> takes_tensor(row, sf.testing.strategies.large())
    False
    """
    batch = torch.tensor([case.sparsity], dtype=torch.float64, device="cpu")
    try:
        torch.vmap(
            lambda sparsity: (
                row.make(sparsity, key(case.seed), case.params),
                sparsity,
            )[1]
        )(batch)
    except Exception:
        return False
    return True


def first_state(row: Row) -> State:
    """A first state of a row.

    >>> first_state(
    ...     sf.testing.Row(
    ...         "dense", lambda sparsity, key, params: sf.dense(), sf.testing.Meta()
    ...     )
    ... ).opt
    ()
    """
    run = run_of(row)
    return algorithm_of(row, run).init(run.params)


def learned(state: State) -> set[str]:
    """Which trees of a state train in the place of its params: "latent", "learned".

    >>> (
    ...     learned(sf.supermask(0.5).init({"w": torch.ones(2, 2)})),
    ...     learned(sf.dense().init({})),
    ... )
    ({'learned'}, set())
    """
    return {role for role in ("latent", "learned") if role in state.scores}.union(
        *map(learned, state.parts)
    )
