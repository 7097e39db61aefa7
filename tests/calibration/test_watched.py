"""Weights that are watched by themselves: what a watch of all operations sees
(test_products.py has both).
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparsefn as sf
from sparsefn.calibration.chain import chain_of
from sparsefn.calibration.inputs import collector
from sparsefn.calibration.products import Watch
from sparsefn.calibration.watched import Watched, under_watch, unwatched


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
        stats, out = collector(
            layer, weights, {"weight": "weight"}, ["count", "square"], narrow
        )(((x,), {}), None)
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
    chain = chain_of(
        model, state, [["0.weight"], ["1.weight"], ["2.weight"]], ((x,), {})
    )
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
