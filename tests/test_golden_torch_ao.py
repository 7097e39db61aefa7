"""Recorded results of torch.ao.pruning: sparsifiers, schedules, rows and gates, through
the public API.
"""

import math

import optree
import pytest
import torch
from golden_data import Case, cases, functions

import sparsefn as sf

NORMS = {1: torch.abs, "L1": torch.abs, 2: torch.square, "L2": torch.square}
TOP = float("inf")


def case_id(case):
    return case.id


def case_of(fn):
    (case,) = cases("torch_ao", fn)
    return case


def update(algorithm, w, step=0, state=None):
    """The state after an update on these weights, from the start or from another
    state.
    """
    state = (
        algorithm.init({"w": w}) if state is None else sf.with_params(state, {"w": w})
    )
    return algorithm.update(state, {"w": torch.zeros_like(w)}, step)


def scored(norm):
    """Their norm, as a score of ours."""
    return lambda state, grads, step: optree.tree_map(norm, state.params)


def block_of(case):
    return sf.patterns.block(
        case.args["sparse_block_shape"], zeros=case.args["zeros_per_block"]
    )


def n_blocks(case):
    return math.prod(
        -(-n // b)
        for n, b in zip(
            case.inputs["w"].shape, case.args["sparse_block_shape"], strict=True
        )
    )


def levels(case):
    """(level, mask) as far as it was recorded: theirs fails at borders with
    zeros_per_block (a quirk).
    """
    for i, level in enumerate(case.args["sparsity_level"]):
        if f"l{i}" in case.outputs:
            yield level, case.outputs[f"l{i}"] != 0


@pytest.mark.deep(but=["wn_0_*"])
@pytest.mark.parametrize("case", cases("torch_ao", "WeightNormSparsifier"), ids=case_id)
def test_weight_norm(case: Case):
    w, norm, pattern, n = (
        case.inputs["w"],
        NORMS[case.args["norm"]],
        block_of(case),
        n_blocks(case),
    )
    assert case.outputs
    for level, mask in levels(case):
        lost = n - sf.budgets.n_kept(n, level)
        # Theirs leaves one block whole below level 1: 0.99 of 8 blocks removes 7 there,
        # and 8 here.
        kept = n - (lost if level == 1 else min(lost, n - 1))
        assert torch.equal(sf.masks.topk_mask(norm(w), kept, pattern=pattern), mask), (
            level
        )
        mine = update(sf.one_shot(level, scored(norm), pattern=pattern), w).masks["w"]
        if lost == n - kept:
            assert torch.equal(mine, mask)
        exactly = sf.masks.drop_lowest(
            norm(w), torch.ones_like(mask), n - kept, pattern=pattern
        )
        assert torch.equal(exactly, mask)


@pytest.mark.deep(but=["dn_0_*"])
@pytest.mark.parametrize("case", cases("torch_ao", "DataNormSparsifier"), ids=case_id)
def test_data_norm(case: Case):
    w, norm, pattern = case.inputs["w"], NORMS[case.args["norm"]], block_of(case)
    assert len(case.outputs) == len(case.args["sparsity_level"])
    for level, mask in levels(case):
        assert torch.equal(
            update(sf.one_shot(level, scored(norm), pattern=pattern), w).masks["w"],
            mask,
        ), level
        kept = sf.budgets.n_kept(n_blocks(case), level)
        assert torch.equal(
            sf.masks.topk_mask(norm(w), torch.tensor(kept), pattern=pattern), mask
        ), level


def test_what_goes_wrong_there_at_borders_with_zeros_per_block():
    # WeightNormSparsifier(0.5, (1, 4), zeros_per_block=2) raises RuntimeError on a (2,
    # 6) weight, and at level 1 makes a mask of shape (2, 8). Here the partial blocks at
    # the border lose their 2 smallest, and so all they have.
    w = torch.tensor([[4.0, 1.0, 2.0, 3.0, 6.0, 5.0], [1.0, 2.0, 3.0, 4.0, 9.0, 9.0]])
    pattern = sf.patterns.block((1, 4), zeros=2)
    assert sf.masks.topk_mask(w, 2, pattern=pattern).int().tolist() == [
        [1, 0, 0, 1, 1, 1],
        [0, 0, 1, 1, 1, 1],
    ]
    assert sf.masks.topk_mask(w, 0, pattern=pattern).int().tolist() == [
        [1, 0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
    ]
    assert sf.masks.topk_mask(w, 4, pattern=pattern).all()


def test_blocks_removed():
    case = case_of("blocks removed")
    for level, removed in case.value.items():
        mine = [n - sf.budgets.n_kept(n, float(level)) for n in case.args["n_blocks"]]
        # Theirs keeps at least one: 0.95 of 9 blocks removes 8 there, and 9 here.
        assert [
            min(m, n - 1) for m, n in zip(mine, case.args["n_blocks"], strict=True)
        ] == removed


def test_scores_of_masked_weights_or_of_all():
    case, data = (
        case_of("WeightNormSparsifier two steps"),
        case_of("DataNormSparsifier two steps"),
    )
    w, w2 = case.inputs["w"], case.inputs["w2"]
    assert torch.equal(w, data.inputs["w"])
    assert torch.equal(w2, data.inputs["w2"])
    level = sf.schedules.piecewise(dict(enumerate(case.args["levels"])))

    def masked(state, grads, step):
        return optree.tree_map(torch.abs, sf.effective(state))

    sticky = [sf.gmp(level), sf.gmp(level, score=masked, pruned="train", regrow=True)]
    for algorithm in sticky:  # what was pruned scores 0, so it stays pruned
        first = update(algorithm, w)
        second = update(algorithm, w2, 1, first)
        assert torch.equal(first.masks["w"], case.outputs["mask1"] != 0)
        assert torch.equal(second.masks["w"], case.outputs["mask2"] != 0)
        assert sf.masks.n_kept(sf.masks.difference(second.masks, first.masks)) == 0
    # every weight competes each time
    algorithm = sf.gmp(level, pruned="train", regrow=True)
    first = update(algorithm, w)
    second = update(algorithm, w2, 1, first)
    assert torch.equal(first.masks["w"], data.outputs["mask1"] != 0)
    assert torch.equal(second.masks["w"], data.outputs["mask2"] != 0)
    assert torch.equal(sf.effective(second)["w"], data.outputs["masked"])
    assert torch.equal(second.params["w"], w2)


@pytest.mark.parametrize(
    "case", cases("torch_ao", "NearlyDiagonalSparsifier"), ids=case_id
)
def test_nearly_diagonal(case: Case):
    shape, nearliness = case.args["shape"], case.args["nearliness"]
    w = torch.full(shape, math.nan)

    def masks():
        pattern = sf.patterns.nearly_diagonal(nearliness)
        return [
            sf.masks.topk_mask(w, None, pattern=pattern),
            sf.static(None, pattern=pattern).init({"w": w}).masks["w"],
        ]

    if case.value is None:
        for mask in masks():
            assert torch.equal(mask, case.outputs["mask"] != 0)
    else:
        assert case.value == {"ok": False, "error": "ValueError"}
        with pytest.raises(ValueError, match="nearliness"):
            masks()


@pytest.mark.parametrize("case", cases("torch_ao", "CubicSL"), ids=case_id)
def test_cubic_sl(case: Case):
    args = {
        "init_sl": 0.0,
        "init_t": 0,
        "delta_t": 10,
        "total_t": 100,
        "initially_zero": False,
    } | case.args
    begin, span = args["init_t"], args["delta_t"] * args["total_t"]
    cubic = sf.schedules.polynomial(
        args["init_sl"], args["base_sl"], begin=begin, end=begin + span
    )
    begun = sf.schedules.piecewise(
        {0: 0.0, begin: 1.0} if args["initially_zero"] and begin else {0: 1.0}
    )
    for step, level in enumerate(case.value):
        assert begun(step) * cubic(step) == pytest.approx(level, abs=1e-12)
        tensor = torch.tensor(step)
        assert float(begun(tensor) * cubic(tensor)) == begun(step) * cubic(step)


def test_cubic_sl_from_above():
    # CubicSL clamps with max(s_0, min(s_f, s)): from 0.8 down to 0.2 its level is 0.8
    # for good.
    cubic = sf.schedules.polynomial(0.8, 0.2, begin=0, end=4)
    assert [round(cubic(step), 6) for step in range(6)] == [
        0.8,
        0.453125,
        0.275,
        0.209375,
        0.2,
        0.2,
    ]


@pytest.mark.parametrize("case", cases("torch_ao", "LambdaSL"), ids=case_id)
def test_lambda_sl(case: Case):
    assert case.args["lambda"] == "0.95**epoch"
    for schedule in (
        lambda step: case.args["base_sl"] * 0.95**step,
        sf.schedules.power(case.args["base_sl"], 0.95),
    ):
        assert [schedule(step) for step in range(len(case.value))] == pytest.approx(
            case.value, abs=1e-12
        )


def row_mask(algorithm, w):
    mask = update(algorithm, w).masks["w"].flatten(1)
    assert torch.equal(mask.any(1), mask.all(1))
    return mask.any(1)


@pytest.mark.parametrize("fn", ["fpgm_l1", "fpgm_l2"])
def test_fpgm(fn):
    score, pattern = (
        sf.scores.distance(norm=int(fn[-1])),
        sf.patterns.channel(0, norm=TOP),
    )
    for case in cases("torch_ao", fn):
        for level, rows in levels(case):
            assert torch.equal(
                row_mask(sf.one_shot(level, score, pattern=pattern), case.inputs["w"]),
                rows,
            )


@pytest.mark.parametrize(
    "score", [sf.scores.distance(), sf.scores.magnitude], ids=["fpgm", "saliency"]
)
def test_rows_come_back_where_the_level_falls(score):
    # There masks only ever lose rows, and scores are of masked weights: 0.75 and then
    # 0.25 leaves a quarter there.
    w, pattern = (
        cases("torch_ao", "fpgm_l2")[0].inputs["w"],
        sf.patterns.channel(0, norm=TOP),
    )
    falling = sf.gmp(
        sf.schedules.piecewise({0: 0.75, 1: 0.25}),
        score=score,
        pattern=pattern,
        pruned="keep",
        regrow=True,
    )
    state = falling.init({"w": w})
    kept = []
    for step, level in enumerate((0.75, 0.25)):
        state = falling.update(state, {"w": torch.zeros_like(w)}, step)
        assert torch.equal(
            state.masks["w"],
            update(sf.one_shot(level, score, pattern=pattern), w).masks["w"],
        )
        kept.append(int(state.masks["w"].flatten(1).any(1).sum()))
    assert kept == [sf.budgets.n_kept(len(w), level) for level in (0.75, 0.25)]


@pytest.mark.parametrize("case", cases("torch_ao", "saliency"), ids=case_id)
def test_saliency(case: Case):
    w, pattern = case.inputs["w"], sf.patterns.channel(0)
    for level, rows in levels(case):
        kept = len(w) - int(len(w) * level)  # theirs truncates
        assert torch.equal(
            sf.masks.topk_mask(w, kept, pattern=pattern).flatten(1).any(1), rows
        ), level
        mask = row_mask(sf.iterative(count=len(w) - kept, pattern=pattern), w)
        assert torch.equal(mask, rows), level


def test_levels_of_rows_are_rounded():
    # SaliencyPruner at level 0.19 of 16 rows removes int(3.04) = 3 rows as here, at 0.3
    # int(4.8) = 4, and 5 here.
    w = torch.arange(1.0, 17.0)[:, None].expand(16, 2)
    pruned = [
        16 - int(row_mask(sf.one_shot(level, pattern=sf.patterns.channel(0)), w).sum())
        for level in (0.19, 0.3)
    ]
    assert pruned == [3, 5]


@pytest.mark.parametrize("case", cases("torch_ao", "LSTMSaliencyPruner"), ids=case_id)
def test_gates_of_an_lstm(case: Case):
    level, pattern = case.args["sparsity_level"], sf.patterns.channel(0, groups=4)
    for name, w in case.inputs.items():
        rows, gate = case.outputs[f"m_{name}"], len(w) // 4
        mask = sf.masks.topk_mask(w, gate - int(gate * level), pattern=pattern)
        assert torch.equal(mask, rows[:, None].expand_as(w))
        if gate * level == int(gate * level):  # theirs truncates
            assert torch.equal(row_mask(sf.one_shot(level, pattern=pattern), w), rows)


def threshold(tau):
    """Each weight is kept while it is above tau in absolute value: a rule of one's own
    as a pair of functions.
    """

    def mask(keep, w):
        # 0-d True: a leaf that stays dense
        return keep & sf.masks.threshold_mask(w.abs(), tau) if keep.ndim else keep

    def update(state, grads, step):
        masks = optree.tree_map(mask, state.masks, state.params)
        return state._replace(masks=masks, params=sf.apply_masks(state.params, masks))

    return sf.Algorithm(sf.static(0.0).init, update)


@pytest.mark.deep
def test_a_rule_of_ones_own():
    params = {
        "w": torch.tensor([[0.5, -0.2, 0.1], [-0.7, 0.3, 0.0]]),
        "b": torch.tensor([0.1]),
    }
    algorithm = sf.with_optimizer(threshold(0.25), sf.optimizers.sgd(1.0))
    state = algorithm.init(params)
    assert state.masks["w"].all()
    grads = {
        "w": torch.tensor([[0.3, 0.0, 0.0], [0.0, 0.0, -9.0]]),
        "b": torch.tensor([0.1]),
    }
    state = algorithm.update(state, grads, 0)
    assert state.masks["w"].tolist() == [[False, False, False], [True, True, True]]
    assert sf.effective(state)["w"].tolist() == [
        [0.0, 0.0, 0.0],
        [pytest.approx(-0.7), pytest.approx(0.3), 9.0],
    ]
    assert state.masks["b"].ndim == 0
    compiled = torch.compile(algorithm.update, fullgraph=True, backend="eager")
    assert torch.equal(
        compiled(algorithm.init(params), grads, 0).masks["w"], state.masks["w"]
    )


def test_every_recorded_function_is_held():
    held = {
        *(
            "WeightNormSparsifier",
            "DataNormSparsifier",
            "NearlyDiagonalSparsifier",
            "blocks removed",
        ),
        *(
            "WeightNormSparsifier two steps",
            "DataNormSparsifier two steps",
            "CubicSL",
            "LambdaSL",
        ),
        *("fpgm_l1", "fpgm_l2", "saliency", "LSTMSaliencyPruner"),
    }
    # test_shrinking, test_activations
    elsewhere = {"structured shrink", "ActivationSparsifier"}
    assert set(functions("torch_ao")) == held | elsewhere
