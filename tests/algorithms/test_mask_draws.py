"""Prior masks of algorithms that learn masks: what does not fit is named."""

import re

import pytest
import torch

import sparsefn as sf

LEAF = {"w": torch.arange(8.0).reshape(2, 4)}
MAKERS = {
    "mask_choices": lambda prior: sf.methods.maskllm(steps=3, prior=prior),
    "gumbel_gate": lambda prior: sf.methods.leap(0.5, steps=3, prior=prior),
    "policy_masks": lambda prior: sf.methods.maskpro(prior=prior),
}
GOOD = {"w": torch.tensor([True, False, True, False]).expand(2, 4)}


@pytest.fixture(params=MAKERS)
def name(request):
    return request.param


def refused(name, prior, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(f'{name}: {text}')}$"):
        MAKERS[name](prior).init(LEAF)


def test_a_prior_is_a_tree_of_masks_when_the_algorithm_is_made(name):
    make = MAKERS[name]
    head = f"{name}: expected prior to be a masks tree, got "
    algorithm = sf.static(0.5)
    for wrong, text in {
        "a State: write prior=state.masks": algorithm.init(LEAF),
        "an Algorithm: write prior=algorithm.init(params).masks, or the masks after "
        "its update": algorithm,
        "Linear: write prior=state.masks, of the state of another method": (
            torch.nn.Linear(2, 2)
        ),
        "float: write prior=state.masks, of the state of another method": 0.5,
        "str: write prior=state.masks, of the state of another method": "wanda",
    }.items():
        with pytest.raises(TypeError, match=f"^{re.escape(head + wrong)}$"):
            make(text)
    state = make(GOOD).init(LEAF)
    assert torch.equal(state.params["w"].isnan(), torch.zeros(2, 4) > 0)


def test_a_prior_of_another_dtype_is_refused(name):
    mend = "for pruned weights write {path: x != 0 for path, x in prior.items()}"
    for wrong, got in ((torch.ones(2, 4), "torch.float32"), (1.0, "float")):
        refused(
            name,
            {"w": wrong},
            TypeError,
            f"expected a bool prior mask at 'w', got {got}: {mend}",
        )


def test_a_prior_of_other_leaves_is_refused(name):
    head = "expected a prior mask of shape (2, 4) at 'w', got"
    choose = "choose the same leaves by where="
    refused(
        name,
        {"v": GOOD["w"]},
        ValueError,
        f"{head} none: {choose}, and name them alike; the masks of prior are at 'v'",
    )
    refused(
        name,
        {},
        ValueError,
        f"{head} none: {choose}, and name them alike; the masks of prior are at none "
        "at all",
    )
    refused(
        name,
        {"w": torch.tensor(True)},
        ValueError,
        f"{head} (), which keeps the leaf whole: {choose}",
    )
    refused(name, {"w": GOOD["w"].T}, ValueError, f"{head} (4, 2): {choose}")


@pytest.mark.parametrize("learned", ["mask_choices", "gumbel_gate"])
def test_a_prior_that_keeps_everything_is_refused(learned):
    refused(
        learned,
        {"w": torch.ones(2, 4) > 0},
        ValueError,
        "expected prior masks that prune some weights, got masks that keep all weights "
        "of 'w': give the masks of a pruned state, settled where they were learned, or "
        "prior=None",
    )


@pytest.mark.parametrize("learned", ["mask_choices", "gumbel_gate"])
def test_a_prior_may_keep_a_leaf_beside_one_that_it_prunes(learned):
    prior = {**GOOD, "v": torch.ones(2, 4) > 0}
    MAKERS[learned](prior).init({**LEAF, "v": torch.ones(2, 4)})


def test_a_prior_of_drawn_masks_keeps_n_of_m():
    text = (
        "expected a prior mask of nm(2, 4, axis=1) at 'w', got {} kept in a group: "
        "make it with pattern=sf.patterns.nm(2, 4, axis=1), or prior=None"
    )
    refused("policy_masks", {"w": torch.ones(2, 4) > 0}, ValueError, text.format(4))
    uneven = GOOD["w"].clone()
    uneven[1] = False
    refused("policy_masks", {"w": uneven}, ValueError, text.format(0))


def test_what_a_transform_hides_is_not_read(name):
    def first(mask):
        return MAKERS[name]({"w": mask}).init(LEAF).scores["latent"]["logit"]["w"]

    both = torch.stack([GOOD["w"], torch.ones(2, 4) > 0])
    made = torch.func.vmap(first)(both)
    assert torch.equal(made[0], first(GOOD["w"]))
