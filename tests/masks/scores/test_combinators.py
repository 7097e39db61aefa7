import itertools
import math

import pytest
import torch

import sparsefn as sf

CHANNEL = sf.patterns.channel(0)
MAGNITUDE = sf.scores.magnitude


def state_of(seed=3, masks=None, **params):
    whole = {
        path: torch.ones_like(leaf, dtype=torch.bool) for path, leaf in params.items()
    }
    return sf.State(params, whole | (masks or {}), key=sf.random.key(seed))


class TestSampled:
    def test_the_best_are_draws_without_replacement(self):
        p, draws = torch.tensor([0.5, 0.3, 0.2]), 4000

        def best(key):
            values = sf.scores.sampled(MAGNITUDE)(
                sf.State({"w": p}, {"w": p > 0}, key=key), (), 0
            )["w"]
            return sf.masks.topk_mask(values, 2)

        found = torch.vmap(best)(sf.random.split(sf.random.key(0), draws))
        inclusion = found.double().mean(0)
        exact = [
            sum(
                p[a] * p[b] / (1 - p[a])
                for a, b in itertools.permutations(range(3), 2)
                if i in (a, b)
            )
            for i in range(3)
        ]
        assert torch.allclose(
            inclusion, torch.tensor(exact, dtype=torch.float64), atol=0.025
        )
        assert torch.allclose(
            torch.tensor(exact), torch.tensor([0.8393, 0.675, 0.4857]), atol=1e-4
        )

    def test_a_power_sharpens(self):
        w = torch.rand(200, generator=torch.Generator().manual_seed(0)) + 0.1
        plain, sharp = (
            sf.masks.topk_mask(
                sf.scores.sampled(MAGNITUDE, power)(state_of(w=w), (), 0)["w"], 100
            )
            for power in (1.0, torch.tensor(500.0))
        )
        by_size = sf.masks.topk_mask(w, 100)
        assert int((sharp & by_size).sum()) > int((plain & by_size).sum()) >= 50
        scheduled = sf.scores.sampled(MAGNITUDE, lambda step: 500.0 + 9 * step)
        assert torch.equal(
            sf.masks.topk_mask(scheduled(state_of(w=w), (), 0)["w"], 100), sharp
        )

    def test_zero_comes_last_but_for_what_is_no_share(self):
        def score(state, grads, step):
            return {"w": torch.tensor([0.0, 1e-30, math.nan, -1.0, math.inf])}

        for power in (0.0, 1.0):
            found = sf.scores.sampled(score, power)(state_of(w=torch.ones(5)), (), 0)[
                "w"
            ]
            assert (
                found.dtype == torch.float64
                and found[0] == -math.inf
                and bool(found[[1, 4]].isfinite().all())
            )
            assert found.isnan().tolist() == [False, False, True, True, False]

    def test_draws_follow_key_step_and_path_and_have_memory_if_the_score_has(self):
        w = torch.ones(30)
        score = sf.scores.sampled(MAGNITUDE)
        first = score(state_of(w=w), (), 0)["w"]
        assert torch.equal(first, score(state_of(w=w), (), torch.tensor(0))["w"])
        for other in (
            score(state_of(w=w), (), 1)["w"],
            score(state_of(4, w=w), (), 0)["w"],
        ):
            assert not torch.equal(first, other)
        memory = sf.scores.sampled(sf.scores.ema(MAGNITUDE, 0.5))
        value = memory.value(memory.init({"w": w}), state_of(w=w), (), 0)["w"]
        assert bool((value == -math.inf).all())  # the average is still 0

    def test_errors(self):
        with pytest.raises(
            ValueError,
            match="expected a state with a PRNG key for sampled scores, got none",
        ):
            sf.scores.sampled(MAGNITUDE)(
                sf.State({"w": torch.ones(1)}, {"w": torch.ones(1) > 0}), (), 0
            )
        with pytest.raises(
            TypeError,
            match="expected power to be a number or a 0-d float tensor, got str",
        ):
            sf.scores.sampled(MAGNITUDE, "2")
        with pytest.raises(
            TypeError,
            match=r"expected a score function of \(state, grads, step\), got str",
        ):
            sf.scores.sampled("magnitude")


class TestRanked:
    W = torch.tensor([[0.1, 0.2, 0.3, 0.4, -5.0, -6.0]])

    def test_set_by_sign_drops_the_smallest_of_either_sign(self):
        def dropped(drop):
            algorithm = sf.gmp(torch.tensor(2 / 6), score=drop, init="dense")
            return (
                ~algorithm.update(
                    algorithm.init({"w": self.W}), {"w": self.W}, 0
                ).masks["w"]
            )[0].tolist()

        assert dropped(sf.scores.ranked(MAGNITUDE)) == [
            True,
            False,
            False,
            False,
            True,
            False,
        ]
        assert dropped(MAGNITUDE) == [True, True, False, False, False, False]

    def test_kept_and_pruned_weights_are_ranked_apart(self):
        mask = torch.tensor([[True, False, True, True, False, True]])
        found = sf.scores.ranked(MAGNITUDE)(
            state_of(masks={"w": mask}, w=self.W), (), 0
        )["w"]
        assert found.tolist() == [[0.0, 0.0, 1.0, 2.0, 0.0, 0.0]]

    def test_other_classes_ties_and_nan(self):
        def score(state, grads, step):
            return {"w": torch.tensor([1.0, 1.0, math.nan, 0.0])}

        found = sf.scores.ranked(score, by=lambda w: w > 0)(
            state_of(w=torch.tensor([1.0, 2.0, 3.0, -1.0])), (), 0
        )["w"]
        assert found[[0, 1, 3]].tolist() == [2.0, 1.0, 0.0] and found[2].isnan()

    def test_errors(self):
        with pytest.raises(
            ValueError,
            match=r"ranked: expected by to give shape \(1, 6\) at 'w', got shape \(\)",
        ):
            sf.scores.ranked(MAGNITUDE, by=torch.sum)(state_of(w=self.W), (), 0)
        with pytest.raises(
            TypeError, match=r"expected by to be a function of \(weight\)"
        ):
            sf.scores.ranked(MAGNITUDE, by=lambda: 1)


class TestByUnit:
    def test_taylor_squares_the_sum_and_not_the_entries(self):
        w, g = (
            torch.tensor([[1.0, -1.0], [2.0, 1.0]]),
            torch.tensor([[0.5, 0.5], [0.2, 0.1]]),
        )
        signed = sf.scores.leafwise(lambda weight, grad, mask: weight * grad)
        taylor = sf.scores.by_unit(
            signed, CHANNEL, lambda scores: scores.sum(-1).square()
        )
        found = taylor(state_of(w=w), {"w": g}, 0)["w"]
        assert torch.allclose(found, torch.tensor([[0.0, 0.0], [0.25, 0.25]]))
        rows = sf.one_shot(0.5, taylor, pattern=sf.patterns.channel(0, norm=math.inf))
        assert rows.update(rows.init({"w": w}), {"w": g}, 0).masks["w"].tolist() == [
            [False, False],
            [True, True],
        ]

    @pytest.mark.parametrize(
        "pattern",
        [sf.patterns.block((2, 3)), sf.patterns.kernel(), sf.patterns.channel(1)],
    )
    def test_every_entry_has_the_value_of_its_unit(self, pattern):
        x = torch.arange(120.0).reshape(5, 4, 2, 3)
        found = sf.scores.by_unit(MAGNITUDE, pattern, lambda scores: scores.amax(-1))(
            state_of(w=x), (), 0
        )["w"]
        whole = sf.scores.by_unit(MAGNITUDE, pattern, lambda scores: scores.amin(-1))(
            state_of(w=x), (), 0
        )["w"]
        assert found.shape == x.shape and bool(((whole <= x) & (x <= found)).all())
        assert len(found.unique()) == len(whole.unique()) > 1

    def test_the_mean_over_batches_and_a_score_with_memory(self):
        signed = sf.scores.leafwise(lambda weight, grad, mask: weight * grad)
        mean = sf.scores.mean(
            sf.scores.by_unit(signed, CHANNEL, lambda scores: scores.sum(-1).square())
        )
        state, memory = state_of(w=torch.ones(2, 2)), mean.init({"w": torch.ones(2, 2)})
        for step, g in enumerate((1.0, -1.0)):
            memory = mean.accumulate(memory, state, {"w": torch.full((2, 2), g)}, step)
        assert mean.value(memory, state, (), 1)["w"].tolist() == [
            [4.0, 4.0],
            [4.0, 4.0],
        ]
        other = sf.scores.by_unit(
            sf.scores.mean(signed), CHANNEL, lambda scores: scores.sum(-1)
        )
        assert other.value(other.init({"w": torch.ones(2, 2)}), state, (), 0)[
            "w"
        ].tolist() == [[0.0, 0.0], [0.0, 0.0]]

    def test_errors(self):
        with pytest.raises(
            TypeError, match="by_unit: expected pattern to be one such as"
        ):
            sf.scores.by_unit(MAGNITUDE, 0, torch.sum)
        with pytest.raises(
            ValueError, match=r"several entries, got nm\(2, 4, axis=-1\)"
        ):
            sf.scores.by_unit(MAGNITUDE, sf.patterns.nm(2, 4), torch.sum)
        bad = sf.scores.by_unit(MAGNITUDE, CHANNEL, lambda scores: scores.sum())
        with pytest.raises(
            ValueError,
            match=r"by_unit: expected .* to give shape \(2,\) of \(2, 3\) at 'w', got "
            r"shape",
        ):
            bad(state_of(w=torch.ones(2, 3)), (), 0)
        far = sf.scores.by_unit(
            MAGNITUDE, sf.patterns.channel(2), lambda scores: scores.sum(-1)
        )
        with pytest.raises(ValueError, match=r"no axis 2 in shape \(2, 3\) at 'w'"):
            far(state_of(w=torch.ones(2, 3)), (), 0)
