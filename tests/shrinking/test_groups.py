"""Members of groups, as `sf.patterns.tied` takes them and as they are printed.
Groups: what is printed, patterns, masks, and what masks leave alive."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import sparsefn as sf
from sparsefn.shrinking.groups import Member
from tests.shrinking.small import MAP, VECTOR, Of, lin


@pytest.mark.parametrize(
    ("units", "tied", "text"),
    [
        ([0, 1, 2], [], "w[0]"),
        ([0, 0, 1, 1], [2], "w[0] (blocks of 2)"),
        ([0, 1, 0, 1], [1, 2], "w[0] (blocks of 1 in 2 parts)"),
        ([0, 0, 1, 1, 0, 0, 1, 1], [2, 2], "w[0] (blocks of 2 in 2 parts)"),
        ([1, 0, 2], [[1, 0, 2]], "w[0] (3 of 3)"),
        ([0, -1, 1], [[0, -1, 1]], "w[0] (2 of 3)"),
    ],
)
def test_forms(units, tied, text):
    member = Member("w", 0, np.array(units))
    assert member.tied() == ["w", 0, *tied]
    assert str(member) == text


NET = nn.Sequential(
    nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)
).eval()


def test_they_are_a_sequence_and_print_what_stays():
    groups = sf.shrinking.groups(NET, VECTOR)
    assert (
        len(groups) == 2
        and [group.size for group in groups] == [4, 6]
        and groups[1] is list(groups)[1]
    )
    assert str(groups) == (
        "0: 4 units of 10 weights and 36 FLOPs: 0.weight[0], 0.bias[0], 2.weight[1]\n"
        "1: 6 units of 7 weights and 24 FLOPs: 2.weight[0], 2.bias[0], 4.weight[1]\n"
        "stays:\n"
        "  0.weight[1]: joined with what stays by linear at '0'\n"
        "  4.weight[0], 4.bias[0]: it is an output of the model"
    )
    assert groups.stays["4.bias", 0] == "it is an output of the model"


@pytest.mark.parametrize(
    ("units", "tied", "text"),
    [
        ([0, 1, 2], ["w", 1], "w[1]"),
        ([0, 0, 1, 1], ["w", 1, 2], "w[1] (blocks of 2)"),
        ([0, 1, 0, 1], ["w", 1, 1, 2], "w[1] (blocks of 1 in 2 parts)"),
        ([0, -1, 1], ["w", 1, [0, -1, 1]], "w[1] (2 of 3)"),
        ([1, 0], ["w", 1, [1, 0]], "w[1] (2 of 2)"),
        ([0, 0, 1], ["w", 1, [0, 0, 1]], "w[1] (3 of 3)"),
    ],
)
def test_members_as_tied_takes_them(units, tied, text):
    member = Member("w", 1, torch.tensor(units).numpy())
    assert member.tied() == tied and str(member) == text


def test_patterns_prune_units_in_all_members():
    groups, params = sf.shrinking.groups(NET, VECTOR), sf.modules.params_of(NET)
    for only, counts in ((None, [2, 3]), ([1], [4, 3])):
        algorithm = sf.one_shot(0.5, pattern=groups.pattern(only))
        state = algorithm.update(algorithm.init(params), params, 0)
        assert [int(kept.sum()) for kept in groups.alive(state.masks)] == counts


def test_of_groups_that_multiply_one_is_preferred():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 2, 1)
    ).eval()
    groups = sf.shrinking.groups(net, MAP)
    assert [(group.multiplies_with, group.preferred) for group in groups] == [
        (frozenset({1}), True),
        (frozenset({0, 2}), False),
        (frozenset({1}), True),
    ]


@pytest.mark.deep
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_of_one_head_of_keys_and_values_heads_of_queries_go_and_it_stays(
    implementation,
):
    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    config = hf.LlamaConfig(
        num_attention_heads=4,
        num_key_value_heads=1,
        attn_implementation=implementation,
        **sizes,
    )
    model = hf.LlamaForCausalLM(config).eval()
    x = {"input_ids": torch.arange(10).reshape(2, 5), "use_cache": False}
    groups, params = sf.shrinking.groups(model, x), sf.modules.params_of(model)
    name = "model.layers.0.self_attn"
    heads = next(
        i
        for i, group in enumerate(groups)
        if f"{name}.q_proj.weight[0] (blocks of 8)" in str(group)
    )
    widths = [
        i
        for i, group in enumerate(groups)
        if f"{name}.k_proj" in str(group) or f"{name}.v_proj" in str(group)
    ]
    assert (
        groups[heads].preferred
        and len(widths) == 2
        and not any(groups[i].preferred for i in widths)
    )
    assert all(groups[i].multiplies_with == {heads} for i in widths)
    for chosen, shapes in (
        ([heads], [(16, 16), (8, 16)]),
        (widths, [(16, 16), (4, 16)]),
    ):
        algorithm = sf.one_shot(0.5, pattern=groups.pattern(chosen))
        state = algorithm.update(algorithm.init(params), params, 0)
        made, program = (
            sf.shrinking.smaller(model, state, x),
            sf.shrink(model, state, x, form="program"),
        )
        small = made.module.get_submodule(name)
        assert (made.form, made.stays) == ("class", ())
        assert [
            tuple(layer.weight.shape) for layer in (small.q_proj, small.k_proj)
        ] == shapes
        config = made.module.config
        if chosen == [heads]:
            assert made.notes == () and (
                config.num_attention_heads,
                config.num_key_value_heads,
            ) == (2, 1)
        else:  # a new model would rotate by other angles
            assert (
                "keeps its numbers: no others give model.rotary_emb" in made.notes[0]
                and config.head_dim == 8
            )
        masked = sf.modules.bake(model, state)(**x).logits
        for one in (made.module, program):
            assert torch.allclose(one(**x).logits, masked, atol=1e-6)


def test_masks_and_alive_are_inverse():
    groups = sf.shrinking.groups(NET, VECTOR)
    masks = groups.masks({0: [1], 1: [0, 5]})
    assert list(masks) == list(sf.modules.params_of(NET))
    assert masks["2.weight"].sum() == 3 * 4 and masks["4.bias"].all()
    kept = groups.alive(masks)
    assert [units.tolist() for units in kept] == [
        [True, False, True, True],
        [False, True, True, True, True, False],
    ]


def test_alive_needs_the_producer_or_all_readers():
    groups, whole = (
        sf.shrinking.groups(NET, VECTOR),
        {name: torch.tensor(True) for name in sf.modules.params_of(NET)},
    )
    for name, dim in (("0.weight", 0), ("2.weight", 1)):
        mask = torch.ones_like(NET.get_parameter(name), dtype=torch.bool)
        mask.select(dim, 2).zero_()
        assert groups.alive({**whole, name: mask})[0].tolist() == [
            True,
            True,
            False,
            True,
        ]


def test_shared_and_unused_parameters_come_once_under_their_first_names():
    net = Of(
        lambda net, x: net.b(net.d(net.c(net.a(x)))),
        a=nn.Linear(3, 4),
        c=nn.Linear(4, 4),
        b=nn.Linear(4, 2),
    )
    net.d, net.unused = net.c, nn.Linear(5, 7)
    groups = sf.shrinking.groups(net.eval(), VECTOR)
    assert list(groups.masks({0: [1]})) == list(sf.modules.params_of(net))
    assert all(
        not member.leaf.startswith("d.") for group in groups for member in group.members
    )


def test_wrong_groups_and_units():
    groups = sf.shrinking.groups(NET, VECTOR)
    for gone, text in (
        (
            {0: range(4)},
            "groups: expected at least one unit of group 0 to stay, but all 4 go",
        ),
        ({2: [0]}, "groups: expected numbers of the model's 2 groups, from 0, got 2"),
        ({1: [6, -1]}, r"groups: expected units of group 1 from 0 to 5, got \[6, -1\]"),
    ):
        for act in (groups.cut, groups.masks):
            with pytest.raises(ValueError, match=text):
                act(gone)
    with pytest.raises(
        ValueError,
        match="groups: expected numbers of the model's 2 groups, from 0, got -1",
    ):
        groups.pattern([-1])
    for some in (
        groups.pattern,
        lambda only: sf.shrinking.groups(nn.Linear(3, 2), VECTOR).pattern(),
    ):
        with pytest.raises(
            ValueError,
            match=r"groups: expected groups of units to prune, got none of the model's "
            r"\d",
        ):
            some([])


def test_masks_of_another_model():
    groups, whole = (
        sf.shrinking.groups(NET, VECTOR),
        {name: torch.tensor(True) for name in sf.modules.params_of(NET)},
    )
    with pytest.raises(
        ValueError,
        match=r"expected masks of the parameters, but missing are \['0.bias', .* \['w'",
    ):
        groups.alive({"w": torch.ones(2)})
    with pytest.raises(
        ValueError,
        match=r"groups: expected mask of shape \(4, 3\) at '0.weight', got \(5, 3\)",
    ):
        groups.alive({**whole, "0.weight": torch.ones(5, 3, dtype=torch.bool)})


def test_parts_of_a_chunk_are_tied_where_the_code_has_to_run_as_it_is():
    net, x = lin(
        lambda net, x: net.b(
            torch.add(*[part.flip(1) for part in net.a(x).split(2, 1)][::-1])
        ),
        4,
        2,
    )
    assert [group.size for group in sf.shrinking.groups(net.eval(), x)] == [2]
    net, x = lin(
        lambda net, x: net.b(
            torch.cat(
                [net.a(x).split(2, 1)[0], net.a(x).split(2, 1)[1].sum(1, True)], 1
            )
        ),
        4,
        3,
    )
    sizes = [
        [g.size for g in sf.shrinking.groups(net.eval(), x, equal_parts=parts)]
        for parts in (True, False)
    ]
    assert sizes == [[2], [2, 2]]


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x, scale=1.0):
        return self.f(x) * scale


class Branching(nn.Module):
    """What runs depends on values, and one part runs twice."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.head = Coder(), Coder(), nn.Linear(4, 2)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.encoder(self.encoder(x), scale=2.0)
        return self.head(self.decoder(x if x.sum() > 0 else -x, 0.5) + self.shift)


@pytest.mark.parametrize(
    ("only", "leaves"),
    [
        ("encoder", ["encoder.f.0.weight"]),
        (["decoder", "encoder"], ["encoder.f.0.weight", "decoder.f.0.weight"]),
        ("*.f", ["encoder.f.0.weight", "decoder.f.0.weight"]),
    ],
)
def test_submodules_of_a_model_that_cannot_be_exported(only, leaves):
    torch.manual_seed(0)
    model, x = Branching().eval(), torch.randn(3, 4)
    with pytest.raises(
        ValueError, match="torch.export cannot follow the Branching: GuardOnDataDep"
    ):
        sf.shrinking.groups(model, x)
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    groups, params = (
        sf.shrinking.groups(model, x, only=only),
        sf.modules.params_of(model),
    )
    assert [group.members[0].leaf for group in groups] == leaves
    assert before == {name: (id(p), p._version) for name, p in model.named_parameters()}
    assert (
        groups.cost() == sum(p.numel() for p in params.values())
        and groups.masks({0: [1]}).keys() == params.keys()
    )
    for algorithm in (
        sf.one_shot(0.5, pattern=groups.pattern()),
        sf.methods.taylor(2, when=sf.at([0]), pattern=groups.pattern()),
        sf.gmp(
            1.0,
            distribution=sf.budgets.within(groups.cost() - 20, groups, "params"),
            pattern=groups.pattern(),
        ),
    ):
        state = algorithm.update(algorithm.init(params), params, 0)
        kept = [int(units.sum()) for units in groups.alive(state.masks)]
        small = sf.shrink(model, state, x, only=only)
        assert [small.get_parameter(leaf).shape[0] for leaf in leaves] == kept and sum(
            kept
        ) < 8 * len(leaves)
        for more in (x, -x, torch.randn(7, 4)):
            torch.testing.assert_close(
                small(more), sf.modules.call(model, state, more), atol=1e-6, rtol=1e-5
            )


def test_submodules_that_cannot_be_exported():
    model, x = nn.Sequential(nn.Linear(4, 4), Branching()).eval(), torch.randn(3, 4)
    with pytest.raises(
        ValueError,
        match="torch.export cannot follow the submodules '0', '1': "
        "GuardOnDataDependent",
    ):
        sf.shrinking.groups(model, x, only=["0", "1"])
    for only, kind, text in (
        (
            "none",
            ValueError,
            "only: no path matches 'none'; the paths are '0', '1', '1.encoder'",
        ),
        (
            [],
            ValueError,
            r"expected only to be globs of submodules such as 'layers.\*.mlp', got "
            r"none",
        ),
        (
            0,
            TypeError,
            r"expected only to be globs of submodules such as 'layers.\*.mlp', got 0",
        ),
    ):
        with pytest.raises(kind, match=text):
            sf.shrinking.groups(model, x, only=only)
    with pytest.raises(
        ValueError,
        match="expected an example that the Sequential can be called with: it fails "
        "with",
    ):
        sf.shrinking.groups(model, torch.randn(3, 5), only="1.encoder")
    assert [
        group.size
        for group in sf.shrinking.groups(
            nn.Sequential(copy.deepcopy(NET)).to("meta"), VECTOR, only="0"
        )
    ] == [4, 6]
