"""SparseGPT: `obs`."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn.posttraining.solve import sparsegpt, sweep
from sparsefn.testing.launches import counted

nm, obs, refit = sf.patterns.nm, sf.solve.obs, sf.solve.refit


def layer(rows=4, columns=12, seed=0, samples=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples or 2 * columns, columns, generator=generator, dtype=dtype)
    x[:, 1:] += 0.7 * x[:, :-1]
    return torch.randn(rows, columns, generator=generator, dtype=dtype), x.T @ x


def error(new, weight, hessian):
    return float(((new - weight) @ hessian * (new - weight)).sum())


def column_by_column(weight, hessian, mask):
    """The paper's loop on a given mask: the new weights, and the sum of the squared
    errors.
    """
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    w, total = weight.clone(), 0.0
    for j in range(len(hessian)):
        e = torch.where(mask[:, j], 0.0, w[:, j]) / upper[j, j]
        w[:, j:] -= e[:, None] * upper[j, j:]
        total += float(e.square().sum())
    return torch.where(mask, w, 0.0), total


seeds = st.integers(0, 10**6)


@settings(max_examples=30, deadline=None)
@given(
    seeds,
    st.integers(1, 40),
    st.sampled_from([1, 2, 5, 8, 40, 128]),
    st.floats(0.0, 1.0),
)
def test_error_is_the_sum_of_the_squared_errors_of_the_columns(
    seed, columns, block, share
):
    weight, hessian = layer(3, columns, seed)
    new, mask = obs(weight, hessian, keep=share, block=block, damp=0.0)
    expected, total = column_by_column(weight, hessian, mask)
    torch.testing.assert_close(new, expected, rtol=1e-6, atol=1e-8)
    assert error(new, weight, hessian) == pytest.approx(total, rel=1e-6, abs=1e-9)
    assert int(mask.sum()) == sf.budgets.n_kept(weight.numel(), 1.0 - share)
    assert not new[~mask].any() and not torch.signbit(new[~mask]).any()


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(2, 24), st.sampled_from([0.0, 0.01, 1.0]))
def test_refit_is_no_worse_than_obs_nor_than_plain_masking(seed, columns, damp):
    weight, hessian = layer(3, columns, seed)
    new, mask = obs(weight, hessian, keep=0.5, damp=damp)
    best = error(refit(weight, hessian, mask), weight, hessian)
    scale = error(torch.zeros_like(weight), weight, hessian)
    assert best <= error(new, weight, hessian) + 1e-9 * scale
    assert best <= error(torch.where(mask, weight, 0.0), weight, hessian) + 1e-9 * scale


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(2, 30), st.data())
def test_a_mask_whose_pruned_columns_come_first_is_refitted(seed, columns, data):
    weight, hessian = layer(2, columns, seed)
    gone = data.draw(st.integers(0, columns))
    mask = torch.arange(columns).expand(2, columns) >= gone
    new, kept = obs(weight, hessian, mask=mask, damp=0.0)
    assert torch.equal(kept, mask)
    torch.testing.assert_close(new, refit(weight, hessian, mask), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str
)
def test_white_inputs_are_plain_masking_to_the_bit(dtype):
    weight = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    new, mask = obs(weight, 4 * torch.eye(300), keep=0.3, block=300)
    assert torch.equal(mask, sf.masks.topk_mask(weight.abs(), 540))
    assert torch.equal(new, torch.where(mask, weight, 0.0)) and new.dtype == dtype
    new, mask = obs(weight, 4 * torch.eye(300), pattern=nm(1, 3), block=3)
    assert torch.equal(mask, sf.masks.topk_mask(weight.abs(), None, pattern=nm(1, 3)))


def test_the_worked_example():
    new, mask = obs(
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([[2.0, 1.0], [1.0, 2.0]]),
        keep=1,
        damp=0.0,
    )
    assert new.tolist() == [[0.0, 2.5]] and mask.tolist() == [[False, True]]
    assert (
        error(new, torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        == 1.5
    )


def masks_of(weight, hessian, span, choose, damp=0.01):
    """The paper's loop where a mask is chosen for every `span` columns, on the weights
    as they are by then.
    """
    columns = len(hessian)
    damped = hessian + damp * hessian.diagonal().mean() * torch.eye(columns)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    w, mask = weight.clone(), torch.zeros_like(weight, dtype=torch.bool)
    for j in range(columns):
        if j % span == 0:
            part = slice(j, j + span)
            mask[:, part] = choose((w[:, part] / upper.diagonal()[part]).square())
        w[:, j:] -= (torch.where(mask[:, j], 0.0, w[:, j]) / upper[j, j])[
            :, None
        ] * upper[j, j:]
    return torch.where(mask, w, 0.0), mask


@pytest.mark.parametrize(
    ("pattern", "keep", "block", "span"),
    [
        (nm(2, 4), None, 128, 4),
        (nm(1, 3), None, 6, 3),
        (nm(10, 20), None, 20, 20),
        (nm(1, 2, axis=0), None, 7, 1),
        (sf.patterns.row_balanced(), 20, 60, 60),
        (sf.patterns.row_balanced(), 0.25, 300, 60),
        (sf.patterns.block((2, 3)), 7, 60, 60),
        (sf.patterns.unstructured(), 100, 60, 60),
    ],
    ids=str,
)
def test_patterns_choose_when_their_first_column_is_reached(pattern, keep, block, span):
    weight, hessian = layer(4, 60)
    count = 15 if keep == 0.25 else keep
    expected, mask = masks_of(
        weight,
        hessian,
        span,
        lambda scores: sf.masks.topk_mask(scores, count, pattern=pattern),
    )
    new, kept = obs(weight, hessian, pattern=pattern, keep=keep, block=block)
    assert torch.equal(kept, mask)
    torch.testing.assert_close(new, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0.3},
        {"pattern": nm(2, 4)},
        {"pattern": sf.patterns.block((2, 2)), "keep": 99, "block": 60},
        {"mask": 1},
    ],
    ids=str,
)
def test_parts_of_rows_make_no_difference(monkeypatch, options):
    weight, hessian = layer(40, 60)
    options = {"mask": weight > 0} if "mask" in options else options
    expected = obs(weight, hessian, **options)
    monkeypatch.setattr(sparsegpt, "ENTRIES", (16 * 60,) * 2)  # of 16, 16 and 8 rows
    new, mask = obs(weight, hessian, **options)
    assert torch.equal(mask, expected[1])
    torch.testing.assert_close(new, expected[0])


def test_groups_are_cut_as_in_the_whole_weight():
    weight, hessian = layer(4, 16)
    # two groups, whatever the width: each of 8 columns here
    halves = sf.patterns.in_groups(2)
    mask = obs(weight, hessian, pattern=halves, keep=10, block=8)[1]
    assert mask.reshape(4, 2, 8).sum((0, 2)).tolist() == [10, 10]


@pytest.mark.parametrize("block", [1, 5, 16, 128, 200, 700])
def test_counts_are_exact_in_total_and_in_each_block(block):
    weight, hessian = layer(3, 150)
    assert int(obs(weight, hessian, keep=101, block=block)[1].sum()) == 101
    sizes = [3 * min(block, 150 - a) for a in range(0, 150, block)]
    counts = [i % (size + 1) for i, size in enumerate(sizes)]
    mask = obs(weight, hessian, keep=counts, block=block)[1]
    assert [int(part.sum()) for part in mask.split(block, 1)] == counts


def test_ties_go_to_the_lowest_index():
    mask = obs(torch.ones(2, 4), torch.eye(4), keep=3)[1]
    assert mask.tolist() == [[True] * 3 + [False], [False] * 4]


def test_inputs_that_were_always_zero_lose_their_weights():
    weight, hessian = layer(3, 8)
    hessian[2], hessian[:, 2] = 0.0, 0.0
    for options in (
        {"keep": 0.5},
        {"mask": torch.ones(3, 8, dtype=torch.bool)},
        {"pattern": nm(2, 4)},
    ):
        new, _ = obs(weight, hessian, **options)
        assert not new[:, 2].any() and new.isfinite().all()
    others = [0, 1, 3, 4, 5, 6, 7]
    rest = refit(
        weight[:, others],
        hessian[others][:, others],
        torch.ones(3, 7, dtype=torch.bool),
    )
    assert torch.equal(
        refit(weight, hessian, torch.ones(3, 8, dtype=torch.bool))[:, others], rest
    )


def test_arguments_are_left_alone_and_nothing_has_a_gradient():
    weight, hessian = layer()
    copies = weight.clone(), hessian.clone()
    weight.requires_grad_()
    for new in (*obs(weight, hessian, keep=0.5), refit(weight, hessian, weight > 0)):
        assert not new.requires_grad
    assert torch.equal(weight, copies[0]) and torch.equal(hessian, copies[1])
    keeps_all = obs(weight.detach(), hessian, mask=torch.ones(4, 12, dtype=torch.bool))
    assert (
        torch.equal(keeps_all[0], weight)
        and keeps_all[0].data_ptr() != weight.data_ptr()
    )


def test_any_layout_of_memory_gives_the_same_bits():
    weight, hessian = layer(5, 40)
    expected = obs(weight, hessian, keep=0.5)
    assert all(
        map(
            torch.equal,
            obs(weight.T.contiguous().T, hessian.T.contiguous().T, keep=0.5),
            expected,
        )
    )
    assert all(map(torch.equal, obs(weight, hessian, keep=0.5), expected))


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize(
    "options", [{"keep": 0.5, "block": 4}, {"pattern": nm(2, 4)}], ids=str
)
def test_vmap_has_the_bits_of_a_loop(dims, products, options, monkeypatch):
    # Products of batches have other bits on some CPUs.
    monkeypatch.setattr(sweep, "by_products", lambda device: products)
    pairs = [layer(5, 300, seed, dtype=torch.float32) for seed in range(3)]
    given_ = [
        torch.stack(xs) if dim == 0 else xs[0]
        for xs, dim in zip(zip(*pairs, strict=True), dims, strict=True)
    ]
    new, masks = torch.vmap(lambda w, h: obs(w, h, **options), dims)(*given_)
    for i in range(3):
        one = obs(
            *(x[i] if dim == 0 else x for x, dim in zip(given_, dims, strict=True)),
            **options,
        )
        assert torch.equal(new[i], one[0])
        assert torch.equal(masks[i], one[1])


def test_masks_under_vmap_have_the_bits_of_a_loop():
    weight, hessian = layer(4, 20, dtype=torch.float32)
    masks = torch.stack([weight > 0, weight < 0.5])
    news, kept = torch.vmap(lambda mask: obs(weight, hessian, mask=mask))(masks)
    assert torch.equal(kept, masks)
    for mask, new in zip(masks, news, strict=True):
        assert torch.equal(new, obs(weight, hessian, mask=mask)[0])


def ragged(columns):
    """Groups of `columns`, of which two are kept in each row, also of fewer columns."""
    return sf.patterns.Pattern(
        "ragged", lambda shape: (1, 1), lambda grid: (1, columns), fixed=2
    )


def test_empty_weights():
    for shape in ((0, 4), (3, 0)):
        new, mask = obs(torch.zeros(shape), torch.eye(shape[1]), keep=0.5)
        assert new.shape == mask.shape == shape


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {},
            TypeError,
            "obs: expected one of mask, keep and pattern, got none of them",
        ),
        (
            {"keep": 0.5, "mask": torch.ones(4, 12, dtype=torch.bool)},
            TypeError,
            "obs: expected a mask, or keep or a pattern that make one, got both",
        ),
        (
            {"mask": torch.ones(4, 12)},
            ValueError,
            "expected a bool mask of shape (4, 12), got torch.float32 of shape",
        ),
        (
            {"keep": 49},
            ValueError,
            "obs: expected 0 <= keep <= 48, as many as the weight has, got 49",
        ),
        ({"keep": -1}, ValueError, "obs: expected 0 <= keep <= 48"),
        ({"keep": 1.5}, ValueError, "expected keep in [0, 1], got 1.5"),
        (
            {"keep": True},
            TypeError,
            "obs: expected keep to be a float, an int or a sequence of ints, got True",
        ),
        (
            {"keep": [3, 4]},
            ValueError,
            "obs: expected a count for each of 1 blocks, got 2",
        ),
        (
            {"keep": [49]},
            ValueError,
            "obs: expected 0 <= keep <= 48 for block 0, got 49",
        ),
        (
            {"keep": [0.5]},
            TypeError,
            "obs: expected counts to be ints, got 0.5 for block 0",
        ),
        (
            {"pattern": "2:4"},
            TypeError,
            "obs: expected pattern to be one such as sf.patterns.nm(2, 4), got '2:4'",
        ),
        (
            {"pattern": nm(2, 4), "block": 6},
            ValueError,
            "obs: expected groups inside blocks of 6 columns, got nm(2, 4, axis=-1), "
            "whose groups have 4 columns in a weight of shape (4, 12); give block=4 "
            "or a multiple of it",
        ),
        (
            {"pattern": sf.patterns.row_balanced(), "keep": 3, "block": 4},
            ValueError,
            "whose groups have 12 columns in a weight of shape (4, 12); give block=12 "
            "or a multiple of it",
        ),
        (
            {"pattern": nm(2, 5)},
            ValueError,
            "expected axis -1 divisible by 5, got shape (4, 12)",
        ),
        ({"pattern": nm(2, 4), "keep": 3}, ValueError, "fixes n_keep at 2, got 3"),
        (
            {"pattern": sf.patterns.row_balanced(), "keep": 13},
            ValueError,
            "expected 0 <= n_keep <= 12, got 13",
        ),
        (
            {"pattern": sf.patterns.row_balanced(), "keep": [3]},
            TypeError,
            "obs: expected keep to be the share or count of a group of "
            "row_balanced(), got [3]",
        ),
        (
            {"pattern": sf.patterns.tied([["a", 0], ["b", 1]]), "keep": 1},
            ValueError,
            "obs: expected a pattern of one weight, got tied(",
        ),
        ({"keep": 0.5, "block": 0}, ValueError, "obs: expected block >= 1, got 0"),
        (
            {"keep": 0.5, "damp": -0.1},
            ValueError,
            "obs: expected damp to be a number >= 0, got -0.1",
        ),
    ],
)
def test_bad_arguments(options, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        obs(*layer(), **options)


def at_negative_zero():
    """A layer of zeros of both signs among other weights, kept and pruned ones."""
    weight, hessian = layer(4, 8, dtype=torch.float32)
    weight[:, ::2] = torch.tensor([0.0, -0.0]).repeat(4, 2)
    weight[3] = -0.0
    return weight, hessian, torch.arange(32).reshape(4, 8) % 3 == 0


GRADS = torch.randn(10, 4, 8, generator=torch.Generator().manual_seed(0))
SOLVERS = {
    "obs keep": lambda w, h, m: obs(w, h, keep=0.5),
    "obs mask": lambda w, h, m: obs(w, h, mask=m),
    "obs nm": lambda w, h, m: obs(w, h, pattern=nm(2, 4)),
    "obs eye": lambda w, h, m: obs(w, torch.eye(8), keep=5, damp=0.0),
    "exact": lambda w, h, m: sf.solve.obs_exact(w, h, 20),
    "refit": lambda w, h, m: (refit(w, h, m), m),
    "fisher": lambda w, h, m: sf.solve.obs_fisher(w, GRADS, 12, damp=0.1),
}
INPUTS = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
STATS = {"w": sf.calibration.inputs(torch.nn.Linear(8, 4), None, INPUTS)["weight"]}
METHODS = {
    "layerwise": lambda: sf.rewrite(
        sf.solve.layerwise(STATS, SOLVERS["obs keep"]), when=sf.at([0])
    ),
    "sparsegpt": lambda: sf.methods.sparsegpt(0.5, STATS, when=sf.at([0])),
    "obs": lambda: sf.methods.obs(0.5, STATS, when=sf.at([0])),
}


@pytest.mark.parametrize("name", [*SOLVERS, *METHODS])
def test_pruned_weights_are_positive_zero(name):
    weight, hessian, mask = at_negative_zero()
    if name in SOLVERS:
        new, kept = SOLVERS[name](weight, hessian, mask)
    else:
        algorithm = METHODS[name]()
        state = algorithm.update(algorithm.init({"w": weight}), {"w": weight}, 0)
        new, kept = state.params["w"], state.masks["w"]
    assert not kept.all() and (new[~kept].view(torch.int32) == 0).all()


@pytest.mark.parametrize("name", SOLVERS)
def test_autocast_around_a_solve_changes_nothing(name):
    weight, hessian = layer(4, 300, dtype=torch.float32)
    mask = torch.arange(1200).reshape(4, 300) % 3 == 0
    if name in ("exact", "obs eye", "fisher"):  # of few columns
        weight, hessian, mask = weight[:, :8], hessian[:8, :8], mask[:, :8]
    plain = SOLVERS[name](weight, hessian, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, SOLVERS[name](weight, hessian, mask), plain))


@pytest.mark.deep
@pytest.mark.parametrize("name", [*SOLVERS, *METHODS])
def test_members_and_compiled_code_have_the_same_bits(name):
    hessian, mask = layer(4, 8, dtype=torch.float32)[1], at_negative_zero()[2]
    weights = torch.stack(
        [layer(4, 8, seed, dtype=torch.float32)[0] for seed in range(3)]
    )

    algorithm = METHODS[name]() if name in METHODS else None

    def solve(w):
        if algorithm is None:
            return SOLVERS[name](w, hessian, mask)
        state = algorithm.update(algorithm.init({"w": w}), {"w": w}, 0)
        return state.params["w"], state.masks["w"]

    alone = [torch.stack(parts) for parts in zip(*map(solve, weights), strict=True)]
    batched = torch.vmap(solve)(weights)
    assert torch.equal(batched[1], alone[1])
    if name == "fisher":  # whose products are those of a batch
        torch.testing.assert_close(batched[0], alone[0])
    else:
        assert torch.equal(batched[0], alone[0])
    compiled = torch.compile(solve, backend="aot_eager", fullgraph=True)(weights[1])
    assert all(
        torch.equal(got, want[1]) for got, want in zip(compiled, alone, strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0.5},
        {"keep": 0.3, "block": 20},
        {"mask": torch.arange(640).reshape(8, 80) % 3 == 0},
        {"pattern": nm(2, 4)},
        {"pattern": nm(9, 40), "block": 40},
        {"pattern": sf.patterns.transposable(2, 4)},
        {"pattern": nm(1, 4), "round_to": True},
        {"pattern": ragged(12), "block": 12},
    ],
    ids=str,
)
def test_a_device_sweeps_to_the_same_weights(options, monkeypatch):
    weight, hessian = layer(8, 80)
    if "round_to" in options:
        options = {**options, "round_to": sf.solve.grid(weight, 4)}
    want = obs(weight, hessian, **options)
    monkeypatch.setattr(sweep, "by_products", lambda device: False)
    new, mask = obs(weight, hessian, **options)
    assert torch.equal(mask, want[1])
    torch.testing.assert_close(new, want[0])


@pytest.mark.parametrize(
    ("options", "most"),
    [({"keep": 0.5}, 3.4), ({"pattern": nm(2, 4)}, 7.5), ({"pattern": nm(4, 8)}, 6.3)],
)
def test_a_sweep_on_a_device_waits_for_nothing(options, most):
    # Checks wait, before it and after the factor: of values, twice more where a sum of
    # all is not finite, of dead inputs and of the factor. So a block of columns can be
    # captured in a graph.
    for columns in (256, 512):
        weight = torch.empty(64, columns, device="meta")
        hessian = torch.empty(columns, columns, device="meta")
        found = counted(lambda w=weight, h=hessian: obs(w, h, **options))
        assert len(found.waits) == 5
        assert found.launches <= most * columns
