"""Scores of one leaf, held against plain loops; recordings of missing connections are
in test_golden_dynamic.
"""

import math
import pickle

import pytest
import torch

import sparsefn as sf
from sparsefn.masks.scores import per_leaf as module


def state_of(masks=None, **params):
    whole = {
        path: torch.ones_like(leaf, dtype=torch.bool) for path, leaf in params.items()
    }
    return sf.State(params, whole | (masks or {}), key=sf.random.key(3))


def lamp(w):
    return sf.scores.lamp(state_of(w=w), (), 0)["w"]


@sf.scores.leafwise
def product(weight, grad, mask):
    return weight * grad * mask


class TestLeafwise:
    def test_only_sparsified_leaves_are_scored(self):
        state = state_of(
            {"b": torch.tensor(True)}, w=torch.tensor([1.0, 2.0]), b=torch.ones(2)
        )
        found = product(state, {"w": torch.tensor([3.0, 4.0]), "b": torch.ones(2)}, 0)
        assert found["w"].tolist() == [3.0, 8.0] and found["b"].tolist() == [0.0, 0.0]

    def test_without_gradients(self):
        @sf.scores.leafwise
        def given(weight, grad, mask):
            assert grad is None
            return weight

        for grads in (None, ()):
            assert given(state_of(w=torch.ones(2)), grads, 0)["w"].tolist() == [
                1.0,
                1.0,
            ]

    def test_a_decorated_function_is_a_score_that_pickles(self):
        assert (
            product.__name__ == "product"
            and pickle.loads(pickle.dumps(product)) is product
        )
        params = {"w": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "b": torch.ones(1)}
        algorithm = sf.one_shot(0.5, product)
        state = algorithm.update(
            algorithm.init(params),
            {"w": torch.tensor([[9.0, 1.0, 1.0, 1.0]]), "b": params["b"]},
            0,
        )
        assert state.masks["w"].tolist() == [[True, False, False, True]]

    def test_under_vmap(self):
        algorithm, w = sf.one_shot(0.5, product), torch.randn(3, 4, 5)
        run = torch.vmap(
            lambda w: algorithm.update(algorithm.init({"w": w}), {"w": w}, 0).masks["w"]
        )
        assert torch.equal(
            run(w)[1],
            algorithm.update(algorithm.init({"w": w[1]}), {"w": w[1]}, 0).masks["w"],
        )

    def test_errors(self):
        with pytest.raises(
            TypeError,
            match=r"expected fn to be a function of \(weight, grad, mask\), got "
            r"<lambda>",
        ):
            sf.scores.leafwise(lambda weight: weight)
        with pytest.raises(
            TypeError, match="expected scores to be a tensor, got float at 'w'"
        ):
            sf.scores.leafwise(lambda w, g, m: 1.0)(state_of(w=torch.ones(2)), (), 0)
        bad = sf.one_shot(0.5, sf.scores.leafwise(lambda w, g, m: w.sum()))
        with pytest.raises(ValueError, match=r"scores.*shape \(2, 2\).*'w'"):
            bad.update(bad.init({"w": torch.ones(2, 2)}), {"w": torch.ones(2, 2)}, 0)


class TestLamp:
    def test_worked_example(self):
        expected = torch.tensor([1 / 30, 4 / 29, 9 / 25, 1], dtype=torch.float64)
        assert torch.equal(lamp(torch.tensor([1.0, 2.0, 3.0, 4.0])), expected)
        assert torch.equal(
            lamp(torch.tensor([[-3.0, 1.0], [4.0, -2.0]])),
            expected[[2, 0, 3, 1]].reshape(2, 2),
        )

    def test_the_scale_of_a_leaf_does_not_count(self):
        w = torch.randn(6, 7)
        assert torch.equal(lamp(w), lamp(w * 2.0**-9)) and lamp(w).max() == 1.0

    def test_zeros_and_ties(self):
        assert lamp(torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert lamp(torch.tensor([0.0, 1.0, 1.0])).tolist() == [0.0, 1.0, 0.5]
        assert (
            lamp(torch.tensor([float("nan"), 2.0]))[1] == 1.0
            and lamp(torch.tensor([float("nan"), 2.0]))[0].isnan()
        )
        assert lamp(torch.zeros(0, 3)).shape == (0, 3)

    def test_is_magnitude_pruning_at_its_counts_and_every_leaf_keeps_its_best(
        self,
    ):
        generator = torch.Generator().manual_seed(0)
        scales = {"a": 1.0, "b": 9.0, "c": 0.1}
        params = {
            path: torch.randn(5, 6, generator=generator) * scale
            for path, scale in scales.items()
        }
        for keep in (3, 20, 60):
            sparsity = torch.tensor(1 - keep / 90, dtype=torch.float64)
            algorithm = sf.one_shot(
                sparsity, sf.scores.lamp, distribution=sf.budgets.global_()
            )
            masks = algorithm.update(algorithm.init(params), params, 0).masks
            assert sum(int(m.sum()) for m in masks.values()) == keep
            for path, mask in masks.items():
                assert mask.any() and torch.equal(
                    mask, sf.masks.topk_mask(params[path].abs(), int(mask.sum()))
                )

    def test_looped_and_vmapped_are_the_same(self):
        w = torch.randn(4, 5, 6)
        assert torch.equal(torch.vmap(lamp)(w), torch.stack([lamp(x) for x in w]))


# ---- distances of slices ----


def leaf_state(w):
    return sf.State({"w": w}, {"w": torch.ones_like(w, dtype=torch.bool)})


def distances(w, *args, **kwargs):
    return sf.scores.distance(*args, **kwargs)(leaf_state(w), (), 0)["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", [1, 2, 3.0, math.inf])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((5, 7), 0), ((5, 7), -1), ((4, 3, 2, 2), 0), ((4, 3, 2, 2), 1), ((6,), 0)],
)
def test_distance_sums_over_the_other_slices(shape, axis, norm, dtype):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    found = distances(w, norm, pattern=sf.patterns.channel(axis))
    flat = w.movedim(axis, 0).reshape(w.shape[axis], -1)
    want = torch.cdist(flat, flat, p=norm).sum(1)
    assert found.shape == w.shape
    assert found.dtype == dtype
    for entry in found.movedim(axis, 0).reshape(w.shape[axis], -1).unbind(1):
        torch.testing.assert_close(entry, want)


def test_distance_takes_a_function_of_the_slices():
    w = torch.tensor([[[1.0, 2.0]], [[3.0, 5.0]]])
    seen = []

    def signed(rows):
        seen.append(rows.tolist())
        return rows[:, :1] - rows[None, :, 0]

    assert distances(w, signed).tolist() == [[[2.0, 2.0]], [[2.0, 2.0]]]
    assert seen == [[[1.0, 2.0], [3.0, 5.0]]]
    with pytest.raises(
        ValueError,
        match=r"distance: expected norm to give shape \(2, 2\) at 'w', got \(2, 1\)",
    ):
        distances(w, lambda rows: rows[:, :1])


def test_distance_looks_at_sparsified_leaves_alone():
    params = {"b": torch.ones(9), "s": torch.ones(()), "w": torch.eye(2)}
    masks = {
        "b": torch.tensor(True),
        "s": torch.tensor(True),
        "w": torch.ones(2, 2, dtype=torch.bool),
    }
    found = sf.scores.distance(1)(sf.State(params, masks), (), 0)
    assert not found["b"].any()
    assert not found["s"].any()
    assert found["w"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_distance_of_16_bit_weights_is_summed_in_32(dtype):
    w = torch.tensor([[1.0], [1.0078125], [256.0]], dtype=dtype)
    found = distances(w, 1)
    assert found.dtype == torch.float32
    assert found.flatten().tolist() == distances(w.float(), 1).flatten().tolist()


def test_distance_errors():
    with pytest.raises(
        ValueError,
        match=r"distance: channel.axis=2, norm=1.: no axis 2 in shape \(2, 2\) at 'w'",
    ):
        distances(torch.ones(2, 2), pattern=sf.patterns.channel(2))
    for bad in ("2", True, None):
        with pytest.raises(
            TypeError,
            match="expected norm to be a number or a function of the slices, got "
            f"{bad!r}",
        ):
            sf.scores.distance(bad)


@pytest.mark.deep
@pytest.mark.parametrize("norm", [1, 2])
def test_distance_is_the_same_bits_whatever_runs_it(norm, monkeypatch):
    w = torch.randn(6, 37, 33, generator=torch.Generator().manual_seed(0))
    want = torch.stack([distances(x, norm) for x in w])

    def score(x):
        return distances(x, norm)

    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(torch.stack([score(x) for x in w]), want)
    assert torch.equal(torch.func.vmap(score)(w), want)
    assert torch.equal(torch.func.vmap(score, in_dims=2)(w.permute(1, 2, 0)), want)
    assert torch.equal(
        torch.compile(score, fullgraph=True, backend="aot_eager")(w[0]), want[0]
    )
    monkeypatch.setattr(module, "_PIECE", 5000)
    assert torch.equal(score(w[1]), want[1])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 4)])
def test_distance_of_few_slices(shape):
    assert not distances(torch.ones(shape)).any()


def test_the_slices_nearest_to_all_others_are_pruned():
    w = torch.tensor([[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [-9.0, 9.0]])
    algorithm = sf.one_shot(
        0.5, score=sf.scores.distance(), pattern=sf.patterns.channel(0, norm=math.inf)
    )
    mask = algorithm.update(algorithm.init({"w": w}), {"w": w}, 0).masks["w"]
    assert mask.all(1).tolist() == [False, True, False, True]
    assert mask.any(1).tolist() == [False, True, False, True]


# ---- missing connections ----

MASK = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) < 0.4


def score_of(mask, rule="CH2", least=0.0):
    return sf.scores.topology(rule, least)(
        sf.State({"w": torch.zeros(mask.shape)}, {"w": mask}), (), 0
    )["w"]


def by_paths(mask, rule):
    """For each missing connection the paths u - v - u' - v', by its first and its last
    common neighbourhood.
    """
    rows, columns = mask.shape
    found = torch.zeros(rows, columns, dtype=torch.float64)

    def weight(a, b):
        common = int((a & b).sum())
        other = max(int(b.sum()) - common, 1)
        return 0.0 if not common else (1 + common if rule == "CH2" else 1) / other

    for i in range(rows):
        for j in range(columns):
            if not mask[i, j]:
                found[i, j] = sum(
                    weight(mask[i], mask[k]) for k in range(rows) if mask[k, j]
                )
                found[i, j] += sum(
                    weight(mask[:, j], mask[:, k]) for k in range(columns) if mask[i, k]
                )
    return found


@pytest.mark.parametrize("rule", ["CH2", "CH3"])
def test_paths_of_length_three_are_weighed(rule):
    found = score_of(MASK, rule)
    assert torch.allclose(found, by_paths(MASK, rule), rtol=1e-9)
    assert not found[MASK].any() and found[~MASK].any()


def test_permuted_units_have_permuted_scores_to_the_bit():
    rows, columns = torch.randperm(7), torch.randperm(9)
    for rule in ("CH2", "CH3"):
        assert torch.equal(
            score_of(MASK[rows][:, columns], rule),
            score_of(MASK, rule)[rows][:, columns],
        )


def test_sums_are_the_same_in_any_order():
    mask = torch.rand(300, 200, generator=torch.Generator().manual_seed(1)) < 0.1
    order = torch.randperm(300)
    assert torch.equal(score_of(mask[order]), score_of(mask)[order])


def test_a_missing_connection_scores_at_least_so_much():
    mask = torch.tensor([[True, False], [False, False]])
    assert score_of(mask, least=0.5).tolist() == [[0.0, 0.5], [0.5, 0.5]]


def test_leaves_of_other_ranks_are_matrices():
    mask = MASK.reshape(7, 3, 3)
    assert torch.equal(score_of(mask), score_of(MASK).reshape(7, 3, 3))
    assert score_of(torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)


def test_a_rule_is_one_of_two():
    with pytest.raises(
        ValueError, match="expected rule to be 'CH2' or 'CH3', got 'CH1'"
    ):
        sf.scores.topology("CH1")
