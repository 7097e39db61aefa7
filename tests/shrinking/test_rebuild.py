"""Sizes, groups, repeats and norms of operations whose tensors lose entries.
The traced program with fewer entries: the outputs of the masked model, at all sizes,
as a module for users.

Smaller models of the same class: their tensors, and what they go through.
"""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.rebuild import program, same_class, same_input
from sparsefn.shrinking.rewrites import RULES, padded_grouped_mm
from sparsefn.shrinking.trace import traced
from tests.shrinking.classes import drawn, same, small_of
from tests.shrinking.compare import differs
from tests.shrinking.cuts import both, masked, random_cut, size
from tests.shrinking.test_rewrites import check


@pytest.mark.deep(but=["<lambda>1", "<lambda>2", "<lambda>3"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y.view(-1, 4, 8).sum(1),
        lambda y: y.view(y.shape[0], 2, 16),
        lambda y: y.reshape(y.shape[0] * 4, 8).sigmoid().view(-1, 32),
        lambda y: y.unflatten(2, (2, 4)).transpose(1, 2),
        lambda y: y.unflatten(-1, (4, -1)).sum(1),
        lambda y: y.unsqueeze(1).expand(-1, 3, -1, -1),
        lambda y: y[:, :1].expand(y.shape[0], 4, 8),
        lambda y: y + y.new_zeros(y.shape[0], 4, 8),
        lambda y: y * torch.full((4, 8), 2.0, dtype=y.dtype),
        lambda y: torch.cat([y, torch.ones(y.shape[0], 4, 2, dtype=y.dtype)], 2),
        lambda y: y.split([1, 3], 1)[1],
        lambda y: y.split(3, 2),
        lambda y: y.chunk(2, 2),
        lambda y: y.tensor_split(3, 2),
        lambda y: (y.unbind(1)[2], y[:, 0]),
        lambda y: y.repeat(1, 2, 3),
        lambda y: y.tile(2),
        lambda y: y.repeat_interleave(3, 2),
        lambda y: y.transpose(1, 2).unsqueeze(1).squeeze(1),
        lambda y: y[:, :, :1].squeeze(),
        lambda y: y.mean(1) + y.amax(1),
        lambda y: torch.einsum("bij,bkj->bik", y.relu(), y),
        lambda y: F.channel_shuffle(y.reshape(-1, 32, 1, 1), 4),
        lambda y: F.layer_norm(y, (4, 8)),
        lambda y: F.group_norm(y.reshape(-1, 32), 4),
        lambda y: F.rms_norm(y, (8,), eps=1e-5),
        lambda y: F.softmax(y.mean((1, 2), keepdim=True), 0) + y,
        lambda y: F.scaled_dot_product_attention(y, y, y),
    ],
)
def test_arguments(fn):
    check(fn, rows=4)


def test_a_dimension_that_is_left_with_one_index_is_not_squeezed():
    check(lambda y: y.unsqueeze(-1).squeeze(), share=1.0)
    check(lambda y: y.squeeze(1), share=1.0)


def test_groups_that_are_a_symbolic_size():
    class Mixture(nn.Module):
        """Each row has a convolution of its own."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (
                nn.Conv2d(3, 6, 1),
                nn.Linear(3, 4 * 6 * 9),
                nn.Conv2d(4, 2, 1),
            )

        def forward(self, x):
            b, h, w = x.shape[0], x.shape[2], x.shape[3]
            kernels = self.b(x.mean((2, 3))).view(b * 4, 6, 3, 3)
            y = F.conv2d(self.a(x).view(1, b * 6, h, w), kernels, padding=1, groups=b)
            return self.c(y.view(b, 4, h, w))

    model, x = Mixture().eval().double(), torch.randn(2, 3, 5, 5).double()
    whole, small = both(model, x)
    assert size(small) < size(model)
    for example in (x, torch.randn(3, 3, 5, 5).double()):
        assert not differs(whole, small, example)


def test_norms_of_maps_count_at_other_sizes():
    class Maps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = (
                nn.Conv2d(3, 8, 1),
                nn.GroupNorm(2, 8),
                nn.Conv2d(8, 2, 1),
            )

        def forward(self, x):
            y = self.a(x)
            return self.b(self.norm(y)) + y.mean((1, 2, 3), keepdim=True)

    model, x = Maps().eval().double(), torch.randn(2, 3, 5, 5).double()
    whole, small = both(model, x)
    assert "counted_group_norm" in small.code and "counted_mean" in small.code
    for example in (x, torch.randn(3, 3, 5, 5).double()):
        assert not differs(whole, small, example)


def test_experts_of_any_width():
    x, w, ends = (
        torch.randn(5, 3),
        torch.randn(2, 3, 7),
        torch.tensor([2, 5], dtype=torch.int32),
    )
    torch.testing.assert_close(
        padded_grouped_mm(x, w, ends), torch.cat([x[:2] @ w[0], x[2:] @ w[1]])
    )


def test_rules_are_about_operations_of_torch():
    assert all(hasattr(torch.ops.aten, name) for name in RULES)


class Plain(nn.Module):
    def __init__(self, fn, **parts):
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.fn(self, *args)


def settled(model):
    """In eval mode and float64, with norms that do something."""
    generator = torch.Generator().manual_seed(0)
    for part in model.modules():
        for name, x in [
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
        ]:
            if x.is_floating_point():
                fresh = (
                    torch.rand(x.shape, generator=generator) + 0.5
                    if "var" in name
                    else torch.randn(x.shape, generator=generator)
                )
                x.data.copy_(fresh)
    return model.eval().double()


def unet():
    def forward(self, x):
        a = self.a(x).relu()
        b = self.b(F.max_pool2d(a, 2)).relu()
        c = self.up(b)
        return self.out(torch.cat([a, c], 1))

    parts = {
        "a": nn.Conv2d(3, 6, 3, padding=1),
        "b": nn.Conv2d(6, 8, 3, padding=1),
        "up": nn.ConvTranspose2d(8, 4, 2, 2),
    }
    return Plain(forward, **parts, out=nn.Conv2d(10, 2, 1)), torch.randn(2, 3, 8, 8)


def grouped():
    layers = [
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(8, 16, 3, groups=4),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, 16, 3, groups=16),
    ]
    return nn.Sequential(
        *layers,
        nn.BatchNorm2d(16),
        nn.ConvTranspose2d(16, 8, 2, groups=4),
        nn.Conv2d(8, 2, 1),
    ), torch.randn(2, 3, 8, 8)


def parts():
    def forward(self, x):
        a, b, c = self.a(x).split([4, 3, 5], 1)
        d, e = self.b(torch.cat([c, a], 1)).chunk(2, 1)
        return self.c(torch.cat([d.sigmoid() * e, b], 1))

    return Plain(
        forward, a=nn.Linear(3, 12), b=nn.Linear(9, 8), c=nn.Linear(7, 2)
    ), torch.randn(4, 3)


def attention():
    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(b, n, 3, 4, 3).permute(2, 0, 3, 1, 4).unbind(0)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, n, 12))

    return Plain(
        forward, norm=nn.LayerNorm(5), qkv=nn.Linear(5, 36), out=nn.Linear(12, 2)
    ), torch.randn(2, 6, 5)


def residual():
    def forward(self, x):
        y = self.a(x)
        for layer in self.layers:
            y = y + layer(y)
        return self.b(self.norm(y)) + y.mean((1, 2), keepdim=True)

    layers = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
        for _ in range(2)
    )
    return Plain(
        forward, a=nn.Linear(3, 8), layers=layers, norm=nn.RMSNorm(8), b=nn.Linear(8, 2)
    ), torch.randn(2, 5, 3)


def heads():
    parts = {
        "a": nn.Linear(3, 8),
        "attention": nn.MultiheadAttention(8, 4, batch_first=True),
        "b": nn.Linear(8, 2),
    }
    return Plain(
        lambda self, x: self.b(self.attention(y := self.a(x), y, y)[0]), **parts
    ), torch.randn(2, 5, 3)


def larger(x):
    return torch.cat([x, x + 1])[:-1]


@pytest.mark.deep(but=["True-parts", "True-unet"])
@pytest.mark.parametrize("build", [unet, grouped, parts, attention, residual, heads])
@pytest.mark.parametrize("counted", [False, True])
def test_the_outputs_of_the_masked_model_at_other_sizes(build, counted):
    model, x = build()
    model, x = settled(model), x.double()
    sizes = []
    for seed, share in enumerate((0.3, 0.6, 0.9)):
        whole, small = both(model, x, share, seed, counted)
        assert not differs(whole, small, x)
        assert not differs(whole, small, larger(x))
        assert list(small.state_dict()) == list(traced(model, x).state_dict())
        sizes.append(size(small) / size(model))
    assert min(sizes) < 0.7


WORDS = {"input_ids": torch.arange(12).reshape(2, 6), "use_cache": False}
OTHER = {"input_ids": torch.arange(15).reshape(3, 5), "use_cache": False}
SIZES = {
    "vocab_size": 20,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 20,
}
HUGGING = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=2, **SIZES)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_key_value_heads=2, num_local_experts=3, **SIZES)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_head=4, n_layer=2, vocab_size=20)
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", HUGGING)
def test_models_of_transformers(name):
    model = HUGGING[name]().eval()
    whole, small = both(model, WORDS)
    assert not differs(whole, small, WORDS)
    assert not differs(whole, small, OTHER)
    assert size(small) < 0.6 * size(model)
    assert type(small(**OTHER)) is type(model(**OTHER)) and set(
        small.state_dict()
    ) == set(model.state_dict())


def test_a_size_that_is_read_from_a_smaller_tensor_is_what_it_was():
    def forward(self, x):
        heads = self.a(x).view(x.shape[0] * 4, 3, x.shape[1])
        return self.b(
            (heads * heads.shape[0]).view(x.shape[0], x.shape[1], 12) / heads.numel()
        )

    model, x = (
        settled(Plain(forward, a=nn.Linear(3, 12), b=nn.Linear(12, 2))),
        torch.randn(2, 5, 3).double(),
    )
    whole, small = both(model, x)
    assert not differs(whole, small, x) and not differs(whole, small, larger(x))


def test_a_module_for_users():
    model, x = unet()
    model.register_buffer("fleeting", torch.ones(2), persistent=False)
    whole, small = both(model.eval(), x)
    assert "torch.ops.aten.conv2d" in small.code and list(small.state_dict()) == list(
        model.state_dict()
    )
    wanted = whole(larger(x))
    for other in (
        copy.deepcopy(small),
        torch.compile(small, backend="eager"),
        torch.export.export(small, (larger(x),)).module(),
    ):
        torch.testing.assert_close(other(larger(x)), wanted)
    assert list(copy.deepcopy(small).state_dict()) == list(model.state_dict())
    assert (
        small(x.bfloat16()).dtype == torch.bfloat16
        if small.to(torch.bfloat16)
        else False
    )
    assert not [p for p in small.parameters() if not p.requires_grad]


def test_devices_are_those_of_the_inputs():
    model, x = (
        Plain(
            lambda self, x: self.a(x) + torch.arange(4, device=x.device),
            a=nn.Linear(3, 4),
        ).eval(),
        torch.randn(2, 3),
    )
    with torch.device("meta"):
        model.to("meta")
    _, small = both(model, x)
    assert {p.device.type for p in small.parameters()} == {"meta"}
    other = small.to_empty(device="cpu")
    assert other(x).device.type == "cpu"


@pytest.mark.parametrize("build", [grouped, unet, residual])
def test_gradients_and_buffers_are_those_of_the_masked_model(build):
    model, x = build()
    x = x.double()
    cut = random_cut(traced(model.train().double(), x, train=True))
    whole, small = masked(model, cut), program(cut)
    assert small.training and small.meta["train"]
    for run in (whole, small):
        run(x).square().sum().backward()
    grads = dict(whole.named_parameters())
    assert grads.keys() == dict(small.named_parameters()).keys()
    for name, p in small.named_parameters():
        torch.testing.assert_close(p.grad, cut.take(name, grads[name].grad))
    for name, x in small.named_buffers():
        if not name.startswith("_"):
            torch.testing.assert_close(x, cut.take(name, whole.get_buffer(name)))


def test_modes_are_those_of_the_trace():
    model, x = grouped()
    _, small = both(model.eval(), x)
    assert not small.training and small.eval() is small
    with pytest.warns(
        UserWarning,
        match="traced in eval mode, and computes so whatever .* take one with "
        "train=True",
    ):
        small.train()
    _, small = both(model.train(), x, train=True)
    with pytest.warns(
        UserWarning,
        match="traced in train mode, and computes so whatever .* take one with "
        "train=False",
    ):
        small.eval()
    _, plain = both(unet()[0].eval(), x)
    assert plain.train().training


def test_other_arguments_than_tensors_are_those_of_the_trace():
    model = Plain(
        lambda self, x, scale: self.a(x) * (scale or 1), a=nn.Linear(3, 2)
    ).eval()
    x = torch.randn(2, 3)
    for scale, other in [(None, 3), (2, None), (2.0, 1.0), (True, 1)]:
        _, small = both(model, (x, scale))
        assert small(x, scale).shape == (2, 2)
        with pytest.raises(
            (ValueError, RuntimeError, AssertionError), match=f"{other}|equal|Guard"
        ):
            small(x, other)
    with pytest.raises(
        ValueError,
        match=r"the program was traced with mask=None, got 2; trace the model with "
        r"that",
    ):
        same_input(2, None, "mask")


def test_tensors_in_place_of_those_of_the_trace():
    model, x = unet()
    cut = random_cut(traced(model.eval(), x))
    bias = torch.full((2,), 7.0)
    assert program(cut, {"out.bias": bias}).out.bias.tolist() == [7.0, 7.0]
    assert model.out.bias.tolist() != [7.0, 7.0]


def test_shared_tensors_stay_shared():
    def forward(self, x):
        return self.b(self.a(x).relu() + self.a(x + 1))

    layer = nn.Linear(3, 4)
    model = settled(Plain(forward, a=layer, again=layer, b=nn.Linear(4, 2)))
    whole, small = both(model, torch.randn(2, 3).double())
    assert (
        small.a.weight is small.again.weight
        and copy.deepcopy(small).again.weight.shape == small.a.weight.shape
    )
    assert not differs(whole, small, torch.randn(2, 3).double())


class Marked(nn.Parameter):
    """A parameter of another class."""


class Net(nn.Module):
    """Shared, frozen and marked parameters, buffers and tables that no checkpoint
    holds, and what nothing reads.
    """

    def __init__(self):
        super().__init__()
        self.table, self.heads = nn.Embedding(9, 8), 4
        self.up, self.attention, self.down = (
            nn.Linear(8, 12),
            nn.MultiheadAttention(8, 4, batch_first=True),
            nn.Linear(12, 8),
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight
        self.up.bias.requires_grad_(False)
        self.scale = Marked(torch.ones(12))
        self.unread = nn.Parameter(torch.ones(12, 8))
        self.register_buffer("shift", torch.ones(12))
        self.register_buffer("once", torch.ones(12), persistent=False)
        self.plain = torch.ones(12)

    def forward(self, x):
        x = self.table(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        y = (self.up(x).relu() * self.scale + self.shift) * self.once
        return self.head(self.norm(x + self.down(y * self.plain.to(y))))


def words():
    return torch.randint(0, 9, (2, 5))


def test_tensors_are_as_they_were_but_smaller():
    model = drawn(Net())
    before = copy.deepcopy(model.state_dict())
    small, whole = small_of(model, words(), counted=True)
    assert small.head.weight is small.table.weight and isinstance(small.scale, Marked)
    assert not small.up.bias.requires_grad and small.up.weight.requires_grad
    assert (
        small.state_dict().keys() == model.state_dict().keys()
        and "once" not in small.state_dict()
    )
    assert small.unread.shape == (
        12,
        8,
    ) and small.shift.shape == small.once.shape == small.plain.shape == (6,)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    shared = {x.data_ptr() for x in model.state_dict().values()} & {
        x.data_ptr() for x in small.state_dict().values()
    }
    assert not shared
    torch.testing.assert_close(small(x := words()), whole(x))


def test_goes_through_copies_files_modes_and_dtypes(tmp_path):
    model = drawn(Net())
    small, whole = small_of(model, words(), counted=True)
    x = words()
    wanted = whole(x)
    for made in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        torch.testing.assert_close(made(x), wanted)
    torch.save(small.state_dict(), tmp_path / "small.pt")
    blank = copy.deepcopy(small)
    with torch.no_grad():
        for p in blank.parameters():
            p.zero_()
    blank.load_state_dict(torch.load(tmp_path / "small.pt"))
    torch.testing.assert_close(blank(x), wanted)
    trained = copy.deepcopy(small).train()
    trained(x).sum().backward()
    assert all(p.grad is None or p.grad.shape == p.shape for p in trained.parameters())
    assert torch.isfinite(
        copy.deepcopy(small).bfloat16().requires_grad_(False)(x).float()
    ).all()


@pytest.mark.deep
def test_compiles_and_exports():
    small, whole = small_of(drawn(Net()), words(), counted=True)
    x = words()
    torch.testing.assert_close(
        torch.compile(small, backend="eager", fullgraph=True)(x), whole(x)
    )
    torch.testing.assert_close(torch.export.export(small, (x,)).module()(x), whole(x))


def test_a_smaller_model_gets_smaller_again():
    small, _ = small_of(drawn(Net()), words())
    again, whole = small_of(small, words())
    assert again.up.out_features == 3
    torch.testing.assert_close(again(x := words()), whole(x))


def test_nothing_is_returned_unproved():
    model = drawn(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    cut = groups(model, torch.ones(1, 3)).cut({0: [1]})
    seen = []
    made = same_class(model, cut, lambda small, exact: seen.append(small) or False)
    assert (
        made.model is None
        and made.why == "the Sequential gives other outputs"
        and len(seen) == 3
    )


def test_given_tensors_come_in_and_are_proved_before_they_are_rounded():
    model = drawn(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    cut = groups(model, torch.ones(1, 3)).cut({0: [1]})
    bias, seen = torch.rand(4, dtype=torch.float64), {}

    def works(small, exact):
        seen.update(exact)
        return True

    small = same_class(model, cut, works, {"0.bias": bias}).model
    assert (
        torch.equal(seen["0.bias"], bias[[0, 2, 3]])
        and small[0].bias.dtype == torch.float32
    )
    assert torch.equal(small[0].bias, bias[[0, 2, 3]].float())


@pytest.mark.parametrize("path", ["1", ""])
def test_norms_in_a_models_own_code_are_the_reason(path):
    norm = (
        nn.Sequential(nn.Linear(3, 8), Functional(), nn.Linear(8, 2))
        if path
        else WithNorm()
    )
    made, _, runs = same(drawn(norm), torch.randn(4, 3), counted=True)
    name = "the Functional at '1'" if path else "the WithNorm"
    assert (
        made.why == f"{name} takes a layer_norm of entries that go in code of its own"
        and not runs
    )


class Functional(nn.Module):
    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:])


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        y = self.one(x)
        return self.two(nn.functional.layer_norm(y, y.shape[-1:]))
