"""Averages of others under the masks of a run: torch's own, stand-ins for timm's, and
plain copies.
"""

import copy
import re

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import sparsefn as sf
from sparsefn.nn.modules.averages import mask_average


def trained(average, steps=24, freeze=False):
    """A model, what `attach` returned, and its average, after steps in which masks
    change.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8)
    )
    model[1].requires_grad_(not freeze)
    optimizer = torch.optim.Adam(
        (p for p in model.parameters() if p.requires_grad), lr=1e-2
    )
    sparse = sf.attach(
        sf.rigl(0.8, when=sf.every(2), key=sf.random.key(0)), model, optimizer
    )
    averaged = average(model)
    for step in range(steps):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        sparse.before_step()
        optimizer.step()
        optimizer.zero_grad()
        sparse.after_step(step)
        getattr(averaged, "update_parameters", getattr(averaged, "update", None))(model)
    return model, sparse, averaged


class ModelEma(nn.Module):
    """As timm's `ModelEmaV2` and `ModelEmaV3` do: a deep copy in `module`, and all of
    the state dict is averaged.
    """

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for own, new in zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        ):
            own.copy_(
                own * self.decay + new * (1 - self.decay)
                if own.is_floating_point()
                else new
            )


AVERAGES = {
    "mean": AveragedModel,
    "mean with buffers": lambda model: AveragedModel(model, use_buffers=True),
    "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "ema with buffers": lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
    "timm's": ModelEma,
}


def zeros(average, masks):
    """The share of zeros of the masked leaves."""
    leaves = {
        name.removeprefix("module."): leaf
        for name, leaf in average.state_dict().items()
    }
    masked = [leaves[path] for path, mask in masks.items() if mask.ndim]
    return sum(int((leaf == 0).sum()) for leaf in masked) / sum(
        leaf.numel() for leaf in masked
    )


@pytest.mark.parametrize("name", AVERAGES)
def test_a_denser_average_gets_sparse_and_says_what_it_dropped(name):
    _, sparse, averaged = trained(AVERAGES[name])
    before = copy.deepcopy(averaged.state_dict())
    assert zeros(averaged, sparse.masks) < 0.7
    final, dropped = mask_average(averaged, sparse.masks)
    assert type(final) is type(averaged)
    assert final.training == averaged.training
    assert zeros(final, sparse.masks) >= 0.8 - 1e-3
    assert sf.checkpoint.tree_equal(dict(averaged.state_dict()), dict(before))
    for path, leaf in final.state_dict().items():
        mask = sparse.masks.get(path.removeprefix("module."), torch.tensor(True))
        assert torch.equal(
            leaf, torch.where(mask, before[path], torch.zeros_like(leaf))
        )
        assert leaf.data_ptr() != averaged.state_dict()[path].data_ptr()
    for row in dropped.rows:
        leaf, mask = before[f"module.{row.path}"], sparse.masks[row.path]
        assert row.weights == int(leaf[~mask].count_nonzero())
        assert row.total == leaf.numel()
        assert row.norm == pytest.approx(
            float(leaf[~mask].norm() / leaf.norm()), rel=1e-5
        )
    assert dropped.all.weights == sum(row.weights for row in dropped.rows) > 0
    final.module(torch.randn(3, 16))


def test_averages_go_on_after_it():
    model, sparse, averaged = trained(AveragedModel)
    final, _ = mask_average(averaged, sparse.masks)
    assert int(final.n_averaged) == int(averaged.n_averaged) == 24
    update_bn([torch.randn(32, 16)], final)
    assert not torch.equal(
        final.module[1].running_mean, averaged.module[1].running_mean
    )
    final.update_parameters(model)
    sparse.check(final)  # the masks have not changed since
    averaged.load_state_dict(final.state_dict())
    sparse.check(averaged)


def test_an_average_that_was_swapped_into_the_model():
    model, sparse, averaged = trained(AVERAGES["ema"])
    for own, average in zip(
        model.parameters(), averaged.module.parameters(), strict=True
    ):
        swapped = own.data.clone()
        own.data.copy_(average.data)
        average.data.copy_(swapped)
    final, dropped = mask_average(model, sparse.masks)
    sparse.check(final)
    assert dropped.all.weights > 0
    assert mask_average(averaged, sparse.masks)[1].all.weights == 0


def test_check_takes_an_average():
    _, sparse, averaged = trained(AVERAGES["ema"])
    _, dropped = mask_average(averaged, sparse.masks)
    row = dropped.rows[0]
    text = (
        f"check: {row.weights} pruned entries of '0.weight' are not zero in the "
        f"average, {row.norm:.2%} of its norm: masks have changed since it began; "
        "sf.modules.mask_average(average, sparse.masks) makes it sparse"
    )
    for average in (averaged, averaged.module, averaged.state_dict()):
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            sparse.check(average)
        sparse.check(mask_average(average, sparse.masks)[0])
    sparse.check()
    with pytest.raises(
        TypeError,
        match="expected an average as a module or a dict of tensors by name, got list",
    ):
        sparse.check([])


def test_what_attach_returned_is_no_masks_tree():
    _, sparse, averaged = trained(AVERAGES["ema"], steps=1)
    with pytest.raises(
        TypeError, match="^mask_average: expected masks, got Attached: give its .masks$"
    ):
        mask_average(averaged, sparse)


def test_state_dicts_and_names_with_a_prefix():
    model, sparse, averaged = trained(AVERAGES["ema"])
    wanted, dropped = mask_average(averaged.module.state_dict(), sparse.masks)
    held = averaged.state_dict()
    compiled = {
        f"module._orig_mod.{name}": x
        for name, x in averaged.module.state_dict().items()
    }
    for average, start in (
        (held, "module."),
        (compiled, "module._orig_mod."),
        ({**held, "epoch": 3}, "module."),
    ):
        final, again = mask_average(average, sparse.masks)
        assert list(final) == list(average)
        assert sf.checkpoint.tree_equal(
            {name: final[start + name] for name in wanted}, wanted
        )
        assert again == dropped
        assert not {x.data_ptr() for x in final.values() if torch.is_tensor(x)} & {
            x.data_ptr() for x in held.values()
        }
    model.load_state_dict(wanted)
    sparse.check()


def test_frozen_and_tied_parameters_and_other_devices_and_dtypes():
    _, sparse, averaged = trained(AVERAGES["mean"], freeze=True)
    assert "1.weight" not in sparse.masks
    sparse.check(mask_average(averaged, sparse.masks)[0])
    half = copy.deepcopy(averaged).to(torch.bfloat16)
    final, _ = mask_average(half, sparse.masks)
    assert {p.dtype for p in final.parameters()} == {torch.bfloat16}
    tied = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    tied["b"].weight = tied["a"].weight
    masks = {
        "a.weight": torch.eye(4, dtype=torch.bool),
        "a.bias": torch.tensor(True),
        "b.bias": torch.tensor(True),
    }
    final, dropped = mask_average(AveragedModel(tied), masks)
    assert final.module["a"].weight is final.module["b"].weight
    assert int(final.module["a"].weight.count_nonzero()) == 4
    assert [row.path for row in dropped.rows] == ["a.weight"]
    given = {name: x.clone() for name, x in tied.state_dict().items()}
    assert not mask_average(given, masks | {"b.weight": masks["a.weight"]})[0][
        "b.weight"
    ][0, 1:].any()


def test_what_is_not_finite_does_not_stay():
    average = {"w": torch.tensor([1.0, torch.nan, torch.inf, -0.0])}
    final, dropped = mask_average(
        average, {"w": torch.tensor([True, False, False, False])}
    )
    assert final["w"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert dropped.all.weights == 2
    _, none = mask_average({"w": torch.zeros(2)}, {"w": torch.tensor([True, False])})
    assert (none.all.weights, none.all.norm) == (0, 0.0)
    dense = {"w": torch.ones(2)}
    assert mask_average(dense, {"w": torch.tensor(True)})[1].rows == ()


def test_the_table():
    average = {"2.w": torch.tensor([3.0, 4.0]), "10.w": torch.ones(2000)}
    masks = {
        "2.w": torch.tensor([True, False]),
        "10.w": torch.zeros(2000, dtype=torch.bool),
    }
    assert str(mask_average(average, masks)[1]) == (
        "path  dropped  total    norm\n"
        "2.w         1      2  0.8000\n"
        "10.w    2,000  2,000  1.0000\n"
        "all     2,001  2,002  0.9978"
    )


W = {"w": torch.ones(2)}
M = {"w": torch.tensor([True, False])}
BAD = [
    (
        lambda: mask_average([W["w"]], M),
        TypeError,
        "got list: where it has a method that copies its weights into a mod",
    ),
    (
        lambda: mask_average(W, sf.State(W, M)),
        TypeError,
        "expected masks, got State: give its .masks",
    ),
    (
        lambda: mask_average(W, W),
        TypeError,
        "expected masks, bool tensors, got torch.float32 at 'w'",
    ),
    (
        lambda: mask_average(W, {"w": 1}),
        TypeError,
        "expected masks, bool tensors, got int at 'w'",
    ),
    (
        lambda: mask_average({"v": W["w"]}, M),
        ValueError,
        "expected the average to have 'w'; it has 'v'",
    ),
    (
        lambda: mask_average({"w": 1}, M),
        ValueError,
        "expected the average to have 'w'; it has no tensor",
    ),
    (
        lambda: mask_average({f"{i}.v": W["w"] for i in range(9)}, M),
        ValueError,
        "expected the average to have 'w'; it has '0.v', '1.v', '2.v', '3.v', '4.v', "
        "'5.v', ...",
    ),
    (
        lambda: mask_average(
            {"a.w": W["w"], "a.v": W["w"], "b.w": W["w"]},
            M | {"v": torch.tensor([True, False])} | {"u": M["w"]},
        ),
        ValueError,
        "expected the average to have 'u'; it has 'a.w', 'a.v', 'b.w'",
    ),
    (
        lambda: mask_average({"a.w": W["w"], "b.w": W["w"]}, M),
        ValueError,
        "expected 'w' once in the average, got it under a., b.",
    ),
    (
        lambda: mask_average({"w": torch.ones(3)}, M),
        ValueError,
        "expected an average of shape (2,) at 'w', got (3,)",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[row[2] for row in BAD])
def test_bad_input(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()
