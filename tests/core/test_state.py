"""States, masks, and what an optimizer sees of them."""

import math

import optree
import pytest
import torch

import sparsefn as sf

W = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
MASK = torch.tensor([[True, False], [True, True]])
SHARED = {"w": torch.rand(4, 4) > 0.5, "b": torch.tensor(True)}
KEY = sf.random.key(3)


def test_apply_masks_selects_and_does_not_multiply():
    bad = torch.tensor([math.nan, math.inf, -math.inf, -0.0, -1.0])
    out = sf.apply_masks({"w": bad}, {"w": torch.zeros(5, dtype=torch.bool)})["w"]
    assert torch.equal(out.view(torch.int32), torch.zeros(5, dtype=torch.int32))
    kept = sf.apply_masks({"w": bad}, {"w": torch.ones(5, dtype=torch.bool)})["w"]
    assert torch.equal(kept.view(torch.int32), bad.view(torch.int32))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_apply_masks_keeps_the_dtype(dtype):
    out = sf.apply_masks([W.to(dtype), W[0].to(dtype)], [MASK, torch.tensor(True)])
    assert [x.dtype for x in out] == [dtype, dtype]
    assert out[0].tolist() == [[1, 0], [3, 4]] and out[1].tolist() == [1, -2]


def test_apply_masks_is_differentiable_in_the_tree():
    grads = torch.func.grad(lambda w: (sf.apply_masks(w, MASK) ** 2).sum())(W)
    assert grads.tolist() == [[2, 0], [6, 8]]


def test_mask_ensembles_by_vmap():
    masks = torch.stack([MASK, ~MASK])
    out = torch.func.vmap(lambda mask: sf.apply_masks({"w": W}, {"w": mask})["w"])(
        masks
    )
    assert torch.equal(
        out, torch.stack([torch.where(MASK, W, 0), torch.where(MASK, 0, W)])
    )


def test_effective_weights():
    state = sf.State({"w": W, "b": W[0]}, {"w": MASK, "b": torch.tensor(True)})
    assert (
        sf.effective(state)["w"].tolist() == [[1, 0], [3, 4]]
        and sf.effective(state)["b"] is state.params["b"]
    )


@pytest.mark.parametrize(
    "masks,error,text",
    [
        (
            {"w": MASK[0]},
            ValueError,
            r"expected a mask of shape \(2, 2\) or \(\) at 'w', got \(2,\)",
        ),
        (
            {"w": MASK.float()},
            TypeError,
            "expected a bool mask at 'w', got torch.float32",
        ),
        ({"w": True}, TypeError, "expected a bool mask at 'w', got bool"),
        (
            {"v": MASK},
            ValueError,
            "expected masks with the structure of params, but there is no leaf at 'w'",
        ),
    ],
)
def test_masks_that_do_not_fit(masks, error, text):
    params = {"w": W}
    for call in (
        lambda: sf.apply_masks(params, masks),
        lambda: sf.from_masks(masks).init(params),
        lambda: sf.static(0.5, init=masks).init(params),
        lambda: sf.rigl(0.5, init=lambda tree: masks).init(params),
    ):
        with pytest.raises(error, match=text):
            call()


def test_with_params_moves_only_what_may_move():
    new = {"w": torch.full((2, 2), 7.0, requires_grad=True)}
    zero = sf.static(0.5, init={"w": MASK}).init({"w": W})
    assert sf.with_params(zero, new).params["w"].tolist() == [[7, 0], [7, 7]]
    keep = sf.static(0.5, init={"w": MASK}, pruned="keep").init({"w": W})
    assert sf.with_params(keep, new).params["w"].tolist() == [[7, -2], [7, 7]]
    train = sf.ste(0.5).init({"w": W})
    assert sf.with_params(train, new).params["w"].tolist() == [[7, 7], [7, 7]]
    assert not sf.with_params(train, new).params["w"].requires_grad


def test_with_params_checks_its_tree():
    state = sf.dense().init({"w": W})
    with pytest.raises(
        ValueError,
        match=r"expected the new params of shape \(2, 2\) at 'w', got \(2,\)",
    ):
        sf.with_params(state, {"w": W[0]})
    with pytest.raises(
        TypeError,
        match="expected the new params of dtype torch.float32 at 'w', got "
        "torch.float64",
    ):
        sf.with_params(state, {"w": W.double()})
    latent = sf.reparametrised(sf.reparam.power(2.0)).init({"w": W})
    with pytest.raises(
        ValueError,
        match="this state trains latents, which follow from no params; use "
        "with_optimizer",
    ):
        sf.with_params(latent, {"w": W})


def test_with_params_refuses_states_whose_scores_learn():
    text = (
        "this state learns masks by scores, which params alone leave as they are; use "
        "with_optimizer"
    )
    for algorithm in (
        sf.supermask(0.5),
        sf.supermask(0.5, mode="joint"),
        sf.partition([("w", sf.supermask(0.5))]),
        sf.partition([("*", sf.partition([("*", sf.supermask(0.5))]))]),
    ):
        with pytest.raises(ValueError, match=text):
            sf.with_params(algorithm.init({"w": W}), {"w": W})
    with pytest.raises(ValueError, match="this state trains latents"):
        sf.with_params(
            sf.partition([("w", sf.reparametrised(sf.reparam.power(2.0)))]).init(
                {"w": W}
            ),
            {"w": W},
        )
    # its weights train, its scores do not
    given = sf.supermask(0.5, mode="ste").init({"w": W})
    assert torch.equal(sf.with_params(given, {"w": -W}).params["w"], -W)


@pytest.mark.parametrize("name", ["support", "latent", "learned"])
def test_names_of_leaves_and_of_memories_say_nothing(name):
    params = {name: W}
    state = sf.snfs(0.5).init(params)
    assert optree.tree_structure(state.scores["grow"]) == optree.tree_structure(params)
    moved = sf.with_params(state, {name: torch.ones(2, 2)}).params[name]
    assert torch.equal(moved, state.masks[name].float())

    def zeros(params):
        return {name: torch.zeros(()), "scores": {name: torch.zeros(())}}

    memory = sf.Accumulated(
        zeros, lambda memory, *_: memory, lambda memory, state, *_: state.params
    )
    algorithm = sf.with_optimizer(sf.gmp(0.5, score=memory), sf.optimizers.sgd(1.0))
    state = algorithm.init({"w": W})
    assert not torch.equal(
        algorithm.update(state, {"w": W}, 0).params["w"], state.params["w"]
    )
    assert torch.equal(
        sf.with_params(state._replace(opt=()), {"w": -W}).params["w"],
        torch.where(state.masks["w"], -W, 0),
    )


@pytest.mark.parametrize(
    "make",
    [
        sf.dense,
        lambda: sf.static(0.5, pruned="keep"),
        lambda: sf.ste(0.5),
        lambda: sf.snfs(0.5),
        lambda: sf.from_masks(SHARED),
        lambda: sf.gmp(0.5, init=SHARED),
        lambda: sf.rigl(0.5, init=lambda params: SHARED),
        lambda: sf.supermask(0.5, init=lambda params: params, key=KEY),
        lambda: sf.reparametrised(sf.reparam.soft_threshold(), key=KEY),
        lambda: sf.with_optimizer(sf.set(0.5, key=KEY), sf.optimizers.adam(0.1)),
        lambda: sf.partition([("w", sf.static(0.5, key=KEY))]),
        lambda: sf.chain(sf.static(0.5), sf.one_shot(0.75)),
        lambda: sf.sequence(sf.one_shot(0.5), sf.rigl("current")),
        lambda: sf.phases([(0, sf.dense()), (2, sf.static(0.5))]),
    ],
)
def test_what_becomes_of_an_input_later_does_not_reach_a_state(make):
    for params in (
        {"w": torch.randn(4, 4), "b": torch.randn(4)},
        {
            "w": torch.nn.Parameter(torch.randn(4, 4)),
            "b": torch.nn.Parameter(torch.randn(4)),
        },
    ):
        algorithm = make()
        state = algorithm.init(params)
        inputs = [*params.values(), *SHARED.values(), KEY]
        with torch.no_grad():
            before, copies = (
                optree.tree_map(torch.clone, state),
                [x.clone() for x in inputs],
            )
            for x in inputs:
                x.logical_not_() if x.dtype == torch.bool else x.add_(1)
        assert sf.checkpoint.tree_equal(before, state)
        with torch.no_grad():
            for x, copy in zip(inputs, copies, strict=True):
                x.copy_(copy)


def test_with_params_copies():
    state = sf.partition([("w", sf.ste(0.5)), ("*", sf.dense())]).init(
        {"w": torch.ones(4, 4), "b": torch.ones(4)}
    )
    weights = {"w": torch.randn(4, 4), "b": torch.randn(4)}
    put = sf.with_params(state, weights)
    before = optree.tree_map(torch.clone, put.params)
    for leaf in weights.values():
        leaf.add_(1)
    assert sf.checkpoint.tree_equal(before, put.params)


def test_default_view_trains_params_on_the_mask():
    state = sf.State({"w": W}, {"w": MASK})
    view = sf.masked_view
    assert view.get(state)["w"] is W and view.support(state)["w"] is MASK
    assert view.grads(state, {"w": W}, 0)["w"].tolist() == [[1, 0], [3, 4]]
    assert view.put(state, {"w": -W}).params["w"].tolist() == [[-1, -2], [-3, -4]]


def test_masked_integers_stay_integers():
    masked = sf.apply_masks(
        {"w": torch.tensor([5, -3], dtype=torch.int8)},
        {"w": torch.tensor([False, True])},
    )
    assert masked["w"].dtype == torch.int8
    assert masked["w"].tolist() == [0, -3]
