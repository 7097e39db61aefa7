"""Better masks of the same counts: `swaps`."""

import importlib
import math
import re
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn._engine.sums import Pooling
from sparsefn.masks.patterns.units import units_of

swaps, nm = sf.solve.swaps, sf.patterns.nm


def layer(rows, columns, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * columns, columns, generator=generator, dtype=torch.float64)
    x[:, 1:] += 0.7 * x[:, :-1]
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight.to(dtype), (x.T @ x).to(dtype)


def errors(weight, hessian, mask):
    """The error of each row under a mask, in float64."""
    change = weight.double().masked_fill(mask, 0.0)
    return (change @ hessian.double() * change).sum(1)


def parts_of(pattern, shape):
    """The unit and the group of each entry, and the band of each row, as arrays.

    Where all units compete, a group is a row of units.
    """
    units = units_of(pattern, shape)
    grid = np.arange(math.prod(units.grid)).reshape(units.grid)
    groups = np.indices(units.grid)
    groups = [at // size for at, size in zip(groups, units.group, strict=True)]
    group = groups[0] * units.grid[1] + groups[1]
    in_rows = units.grid[1] > 1 or pattern.elementwise
    if in_rows and units.group == units.grid:
        group = grid // units.grid[1]
    rows = np.arange(shape[0]) // units.unit[0]
    columns = np.arange(shape[1]) // units.unit[1]
    unit = grid[rows][:, columns]
    group = group[rows][:, columns]
    band = np.arange(shape[0])
    for row in range(1, shape[0]):
        if np.isin(group[row], group[:row]).any():
            band[row] = band[row - 1]
    return unit, group, band


def left_of_units(weight, hessian, mask, pattern):
    """The entries that stay where each unit is pruned."""
    left = np.zeros(weight.shape, bool)
    if not pattern.partial:
        return left
    unit, _, _ = parts_of(pattern, weight.shape)
    scores = weight.double().square() * hessian.double().diagonal()
    for one in np.unique(unit):
        entries = [*zip(*np.nonzero(unit == one), strict=True)]
        if mask.numpy()[unit == one].all():
            best = sorted(entries, key=lambda at: -scores[at])  # a stable order
            stays = best[: max(len(entries) - pattern.zeros, 0)]
        else:
            stays = [at for at in entries if mask[at]]
        for at in stays:
            left[at] = True
    return left


def step(weight, hessian, mask, pattern, left):
    """The mask after the best swap of each band, which is found by trying all."""
    unit, group, band = parts_of(pattern, weight.shape)
    w = weight.double().numpy()
    h = hessian.double().numpy()
    new = mask.numpy().copy()
    may = units_of(pattern, weight.shape).allowed
    for rows in (band == one for one in np.unique(band)):
        flags = {u: mask.numpy()[unit == u].all() for u in np.unique(unit[rows])}
        group_of = {u: group[unit == u][0] for u in flags}
        if may is not None:
            flags = {u: kept for u, kept in flags.items() if may.flatten()[u]}
        tried = [new.copy()]
        for p, q in product(flags, flags):
            if flags[p] and not flags[q] and group_of[p] == group_of[q]:
                swapped = mask.numpy().copy()
                swapped[unit == p] = left[unit == p]
                swapped[unit == q] = True
                tried.append(swapped)
        lost = [np.where(kept, 0.0, w)[rows] for kept in tried]
        error = [(d @ h * d).sum() for d in lost]
        new[rows] = tried[int(np.argmin(error))][rows]  # the first of equal ones
    return torch.from_numpy(new)


# Units of 2 x 2 in groups of 2 x 2 units, which no function makes.
SQUARES = sf.patterns.Pattern(
    "squares", lambda shape: (2, 2), lambda grid: (2, 2), Pooling("sum")
)
PATTERNS = {
    "unstructured": (sf.patterns.unstructured(), (3, 6)),
    "rows": (sf.patterns.row_balanced(), (3, 6)),
    "nm": (nm(2, 4), (2, 8)),
    "nm, n a tensor": (nm(torch.tensor(2), 4), (2, 8)),
    "kernel": (sf.patterns.kernel(), (2, 6)),
    "columns": (sf.patterns.row_balanced(axis=1), (4, 3)),
    "nm, axis 0": (nm(2, 4, axis=0), (8, 3)),
    "inputs": (sf.patterns.in_groups(2), (3, 6)),
    "outputs": (sf.patterns.out_groups(2), (4, 4)),
    "blocks": (sf.patterns.block((2, 2)), (4, 8)),
    "partial blocks": (sf.patterns.block((2, 3)), (5, 8)),
    "flat blocks": (sf.patterns.block((1, 2)), (3, 9)),
    "rows whole": (sf.patterns.channel(0), (6, 4)),
    "rows whole, of gates": (sf.patterns.channel(0, groups=2), (8, 3)),
    "columns whole": (sf.patterns.channel(1), (4, 7)),
    "columns whole, grouped": (sf.patterns.channel(1, groups=2), (3, 8)),
    "blocks as high as the weight": (sf.patterns.block((9, 2)), (3, 9)),
    "diagonals": (sf.patterns.nearly_diagonal(3), (4, 5)),
    "groups of blocks": (SQUARES, (8, 8)),
    "half blocks": (sf.patterns.block((1, 3), zeros=2), (3, 8)),
    "half blocks of rows": (sf.patterns.block((2, 2), zeros=3), (5, 8)),
}
AT = st.sampled_from([*PATTERNS])


def start(pattern, shape, seed):
    """A mask that keeps about half of the units."""
    unit, _, _ = parts_of(pattern, shape)
    generator = torch.Generator().manual_seed(seed)
    if pattern.partial:
        scores = torch.rand(shape, generator=generator)
        return sf.masks.topk_mask(scores, int(unit.max()) // 2, pattern=pattern)
    flags = torch.rand(int(unit.max()) + 1, generator=generator) < 0.5
    return flags[torch.from_numpy(unit)]


def whole_numbers(rows, columns, seed):
    """A layer whose errors are exact, with many equal ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (columns + 2, columns), generator=generator).double()
    weight = torch.randint(-2, 3, (rows, columns), generator=generator)
    return weight.float(), (x.T @ x).float()


@settings(max_examples=50, deadline=None)
@given(AT, st.integers(0, 10**6))
def test_each_swap_is_the_best_of_all(name, seed):
    pattern, shape = PATTERNS[name]
    weight, hessian = whole_numbers(*shape, seed)
    mask = expected = start(pattern, shape, seed)
    left = left_of_units(weight, hessian, mask, pattern)
    for most in range(4):
        got = swaps(weight, hessian, mask, pattern, most=most)
        assert torch.equal(got, expected), most
        expected = step(weight, hessian, expected, pattern, left)


@settings(max_examples=50, deadline=None)
@given(AT, st.integers(0, 10**6))
def test_units_of_each_group_stay_as_many_and_no_band_gets_worse(name, seed):
    pattern, shape = PATTERNS[name]
    weight, hessian = layer(*shape, seed)
    mask = start(pattern, shape, seed)
    before = mask.clone()
    new = swaps(weight, hessian, mask, pattern)
    assert torch.equal(mask, before)
    assert new.data_ptr() != mask.data_ptr()
    assert new.is_contiguous()
    unit, group, band = parts_of(pattern, shape)
    counts = {}
    for one in np.unique(unit):
        was = mask.numpy()[unit == one]
        now = new.numpy()[unit == one]
        assert pattern.partial or now.all() or not now.any()
        more = int(now.all()) - int(was.all())
        at = group[unit == one][0]
        counts[at] = counts.get(at, 0) + more
    assert not any(counts.values())
    old = np.bincount(band, errors(weight, hessian, mask))
    assert (np.bincount(band, errors(weight, hessian, new)) <= old).all()
    if not pattern.partial:  # of units that were pruned, other weights can go now
        assert torch.equal(swaps(weight, hessian, new, pattern), new)


@pytest.mark.parametrize("name", PATTERNS)
def test_all_or_nothing_stays(name):
    pattern, shape = PATTERNS[name]
    weight, hessian = layer(*shape)
    for mask in (weight == weight, weight != weight):
        assert torch.equal(swaps(weight, hessian, mask, pattern), mask)


@pytest.mark.parametrize("name", PATTERNS)
def test_any_number_of_products_at_once_gives_one_mask(name, monkeypatch):
    module = importlib.import_module("sparsefn.posttraining.solve.swaps")
    pattern, (rows, columns) = PATTERNS[name]
    shape = (3 * rows, columns)
    weight, hessian = layer(*shape, 7)
    mask = start(pattern, shape, 7)
    whole = swaps(weight, hessian, mask, pattern)
    for at_once in (1, 100, 1000):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        assert torch.equal(swaps(weight, hessian, mask, pattern), whole), at_once


@pytest.mark.parametrize("name", PATTERNS)
def test_vmap_is_a_loop(name):
    pattern, shape = PATTERNS[name]
    weight, hessian = layer(2 * shape[0], shape[1])
    weights = weight.reshape(2, *shape)
    masks = torch.stack([start(pattern, shape, seed) for seed in range(2)])
    together = torch.vmap(lambda w, m: swaps(w, hessian, m, pattern))(weights, masks)
    for w, m, new in zip(weights, masks, together, strict=True):
        assert torch.equal(swaps(w, hessian, m, pattern), new)


@pytest.mark.parametrize("name", ["rows", "outputs", "diagonals", "half blocks"])
def test_compiled_code_calls_it(name):
    pattern, shape = PATTERNS[name]
    weight, hessian = layer(*shape)
    mask = start(pattern, shape, 0)
    compiled = torch.compile(swaps, backend="eager", fullgraph=True)
    expected = swaps(weight, hessian, mask, pattern)
    assert torch.equal(compiled(weight, hessian, mask, pattern), expected)


def test_whole_rows_with_the_largest_errors_are_kept():
    weight, hessian = layer(8, 5)
    mask = torch.arange(8)[:, None].expand(8, 5) < 3
    new = swaps(weight, hessian, mask, sf.patterns.channel(0))
    of_rows = errors(weight, hessian, torch.zeros_like(mask))
    best = sf.masks.topk_mask(of_rows, 3)
    assert torch.equal(new, best[:, None].expand(8, 5))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_counts_stay_and_no_row_gets_worse(seed, rows, columns, dtype):
    weight, hessian = layer(rows, columns, seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=generator) < 0.5
    before = mask.clone()
    new = swaps(weight, hessian, mask)
    assert torch.equal(mask, before) and new.data_ptr() != mask.data_ptr()
    assert torch.equal(new.sum(1), mask.sum(1))
    old_errors = errors(weight, hessian, mask)
    assert (errors(weight, hessian, new) <= old_errors).all()
    again = swaps(weight, hessian, new)
    assert torch.equal(again, new)  # nothing is left to swap
    whole = swaps(weight, hessian, mask, sf.patterns.unstructured())
    assert torch.equal(whole, new)


def test_equal_pairs_go_by_the_lowest_columns():
    weight = torch.ones(1, 4)
    mask = torch.tensor([[True, True, False, False]])
    hessian = torch.diag(torch.tensor([1.0, 1.0, 2.0, 2.0]))
    one = swaps(weight, hessian, mask, most=1)
    assert one.tolist() == [[False, True, True, False]]
    assert swaps(weight, hessian, mask).tolist() == [[False, False, True, True]]


def test_groups_keep_their_counts_and_get_better():
    weight, hessian = layer(16, 32)
    mask = sf.masks.topk_mask(weight.abs(), None, pattern=nm(2, 4))
    new = swaps(weight, hessian, mask, nm(2, 4))
    assert (new.reshape(16, 8, 4).sum(-1) == 2).all()
    total = errors(weight, hessian, new).sum()
    assert total < 0.9 * errors(weight, hessian, mask).sum()


def test_rows_may_keep_other_numbers_and_nothing_or_all():
    weight, hessian = layer(4, 6)
    mask = torch.arange(6) < torch.tensor([[0], [2], [5], [6]])
    new = swaps(weight, hessian, mask)
    assert new.sum(1).tolist() == [0, 2, 5, 6]
    for row in range(4):  # each row is worked on by itself
        alone = swaps(weight[row : row + 1], hessian, mask[row : row + 1])
        assert torch.equal(alone[0], new[row])
    assert swaps(torch.ones(0, 6), hessian, mask[:0]).shape == (0, 6)
    assert swaps(torch.ones(2, 0), torch.ones(0, 0), mask[:2, :0]).shape == (2, 0)


def test_a_model_gets_better_masks():
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    x = torch.randn(64, 8)
    stats = sf.calibration.inputs(model, None, x)
    params = sf.modules.params_of(model)
    where = ["0.weight", "1.weight"]
    pruned = sf.one_shot(0.5, pattern=sf.patterns.row_balanced(), where=where)
    state = pruned.update(pruned.init(params), params, 0)
    fn = sf.solve.layerwise(stats, lambda w, h, m: (w, swaps(w, h, m)))
    refine = sf.rewrite(fn, where=where)
    start = sf.from_masks(state.masks).init(params)
    new = refine.update(start, params, 0)
    for path in where:
        old_mask, mask = state.masks[path], new.masks[path]
        assert torch.equal(old_mask.sum(1), mask.sum(1))
        gram = stats[path]["gram"]
        old = errors(params[path], gram, old_mask)
        assert (errors(params[path], gram, mask) <= old).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"most": -1}, "swaps: expected most >= 0, got -1"),
        ({"mask": torch.ones(2, 4)}, "swaps: expected a bool mask of shape (2, 4)"),
        ({"hessian": torch.eye(3)}, "swaps: expected a hessian of shape (4, 4)"),
        ({"weight": torch.full((2, 4), torch.nan)}, "swaps: expected a finite weight"),
        (
            {"pattern": sf.patterns.transposable(1, 2)},
            "swaps: expected a pattern whose units are kept or pruned one by one, got "
            "transposable(1, 2)",
        ),
        (
            {"pattern": sf.patterns.tied([["a", 0], ["b", 1]])},
            "swaps: expected a pattern of one weight, got tied(",
        ),
        (
            {
                "pattern": sf.patterns.block((1, 3)),
                "mask": torch.tensor([[True, True, False, True], [True] * 4]),
            },
            "swaps: expected a mask that keeps or prunes each unit whole, got one that "
            "keeps 1 of 4 in part",
        ),
        ({"pattern": nm(1, 3)}, "expected axis -1 divisible by 3, got shape (2, 4)"),
    ],
)
def test_what_does_not_fit_is_refused(change, text):
    given = {
        "weight": torch.ones(2, 4),
        "hessian": torch.eye(4),
        "mask": torch.ones(2, 4) > 0,
    }
    with pytest.raises(ValueError, match=re.escape(text)):
        swaps(**(given | change))


def test_a_pattern_is_asked_for():
    with pytest.raises(TypeError, match="swaps: expected pattern to be one such as"):
        swaps(torch.ones(2, 4), torch.eye(4), torch.ones(2, 4) > 0, "nm(2, 4)")


def test_parts_of_units_are_refused_in_each_member():
    masks = torch.tensor([[[True, True]], [[True, False]]])
    pattern = sf.patterns.block((1, 2))
    with pytest.raises(ValueError, match="keeps 1 of 1 in part"):
        torch.vmap(lambda m: swaps(torch.ones(1, 2), torch.eye(2), m, pattern))(masks)


def test_nan_is_refused_in_each_member():
    weights = torch.tensor([[[1.0, 2.0]], [[torch.nan, 1.0]]])
    mask = torch.tensor([[True, False]])
    for pattern in (None, sf.patterns.block((1, 2), zeros=1)):
        with pytest.raises(ValueError, match="swaps: expected a finite weight"):
            torch.vmap(lambda w, p=pattern: swaps(w, torch.eye(2), mask, p))(weights)
