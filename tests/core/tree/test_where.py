"""Which leaves are sparsified: the default rule, functions, globs, and what is
refused.
"""

import re

import pytest
import torch

from sparsefn.core.tree.where import (
    _ANYWHERE,
    _LAST_WORDS,
    _WORDS,
    default_where,
    select_leaves,
    shares,
    why_dense,
)

W, B = torch.zeros(2, 2), torch.zeros(2)


# Names of real models, with shapes of as many dimensions as they have there.
SPARSE = """
    0.weight                                                    2 2
    conv.weight                                                 2 2 3 3
    transformer.h.0.attn.c_attn.weight                          4 12
    transformer.h.0.mlp.c_fc.weight                             4 16
    model.layers.0.self_attn.q_proj.weight                      4 4
    model.layers.0.mlp.gate_proj.weight                         8 4
    model.layers.0.mlp.shared_experts.up_proj.weight            8 4
    model.layers.0.mlp.shared_expert_gate.weight                1 4
    bert.encoder.layer.0.attention.self.query.weight            4 4
    bert.pooler.dense.weight                                    4 4
    encoder.block.0.layer.0.SelfAttention.q.weight              4 4
    blocks.0.attn.qkv.weight                                    12 4
    blocks.0.mlp_tokens.fc1.weight                              4 4
    layers.0.blocks.0.attn.proj.weight                          4 4
    layer1.0.conv1.weight                                       4 4 3 3
    layer2.0.downsample.0.weight                                4 4 1 1
    visual.proj                                                 4 4
    text_projection                                             4 4
    weight_ih_l0                                                8 2
    lstm.weight_hh_l1_reverse                                   8 2
    self_attn.in_proj_weight                                    12 4
    self_attn.out_proj.weight                                   4 4
    fc.weight_v                                                 4 4
    my_parametrizations.weight                                  4 4
    gate.w_g                                                    4 4
    classifier.weight                                           3 4
    score.weight                                                3 4
    fc.weight                                                   3 4
    head.weight                                                 3 4
    regressor.weight                                            1 4
    shared.0.weight                                             4 4
    multi_scale.0.weight                                        4 4
    token_mixer.weight                                          4 4
    decomposition.weight                                        4 4
"""
DENSE = """
    0.bias                                                      2
    scale
    transformer.wte.weight                                      9 4
    transformer.wpe.weight                                      9 4
    transformer.ln_f.weight                                     2 2
    h.0.ln1.weight                                              2 2
    lm_head.weight                                              9 4
    LM_head.weight                                              9 4
    model.embed_tokens.weight                                   9 4
    model.layers.0.input_layernorm.weight                       4
    model.decoder.embed_positions.weight                        9 4
    embed_out.weight                                            9 4
    bert.embeddings.word_embeddings.weight                      9 4
    bert.embeddings.token_type_embeddings.weight                2 4
    bert.embeddings.LayerNorm.weight                            4 4
    tok_Embeddings.weight                                       9 4
    tok_emb.weight                                              9 4
    pos_emb                                                     1 9 4
    shared.weight                                               9 4
    model.shared.weight                                         9 4
    encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight   32 4
    encoder.layer.0.attention.rel_embeddings.weight             9 4
    pos_embed                                                   1 9 4
    cls_token                                                   1 1 4
    dist_token                                                  1 1 4
    mask_tokens                                                 1 3 4
    patch_embed.proj.weight                                     4 3 2 2
    vit.embeddings.patch_embeddings.projection.weight           4 3 2 2
    layers.0.blocks.0.attn.relative_position_bias_table         9 4
    layers.0.blocks.0.attn.logit_scale                          4 1 1
    blocks.0.attn.rel_pos_h                                     9 4
    visual.class_embedding                                      4
    positional_embedding                                        9 4
    encoder.positional                                          9 4
    bn1.weight                                                  4
    layer2.0.downsample.1.weight                                4
    self_attn.bias_k                                            1 1 4
    transformer.r_w_bias                                        2 4
    fc.parametrizations.weight.original                         4 4
    fc.parametrizations.weight.original0                        4 4
    fc.parametrizations.weight.original1                        4 4
    fc.parametrizations.weight.0.lora_A                         2 4
    fc.parametrizations.weight.original0                        4 1
    parametrizations.weight.original0                           4 1 1 1
    conv.weight_g                                               4 1 1 1
    lstm.weight_hh_l0_g                                         8 1
    x.pe_helper.y                                               2 2
"""


def rows(table):
    return [
        (path, tuple(map(int, shape)))
        for path, *shape in map(str.split, table.strip().splitlines())
    ]


@pytest.mark.parametrize(
    ("path", "shape", "chosen"),
    [(*row, table is SPARSE) for table in (SPARSE, DENSE) for row in rows(table)],
)
def test_default_where(path, shape, chosen):
    assert default_where(path, torch.zeros(shape)) is chosen


def test_the_words_of_the_docstring_are_those_of_the_rule():
    named = set(re.findall("`([a-z_0-9]+)`", default_where.__doc__))
    assert {*_ANYWHERE, *_WORDS, *_LAST_WORDS} <= named


def test_order_is_optrees_whatever_the_insertion():
    a = {"b": {"weight": W, "bias": B}, "a": W}
    b = {"a": W, "b": {"bias": B, "weight": W}}
    assert list(select_leaves(a)) == list(select_leaves(b)) == ["a", "b.weight"]
    assert select_leaves(a)["a"] is W


def test_globs_match_whole_paths_tell_case_apart_and_cross_dots():
    params = {"enc": {"0": {"weight": W, "bias": B}}, "Enc": {"weight": W}}
    assert list(select_leaves(params, "enc.*")) == ["enc.0.bias", "enc.0.weight"]
    assert list(select_leaves(params, "*weight")) == ["Enc.weight", "enc.0.weight"]
    assert list(select_leaves(params, ("enc.0.bias", "Enc.*"))) == [
        "Enc.weight",
        "enc.0.bias",
    ]
    with pytest.raises(
        ValueError,
        match=r"where: no path matches 'weight'; the paths are 'Enc.weight', "
        r"'enc.0.bias'",
    ):
        select_leaves(params, "weight")
    with pytest.raises(ValueError, match=r"no path matches 'nothing\*'"):
        select_leaves(params, ["enc.*", "nothing*"])


def test_a_0d_leaf_is_never_selected():
    params = {"scale": torch.zeros(()), "w": B}
    assert list(select_leaves(params, "*")) == ["w"]
    assert list(select_leaves(params, lambda path, leaf: True)) == ["w"]


def test_nothing_selected_warns_with_the_paths():
    text = r"no leaf is sparsified: where selects none of the paths \('bias', 'scale'\)"
    with pytest.warns(UserWarning, match=text):
        assert select_leaves({"bias": B, "scale": torch.zeros(())}) == {}
    with pytest.warns(UserWarning, match=r"none of the paths \(none\)"):
        select_leaves({})
    with pytest.warns(UserWarning, match="no leaf is sparsified"):
        select_leaves({"w": W}, [])


def test_params_must_be_floating_point_tensors():
    with pytest.raises(
        TypeError, match=r"expected floating-point params, got torch.int64 at 'a.b'"
    ):
        select_leaves({"a": {"b": torch.zeros(2, 2, dtype=torch.int64)}, "w": W})
    with pytest.raises(
        TypeError, match=r"expected floating-point params, got torch.complex64 at 'w'"
    ):
        select_leaves({"w": torch.zeros(2, 2, dtype=torch.complex64)})
    with pytest.raises(
        TypeError, match=r"expected floating-point params, got float at '1'"
    ):
        select_leaves([W, 1.0])


def test_other_kinds_of_where_are_refused():
    with pytest.raises(
        TypeError,
        match="expected where to be a function, a glob or a sequence of globs, got int",
    ):
        select_leaves({"w": W}, 3)
    with pytest.raises(TypeError, match="expected where to hold globs, got int"):
        select_leaves({"w": W}, ["*", 3])


def test_under_compile_and_vmap():
    def chosen(w):
        return [leaf * 2 for leaf in select_leaves({"w": w, "b": w[0]}, ["w"]).values()]

    w = torch.arange(8.0).reshape(2, 2, 2)
    assert torch.equal(
        torch.compile(chosen, fullgraph=True, backend="eager")(w[0])[0], w[0] * 2
    )
    assert torch.equal(torch.vmap(lambda w: torch.stack(chosen(w)))(w)[:, 0], w * 2)


@pytest.mark.parametrize(
    ("path", "shape", "why"),
    [
        ("fc.weight", (2, 2), ""),
        ("norm.weight", (2,), "fewer than 2 dimensions"),
        ("patch_Embed.proj.weight", (2, 2), "'embed' in its name"),
        ("h.0.ln1.weight", (2, 2), "'ln' in its name"),
        ("cls_token", (1, 2), "'token' in its name"),
        ("shared.weight", (9, 2), "'shared.weight' in its name"),
        ("fc.weight_g", (4, 1), "magnitudes of weight norm"),
        (
            "fc.parametrizations.weight.original",
            (4, 4),
            "'fc.weight' is computed from it",
        ),
        ("parametrizations.weight.0.lora_A", (4, 4), "'weight' is computed from it"),
    ],
)
def test_why_a_leaf_is_dense(path, shape, why):
    leaf = torch.zeros(shape)
    assert why_dense(path, leaf) == why
    assert default_where(path, leaf) is (why == "")
    asked = torch.compile(
        lambda x: x + len(why_dense(path, x)), backend="eager", fullgraph=True
    )
    assert torch.equal(asked(leaf), leaf + len(why))


def test_shares_give_each_leaf_to_the_first_that_chooses_it():
    tree, like = (
        {"a": {"w": 1, "b": 2}, "c": 3},
        {"a": {"w": torch.ones(2, 2), "b": torch.ones(2)}, "c": torch.ones(1)},
    )
    rows = shares(
        "split", [lambda path, leaf: leaf.ndim == 2, "a.*", "*.b"], tree, like
    )
    assert rows == [{"a.w": 1}, {"a.b": 2}, {}, {"c": 3}]
    with pytest.raises(
        ValueError, match="split: no path matches 'd'; the paths are 'a.b', 'a.w', 'c'"
    ):
        shares("split", ["d"], tree, like)
