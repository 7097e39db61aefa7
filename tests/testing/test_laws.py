"""The table of laws: which check binds whom."""

import sparsefn as sf
from sparsefn.testing.laws import bound

TWELVE = [
    "exact_count",
    "selection_optimality",
    "monotonicity",
    "conservation",
    "purity",
    "determinism",
    "vmap_is_a_loop",
    "compile_is_eager",
    "equivariance",
    "bounds",
    "edges",
    "resume",
]


def names(**flags):
    return {check.name for _, check in bound(sf.testing.Meta(**flags))}


def test_there_are_twelve_laws_and_no_check_has_the_name_of_another():
    assert [law.name for law in sf.testing.LAWS] == TWELVE
    checks = [check.name for law in sf.testing.LAWS for check in law.checks]
    assert len(set(checks)) == len(checks)


def test_flags_say_what_binds():
    plain = names()
    assert "counts_are_exact" in plain
    assert names(exact_count=False) == plain - {"counts_are_exact"}
    assert names(monotone=True) == plain | {"masks_only_shrink"}
    exchange = sf.testing.Exchange(sf.scores.magnitude)
    assert names(choose=exchange) == plain | {
        "exchanges_conserve",
        "the_worst_are_exchanged",
    }
    assert names(choose=exchange._replace(conserves=False)) == plain | {
        "the_worst_are_exchanged"
    }
    assert names(needs_grads=True) == (plain - {"gradients_matter_where_declared"}) | {
        "declared_dependence_is_real"
    }
    assert (
        names(exact_count="total")
        == names(distribution=sf.budgets.erk())
        == plain - {"leaves_are_independent"}
    )
    assert names(pruned="train") == plain - {"outside_optimizers_cannot_revive"}
    supported = {"nothing_moves_off_the_support"}
    assert names(pruned=sf.schedules.constant) == names(pruned="train") | supported
    assert names(baseline=None) == plain - {
        "sparsity_zero_is_dense",
        "sparsity_one_is_empty",
    }
    assert names(choose=sf.scores.magnitude) == plain | {"the_best_are_kept"}
    assert names(when=sf.every(2)) == plain | {"nothing_happens_between_triggers"}
    assert names(distribution=sf.budgets.global_()) == names(exact_count="total") | {
        "floors_are_respected"
    }


def test_patterns_say_what_binds():
    assert "units_are_whole" in names(pattern=sf.patterns.channel(0))
    assert "permutations_commute" in names()
    for pattern in (
        sf.patterns.nm(1, 2),
        sf.patterns.channel(0),
        sf.patterns.out_groups(2),
    ):
        assert "permutations_commute" not in names(pattern=pattern)
