"""Every smaller model of the zoo of the tests runs as a program of `torch.export`, in
ONNX Runtime and in OpenVINO, with the same outputs.
"""

import contextlib
import io
import logging
import warnings

import onnxruntime
import openvino
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import sparsefn as sf
from tests.shrinking import compare, zoo

NEAR = 1e-4  # of the largest output, in float32: other orders of sums
# What the exporter to ONNX lacks, for whole models as for smaller ones: the operations.
NO_ONNX = {
    "cosine classifier": "_cdist_forward",
    "parametrized weights": "_linalg_solve_ex",
    "prelu by channel": "rrelu_with_noise_functional",
    "operations of others": "sparsefn_zoo.shifted_tanh",
}
# Where it makes another model, of the whole one, too: by `index_add`.
WRONG_IN_ONNX = ("experts by index add",)
# What OpenVINO lacks of files that ONNX Runtime reads: the text of its error.
NO_OPENVINO = {
    "bag of words": "Unsupported input type dynamic",
    "fourier mixing": "broadcast_merge_into",
}
# Where OpenVINO gives others: channels that are gathered between two convolutions.
WRONG_IN_OPENVINO = ("rolled and flipped",)
# Of each idea of residual layers one.
WITH_LAYERS = (
    *("resnet basic", "mobilenet v2", "shufflenet v1", "hf convnext", "mixer", "vit"),
    *("gpt2", "llama", "gemma2", "bert", "whisper"),
)


def in_single(model, example):
    """The model and its example in float32."""
    return model.float(), pytree.tree_map(
        lambda x: x.float() if compare.plain(x) and x.is_floating_point() else x,
        example,
    )


def smaller(model, example, seed=0):
    """What `shrink` makes where units drawn at random go."""
    found = compare.groups(model, example, counted=True)
    gone = compare.random_units(found, seed)
    state = sf.State(*compare.masked_weights(model, found, gone))
    made = sf.shrinking.smaller(model, state, example, groups=found)
    return made.module


def called(model, example):
    """The tensors that it gives."""
    args, kwargs = (example, {}) if isinstance(example, tuple) else ((), example)
    with torch.no_grad():
        out = model(*args, **kwargs)
    return [x for x in pytree.tree_leaves(out) if compare.plain(x)]


def exported(model, example):
    """The program of `torch.export`."""
    args, kwargs = (example, {}) if isinstance(example, tuple) else ((), example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the models' code
        return torch.export.export(model, args, kwargs, strict=False)


class InOnnx:
    """A program in ONNX Runtime, on one thread."""

    def __init__(self, program, example, file):
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        quiet = contextlib.redirect_stdout(io.StringIO())
        with warnings.catch_warnings(), quiet:
            warnings.simplefilter("ignore")  # the exporter's, about itself
            torch.onnx.export(
                program, (), file, dynamo=True, external_data=False, verbose=False
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(file, options)
        names = [one.name for one in self.session.get_inputs()]
        self.feed = dict(zip(names, arrays_of(example), strict=True))

    def __call__(self):
        return [torch.as_tensor(x) for x in self.session.run(None, self.feed)]


def arrays_of(example):
    """The tensors that a program is called with, as arrays."""
    return [x.numpy() for x in pytree.tree_leaves(example) if compare.plain(x)]


def called_in_openvino(file, example):
    """What OpenVINO computes with a file of ONNX, on one thread in float32."""
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(file, "CPU", options)
    return [torch.as_tensor(x) for x in model(arrays_of(example)).to_tuple()]


def check_near(got, wanted, what):
    assert [x.shape for x in got] == [x.shape for x in wanted], what
    for x, y in zip(got, wanted, strict=True):
        atol = NEAR * max(1.0, float(y.double().abs().max()))
        torch.testing.assert_close(
            x, y, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}"
        )


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_smaller_model_gives_the_same_in_all(name, tmp_path):
    model, example = in_single(*zoo.MODELS[name]())
    small = smaller(model, example)
    wanted = called(small, example)
    program = exported(small, example)
    got = called(program.module(), example)
    check_near(got, wanted, "torch.export")
    file = tmp_path / "small.onnx"
    if name in NO_ONNX:
        with pytest.raises(Exception, match=NO_ONNX[name]):
            InOnnx(program, example, file)
        return
    got = InOnnx(program, example, file)()
    if name in WRONG_IN_ONNX:
        with pytest.raises(AssertionError, match="ONNX: Tensor-likes are not close"):
            check_near(got, wanted, "ONNX")
        program = exported(model, example)
        wanted = called(model, example)
        got = InOnnx(program, example, file)()
        with pytest.raises(AssertionError, match="ONNX: Tensor-likes are not close"):
            check_near(got, wanted, "ONNX")
        return
    check_near(got, wanted, "ONNX")
    if name in NO_OPENVINO:
        with pytest.raises(RuntimeError, match=NO_OPENVINO[name]):
            called_in_openvino(file, example)
        return
    got = called_in_openvino(file, example)
    if name in WRONG_IN_OPENVINO:
        with pytest.raises(AssertionError, match="OpenVINO: Tensor-likes are not"):
            check_near(got, wanted, "OpenVINO")
        return
    check_near(got, wanted, "OpenVINO")


@pytest.mark.parametrize("name", WITH_LAYERS)
def test_a_model_without_a_layer_gives_the_same_in_all(name, tmp_path):
    model, example = in_single(*zoo.MODELS[name]())
    layers = sf.shrinking.layers(model, example)
    state = sf.State(sf.modules.params_of(model), layers.masks({0}))
    small = sf.shrinking.smaller(model, state, example, groups=layers).module
    wanted = called(small, example)
    program = exported(small, example)
    check_near(called(program.module(), example), wanted, "torch.export")
    file = tmp_path / "small.onnx"
    check_near(InOnnx(program, example, file)(), wanted, "ONNX")
    check_near(called_in_openvino(file, example), wanted, "OpenVINO")


class Gathered(nn.Module):
    """Channels that are gathered between two convolutions."""

    def __init__(self, order):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3)
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x):
        return self.last(self.first(x).relu().index_select(1, self.order))


@pytest.mark.parametrize("order", [[1, 0, 2], [1, 2, 0]])
def test_openvino_gathers_channels_in_the_inverse_order(order, tmp_path):
    torch.manual_seed(0)
    inverse = [order.index(i) for i in range(3)]
    model, other = Gathered(order), Gathered(inverse)
    other.load_state_dict(model.state_dict() | {"order": torch.tensor(inverse)})
    example = (torch.randn(2, 2, 8, 8),)
    file = tmp_path / "gathered.onnx"
    got = InOnnx(exported(model, example), example, file)()
    check_near(got, called(model, example), "ONNX")
    got = called_in_openvino(file, example)
    check_near(got, called(other, example), "OpenVINO")


def test_a_difference_would_be_seen(tmp_path):
    model, example = in_single(*zoo.MODELS["vgg"]())
    small = smaller(model, example)
    wanted = [x * (1 + 1e-3) for x in called(small, example)]
    program = exported(small, example)
    with pytest.raises(AssertionError, match="ONNX: Tensor-likes are not close"):
        got = InOnnx(program, example, tmp_path / "small.onnx")()
        check_near(got, wanted, "ONNX")
