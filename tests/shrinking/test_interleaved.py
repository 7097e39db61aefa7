"""gpt-oss: experts stored as [experts, in, out], gate and up column by column; and a
gated delta net.
"""

from functools import partial

import pytest
import torch
import transformers as hf
from transformers.models.qwen3_next import modeling_qwen3_next

import sparsefn as sf
from tests.shrinking.mixtures import IDS, seeded

UP, DOWN = (
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.down_proj",
)


def gpt_oss():
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_local_experts": 4,
    }
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 8,
    }
    # else transformers warns of its numbers
    rope = {"rope_type": "default", "rope_theta": 1e4}
    routes = {
        "num_experts_per_tok": 2,
        "vocab_size": 32,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }
    return seeded(
        hf.GptOssForCausalLM(
            hf.GptOssConfig(**sizes, **heads, **routes, rope_parameters=rope)
        )
    )


@pytest.mark.deep
def test_gate_and_up_of_a_unit_go_together():
    model, example = gpt_oss(), IDS | {"use_cache": False}
    groups = sf.shrinking.groups(model, example)
    (number,) = [
        i
        for i, group in enumerate(groups)
        if any(member.leaf == UP for member in group.members)
    ]
    dims = {(member.leaf, member.dim) for member in groups[number].members}
    assert dims == {(UP, 2), (f"{UP}_bias", 1), (DOWN, 1)} and groups[number].size == 8
    algorithm = sf.one_shot(0.5, pattern=groups.pattern(only=[number]))
    params = sf.modules.params_of(model)
    state = algorithm.update(algorithm.init(params), params, 0)
    units = state.masks[UP][0, 0]
    assert torch.equal(units[::2], units[1::2]) and units.sum() == 8
    made = sf.shrinking.smaller(model, state, example)
    assert made.module.get_parameter(UP).shape == (
        4,
        16,
        8,
    ) and made.module.get_parameter(DOWN).shape == (4, 4, 16)
    torch.testing.assert_close(
        made.module(**example).logits, sf.modules.bake(model, state)(**example).logits
    )


def test_wanda_and_2_to_4_take_the_axis_of_the_inputs():
    model, params = gpt_oss(), sf.modules.params_of(gpt_oss())
    # which reach all experts
    words = torch.randint(1, 32, (8, 32), generator=torch.Generator().manual_seed(0))
    stats = sf.calibration.inputs(model, None, input_ids=words, use_cache=False)
    axis = sf.modules.pattern_axis(model, UP)
    rows, pairs = sf.patterns.row_balanced(axis=(0, 2)), sf.patterns.nm(2, 4, axis=axis)
    made = {
        "rows": sf.methods.wanda(0.5, stats, pattern=rows, where=[UP, DOWN]),
        "2:4": sf.methods.wanda(None, stats, pattern=pairs, where=[UP, DOWN]),
    }
    norms = {
        path: (stats[path]["square"] / stats[path]["count"][:, None, None]).sqrt()
        for path in (UP, DOWN)
    }
    for name, algorithm in made.items():
        masks = algorithm.update(algorithm.init(params), params, 0).masks
        for path in (UP, DOWN):
            scores = (params[path].abs() * norms[path].float()).mT  # [experts, out, in]
            for kept, own in zip(masks[path].mT, scores, strict=True):
                pattern = (
                    sf.patterns.row_balanced()
                    if name == "rows"
                    else sf.patterns.nm(2, 4)
                )
                count = own.shape[1] // 2 if name == "rows" else None
                assert torch.equal(
                    kept, sf.masks.topk_mask(own, count, pattern=pattern)
                )
    solved = sf.methods.sparsegpt(
        None, stats, pattern=sf.patterns.nm(2, 4), where=[UP, DOWN]
    )
    masks = solved.update(solved.init(params), params, 0).masks
    for path in (UP, DOWN):
        assert (masks[path].mT.unflatten(-1, (-1, 4)).sum(-1) == 2).all()


@pytest.mark.deep
def test_the_gated_delta_net_of_qwen3_next(monkeypatch):
    # Of two tokens a chunk instead of 64, as torch exports each step of one.
    name = "torch_chunk_gated_delta_rule"
    monkeypatch.setattr(
        modeling_qwen3_next,
        name,
        partial(getattr(modeling_qwen3_next, name), chunk_size=2),
    )
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "pad_token_id": 0,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = {"layer_types": ["linear_attention"], "mlp_only_layers": [0]}
    model = seeded(
        hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**sizes, **heads, **linear, **kinds))
    )
    example = {"input_ids": torch.tensor([[3, 9], [17, 40]]), "use_cache": False}
    groups = sf.shrinking.groups(model, example)
    attention = "model.layers.0.linear_attn"
    dims = [{(member.leaf, member.dim) for member in group.members} for group in groups]
    # Keys and queries lose entries of a head; values and gates stay, as the norm takes
    # their mean.
    assert {
        (f"{attention}.conv1d.weight", 0),
        (f"{attention}.in_proj_qkvz.weight", 0),
    } in dims and len(dims) == 2
    assert groups.stays[f"{attention}.norm.weight", 0].startswith(
        "joined with what stays"
    )
    assert groups.stays[f"{attention}.out_proj.weight", 1].startswith(
        "joined with what stays"
    )
    algorithm = sf.one_shot(0.25, pattern=groups.pattern())
    params = sf.modules.params_of(model)
    state = algorithm.update(algorithm.init(params), params, 0)
    made = sf.shrinking.smaller(model, state, example, form="program")
    assert made.module.get_parameter(f"{attention}.conv1d.weight").shape == (28, 1, 4)
    small, masked = (
        made.module(**example).logits,
        sf.modules.bake(model, state)(**example).logits,
    )
    torch.testing.assert_close(small, masked, rtol=1e-4, atol=1e-4)
