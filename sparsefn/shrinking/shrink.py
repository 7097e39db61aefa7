"""Smaller models with the outputs of masked models, as modules of the same class or as
programs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from sparsefn.core.state import State
from sparsefn.core.tree import flatten
from sparsefn.nn.modules import bake, inner_module
from sparsefn.shrinking.analysis import (
    Analysis,
    analyse,
    has_shuffles,
    without_shuffles,
)
from sparsefn.shrinking.config_numbers import KEEPS
from sparsefn.shrinking.depth import Layers
from sparsefn.shrinking.groups import Groups
from sparsefn.shrinking.plan import PruningPlan, cost, folded_biases, free
from sparsefn.shrinking.proof import Progress, Proof, check_loaded
from sparsefn.shrinking.rebuild import program, same_class
from sparsefn.shrinking.removal import (
    Shorter,
    items_without,
    left_in,
    shorter,
    zero_branches,
)
from sparsefn.shrinking.residuals import Residual, own_leaves, without_branches
from sparsefn.shrinking.trace import Example, calls_of, matched, may_resize, traced
from sparsefn.shrinking.values import kept_slices, module_of, named_tensors

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
        names: By the old name of a tensor its new one where a list of modules became
            shorter, and None where a layer went with it. Others keep their names.
    """

    module: nn.Module
    kept: Mapping[str, Kept]
    form: Form
    stays: tuple[str, ...]
    notes: tuple[str, ...] = ()
    names: Mapping[str, str | None] = {}


def shrink(
    module: nn.Module,
    state: State,
    example: Example,
    *,
    only: str | Sequence[str] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    form: Form | None = None,
    groups: Groups | Layers | None = None,
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
            stays. So does one of every dimension, and what a slice of a table leaves
            out, as larger inputs may read it. A residual branch goes as a whole where
            masks prune all parameters that it alone reads.
        example: What the module is called with: a tensor, a tuple of arguments or a
            dict of keyword arguments.
        only: Globs of submodules, each of which is made smaller by itself, as it is
            called on the example. Default: the whole module.
        buffers: Buffers of the copy by name, such as the batch norm's of
            `sf.modules.call_with_buffers`. Default: the module's own.
        form: "class" for a module of the same class, or an error where there is none;
            "program" for the traced program. Default: of the same class if possible.
        groups: The module's groups or layers, as `sf.shrinking.groups` or `layers` made
            them on this example, whatever has been trained since: with them it is not
            traced again.

    Returns:
        A module of the same class where running it proves that its outputs are equal,
        in eval mode: in float64 on the example, to 1e-10, and on another input of its
        shapes. Lists of modules become shorter by the layers that are pruned, and are
        numbered again. Else, and where a branch goes that is no whole item of a list,
        the traced program with new sizes (`torch.fx.GraphModule`), whose parameters
        have their old names, and which takes other batch sizes and lengths where it
        need not keep more for that. Never a module that differs.

    Raises:
        TypeError: `state` is no State, `groups` are no groups, or `example` is of
            another type.
        ValueError: The module does not run on the example, `torch.export` cannot trace
            it, or it is in train mode and computes otherwise in eval mode. A parameter
            is on the meta device. `groups` are of another module or example. There is
            no smaller module of the class, with form="class". Masks or buffers are as
            `sf.modules.bake` refuses.

    A UserWarning names what is pruned and has to stay, with the reason, and another one
    a config that is not of the smaller model, with the mend if there is one. Where it
    takes more than 10 seconds a line on stderr says what it does.
    `sf.shrinking.smaller` returns more: what was kept, for `sf.shrinking.carry`.
    """
    made = smaller(
        module, state, example, only=only, buffers=buffers, form=form, groups=groups
    )
    if made.stays:
        warnings.warn(
            "shrink could not remove all that is pruned:\n  " + "\n  ".join(made.stays),
            stacklevel=2,
        )
    unset = [note for note in made.notes if KEEPS in note]
    if unset:
        warnings.warn(
            "shrink could not set a config, and a saved model may not load again:\n  "
            + "\n  ".join(unset),
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
    groups: Groups | Layers | None = None,
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
    if not isinstance(groups, Groups | Layers | None):
        raise TypeError(
            "shrink: expected groups as sf.shrinking.groups makes them, got "
            f"{type(groups).__name__}"
        )
    if groups is not None and (only is not None or groups.trace is None):
        raise ValueError(
            "shrink: expected groups of the whole module, without only=, got groups of "
            "submodules; leave groups= out"
        )
    tell = Progress("shrink")
    own = inner_module(module)
    check_loaded("shrink", own, params=state.params, masks=state.masks)
    masked = inner_module(bake(module, state, buffers=buffers))
    masks = dict(flatten(state.masks)[0])
    if only is None:
        return _smaller(masked, masks, example, form, tell, groups)[0]
    exact: dict[str, Tensor] = {}
    kept: dict[str, Any] = {}
    names: dict[str, str | None] = {}
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
        names |= {
            f"{path}.{name}": new and f"{path}.{new}"
            for name, new in made.names.items()
        }
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
        names,
    )


def _smaller(
    masked: nn.Module,
    masks: Mapping[str, Tensor],
    example: Example,
    form: Form | None,
    tell: Progress,
    groups: Groups | Layers | None = None,
    proof: Proof | None = None,
) -> tuple[Smaller, dict[str, Tensor]]:
    # With the parameters in float64 that it holds rounded.
    why = ""
    exact: dict[str, Tensor] = {}
    proof = proof or Proof(masked, example, tell)

    def works(small: nn.Module, precise: Mapping[str, Tensor]) -> bool:
        exact.update(precise)
        return not proof.reason(small, precise)

    still = _traced(masked, example, groups, tell)
    gone = zero_branches(still, masks)
    if gone and form != "program":
        items = items_without(masked, still, gone)
        left = left_in(still, gone, items)
        short = None
        if items and not (left and form is None):
            short = shorter(masked, items, lambda small: works(small, {}))
        if short is not None:
            return _renamed(masks, short, example, form, tell, proof)
        if form is None:
            why = _why_no_class(masked, gone, items, left)
    if form != "program" and not why:
        plan = free(analyse(still, masks, counted=True))
        made = same_class(masked, plan, works, folded_biases(plan, _own(masked)))
        if made.model is None and gone:
            # no class has branches of width 1, as one of each dimension stays
            exact.clear()
            plan = free(_with_whole(plan.analysis, still, gone))
            made = same_class(masked, plan, works, folded_biases(plan, _own(masked)))
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
    return _program(masked, masks, example, still, tell, proof, why)


def _why_no_class(
    masked: nn.Module,
    gone: Sequence[Residual],
    items: Sequence[str],
    left: Sequence[Residual],
) -> str:
    # Why a model without some branches is a program.
    if items and not left:
        shown = ", ".join(map(repr, items))
        return (
            f"a {type(masked).__name__} whose lists lose {shown} has other outputs "
            "than the masked one, or does not run"
        )
    paths = [module_of(one.sum) for one in left or gone]
    where = ", ".join(map(repr, dict.fromkeys(paths)))
    return f"pruned branches are no whole items of a list, in {where}"


def _with_whole(
    analysis: Analysis, program: fx.GraphModule, gone: Sequence[Residual]
) -> Analysis:
    # Branches that are 0 keep their widths.
    for one in gone:
        for leaf in own_leaves(program, one.own):
            for label in analysis.leaves[leaf].labels:
                analysis.log.channels.freeze(label, "its layer is no item of a list")
    return analysis


def _renamed(
    masks: Mapping[str, Tensor],
    short: Shorter,
    example: Example,
    form: Form | None,
    tell: Progress,
    proof: Proof,
) -> tuple[Smaller, dict[str, Tensor]]:
    # What is left of a model with shorter lists, by the names that it had before.
    own = {}
    for name, mask in masks.items():
        new = short.names.get(name, name)
        if new is not None:
            own[new] = mask
    made, exact = _smaller(short.module, own, example, form, tell, proof=proof)
    kept = {
        name: made.kept[new]
        for name, new in short.names.items()
        if new is not None and new in made.kept
    }
    names = {name: new for name, new in short.names.items() if name != new}
    notes = (*short.notes, *made.notes)
    return made._replace(kept=kept, names=names, notes=notes), exact


def _program(
    masked: nn.Module,
    masks: Mapping[str, Tensor],
    example: Example,
    still: fx.GraphModule,
    tell: Progress,
    proof: Proof,
    why: str,
) -> tuple[Smaller, dict[str, Tensor]]:
    before = _own(masked)
    graphs = [still]
    if may_resize(example):
        tell("traces the model with sizes that may change")
        graphs.insert(0, traced(masked, example))
    if has_shuffles(still):
        graphs.append(without_shuffles(graphs[0]))
    cuts = []
    for graph in graphs:
        short = without_branches(graph, zero_branches(graph, masks))
        cuts.append(free(analyse(short, masks, counted=True, equal_parts=False)))
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
    left = named_tensors(plan.analysis.graph)
    names = dict.fromkeys(name for name in named_tensors(still) if name not in left)
    return Smaller(
        small,
        _kept(plan),
        "program",
        tuple(_stays(plan, masks)),
        (why,) if why else (),
        names,
    ), exact


def _own(masked: nn.Module) -> dict[str, Tensor]:
    return dict(masked.named_parameters(remove_duplicate=False))


def _traced(
    masked: nn.Module,
    example: Example,
    groups: Groups | Layers | None,
    tell: Progress,
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
