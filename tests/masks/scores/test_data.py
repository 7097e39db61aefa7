"""Scores that read calibration data: worked examples, what does not matter to them, and
bad statistics.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparsefn as sf

WEIGHT = torch.tensor([[4.0, 1.0, 3.0], [1.0, 5.0, 2.0]])
X = torch.tensor([[1.0, 3.0, 0.0], [2.0, 4.0, 1.0]])


def stats_of(x, weight=WEIGHT):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    return sf.calibration.inputs(layer, None, x, of="square")


def scored(score, weight=WEIGHT):
    state = sf.one_shot(0.5).init({"weight": weight})
    return score(state, None, 0)["weight"]


def pruned(score, weight=WEIGHT, sparsity=0.5, **options):
    algorithm = sf.one_shot(
        sparsity, score, **{"pattern": sf.patterns.row_balanced(), **options}
    )
    state = algorithm.init({"weight": weight})
    return algorithm.update(state, state.params, 0).masks["weight"]


def test_wanda_is_the_size_times_the_norm_of_the_input():
    norms = X.square().mean(0).sqrt()
    assert torch.allclose(scored(sf.scores.wanda(stats_of(X))), WEIGHT * norms)
    kept = pruned(sf.scores.wanda(stats_of(X)), sparsity=1 / 3)
    # by magnitude the second and the first one go
    assert kept.tolist() == [[True, True, False]] * 2
    assert pruned(sf.scores.magnitude, sparsity=1 / 3).tolist() == [
        [True, False, True],
        [False, True, True],
    ]


def test_the_scale_of_the_inputs_leaves_the_masks_of_wanda():
    weight, x = torch.randn(20, 30), torch.randn(50, 30)
    for scale in (1e-4, 3.0, 1e4):
        assert torch.equal(
            *(
                pruned(sf.scores.wanda(stats_of(s * x, weight)), weight)
                for s in (1.0, scale)
            )
        )


def test_orthogonal_inputs_of_one_norm_give_magnitude_in_rows():
    weight = torch.randn(20, 32)
    x = 5 * torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0].float()
    assert torch.equal(
        pruned(sf.scores.wanda(stats_of(x, weight)), weight),
        pruned(sf.scores.magnitude, weight),
    )


def test_ria_weighs_shares_in_rows_and_columns():
    relative = WEIGHT / WEIGHT.sum(0) + WEIGHT / WEIGHT.sum(1, keepdim=True)
    assert torch.allclose(
        relative,
        torch.tensor([[1.3, 0.29167, 0.975], [0.325, 1.45833, 0.65]]),
        atol=1e-4,
    )
    norms = X.square().mean(0).sqrt()
    for power in (0.5, 1.0, torch.tensor(2.0)):
        assert torch.allclose(
            scored(sf.scores.ria(stats_of(X), power)), relative * norms**power
        )
    assert torch.equal(
        scored(sf.scores.ria(stats_of(X))),
        scored(sf.scores.ria(stats_of(X), power=0.5)),
    )


def test_ria_with_power_0_ignores_the_inputs():
    weight = torch.randn(20, 30)
    first, second = (
        scored(sf.scores.ria(stats_of(torch.randn(9, 30), weight), 0.0), weight)
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_rows_and_columns_of_zeros_score_zero():
    weight = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    assert scored(
        sf.scores.ria(stats_of(torch.ones(3, 2), weight)), weight
    ).tolist() == [[0.0, 0.0], [0.0, 2.0]]
    dead = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # an input that is always 0
    assert scored(sf.scores.wanda(stats_of(dead, weight)), weight).tolist() == [
        [0.0, 0.0],
        [0.0, 0.0],
    ]


@pytest.mark.parametrize("score", [sf.scores.wanda, sf.scores.ria])
def test_a_weight_stored_as_inputs_by_outputs_has_the_same_scores(score):
    x, weight = torch.randn(9, 4), torch.randn(4, 4)

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(weight.T.contiguous())

        def forward(self, x):
            return x @ self.weight

    turned = scored(
        score(sf.calibration.inputs(Turned(), None, x)), weight.T.contiguous()
    )
    assert torch.allclose(turned, scored(score(stats_of(x, weight)), weight).T)


@pytest.mark.parametrize("score", [sf.scores.wanda, sf.scores.ria])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_scores_as_the_matrix_of_its_patches(score, groups):
    conv, x = nn.Conv2d(4, 6, 3, groups=groups, bias=False), torch.randn(2, 4, 6, 6)
    weight = conv.weight.detach()
    found = scored(score(sf.calibration.inputs(conv, None, x)), weight)
    parts = zip(
        found.chunk(groups), weight.chunk(groups), x.chunk(groups, 1), strict=True
    )
    for part, own, some in parts:
        patches = functional.unfold(some, 3).transpose(1, 2).flatten(0, 1)
        expected = scored(score(stats_of(patches, own.flatten(1))), own.flatten(1))
        assert torch.allclose(part.flatten(1), expected, rtol=1e-5)


def test_leaves_that_stay_dense_need_no_data_and_16_bits_score_in_float32():
    state = sf.one_shot(0.5).init(
        {"weight": WEIGHT.bfloat16(), "bias": torch.ones(2), "embed": WEIGHT}
    )
    scores = sf.scores.wanda(stats_of(X))(state, None, 0)
    assert scores["weight"].dtype == torch.float32
    assert not scores["bias"].any() and not scores["embed"].any()


@pytest.mark.deep
def test_scores_are_the_same_compiled_and_in_an_ensemble():
    score = sf.scores.ria(stats_of(X))
    algorithm = sf.one_shot(0.5, score)
    state = algorithm.init({"weight": WEIGHT})
    eager = algorithm.update(state, state.params, 0)
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")(
        state, state.params, 0
    )
    assert sf.checkpoint.tree_equal(eager, compiled)
    stack = torch.vmap(
        lambda w: algorithm.update(
            algorithm.init({"weight": w}), {"weight": w}, 0
        ).masks["weight"]
    )
    assert torch.equal(stack(torch.stack([WEIGHT, -WEIGHT]))[1], eager.masks["weight"])


def bad(**changes):
    return {"weight": {"count": torch.tensor(2), "square": torch.ones(3), **changes}}


@pytest.mark.parametrize("score", [sf.scores.wanda, sf.scores.ria])
@pytest.mark.parametrize(
    ("stats", "text"),
    [
        ({}, "no data for the leaf 'weight', but for 0 others"),
        ({"other": bad()["weight"]}, "no data for the leaf 'weight', but for 1 others"),
        (
            bad(count=torch.tensor(0), square=torch.zeros(())),
            "no data for the leaf 'weight': no input of the calib",
        ),
        (
            bad(count=torch.tensor([3, 0])),
            "no data for some outputs of the leaf 'weight'",
        ),
        (
            bad(count=torch.tensor(1)),
            "expected more than one calibration input at 'weight', got 1: give more",
        ),
        (
            bad(square=torch.tensor([1.0, float("nan"), 1.0])),
            "expected finite statistics at 'weight', got NaN",
        ),
        (
            bad(square=torch.ones(4)),
            r"at 'weight', expected the statistics of a weight of shape \(2, 3\), got "
            r"statistics of 4",
        ),
        (
            {"weight": {"count": torch.tensor(2)}},
            "expected 'square' in the statistics at 'weight', got count",
        ),
    ],
)
def test_bad_statistics_name_the_leaf(score, stats, text):
    made = score(stats)  # a leaf that stays dense may have any
    with pytest.raises(ValueError, match=f"{score.__name__}: {text}"):
        scored(made)


def test_other_bad_arguments():
    with pytest.raises(
        TypeError,
        match="wanda: expected stats by path, of sf.calibration.inputs, got list",
    ):
        sf.scores.wanda([])
    with pytest.raises(TypeError, match="expected power to be a number"):
        sf.scores.ria(stats_of(X), "0.5")


EXPERTS = sf.patterns.tied([["router", 0], ["up", 0]])
PARAMS = {"router": torch.ones(4, 3), "up": torch.ones(4, 2, 3)}


def seen(count=(2, 1, 0, 4), norm=(3.0, 2.0, 0.0, 4.0), path="up"):
    return {
        path: {
            "count": torch.tensor(count),
            "norm": torch.tensor(norm, dtype=torch.float64),
        }
    }


def test_reap_is_the_mean_over_the_tokens_of_an_expert_and_0_without():
    algorithm = sf.one_shot(0.5, sf.scores.reap(seen(), EXPERTS), pattern=EXPERTS)
    state = algorithm.init(PARAMS)
    values = sf.scores.reap(seen(), EXPERTS)(state, None, 0)
    assert values == {"router": values["router"]} and values["router"].tolist() == [
        1.5,
        2.0,
        0.0,
        1.0,
    ]
    masks = algorithm.update(state, PARAMS, 0).masks
    assert (
        masks["router"][:, 0].tolist()
        == masks["up"][:, 0, 0].tolist()
        == [True, True, False, False]
    )


def test_reap_of_experts_in_another_order_and_of_sets_that_stay_dense():
    turned = sf.patterns.tied([["up", 0, [3, 0, 1, 2]], ["router", 0]])
    state = sf.one_shot(0.5, pattern=turned).init(PARAMS)
    assert sf.scores.reap(seen(), turned)(state, None, 0)["up"].tolist() == [
        2.0,
        0.0,
        1.0,
        1.5,
    ]
    dense = sf.dense().init(PARAMS)
    assert (
        sf.scores.reap(seen(), EXPERTS)(dense, None, 0)["router"].tolist() == [0.0] * 4
    )


@pytest.mark.parametrize(
    ("stats", "pattern", "text"),
    [
        (
            seen(path="other"),
            EXPERTS,
            "no data for the experts of 'router', but for other",
        ),
        (
            seen((0,) * 4),
            EXPERTS,
            "no data for the experts of 'up': no token was routed to any",
        ),
        (
            seen(norm=(1.0, 2.0, float("nan"), 1.0)),
            EXPERTS,
            "expected finite statistics at 'up', got NaN",
        ),
        (
            {"up": {"count": torch.ones(4)}},
            EXPERTS,
            "expected 'norm' in the statistics at 'up', got count",
        ),
        (
            seen((1, 2), (1.0, 2.0)),
            EXPERTS,
            "expected units that are the 2 experts along dimension 0 of 'up', got 4",
        ),
        (
            seen(),
            sf.patterns.tied([["up", 0, 2]]),
            "the 4 experts along dimension 0 of 'up', got 2 units along dimension 0",
        ),
        (seen(), sf.patterns.tied([["up", 2]]), "got 3 units along dimension 2"),
    ],
)
def test_reap_names_what_is_wrong(stats, pattern, text):
    score = sf.scores.reap(stats, pattern)
    with pytest.raises(ValueError, match=f"reap: .*{text}"):
        score(sf.one_shot(0.5, pattern=pattern).init(PARAMS), None, 0)


def test_reap_of_other_patterns_and_statistics():
    with pytest.raises(
        ValueError,
        match=r"reap: expected a pattern of tied sets, sf.patterns.tied, .*, got "
        r"channel\(axis=0",
    ):
        sf.scores.reap(seen(), sf.patterns.channel(0))
    with pytest.raises(
        TypeError,
        match="reap: expected stats by path, of sf.calibration.experts, got list",
    ):
        sf.scores.reap([], EXPERTS)


@pytest.mark.deep
def test_reap_in_compiled_code_and_under_vmap():
    algorithm = sf.one_shot(0.5, sf.scores.reap(seen(), EXPERTS), pattern=EXPERTS)
    eager = algorithm.update(algorithm.init(PARAMS), PARAMS, 0)
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")(
        algorithm.init(PARAMS), PARAMS, 0
    )
    assert sf.checkpoint.tree_equal(eager, compiled)
    stacked = {path: torch.stack([x, 2 * x]) for path, x in PARAMS.items()}
    masks = torch.vmap(
        lambda params: algorithm.update(algorithm.init(params), params, 0).masks
    )(stacked)
    assert all(torch.equal(mask[1], eager.masks[path]) for path, mask in masks.items())


# ---- rows that are outputs -----------------------------------------------------------


class Experts(nn.Module):
    """Experts in one leaf, [experts, out, in] or [experts, in, out], each of which gets
    all inputs but for the sign.
    """

    def __init__(self, turned):
        super().__init__()
        self.turned, self.weight = (
            turned,
            nn.Parameter(torch.randn(3, 8, 4) if turned else torch.randn(3, 4, 8)),
        )

    def forward(self, x):
        each = self.weight if self.turned else self.weight.mT
        return sum((x + number) @ one for number, one in enumerate(each))


@pytest.mark.parametrize("score", [sf.scores.wanda, sf.scores.ria])
@pytest.mark.parametrize("turned", [False, True])
def test_weights_of_experts_compete_inside_of_their_output(score, turned):
    torch.manual_seed(0)
    model, x = Experts(turned), torch.randn(20, 8) * torch.logspace(-1, 1, 8)
    stats, params = sf.calibration.inputs(model, None, x), sf.modules.params_of(model)
    outputs, inputs = ((0, 2), 1) if turned else ((0, 1), 2)
    matrices = params["weight"].mT if turned else params["weight"]
    for pattern, sparsity, count in (
        (sf.patterns.row_balanced(axis=outputs), 0.5, 4),
        (sf.patterns.nm(2, 4, axis=inputs), None, None),
    ):
        state = sf.one_shot(sparsity, score(stats), pattern=pattern).init(params)
        mask = (
            sf.one_shot(sparsity, score(stats), pattern=pattern)
            .update(state, params, 0)
            .masks["weight"]
        )
        one = sf.patterns.nm(2, 4) if count is None else sf.patterns.row_balanced()
        for number, weight in enumerate(matrices):
            own = {
                "weight": {
                    name: x[number].flatten() if x.ndim > 1 else x[number]
                    for name, x in stats["weight"].items()
                    if name != "gram"
                }
            }
            alone = score(own)(sf.one_shot(0.5).init({"weight": weight}), (), 0)[
                "weight"
            ]
            kept = mask[number].mT if turned else mask[number]
            assert torch.equal(kept, sf.masks.topk_mask(alone, count, pattern=one))


WRONG = [
    sf.patterns.row_balanced(),
    sf.patterns.row_balanced(axis=1),
    sf.patterns.row_balanced(axis=2),
]


@pytest.mark.parametrize(
    "score",
    [
        sf.scores.wanda,
        sf.scores.ria,
        lambda stats: sf.scores.absolute(sf.scores.wanda(stats)),
    ],
)
@pytest.mark.parametrize(
    ("turned", "pattern", "text"),
    [
        *(
            (
                True,
                one,
                r"outputs of 'weight', which lie along \(0, 2\) of its shape \(3, 8, "
                r"4\)",
            )
            for one in WRONG
        ),
        *(
            (
                False,
                one,
                r"which lie along \(0, 1\) .* give row_balanced\(axis=\(0, 1\)\) or "
                r"nm\(n, m",
            )
            for one in WRONG
        ),
        (
            True,
            sf.patterns.nm(2, 4),
            r"nm\(2, 4, axis=-1\) crosses outputs of 'weight'.*or nm\(n, m, axis=1\)$",
        ),
        (
            False,
            sf.patterns.nm(2, 4, axis=1),
            r"nm\(2, 4, axis=1\) crosses .*or nm\(n, m, axis=2\)$",
        ),
    ],
)
def test_weights_of_several_outputs_do_not_compete_in_parts_of_a_leaf(
    score, turned, pattern, text
):
    model = Experts(turned)
    stats, params = (
        sf.calibration.inputs(model, None, torch.randn(20, 8)),
        sf.modules.params_of(model),
    )
    fixed = str(pattern).startswith("nm")
    with pytest.raises(ValueError, match=text):
        sf.one_shot(None if fixed else 0.5, score(stats), pattern=pattern).init(params)
    sf.one_shot(0.5, score(stats)).init(params)  # over the whole leaf they may


def test_nm_along_the_outputs_of_a_conv1d_is_refused():
    stats = {"w": {"count": torch.tensor(3), "square": torch.ones(4, 1).double()}}
    with pytest.raises(
        ValueError,
        match=r"nm\(2, 4, axis=-1\) crosses outputs of 'w'.* or nm\(n, m, axis=0\)$",
    ):
        sf.methods.wanda(None, stats, pattern=sf.patterns.nm(2, 4)).init(
            {"w": torch.randn(4, 8)}
        )
    sf.methods.wanda(None, stats, pattern=sf.patterns.nm(2, 4, axis=0)).init(
        {"w": torch.randn(4, 8)}
    )
