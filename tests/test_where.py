"""Which leaves are sparsified: the default rule, functions, globs, and what is refused."""

import pytest
import torch

from sparsefn.where import default_where, select_leaves

W, B = torch.zeros(2, 2), torch.zeros(2)


@pytest.mark.parametrize(
    ("path", "shape", "chosen"),
    [
        ("0.weight", (2, 2), True),
        ("conv.weight", (2, 2, 3, 3), True),
        ("0.bias", (2,), False),
        ("scale", (), False),
        ("tok_Embeddings.weight", (2, 2), False),
        ("LayerNorm.weight", (2, 2), False),
        ("LM_head.weight", (2, 2), False),
        ("x.pe_helper.y", (2, 2), False),
    ],
)
def test_default_where(path, shape, chosen):
    assert default_where(path, torch.zeros(shape)) is chosen


def test_order_is_optrees_whatever_the_insertion():
    a = {"b": {"weight": W, "bias": B}, "a": W}
    b = {"a": W, "b": {"bias": B, "weight": W}}
    assert list(select_leaves(a)) == list(select_leaves(b)) == ["a", "b.weight"]
    assert select_leaves(a)["a"] is W


def test_globs_match_whole_paths_tell_case_apart_and_cross_dots():
    params = {"enc": {"0": {"weight": W, "bias": B}}, "Enc": {"weight": W}}
    assert list(select_leaves(params, "enc.*")) == ["enc.0.bias", "enc.0.weight"]
    assert list(select_leaves(params, "*weight")) == ["Enc.weight", "enc.0.weight"]
    assert list(select_leaves(params, ("enc.0.bias", "Enc.*"))) == ["Enc.weight", "enc.0.bias"]
    with pytest.raises(ValueError, match=r"where: no path matches 'weight'; the paths are 'Enc.weight', 'enc.0.bias'"):
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
    with pytest.raises(TypeError, match=r"expected floating-point params, got torch.int64 at 'a.b'"):
        select_leaves({"a": {"b": torch.zeros(2, 2, dtype=torch.int64)}, "w": W})
    with pytest.raises(TypeError, match=r"expected floating-point params, got torch.complex64 at 'w'"):
        select_leaves({"w": torch.zeros(2, 2, dtype=torch.complex64)})
    with pytest.raises(TypeError, match=r"expected floating-point params, got float at '1'"):
        select_leaves([W, 1.0])


def test_other_kinds_of_where_are_refused():
    with pytest.raises(TypeError, match="expected where to be a function, a glob or a sequence of globs, got int"):
        select_leaves({"w": W}, 3)
    with pytest.raises(TypeError, match="expected where to hold globs, got int"):
        select_leaves({"w": W}, ["*", 3])


def test_under_compile_and_vmap():
    def chosen(w):
        return [leaf * 2 for leaf in select_leaves({"w": w, "b": w[0]}, ["w"]).values()]

    w = torch.arange(8.0).reshape(2, 2, 2)
    assert torch.equal(torch.compile(chosen, fullgraph=True, backend="eager")(w[0])[0], w[0] * 2)
    assert torch.equal(torch.vmap(lambda w: torch.stack(chosen(w)))(w)[:, 0], w * 2)
