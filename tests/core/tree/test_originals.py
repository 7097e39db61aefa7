"""Parameters that a weight is computed from, told by their paths: no mask, and a text
that names the mend.
"""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import sparsefn as sf
from sparsefn.core.tree.originals import computed_by_name, computed_name

PARAMS = sf.modules.params_of(
    nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 2))
)
ORIGINAL = "0.parametrizations.weight.original1"
CALL = (
    "torch.nn.utils.parametrize.remove_parametrizations(model.get_submodule('0'), "
    "'weight')"
)
REFUSED = (
    f"'{ORIGINAL}' is no weight: '0.weight' is computed from it, and zeros in it need "
    "not be zeros in '0.weight'. Make '0.weight' a parameter, before the optimizer "
    f"is made, with {CALL}, or leave '{ORIGINAL}' out of `where`"
)
DENSE = (
    "'0.weight' is computed, so it stays dense: to sparsify it make it a parameter, "
    f"before the optimizer is made, with {CALL}. A `where` of your own leaves it "
    "dense without this warning"
)


def masks_of(params):
    return {
        path: torch.ones_like(leaf, dtype=torch.bool)
        if path == ORIGINAL
        else torch.tensor(True)
        for path, leaf in params.items()
    }


WRONG = {
    "a glob": lambda: sf.static(0.5, where="*original1").init(PARAMS),
    "all": lambda: sf.rigl(0.5, where=["1.weight", "0.*.original1"]).init(PARAMS),
    "a function": lambda: sf.gmp(
        0.5, where=lambda path, leaf: leaf.shape == (8, 4)
    ).init(PARAMS),
    "a partition": lambda: sf.partition(
        [("0.*1", sf.static(0.5, where="*")), ("*", sf.dense())]
    ).init(PARAMS),
    "latents": lambda: sf.reparametrised(
        sf.reparam.power(2.0), where="*original1"
    ).init(PARAMS),
    "a rewrite": lambda: sf.rewrite(
        lambda path, w, mask, step: (w, mask), when=sf.at([0]), where="*original1"
    ).init(PARAMS),
    "zeros": lambda: sf.masks.from_zeros(PARAMS, where="*original1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_chosen_by_name_is_refused(name):
    before = {path: leaf.clone() for path, leaf in PARAMS.items()}
    with pytest.raises(ValueError, match=f"^where: {re.escape(REFUSED)}$"):
        WRONG[name]()
    assert sf.checkpoint.tree_equal(PARAMS, before)


def test_given_masks_are_refused():
    for make in (
        sf.from_masks,
        lambda masks: sf.static(None, init=masks, where="1.weight"),
    ):
        with pytest.raises(ValueError, match=f"^masks: {re.escape(REFUSED)}$"):
            make(masks_of(PARAMS)).init(PARAMS)


def test_a_tied_set_does_not_bring_one_in():
    pattern = sf.patterns.tied([["1.weight", 1], [ORIGINAL, 0]])
    with pytest.raises(ValueError, match=f"^where: {re.escape(REFUSED)}$"):
        sf.static(0.5, pattern=pattern, where="1.weight").init(PARAMS)


def test_the_default_leaves_one_dense_and_says_so_once():
    with pytest.warns(UserWarning, match=f"^{re.escape(DENSE)}$") as told:
        state = sf.static(0.5).init(PARAMS)
    assert len(told) == 1
    assert [path for path, mask in state.masks.items() if mask.ndim] == ["1.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.static(0.5, where="1.weight").init(PARAMS)


def test_where_nothing_else_is_there_it_says_so_in_place_of_the_paths():
    params = sf.modules.params_of(
        nn.Sequential(*(parametrizations.orthogonal(nn.Linear(4, 4)) for _ in range(3)))
    )
    with pytest.warns(
        UserWarning,
        match=f"^{re.escape(DENSE.replace('. A ', ' (so are 2 others). A '))}$",
    ) as told:
        sf.static(0.5).init(params)
    assert len(told) == 1


def test_a_computed_embedding_or_bias_is_dense_anyway():
    params = {
        f"{name}.parametrizations.weight.original": torch.ones(4, 4)
        for name in ("embed", "norm")
    }
    params |= {
        "0.parametrizations.bias.original": torch.ones(4),
        "0.weight": torch.ones(4, 4),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.static(0.5).init(params)


def test_plan_says_why():
    with pytest.warns(UserWarning, match="is computed, so it stays dense"):
        rows = {
            row.path: row.why for row in sf.report.plan(sf.static(0.5), PARAMS).rows
        }
    assert rows[ORIGINAL] == "'0.weight' is computed from it"


def test_names():
    assert (
        computed_name("a.b.parametrizations.weight_hh_l0.0.lora.weight")
        == "a.b.weight_hh_l0"
    )
    assert computed_name("parametrizations.weight.original") == "weight"
    assert (
        computed_name("a.parametrizations")
        == computed_name("my_parametrizations.weight")
        == ""
    )


OLD = {
    "weight norm": (
        ["0.weight_g", "0.weight_v"],
        "torch.nn.utils.remove_weight_norm(model.get_submodule('0'), 'weight')",
    ),
    "orig": (
        ["0.weight_orig"],
        "torch.nn.utils.remove_spectral_norm(model.get_submodule('0'), 'weight') or "
        "torch.nn.utils.prune.remove(model.get_submodule('0'), 'weight')",
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_the_older_hooks_are_told_by_the_names_that_they_leave(name):
    names, call = OLD[name]
    shapes = {"0.weight_g": (4, 1), "0.weight_v": (4, 4), "0.weight_orig": (4, 4)}
    params = {path: torch.ones(shapes[path]) for path in names} | {
        "1.weight": torch.ones(2, 4)
    }
    with pytest.warns(
        UserWarning,
        match=f"^'0.weight' is computed, so it stays dense: .*{re.escape(call)}. A "
        "`where`",
    ):
        masks = sf.static(0.5).init(params).masks
    assert [path for path, mask in masks.items() if mask.ndim] == ["1.weight"]
    with pytest.raises(
        ValueError,
        match=f"^where: '{names[-1]}' is no weight: .*, with {re.escape(call)}, or "
        f"leave",
    ):
        sf.static(0.5, where=[names[-1], "1.weight"]).init(params)


def test_leaves_that_only_look_like_it():
    w = torch.ones(4, 4)
    leaves = {
        "weight_g": w,
        "weight_v": w,
        "a.weight_v": w,
        "a.w_g": torch.ones(4, 1),
        "b.w": w,
        "b.w_orig": w,
    }
    assert not any(computed_by_name(path, leaves) for path in leaves)
    assert all(
        mask.ndim
        for path, mask in sf.static(0.5).init(leaves).masks.items()
        if path != "a.w_g"
    )


def test_the_texts_give_a_call_that_works():
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    before = net(x)
    exec(CALL, {"torch": torch, "model": net})
    torch.testing.assert_close(net(x), before)
    assert [
        path
        for path, mask in sf.static(0.5).init(sf.modules.params_of(net)).masks.items()
        if mask.ndim
    ] == [
        "0.weight",
        "1.weight",
    ]


@pytest.mark.deep
def test_compiled_and_batched():
    algorithm = sf.static(0.5)
    compiled = torch.compile(algorithm.init, backend="eager", fullgraph=True)(PARAMS)
    with pytest.warns(UserWarning, match="is computed, so it stays dense"):
        assert sf.checkpoint.tree_equal(compiled, algorithm.init(PARAMS))
        torch.vmap(algorithm.init)(sf.ensemble.stack([PARAMS] * 2))
    with pytest.raises(ValueError, match=f"^where: {re.escape(REFUSED)}$"):
        torch.vmap(sf.static(0.5, where="*original1").init)(
            sf.ensemble.stack([PARAMS] * 2)
        )
