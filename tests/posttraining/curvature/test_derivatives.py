"""Per-example gradients and Hessian-vector products, against loops and full
Hessians.
"""

import re

import optree
import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.posttraining.curvature.derivatives import (
    arguments_at,
    batch_size,
    check_loss,
    unpacked,
)

C = sf.curvature


def loss(params, x, y):
    """A net over nested containers, with a leaf that is not used."""
    hidden = torch.tanh(x @ params["body"]["weight"].T + params["body"]["bias"])
    return nn.functional.cross_entropy(hidden @ params["head"][0].T, y)


def example(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    params = {
        "head": (leaf(3, 4),),
        "body": {"weight": leaf(4, 2), "bias": leaf(4)},
        "unused": leaf(2),
    }
    return params, (leaf(5, 2), torch.tensor([0, 2, 1, 1, 0]))


def flat_loss(params, batch):
    """The loss as a function of one vector, and the vector."""
    leaves, rebuild = unpacked(params)
    sizes = [leaf.numel() for leaf in leaves]

    def of_vector(vector):
        parts = vector.split(sizes)
        return loss(
            rebuild(
                [
                    part.reshape(leaf.shape)
                    for part, leaf in zip(parts, leaves, strict=True)
                ]
            ),
            *batch,
        )

    return of_vector, torch.cat([leaf.reshape(-1) for leaf in leaves])


def flat(tree):
    return torch.cat([leaf.reshape(-1) for leaf in optree.tree_leaves(tree)])


def test_example_gradients_are_a_loop_over_examples():
    params, (x, y) = example()
    found = C.example_gradients(loss, params, (x, y))
    assert optree.tree_structure(found) == optree.tree_structure(params)
    for i in range(5):
        of_vector, vector = flat_loss(params, (x[i : i + 1], y[i : i + 1]))
        expected = torch.autograd.functional.jacobian(of_vector, vector)
        assert torch.allclose(
            flat(optree.tree_map(lambda g, i=i: g[i], found)), expected, atol=1e-14
        )
    whole = torch.func.grad(loss)(params, x, y)
    assert torch.allclose(
        flat(optree.tree_map(lambda g: g.mean(0), found)), flat(whole), atol=1e-14
    )
    assert not found["unused"].any()


def test_a_batch_may_hold_trees():
    def of_tree(params, batch):
        return (batch["x"] @ params["w"] - batch["y"]).square().sum()

    params = {"w": torch.tensor([1.0, 2.0])}
    batch = {"y": torch.tensor([0.0, 1.0]), "x": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}
    assert C.example_gradients(of_tree, params, [batch])["w"].tolist() == [
        [2.0, 0.0],
        [0.0, 2.0],
    ]


def test_hessian_vector_is_the_hessian_times_the_vector():
    params, batch = example()
    of_vector, vector = flat_loss(params, batch)
    hessian = torch.autograd.functional.hessian(of_vector, vector)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        direction = optree.tree_map(
            lambda p, g=generator: torch.randn(p.shape, generator=g, dtype=p.dtype),
            params,
        )
        found = C.hessian_vector(loss, params, direction, batch)
        assert optree.tree_structure(found) == optree.tree_structure(params)
        assert torch.allclose(flat(found), hessian @ flat(direction), atol=1e-13)


def test_several_vectors_at_once_and_the_derivative_of_a_product():
    params, batch = example()
    directions = optree.tree_map(lambda p: torch.stack([torch.ones_like(p), p]), params)
    both = torch.vmap(lambda v: C.hessian_vector(loss, params, v, batch))(directions)
    for i, direction in enumerate((optree.tree_map(torch.ones_like, params), params)):
        assert torch.allclose(
            flat(optree.tree_map(lambda x, i=i: x[i], both)),
            flat(C.hessian_vector(loss, params, direction, batch)),
        )

    def cubic(params):
        return (params["w"] ** 3).sum()

    w, v = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, -1.0])}
    assert C.hessian_vector(cubic, w, v, ())["w"].tolist() == [6.0, -12.0]
    third = torch.func.grad(lambda w: C.hessian_vector(cubic, w, v, ())["w"].sum())(w)
    assert third["w"].tolist() == [6.0, -6.0]


def test_a_module_is_taken_through_call_and_stays_as_it_is():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
    ).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, y = torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 2])

    def of_net(params, x, y):
        return nn.functional.cross_entropy(sf.modules.call(net, params, x), y)

    params = sf.modules.params_of(net)
    found = C.example_gradients(of_net, params, (x, y))
    for i in range(3):
        expected = torch.func.grad(of_net)(params, x[i : i + 1], y[i : i + 1])
        for name in params:
            assert torch.allclose(found[name][i], expected[name], atol=1e-6)
    C.hessian_vector(of_net, params, params, (x, y))
    assert all(
        torch.equal(before[name], value) for name, value in net.state_dict().items()
    )


def test_attention_has_second_derivatives_without_the_fused_kernel():
    layer = nn.TransformerEncoderLayer(
        4, 2, 4, batch_first=True, dropout=0.0, dtype=torch.float64
    ).eval()
    params, x = sf.modules.params_of(layer), torch.randn(2, 3, 4, dtype=torch.float64)

    def of_layer(params):
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return sf.modules.call(layer, params, x).pow(3).mean()

    def along(t):
        moved = optree.tree_map(lambda p: p + t * p, params)
        return flat(torch.func.grad(of_layer)(moved))

    found = flat(C.hessian_vector(of_layer, params, params, ()))
    assert torch.allclose(
        found, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-4, atol=1e-6
    )


def test_random_numbers_in_the_loss_are_refused_under_vmap():
    with pytest.raises(RuntimeError, match="randomness"):
        C.example_gradients(
            lambda p, x: nn.functional.dropout(p["w"] * x).sum(),
            {"w": torch.ones(1)},
            (torch.ones(2),),
        )


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            (torch.ones(2, 1), torch.ones(3)),
            ValueError,
            "equally many examples, got 2 at '0' and 3 at '1'",
        ),
        (
            (torch.ones(2), {"y": torch.tensor(1.0)}),
            ValueError,
            "examples in the batch, got a 0-d tensor at '1.y'",
        ),
        (
            (torch.ones(2), 3.0),
            TypeError,
            "expected a batch of tensors, got float at '1'",
        ),
        (
            (torch.ones(0, 2),),
            ValueError,
            "expected a batch of at least one example, got none",
        ),
        ((), ValueError, "expected a batch of at least one example, got none"),
        (
            torch.ones(2),
            TypeError,
            "expected batch to be a tuple of the loss's arguments after params, got "
            "Tensor; for one write (x,)",
        ),
    ],
    ids=["sizes", "0-d", "number", "empty", "no arguments", "bare"],
)
def test_bad_batches(batch, error, message):
    with pytest.raises(error, match=re.escape(message)):
        C.example_gradients(
            lambda params, *_: params["w"].sum(), {"w": torch.ones(1)}, batch
        )
    with pytest.raises(error, match=re.escape(message)):
        batch_size(batch)


def test_bad_losses_vectors_and_functions_of_the_step():
    params = {"w": torch.ones(2)}
    with pytest.raises(
        ValueError, match=r"expected the loss to be a 0-d tensor, got shape \(2,\)"
    ):
        C.hessian_vector(lambda params: params["w"] ** 2, params, params, ())
    with pytest.raises(
        ValueError, match=r"expected the loss to be a 0-d tensor, got float"
    ):
        C.example_gradients(lambda params, x: 1.0, params, (torch.ones(2),))
    with pytest.raises(
        ValueError, match=r"expected vector of shape \(2,\) at 'w', got \(3,\)"
    ):
        C.hessian_vector(
            lambda params: params["w"].sum(), params, {"w": torch.ones(3)}, ()
        )
    with pytest.raises(
        TypeError,
        match=r"expected batch to be a tuple .*, got function; for one write \(x,\)",
    ):
        C.hessian_vector(
            lambda params: params["w"].sum(), params, params, lambda step: ()
        )
    with pytest.raises(
        TypeError,
        match=r"expected the function batch to give a tuple .*, got Tensor; for one "
        r"write",
    ):
        arguments_at(lambda step: torch.ones(step), 2)
    with pytest.raises(
        TypeError,
        match=r"expected loss to be a function \(params, \*batch\) -> 0-d tensor, got "
        r"dict",
    ):
        check_loss({}, ())
    with pytest.raises(
        TypeError, match=r"expected floating-point params, got torch.int64 at 'w'"
    ):
        C.example_gradients(loss, {"w": torch.tensor([1])}, (torch.ones(1),))


def scaled(params, x):
    return (params["w"] * x).sum()


def moving(params, x):
    return scaled(params, x.to(params["w"].device))


@pytest.mark.parametrize("call", ["gradients", "product", "fisher", "obd", "diagonal"])
def test_a_batch_on_another_device_is_named(call):
    params = {"w": torch.ones(3, 4, device="meta")}
    x = torch.ones(2, 3, 4)

    def run(loss):
        if call == "gradients":
            return C.example_gradients(loss, params, (x,))
        if call == "product":
            return C.hessian_vector(loss, params, params, (x[0],))
        scores = {
            "fisher": lambda: C.fisher(loss, (x,)),
            "obd": lambda: C.obd(C.fisher(loss, (x,))),
            "diagonal": lambda: C.hessian_diagonal(loss, (x[0],)),
        }
        algorithm = sf.one_shot(0.5, scores[call](), when=sf.at([0]))
        return algorithm.update(algorithm.init(params), params, 0)

    with pytest.raises(
        ValueError,
        match=r"expected the batch of a loss on meta, where params are, got '0' of the "
        r"batch on cpu; move it: x.to\('meta'\)",
    ) as caught:
        run(scaled)
    assert isinstance(caught.value.__cause__, RuntimeError)  # torch's own words
    run(moving)


def test_errors_of_a_loss_that_are_not_of_devices_are_its_own():
    def failing(params, x, number):
        raise RuntimeError("of its own")

    params = {"w": torch.ones(3)}
    for device in ("cpu", "meta"):
        batch = torch.ones(2, 3), torch.tensor(1.0, device=device)
        with pytest.raises(RuntimeError, match="^of its own$"):
            C.hessian_vector(failing, params, params, batch)
