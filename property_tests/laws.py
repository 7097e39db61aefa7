"""The table of laws: what each one is tried on, and which rows it binds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from property_tests import laws_masks as masks
from property_tests import laws_state as states
from property_tests.meta import Meta, Row
from property_tests.oracle import ELEMENTS
from property_tests.strategies import EVERY, EXACT, STEPS, Case, cases, large


class Law(NamedTuple):
    """`check(row, case)` raises where a row breaks the law; `binds(meta)` says for which rows it is one."""

    check: Callable[[Row, Case], None]
    binds: Callable[[Meta], bool] = lambda meta: True
    examples: Callable[[Meta], st.SearchStrategy[Case]] = lambda meta: drawn(meta)
    share: float = 0.25  # of the profile's examples for each row; there are some fifty rows

    @property
    def name(self) -> str:
        return self.check.__name__


def drawn(meta: Meta, palettes: Sequence[str] | None = None, **options: Any) -> st.SearchStrategy[Case]:
    # Where a pattern reduces, rounding would make the oracle's ties others than the library's.
    default = EXACT if meta.layout.reduce is not None else EVERY
    return cases(meta.layout.form, palettes or default, **options)


def _ends(meta: Meta) -> bool:
    last = max((step for step in range(STEPS) if meta.when(step)), default=0)
    return meta.baseline is not None and meta.level(1.0)(last) == 1.0


LAWS = [
    Law(masks.counts_are_exact, lambda meta: meta.counts != "", share=1.0),
    Law(masks.units_are_whole, lambda meta: meta.layout.reduce is not None and meta.counts != ""),
    Law(masks.the_best_are_kept, lambda meta: meta.choose is not None or meta.start == "magnitude", share=1.0),
    Law(masks.the_worst_are_exchanged, lambda meta: meta.drop is not None, share=1.0),
    Law(masks.masks_only_shrink, lambda meta: meta.monotone and meta.trains == "params"),
    Law(masks.exchanges_conserve, lambda meta: meta.conserves),
    Law(masks.nothing_happens_between_triggers, lambda meta: not all(meta.when(step) for step in range(STEPS))),
    Law(masks.gradients_matter_where_declared, lambda meta: not meta.needs_grads),
    Law(masks.keys_matter_where_declared, lambda meta: not meta.stochastic),
    Law(
        masks.declared_dependence_is_real,
        lambda meta: meta.needs_grads or meta.stochastic,
        lambda meta: st.just(large(meta.layout.form)),
    ),
    Law(masks.leaves_are_independent, lambda meta: meta.independent),
    Law(masks.scale_does_not_matter, lambda meta: meta.scale_free, lambda meta: drawn(meta, EXACT)),
    Law(masks.names_do_not_matter, lambda meta: not meta.stochastic),
    Law(
        masks.permutations_commute,
        lambda meta: meta.permutes and meta.trains == "params" and meta.layout is ELEMENTS,
        lambda meta: drawn(meta, distinct=True),
    ),
    Law(states.states_keep_their_structure),
    Law(states.functions_are_pure),
    Law(states.runs_repeat, share=0.2),
    Law(states.threads_do_not_matter, examples=lambda meta: st.just(large(meta.layout.form, 40_000))),
    Law(states.steps_may_be_tensors),
    Law(states.vmap_is_a_loop, share=0.2),
    Law(states.nested_vmap_is_two_loops, share=0.08),
    Law(states.runs_resume),
    Law(states.pruned_weights_are_zero),
    Law(
        states.outside_optimizers_cannot_revive,
        lambda meta: meta.trains == "params" and meta.pruned != "train",
    ),
    Law(states.sparsity_zero_is_dense, lambda meta: meta.baseline is not None),
    Law(states.sparsity_one_is_empty, _ends),
]

# Compiling takes seconds, so this one is tried on a few rows, once.
SLOW = [
    Law(
        states.compiling_changes_nothing,
        lambda meta: meta.layout.reduce is None,
        lambda meta: st.just(large(meta.layout.form)),
    )
]
