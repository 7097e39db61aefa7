"""Smaller models of the same class: their tensors, and what they go through."""

import copy
import pickle

import pytest
import torch
from torch import nn

from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.same_class import same_class
from tests.shrinking.classes import drawn, same, small_of


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
