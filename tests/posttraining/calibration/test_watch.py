"""The mode that sees products: which operations, which views of a leaf, and what it
refuses.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparsefn as sf
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.blocks import chain_of
from sparsefn.posttraining.calibration.inputs import collector
from sparsefn.posttraining.calibration.watch import (
    Watch,
    Watched,
    under_watch,
    unwatched,
)


def seen(weight, run, gram=True):
    with torch.no_grad(), Watch({"w": weight}, gram) as watch:
        run(weight)
    narrow = Watch({"w": weight}, gram)
    with torch.no_grad():
        run(under_watch(weight, narrow))
    assert sf.checkpoint.tree_equal(narrow.stats(), watch.stats())
    return watch.stats().get("w")


def check(stats, x):
    x = x.double()
    assert int(stats["count"]) == len(x)
    assert torch.allclose(stats["square"].flatten(), x.square().sum(0), rtol=1e-6)
    assert torch.allclose(stats["gram"].double(), x.T @ x, rtol=1e-4, atol=1e-4)


X, W = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.ones(4, 3)
PRODUCTS = {
    "linear": lambda w: functional.linear(X, w),
    "linear, bias": lambda w: functional.linear(X, w, torch.ones(4)),
    "linear, three axes": lambda w: functional.linear(
        X.reshape(2, 3, 3), w, torch.ones(4)
    ),
    "linear, not contiguous": lambda w: functional.linear(
        X.T.contiguous().T.reshape(2, 3, 3).transpose(0, 1), w
    ),
    "x @ w.T": lambda w: X @ w.T,
    "w @ x.T": lambda w: w @ X.T,
    "batches, x @ w.T": lambda w: torch.bmm(X.reshape(2, 3, 3), w.T.expand(2, 3, 4)),
    "batches, w @ x.T": lambda w: torch.bmm(w.expand(2, 4, 3), X.reshape(2, 3, 3).mT),
    "a batch of one": lambda w: torch.baddbmm(torch.ones(1, 6, 4), X[None], w.T[None]),
    "vectors": lambda w: [w @ x for x in X],
    "addmv": lambda w: [torch.addmv(torch.ones(4), w, x) for x in X],
    "rows apart": lambda w: [functional.linear(X, part) for part in w.split(2)],
    "one output": lambda w: [X @ row for row in w],
    "einsum": lambda w: torch.einsum("ni,oi->no", X, w),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_form_of_a_product_is_seen(name):
    stats = seen(W.clone(), PRODUCTS[name])
    if stats["count"].ndim:  # the outputs were apart
        for group in range(len(stats["count"])):
            check({key: value[group] for key, value in stats.items()}, X)
    else:
        check(stats, X)
        assert stats["square"].shape == (3,)


@pytest.mark.parametrize("shape", [(3, 5), (3, 3), (3, 1), (1, 5)])
def test_a_weight_stored_as_inputs_by_outputs_says_so(shape):
    x = torch.randn(6, shape[0])
    stats = seen(torch.randn(shape), lambda w: x @ w)
    check(stats, x)
    assert stats["square"].shape == (shape[0], 1)


@pytest.mark.parametrize("shape", [(5, 3), (3, 3), (1, 3), (5, 1)])
def test_a_weight_stored_as_outputs_by_inputs_says_so(shape):
    x = torch.randn(6, shape[1])
    stats = seen(torch.randn(shape), lambda w: functional.linear(x, w))
    check(stats, x)
    assert stats["square"].shape == (shape[1],)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_one_leaf_have_statistics_each(turned):
    x, y = torch.randn(6, 3), torch.randn(2, 3)
    experts = torch.randn(4, 3, 5) if turned else torch.randn(4, 5, 3)

    def run(w):
        for inputs, one in ((x, 0), (y, 2)):
            inputs @ (w[one] if turned else w[one].T)

    stats = seen(experts, run)
    assert stats["count"].tolist() == [6, 0, 2, 0]
    assert stats["square"].shape == ((4, 3, 1) if turned else (4, 3))
    check({key: value[0] for key, value in stats.items()}, x)
    check({key: value[2] for key, value in stats.items()}, y)
    batch = torch.randn(4, 6, 3)
    together = seen(experts, lambda w: torch.bmm(batch, w if turned else w.mT))
    for one in range(4):
        check({key: value[one] for key, value in together.items()}, batch[one])


def test_rows_in_groups_times_a_matrix_each():
    x, ends = torch.randn(8, 16).bfloat16(), torch.tensor([3, 8], dtype=torch.int32)
    stats = seen(
        torch.randn(2, 16, 8).bfloat16(),
        lambda w: functional.grouped_mm(x, w, offs=ends),
    )
    assert stats["count"].tolist() == [3, 5]
    check({key: value[1] for key, value in stats.items()}, x[3:])


def test_a_leaf_that_is_used_twice_has_the_sums_of_both():
    y = torch.randn(2, 3)
    stats = seen(
        W.clone(), lambda w: (functional.linear(X, w), functional.linear(y, w))
    )
    check(stats, torch.cat([X, y]))


def test_the_same_input_of_two_leaves_is_summed_once_until_it_changes():
    x, weights = (
        torch.randn(6, 3),
        {"a": torch.ones(2, 3), "b": torch.ones(4, 3), "c": torch.ones(4, 3)},
    )
    with torch.no_grad(), Watch(weights, gram=True) as watch:
        for name in "ab":
            functional.linear(x.reshape(2, 3, 3), weights[name])
        once = x.clone()
        x.mul_(2)
        functional.linear(x.reshape(2, 3, 3), weights["c"])
    stats = watch.stats()
    assert stats["a"]["gram"] is stats["b"]["gram"]
    check(stats["b"], once)
    check(stats["c"], x)


def test_a_cast_of_the_whole_leaf_counts_and_one_that_computes_does_not():
    check(seen(W.clone(), lambda w: functional.linear(X.double(), w.double())), X)
    with torch.autocast("cpu", torch.bfloat16):
        check(seen(W.clone(), lambda w: functional.linear(X, w)), X.bfloat16())
    assert seen(W.clone(), lambda w: functional.linear(X, 2 * w)) is None
    assert (
        seen(W.clone(), lambda w: functional.linear(X.double(), w[:2].double())) is None
    )


def test_memory_that_a_cast_has_left_is_not_taken_for_the_leaf():
    def run(w):
        for _ in range(20):
            w.double()
            functional.linear(
                torch.ones(1, 3, dtype=torch.float64),
                torch.ones(4, 3, dtype=torch.float64),
            )

    assert seen(W.clone(), run) is None


def test_products_of_leaves_with_each_other_are_no_data():
    assert seen(torch.eye(3), lambda w: w @ w) is None


def test_inference_mode_is_seen_through():
    with torch.inference_mode():
        x, layer = torch.randn(2, 3, 3), nn.Linear(3, 4)
        with Watch({"w": layer.weight}, gram=True) as watch:
            layer(x)
        check(watch.stats()["w"], x.flatten(0, 1))


def test_parts_of_the_inputs_are_refused():
    whole = (
        r"expected products with whole rows of 'w', of shape \(4, 3\), got one with a "
        r"part of shape \(4, 2\)"
    )
    with pytest.raises(ValueError, match=whole):
        seen(W.clone(), lambda w: X[:, :2] @ w[:, :2].T)
    with pytest.raises(ValueError, match="whole rows"):
        seen(W.clone(), lambda w: X @ w[::2].T)
    with pytest.raises(ValueError, match="'w' is multiplied once along each axis"):
        seen(torch.eye(3), lambda w: (X @ w, X @ w.T))
    with pytest.raises(
        ValueError, match="a convolution with the whole of 'w', got one with a part"
    ):
        seen(
            torch.ones(4, 2, 3), lambda w: functional.conv1d(torch.ones(1, 2, 5), w[:2])
        )


def test_transposed_convolutions_are_not_seen():
    assert (
        seen(
            torch.ones(2, 4, 3),
            lambda w: functional.conv_transpose1d(torch.ones(1, 2, 5), w),
        )
        is None
    )


def test_tokens_choose_rows_and_what_has_none_for_each_is_refused():
    weight, x, tokens = torch.randn(2, 3), torch.randn(4, 5, 3), torch.rand(4, 5) < 0.5
    with Watch({"w": weight}, True, tokens) as watch:
        _ = x @ weight.T
    stats, rows = watch.stats()["w"], x[tokens]
    assert int(stats["count"]) == len(rows) and torch.allclose(
        stats["gram"], rows.T @ rows, rtol=1e-4, atol=1e-5
    )
    with (
        Watch({"w": weight}, True, tokens),
        pytest.raises(ValueError, match="of 'w' for all 20 tokens, got 8"),
    ):
        _ = x[:, :2].flatten(0, 1) @ weight.T
    kernel = torch.randn(2, 3, 1)
    with (
        Watch({"k": kernel}, True, tokens),
        pytest.raises(ValueError, match="'k' a token, but it is the kernel"),
    ):
        torch.conv1d(x.mT, kernel)
    experts, ends = torch.randn(2, 16, 16), torch.tensor([8, 16], dtype=torch.int32)
    with (
        Watch({"e": experts}, True, torch.ones(16, dtype=torch.bool)) as watch,
        pytest.raises(ValueError) as error,
    ):
        watch.grouped(torch.randn(16, 16), experts, ends)
    assert (
        "expected 'e' to get inputs in the order of tokens, but it sorts them"
        in str(error.value)
    )


def turned(x, weight):
    return x.transpose(0, 1) @ weight.T


def flattened(x, weight):
    return x.mT.contiguous().mT.transpose(0, 1).reshape(-1, 3) @ weight.T


def in_a_batch(x, weight):
    return torch.bmm(x.transpose(0, 1), weight.T.expand(5, 3, 2))


@pytest.mark.parametrize("run", [turned, flattened, in_a_batch])
def test_inputs_in_another_order_than_the_tokens_are_refused(run):
    weight, x, tokens = torch.randn(2, 3), torch.randn(4, 5, 3), torch.rand(4, 5) < 0.5
    text = (
        r"^inputs: expected inputs of 'w' in the order of the \(4, 5\) tokens, got "
        r"\(5, 4\): give examples of one len"
    )
    with Watch({"w": weight}, False, tokens), pytest.raises(ValueError, match=text):
        run(x, weight)
    with Watch({"w": weight}, False, tokens) as watch:
        _ = x.view(4, 5, 3, 1).permute(0, 1, 3, 2).reshape(20, 3) @ weight.T
    with Watch({"w": weight}, False, tokens[:1]) as watch:  # one example has one order
        run(x[:1], weight)
    assert torch.allclose(
        watch.stats()["w"]["square"], x[0][tokens[0]].double().square().sum(0)
    )


def test_views_are_watched_and_what_is_computed_is_not():
    weight = torch.randn(4, 3)
    watch = Watch({"w": weight}, gram=False)
    one = under_watch(weight, watch)
    for view in (
        one.T,
        one[1:],
        one.unsqueeze(0),
        one.detach(),
        *one.split(2),
        one.to(torch.float64),
        one.data,
    ):
        assert type(view) is Watched and view.watch is watch
    for other in (one + 1, one.clone(), one[:2].double(), one.sum(), one.new_zeros(2)):
        assert type(other) is torch.Tensor
    assert (
        one.shape == (4, 3)
        and one.ndim == 2
        and one.dtype == torch.float32
        and one.tolist() == weight.tolist()
    )
    assert unwatched({"a": [one, 1]})["a"][0] is weight


@pytest.mark.parametrize("bias", [None, torch.ones(4)])
def test_a_layer_has_the_bits_of_a_watch_of_all_operations(bias):
    weight = torch.randn(4, 3)
    for x in (
        torch.randn(3),
        torch.randn(5, 3),
        torch.randn(2, 5, 3),
        torch.randn(3, 5, 2).permute(2, 1, 0),
        torch.randn(0, 3),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            w = weight.to(dtype)
            wide, narrow = Watch({"w": w}, gram=True), Watch({"w": w}, gram=True)
            b = None if bias is None else bias.to(dtype)
            with torch.no_grad(), wide:
                expected = functional.linear(x.to(dtype), w, b)
            with torch.no_grad():
                out = functional.linear(x.to(dtype), under_watch(w, narrow), b)
            assert type(out) is torch.Tensor and torch.equal(out, expected)
            assert sf.checkpoint.tree_equal(narrow.stats(), wide.stats())


def test_what_a_module_returns_is_plain():
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight, self.weight.T

    layer, x = Layer(3, 2), torch.randn(5, 3)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    for narrow in (False, True):
        collect = collector(
            Named.of(layer), weights, ["weight"], ["count", "square"], narrow
        )
        stats, out = collect(((x,), {}), None)
        assert {type(y) for y in out} == {torch.Tensor} and int(
            stats["weight"]["count"]
        ) == 5


class Mapped(nn.Linear):
    """Multiplies by one row of the weight after another, where torch asks no tensor."""

    def forward(self, x):
        return torch.vmap(lambda row: x @ row, out_dims=-1)(self.weight) + self.bias


class Typed(nn.Linear):
    """Wants a weight of one type."""

    def forward(self, x):
        if type(self.weight) is not torch.Tensor:
            raise TypeError("no weight")
        return super().forward(x)


@pytest.mark.parametrize("kind", [Mapped, Typed, nn.Linear])
def test_a_layer_that_would_not_be_seen_so_is_watched_as_a_whole(kind):
    model, x = nn.Sequential(*(kind(6, 6) for _ in range(3))), torch.randn(8, 6)
    state, blocks = sf.dense().init(sf.modules.params_of(model)), ["0.*", "1.*", "2.*"]
    chosen = [["0.weight"], ["1.weight"], ["2.weight"]]
    chain = chain_of(Named.of(model), state, chosen, ((x,), {}))
    assert chain.narrow == (kind is nn.Linear)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    plain.load_state_dict(model.state_dict())

    def prune(stats):
        return sf.one_shot(0.5, sf.scores.wanda(stats))

    done, expected = (
        sf.calibration.in_order(one, None, blocks, prune, x, of="square", chunk_size=4)
        for one in (model, plain)
    )
    assert sf.checkpoint.tree_equal(done.masks, expected.masks)
