"""Statistics of experts: against sums by hand, over batches, what is seen, and what is
refused.
"""

import copy

import optree
import pytest
import torch
import transformers
from torch import nn

import sparsefn as sf
from tests.shrinking.mixtures import IDS, Experts, Mixture, mixtral, qwen

X = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))


def by_hand(model, x):
    """Of each expert how many tokens it gets, and the sum of weight times norm."""
    count, norm = [0] * model.number, [0.0] * model.number
    weights, index = model.router(x).softmax(1).topk(model.k)
    for row, (some, numbers) in enumerate(
        zip(weights / weights.sum(1, keepdim=True), index.tolist(), strict=True)
    ):
        for weight, number in zip(some.tolist(), numbers, strict=True):
            count[number] += 1
            norm[number] += weight * model.experts.one(x[row], number).norm().item()
    return count, torch.tensor(norm, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_sums_by_hand(k):
    torch.manual_seed(0)
    model = Mixture(k=k)
    stats = sf.calibration.experts(model, None, X)
    count, norm = by_hand(model, X)
    assert sorted(stats) == ["experts.down", "experts.up"] and sum(count) == 9 * k
    for of in stats.values():
        assert of["count"].tolist() == count and of["count"].dtype == torch.int64
        assert (
            torch.allclose(of["norm"], norm, rtol=1e-5)
            and of["norm"].dtype == torch.float64
        )


def test_batches_are_added_and_a_state_gives_the_weights():
    torch.manual_seed(0)
    model = Mixture()
    parts = [sf.calibration.experts(model, None, part) for part in (X[:4], X[4:])]
    whole, added = (
        sf.calibration.experts(model, None, X),
        optree.tree_map(torch.add, *parts),
    )
    assert torch.equal(added["experts.up"]["count"], whole["experts.up"]["count"])
    assert torch.allclose(added["experts.up"]["norm"], whole["experts.up"]["norm"])
    other = Mixture().eval()
    state = sf.dense().init(sf.modules.params_of(other))
    of = sf.calibration.experts(model, state, X)["experts.up"]
    assert torch.equal(
        of["norm"], sf.calibration.experts(other, None, X)["experts.up"]["norm"]
    )
    assert not torch.allclose(of["norm"], whole["experts.up"]["norm"])


def test_nothing_of_the_module_changes():
    model = Mixture()
    before = copy.deepcopy(model.state_dict())
    sf.calibration.experts(model, None, X)
    assert not any(
        layer._forward_hooks or layer._forward_hooks_with_kwargs
        for layer in model.modules()
    )
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.requires_grad and x.grad is None for x in model.parameters())


@pytest.mark.parametrize("build", [mixtral, qwen])
def test_of_transformers_whatever_runs_the_experts(build):
    model, found = build(), []
    for kind in ("eager", "batched_mm", "grouped_mm"):
        model.config._experts_implementation = kind
        found.append(sf.calibration.experts(model, None, **IDS))
    assert sorted(found[0]) == sorted(
        name for name, x in model.named_parameters() if x.ndim == 3
    )
    for path, of in found[0].items():
        assert of["count"].sum() == 24 * 2
        for other in found[1:]:
            assert torch.equal(of["count"], other[path]["count"])
            assert torch.allclose(of["norm"], other[path]["norm"], rtol=1e-4)
    layer, rows = model.model.layers[0].mlp, []
    layer.experts.register_forward_pre_hook(lambda _, args: rows.append(args))
    model(**IDS)
    x, index, weights = rows[0]
    gate, up = (x @ layer.experts.gate_up_proj[1].T).chunk(2, -1)
    norms = ((nn.functional.silu(gate) * up) @ layer.experts.down_proj[1].T).norm(dim=1)
    of = found[0]["model.layers.0.mlp.experts.down_proj"]
    assert torch.allclose(
        of["norm"][1],
        (weights * norms[:, None] * (index == 1)).sum().double(),
        rtol=1e-4,
    )


def test_convolutions_are_no_experts():
    model = nn.Sequential(Mixture(), nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1))
    assert sorted(sf.calibration.experts(model, None, X)) == [
        "0.experts.down",
        "0.experts.up",
    ]


class Given(nn.Module):
    """Experts in a module that is called with what they are."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *args, **kwargs):
        return self.experts(*args, **kwargs)


class Squared(Experts):
    def forward(self, x, index, *, weights):
        return super().forward(x, index, weights=weights**2)


@pytest.mark.parametrize(
    ("model", "args", "text"),
    [
        (
            nn.Sequential(nn.Conv1d(3, 2, 1)),
            (torch.ones(1, 3, 4),),
            "but the Sequential called none",
        ),
        (
            Given(Experts()),
            (X, torch.ones(9, 1, dtype=torch.int64), torch.ones(9, 2)),
            "but the Given called none",
        ),
        (
            Given(Squared()),
            (X, torch.ones(9, 1, dtype=torch.int64), torch.full((9, 1), 0.5)),
            "they give something else",
        ),
        (
            Given(Experts()),
            (X, torch.full((9, 1), -1), torch.ones(9, 1)),
            "with numbers of 4 experts, got others",
        ),
        (
            Given(Experts()),
            (X * torch.inf, torch.ones(9, 1).long(), torch.ones(9, 1)),
            "finite outputs of experts",
        ),
    ],
)
def test_what_is_refused(model, args, text):
    given = {} if len(args) < 3 else {"weights": args[2]}
    with pytest.raises(ValueError, match=f"^experts: expected .*{text}"):
        sf.calibration.experts(model, None, *args[:2], **given)


def test_another_state():
    with pytest.raises(
        TypeError, match="expected state to be a State from init, or None, got dict"
    ):
        sf.calibration.experts(Mixture(), {}, X)


def test_negative_weights_count_by_their_size():
    torch.manual_seed(0)
    model, index = Experts(), torch.tensor([[0, 1], [1, 2], [2, 0]])
    weights = torch.tensor([[0.5, -0.5], [1.0, 0.25], [-0.25, -2.0]])
    stats = sf.calibration.experts(model, None, X[:3], index, weights=weights)["up"]
    assert sf.checkpoint.tree_equal(
        stats,
        sf.calibration.experts(model, None, X[:3], index, weights=weights.abs())["up"],
    )
    norm = torch.zeros(4, dtype=torch.float64)
    for row in range(3):
        for number, weight in zip(
            index[row].tolist(), weights[row].tolist(), strict=True
        ):
            norm[number] += (weight * model.one(X[row], number)).norm().item()
    assert torch.allclose(stats["norm"], norm, rtol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
def test_routers_in_groups_with_a_correction(normed):
    # The correction, negative too, says which experts are chosen; weights are those
    # without it.
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
    }
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
    }
    routes = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
    }
    ranks = {
        "v_head_dim": 8,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "first_k_dense_replace": 0,
        "vocab_size": 64,
    }
    config = transformers.DeepseekV3Config(
        **sizes, **heads, **routes, **ranks, norm_topk_prob=normed
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    layer = model.model.layers[0].mlp
    torch.nn.init.normal_(layer.gate.weight)
    layer.gate.e_score_correction_bias.copy_(torch.linspace(-0.5, 0.5, 8))
    given = []
    handle = layer.register_forward_pre_hook(
        lambda _, args: given.append(args[0].detach().reshape(-1, 16))
    )
    stats = sf.calibration.experts(model, None, **IDS, use_cache=False)[
        "model.layers.0.mlp.experts.down_proj"
    ]
    handle.remove()
    x, (count, norm) = (
        given[0],
        (torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.float64)),
    )
    with torch.no_grad():
        probabilities = (x @ layer.gate.weight.T).sigmoid()
        chosen = probabilities + layer.gate.e_score_correction_bias
        # both of a group are its best two
        best = chosen.view(-1, 4, 2).sum(-1).topk(2).indices
        inside = torch.zeros(len(x), 4).scatter(1, best, 1.0).repeat_interleave(2, 1)
        for row, numbers in enumerate(
            chosen.where(inside > 0, -torch.inf).topk(2).indices.tolist()
        ):
            total = sum(probabilities[row, n] for n in numbers) if normed else 1
            for number in numbers:
                gate, up = (layer.experts.gate_up_proj[number] @ x[row]).chunk(2)
                out = layer.experts.down_proj[number] @ (
                    torch.nn.functional.silu(gate) * up
                )
                weight = (
                    probabilities[row, number] / total * config.routed_scaling_factor
                )
                count[number] += 1
                norm[number] += float(weight * out.norm())
    assert torch.equal(stats["count"], count) and torch.allclose(
        stats["norm"], norm, rtol=1e-4
    )
    pattern = sf.patterns.tied(
        [
            ["*.gate.weight", 0],
            ["*.experts.gate_up_proj", 0],
            ["*.experts.down_proj", 0],
        ]
    )
    named = {"model.layers.0.mlp.experts.down_proj": stats}
    algorithm = sf.one_shot(0.5, sf.scores.reap(named, pattern), pattern=pattern)
    params = sf.modules.params_of(model)
    kept = algorithm.update(algorithm.init(params), params, 0).masks[
        "model.layers.0.mlp.gate.weight"
    ][:, 0]
    means = torch.where(count > 0, norm / count.clamp(min=1), 0.0)
    assert set(kept.nonzero().flatten().tolist()) == set(means.topk(4).indices.tolist())
