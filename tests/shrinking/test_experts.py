"""Copies that never route to some experts: however the router is multiplied, and in
copies of them.
Models without experts: the outputs of never routing to them, sizes, configs, and
what is refused."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import sparsefn as sf
from sparsefn.shrinking.experts import never_routed
from sparsefn.shrinking.groups import Member
from tests.shrinking.mixtures import (
    BY_HAND,
    IDS,
    PATTERN,
    Mixture,
    mixtral,
    qwen,
    without,
)

GONE = torch.tensor([False, True, False])


class Router(nn.Module):
    def __init__(self, logits, shape=(3, 4)):
        super().__init__()
        self.logits, self.weight = logits, nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.logits(x, self.weight)


def never(model, shape=(3, 4), dim=0):
    return never_routed(model, [(Member("weight", dim, np.arange(3)), GONE)])


@pytest.mark.parametrize(
    "logits",
    [
        functional.linear,
        lambda x, w: functional.linear(x, w, torch.ones(3)),
        lambda x, w: x @ w.T,
        lambda x, w: (w @ x.mT).mT,
        lambda x, w: torch.einsum("...i,ei->...e", x, w),
        lambda x, w: functional.linear(x.double(), w.double()).float(),
        lambda x, w: (
            functional.linear(x, w + 0)
            if x.sum() == 0
            else functional.linear(x, w[None][0])
        ),
    ],
)
@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
def test_products_with_a_router_give_minus_infinity_of_what_goes(logits, shape):
    model, x = Router(logits), torch.randn(shape)
    copied, seen = never(model)
    for one in (copied, copy.deepcopy(copied), copy.deepcopy(copied).double().float()):
        out = one(x)
        assert out[..., 1].isneginf().all() and seen.products == {"weight"}
        assert torch.allclose(out[..., [0, 2]], model(x)[..., [0, 2]])
    assert model(x).isfinite().all() and "forward" not in vars(model)


def test_a_router_may_be_stored_the_other_way():
    model = Router(lambda x, w: x @ w, (4, 3))
    assert (
        never(model, (4, 3), 1)[0](torch.ones(2, 4)).isinf().tolist()
        == [GONE.tolist()] * 2
    )


def test_of_a_square_one_the_side_of_the_experts_is_told():
    place = [(Member("weight", 0, np.arange(3)), GONE)]
    copied, _ = never_routed(Router(functional.linear, (3, 3)), place)
    assert copied(torch.ones(2, 3)).isinf().tolist() == [GONE.tolist()] * 2
    copied, seen = never_routed(Router(lambda x, w: x @ w, (3, 3)), place)
    assert copied(torch.ones(2, 3)).isfinite().all() and not seen.products


def test_a_tensor_that_is_computed_from_it_is_none():
    copied, seen = never(Router(lambda x, w: functional.linear(x, w * 2)))
    assert copied(torch.ones(2, 4)).isfinite().all() and not seen.products


def test_it_is_seen_to_how_many_a_token_is_routed():
    copied, seen = never(
        Router(lambda x, w: functional.linear(x, w).softmax(1).topk(2)[0])
    )
    copied(torch.ones(2, 4))
    assert seen.most == {"weight": 2}


X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


def by_hand(**sizes):
    torch.manual_seed(0)
    return Mixture(**sizes).eval()


@pytest.mark.parametrize("gone", [[0], [3], [0, 2]])
def test_the_outputs_are_those_of_never_routing_to_what_goes(gone):
    model = by_hand()
    made = sf.shrinking.without_experts(
        model, without(model, BY_HAND, gone), X, BY_HAND
    )
    never = copy.deepcopy(model)
    never.out = gone
    assert torch.allclose(made.module(X), never(X), atol=1e-6) and not torch.allclose(
        never(X), model(X), atol=1e-3
    )
    assert (
        isinstance(made.module, Mixture)
        and made.form == "class"
        and made.stays == made.notes == ()
    )
    assert made.module.number == made.module.router.out_features == 4 - len(gone)
    assert made.module.experts.down.shape == (4 - len(gone), 3, 5) and model.number == 4
    assert made.kept["router.weight"].indices[0].tolist() == [
        i for i in range(4) if i not in gone
    ]


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 6), st.data())
def test_of_any_experts(count, data):
    gone = sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1)))
    k = data.draw(st.integers(1, count - len(gone)))
    model = by_hand(experts=count, k=k)
    made = sf.shrinking.without_experts(
        model, without(model, BY_HAND, gone), X, BY_HAND
    )
    model.out = gone
    assert torch.allclose(made.module(X), model(X), atol=1e-6) and made.module.k == k
    assert len(made.module.experts.up) == count - len(gone)


def test_it_is_not_the_masked_model_whose_logits_are_0():
    model = by_hand()
    state = without(model, BY_HAND, [1])
    small = sf.shrinking.without_experts(model, state, X, BY_HAND).module
    assert not torch.allclose(small(X), sf.modules.call(model, state, X), atol=1e-3)


def test_masks_of_other_leaves_are_zeros_and_an_expert_with_one_entry_stays():
    model = by_hand()
    state = without(model, BY_HAND, [1, 2])
    state.masks["experts.up"][2, 0, 0] = True
    state.masks["experts.down"][0, 0] = False
    made = sf.shrinking.without_experts(model, state, X, BY_HAND)
    assert made.stays == (
        "1 experts of 'router.weight' are masked in some of their leaves, and stay",
    )
    assert len(made.module.experts.up) == 3 and not made.module.experts.down[0, 0].any()


def test_nothing_goes_where_nothing_is_masked():
    model = by_hand()
    made = sf.shrinking.without_experts(
        model, sf.dense().init(sf.modules.params_of(model)), X, BY_HAND
    )
    assert (
        torch.equal(made.module(X), model(X))
        and made.module is not model
        and made.module.number == 4
    )


def test_numbers_that_are_the_number_of_experts_by_chance_stay():
    class Wide(Mixture):
        def __init__(self):
            super().__init__(4, 4)
            self.width = 4

        def forward(self, x):
            return super().forward(x.reshape(-1, self.width))

    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(6, 4)
    small = sf.shrinking.without_experts(
        model, without(model, BY_HAND, [0]), x, BY_HAND
    ).module
    assert (
        small.number,
        small.width,
        small.router.in_features,
        small.router.out_features,
    ) == (3, 4, 4, 3)


def test_the_model_stays_as_it_was():
    model = by_hand().train()
    before, own = copy.deepcopy(model.state_dict()), set(vars(model))
    drawn = torch.get_rng_state()
    made = sf.shrinking.without_experts(model, without(model, BY_HAND, [1]), X, BY_HAND)
    assert torch.equal(torch.get_rng_state(), drawn) and set(vars(model)) == own == set(
        vars(made.module)
    )
    assert (
        all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        and model.training
    )
    assert not any(
        layer._forward_hooks for layer in (*model.modules(), *made.module.modules())
    )
    assert {x.data_ptr() for x in model.parameters()}.isdisjoint(
        {x.data_ptr() for x in made.module.parameters()}
    )


@pytest.mark.parametrize(
    ("build", "gone"), [(mixtral, [2]), (mixtral, [0, 3]), (qwen, [0, 1, 5, 6])]
)
def test_of_transformers_it_is_saved_and_loaded(build, gone, tmp_path):
    model = build()
    made = sf.shrinking.without_experts(
        model, without(model, PATTERN, gone), IDS, PATTERN
    )
    assert (
        made.notes == ()
        and len(made.module.model.layers[1].mlp.gate.weight)
        == made.module.config.num_experts
    )
    assert made.module.config.num_experts == model.config.num_experts - len(gone)
    made.module.save_pretrained(tmp_path)
    back = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(back(**IDS).logits, made.module(**IDS).logits)
    never = copy.deepcopy(model)
    for layer in never.model.layers:
        layer.mlp.gate.register_forward_hook(
            again(gone, model.config.num_experts_per_tok)
        )
    assert torch.allclose(never(**IDS).logits, made.module(**IDS).logits, atol=1e-4)
    assert not torch.allclose(never(**IDS).logits, model(**IDS).logits, atol=1e-2)


def again(gone, k):
    # The routers of Mixtral and Qwen3 from their logits on, without some.
    def hook(router, _args, out):
        logits = out[0].index_fill(-1, torch.tensor(gone), -torch.inf)
        weights, index = logits.softmax(-1).topk(k)
        scale = (
            weights.sum(-1, keepdim=True)
            if getattr(router, "norm_topk_prob", True)
            else 1
        )
        return logits, weights / scale, index

    return hook


def test_a_config_that_cannot_say_it_is_noted():
    model = mixtral()
    state = without(model, PATTERN, [1])
    for path in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        state.masks[f"model.layers.1.mlp.{path}"][:] = True
    made = sf.shrinking.without_experts(model, state, IDS, PATTERN)
    assert [len(layer.mlp.gate.weight) for layer in made.module.model.layers] == [3, 4]
    assert (
        "keeps its numbers" in made.notes[0]
        and made.module.config.num_local_experts == 4
    )


def test_pruned_by_reap_in_exact_counts_and_carried():
    model = mixtral()
    params, stats = (
        sf.modules.params_of(model),
        sf.calibration.experts(model, None, **IDS),
    )
    algorithm = sf.one_shot(0.25, sf.scores.reap(stats, PATTERN), pattern=PATTERN)
    state = algorithm.update(algorithm.init(params), params, 0)
    made = sf.shrinking.without_experts(model, state, IDS, PATTERN)
    for i in range(2):
        of = stats[f"model.layers.{i}.mlp.experts.down_proj"]
        worst = int((of["norm"] / of["count"]).argmin())
        kept = made.kept[f"model.layers.{i}.mlp.gate.weight"].indices[0].tolist()
        assert kept == [number for number in range(4) if number != worst]


@pytest.mark.parametrize(
    ("pattern", "gone", "text"),
    [
        (
            sf.patterns.channel(0),
            [0],
            r"expected a pattern such as sf.patterns.tied\(.*, got channel\(axis=0",
        ),
        (
            sf.patterns.tied([["router.weight", 0], ["router.bias", 0]]),
            [0],
            "'router.weight' has no leaf of experts",
        ),
        (
            BY_HAND,
            [0, 1, 2, 3],
            "expected at least one expert of 'router.weight' to stay, but all are "
            "masked",
        ),
        (
            sf.patterns.tied([["experts.up", 0], ["experts.down", 0]]),
            [0],
            "no product was seen with any of them",
        ),
        (
            sf.patterns.tied(
                [["router.weight", 0], ["router.bias", 0], ["experts.up", 0]]
            ),
            [0],
            r"Mixture gives another output .*; 'experts.down' of shape \(4, 3, 5\) is "
            r"no member of the set, and stays",
        ),
        (
            BY_HAND,
            [0, 1, 2],
            "is routed to 2 experts, of which 1 stay: keep more .the masked one is "
            "that",
        ),
    ],
)
def test_what_is_refused(pattern, gone, text):
    model = by_hand()
    tied = pattern if isinstance(pattern, type(BY_HAND)) else BY_HAND
    state = without(model, tied, gone)
    with pytest.raises(ValueError, match=f"(?s)without_experts: .*{text}"):
        sf.shrinking.without_experts(model, state, X, pattern)


def test_no_state_and_no_example_that_the_model_takes():
    model = by_hand()
    with pytest.raises(TypeError, match="without_experts: expected a State, got dict"):
        sf.shrinking.without_experts(model, {}, X, BY_HAND)
    with pytest.raises(
        ValueError, match="expected an example that the Mixture can be called with"
    ):
        sf.shrinking.without_experts(
            model, without(model, BY_HAND, [0]), torch.ones(2, 9), BY_HAND
        )


def test_logits_among_the_outputs_and_choices_by_more_than_logits_are_refused():
    class Open(Mixture):
        def forward(self, x):
            return super().forward(x), self.router(x)

    class Corrected(Mixture):
        def __init__(self):
            super().__init__()
            self.router.correction = nn.Buffer(torch.tensor([9.0, 0.0, 0.0, 0.0]))

        def forward(self, x):
            logits = self.router(x).sigmoid()
            index = (logits + self.router.correction[: self.number]).topk(self.k)[1]
            return self.experts(x, index, weights=logits.gather(1, index))

    for kind, text in (
        (Open, "gives an"),
        (
            Corrected,
            "gives another output .*; 'router.correction' of shape .4,. is no member "
            "of the set",
        ),
    ):
        torch.manual_seed(0)
        model = kind().eval()
        with pytest.raises(ValueError, match=f"the smaller {kind.__name__} {text}"):
            sf.shrinking.without_experts(
                model, without(model, BY_HAND, [0]), X, BY_HAND
            )
