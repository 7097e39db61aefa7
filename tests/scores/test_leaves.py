import pickle

import pytest
import torch

import sparsefn as sf


def state_of(masks=None, **params):
    whole = {path: torch.ones_like(leaf, dtype=torch.bool) for path, leaf in params.items()}
    return sf.State(params, whole | (masks or {}), key=sf.random.key(3))


def lamp(w):
    return sf.scores.lamp(state_of(w=w), (), 0)["w"]


@sf.scores.leafwise
def product(weight, grad, mask):
    return weight * grad * mask


class TestLeafwise:
    def test_only_sparsified_leaves_are_scored(self):
        state = state_of({"b": torch.tensor(True)}, w=torch.tensor([1.0, 2.0]), b=torch.ones(2))
        found = product(state, {"w": torch.tensor([3.0, 4.0]), "b": torch.ones(2)}, 0)
        assert found["w"].tolist() == [3.0, 8.0] and found["b"].tolist() == [0.0, 0.0]

    def test_without_gradients(self):
        @sf.scores.leafwise
        def given(weight, grad, mask):
            assert grad is None
            return weight

        for grads in (None, ()):
            assert given(state_of(w=torch.ones(2)), grads, 0)["w"].tolist() == [1.0, 1.0]

    def test_a_decorated_function_is_a_score_that_pickles(self):
        assert product.__name__ == "product" and pickle.loads(pickle.dumps(product)) is product
        params = {"w": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "b": torch.ones(1)}
        algorithm = sf.one_shot(0.5, product)
        state = algorithm.update(
            algorithm.init(params), {"w": torch.tensor([[9.0, 1.0, 1.0, 1.0]]), "b": params["b"]}, 0
        )
        assert state.masks["w"].tolist() == [[True, False, False, True]]

    def test_under_vmap(self):
        algorithm, w = sf.one_shot(0.5, product), torch.randn(3, 4, 5)
        run = torch.vmap(lambda w: algorithm.update(algorithm.init({"w": w}), {"w": w}, 0).masks["w"])
        assert torch.equal(run(w)[1], algorithm.update(algorithm.init({"w": w[1]}), {"w": w[1]}, 0).masks["w"])

    def test_errors(self):
        with pytest.raises(TypeError, match=r"expected fn to be a function of \(weight, grad, mask\), got <lambda>"):
            sf.scores.leafwise(lambda weight: weight)
        with pytest.raises(TypeError, match="expected scores to be a tensor, got float at 'w'"):
            sf.scores.leafwise(lambda w, g, m: 1.0)(state_of(w=torch.ones(2)), (), 0)
        bad = sf.one_shot(0.5, sf.scores.leafwise(lambda w, g, m: w.sum()))
        with pytest.raises(ValueError, match=r"scores.*shape \(2, 2\).*'w'"):
            bad.update(bad.init({"w": torch.ones(2, 2)}), {"w": torch.ones(2, 2)}, 0)


class TestLamp:
    def test_worked_example(self):
        expected = torch.tensor([1 / 30, 4 / 29, 9 / 25, 1], dtype=torch.float64)
        assert torch.equal(lamp(torch.tensor([1.0, 2.0, 3.0, 4.0])), expected)
        assert torch.equal(lamp(torch.tensor([[-3.0, 1.0], [4.0, -2.0]])), expected[[2, 0, 3, 1]].reshape(2, 2))

    def test_the_scale_of_a_leaf_does_not_count(self):
        w = torch.randn(6, 7)
        assert torch.equal(lamp(w), lamp(w * 2.0**-9)) and lamp(w).max() == 1.0

    def test_zeros_and_ties(self):
        assert lamp(torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert lamp(torch.tensor([0.0, 1.0, 1.0])).tolist() == [0.0, 1.0, 0.5]
        assert lamp(torch.tensor([float("nan"), 2.0]))[1] == 1.0 and lamp(torch.tensor([float("nan"), 2.0]))[0].isnan()
        assert lamp(torch.zeros(0, 3)).shape == (0, 3)

    def test_is_magnitude_pruning_at_the_counts_it_chooses_and_every_leaf_keeps_its_best(self):
        generator = torch.Generator().manual_seed(0)
        scales = {"a": 1.0, "b": 9.0, "c": 0.1}
        params = {path: torch.randn(5, 6, generator=generator) * scale for path, scale in scales.items()}
        for keep in (3, 20, 60):
            sparsity = torch.tensor(1 - keep / 90, dtype=torch.float64)
            algorithm = sf.one_shot(sparsity, sf.scores.lamp, distribution=sf.budgets.global_())
            masks = algorithm.update(algorithm.init(params), params, 0).masks
            assert sum(int(m.sum()) for m in masks.values()) == keep
            for path, mask in masks.items():
                assert mask.any() and torch.equal(mask, sf.topk_mask(params[path].abs(), int(mask.sum())))

    def test_looped_and_vmapped_are_the_same(self):
        w = torch.randn(4, 5, 6)
        assert torch.equal(torch.vmap(lamp)(w), torch.stack([lamp(x) for x in w]))
