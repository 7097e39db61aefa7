"""Experts that no token reached: refused by name, left dense, or pruned by size."""

import optree
import pytest
import torch
import transformers
from torch import nn

import sparsefn as sf

fill = sf.calibration.fill_unreached


class Fused(nn.Module):
    """Three experts in one leaf, of which data reaches the first and the last."""

    def __init__(self, turned=False):
        super().__init__()
        self.turned = turned
        self.experts = nn.Parameter(
            torch.randn(3, 8, 4) if turned else torch.randn(3, 4, 8)
        )

    def forward(self, x):
        matrices = self.experts if self.turned else self.experts.mT
        return x @ matrices[0] + (2 * x) @ matrices[2]


class Listed(nn.Module):
    """Three experts in a list, of which data reaches the first and the last."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.experts[0](x) + self.experts[2](x)


def batch(rows=40):
    return torch.randn(rows, 8) * torch.logspace(-1, 1, 8)


def masks(algorithm, params):
    return algorithm.update(algorithm.init(params), params, 0).masks


def methods(outputs, inputs):
    rows = sf.patterns.row_balanced(axis=outputs)
    return {
        "wanda": lambda stats: sf.methods.wanda(0.5, stats, pattern=rows),
        "wanda, 2:4": lambda stats: sf.methods.wanda(
            None, stats, pattern=sf.patterns.nm(2, 4, axis=inputs)
        ),
        "sparsegpt": lambda stats: sf.methods.sparsegpt(
            None, stats, pattern=sf.patterns.nm(2, 4)
        ),
    }


@pytest.mark.parametrize("name", methods(0, 1))
@pytest.mark.parametrize("turned", [False, True])
def test_an_expert_that_no_token_reached_is_refused_or_goes_by_size(name, turned):
    torch.manual_seed(0)
    model, x = Fused(turned), batch()
    outputs, inputs = ((0, 2), 1) if turned else ((0, 1), 2)
    make, params = methods(outputs, inputs)[name], sf.modules.params_of(model)
    stats = sf.calibration.inputs(model, None, x)
    text = (
        "'experts': no input .* reached it: give more data, leave the leaf out with "
        "where=, or prune it by size with"
    )
    with pytest.raises(ValueError, match=text):
        masks(make(stats), params)
    before = {key: value.clone() for key, value in stats["experts"].items()}
    kept = masks(make(fill(stats)), params)["experts"]
    assert all(
        torch.equal(value, before[key]) for key, value in stats["experts"].items()
    )
    weights = params["experts"].mT if turned else params["experts"]
    kept = kept.mT if turned else kept
    whole = name == "wanda"
    pattern = sf.patterns.row_balanced() if whole else sf.patterns.nm(2, 4)
    assert torch.equal(
        kept[1],
        sf.masks.topk_mask(weights[1].abs(), 4 if whole else None, pattern=pattern),
    )
    # The others have the masks of an expert of their own.
    for number in (0, 2):
        alone = sf.calibration.inputs(
            nn.Linear(8, 4), None, x * (1 + number / 2), paths="weight"
        )
        own = methods(0, 1)[name](alone)
        assert torch.equal(
            kept[number], masks(own, {"weight": weights[number].contiguous()})["weight"]
        )


def test_weights_of_an_unreached_expert_stay_what_they_are_under_sparsegpt():
    torch.manual_seed(0)
    model, x = Fused(), batch()
    stats, params = (
        fill(sf.calibration.inputs(model, None, x)),
        sf.modules.params_of(model),
    )
    algorithm = sf.methods.sparsegpt(0.5, stats)
    state = algorithm.update(algorithm.init(params), params, 0)
    old, new, mask = params["experts"], state.params["experts"], state.masks["experts"]
    assert torch.equal(new[1], torch.where(mask[1], old[1], 0.0))
    assert not torch.equal(new[0], torch.where(mask[0], old[0], 0.0))


def test_experts_in_a_list_are_left_dense_or_go_by_size():
    torch.manual_seed(0)
    model, x = Listed(), batch()
    missing = "experts.1.weight"
    with pytest.raises(
        ValueError, match=f"wanda: no data for the leaf '{missing}': no input"
    ):
        sf.calibration.in_order(
            model, None, ["experts.*"], lambda stats: sf.methods.wanda(0.5, stats), x
        )

    def reached(stats):
        return sf.methods.wanda(
            0.5, stats, where=[path for path in stats if stats[path]["count"] > 1]
        )

    def by_size(stats):
        return sf.methods.wanda(0.5, fill(stats))

    dense = sf.calibration.in_order(model, None, ["experts.*"], reached, x).masks
    sized = sf.calibration.in_order(
        model, None, ["experts.*"], by_size, x, chunk_size=8
    ).masks
    weight = model.experts[1].weight.detach().abs()
    assert not dense[missing].ndim and torch.equal(
        sized[missing],
        sf.masks.topk_mask(weight, 4, pattern=sf.patterns.row_balanced()),
    )
    for path in ("experts.0.weight", "experts.2.weight"):
        assert torch.equal(dense[path], sized[path]) and (dense[path].sum(1) == 4).all()


def test_one_input_and_zeros_alone_are_as_none():
    x = batch(1)
    stats = fill(sf.calibration.inputs(nn.Linear(8, 2), None, x))["weight"]
    assert int(stats["count"]) == 2 and torch.equal(
        stats["square"], torch.full((8,), 2.0).double()
    )
    assert torch.equal(stats["gram"], 2 * torch.eye(8))
    model = Fused()
    model.forward = lambda x: x @ model.experts[0].T + (0 * x) @ model.experts[1].T
    found = sf.calibration.inputs(model, None, batch())
    stats = fill(found)["experts"]
    size = found["experts"]["square"][0].mean() / 40  # of an entry of an input
    assert stats["count"].tolist() == [40, 2, 2]
    torch.testing.assert_close(stats["square"][1:], (2 * size).expand(2, 8))
    torch.testing.assert_close(
        stats["gram"][2], (2 * size * torch.eye(8)).to(torch.float32)
    )


def test_what_data_reached_and_its_order_stay():
    model, x = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), batch()
    stats = sf.calibration.inputs(model, None, x, of="square")
    assert sf.checkpoint.tree_equal(fill(stats), stats) and list(fill(stats)) == list(
        stats
    )


def test_statistics_of_another_kind():
    with pytest.raises(
        ValueError,
        match="fill_unreached: expected 'count' and 'square' in the statistics at 'e', "
        "got",
    ):
        fill({"e": {"count": torch.tensor([1, 0]), "norm": torch.tensor([1.0, 0.0])}})


LAYERS = {
    "linear": (lambda: nn.Linear(8, 4), (3, 8)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 5, 5)),
    "groups": (lambda: nn.Conv1d(4, 6, 3, groups=2), (2, 4, 5)),
    "Conv1D": (lambda: transformers.pytorch_utils.Conv1D(4, 8), (3, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_no_batch_reached_have_the_shapes_of_others(name):
    make, shape = LAYERS[name]

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = make(), make()

        def forward(self, x, other=False):
            return self.unused(x) if other else self.used(x)

    model, x = Either(), torch.randn(shape)
    stats = sf.calibration.inputs(model, None, x)
    used, unused = stats["used.weight"], stats["unused.weight"]
    kinds = [
        {key: (value.shape, value.dtype) for key, value in of.items()}
        for of in (used, unused)
    ]
    assert kinds[0] == kinds[1] and not any(value.any() for value in unused.values())
    later = sf.calibration.inputs(model, None, x, other=True)
    both = optree.tree_map(torch.add, stats, later)
    assert sf.checkpoint.tree_equal(both["unused.weight"], later["unused.weight"])
    weights = sf.modules.params_of(model)
    kept = masks(
        sf.one_shot(0.5, sf.scores.wanda(fill(stats)), where="*.weight"), weights
    )["unused.weight"]
    assert torch.equal(
        kept, sf.masks.topk_mask(weights["unused.weight"].abs(), kept.numel() // 2)
    )


def test_attention_that_no_batch_reached_is_left_out():
    class Skipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.layer(x)

    stats = sf.calibration.inputs(Skipped(), None, batch())
    with pytest.raises(
        ValueError,
        match=r"with a shape at 'attention\.in_proj_weight', but no batch reached its "
        r"layer",
    ):
        fill(stats)
