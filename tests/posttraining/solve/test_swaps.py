"""Better masks of the same counts: `swaps`."""

import importlib
import re
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf

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


def best_swap(weight, hessian, mask, width):
    """The mask after the best swap of one row by trying all, or None."""
    (now,) = errors(weight, hessian, mask)
    best = None
    for p, q in product(range(mask.shape[1]), repeat=2):
        if bool(mask[0, p]) and not bool(mask[0, q]) and p // width == q // width:
            new = mask.clone()
            new[0, p], new[0, q] = False, True
            (error,) = errors(weight, hessian, new)
            if best is None or error < best[0] - 1e-9 * now:
                best = (error, new)
    return best[1] if best is not None and best[0] < now * (1 - 1e-9) else None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 4, 8]), st.integers(0, 8))
def test_each_swap_is_the_best_of_all(seed, width, n_kept):
    weight, hessian = layer(1, 8, seed)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(1, 8 // width, width, generator=generator).argsort(-1)
    mask = (order < min(n_kept, width)).reshape(1, 8)
    pattern = nm(min(n_kept, width), width) if min(n_kept, width) else None
    expected = mask
    if pattern is None:
        pattern, width = sf.patterns.row_balanced(), 8
    for most in range(4):
        got = swaps(weight, hessian, mask, pattern, most=most)
        assert torch.equal(got, expected), most
        new = best_swap(weight, hessian, expected, width)
        expected = expected if new is None else new


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


def test_parts_of_rows_have_the_bits_of_all_rows(monkeypatch):
    module = importlib.import_module("sparsefn.posttraining.solve.swaps")
    weight, hessian = layer(7, 12)
    mask = weight > 0
    whole = swaps(weight, hessian, mask)
    monkeypatch.setattr(module, "AT_ONCE", 300)
    assert torch.equal(swaps(weight, hessian, mask), whole)


def test_vmap_is_a_loop_and_compiled_code_calls_it():
    weight, hessian = layer(6, 8)
    weights = weight.reshape(2, 3, 8)
    masks = weights > 0
    together = torch.vmap(lambda w, m: swaps(w, hessian, m))(weights, masks)
    for w, m, new in zip(weights, masks, together, strict=True):
        assert torch.equal(swaps(w, hessian, m), new)
    compiled = torch.compile(swaps, backend="eager", fullgraph=True)
    assert torch.equal(compiled(weights[0], hessian, masks[0]), together[0])


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
            {"pattern": sf.patterns.channel()},
            "swaps: expected a pattern of single weights whose groups lie inside rows",
        ),
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
