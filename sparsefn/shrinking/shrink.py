"""Smaller models with the outputs of masked models, as modules of the same class or as
programs; training goes on with them.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from sparsefn.core.state import State
from sparsefn.core.tree import flatten
from sparsefn.nn.modules import bake, inner_module, params_of
from sparsefn.shrinking.analysis import analyse, has_shuffles, without_shuffles
from sparsefn.shrinking.groups import Groups
from sparsefn.shrinking.plan import PruningPlan, cost, folded_biases, free, taken
from sparsefn.shrinking.proof import Progress, Proof
from sparsefn.shrinking.rebuild import program, same_class
from sparsefn.shrinking.trace import Example, calls_of, matched, may_resize, traced
from sparsefn.shrinking.values import kept_slices

Form = Literal["class", "program"]


class Kept(NamedTuple):
    """What is kept of a tensor: its old shape, and the indices that stay along each
    dimension (None: all).
    """

    shape: tuple[int, ...]
    indices: tuple[Tensor | None, ...]


class Smaller(NamedTuple):
    """A smaller model, what it kept of the old one's tensors, and in which form it is.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ... ).eval()
    >>> made = sf.shrinking.smaller(
    ...     net, sf.dense().init(sf.modules.params_of(net)), torch.ones(1, 3)
    ... )
    >>> made.form, made.stays, made.kept["0.bias"]
    ('class', (), Kept(shape=(4,), indices=(None,)))

    Attributes:
        module: The smaller model.
        kept: Of every parameter and buffer by name: its old `shape`, and the `indices`
            that stay along each dimension, None for all.
        form: "class" for a module of the same class, "program" for a traced one.
        stays: What is masked and stays, with the reasons.
        notes: What the model's configs cannot say, and why it is no module of its
            class.
    """

    module: nn.Module
    kept: Mapping[str, Kept]
    form: Form
    stays: tuple[str, ...]
    notes: tuple[str, ...] = ()


def shrink(
    module: nn.Module,
    state: State,
    example: Example,
    *,
    only: str | Sequence[str] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    form: Form | None = None,
    groups: Groups | None = None,
) -> nn.Module:
    """A smaller copy of the module with the outputs of the masked module.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... ).eval()
    >>> x = torch.ones(2, 3)
    >>> groups = sf.shrinking.groups(net, x)
    >>> state = sf.static(0.5, pattern=groups.pattern()).init(sf.modules.params_of(net))
    >>> small = sf.shrink(net, state, x, groups=groups)
    >>> small
    Sequential(
      (0): Linear(in_features=3, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=2, bias=True)
    )
    >>> torch.allclose(small(x), sf.modules.call(net, state, x), atol=1e-6)
    True

    Args:
        module: The module, which does not change.
        state: State whose masks say what goes, of whatever algorithm they are: every
            unit that is 0, or that no layer reads, and units that are constant where a
            bias can take in what they give. A unit that the masks prune only in part
            stays, and so does one of every dimension.
        example: What the module is called with: a tensor, a tuple of arguments or a
            dict of keyword arguments.
        only: Globs of submodules, each of which is made smaller by itself, as it is
            called on the example. Default: the whole module.
        buffers: Buffers of the copy by name, such as the batch norm's of
            `sf.modules.call_with_buffers`. Default: the module's own.
        form: "class" for a module of the same class, or an error where there is none;
            "program" for the traced program. Default: of the same class if possible.
        groups: The module's groups, as `sf.shrinking.groups` made them on this example,
            whatever has been trained since: with them it is not traced again.

    Returns:
        A module of the same class where running it proves that its outputs are equal,
        in eval mode: in float64 on the example, to 1e-10, and on another input of its
        shapes. Else the traced program with new sizes (`torch.fx.GraphModule`), whose
        parameters have their old names, and which takes other batch sizes and lengths
        where it need not keep more for that. Never a module that differs.

    Raises:
        TypeError: `state` is no State, `groups` are no groups, or `example` is of
            another type.
        ValueError: The module does not run on the example, `torch.export` cannot trace
            it, or it is in train mode and computes otherwise in eval mode. `groups` are
            of another module or example. There is no smaller module of the class, with
            form="class". Masks or buffers are as `sf.modules.bake` refuses.

    A UserWarning names what is pruned and has to stay, with the reason. Where it takes
    more than 10 seconds a line on stderr says what it does. `sf.shrinking.smaller`
    returns more: what was kept, for `sf.shrinking.carry`.
    """
    made = smaller(
        module, state, example, only=only, buffers=buffers, form=form, groups=groups
    )
    if made.stays:
        warnings.warn(
            "shrink could not remove all that is pruned:\n  " + "\n  ".join(made.stays),
            stacklevel=2,
        )
    return made.module


def smaller(
    module: nn.Module,
    state: State,
    example: Example,
    *,
    only: str | Sequence[str] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    form: Form | None = None,
    groups: Groups | None = None,
) -> Smaller:
    """What `sf.shrink` makes, with what it kept, and with notes in place of a warning.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)
    ... ).eval()
    >>> state = sf.State(
    ...     sf.modules.params_of(net),
    ...     sf.shrinking.groups(net, torch.ones(1, 1)).masks({0: [1]}),
    ... )
    >>> made = sf.shrinking.smaller(net, state, torch.ones(1, 1))
    >>> made.form, made.kept["2.weight"].indices
    ('class', (None, tensor([0])))

    Args:
        module: As for `sf.shrink`.
        state: As for `sf.shrink`.
        example: As for `sf.shrink`.
        only: As for `sf.shrink`.
        buffers: As for `sf.shrink`.
        form: As for `sf.shrink`.
        groups: As for `sf.shrink`.

    Returns:
        The module of `sf.shrink`, what it kept of every parameter and buffer, what
        stays, and notes.

    Raises:
        TypeError: As by `sf.shrink`.
        ValueError: As by `sf.shrink`.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"expected a State, got {type(state).__name__}; of zeros in params make "
            "one by sf.State(params, sf.masks.from_zeros(params))"
        )
    if form not in (None, "class", "program"):
        raise ValueError(
            f"shrink: expected form None, 'class' or 'program', got {form!r}"
        )
    if not isinstance(groups, Groups | None):
        raise TypeError(
            "shrink: expected groups as sf.shrinking.groups makes them, got "
            f"{type(groups).__name__}"
        )
    if groups is not None and (only is not None or groups.trace is None):
        raise ValueError(
            "shrink: expected groups of the whole module, without only=, got those of "
            "submodules; leave groups= out"
        )
    tell = Progress("shrink")
    masked = inner_module(bake(module, state, buffers=buffers))
    masks = dict(flatten(state.masks)[0])
    if only is None:
        return _smaller(masked, masks, example, form, tell, groups)[0]
    exact: dict[str, Tensor] = {}
    kept: dict[str, Any] = {}
    forms = []
    stays = []
    notes = []
    small = masked
    paths = matched(masked, [only] if isinstance(only, str) else only)
    calls = calls_of(masked, paths, example)
    for path in paths:
        inside = {
            name.removeprefix(f"{path}."): mask
            for name, mask in masks.items()
            if name.startswith(f"{path}.")
        }
        made, precise = _smaller(
            masked.get_submodule(path), inside, calls[path], form, tell
        )
        exact |= {f"{path}.{name}": x for name, x in precise.items()}
        kept |= {f"{path}.{name}": some for name, some in made.kept.items()}
        stays += [f"in {path!r}: {line}" for line in made.stays]
        notes += [f"in {path!r}: {line}" for line in made.notes]
        forms.append(made.form)
        small = copy.deepcopy(small)
        small.set_submodule(path, made.module)
    reason = Proof(masked, example, tell).differs(small, exact)
    if reason:
        raise ValueError(
            f"shrink: the {type(module).__name__} with smaller "
            f"{', '.join(map(repr, paths))} {reason}"
        )
    return Smaller(
        small,
        kept,
        "program" if "program" in forms else "class",
        tuple(stays),
        tuple(notes),
    )


def _smaller(
    masked: nn.Module,
    masks: Mapping[str, Tensor],
    example: Example,
    form: Form | None,
    tell: Progress,
    groups: Groups | None = None,
) -> tuple[Smaller, dict[str, Tensor]]:
    # With the parameters in float64 that it holds rounded.
    why = ""
    exact: dict[str, Tensor] = {}
    before = dict(masked.named_parameters(remove_duplicate=False))
    proof = Proof(masked, example, tell)

    def works(small: nn.Module, precise: Mapping[str, Tensor]) -> bool:
        exact.update(precise)
        return not proof.reason(small, precise)

    still = _traced(masked, example, groups, tell)
    if form != "program":
        plan = free(analyse(still, masks, counted=True))
        made = same_class(masked, plan, works, folded_biases(plan, before))
        if made.model is not None:
            return Smaller(
                made.model,
                _kept(plan),
                "class",
                tuple(_stays(plan, masks)),
                made.notes,
            ), exact
        why = made.why
    if form == "class":
        raise ValueError(
            f"shrink: no smaller {type(masked).__name__} has the outputs of the "
            f"masked one: {why}"
        )
    graphs = [still]
    if may_resize(example):
        tell("traces the model with sizes that may change")
        graphs.insert(0, traced(masked, example))
    if has_shuffles(still):
        graphs.append(without_shuffles(graphs[0]))
    cuts = [
        free(analyse(graph, masks, counted=True, equal_parts=False)) for graph in graphs
    ]
    # sizes that may change hide what some operations do, and entries then stay
    plan = min(cuts, key=cost)
    small = program(plan, folded_biases(plan, before))
    exact = {
        name: p.data for name, p in small.named_parameters() if p.dtype == torch.float64
    }
    reason = proof.differs(_as_before(small, before), exact)
    if reason:
        raise ValueError(
            f"shrink: the smaller program of the {type(masked).__name__} {reason}"
        )
    return Smaller(
        small,
        _kept(plan),
        "program",
        tuple(_stays(plan, masks)),
        (why,) if why else (),
    ), exact


def _traced(
    masked: nn.Module, example: Example, groups: Groups | None, tell: Progress
) -> fx.GraphModule:
    # The program of the groups, if there are any; whether a module in train mode
    # computes otherwise a trace shows.
    if groups is not None and groups.trace is not None:
        made = groups.trace.of(masked, example)
        if not any(part.training for part in masked.modules()):
            return made
    tell("traces the model")
    return traced(masked, example, dynamic=False)


def _as_before(small: nn.Module, before: Mapping[str, Tensor]) -> nn.Module:
    # In the dtypes of before: biases that took in constants are float64 until all is
    # proven.
    for name, parameter in small.named_parameters(remove_duplicate=False):
        if name in before:
            parameter.data = parameter.data.to(before[name].dtype)
    return small


def _kept(plan: PruningPlan) -> dict[str, Kept]:
    return {
        name: Kept(value.shape, plan.indices(name))
        for name, value in plan.analysis.leaves.items()
    }


def _stays(plan: PruningPlan, masks: Mapping[str, Tensor]) -> list[str]:
    # Whole rows and columns that masks prune and that stay, with the reason for the
    # first.
    lines = []
    channels = plan.analysis.log.channels
    for name, mask in masks.items():
        value = plan.analysis.leaves.get(name)
        for d, label in enumerate(
            value.labels if value is not None and mask.ndim else ()
        ):
            pruned = ~kept_slices(mask, d)
            still = pruned & plan.kept(label, len(pruned))
            if label is None or not still.any():
                continue
            row = channels.resolve(label[np.nonzero(still)[0][:1]])
            why = next(
                (
                    channels.reasons[i]
                    for i in channels.reason[row].ravel().tolist()
                    if i > 1
                ),
                "one always stays",
            )
            lines.append(
                f"{name!r} keeps {still.sum()} of {pruned.sum()} pruned slices of "
                f"dimension {d}: {why}"
            )
    return lines


_SECOND = re.compile(r":\d+$")  # of several tied sets with one first leaf
Tree = TypeVar("Tree")  # any optree pytree of tensors


def carry(tree: Tree, made: Smaller) -> Tree:
    """A tree of the old model's tensors, cut to the shapes of the smaller model.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)
    ... ).eval()
    >>> masks = sf.shrinking.groups(net, torch.ones(1, 1)).masks({0: [1]})
    >>> state = sf.State(sf.modules.params_of(net), masks)
    >>> made = sf.shrinking.smaller(net, state, torch.ones(1, 1))
    >>> sf.shrinking.carry(
    ...     {"average": {"0.weight": torch.tensor([[1.0], [2.0]])}}, made
    ... )
    {'average': {'0.weight': tensor([[1.]])}}
    >>> sf.shrinking.carry(state, made).masks["2.weight"]
    tensor([[True]])

    Args:
        tree: Masks, scores, the moments of `sf.optimizers`, averages, what `attach`
            saves (`sparse.state_dict()`, to be loaded after `attach` to the smaller
            model), or a whole State.
        made: The smaller model, of `sf.shrinking.smaller`.

    Returns:
        A tree of the same structure. Each tensor at a path that ends in a parameter's
        or buffer's name loses the entries that the smaller model lost; all else stays
        as it is. The params of a State become the params of the smaller model, which
        may hold biases that took in constants.

    Raises:
        ValueError: A tensor at such a path does not have the old shape.

    An average of the weights that a model of its own holds is made smaller by
    `sf.shrink` with the same masks.
    """
    leaves, rebuild = flatten(tree)
    smaller_leaves = []
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            leaf = _cut(path, leaf, made)
        smaller_leaves.append(leaf)
    carried: Any = rebuild(smaller_leaves)
    if isinstance(tree, State):
        own = params_of(made.module)
        params = flatten(tree.params)
        carried = carried._replace(params=params[1]([own[path] for path in params[0]]))
    return carried  # type: ignore[no-any-return]


def carry_optimizer(
    optimizer: Optimizer, model: nn.Module, made: Smaller
) -> dict[str, object]:
    """The state of the old model's torch optimizer, for one of the smaller model.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)
    ... ).eval()
    >>> optimizer = torch.optim.Adam(net.parameters())
    >>> net(torch.ones(1, 1)).sum().backward()
    >>> optimizer.step()
    >>> state = sf.State(
    ...     sf.modules.params_of(net),
    ...     sf.shrinking.groups(net, torch.ones(1, 1)).masks({0: [1]}),
    ... )
    >>> made = sf.shrinking.smaller(net, state, torch.ones(1, 1))
    >>> after = torch.optim.Adam(made.module.parameters())
    >>> after.load_state_dict(sf.shrinking.carry_optimizer(optimizer, net, made))
    >>> after.state[made.module[0].weight]["exp_avg"].shape
    torch.Size([1, 1])

    Args:
        optimizer: The optimizer of the old model.
        model: The old model.
        made: The smaller model, of `sf.shrinking.smaller`.

    Returns:
        A dict for `load_state_dict` of the new optimizer, which has to have its
        parameters in the same groups and order.

    Raises:
        ValueError: The optimizer has a parameter that the model has not, or state of
            another shape than its parameter's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    saved = optimizer.state_dict()
    state = {}
    for i, some in saved["state"].items():
        if id(order[i]) not in names:
            raise ValueError(
                "carry_optimizer: expected an optimizer of the model's parameters, "
                f"but its parameter {i} of shape {tuple(order[i].shape)} is none of "
                "them"
            )
        name = names[id(order[i])]
        state[i] = {
            key: _cut(name, x, made) if isinstance(x, Tensor) else x
            for key, x in some.items()
        }
    return {**saved, "state": state}


def _cut(path: str, x: Tensor, made: Smaller) -> Tensor:
    parts = path.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    name = next((end for end in ends if _SECOND.sub("", end) in made.kept), None)
    if name is None or not x.ndim:
        return x.clone()
    old, indices = made.kept[_SECOND.sub("", name)]
    if tuple(x.shape) != old or _SECOND.search(name):
        text = (
            f"carry: expected a tensor of the old shape {old} at {path!r}, got "
            f"{tuple(x.shape)}"
        )
        units = (
            "; a score of tied units is not cut: start its algorithm anew, from the "
            "params of the smaller model"
        )
        raise ValueError(text + units * (x.ndim == 1))
    return taken(x, indices)
