"""Counts and competitions across leaves and groups, through the public API."""

import pytest
import torch

import sparsefn as sf

P = sf.patterns


def kept(algorithm, params, grads=None, step=0):
    state = algorithm.update(algorithm.init(params), params if grads is None else grads, step)
    return {path: mask for path, mask in state.masks.items() if mask.ndim}


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.55, 0.9, 1.0])
@pytest.mark.parametrize("pattern", [P.out_groups(2), P.in_groups(4), P.row_balanced()], ids=repr)
def test_groups_split_the_count_of_the_leaf_evenly(pattern, sparsity):
    params = {"w": torch.rand(6, 8, generator=torch.Generator().manual_seed(0))}
    mask = kept(sf.one_shot(sparsity, pattern=pattern), params)["w"]
    blocks = {2: mask.reshape(2, 24), 4: mask.reshape(6, 4, 2).transpose(0, 1).reshape(4, 12)}
    groups = blocks[2] if "out" in repr(pattern) else blocks[4] if "in_" in repr(pattern) else mask
    counts = groups.sum(1).tolist()
    assert sum(counts) == sf.budgets.n_kept(48, sparsity)
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    "pattern,units", [(P.block((2, 2)), 6), (P.channel(0), 3), (P.channel(1), 4), (P.kernel(), 12)], ids=repr
)
def test_counts_are_of_units(pattern, units):
    params = {"w": torch.rand(3, 4, 2, 2) if "kernel" in repr(pattern) else torch.rand(3, 4)}
    if "block" in repr(pattern):
        params = {"w": torch.rand(3, 6)}
    for sparsity in (0.25, 0.5, 0.8):
        mask = kept(sf.one_shot(sparsity, pattern=pattern), params)["w"]
        from sparsefn.boxes import to_rows

        assert int(to_rows(pattern, mask, lambda unit: unit.any(-1)).sum()) == sf.budgets.n_kept(units, sparsity)


def test_global_competition_of_units_and_dtypes():
    params = {"a": torch.tensor([[3.0, 3.0], [1.0, 1.0]]), "b": torch.tensor([[2.0], [4.0]], dtype=torch.float64)}
    masks = kept(sf.one_shot(0.5, pattern=P.channel(0, norm=float("inf")), distribution=sf.budgets.global_()), params)
    assert masks["a"].tolist() == [[True, True], [False, False]] and masks["b"].tolist() == [[False], [True]]


def test_global_drop_and_grow_keep_the_total_and_the_bounds():
    generator = torch.Generator().manual_seed(0)
    params = {
        path: torch.randn(4, 5, generator=generator) * scale for path, scale in (("a", 9.0), ("b", 1.0), ("c", 0.1))
    }
    grads = {path: torch.randn(4, 5, generator=generator) / p.abs().mean() for path, p in params.items()}
    algorithm = sf.rigl(
        0.5, drop_fraction=0.4, distribution=sf.budgets.global_(floor=0.2, ceiling=0.7), init="magnitude"
    )
    state = algorithm.init(params)
    for step in range(6):
        counts = [int(mask.sum()) for mask in state.masks.values()]
        assert sum(counts) == 30 and all(4 <= n <= 14 for n in counts)
        state = algorithm.update(state, {path: g * (-1) ** step for path, g in grads.items()}, step)


def test_nm_fixes_the_sparsity():
    params = {"w": torch.rand(2, 8)}
    assert int(kept(sf.one_shot(0.5, pattern=P.nm(2, 4)), params)["w"].sum()) == 8
    for make in (sf.static, sf.one_shot, sf.rigl, sf.gmp):
        with pytest.raises(ValueError, match=r"nm\(2, 4, axis=-1\) fixes the sparsity at 0.5, got 0.9"):
            make(0.9, pattern=P.nm(2, 4)).init(params)


def test_a_group_pattern_under_vmapped_sparsities():
    params = {"w": torch.rand(4, 6, generator=torch.Generator().manual_seed(1))}
    sparsities = torch.tensor([0.0, 0.4, 0.75, 1.0], dtype=torch.float64)

    def masks(sparsity):
        algorithm = sf.one_shot(sparsity, pattern=P.row_balanced())
        return algorithm.update(algorithm.init(params), params, 0).masks["w"]

    want = torch.stack([masks(float(s)) for s in sparsities])
    assert torch.equal(torch.func.vmap(masks)(sparsities), want)
