"""Modules that torch's own tools pruned; random ones of `torch.nn.utils.prune` are in
test_live_torch_prune.py.
"""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

import sparsefn as sf
from sparsefn.nn.checkpoint import tree_equal
from sparsefn.nn.modules.torch_prune import from_pruned

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations of torch's own
    from torch.ao.pruning import FakeSparsity, WeightNormSparsifier
    from torch.ao.pruning._experimental.pruner.saliency_pruner import SaliencyPruner


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


# torch.nn.utils.prune.


def test_from_pruned():
    module = mlp()
    original = sf.modules.params_of(module)
    prune.l1_unstructured(module[0], "weight", amount=5)
    prune.random_structured(module[2], "weight", amount=1, dim=0)
    prune.l1_unstructured(module[2], "bias", amount=1)
    before = copy.deepcopy(module.state_dict())
    params, masks = from_pruned(module)
    assert sorted(params) == sorted(masks) == sorted(original)
    assert all(torch.equal(params[path], original[path]) for path in original)
    assert masks["0.bias"].shape == ()
    assert masks["0.bias"].dtype == torch.bool
    for path, mask in (
        ("0.weight", module[0].weight_mask),
        ("2.weight", module[2].weight_mask),
    ):
        assert torch.equal(masks[path], mask.bool())
    assert masks["2.bias"].sum() == 1
    assert tree_equal(dict(module.state_dict()), dict(before))
    x = torch.ones(1, 3)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert torch.equal(sf.modules.call(plain, sf.State(params, masks), x), module(x))


def test_from_pruned_of_a_plain_module_and_of_a_mask_that_scales():
    module = mlp()
    params, masks = from_pruned(module)
    assert tree_equal(params, sf.modules.params_of(module))
    assert all(mask.shape == () and bool(mask) for mask in masks.values())
    odd = nn.Module()
    # named like a pruned one, but without a mask
    odd.x_orig = nn.Parameter(torch.ones(2))
    assert list(from_pruned(odd)[0]) == ["x_orig"]
    prune.custom_from_mask(module[0], "weight", torch.full((4, 3), 2.0))
    with pytest.raises(
        ValueError, match=r"expected a mask of zeros and ones at '0.weight_mask'"
    ):
        from_pruned(module)


def test_from_pruned_of_a_checkpoint():
    pruned = mlp()
    prune.l1_unstructured(pruned[0], "weight", amount=5)
    plain = mlp()
    saved = {**pruned.state_dict(), "unknown": torch.ones(1)}
    params, masks = from_pruned(plain, saved)
    assert tree_equal((params, masks), from_pruned(pruned))
    assert sorted(params) == sorted(sf.modules.params_of(plain))
    saved["0.weight_orig"].zero_()
    assert params["0.weight"].abs().sum() > 0
    # A plain checkpoint for a pruned module: nothing in it is pruned.
    params, masks = from_pruned(pruned, plain.state_dict())
    assert tree_equal(params, sf.modules.params_of(plain))
    assert all(mask.shape == () for mask in masks.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"0.weight_mask": None},
            "expected a checkpoint with '0.weight', or '0.weight_orig' and "
            "'0.weight_mask'",
        ),
        (
            {"0.bias": None},
            "expected a checkpoint with '0.bias', or '0.bias_orig' and '0.bias_mask'",
        ),
        (
            {"0.bias": torch.ones(3)},
            r"expected a tensor of shape (4,) at '0.bias', got (3,)",
        ),
        (
            {"0.weight_mask": torch.ones(2)},
            r"expected a mask of shape (4, 3) at '0.weight_mask', got (2,)",
        ),
        (
            {"0.weight_mask": torch.full((4, 3), 0.5)},
            "expected a mask of zeros and ones at '0.weight_mask'",
        ),
    ],
    ids=["mask", "param", "shape", "mask_shape", "values"],
)
def test_from_pruned_of_a_bad_checkpoint(change, message):
    module = mlp()
    prune.l1_unstructured(module[0], "weight", amount=5)
    saved = {
        name: change.get(name, tensor) for name, tensor in module.state_dict().items()
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        from_pruned(
            module,
            {name: tensor for name, tensor in saved.items() if tensor is not None},
        )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {3: torch.ones(2)},
            TypeError,
            "expected a checkpoint whose names are strings, got 3, a int",
        ),
        (
            {"0.bias": 1.0},
            TypeError,
            "expected the checkpoint to hold tensors, got float at '0.bias'",
        ),
        (
            {"0.bias": torch.ones(4).to_sparse()},
            TypeError,
            "got a torch.sparse_coo one at '0.bias'",
        ),
        (
            {"0.bias": torch.ones(4).long()},
            TypeError,
            "floating-point weights at '0.bias', got torch.int64",
        ),
        (
            {"0.weight_mask": torch.ones(4, 3, device="meta")},
            ValueError,
            "of the meta device at '0.weight_mask'",
        ),
        # An expanded tensor that would take 256 GiB is refused by its shape, before it
        # is copied.
        (
            {"0.bias": torch.ones(1).expand(2**36)},
            ValueError,
            "expected a tensor of shape (4,) at '0.bias'",
        ),
    ],
    ids=["name", "number", "sparse", "ints", "meta", "expanded"],
)
def test_from_pruned_of_a_hostile_checkpoint(change, kind, message):
    module = mlp()
    prune.l1_unstructured(module[0], "weight", amount=5)
    with pytest.raises(kind, match=re.escape(message)):
        from_pruned(module, {**module.state_dict(), **change})


# torch.ao.pruning.


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 2),
    )


def sparsified(module, *names):
    """A copy after `prepare` and `step`, or what these do for a convolution, which
    theirs cannot score.
    """
    module = copy.deepcopy(module)
    if isinstance(module[0], nn.Conv2d):
        register_parametrization(
            module[0], "weight", FakeSparsity(module[0].weight.detach() > 0)
        )
    sparsifier = WeightNormSparsifier(
        sparsity_level=0.5, sparse_block_shape=(1, 1), zeros_per_block=1
    )
    sparsifier.prepare(module, [{"tensor_fqn": name} for name in names])
    sparsifier.step()
    return module


def checkpoint_of(module):
    return {**module.state_dict(), **dict(module.named_buffers())}


def test_a_module_of_torch_ao_and_its_checkpoint():
    plain = convnet()
    pruned = sparsified(plain, "5.weight")
    x, before = torch.randn(5, 1, 4, 4), copy.deepcopy(checkpoint_of(pruned))
    params, masks = from_pruned(pruned)
    assert sorted(params) == sorted(masks) == sorted(sf.modules.params_of(plain))
    assert all(
        torch.equal(params[name], own)
        for name, own in sf.modules.params_of(plain).items()
    )
    assert [name for name, mask in masks.items() if mask.ndim] == [
        "0.weight",
        "5.weight",
    ]
    assert torch.equal(masks["0.weight"], pruned[0].parametrizations.weight[0].mask)
    assert masks["5.weight"].dtype == torch.bool and int(masks["5.weight"].sum()) == 6
    state = sf.from_masks(masks).init(params)
    assert torch.equal(sf.modules.call(plain, state, x), pruned(x))
    # A checkpoint, in the plain module and in the pruned one.
    for module in (convnet(), sparsified(convnet(), "5.weight")):
        assert tree_equal(from_pruned(module, checkpoint_of(pruned)), (params, masks))
    other = convnet()
    dense = from_pruned(pruned, other.state_dict())
    assert tree_equal(dense[0], sf.modules.params_of(other)) and not any(
        mask.ndim for mask in dense[1].values()
    )
    for path, leaf in params.items():
        leaf.zero_()
        masks[path].logical_not_()
    assert tree_equal(checkpoint_of(pruned), before)


def test_a_bare_layer_of_torch_ao():
    net = sparsified(nn.Sequential(nn.Linear(4, 2, bias=False)), "0.weight")
    params, masks = from_pruned(net[0])
    assert list(params) == list(masks) == ["weight"] and int(masks["weight"].sum()) == 4


def test_a_checkpoint_of_torch_ao_without_its_masks():
    pruned = sparsified(mlp(), "0.weight")
    text = (
        "expected a checkpoint with the mask '0.parametrizations.weight.0.mask' "
        "beside '0.parametrizations.weight.original'; torch.ao leaves masks out of "
        "state_dict: add them as {**model.state_dict(), **dict(model.named_buffers())}"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        from_pruned(mlp(), pruned.state_dict())


def test_another_parametrization_of_a_pruned_weight():
    module = nn.Sequential(weight_norm(nn.Linear(4, 2)))
    register_parametrization(module[0], "weight", FakeSparsity(torch.ones(2, 4)))
    text = (
        "expected FakeSparsity to be the one parametrization of '0.weight', got "
        "_WeightNorm, FakeSparsity; take the others off with "
        "torch.nn.utils.parametrize.remove_parametrizations before sparsifier.prepare"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        from_pruned(module)
    # Of a weight that is not pruned it is a parametrization as any.
    module = sparsified(
        nn.Sequential(weight_norm(nn.Linear(4, 2)), nn.Linear(2, 2)), "1.weight"
    )
    params, masks = from_pruned(module)
    assert {name for name, mask in masks.items() if mask.ndim} == {"1.weight"}
    assert "0.parametrizations.weight.original0" in params


def test_rows_that_torch_ao_prunes():
    module = mlp()
    pruner = SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(module, [{"tensor_fqn": "0.weight"}])
    text = (
        "expected a mask for each weight at '0.weight', got FakeStructuredSparsity, "
        "which prunes rows; take the model that pruner.prune() gives"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        from_pruned(module)
