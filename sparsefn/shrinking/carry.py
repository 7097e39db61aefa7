"""Training goes on with a smaller model: what belongs to the tensors of the old model,
cut to the smaller ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import optree
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn.core.state import State
from sparsefn.core.tree import flatten
from sparsefn.nn.modules import params_of
from sparsefn.shrinking.permute import Permuted
from sparsefn.shrinking.plan import taken
from sparsefn.shrinking.shrink import Smaller

_SET_NUMBER = re.compile(r":\d+$")  # of tied sets that have one first leaf
Tree = TypeVar("Tree")  # any optree pytree of tensors


def carry(tree: Tree, made: Smaller | Permuted) -> Tree:
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
        made: The smaller model, of `sf.shrinking.smaller`, or the model in another
            order, of `sf.shrinking.permute`.

    Returns:
        A tree of the same structure. Each tensor at a path that ends in a parameter's
        or buffer's name loses the entries that the smaller model lost; all else stays
        as it is. The params of a State become the params of the smaller model, which
        may hold biases that took in constants. Of a dict by such names, tensors of
        layers that went are left out, and others have the names of the smaller model.

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
    if made.names:
        carried = _with_names(carried, made.names)
    if isinstance(tree, State):
        own = params_of(made.module)
        leaves, rebuild = flatten(carried.params)
        carried = carried._replace(params=rebuild([own[path] for path in leaves]))
    return carried  # type: ignore[no-any-return]


def _with_names(tree: Any, names: Mapping[str, str | None]) -> Any:
    # A tree whose dicts by old names of tensors have the new names.
    def renamed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        made = {}
        for key, value in part.items():
            new = names.get(key, key)
            if new is not None:
                made[new] = _with_names(value, names)
        return made

    return optree.tree_map(
        renamed, tree, is_leaf=lambda part: isinstance(part, dict), none_is_leaf=True
    )


def carry_optimizer(
    optimizer: Optimizer, model: nn.Module, made: Smaller | Permuted
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
        made: The smaller model, of `sf.shrinking.smaller`, or the model in another
            order, of `sf.shrinking.permute`.

    Returns:
        A dict for `load_state_dict` of the new optimizer, which has to have its
        parameters in the same groups and order, without parameters of layers that went.

    Raises:
        ValueError: The optimizer has a parameter that the model has not, or state of
            another shape than its parameter's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    saved = optimizer.state_dict()
    gone = {name for name, new in made.names.items() if new is None}
    stays = [i for i, x in enumerate(order) if names.get(id(x)) not in gone]
    place = {i: at for at, i in enumerate(stays)}
    state = {}
    for i, some in saved["state"].items():
        if id(order[i]) not in names:
            raise ValueError(
                "carry_optimizer: expected an optimizer of the model's parameters, "
                f"but its parameter {i} of shape {tuple(order[i].shape)} is none of "
                "them"
            )
        if i in place:
            name = names[id(order[i])]
            state[place[i]] = {
                key: _cut(name, x, made) if isinstance(x, Tensor) else x
                for key, x in some.items()
            }
    param_groups = [
        {**group, "params": [place[i] for i in group["params"] if i in place]}
        for group in saved["param_groups"]
    ]
    return {"state": state, "param_groups": param_groups}


def _cut(path: str, x: Tensor, made: Smaller | Permuted) -> Tensor:
    parts = path.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    known = {**made.names, **made.kept}
    name = next((end for end in ends if _SET_NUMBER.sub("", end) in known), None)
    if name is None or not x.ndim or _SET_NUMBER.sub("", name) not in made.kept:
        return x.clone()
    old, indices = made.kept[_SET_NUMBER.sub("", name)]
    numbered = _SET_NUMBER.search(name) is not None
    if tuple(x.shape) != old or numbered:
        text = (
            f"carry: expected a tensor of the old shape {old} at {path!r}, got "
            f"{tuple(x.shape)}"
        )
        if x.ndim == 1 and (numbered or len(old) > 1):
            text += (
                "; a score of tied units is not cut: start its algorithm again, from "
                "the params of the smaller model"
            )
        raise ValueError(text)
    return taken(x, indices)
