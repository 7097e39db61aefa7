"""Semi-structured weights: the checks, which need no GPU, and the wiring, with torch's
conversion run on the CPU.
"""

import copy
import re
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
)

import sparsefn as sf
from sparsefn.nn.modules import sparse_linear
from sparsefn.nn.modules.sparse_linear import without_sparse_cores

Cutlass = torch.sparse.SparseSemiStructuredTensorCUTLASS
CUDA = torch.device("cuda", 0)


def made(*sizes, dtype=torch.float16, pattern=sf.patterns.nm(2, 4)):
    layers = [nn.Linear(a, b, dtype=dtype) for a, b in pairwise(sizes)]
    net = nn.Sequential(*layers)
    return net, sf.static(None, pattern=pattern).init(sf.modules.params_of(net))


def semi(net, state):
    return sf.modules.to_sparse(net, state, "semi")


@pytest.fixture
def converted(monkeypatch):
    """A device that passes, and torch's own conversion and class, without its check
    that the tensor is on a GPU.
    """
    seen = []

    def convert(weight):
        seen.append(weight.clone())
        assert weight.is_contiguous() and not weight.requires_grad
        packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
        return Cutlass(weight.shape, packed, meta, None, None, None)

    monkeypatch.setattr(sparse_linear, "without_sparse_cores", lambda device: "")
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", convert)
    return seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_weights_are_those_of_the_masked_model(converted, dtype):
    net, state = made(64, 32, 32, dtype=dtype)
    state = sf.State(state.params, {**state.masks, "1.weight": torch.tensor(True)})
    fast = semi(net, state)
    assert (type(fast[0]), type(fast[0].weight)) == (nn.Linear, Cutlass)
    assert type(fast[1].weight) is nn.Parameter  # its mask is 0-d
    effective = sf.effective(state)
    assert len(converted) == 1 and torch.equal(converted[0], effective["0.weight"])
    assert torch.equal(fast[0].weight.to_dense(), effective["0.weight"])
    assert torch.equal(fast[0].bias, state.params["0.bias"])
    assert not any(param.requires_grad for param in fast.parameters())


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="the stand-in for torch's product is written for torch 2.13",
)
def test_forward_multiplies_by_the_sparse_weight(converted, monkeypatch):
    def product(self, dense, *, bias, should_transpose_dense):
        assert should_transpose_dense
        return torch.addmm(bias, dense, self.to_dense().t())

    monkeypatch.setattr(Cutlass, "_mm", product)
    net, state = made(64, 32, 32, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    assert torch.equal(semi(net, state)(x), sf.modules.call(net, state, x))


def test_the_module_and_the_state_are_not_changed(converted):
    net, state = made(64, 32)
    before, old = copy.deepcopy(net.state_dict()), copy.deepcopy(state)
    semi(net, state)
    assert type(net[0].weight) is nn.Parameter and net[0].weight.requires_grad
    assert all(
        torch.equal(value, before[name]) for name, value in net.state_dict().items()
    )
    assert sf.checkpoint.tree_equal(state, old)


def test_torchs_warning_of_a_prototype_is_not_passed_on(converted, monkeypatch):
    monkeypatch.setattr(Cutlass, "_PROTOTYPE_WARNING_SHOWN", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        semi(*made(64, 32))


def test_what_cannot_be_replaced_stays_dense(converted):
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(32, 32)
    hooked.register_forward_hook(lambda module, args, out: out)
    twice = nn.Linear(32, 32)
    net = nn.Sequential(hooked, Own(32, 32), twice, twice, nn.Linear(64, 32)).half()
    state = sf.static(None, pattern=sf.patterns.nm(2, 4)).init(
        sf.modules.params_of(net)
    )
    kinds = [type(layer.weight) for layer in semi(net, state)]
    assert kinds == [*[nn.Parameter] * 4, Cutlass]


def one(out_features=16, in_features=16, dtype=torch.float16, mask=None):
    layer = nn.Linear(in_features, out_features, dtype=dtype)
    mask = (
        sf.masks.topk_mask(
            torch.rand(out_features, in_features), None, pattern=sf.patterns.nm(2, 4)
        )
        if mask is None
        else mask
    )
    state = sf.State(
        sf.modules.params_of(layer), {"weight": mask, "bias": torch.tensor(True)}
    )
    return nn.Sequential(layer), sf.State({"0": state.params}, {"0": state.masks})


ALONG_ROWS = sf.patterns.nm(2, 4, axis=0)
BAD = [
    (
        one(dtype=torch.float32),
        "torch.float16 or torch.bfloat16 weights at '0.weight', got torch.float32",
    ),
    (
        one(in_features=24),
        "rows and columns in multiples of 16 at '0.weight', got shape (16, 24)",
    ),
    (
        one(out_features=24),
        "rows and columns in multiples of 16 at '0.weight', got shape (24, 16)",
    ),
    (
        one(mask=torch.arange(256).reshape(16, 16) % 4 > 0),
        "a mask that keeps at most 2 of every 4 weights along axis 1 at '0.weight', "
        "got 3",
    ),
    (
        one(
            mask=sf.masks.topk_mask(
                torch.arange(256.0).reshape(16, 16), None, pattern=ALONG_ROWS
            )
        ),
        "a mask that keeps at most 2 of every 4 weights along axis 1 at '0.weight', "
        "got 4",
    ),
    (one(), "a CUDA device of compute capability 8.0 or higher at '0.weight', got cpu"),
]


@pytest.mark.parametrize(("given", "text"), BAD, ids=[row[1] for row in BAD])
def test_a_weight_that_does_not_fit_is_refused_by_its_path(given, text):
    with pytest.raises(ValueError, match=re.escape("layout='semi': expected " + text)):
        semi(*given)


def test_all_weights_that_do_not_fit_are_named():
    (wide,), state = one(32, 64, dtype=torch.float32)
    layers, masks = (
        {"a": wide, "b": wide},
        dict.fromkeys("ab", state.masks["0"]["weight"]),
    )
    told = (
        "float16 or torch.bfloat16 weights at 'a', got torch.float32; expected "
        "torch.float16 or .* at 'b', got"
    )
    with pytest.raises(ValueError, match=told):
        sparse_linear.make_semi_structured(layers, masks)


def test_a_weight_on_the_meta_device_is_refused():
    (layer,), state = one()
    with pytest.raises(ValueError, match="8.0 or higher at '0.weight', got meta"):
        sparse_linear.make_semi_structured(
            {"0.weight": layer.to("meta")}, {"0.weight": state.masks["0"]["weight"]}
        )


def test_a_layer_that_fits_is_left_alone_where_another_does_not(converted):
    (good,), state = one(32, 64)
    (bad,), other = one(32, 64, dtype=torch.float32)
    weights = [good.weight, bad.weight]
    masks = {"good": state.masks["0"]["weight"], "bad": other.masks["0"]["weight"]}
    with pytest.raises(ValueError, match="'bad'"):
        sparse_linear.make_semi_structured({"good": good, "bad": bad}, masks)
    assert [good.weight, bad.weight] == weights and not converted


def test_an_error_of_torch_names_the_path(monkeypatch):
    def refuse(weight):
        raise RuntimeError("cuSPARSELt not supported on your machine.")

    monkeypatch.setattr(sparse_linear, "without_sparse_cores", lambda device: "")
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", refuse)
    text = (
        "layout='semi': torch makes no semi-structured tensor of '0.weight': "
        "cuSPARSELt not supported on your machine."
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        semi(*one())


def test_an_older_gpu_is_told_from_a_newer_one(monkeypatch):
    answers = {(7, 5): "cuda:0 of capability 7.5", (8, 0): "", (9, 0): "", (12, 0): ""}
    for capability, expected in answers.items():
        monkeypatch.setattr(
            torch.cuda,
            "get_device_capability",
            lambda device, capability=capability: capability,
        )
        assert without_sparse_cores(CUDA) == expected
    assert [
        without_sparse_cores(torch.device(kind)) for kind in ("cpu", "meta", "mps")
    ] == ["cpu", "meta", "mps"]


def test_sides_and_dtypes_are_those_of_torchs_table():
    table = torch.sparse.SparseSemiStructuredTensorCUSPARSELT._DTYPE_SHAPE_CONSTRAINTS
    for dtype in sparse_linear._DTYPES:
        assert table[dtype][:2] == (sparse_linear._SIDE, sparse_linear._SIDE)


def test_torch_itself_refuses_the_cpu():
    with pytest.raises(RuntimeError, match="Only CUDA tensors are currently supported"):
        torch.sparse.to_sparse_semi_structured(torch.zeros(16, 16, dtype=torch.float16))


def test_transposed_weights_are_laid_out_as_torch_wants_them(converted):
    net, state = made(64, 32)
    params, masks = (
        {**x, "0.weight": x["0.weight"].t().contiguous().t()}
        for x in (state.params, state.masks)
    )
    semi(net, sf.State(params, masks))
    assert torch.equal(converted[0], sf.effective(state)["0.weight"])
