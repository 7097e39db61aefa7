"""Sparse linear layers: the outputs of the masked model, from what the masks keep
alone.
"""

import copy
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsefn as sf
from sparsefn.nn.modules.sparse_linear import SparseLinear

to_sparse = sf.modules.to_sparse


def close(got, expected):
    tolerance = 1e-5 if expected.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def single(
    out_features=32,
    in_features=64,
    sparsity=0.75,
    bias=True,
    dtype=torch.float32,
    pattern=None,
):
    layer = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    pattern = {} if pattern is None else {"pattern": pattern}
    return layer, sf.static(sparsity, where="weight", **pattern).init(
        sf.modules.params_of(layer)
    )


def blocks(size, sparsity=0.75, **kwargs):
    return single(sparsity=sparsity, pattern=sf.patterns.block((size, size)), **kwargs)


def layouts(module):
    """`{path: "csr", "bsr16", ..}` of the layers that were replaced."""
    return {
        path: layer.extra_repr().split(", ")[3]
        for path, layer in module.named_modules()
        if isinstance(layer, SparseLinear)
    }


LAYOUTS = [("csr", None), ("bsr", None), ("bsr", 4)]


@pytest.mark.parametrize("layout", ["csr", "bsr"])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("batch", [(), (2,), (0,), (2, 0)], ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_layers_without_inputs_or_outputs(layout, outputs, inputs, batch):
    layer, state = single(outputs, inputs)
    x = torch.randn(*batch, inputs)
    fast = to_sparse(layer, state, layout)
    assert isinstance(fast, SparseLinear)
    close(fast(x), sf.modules.call(layer, state, x))


@pytest.mark.parametrize(("layout", "blocksize"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (5,), (2, 3), (2, 0, 3), (2, 1, 2, 2)], ids=str
)
def test_outputs_are_those_of_the_masked_model(layout, blocksize, dtype, bias, shape):
    layer, state = blocks(8, bias=bias, dtype=dtype)
    x = torch.randn(*shape, 64, dtype=dtype)
    fast = to_sparse(layer, state, layout, blocksize=blocksize)
    assert isinstance(fast, SparseLinear)
    got = fast(x)
    assert (got.shape, got.dtype, got.is_contiguous()) == ((*shape, 32), dtype, True)
    close(got, sf.modules.call(layer, state, x))


@pytest.mark.parametrize(("layout", "blocksize"), LAYOUTS)
def test_inputs_may_be_strided(layout, blocksize):
    layer, state = single()
    fast = to_sparse(layer, state, layout, blocksize=blocksize)
    for x in (
        torch.randn(64, 5).t(),
        torch.randn(5, 128)[:, ::2],
        torch.randn(1, 64).expand(5, 64),
    ):
        close(fast(x), sf.modules.call(layer, state, x))


@pytest.mark.parametrize(("layout", "blocksize"), LAYOUTS)
@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_a_full_and_an_empty_mask(layout, blocksize, sparsity):
    layer, state = single(sparsity=sparsity)
    x = torch.randn(3, 64)
    fast = to_sparse(layer, state, layout, blocksize=blocksize)
    close(fast(x), sf.modules.call(layer, state, x))
    assert fast.values.numel() == (1 - sparsity) * 32 * 64


@pytest.mark.parametrize(("layout", "blocksize"), LAYOUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_count_on_the_mask_alone(layout, blocksize, value):
    layer, state = single(4, 8, sparsity=0.5)
    mask = state.masks["weight"]
    weight = state.params["weight"].clone()
    weight[~mask] = value
    x = torch.rand(3, 8) + 0.5
    off = state._replace(params={**state.params, "weight": weight})
    fast = to_sparse(layer, off, layout, blocksize=blocksize)
    assert fast(x).isfinite().all()
    row, column = mask.nonzero()[0].tolist()
    weight = state.params["weight"].clone()
    weight[row, column] = value
    on = state._replace(params={**state.params, "weight": weight})
    got = to_sparse(layer, on, layout, blocksize=blocksize)(x)
    close(got, sf.modules.call(layer, on, x))
    assert not got[:, row].isfinite().any()


def test_only_what_is_kept_is_stored():
    layer, state = blocks(8)
    assert repr(to_sparse(layer, state, "csr")).endswith(
        "bias=True, csr, 512 of 2048 stored)"
    )
    fast = to_sparse(layer, state, "bsr")
    assert repr(fast).endswith("bias=True, bsr8, 512 of 2048 stored)")
    assert fast.values.shape == (8, 8, 8)
    assert {buffer.layout for buffer in fast.buffers()} == {torch.strided}
    assert (fast.crow.dtype, fast.col.dtype) == (torch.int32, torch.int32)
    assert not list(fast.parameters())


def test_the_dense_weight_can_be_read():
    layer, state = blocks(4)
    for layout in ("csr", "bsr"):
        assert torch.equal(
            to_sparse(layer, state, layout).weight, sf.effective(state)["weight"]
        )


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_bsr_takes_the_largest_blocks_of_which_the_mask_is_made(size):
    layer, state = blocks(size, out_features=64, in_features=96, sparsity=0.5)
    assert layouts(to_sparse(layer, state, "bsr")) == {"": f"bsr{size}"}


def test_bsr_is_csr_where_no_block_fits():
    layer, state = single()
    assert layouts(to_sparse(layer, state, "bsr")) == {"": "csr"}
    odd, state = single(30, 64)
    # 4 divides 64 alone
    assert layouts(to_sparse(odd, state, "bsr", blocksize=4)) == {"": "csr"}
    assert layouts(to_sparse(odd, state, "bsr", blocksize=2)) == {"": "bsr2"}
    wide, state = single(64, 30)
    assert layouts(to_sparse(wide, state, "bsr", blocksize=4)) == {"": "csr"}


def test_a_block_with_one_kept_weight_is_stored_whole():
    layer = nn.Linear(8, 8, bias=False)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[1, 2] = mask[6, 6] = True
    state = sf.State(sf.modules.params_of(layer), {"weight": mask})
    fast = to_sparse(layer, state, "bsr", blocksize=4)
    assert fast.values.shape == (2, 4, 4)
    assert int(fast.values.count_nonzero()) == 2


AUTO = [
    (1024, 1024, 0.95, None, "csr"),
    (1024, 1024, 0.94, None, None),
    (2048, 1023, 0.99, None, None),
    (1024, 1024, 0.9, 8, "bsr8"),
    (1024, 1024, 0.9, 32, "bsr32"),
    (1024, 1024, 0.88, 32, None),
    (1024, 1024, 0.9, 4, None),
    (1024, 1024, 0.95, 4, "csr"),
    (2048, 1024, 0.95, None, "csr"),
    (1023, 2048, 0.99, None, None),
    (256, 4096, 0.99, 16, None),
    (512, 512, 0.99, 16, None),
]


@pytest.mark.parametrize(("rows", "columns", "sparsity", "size", "expected"), AUTO)
def test_auto_is_sparse_where_that_was_measured_to_be_faster(
    rows, columns, sparsity, size, expected
):
    pattern = None if size is None else sf.patterns.block((size, size))
    layer, state = single(rows, columns, sparsity, pattern=pattern)
    fast = to_sparse(layer, state)
    assert layouts(fast) == ({} if expected is None else {"": expected})
    x = torch.randn(2, columns)
    close(fast(x), sf.modules.call(layer, state, x))


def test_auto_is_dense_on_other_devices():
    with torch.device("meta"):
        layer = nn.Linear(1024, 1024)
        state = sf.State(
            sf.modules.params_of(layer),
            {
                "weight": torch.zeros(1024, 1024, dtype=torch.bool),
                "bias": torch.tensor(True),
            },
        )
    assert type(to_sparse(layer, state)) is nn.Linear


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.head = (
            nn.Embedding(8, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 8, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.mid(self.embed(x)).relu())


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_what_cannot_be_replaced_stays_dense_and_masked():
    hooked, pre, patched = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    hooked.register_forward_hook(lambda module, args, out: out + 1)
    pre.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    patched.forward = torch.tanh
    net = nn.Sequential(
        nn.Conv1d(2, 2, 3, padding=1), hooked, pre, patched, Own(8, 8), nn.Linear(8, 3)
    )
    state = sf.static(0.5, where="*weight").init(sf.modules.params_of(net))
    fast, x = to_sparse(net, state, "csr"), torch.randn(4, 2, 8)
    assert layouts(fast) == {"5": "csr"}
    close(fast(x), sf.modules.call(net, state, x))


def test_tied_weights_stay_dense():
    net, x = Tied(), torch.arange(8)
    state = sf.static(0.5, where=["embed.weight", "mid.weight"]).init(
        sf.modules.params_of(net)
    )
    fast = to_sparse(net, state, "csr")
    assert layouts(fast) == {"mid": "csr"}
    assert fast.head.weight is fast.embed.weight
    close(fast(x), sf.modules.call(net, state, x))
    twice = nn.Linear(4, 4)
    net = nn.Sequential(twice, nn.ReLU(), twice)
    state = sf.static(0.5, where="0.weight").init(sf.modules.params_of(net))
    assert layouts(to_sparse(net, state, "csr")) == {}


@pytest.mark.parametrize("grad", [True, False])
def test_attention_stays_dense_and_a_decoder_is_sparse(grad):
    net = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(
                8, 2, 16, dropout=0.0, batch_first=True
            ),
            "decoder": nn.TransformerDecoderLayer(
                8, 2, 16, dropout=0.0, batch_first=True
            ),
        }
    ).eval()
    state = sf.static(0.5, where="*weight").init(sf.modules.params_of(net))
    fast, baked, x = (
        to_sparse(net, state, "csr"),
        sf.modules.bake(net, state),
        torch.randn(2, 3, 8),
    )
    assert layouts(fast) == {"decoder.linear1": "csr", "decoder.linear2": "csr"}
    with torch.set_grad_enabled(grad):
        close(fast["encoder"](x), baked["encoder"](x))
        close(fast["decoder"](x, x), baked["decoder"](x, x))


def test_layers_without_a_mask_and_other_dtypes_stay_dense():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    state = sf.static(0.5, where="1.weight").init(sf.modules.params_of(net))
    assert layouts(to_sparse(net, state, "csr")) == {"1": "csr"}
    layer, state = single(dtype=torch.bfloat16)
    assert type(to_sparse(layer, state, "csr")) is nn.Linear


def test_dense_is_a_baked_copy_without_gradients():
    layer, state = single()
    dense, x = to_sparse(layer, state, "dense"), torch.randn(2, 64)
    assert type(dense) is nn.Linear
    assert torch.equal(dense(x), sf.modules.call(layer, state, x))
    assert not dense.weight.requires_grad


def test_the_module_and_the_state_are_not_changed():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))
    net[3].eval()
    state = sf.static(0.5, where="*weight").init(sf.modules.params_of(net))
    before, old = copy.deepcopy(net.state_dict()), copy.deepcopy(state)
    fast = to_sparse(net, state, "csr")
    for buffer in [*fast.buffers(), *fast.parameters()]:
        buffer.zero_()
    assert all(
        torch.equal(value, before[name]) for name, value in net.state_dict().items()
    )
    assert sf.checkpoint.tree_equal(state, old)
    assert all(param.requires_grad for param in net.parameters())
    assert type(net[0]) is nn.Linear
    assert [layer.training for layer in fast] == [True, True, True, False]


@pytest.mark.parametrize("layout", ["csr", "bsr"])
def test_copies_checkpoints_and_dtypes(layout):
    layer, state = blocks(8)
    net, state = nn.Sequential(layer), sf.State({"0": state.params}, {"0": state.masks})
    fast, x = to_sparse(net, state, layout), torch.randn(3, 64)
    expected = fast(x)
    assert torch.equal(copy.deepcopy(fast)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(x), expected)
    zeros = sf.State(
        {"0": {name: value * 2 for name, value in state.params["0"].items()}},
        state.masks,
    )
    other = to_sparse(net, zeros, layout)
    assert not torch.equal(other(x), expected)
    other.load_state_dict(fast.state_dict())
    assert torch.equal(other(x), expected)
    assert list(fast.state_dict()) == ["0.crow", "0.col", "0.values", "0.bias"]
    close(fast.to(torch.float64)(x.double()).float(), expected)


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["csr", "bsr"])
def test_inference_mode_and_compile(layout):
    layer, state = blocks(8)
    net, x = nn.Sequential(layer, nn.ReLU()), torch.randn(3, 64)
    fast = to_sparse(net, sf.State({"0": state.params}, {"0": state.masks}), layout)
    with torch.inference_mode():
        assert torch.equal(fast(x), fast(x.clone()))
        made = to_sparse(net, sf.State({"0": state.params}, {"0": state.masks}), layout)
    expected = fast(x)
    assert torch.equal(made(x), expected)
    assert torch.equal(torch.compile(fast, backend="eager")(x), expected)


def test_gradients_for_the_input_are_right_or_an_error():
    layer, state = blocks(8)
    x = torch.randn(3, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(
        sf.modules.call(layer, state, x).square().sum(), x
    )
    (got,) = torch.autograd.grad(to_sparse(layer, state, "csr")(x).square().sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(to_sparse(layer, state, "bsr")(x).sum(), x)


@pytest.mark.parametrize("layout", ["csr", "bsr"])
def test_transforms_are_an_error(layout):
    layer, state = blocks(8)
    fast, x = to_sparse(layer, state, layout), torch.randn(3, 64)
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.vmap(fast)(x)
    with pytest.raises(RuntimeError, match="do not have strides"):
        torch.func.grad(lambda x: fast(x).sum())(x)


MAKE = """
import pickle, torch, sparsefn as sf
layer = torch.nn.Linear(8, 8)
state = sf.static(0.5, where="weight").init(sf.modules.params_of(layer))
fast = sf.modules.to_sparse(layer, state, "csr")
assert fast(torch.ones(2, 8)).shape == (2, 8)
pickle.dump(fast, open("fast.pickle", "wb"))
"""
LOAD = """
import pickle, torch
assert pickle.load(open("fast.pickle", "rb"))(torch.ones(2, 8)).shape == (2, 8)
"""


@pytest.mark.deep
def test_a_fresh_process_hears_nothing_of_torchs_beta(tmp_path):
    # torch warns once in a process, so that only a fresh one shows it.
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(sf.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    for code in (MAKE, LOAD):
        command = [sys.executable, "-W", "error:Sparse:UserWarning", "-c", code]
        ran = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert (ran.returncode, ran.stderr) == (0, "")


def test_a_smaller_module_first():
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    params = sf.modules.params_of(net)
    rows = (
        sf.static(0.5, where="0.weight", pattern=sf.patterns.channel(0))
        .init(params)
        .masks
    )
    single = sf.static(0.5, where=["0.weight", "2.weight"]).init(params).masks
    state = sf.State(params, {name: rows[name] & single[name] for name in params})
    small = sf.shrink(net, state, torch.randn(3, 16))
    params = sf.modules.params_of(small)
    fast = to_sparse(small, sf.State(params, sf.masks.from_zeros(params)), "csr")
    assert fast[0].out_features == fast[2].in_features == 16
    x = torch.randn(3, 16)
    close(fast(x), sf.modules.call(net, state, x))


LINEAR, STATE = single(8, 8)
BAD = [
    (
        lambda: to_sparse(LINEAR, STATE, "coo"),
        ValueError,
        "'auto', 'csr', 'bsr', 'semi', 'dense', got 'coo'",
    ),
    (
        lambda: to_sparse(LINEAR, STATE, torch.sparse_csr),
        ValueError,
        "'dense', got torch.sparse_csr",
    ),
    (
        lambda: to_sparse(LINEAR, STATE, "bsr", blocksize=0),
        ValueError,
        "expected blocksize >= 1, got 0",
    ),
    (
        lambda: to_sparse(LINEAR, STATE, "bsr", blocksize=True),
        TypeError,
        "expected blocksize to be an int, got bool",
    ),
    (
        lambda: to_sparse(LINEAR, STATE, "bsr", blocksize=(4, 4)),
        TypeError,
        "to be an int, got tuple",
    ),
    (
        lambda: to_sparse(LINEAR, STATE, "csr", blocksize=4),
        ValueError,
        "expected blocksize with layout='bsr' alone, got it with layout='csr'",
    ),
    (
        lambda: to_sparse(LINEAR, STATE.params, "csr"),
        TypeError,
        "expected a State, got dict; without masks use sf.modules.bake",
    ),
    (
        lambda: to_sparse(nn.Linear(8, 9), STATE, "csr"),
        ValueError,
        "expected parameters of shape (9, 8) at 'weight'",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[row[2] for row in BAD])
def test_bad_input(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)
