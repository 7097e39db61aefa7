"""Models as graphs of ATen operations: sizes that may change, modes, and models that
are not touched.
Shuffles of channels become one permutation, of which any channel may go.

Parts of a module: globs, and what parts are called with.
"""

import copy
import types

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import sparsefn as sf
from sparsefn.nn.modules import as_call
from sparsefn.shrinking.analysis import without_shuffles
from sparsefn.shrinking.channels import CoupledChannels
from sparsefn.shrinking.trace import Parts, calls_of, matched, traced
from sparsefn.shrinking.values import opname
from tests.shrinking.compare import check, differs
from tests.shrinking.small import VECTOR, Of


class Plain(nn.Module):
    """Calls a function of itself."""

    def __init__(self, fn, **parts):
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.fn(self, *args, **kwargs)


def names(graph):
    return [
        str(node.target) for node in graph.graph.nodes if node.op == "call_function"
    ]


def convnet():
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 9, 2),
    ]
    return nn.Sequential(*layers).eval()


def llama(**more):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=20, num_hidden_layers=1, **sizes, **more
    )
    return transformers.LlamaForCausalLM(config).eval()


WORDS = {"input_ids": torch.arange(12).reshape(2, 6), "use_cache": False}


def test_the_program_gives_the_outputs_of_the_model_at_other_sizes():
    net, x = convnet(), torch.randn(2, 3, 5, 5)
    program = traced(net, x)
    assert program(x).equal(net(x))
    more = torch.randn(7, 3, 5, 5)
    assert program(more).equal(net(more))
    model = llama()
    words = {"input_ids": torch.arange(15).reshape(3, 5), "use_cache": False}
    program = traced(model, WORDS)
    torch.testing.assert_close(program(**words).logits, model(**words).logits)
    assert type(program(**words)) is type(model(**words))


def test_sizes_that_the_code_does_not_let_change_are_those_of_the_example():
    def forward(self, x):
        return self.layer(x) if x.shape[0] < 4 else -self.layer(x)

    program = traced(Plain(forward, layer=nn.Linear(3, 3)).eval(), torch.randn(2, 3))
    assert program(torch.randn(3, 3)).shape == (3, 3)
    with pytest.raises(AssertionError, match="Guard failed"):
        program(torch.randn(5, 3))


def test_static_sizes():
    net, x = convnet(), torch.randn(2, 3, 5, 5)
    program = traced(net, x, dynamic=False)
    assert program(x).equal(net(x)) and names(program) == names(traced(net, x))
    with pytest.raises(AssertionError, match="Guard failed"):
        program(torch.randn(7, 3, 5, 5))


def test_what_exports_only_with_static_sizes_is_traced():
    def forward(self, x):
        return x.reshape(int(str(x.shape[0])), -1) + int(repr(int(x.shape[1])))

    assert traced(Plain(forward).eval(), torch.ones(2, 3))(torch.ones(2, 3)).sum() == 24


def test_names_and_places():
    net = convnet()
    program = traced(net, torch.randn(2, 3, 5, 5))
    assert list(program.state_dict()) == list(net.state_dict())
    assert all(
        a is b for a, b in zip(program.parameters(), net.parameters(), strict=True)
    )
    (conv,) = program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.conv2d.default
    )
    assert [path for path, _ in conv.meta["nn_module_stack"].values()] == ["", "0"]
    tied = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=20)
    ).eval()
    program = traced(tied, WORDS)
    assert set(program.state_dict()) == set(tied.state_dict())
    assert program.lm_head.weight is program.transformer.wte.weight


@pytest.mark.parametrize(
    "example",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3),),
        (torch.ones(2, 3), 2.0),
        {"x": torch.ones(2, 3)},
    ],
)
def test_examples(example):
    model = Plain(
        lambda self, x, scale=1.0: scale * self.layer(x), layer=nn.Linear(3, 2)
    )
    args, kwargs = as_call(example)
    assert traced(model.eval(), example)(*args, **kwargs).equal(model(*args, **kwargs))


def test_inputs_that_the_model_takes_as_kwargs_are_checked():
    def forward(self, first, *, last, **more):
        return self.layer(first + last + more["parts"]["more"][0] + more["more"])

    model = Plain(forward, layer=nn.Linear(3, 2)).eval()
    model.forward = types.MethodType(forward, model)  # with its own signature
    x = torch.ones(2, 3)
    example = {"first": x, "last": 2 * x, "parts": {"more": [3 * x]}, "more": 4 * x}
    program = traced(model, example)
    assert program(**example).equal(model(**example))
    longer = {**example, "more": torch.ones(2, 4)}
    with pytest.raises(AssertionError, match="Guard failed: .*more.size"):
        program(**longer)


@pytest.mark.parametrize("example", [[torch.ones(1)], "x", 0, None])
def test_other_examples_are_refused(example):
    with pytest.raises(
        TypeError, match="a tuple of arguments or a dict of keyword arguments, got "
    ):
        traced(nn.ReLU(), example)


@pytest.mark.deep
def test_writes_into_views_are_made_free_of_them():
    def forward(self, x):
        y = self.layer(x)
        y[:, :1] = 0
        z = y.view(-1)
        z.mul_(2)
        return y

    model, x = Plain(forward, layer=nn.Linear(3, 2)).eval(), torch.randn(4, 3)
    program = traced(model, x)
    assert not [name for name in names(program) if name.split(".")[-2].endswith("_")]
    assert program(x).equal(model(x))
    # nobody else sees it
    assert "aten.relu_.default" in names(traced(convnet(), torch.randn(2, 3, 5, 5)))
    twice = Plain(
        lambda self, x: (y := F.dropout(self.layer(x), 0.5, False)) + y.relu_(),
        layer=nn.Linear(3, 2),
    ).eval()
    assert traced(twice, x)(x).equal(twice(x))
    assert "aten.relu_.default" not in names(traced(twice, x))


def test_train_mode_is_refused_where_it_computes_otherwise():
    x = torch.randn(4, 3)
    assert (
        traced(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Dropout(0.0)), x).meta[
            "train"
        ]
        is False
    )
    for part, words in [
        (nn.BatchNorm1d(2), "the BatchNorm1d at '1'"),
        (nn.Dropout(0.1), "the Dropout at '1'"),
    ]:
        net = nn.Sequential(nn.Linear(3, 2), part)
        with pytest.raises(
            ValueError,
            match=f"expected a model in eval mode, .*: in train mode {words} computes",
        ):
            traced(net, x)
        program = traced(net, x, train=True)
        assert program.meta["train"] and part.training
    assert "dropout" in str(names(traced(net, x, train=True)))
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval())
    assert (
        traced(net, x).meta["train"] is False and net.training and not net[1].training
    )


def test_nothing_of_the_model_changes():
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        self.seen.append(self.norm(self.layer(x)))
        return self.seen[-1] + torch.rand(())

    model = Plain(forward, layer=nn.Linear(3, 2), norm=nn.BatchNorm1d(2), seen=[])
    x, before, random = (
        torch.randn(4, 3),
        copy.deepcopy(model.state_dict()),
        torch.get_rng_state(),
    )
    traced(model, x, train=True)
    assert (
        not model.seen
        and not hasattr(model, "calls")
        and model.training
        and model.norm.training
    )
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert torch.get_rng_state().equal(random)


@pytest.mark.deep
def test_models_on_meta_need_no_memory():
    with torch.device("meta"):
        model = llama()
    program = traced(model, WORDS)
    assert {x.device.type for x in program.parameters()} == {"meta"}
    assert names(program) and program.meta["train"] is False


def test_what_cannot_be_traced():
    with pytest.raises(
        ValueError,
        match="expected an example that the Sequential can be called with: it fails",
    ):
        traced(convnet(), torch.randn(2, 4))
    data = Plain(
        lambda self, x: self.layer(x) if x.sum() > 0 else x, layer=nn.Linear(3, 3)
    ).eval()
    text = (
        r"torch.export cannot follow the Plain: \w+: Could not guard on .* \(in "
        r"<lambda> at .*test_trace.py:\d+\)\. "
        r"Name submodules that it can follow in only= of sf.shrinking.groups and of "
        r"sf.shrink, or take out of forward "
    )
    with pytest.raises(ValueError, match=text):
        traced(data, torch.ones(2, 3))


def test_what_is_no_tensor_among_arguments_and_outputs():
    words, model = {"input_ids": WORDS["input_ids"]}, llama()
    text = (
        "torch.export cannot follow the LlamaForCausalLM: .*. Among its {} is a "
        "DynamicCache, which is no tensor: give use_cache=False in the example, as "
        "{{'input_ids': ..., 'use_cache': False}}$"
    )
    for example in (words, words["input_ids"], {**words, "use_cache": True}):
        with pytest.raises(ValueError, match=text.format("outputs")):
            traced(model, example, dynamic=False)
    with pytest.raises(ValueError, match=text.format("arguments")):
        traced(
            model,
            {**words, "past_key_values": transformers.DynamicCache()},
            dynamic=False,
        )
    assert traced(model, {**words, "use_cache": False}, dynamic=False)
    boxed = Plain(lambda self, x: Box(self.layer(x)), layer=nn.Linear(3, 3)).eval()
    text = (
        "Among its outputs is a Box, which is no tensor: call it so that it takes and "
        "gives tensors alone, and tuples, "
    )
    with pytest.raises(ValueError, match=text):
        traced(boxed, torch.ones(2, 3))


class Box:
    """An output that is no tensor."""

    def __init__(self, x):
        self.x = x


def by_views(x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def by_reshapes(x):
    return x.unflatten(1, (2, -1)).permute(0, 2, 1, 3, 4).reshape(x.shape)


class Shuffled(nn.Module):
    """Two convolutions with a shuffle between."""

    def __init__(self, shuffle):
        super().__init__()
        self.shuffle, self.a, self.b = shuffle, nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        return self.b(self.shuffle(self.a(x)).relu())


WAYS = {
    "views": by_views,
    "reshapes": by_reshapes,
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shuffle_is_one_lookup_of_known_places(way, dynamic):
    model, x = Shuffled(WAYS[way]).eval().double(), torch.randn(2, 3, 4, 5).double()
    whole = traced(model, x, dynamic=dynamic)
    before = whole.code
    program = without_shuffles(whole)
    assert whole.code == before and program.a.weight is whole.a.weight
    names = [opname(node) for node in program.graph.nodes if node.op == "call_function"]
    assert [name for name in names if not name.startswith("sym_")] == [
        "conv2d",
        "index_select",
        "relu",
        "conv2d",
    ]
    assert program(x).equal(model(x))
    if dynamic:
        more = torch.randn(5, 3, 4, 5).double()
        assert program(more).equal(model(more))


@pytest.mark.parametrize("way", WAYS)
def test_any_channel_may_go(way):
    model, x = Shuffled(WAYS[way]).eval().double(), torch.randn(2, 3, 4, 5).double()
    tied, free = (
        sf.shrinking.groups(model, x, equal_parts=equal) for equal in (True, False)
    )
    assert sorted(group.size for group in tied) == [2, 3] and [
        group.size for group in free
    ] == [6]
    params = sf.modules.params_of(model)
    state = sf.State(params, free.masks({0: [0, 1, 4]}))
    small = sf.shrink(model, state, x, form="program")
    assert small.a.weight.shape == (3, 3, 1, 1) and small.b.weight.shape == (2, 3, 1, 1)
    masked = sf.modules.bake(model, state)
    assert not differs(masked, small, x) and not differs(
        masked, small, torch.randn(7, 3, 4, 5).double()
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.view(x.shape),
        lambda x: x.transpose(2, 3).reshape(x.shape),  # mixes two dimensions
        lambda x: x.transpose(2, 3).transpose(2, 3),
        lambda x: x.reshape(x.shape[0], -1).flip(1).view(x.shape),
    ],
)
def test_other_moves_stay_as_they_are(other):
    model, x = Shuffled(other).eval(), torch.randn(2, 3, 4, 5)
    program = without_shuffles(traced(model, x, dynamic=False))
    assert "index_select" not in program.code and program(x).equal(model(x))


def test_a_shuffle_whose_parts_are_read_as_well_is_still_right():
    def twice(x):
        parts = x.view(x.shape[0], 2, 3, *x.shape[2:]).transpose(1, 2)
        return parts.reshape(x.shape) + parts.sum((1, 2)).unsqueeze(1)

    model, x = Shuffled(twice).eval().double(), torch.randn(2, 3, 4, 5).double()
    assert without_shuffles(traced(model, x))(x).equal(model(x))


def test_a_shuffle_of_a_model_on_meta_is_analysed():
    with torch.device("meta"):
        model = Shuffled(by_views).eval()
        found = sf.shrinking.groups(model, torch.ones(2, 3, 4, 5), equal_parts=False)
    assert [group.size for group in found] == [6]


class Units(nn.Module):
    """As ShuffleNet V2: half of the channels go through a layer, and all are shuffled,
    unit after unit.
    """

    def __init__(self, width, depth):
        super().__init__()
        half = width // 2
        self.first, self.last = nn.Conv2d(3, width, 1), nn.Linear(width, 2)
        self.units = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(half, half, 1), nn.ReLU()) for _ in range(depth)]
        )

    def forward(self, x):
        x = self.first(x)
        for unit in self.units:
            kept, other = x.chunk(2, 1)
            x = by_views(torch.cat([kept, unit(other)], 1))
        return self.last(x.mean((2, 3)))


@pytest.mark.deep
def test_shuffles_one_after_another_share_few_channels(monkeypatch):
    def find(self, ids, real=CoupledChannels.find):
        assert ids.ndim < 2 or ids.shape[1] <= 64, f"a label of {ids.shape[1]} columns"
        return real(self, ids)

    monkeypatch.setattr(CoupledChannels, "find", find)
    x = torch.randn(2, 3, 4, 4).double()
    for width, depth, sizes in [
        (48, 4, [1, 1, 1, 3]),
        (16, 8, [1, 1, 1, 1]),
        (48, 12, [1, 1, 1, 1]),
    ]:
        model = Units(width, depth).eval().double()
        found = sf.shrinking.groups(model, x)
        assert sorted(group.size for group in found) == sizes
    check(Units(48, 4).eval().double(), (x,), forms=("class", "program"))


NET = nn.Sequential(
    nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
    nn.Sequential(nn.Linear(3, 3)),
    nn.Linear(3, 2),
).eval()


def test_globs_match_outermost_modules_in_order():
    assert matched(NET, ["1", "0"]) == ["0", "1"]
    assert matched(NET, ["0*"]) == ["0"]
    assert matched(NET, ["*.0"]) == ["0.0", "1.0"]


def test_wrong_globs():
    wanted = r"expected only to be globs of submodules such as 'layers.\*.mlp', got"
    with pytest.raises(
        TypeError, match=rf"{wanted} \['0', 3\]; which units go is what the masks say"
    ):
        matched(NET, ["0", 3])
    for bad in (sf.patterns.channel(0), 3):
        with pytest.raises(TypeError, match=wanted):
            matched(NET, bad)
    with pytest.raises(ValueError, match=rf"{wanted} none"):
        matched(NET, [])
    with pytest.raises(
        ValueError, match="only: no path matches 'x'; the paths are '0', '0.0'"
    ):
        matched(NET, ["0", "x"])


def test_parts_that_share_a_parameter():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].bias = net[0].bias
    with pytest.raises(
        ValueError,
        match="expected '0' to have its parameters alone, but it shares '1.bias'",
    ):
        matched(net, ["0"])


def test_what_parts_are_called_with_the_first_time():
    net = Of(
        lambda net, x: net.f(net.f(x), 2) + net.f(y=1, x=x),
        f=Of(lambda net, x, y=0: x + y),
    )
    net.f.forward = lambda x, y=0: x + y
    state = torch.get_rng_state()
    (x,) = calls_of(net, ["f"], VECTOR)["f"]
    assert torch.equal(x, VECTOR) and torch.equal(state, torch.get_rng_state())
    assert not net.f._forward_pre_hooks


def test_on_an_example_that_does_not_run_and_on_meta():
    text = (
        r"expected an example that the Sequential can be called with: it fails with "
        r"RuntimeError: mat1 and mat2 shapes"
    )
    with pytest.raises(ValueError, match=text):
        calls_of(NET, ["2"], torch.ones(1, 5))
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to("meta")
    (x,) = calls_of(net, ["1"], VECTOR)["1"]
    assert x.is_meta and x.shape == (len(VECTOR), 5)


def test_parts_run_their_own_calls_under_their_own_names():
    x, y = torch.randn(2, 3), torch.randn(4, 3)
    parts = Parts(NET, ["0", "1.0"])
    first, second = parts(x, {"input": y})
    assert torch.equal(first, NET[0](x)) and torch.equal(second, NET[1][0](y))
    assert dict(parts.named_parameters()).keys() == dict(NET.named_parameters()).keys()
    assert parts._get_name() == "submodules '0', '1.0'"


class Named(nn.Module):
    def forward(self, x, *, scale=1.0, **rest):
        return x * scale + rest.get("shift", 0)


def test_arguments_by_name():
    net = Of(lambda net, x: net.f(x, scale=2.0, shift=1), f=Named())
    call = calls_of(net, ["f"], VECTOR)["f"]
    assert torch.equal(call.pop("x"), VECTOR) and call == {"scale": 2.0, "shift": 1}


class Listed(nn.Module):
    def forward(self, *xs, scale=1.0):
        return xs[0] * scale


def test_parts_that_are_not_called_or_have_no_names():
    with pytest.raises(
        ValueError,
        match="expected the module to call 'g' on the example, but it does not",
    ):
        calls_of(Of(lambda net, x: x, g=nn.ReLU()), ["g"], VECTOR)
    net = Of(lambda net, x: net.f(x, scale=2.0), f=Listed())
    with pytest.raises(
        ValueError, match="expected a forward of 'f' all of whose arguments have names"
    ):
        calls_of(net, ["f"], VECTOR)


def test_lazy_layers_have_to_run_first():
    net = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4)).eval()
    text = (
        "^expected parameters of the Sequential that have shapes, but lazy layers have "
        "not made '1.weight', '1.bias' yet: run the module on a batch first$"
    )
    with pytest.raises(ValueError, match=text):
        traced(net, torch.ones(1, 2))
    net(torch.ones(1, 2))
    assert traced(net, torch.ones(1, 2))(torch.ones(1, 2)).shape == (1, 4)


def test_calls_of_parts_leave_the_model_as_it_was():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.utils.spectral_norm(nn.Linear(2, 3)))
    net(torch.randn(4, 2))
    before = copy.deepcopy(net.state_dict())
    assert calls_of(net, ["1"], torch.randn(4, 2))["1"][0].shape == (4, 2)
    after = net.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert len(net[1]._forward_pre_hooks) == 1


def test_an_example_of_a_wrong_shape_is_told_in_one_line(capfd):
    with pytest.raises(
        ValueError, match="it fails with RuntimeError: mat1 and mat2 sh"
    ):
        traced(nn.Linear(4, 4), torch.ones(2, 3))
    assert "Traceback" not in capfd.readouterr().err
