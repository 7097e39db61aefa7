"""Training goes on with a smaller model: states, masks, averages and moments."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn.modules.params import params_of
from sparsefn.shrinking.cut import taken
from sparsefn.shrinking.smaller import Smaller
from sparsefn.state import State
from sparsefn.tree import Tree, flatten

_SECOND = re.compile(r":\d+$")  # of several tied sets with one first leaf
SomeTree = TypeVar("SomeTree", bound=Tree)


def carry(tree: SomeTree, made: Smaller) -> SomeTree:
    """A tree of the old model's tensors, cut to the shapes of the smaller one.

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

    Whatever lies at a path that ends in a parameter's or buffer's name, and has its old
    shape, loses the entries that the smaller model lost: masks, scores, the moments of
    `sf.optimizers`, averages, what `attach` saves (`sparse.state_dict()`, to be loaded
    after `attach` to the smaller model). All else stays as it is. The params of a State
    become those of the smaller model, which may hold biases that took in constants. An
    average of the weights that a model of its own holds is made smaller by `sf.shrink`
    with the same masks.

    Raises ValueError for a tensor at such a path that has another shape, with its path.
    """
    leaves, rebuild = flatten(tree)
    cut = [
        _cut(path, leaf, made) if isinstance(leaf, Tensor) else leaf
        for path, leaf in leaves.items()
    ]
    carried: Any = rebuild(cut)
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

    It is for `load_state_dict` of the new optimizer, which has to have its parameters
    in the same groups and order. Raises ValueError for a parameter of the optimizer
    that the model has not.
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
