"""Models of the meta device: what needs values names the first tensor without, and what
follows from shapes works.
"""

import copy
import re

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.core.tree import check_not_meta
from sparsefn.shrinking.proof import check_loaded

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
MEND = (
    'load the weights of the model first, as model.to_empty(device="cpu") and then '
    "model.load_state_dict(saved) do"
)


class Turn(nn.Linear):
    def forward(self, x):
        return x + super().forward(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


def without(model):
    return copy.deepcopy(model).to("meta")


def refused(call, path, make):
    text = f"{call}: expected tensors with values, but {path!r} is on the meta device: "
    with pytest.raises(ValueError, match=f"^{re.escape(text + MEND)}$"):
        make()


def wanda(stats):
    return sf.one_shot(0.5, sf.scores.wanda(stats))


def test_shrink_needs_values():
    model = net()
    pattern = sf.shrinking.groups(model, X).pattern()
    state = sf.static(0.5, pattern=pattern).init(sf.modules.params_of(model))
    meta = without(model)
    own = sf.modules.params_of(meta)
    for some in (state, sf.State(own, state.masks)):
        refused("shrink", "0.weight", lambda some=some: sf.shrink(meta, some, X))
    lacks = sf.State(own, state.masks)
    refused("shrink", "params.0.bias", lambda: sf.shrink(model, lacks, X))
    masks = {path: mask.to("meta") for path, mask in state.masks.items()}
    lacks = sf.State(state.params, masks)
    refused("shrink", "masks.0.bias", lambda: sf.shrink(model, lacks, X))


def test_permute_needs_values():
    meta = without(net())
    refused("permute", "0.weight", lambda: sf.shrinking.permute(meta, X, 2, 4))
    part = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    part[1].running_mean = part[1].running_mean.to("meta")
    refused("permute", "1.running_mean", lambda: sf.shrinking.permute(part, X, 2, 4))


@pytest.mark.parametrize("name", ["influence", "angular_distance"])
@pytest.mark.parametrize("found_on_meta", [False, True])
def test_scores_of_layers_need_values(name, found_on_meta):
    model = nn.Sequential(Turn(8, 8), Turn(8, 8)).eval()
    meta = without(model)
    layers = sf.shrinking.layers(meta if found_on_meta else model, X)
    score = getattr(sf.shrinking, name)
    refused(name, "0.weight", lambda: score(layers, meta, [X]))


def test_calibration_needs_values():
    meta = without(net())
    blocks = ["0.*", "2.*"]
    refused(
        "in_order",
        "0.weight",
        lambda: sf.calibration.in_order(meta, None, blocks, wanda, X, of="square"),
    )
    refused("inputs", "0.weight", lambda: sf.calibration.inputs(meta, None, X))
    state = sf.dense().init(sf.modules.params_of(meta))
    refused(
        "in_order",
        "0.weight",
        lambda: sf.calibration.in_order(net(), state, blocks, wanda, X, of="square"),
    )


def test_a_state_may_bring_the_values():
    model = net()
    meta = without(model)
    state = sf.dense().init(sf.modules.params_of(model))
    found = sf.calibration.inputs(meta, state, X)
    wanted = sf.calibration.inputs(model, None, X)
    assert sf.checkpoint.tree_equal(found, wanted)
    blocks = ["0.*", "2.*"]
    made = sf.calibration.in_order(meta, state, blocks, wanda, X, of="square")
    other = sf.calibration.in_order(model, None, blocks, wanda, X, of="square")
    assert sf.checkpoint.tree_equal(made.masks, other.masks)


def test_solvers_that_look_at_values_need_them():
    weight = torch.ones(2, 8, device="meta")
    hessian = torch.eye(8, device="meta")
    mask = weight > 0
    refused("swaps", "weight", lambda: sf.solve.swaps(weight, hessian, mask))
    refused("refit", "weight", lambda: sf.solve.refit(weight, hessian, mask))


def test_a_module_and_the_weights_put_into_it_need_values_both():
    model = net()
    meta = without(model)
    own = sf.modules.params_of(model)
    state = sf.static(0.5).init(own)
    for make in (sf.modules.bake, sf.modules.to_sparse):
        refused("bake", "0.weight", lambda make=make: make(meta, state))
    none = sf.modules.params_of(meta)
    refused("bake", "0.weight", lambda: sf.modules.bake(model, none))
    norm = nn.BatchNorm1d(2)
    buffers = {name: b.to("meta") for name, b in norm.named_buffers()}
    refused(
        "bake",
        "running_mean",
        lambda: sf.modules.bake(norm, sf.modules.params_of(norm), buffers=buffers),
    )
    assert next(sf.modules.bake(meta, none).parameters()).is_meta


def test_attach_needs_values():
    meta = without(net())
    optimizer = torch.optim.SGD(meta.parameters(), lr=0.1)
    refused("attach", "0.weight", lambda: sf.attach(sf.static(0.5), meta, optimizer))


def test_groups_and_layers_follow_from_shapes():
    meta = without(net())
    assert str(sf.shrinking.groups(meta, X)) == str(sf.shrinking.groups(net(), X))
    turns = nn.Sequential(Turn(8, 8), Turn(8, 8)).eval()
    found = sf.shrinking.layers(without(turns), X)
    assert str(found) == str(sf.shrinking.layers(turns, X))


def test_both_checks_have_one_text():
    meta = nn.Linear(2, 1, device="meta")
    refused("f", "weight", lambda: check_loaded("f", meta))
    refused("f", "weight", lambda: check_not_meta("f", meta.named_parameters()))
    masks = {"weight": torch.ones(1, 2, device="meta") > 0}
    layer = nn.Linear(2, 1)
    refused("f", "masks.weight", lambda: check_loaded("f", layer, masks=masks))


def test_a_lazy_layer_is_told_as_before():
    lazy = nn.Sequential(nn.LazyLinear(8)).eval()
    with pytest.raises(ValueError, match="lazy layers have not made"):
        sf.shrinking.permute(lazy, X, 2, 4)
