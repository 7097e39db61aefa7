"""Whether the smaller model gives the outputs of the masked one, in both forms, and has the size that was counted."""

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import sparsefn as sf

TOLERANCE = 1e-9


class InDouble(TorchDispatchMode):
    """Runs in float64 what a model's code does in float32, so that rounding does not hide a difference."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None
        args, kwargs = _pytree.tree_map(widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def widened(x):
    return torch.float64 if x in (torch.float32, torch.float16, torch.bfloat16) and isinstance(x, torch.dtype) else x


def random_units(seed, share=0.5):
    """A choice of units that go: from every group a number of its own, never all."""

    def choose(groups):
        drawn, gone = torch.Generator().manual_seed(seed), {}
        for i, group in enumerate(groups):
            n = len(group.units)
            count = min(int(torch.rand((), generator=drawn) * 2 * share * n + 0.5), n - 1)
            gone[i] = torch.randperm(n, generator=drawn)[:count].tolist()
        return {i: units for i, units in gone.items() if units}

    return choose


def outputs(model, example, params=None):
    """The tensors that a model gives on the example, under the weights given."""
    args, kwargs = example if isinstance(example, tuple) else (), example if isinstance(example, dict) else {}
    with torch.no_grad(), InDouble():
        if params is not None:
            out = torch.func.functional_call(model, params, args, kwargs)
        else:
            out = model(*args, **kwargs)
    return [x for x in _pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]


def check_equal(wanted, got, what):
    assert [x.shape for x in wanted] == [x.shape for x in got], what
    for i, (x, y) in enumerate(zip(wanted, got, strict=True)):
        scale = max(1.0, float(x.double().abs().max())) if x.numel() else 1.0
        torch.testing.assert_close(
            y, x, rtol=0, atol=TOLERANCE * scale, equal_nan=True, msg=lambda m, i=i: f"{what}, output {i}: {m}"
        )


def check_sizes(small, masks, what):
    """Every leaf that is left holds as many entries as its mask has ones."""
    sizes = {name: p.numel() for name, p in small.named_parameters()}
    wrong = {name: (n, int(masks[name].sum())) for name, n in sizes.items() if n != int(masks[name].sum())}
    assert not wrong, f"{what}: entries that are there, and that were counted: {wrong}"


def check_small(model, example, choose, counted=False):
    """Masked == smaller, as a program and as what `shrink` returns, for the units that go; says what was done."""
    groups = sf.shrinking.groups(model, example, counted=counted)
    gone = choose(groups)
    masks = groups.masks(groups.drop(gone))
    params = {name: p.detach() for name, p in model.named_parameters()}
    wanted = outputs(model, example, {name: p * masks[name] for name, p in params.items()})
    state = sf.State(params, masks)
    for what, small in {
        "the program": sf.shrinking.program(model, state, example, counted=counted),
        "what shrink returns": sf.shrink(model, state, example=example),
    }.items():
        check_equal(wanted, outputs(small, example), what)
        check_sizes(small, masks, what)
    return gone
