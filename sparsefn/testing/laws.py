"""The twelve laws: each a few checks that bind where an algorithm's `Meta` says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from sparsefn.core.tree.where import default_where
from sparsefn.masks.budgets.distributions import global_
from sparsefn.testing import laws_dependence as dependence
from sparsefn.testing import laws_ends as ends
from sparsefn.testing import laws_masks as masks
from sparsefn.testing import laws_states as states
from sparsefn.testing import laws_transforms as transforms
from sparsefn.testing.byte_trees import EVERY, EXACT, STEPS, Case
from sparsefn.testing.meta import Meta, Row
from sparsefn.testing.strategies import cases, large
from sparsefn.typing import Tree

__all__ = [
    "BOUNDS",
    "COMPILE",
    "CONSERVATION",
    "DETERMINISM",
    "EDGES",
    "EQUIVARIANCE",
    "EXACT_COUNT",
    "LAWS",
    "MONOTONICITY",
    "PURITY",
    "RESUME",
    "SELECTION_OPTIMALITY",
    "VMAP",
    "Check",
    "Law",
    "bound",
    "drawn",
]
__dir__ = __all__.copy


Declared = Mapping[str, Any]  # fields of Meta


class Check(NamedTuple):
    """One check of a law: a function that raises an error where the law does not hold.

    >>> check = sf.testing.laws.PURITY.checks[0]
    >>> check.name, check.binds(sf.testing.Meta())
    ('states_keep_their_structure', True)

    Attributes:
        run: Function of (row, case) that makes the check.
        binds: Function of a `Meta`: whether the check applies to the row.
        declare: Function of a `Meta`: what else it may say of an algorithm that fails
            the check, the stronger promises first.
        examples: Function of a `Meta` and params, or None, that gives the strategy of
            cases to try.
        share: Fraction of the examples asked for that it tries: most failures show
            early.
        hard: Whether `coverage` counts its cases. Other cases are easy on purpose.

    Raises:
        AssertionError: In `run`, the law does not hold.
    """

    run: Callable[[Row, Case], None]
    binds: Callable[[Meta], bool] = lambda meta: True
    declare: Callable[[Meta], Sequence[Declared]] = lambda meta: ()
    examples: Callable[[Meta, Tree], st.SearchStrategy[Case]] = lambda meta, like: (
        drawn(meta, like)
    )
    share: float = 0.25
    hard: bool = True

    @property
    def name(self) -> str:
        """The name of the function that checks it."""
        return self.run.__name__


class Law(NamedTuple):
    """A law by name, and the checks that make it up.

    >>> [law.name for law in sf.testing.LAWS][:3]
    ['exact_count', 'selection_optimality', 'monotonicity']

    Attributes:
        name: The name.
        checks: The checks.
    """

    name: str
    checks: tuple[Check, ...]


def drawn(
    meta: Meta,
    like: Tree = None,
    palettes: Sequence[str] | None = None,
    distinct: bool = False,
) -> st.SearchStrategy[Case]:
    """Runs for a row, over drawn trees that its pattern accepts or trees like `like`.

    >>> from hypothesis import find
    >>> find(
    ...     sf.testing.laws.drawn(sf.testing.Meta(), {"w": torch.ones(2, 2)}),
    ...     lambda case: True,
    ... ).params["w"].shape
    torch.Size([2, 2])

    Args:
        meta: Promises of the row, whose pattern says which trees are drawn.
        like: A tree whose structure, shapes and dtypes drawn trees have.
        palettes: As in `sf.testing.strategies.params_trees`. Default: all but "rare",
            and without "wild", whose sums round, where the pattern pools scores.
        distinct: Whether no two magnitudes are equal.

    Returns:
        A Hypothesis strategy of cases.
    """
    # Where a pattern pools scores, rounding would give the oracle other ties than the
    # library.
    default = EXACT if meta.layout.reduce is not None else EVERY
    return cases(meta.layout.form, palettes or default, distinct, like)


def _one(elements: int) -> Callable[[Meta, Tree], st.SearchStrategy[Case]]:
    return lambda meta, like: (
        st.just(large(meta.layout.form, elements))
        if like is None
        else drawn(meta, like)
    )


def _ends(meta: Meta) -> bool:
    last = max((step for step in range(STEPS) if meta.when(step)), default=0)
    return meta.baseline is not None and bool(meta.level(1.0)(last) == 1.0)


def _whole_units(meta: Meta) -> bool:
    return (
        meta.layout.reduce is not None
        and meta.layout.zeros is None
        and bool(meta.exact_count)
    )


def _or(*several: Declared, **one: Any) -> Callable[[Meta], Sequence[Declared]]:
    return lambda meta: several or (one,)


def _exchange(**field: Any) -> Callable[[Meta], Sequence[Declared]]:
    return lambda meta: (
        {"choose": meta.exchange and meta.exchange._replace(**field)},
        {"choose": None},
    )


def _real(meta: Meta) -> Sequence[Declared]:
    if meta.stochastic == "anew":
        once = [{"stochastic": True}]
    else:
        once = []
    return (*once, {"needs_grads": False}, {"stochastic": False})


def _elements(meta: Meta) -> bool:
    return (
        meta.layout.reduce is None
        and meta.layout.fixed is None
        and meta.layout.ungrouped
    )


_COUNTS = _or(
    {"start": "dense"},
    {"exact_count": "total"},
    {"start": "dense", "exact_count": "total"},
    {"start": "dense", "exact_count": "relative"},
    {"exact_count": False},
)
_CHECKS = {
    "exact_count": (
        Check(
            masks.counts_are_exact,
            lambda meta: bool(meta.exact_count),
            _COUNTS,
            share=1.0,
        ),
        Check(masks.units_are_whole, _whole_units),
        Check(masks.floors_are_respected, lambda meta: meta.joint),
    ),
    "selection_optimality": (
        Check(
            masks.the_best_are_kept,
            lambda meta: meta.score is not None or meta.start == "magnitude",
            _or(
                {"start": "other"}, {"choose": None}, {"start": "other", "choose": None}
            ),
            share=1.0,
        ),
        Check(
            masks.the_worst_are_exchanged,
            lambda meta: bool(meta.exchange),
            _exchange(exclude=True),
            share=1.0,
        ),
    ),
    "monotonicity": (
        Check(masks.masks_only_shrink, lambda meta: meta.monotone, _or(monotone=False)),
    ),
    "conservation": (
        Check(
            masks.exchanges_conserve,
            lambda meta: meta.exchange is not None and meta.exchange.conserves,
            _exchange(conserves=False),
        ),
    ),
    "purity": (
        Check(states.states_keep_their_structure),
        Check(states.functions_are_pure),
        Check(states.inputs_may_change_later, share=0.08),
    ),
    "determinism": (
        Check(states.runs_repeat, share=0.2),
        Check(states.threads_do_not_matter, examples=_one(40_000)),
        Check(states.memory_does_not_matter, share=0.08),
        Check(states.modes_and_settings_do_not_matter, share=0.08),
        Check(
            dependence.order_of_sums_is_fixed,
            lambda meta: bool(meta.layout.reduce),
            examples=_one(300),
            share=0.04,
        ),
        Check(states.processes_do_not_matter, examples=_one(150), share=0.04),
        Check(states.steps_may_be_tensors),
        Check(
            dependence.gradients_matter_where_declared,
            lambda meta: not meta.needs_grads,
            _or(needs_grads=True),
        ),
        Check(
            dependence.keys_matter_where_declared,
            lambda meta: not meta.stochastic,
            _or(stochastic=True),
        ),
        Check(
            dependence.declared_dependence_is_real,
            lambda meta: meta.needs_grads or bool(meta.stochastic),
            _real,
            _one(150),
        ),
    ),
    "vmap_is_a_loop": (
        Check(transforms.vmap_is_a_loop, share=0.2),
        Check(transforms.nested_vmap_is_two_loops, share=0.08),
    ),
    "compile_is_eager": (
        Check(transforms.compiling_changes_nothing, examples=_one(150), share=0.04),
        Check(
            transforms.one_compiled_update_serves_two_models,
            examples=_one(150),
            share=0.04,
        ),
    ),
    "equivariance": (
        Check(
            dependence.leaves_are_independent,
            lambda meta: meta.independent,
            _or({"distribution": global_()}, {"exact_count": "total"}),
        ),
        Check(
            dependence.scale_does_not_matter,
            lambda meta: meta.scale_free,
            _or(scale_free=False),
            lambda meta, like: drawn(meta, like, EXACT),
        ),
        Check(
            dependence.names_do_not_matter,
            lambda meta: not meta.stochastic,
            _or(stochastic=True),
        ),
        Check(
            dependence.permutations_commute,
            lambda meta: meta.permutes and _elements(meta),
            _or(permutes=False),
            lambda meta, like: drawn(meta, like, distinct=True),
            hard=False,
        ),
    ),
    "bounds": (
        Check(dependence.levels_stay_in_bounds),
        Check(
            dependence.nothing_happens_between_triggers,
            lambda meta: not all(meta.when(step) for step in range(STEPS)),
            _or(idle=False),
        ),
    ),
    "edges": (
        Check(
            ends.sparsity_zero_is_dense,
            lambda meta: meta.baseline is not None,
            _or(baseline=None),
        ),
        Check(ends.sparsity_one_is_empty, _ends, _or(baseline=None)),
        Check(
            ends.nothing_to_sparsify_is_dense,
            lambda meta: meta.where is default_where,
            share=0.08,
        ),
        Check(
            ends.pruned_weights_are_zero,
            declare=_or({"pruned": "keep"}, {"pruned": "train"}),
        ),
        Check(
            ends.nothing_moves_off_the_support,
            lambda meta: meta.support is not None,
            _or(pruned="train"),
        ),
    ),
    "resume": (
        Check(states.runs_resume),
        Check(
            ends.outside_optimizers_cannot_revive,
            lambda meta: meta.pruned in (None, "zero", "keep"),
            _or(pruned="train"),
        ),
    ),
}
LAWS = tuple(Law(name, checks) for name, checks in _CHECKS.items())
EXACT_COUNT, SELECTION_OPTIMALITY, MONOTONICITY, CONSERVATION, PURITY, DETERMINISM = (
    LAWS[:6]
)
VMAP, COMPILE, EQUIVARIANCE, BOUNDS, EDGES, RESUME = LAWS[6:]


def bound(meta: Meta, laws: Sequence[Law] = LAWS) -> Iterator[tuple[Law, Check]]:
    """The checks that bind an algorithm of these promises, with their laws.

    >>> sorted(
    ...     {
    ...         law.name
    ...         for law, _ in sf.testing.laws.bound(
    ...             sf.testing.Meta(monotone=True), sf.testing.LAWS[:4]
    ...         )
    ...     }
    ... )
    ['exact_count', 'monotonicity']

    Args:
        meta: The promises.
        laws: The laws whose checks are looked at. Default: all.

    Returns:
        An iterator over (law, check).
    """
    return ((law, check) for law in laws for check in law.checks if check.binds(meta))
