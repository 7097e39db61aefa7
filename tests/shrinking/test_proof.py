"""A long call says on stderr what it does, and a short one nothing.
Two models are compared in float64 on an example and on other inputs, and nothing is
left behind."""

import copy
import dataclasses
import math
import re

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import sparsefn as sf
from sparsefn.shrinking import proof as proofs
from sparsefn.shrinking.proof import Progress, Proof
from tests.shrinking.compare import differs
from tests.shrinking.cuts import both


def test_a_line_every_ten_seconds(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(proofs.time, "monotonic", lambda: clock[0])
    tell = Progress("shrink")
    for seconds, doing in [(9.0, "a"), (2.0, "b"), (8.0, "c"), (30.0, "d")]:
        clock[0] += seconds
        tell(doing)
    assert capsys.readouterr().err == "shrink: 11 s so far, b\nshrink: 49 s so far, d\n"


def test_shrink_tells(capsys, monkeypatch):
    net, x = (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(),
        torch.ones(2, 3),
    )
    groups = sf.shrinking.groups(net, x)
    state = sf.State(sf.modules.params_of(net), groups.masks({0: [1]}))
    sf.shrink(net, state, x)
    assert not capsys.readouterr().err
    monkeypatch.setattr(proofs, "EVERY", 0.0)
    doing = {}
    for form in ("class", "program"):
        sf.shrink(net, state, x, form=form)
        lines = capsys.readouterr().err.splitlines()
        assert all(re.match(r"shrink: \d+ s so far, ", line) for line in lines)
        doing[form] = [line.partition(", ")[2] for line in lines]
    runs = [
        "runs a smaller model",
        "runs the masked model in float64",
        "runs the masked model",
    ]
    assert doing["class"] == ["traces the model", *runs]
    assert doing["program"] == [
        "traces the model",
        "traces the model with sizes that may change",
        *runs,
    ]


class Returns(nn.Module):
    """An MLP whose outputs are what `fn` makes of its own."""

    def __init__(self, fn, width=6):
        super().__init__()
        self.net, self.fn = (
            nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)),
            fn,
        )

    def forward(self, *args, **kwargs):
        return self.fn(self, *args, **kwargs)


@dataclasses.dataclass
class Record:
    y: torch.Tensor
    note: str = "a"


class Opaque:
    """An output of a type of its own."""

    def __init__(self, parts):
        self.parts = parts


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def pair(fn):
    """A model whose middle units 3 to 5 are masked, and one without them."""
    whole, small = Returns(fn), Returns(fn, 3)
    with torch.no_grad():
        for i, keep in [(0, np.s_[:3]), (2, np.s_[:, :3])]:
            for a, b in zip(
                whole.net[i].parameters(), small.net[i].parameters(), strict=True
            ):
                b.copy_(a[keep] if b.shape != a.shape else a)
                if b.shape != a.shape:
                    kept = torch.zeros_like(a)
                    kept[keep] = 1
                    a.mul_(kept)
    return whole, small


@pytest.mark.parametrize(
    "fn",
    [
        lambda self, x: self.net(x),
        lambda self, x: (self.net(x), [self.net(x).argmax(-1), None, 2, "b", math.nan]),
        lambda self, x: {"y": {"z": self.net(x)}},
        lambda self, x: Record(self.net(x)),
        lambda self, x: transformers.modeling_outputs.BaseModelOutput(
            last_hidden_state=self.net(x)
        ),
        lambda self, x: (
            self.net(x) * 0 - math.inf,
            self.net(x) * math.nan,
            self.net(x) * 0,
            x[:0],
        ),
        lambda self, x: (
            torch.view_as_complex(self.net(x).reshape(3, 2, 2)).abs()
            + self.net(x).cfloat().real[:, :2]
        ),
        lambda self, x: self.net(F.dropout(x, 0.5)) + torch.rand(()),
    ],
)
def test_equal_outputs(fn):
    assert differs(*pair(fn), X) == ""


def width(self):
    return self.net[0].weight.shape[0]


def other_shape(self, x):
    return self.net(x).view(5, 7) if width(self) == 3 else self.net(x)


def on_others(self, x):
    return self.net(x) + (0 if (x - X).abs().max() < 0.1 else width(self))


OTHER = "gives another output"
OTHERS = {
    "a little": (
        lambda self, x: self.net(x) + width(self) * 1e-9,
        OTHER + r" than the masked one, by \S+e-0[67] %",
    ),
    "shapes": (
        lambda self, x: (x, [self.net[0](x)]),
        r"gives an output at '1.0' of \(3, 3\) and float64, not \(3, 6\)",
    ),
    "names": (
        lambda self, x: {"y": x, "n": {str(width(self)): x}},
        r"gives outputs \['y', 'n.3'\], where",
    ),
    "texts": (
        lambda self, x: Record(self.net(x), str(width(self))),
        "gives the output at 'note' '3', not '6' as",
    ),
    "numbers": (
        lambda self, x: (self.net(x), width(self)),
        "gives the output at '1' 3, not 6 as",
    ),
    "integers": (
        lambda self, x: (x, x.long() + width(self)),
        OTHER + " at '1' than the masked one, by inf %",
    ),
    "booleans": (
        lambda self, x: (x, x > width(self) - 6),
        OTHER + " at '1' than the masked one, by inf %",
    ),
    "infinities": (
        lambda self, x: self.net(x) / (width(self) - 3),
        OTHER + " than the masked one, by inf %",
    ),
    "failures": (other_shape, "fails on the example: RuntimeError: shape"),
    "other inputs": (on_others, "on other inputs of the example's shapes"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_outputs(kind):
    fn, words = OTHERS[kind]
    assert re.search(words, differs(*pair(fn), X))


def test_the_first_module_that_differs_is_named():
    whole, small = pair(lambda self, x: self.net(x))
    with torch.no_grad():
        small.net[2].bias[0] += 0.1
    assert differs(whole, small, X).endswith(
        "of its largest value, first in the module 'net.2'"
    )
    broken = Returns(lambda self, x: self.net(x), 3)
    broken.net[2] = nn.Linear(5, 4)
    assert differs(whole, broken, X).endswith("in the module 'net.2'")
    whole = nn.Sequential(
        nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 4)), nn.Tanh()
    ).eval()
    whole, small = both(whole, X)
    with torch.no_grad():
        small.get_parameter("1.1.bias")[0] += 0.1
    assert differs(whole, small, X).endswith(
        "of its largest value, first in the module '1.1'"
    )
    assert differs(nn.ReLU(), nn.Tanh(), X).endswith("first in the module itself")


def test_what_pytrees_know_is_an_output():
    pytree.register_pytree_node(
        Opaque, lambda x: (x.parts, None), lambda x, _: Opaque(x)
    )
    whole, small = pair(
        lambda self, x: Opaque([self.net(x), self.net(x) * len(self.net[0].bias)])
    )
    assert "'1' than the masked one" in differs(whole, small, X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_half_precision_is_compared_in_float64(dtype):
    fn = lambda self, x: self.net(x) * (1 + self.net[0].weight.shape[0] * self.tiny)  # noqa: E731
    for tiny, equal in [(0, True), (1e-8, False)]:
        whole, small = (model.to(dtype) for model in pair(fn))
        whole.tiny = small.tiny = tiny
        assert (differs(whole, small, X.to(dtype)) == "") is equal


@pytest.mark.deep
def test_casts_to_float32_stay_in_float64():
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    words = {"input_ids": torch.arange(12).reshape(2, 6), "use_cache": False}
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.LlamaForCausalLM(config).to(dtype).eval()
        whole, small = both(model, words)
        assert differs(whole, small, words) == ""
        with torch.no_grad():
            small.get_parameter("model.layers.1.input_layernorm.weight").mul_(1.01)
        assert "gives another output at 'logits' than the masked one" in differs(
            whole, small, words
        )

    def float_inside(self, x):
        shares = self.net(x).float().softmax(-1, dtype=torch.float32)
        return shares @ torch.ones(4, 4)

    assert differs(*pair(float_inside), X) == ""
    assert torch.get_default_dtype() == torch.float32


def test_a_smaller_model_has_to_run_in_its_own_dtype():
    def forward(self, x):
        if x.dtype == torch.float32 and self.net[0].weight.shape[0] == 3:
            raise TypeError("widths of 3 in float32")
        return self.net(x)

    assert differs(*pair(forward), X).startswith(
        "fails on the example: TypeError: widths of 3 in float32"
    )


def test_inputs_are_of_the_kind_of_the_example():
    seen = []

    def forward(self, x, ids, mask, scale):
        seen.append((x, ids, mask, scale))
        return self.net(x)

    ids, mask = (
        torch.tensor([3, 9, 5]),
        torch.tensor([[True, True], [True, False], [False, True]]),
    )
    assert not differs(
        *pair(forward), {"x": X.abs() * 100, "ids": ids, "mask": mask, "scale": 2.0}
    )
    given = X.abs() * 100
    assert [x[0].dtype for x in seen] == [*[torch.float64] * 2, *[torch.float32] * 2]
    assert [bool(x[0].double().equal(given.double())) for x in seen] == [True] * 2 + [
        False
    ] * 2
    for x, numbers, kept, scale in seen:
        assert (x >= 0).all() and 10 < x.std() < 300 and scale == 2.0
        assert (
            numbers.min() >= 3
            and numbers.max() <= 9
            and kept.sum() == 4
            and kept.any(1).all()
        )


def test_runs_of_the_masked_model_are_shared():
    runs = []

    def forward(self, x):
        runs.append((width(self), x.dtype))
        return self.net(x) + self.shift

    whole, small = pair(forward)
    whole.shift = small.shift = 0.0
    other = copy.deepcopy(small)
    other.shift = 1.0
    proof = Proof(whole, X)
    assert not proof.differs(small) and proof.reason(other) and not proof.differs(small)
    assert [dtype for n, dtype in runs if n == 6] == [torch.float64, torch.float32]
    # a wrong model is left at the first output that differs
    assert len(runs) == 2 + 2 + 1 + 2


def test_what_float32_cannot_tell_on_other_inputs_float64_does():
    seen = []

    def rounded(self, x):
        seen.append(x.dtype)
        return self.net(x) + (self.noise if x.dtype == torch.float32 else 0)

    whole, small = pair(rounded)
    whole.noise, small.noise = 0.0, 0.1
    assert not differs(whole, small, X)
    assert seen.count(torch.float64) == 4 and seen[-1] == torch.float64
    whole, small = (model.bfloat16() for model in pair(on_others))
    assert differs(whole, small, X.bfloat16())


def test_an_input_that_the_model_does_not_take_is_left_out():
    def forward(self, x):
        if not x[0, 0].float() == X[0, 0]:
            raise ValueError("only this")
        return self.net(x)

    assert differs(*pair(forward), X) == ""


def test_nothing_is_left_behind():
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        x.mul_(2.0)
        return self.norm(self.net(x)) + torch.rand(())

    whole, small = pair(forward)
    whole.norm, small.norm = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    given, random, before = (
        X.clone(),
        torch.get_rng_state(),
        copy.deepcopy(whole.state_dict()),
    )
    assert differs(whole, small, given) == ""
    assert given.equal(X) and torch.get_rng_state().equal(random)
    for model in (whole, small):
        assert model.training and model.norm.training and not hasattr(model, "calls")
        assert (
            model.norm.num_batches_tracked == 0
            and next(model.parameters()).dtype == torch.float32
        )
        assert not any(part._forward_hooks for part in model.modules())
    assert all(value.equal(before[name]) for name, value in whole.state_dict().items())


def test_bad_input():
    whole, small = pair(lambda self, x: self.net(x).argmax(-1))
    with pytest.raises(
        ValueError,
        match="expected the Returns to return floating-point tensors on the example, "
        "in tuples",
    ):
        differs(whole, small, X)
    with pytest.raises(
        ValueError,
        match="expected an example that the Returns can be called with, got "
        "RuntimeError: mat1",
    ):
        differs(whole, small, torch.randn(3, 5))
    with pytest.raises(
        ValueError,
        match="shrink: expected tensors with values, but '.*' is on the meta device",
    ):
        differs(whole.to("meta"), small, X)
    with pytest.raises(
        TypeError, match="expected example to be what the model is called with"
    ):
        differs(small, small, [X])
