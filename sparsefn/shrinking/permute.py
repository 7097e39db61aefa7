"""A model with its channels in another order: the same outputs, and N:M masks that keep
more.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparsefn.algorithms import static
from sparsefn.core import random
from sparsefn.core.tree import flatten
from sparsefn.core.tree.where import default_where
from sparsefn.masks import permutation, topk_mask
from sparsefn.masks.patterns import Pattern, nm
from sparsefn.nn.modules import inner_module, params_of
from sparsefn.shrinking.channels import Ids
from sparsefn.shrinking.groups import Group, Groups
from sparsefn.shrinking.groups import groups as all_groups
from sparsefn.shrinking.plan import taken
from sparsefn.shrinking.proof import Progress, Proof, check_loaded
from sparsefn.shrinking.shrink import Kept
from sparsefn.shrinking.trace import Example
from sparsefn.typing import Tree, Where


class Permuted(NamedTuple):
    """A model in another order of channels, and where its tensors' entries came from.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)).eval()
    >>> made = sf.shrinking.permute(net, torch.ones(1, 2), 2, 4)
    >>> made.after >= made.before, made.stays
    (True, ())

    Attributes:
        module: A copy of the model, in the new order.
        kept: Of every parameter and buffer by name: its `shape`, and along each
            dimension the `indices` of its entries in the model, None for the order that
            they had. `sf.shrinking.carry` reads it.
        before: The sum of |w|, or of scores, that N:M masks of the model keep.
        after: The same sum in the new order.
        stays: Groups that could gain and keep their order, with the reasons.
        names: New names of tensors, as in `Smaller`: none.
    """

    module: nn.Module
    kept: Mapping[str, Kept]
    before: float
    after: float
    stays: tuple[str, ...]
    names: Mapping[str, str | None] = {}


def permute(
    model: nn.Module,
    example: Example,
    n: int,
    m: int,
    *,
    where: Where = default_where,
    scores: Tree = None,
    groups: Groups | None = None,
    escapes: int = 0,
    rounds: int | None = None,
    key: Tensor | None = None,
) -> Permuted:
    """Reorder the channels of a model so that its N:M masks keep more.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)
    ... ).eval()
    >>> x = torch.ones(1, 16)
    >>> made = sf.shrinking.permute(net, x, 2, 4)
    >>> torch.allclose(made.module(x), net(x), atol=1e-5), made.after > made.before
    (True, True)

    Args:
        model: The module, which does not change.
        example: What the module is called with, as for `sf.shrink`.
        n: How many of every `m` consecutive inputs of a weight a mask keeps.
        m: The size of a group of inputs.
        where: The weights that get such masks, as for algorithms. A weight whose number
            of inputs `m` does not divide gets none.
        scores: Scores that masks go by, such as Wanda's: a tree of the structure of the
            params, from 0 up. Default: |w|.
        groups: The model's groups, as `sf.shrinking.groups` made them on this example.
            Default: made here with `counted=True`, so that widths of residual streams
            are among them.
        escapes: As for `sf.permutation.channels`.
        rounds: As for `sf.permutation.channels`.
        key: As for `sf.permutation.channels`; each group draws with a key of its own.

    Returns:
        A copy of the model in the new order, with the model's outputs. It is run on the
        example in float64, where they have to be equal to 1e-10, and on another input
        of its shapes. A group whose new order would change them keeps its order.

    Raises:
        TypeError: `example` is of another type, or a number is not an int.
        ValueError: The module does not run on the example, `torch.export` cannot trace
            it, or it is in train mode and computes otherwise in eval mode. A number is
            out of range, `m` divides the inputs of no weight, or a weight is NaN,
            infinite or on the meta device. `where` is as algorithms refuse. `scores`
            have another structure or shape than the params.

    A channel of a group lies in several tensors, and has one order in all of them: it
    is chosen for all weights together that read the group. The order of a weight's
    outputs does not matter to its own mask, so that groups do not interfere.

    Pool & Yu 2021, "Channel permutations for N:M sparsity", for models of any form.
    """
    tell = Progress("permute")
    own = inner_module(model)
    check_loaded("permute", own)
    found = groups or all_groups(own, example, counted=True)
    pattern = nm(n, m, axis=1)
    masks = flatten(static(0.0, where=where).init(params_of(own)).masks)[0]
    values = _values(own, scores)
    weights = {
        path: values[path]
        for path, mask in masks.items()
        if mask.ndim > 1 and mask.shape[1] % m == 0
    }
    if not weights:
        inputs = {path: mask.shape[1] for path, mask in masks.items() if mask.ndim > 1}
        raise ValueError(
            f"permute: expected a weight whose number of inputs {m} divides, got the "
            f"numbers {inputs}: choose another m, or other leaves by where="
        )
    orders = {}
    for i, group in enumerate(found):
        columns = _columns(group, weights, m)
        if columns is None:
            continue
        tell(f"orders group {i} of {len(found)}")
        own_key = None if key is None else random.fold_in(key, i)
        best = permutation.channels(
            columns, n, m, escapes=escapes, rounds=rounds, key=own_key
        )
        order = best.order.cpu().numpy()
        if _gain(group, order, weights, pattern) > 0:
            orders[i] = order
    proof = Proof(own, example, tell)
    module, kept = _reordered(own, found, orders)
    stays: dict[int, str] = {}
    if proof.reason(module):
        stays = _unequal(own, found, orders, proof)
        orders = {i: order for i, order in orders.items() if i not in stays}
        module, kept = _reordered(own, found, orders)
    new = [taken(x, kept[path].indices) for path, x in weights.items()]
    return Permuted(
        module,
        kept,
        before=math.fsum(_kept_sum(x, pattern) for x in weights.values()),
        after=math.fsum(_kept_sum(x, pattern) for x in new),
        stays=tuple(stays.values()),
    )


def _values(model: nn.Module, scores: Tree) -> dict[str, Tensor]:
    # What masks go by, by path.
    params = params_of(model)
    if scores is None:
        return params
    values = flatten(scores)[0]
    for path, param in params.items():
        got = values.get(path)
        if got is None or got.shape != param.shape:
            said = "none" if got is None else tuple(got.shape)
            raise ValueError(
                "permute: expected scores of the structure of the params, with shape "
                f"{tuple(param.shape)} at {path!r}, got {said}"
            )
    return values


def _columns(group: Group, weights: Mapping[str, Tensor], m: int) -> Tensor | None:
    """The weights that read a group, (rows, units); None if there are none.

    Of a weight whose inputs are the units over and over each turn is a part of the
    rows. A turn that starts inside of a group of `m` inputs is left out.
    """
    size = group.size
    parts = []
    for leaf, dim, own in group.members:
        if leaf not in weights or dim != 1 or size % m:
            continue
        rows = weights[leaf].detach().movedim(1, -1).flatten(0, -2)
        for start in np.flatnonzero(own == 0):
            turn = slice(start, start + size)
            if start % m == 0 and np.array_equal(own[turn], np.arange(size)):
                parts.append(rows[:, turn])
    if not parts:
        return None
    return torch.cat(parts)


def _gain(
    group: Group, order: Ids, weights: Mapping[str, Tensor], pattern: Pattern
) -> float:
    """How much more masks keep of all weights that read the group."""
    gain = []
    for leaf, dim, own in group.members:
        if leaf in weights and dim == 1:
            weight = weights[leaf]
            moved = taken(weight, (None, torch.from_numpy(_moved(own, order))))
            gain += [_kept_sum(moved, pattern), -_kept_sum(weight, pattern)]
    return math.fsum(gain)


def _kept_sum(weight: Tensor, pattern: Pattern) -> float:
    size = weight.detach().abs()
    return float(size[topk_mask(size, None, pattern=pattern)].double().sum())


def _unequal(
    model: nn.Module, found: Groups, orders: Mapping[int, Ids], proof: Proof
) -> dict[int, str]:
    """The groups whose order would change the outputs, with the reasons."""
    equal: dict[int, Ids] = {}
    stays = {}
    for i, order in orders.items():
        module, _ = _reordered(model, found, equal | {i: order})
        why = proof.reason(module).replace("the masked one", "in its own order")
        if why:
            stays[i] = f"group {i}, {found[i]}: in another order the model {why}"
        else:
            equal[i] = order
    return stays


def _moved(own: Ids, order: Ids) -> Ids:
    """For each index of a dimension the one whose entries come there, as units change
    places; indices of no unit stay.
    """
    places = np.arange(len(own))
    at = [np.flatnonzero(own == unit) for unit in range(len(order))]
    for unit, other in enumerate(order):
        places[at[unit]] = at[other]
    return places


def _reordered(
    model: nn.Module, found: Groups, orders: Mapping[int, Ids]
) -> tuple[nn.Module, dict[str, Kept]]:
    """A copy of a model in another order, and where its entries came from."""
    made = copy.deepcopy(model)
    tensors = {
        **dict(made.named_parameters(remove_duplicate=False)),
        **dict(made.named_buffers(remove_duplicate=False)),
    }
    # by id, as a tensor may have several names
    moved: dict[int, dict[int, Ids]] = defaultdict(dict)
    for i, order in orders.items():
        for leaf, dim, own in found[i].members:
            if leaf not in tensors:  # a constant of the code, which keeps its order
                continue
            dims = moved[id(tensors[leaf])]
            places = _moved(own, order)
            dims[dim] = dims[dim][places] if dim in dims else places
    kept = {}
    for name, x in tensors.items():
        dims = moved[id(x)]
        indices = [
            torch.from_numpy(dims[d]) if d in dims else None for d in range(x.ndim)
        ]
        kept[name] = Kept(tuple(x.shape), tuple(indices))
    first = {id(x): name for name, x in reversed(tensors.items())}
    with torch.no_grad():
        for name in first.values():
            tensors[name].copy_(taken(tensors[name], kept[name].indices))
    return made, kept
