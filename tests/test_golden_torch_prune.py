"""Recorded results of torch.nn.utils.prune: the same masks, counts, gradients and baked
weights.
"""

import pytest
import torch
from golden_data import Case, cases, functions

import sparsefn as sf

RECORDED = {fn: cases("torch_prune", fn) for fn in functions("torch_prune")}


def case_of(fn):
    (case,) = RECORDED[fn]
    return case


def case_id(case):
    return case.id


def amount(value):
    """Their amount in our words: an int is a count, a float a fraction of what
    remains.
    """
    return {"count": value} if isinstance(value, int) else {"fraction": value}


def method(spec, when):
    """One recorded method of pruning, applied at a trigger."""
    kind, *args = spec
    if kind == "ln":
        value, norm, dim = args
        return sf.iterative(
            **amount(value),
            pattern=sf.patterns.channel(dim, norm=float(norm)),
            when=when,
        )
    # the identity prunes nothing
    return sf.iterative(**amount(args[0] if kind == "l1" else 0), when=when)


def importance(scores):
    """importance_scores: their L1 takes the absolute value of what it is given, ours
    takes scores as they are.
    """

    def score(state, grads, step):
        return {path: scores.get(path, w).abs() for path, w in state.params.items()}

    return score


def once(algorithm, params):
    return algorithm.update(algorithm.init(params), params, 0)


def check(mask, recorded):
    assert mask.dtype == torch.bool
    assert torch.equal(mask, recorded != 0)


@pytest.mark.parametrize("case", RECORDED["l1_unstructured"], ids=case_id)
def test_l1_unstructured(case: Case):
    w, amounts = case.inputs["w"], case.args["amount"]
    score = (
        importance({"w": case.inputs["scores"]})
        if "scores" in case.inputs
        else sf.scores.magnitude
    )
    named = (
        {f"m{i}": value for i, value in enumerate(amounts)}
        if isinstance(amounts, list)
        else {"m": amounts}
    )
    assert set(named) == set(case.outputs)
    for name, value in named.items():
        state = once(sf.iterative(**amount(value), score=score), {"w": w})
        check(state.masks["w"], case.outputs[name])
        assert torch.equal(sf.effective(state)["w"], w * case.outputs[name])


@pytest.mark.parametrize("case", RECORDED["ln_structured"], ids=case_id)
def test_ln_structured(case: Case):
    w, value, dim = case.inputs["w"], case.args["amount"], case.args["dim"]
    pattern, size = sf.patterns.channel(dim, norm=float(case.args["n"])), w.shape[dim]
    n_keep = size - value if isinstance(value, int) else sf.budgets.n_kept(size, value)
    check(sf.masks.topk_mask(w, n_keep, pattern=pattern), case.outputs["m"])
    check(
        sf.masks.drop_lowest(w, torch.ones_like(w) > 0, size - n_keep, pattern=pattern),
        case.outputs["m"],
    )
    check(
        once(method(["ln", value, case.args["n"], dim], sf.always()), {"w": w}).masks[
            "w"
        ],
        case.outputs["m"],
    )


def test_counts():
    case = case_of("round(amount*n)")
    sizes = case.args["n"]
    for value, removed in case.value.items():
        fraction = float(value)
        assert [n - sf.budgets.n_kept(n, fraction) for n in sizes] == removed
        tensor = torch.tensor(fraction, dtype=torch.float64)
        assert [n - int(sf.budgets.n_kept(n, tensor)) for n in sizes] == removed


ITERATED = [case for case in RECORDED["iterated"] if case.id != "iter_custom"]


@pytest.mark.parametrize("case", ITERATED, ids=case_id)
def test_iterated(case: Case):
    params = {"w": case.inputs["w"]}
    parts = [
        method(spec, sf.at([step])) for step, spec in enumerate(case.args["methods"])
    ]
    algorithm = sf.sequence(*parts)
    state = algorithm.init(params)
    for step in range(len(parts)):
        state = algorithm.update(state, params, step)
        check(state.masks["w"], case.outputs[f"m{step}"])


def test_iterated_with_a_mask_of_ones_own():
    (case,) = (case for case in RECORDED["iterated"] if case.id == "iter_custom")
    params, custom = {"w": case.inputs["w"]}, {"w": case.inputs["custom"] != 0}
    first, _, last = case.args["methods"]
    state = once(method(first, sf.always()), params)
    check(state.masks["w"], case.outputs["m0"])
    state = sf.from_masks(sf.masks.intersect(state.masks, custom)).init(state.params)
    check(state.masks["w"], case.outputs["m1"])
    algorithm = sf.iterative(**amount(last[1]), init=state.masks)
    check(once(algorithm, state.params).masks["w"], case.outputs["m2"])


def test_a_mask_of_ones_own_inside_one_algorithm():
    # The same three steps as phases in time: a phase begins from the effective weights.
    (case,) = (case for case in RECORDED["iterated"] if case.id == "iter_custom")
    params, custom = {"w": case.inputs["w"]}, {"w": case.inputs["custom"] != 0}

    def narrowed(params):
        return sf.masks.intersect(sf.masks.from_zeros(params), custom)

    first, _, last = case.args["methods"]
    algorithm = sf.phases(
        [
            (0, method(first, sf.at([0]))),
            (1, sf.static(None, init=narrowed)),
            (2, sf.iterative(**amount(last[1]), when=sf.at([2]), init="from_zeros")),
        ]
    )
    state = algorithm.init(params)
    for step in range(3):
        state = algorithm.update(state, params, step)
        check(state.masks["w"], case.outputs[f"m{step}"])


@pytest.mark.parametrize("case", RECORDED["global_unstructured"], ids=case_id)
def test_global_unstructured(case: Case):
    params = {name: w for name, w in case.inputs.items() if name != "scores"}
    score = importance(
        {f"w{case.args['scores_for']}": case.inputs["scores"]}
        if "scores" in case.inputs
        else {}
    )
    algorithm = sf.iterative(
        **amount(case.args["amount"]), distribution=sf.budgets.global_(), score=score
    )
    rounds = case.args.get("iterations")
    state, removed = algorithm.init(params), []
    for step in range(rounds or 1):
        state = algorithm.update(state, params, step)
        removed.append(sf.masks.n_total(state.masks) - sf.masks.n_kept(state.masks))
        for i in range(len(params)):
            check(
                state.masks[f"w{i}"],
                case.outputs[f"m{i}_{step}" if rounds else f"m{i}"],
            )
    assert case.value is None or removed == case.value


def test_the_pure_prune():
    # Without a container their amount is of the whole tensor, then the default mask is
    # multiplied in.
    case = case_of("L1Unstructured.prune")
    t, default = case.inputs["t"], {"t": case.inputs["default_mask"] != 0}

    def prune(amount, masks):
        best = {"t": sf.masks.topk_mask(t.abs(), sf.budgets.n_kept(t.numel(), amount))}
        return sf.apply_masks({"t": t}, sf.masks.intersect(best, masks))["t"]

    assert torch.equal(
        prune(case.args["amount"], {"t": torch.tensor(True)}), case.outputs["fresh"]
    )
    # recorded with amount=0.2, dim=0 below
    assert torch.equal(prune(0.2, default), case.outputs["with_mask"])
    rows = sf.masks.topk_mask(t, 3, pattern=sf.patterns.channel(0, norm=2))
    assert torch.equal(sf.apply_masks({"t": t}, {"t": rows})["t"], case.outputs["ln"])


def test_the_gradient_and_the_baked_weight():
    case = case_of("apply/remove")
    x, gy = case.inputs["x"], case.inputs["gy"]
    layer = torch.nn.Linear(6, 4, bias=False)
    algorithm = sf.iterative(**amount(case.args["amount"]))
    state = once(algorithm, {"weight": case.inputs["w"]})
    check(state.masks["weight"], case.outputs["mask"])
    grads = torch.func.grad(
        lambda params: (sf.modules.call(layer, params, x) * gy).sum()
    )(sf.effective(state))
    seen = algorithm.view.grads(state, grads, 0)["weight"]
    torch.testing.assert_close(seen, case.outputs["grad_orig"], rtol=1e-6, atol=1e-6)
    assert torch.equal(seen == 0, case.outputs["mask"] == 0)
    baked = sf.modules.bake(layer, state).weight.detach()
    assert torch.equal(baked, case.outputs["baked"])
    # theirs multiplies: -0.0 where a negative weight was
    assert not baked[~state.masks["weight"]].signbit().any()


W = {"w": torch.randn(4, 5, generator=torch.Generator().manual_seed(0))}
REFUSED = {  # theirs: (ours, what makes it)
    "amount_str": (TypeError, lambda: sf.iterative("0.5")),
    "amount_neg": (ValueError, lambda: sf.iterative(count=-1)),
    "amount_1.1": (ValueError, lambda: sf.iterative(1.1)),
    "amount_big": (ValueError, lambda: once(sf.iterative(count=21), W)),
    "dim_big": (
        ValueError,
        lambda: sf.iterative(0.5, pattern=sf.patterns.channel(2)).init(W),
    ),
    "dim_small": (
        ValueError,
        lambda: sf.iterative(0.5, pattern=sf.patterns.channel(-3)).init(W),
    ),
    "custom_shape": (
        ValueError,
        lambda: sf.from_masks({"w": torch.ones(3, 3) > 0}).init(W),
    ),
    "scores_shape": (
        ValueError,
        lambda: once(sf.iterative(0.5, score=lambda *_: {"w": torch.ones(3, 3)}), W),
    ),
}
# Theirs refuse, and ours mean something: one element is a channel of a vector, channels
# of several leaves compete in one competition, and a state that keeps all weights is
# baked as it is.
TAKEN = {
    "struct_1d": lambda: once(
        sf.iterative(0.5, where="w", pattern=sf.patterns.channel()),
        {"w": torch.ones(4)},
    ),
    "global_structured": lambda: once(
        sf.iterative(
            0.5, pattern=sf.patterns.channel(), distribution=sf.budgets.global_()
        ),
        {**W, "v": torch.ones(2, 5)},
    ),
    "remove_unpruned": lambda: sf.dense().init(W),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_there_is_refused_here(name):
    assert case_of("error types").value[name] in (
        "TypeError",
        "ValueError",
        "IndexError",
        "AssertionError",
    )
    error, make = REFUSED[name]
    with pytest.raises(error):
        make()


@pytest.mark.parametrize(
    ("name", "kept"),
    [("struct_1d", 2), ("global_structured", 15), ("remove_unpruned", 20)],
)
def test_what_is_refused_there_and_taken_here(name, kept):
    assert case_of("error types").value[name] in ("TypeError", "ValueError")
    state = TAKEN[name]()
    assert sf.masks.n_kept(state.masks, state.params) == kept


def test_every_recorded_function_and_error_is_held_here():
    held = {
        *(
            "l1_unstructured",
            "ln_structured",
            "round(amount*n)",
            "iterated",
            "global_unstructured",
        ),
        *("L1Unstructured.prune", "apply/remove", "error types"),
    }
    assert set(RECORDED) == held
    assert set(case_of("error types").value) == set(REFUSED) | set(TAKEN)
