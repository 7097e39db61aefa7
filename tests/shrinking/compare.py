"""Whether smaller models give the outputs of the masked one, and have the sizes that
were counted beforehand.
"""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import sparsefn as sf
from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.plan import folded_biases, free
from sparsefn.shrinking.proof import Proof
from sparsefn.shrinking.rebuild import program
from sparsefn.shrinking.removal import zero_branches
from sparsefn.shrinking.residuals import without_branches

TOLERANCE = 1e-9
NARROW = torch.float32, torch.float16, torch.bfloat16


class InDouble(TorchDispatchMode):
    """Runs in float64 what a model's code does in float32, so that rounding hides no
    difference.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None
        args, kwargs = pytree.tree_map(
            lambda x: torch.float64 if x in NARROW else x,
            (args, kwargs or {}),
            is_leaf=plain,
        )
        return func(*args, **kwargs)


def plain(x):
    return isinstance(x, torch.Tensor)


def random_units(found, seed):
    """Units that go, by the number of their group: of each group some, never all."""
    draw, gone = torch.Generator().manual_seed(seed), {}
    for i, group in enumerate(found):
        count = min(
            int(torch.rand((), generator=draw) * group.size + 0.5), group.size - 1
        )
        gone[i] = torch.randperm(group.size, generator=draw)[:count].tolist()
    return {i: units for i, units in gone.items() if units}


def masked_weights(model, found, gone):
    """The parameters of a model, and the masks of all of them without these units."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    dense = {name: torch.ones(p.shape, dtype=torch.bool) for name, p in params.items()}
    return params, dense | found.masks(gone)


def outputs(model, example, params=None):
    """The tensors that a model gives on the example, with the weights given."""
    args, kwargs = (example, {}) if isinstance(example, tuple) else ((), example)
    with torch.no_grad(), InDouble():
        out = (
            model(*args, **kwargs)
            if params is None
            else torch.func.functional_call(model, params, args, kwargs)
        )
    return [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]


def differs(masked, small, example, exact=None):
    """How the outputs of a smaller model differ from those of the masked one."""
    return Proof(masked, example).differs(small, exact)


def check_outputs(wanted, small, example, what, tolerance=TOLERANCE, least=1.0):
    """The outputs differ by this part of the largest value, or of `least`."""
    got = outputs(small, example)
    assert [x.shape for x in wanted] == [x.shape for x in got], what
    for x, y in zip(wanted, got, strict=True):
        atol = tolerance * max(least, float(x.double().abs().max()))
        torch.testing.assert_close(
            y, x, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}"
        )


def check_sizes(small, masks, what, exact=True):
    """Each parameter that has a mask holds as many entries as the mask keeps, or
    fewer.
    """
    masked = [(name, p) for name, p in small.named_parameters() if masks[name].ndim]
    pairs = {name: (p.numel(), int(masks[name].sum())) for name, p in masked}
    wrong = {
        name: (n, m) for name, (n, m) in pairs.items() if n > m or (exact and n < m)
    }
    assert not wrong, f"{what}: entries that are there, and that were counted: {wrong}"


def check(model, example, *, seed=0, counted=False, forms=(None,), found=None):
    """Masked == small for units drawn at random from every group: the program, and what
    `shrink` makes in these forms.

    Gives back the groups, which may be given, and which units go.
    """
    found = found or groups(model, example, counted=counted)
    gone = random_units(found, seed)
    params, masks = masked_weights(model, found, gone)
    wanted = outputs(
        model, example, {name: p * masks[name] for name, p in params.items()}
    )
    small = program(found.cut(gone))
    check_outputs(wanted, small, example, "the program")
    check_sizes(small, masks, "the program")
    assert found.cost(gone, "params") == sum(p.numel() for p in small.parameters())
    for form in forms:
        made = sf.shrinking.smaller(model, sf.State(params, masks), example, form=form)
        check_outputs(wanted, made.module, example, f"form={form}")
        check_sizes(made.module, masks, f"form={form}", exact=False)
    return found, gone


def check_layers(model, example, layers, masks, *, forms=()):
    """Masked == small in float64, to 1e-10 of the largest value, under masks of whole
    layers: the program, and what `shrink` makes in these forms.

    Gives back how many parameters the program has, and what was made in the forms.
    """
    params = {name: p.detach() for name, p in model.named_parameters()}
    # a parameter that a weight is computed from has a mask without dimensions
    masked = {name: p * masks[name] for name, p in params.items()}
    wanted = outputs(model, example, masked)
    small = without_layers(layers, masks, params)
    check_outputs(wanted, small, example, "the program", 1e-10, 0.0)
    state = sf.State(params, masks)
    results = []
    for form in forms:
        made = sf.shrinking.smaller(model, state, example, form=form, groups=layers)
        check_outputs(wanted, made.module, example, f"form={form}", 1e-10, 0.0)
        results.append(made)
    return entries(small), results


def without_layers(layers, masks, params):
    """The traced program of a model without the layers that masks prune."""
    graph = layers.analysis.graph
    short = without_branches(graph, zero_branches(graph, masks))
    plan = free(analyse(short, masks, counted=True, equal_parts=False))
    return program(plan, folded_biases(plan, params))


def entries(model):
    return sum(p.numel() for p in model.parameters())
