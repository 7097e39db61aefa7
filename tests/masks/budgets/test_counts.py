import pytest
import torch

import sparsefn as sf

COUNTS, GLOBAL, ROWS = sf.counts, sf.budgets.global_(), sf.patterns.row_balanced()
NAN, KEY = float("nan"), sf.random.key(0)
W = {
    "w": torch.tensor(
        [
            [0.5, -0.4, 0.0, 0.0],
            [1.0, 0.9, 0.0, 0.0],
            [0.1, 0.2, 0.0, 0.0],
            [6.0, 0.0, -2.5, 0.0],
        ]
    )
}


def masks_after(algorithm, params, grads=None, step=0):
    return algorithm.update(
        algorithm.init(params), params if grads is None else grads, step
    ).masks


def kept(masks):
    return {path: int(mask.sum()) for path, mask in masks.items()}


class TestAbove:
    def test_a_threshold_is_strict_and_nan_is_not_above_it(self):
        weights = {"w": torch.tensor([[0.5, NAN, -0.6, 0.4, torch.inf]])}
        assert masks_after(sf.one_shot(COUNTS.above(0.5)), weights)["w"].tolist() == [
            [False, False, True, False, True]
        ]

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    )
    def test_is_what_comparing_gives(self, dtype):
        weights = torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).to(
            dtype
        )
        tau = torch.tensor(0.3, dtype=torch.promote_types(dtype, torch.float32))
        assert torch.equal(
            masks_after(sf.one_shot(COUNTS.above(0.3)), {"w": weights})["w"],
            weights.abs() > tau,
        )

    def test_of_all_leaves_together_and_of_groups(self):
        params = {"a": W["w"], "b": torch.full((2, 2), 0.45)}
        found = masks_after(
            sf.one_shot(COUNTS.above(0.45), distribution=GLOBAL), params
        )
        assert kept(found) == {"a": 5, "b": 0}
        rows = masks_after(
            sf.one_shot(COUNTS.above(0.45, at_least=1), pattern=ROWS), W
        )["w"]
        assert rows.sum(1).tolist() == [1, 2, 1, 2] and rows[2].tolist() == [
            False,
            True,
            False,
            False,
        ]
        channels = masks_after(
            sf.one_shot(COUNTS.above(1.0), pattern=sf.patterns.channel(0)), W
        )["w"]
        assert channels.all(1).tolist() == [False, True, False, True]

    def test_at_least_is_bounded_by_the_units_there_are(self):
        assert kept(masks_after(sf.one_shot(COUNTS.above(100.0, at_least=99)), W)) == {
            "w": 16
        }

    def test_schedules_and_masks_that_only_shrink(self):
        algorithm = sf.gmp(COUNTS.above(sf.schedules.piecewise({0: 0.95, 1: 0.3})))
        state = algorithm.init(W)
        assert kept(state.masks) == {"w": 3}
        assert kept(algorithm.update(state, W, 1).masks) == {"w": 3}
        regrow = sf.gmp(
            COUNTS.above(sf.schedules.piecewise({0: 0.95, 1: 0.3})),
            regrow=True,
            pruned="keep",
        )
        assert kept(regrow.update(regrow.init(W), W, 1).masks) == {"w": 6}

    def test_tensors_under_vmap_and_compile(self):
        def at(tau):
            return masks_after(sf.one_shot(COUNTS.above(tau)), W)["w"]

        taus = torch.tensor([0.45, 1.0])
        assert torch.equal(torch.vmap(at)(taus), torch.stack([at(0.45), at(1.0)]))
        algorithm = sf.one_shot(COUNTS.above(0.45))
        compiled = torch.compile(
            lambda state: algorithm.update(state, W, 0),
            backend="aot_eager",
            fullgraph=True,
        )
        assert torch.equal(compiled(algorithm.init(W)).masks["w"], at(0.45))

    def test_the_first_masks(self):
        assert kept(sf.gmp(COUNTS.above(0.45)).init(W).masks) == {"w": 5}
        assert kept(sf.ste(COUNTS.above(0.45)).init(W).masks) == {"w": 5}
        assert kept(sf.static(COUNTS.above(0.45), init="magnitude").init(W).masks) == {
            "w": 5
        }
        assert kept(
            sf.gmp(COUNTS.above(0.45), score=sf.scores.saliency).init(W).masks
        ) == {"w": 16}
        with pytest.raises(
            ValueError, match=r"init='random' needs a sparsity, got above\(0.45\)"
        ):
            sf.static(COUNTS.above(0.45)).init(W)

    def test_slimming_by_a_threshold(self):
        gammas = {
            "bn.weight": torch.tensor([0.5, -0.1]),
            "bn2.weight": torch.tensor([0.3, 0.05]),
        }
        found = masks_after(
            sf.one_shot(COUNTS.above(0.2), where="*", distribution=GLOBAL), gammas
        )
        assert kept(found) == {"bn.weight": 1, "bn2.weight": 1}

    def test_soft_movement_starts_with_all_and_drops_what_falls_under_tau(self):
        soft = sf.supermask(
            COUNTS.above(0.1, at_least=1),
            mode="joint",
            init="zeros",
            link=torch.sigmoid,
        )
        algorithm = sf.with_optimizer(soft, sf.optimizers.sgd(1.0))
        state = algorithm.init({"w": torch.tensor([[1.0, -1.0]])})
        assert kept(state.masks) == {"w": 2}
        # the slope of sigmoid is 1/4
        state = algorithm.update(state, {"w": torch.tensor([[16.0, 16.0]])}, 0)
        assert state.masks["w"].tolist() == [[False, True]]


class TestBelow:
    def test_is_the_complement_of_above(self):
        assert masks_after(sf.one_shot(COUNTS.below(0.45)), W)["w"].equal(
            masks_after(sf.one_shot(COUNTS.above(0.45)), W)["w"]
        )
        drop = [
            masks_after(
                sf.rigl(
                    "current",
                    drop_fraction=count,
                    init={"w": W["w"] != 0},
                    when=sf.always(),
                ),
                W,
            )["w"]
            for count in (COUNTS.below(0.45), COUNTS.above(0.45))
        ]
        assert drop[0].equal(drop[1])

    def test_drops_so_many_of_the_kept_and_grows_as_many(self):
        start = {"w": W["w"] != 0}
        algorithm = sf.rigl(
            "current",
            drop_fraction=COUNTS.below(0.45),
            init=start,
            exclude_dropped=True,
        )
        grads = {"w": torch.where(start["w"], 9.0, torch.arange(16.0).reshape(4, 4))}
        found = masks_after(algorithm, W, grads)["w"]
        lost = start["w"] & (W["w"].abs() <= 0.45)
        assert torch.equal(found & start["w"], start["w"] & ~lost) and int(
            found.sum()
        ) == int(start["w"].sum())
        grown = (found & ~start["w"]).flatten().nonzero()[:, 0].tolist()
        assert grown == [11, 13, 15]

    def test_spares_the_best_of_each_group(self):
        dense = {"w": torch.ones(4, 4, dtype=torch.bool)}
        algorithm = sf.rigl(
            1.0, drop_fraction=COUNTS.below(1e9, spare=1), init=dense, pattern=ROWS
        )
        # the sparsity binds all the same
        assert kept(masks_after(algorithm, W)) == {"w": 0}
        count = COUNTS.below(1e9, spare=3).count(W["w"], dense["w"], 0)
        assert count.tolist() == [1, 1, 1, 1]

    def test_under_vmap(self):
        def at(tau):
            algorithm = sf.set(
                0.5,
                drop_fraction=COUNTS.below(tau),
                init="magnitude",
                when=sf.always(),
                key=KEY,
            )
            return masks_after(algorithm, W)["w"]

        assert torch.equal(
            torch.vmap(at)(torch.tensor([0.45, 1.0])), torch.stack([at(0.45), at(1.0)])
        )


class TestMass:
    def test_is_the_fewest_that_hold_the_share(self):
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(6, 50, generator=generator)
        active = torch.rand(6, 50, generator=generator) < 0.7
        found = COUNTS.mass(0.8).count(scores, active, 0)
        for row, flags, n in zip(scores.double(), active, found.tolist(), strict=True):
            best = row[flags].sort(descending=True).values
            assert (
                best[:n].sum() >= 0.8 * best.sum() - 1e-9
                and best[: n - 1].sum() < 0.8 * best.sum()
            )

    def test_ends(self):
        rows = torch.tensor([[4.0, NAN, -3.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
        every = torch.ones_like(rows, dtype=torch.bool)
        assert COUNTS.mass(1.0).count(rows, every, 0).tolist() == [2, 0]
        assert COUNTS.mass(0.0).count(rows, every, 0).tolist() == [0, 0]
        assert COUNTS.mass(0.5).count(rows[:, :0], every[:, :0], 0).tolist() == [0, 0]
        shares = torch.tensor([0.5, 1.0])
        at = torch.vmap(lambda share: COUNTS.mass(share).count(rows, every, 0))(shares)
        assert at.tolist() == [[1, 0], [2, 0]]

    def test_prunes(self):
        found = masks_after(
            sf.one_shot(COUNTS.mass(0.9), pattern=sf.patterns.channel(0)), W
        )["w"]
        assert found.all(1).tolist() == [True, True, False, True]


ERRORS = [
    (lambda: COUNTS.above(NAN), ValueError, "expected tau to be finite, got nan"),
    (
        lambda: COUNTS.above("0.1"),
        TypeError,
        "expected tau to be a number or a 0-d float tensor, got str",
    ),
    (
        lambda: COUNTS.above(torch.ones(2)),
        ValueError,
        r"expected tau to be a 0-d tensor, got shape \(2,\)",
    ),
    (
        lambda: COUNTS.below(lambda: 1.0),
        TypeError,
        r"expected tau to be a function of \(step\)",
    ),
    (
        lambda: sf.gmp(COUNTS.above(lambda step: NAN)).init(W),
        ValueError,
        "expected tau to be finite, got nan",
    ),
    (
        lambda: COUNTS.above(0.1, at_least=-1),
        ValueError,
        "above: expected at_least >= 0, got -1",
    ),
    (
        lambda: COUNTS.below(0.1, spare=0.5),
        TypeError,
        "below: expected spare to be an int, got float",
    ),
    (lambda: COUNTS.mass(2.0), ValueError, r"expected share in \[0, 1\], got 2.0"),
    (
        lambda: sf.gmp(COUNTS.above(0.1), pattern=sf.patterns.nm(2, 4)),
        ValueError,
        r"sparsity: expected a pattern that leaves the count open, got nm\(2, 4, "
        r"axis=-1\) and above\(0.1\)",
    ),
    (
        lambda: sf.ste(COUNTS.above(0.1), distribution=sf.budgets.erk()),
        ValueError,
        r"sparsity: expected distribution to be uniform\(\) or global_\(\) with "
        r"above\(0.1\), .* got erk\(\)",
    ),
    (
        lambda: sf.set(
            0.5, drop_fraction=COUNTS.below(0.1), count=sf.budgets.rounded_up
        ),
        ValueError,
        r"drop_fraction: below\(0.1\) says how many are dropped, so that count would "
        r"say nothing",
    ),
    (
        lambda: sf.set(
            0.5,
            drop_fraction=COUNTS.below(0.1),
            redistribute=sf.redistribute.Redistribute(
                sf.redistribute.lost, rate=sf.redistribute.careful()
            ),
        ),
        ValueError,
        "so that the rate of redistribute would say nothing",
    ),
    (
        lambda: masks_after(sf.gmp(COUNTS.Counted(lambda s, a, t: 3), init="dense"), W),
        TypeError,
        "expected Counted to give an integer tensor, got int at 'w'",
    ),
    (
        lambda: masks_after(
            sf.gmp(COUNTS.Counted(lambda s, a, t: torch.tensor(3)), init="dense"), W
        ),
        ValueError,
        r"expected Counted to give a count for each of 1 groups, got shape \(\) at 'w'",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


# ---- methods of the literature in a few lines ----------------------------------------


def test_sap_prunes_by_the_pq_index():
    """Diao et al. 2023, arXiv 2302.05601: how many are pruned follows from norms of the
    active weights.
    """

    def pq(scores, active, step):
        w, d = torch.where(active, scores.double(), 0.0), active.sum(-1)
        index = 1 - w.sqrt().sum(-1).square() / w.sum(-1) / d  # p = 1/2, q = 1
        least = d * (1 - index)
        return d - (d * (1 - least / d).clamp(max=0.9)).floor().to(torch.int64)

    weights = {"w": torch.tensor([[1.0] * 5 + [0.0] * 5])}
    algorithm = sf.gmp(COUNTS.Counted(pq), init="dense")
    state = algorithm.init(weights)
    sizes = []
    for step in range(3):
        state = algorithm.update(state, weights, step)
        sizes.append(int(state.masks["w"].sum()))
    assert sizes == [5, 5, 5]  # equal weights have index 0: nothing more is pruned


@pytest.mark.deep
@pytest.mark.parametrize("count", [COUNTS.above(0.11), COUNTS.mass(0.7)])
def test_compiled_code_counts_scores_that_are_rounded(count):
    generator = torch.Generator().manual_seed(0)
    w, g = (
        {"w": torch.randn(70, 90, generator=generator).bfloat16()} for _ in range(2)
    )
    algorithm = sf.one_shot(count, sf.scores.saliency)
    found = torch.compile(algorithm.update)(algorithm.init(w), g, 0).masks["w"]
    assert torch.equal(found, masks_after(algorithm, w, g)["w"])


@pytest.mark.filterwarnings("ignore")
def test_what_reads_whole_tensors_refuses_a_dtensor_by_path(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        x = {"w": distribute_tensor(W["w"], init_device_mesh("cpu", (1,)), [Shard(0)])}
        scores = {
            "lamp": sf.scores.lamp,
            "ranked": sf.scores.ranked(sf.scores.magnitude),
            "by_unit": sf.scores.by_unit(
                sf.scores.magnitude, sf.patterns.channel(0), lambda s: s.sum(-1)
            ),
        }
        for name, score in scores.items():
            with pytest.raises(
                ValueError,
                match=f"{name}: expected plain tensors, got a DTensor at 'w'",
            ):
                masks_after(sf.one_shot(0.5, score), x)
        with pytest.raises(
            ValueError,
            match=r"mass\(0.5\): expected plain tensors, got a DTensor at 'w': it "
            r"reads whole",
        ):
            masks_after(sf.one_shot(COUNTS.mass(0.5)), x)
        rows = masks_after(sf.one_shot(COUNTS.mass(0.5), pattern=ROWS), x)[
            "w"
        ].full_tensor()
        assert torch.equal(
            rows, masks_after(sf.one_shot(COUNTS.mass(0.5), pattern=ROWS), W)["w"]
        )
        found = masks_after(sf.one_shot(COUNTS.above(0.45)), x)["w"].full_tensor()
        assert torch.equal(found, W["w"].abs() > 0.45)
    finally:
        dist.destroy_process_group()
