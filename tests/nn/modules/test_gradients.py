"""Values and gradients: trees, aux, what is refused, and the gradient where autograd
records nothing.
"""

import optree
import pytest
import torch
from torch import nn

import sparsefn.nn.modules as M
from sparsefn.nn.modules.gradients import value_and_grad


def test_value_and_grad_of_trees_aux_and_unused_params():
    params = (
        torch.tensor([2.0, 3.0]),
        {"b": [torch.tensor(5.0)], "a": torch.ones(2, 2)},
    )

    def loss(params, x, *, scale):
        value = scale * (params[0] * x).sum() * params[1]["b"][0]
        return value, {"out": params[0] * 2, "x": x}

    f = value_and_grad(loss, has_aux=True)
    x = torch.tensor([1.0, 1.0])
    transformed = torch.vmap(lambda x: f(params, x, scale=2.0))(x[None])
    for (value, aux), grads in (
        f(params, x, scale=2.0),
        optree.tree_map(lambda leaf: leaf[0], transformed),
    ):
        assert value.item() == 50.0
        assert aux["out"].tolist() == [4.0, 6.0]
        assert not aux["out"].requires_grad
        assert optree.tree_structure(grads) == optree.tree_structure(params)
        assert grads[0].tolist() == [10.0, 10.0]
        assert grads[1]["b"][0].item() == 10.0
        assert torch.equal(grads[1]["a"], torch.zeros(2, 2))


def test_value_and_grad_of_a_constant_of_no_params_and_without_grad_mode():
    constant = value_and_grad(lambda params: torch.tensor(3.0))
    value, grads = constant({"w": torch.ones(2)})
    assert value.item() == 3.0
    assert grads["w"].tolist() == [0.0, 0.0]
    assert value_and_grad(lambda params, x: x.sum())({}, torch.ones(2))[1] == {}
    with torch.no_grad():
        assert (
            value_and_grad(lambda w: (w * w).sum())(torch.tensor([3.0]))[1].item()
            == 6.0
        )


def test_value_and_grad_touches_no_grad_and_keeps_no_graph():
    outside, param = torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))
    value, grads = value_and_grad(lambda params: (params["w"] * outside).sum())(
        {"w": param}
    )
    assert outside.grad is None
    assert param.grad is None
    assert not value.requires_grad
    assert not grads["w"].requires_grad
    assert grads["w"].tolist() == [1.0, 1.0]


def test_gradients_of_gradients_through_torch_func():
    f = value_and_grad(lambda w: (w**3).sum())
    assert torch.func.grad(lambda w: f(w)[1].sum())(torch.tensor([2.0])).item() == 12.0


def test_value_and_grad_refuses():
    square = value_and_grad(lambda params: params["w"] ** 2)
    with pytest.raises(
        ValueError, match=r"expected the loss to be a 0-d tensor, got shape \(2,\)"
    ):
        square({"w": torch.ones(2)})
    with pytest.raises(
        ValueError, match="expected the loss to be a 0-d tensor, got float"
    ):
        value_and_grad(lambda params: 1.0)({"w": torch.ones(2)})
    with pytest.raises(
        TypeError, match=r"expected floating-point params, got torch.int64 at 'n'"
    ):
        square({"w": torch.ones(2), "n": torch.tensor(1)})
    with pytest.raises(
        TypeError, match="expected floating-point params, got float at 'n'"
    ):
        square({"w": torch.ones(2), "n": 1.0})
    with pytest.raises(
        TypeError, match=r"expected the loss to return \(value, aux\), got Tensor"
    ):
        value_and_grad(lambda params: params["w"].sum(), has_aux=True)(
            {"w": torch.ones(2)}
        )


def inference_copy(x):
    with torch.inference_mode():
        return x.clone()


MODES = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "off inside": lambda: torch.inference_mode(False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("params_made_there", [False, True])
@pytest.mark.parametrize("data_made_there", [False, True])
@pytest.mark.parametrize("has_aux", [False, True])
def test_the_gradient_is_true_in_inference_mode_and_of_tensors_made_there(
    mode, params_made_there, data_made_there, has_aux
):
    params, x = (
        {"w": torch.tensor([1.0, 2.0]), "unused": torch.ones(1)},
        torch.tensor([3.0, 4.0]),
    )
    params = (
        {"w": inference_copy(params["w"]), "unused": params["unused"]}
        if params_made_there
        else params
    )
    x = inference_copy(x) if data_made_there else x

    def loss(params, x):
        value = ((params["w"] * x) ** 2).sum()
        return (value, {"out": params["w"] * 2}) if has_aux else value

    with MODES[mode]():
        value, grads = value_and_grad(loss, has_aux=has_aux)(params, x)
    if has_aux:
        value, aux = value
        assert aux["out"].tolist() == [2.0, 4.0]
        assert not aux["out"].requires_grad
    assert value.item() == 73.0
    assert grads["w"].tolist() == [18.0, 64.0]
    assert grads["unused"].tolist() == [0.0]
    assert not value.requires_grad
    assert not grads["w"].requires_grad


def test_of_tensors_made_in_inference_mode_no_graph_is_kept_either():
    outside, w = torch.ones(2, requires_grad=True), inference_copy(torch.ones(2))
    value, grads = value_and_grad(lambda params: (params["w"] * outside).sum())(
        {"w": w}
    )
    assert not value.requires_grad
    assert not grads["w"].requires_grad
    assert outside.grad is None
    with torch.inference_mode():
        assert value_and_grad(lambda params, x: x.sum())({}, torch.ones(2))[1] == {}
        assert value_and_grad(lambda params: torch.tensor(3.0))({"w": w})[1][
            "w"
        ].tolist() == [0.0, 0.0]


def test_a_model_in_inference_mode_has_the_gradient_that_it_has_outside():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    x = torch.randn(5, 2)

    def loss(params, x):
        out, buffers = M.call_with_buffers(net, params, M.buffers_of(net), x)
        return out.square().mean(), buffers

    (want, left), wanted = value_and_grad(loss, has_aux=True)(M.params_of(net), x)
    with torch.inference_mode():
        (value, buffers), grads = value_and_grad(loss, has_aux=True)(
            M.params_of(net), x.clone()
        )
    torch.testing.assert_close((value, buffers, grads), (want, left, wanted))
    assert wanted["0.weight"].any()
