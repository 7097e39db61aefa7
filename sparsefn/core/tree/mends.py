"""What to write in place of something that is no tree of tensors with values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

_PARAMS = "; write dict(module.named_parameters())"
# What to write in the place of a module, or of what its methods return.
_MENDS = {
    "params": _PARAMS,
    "the new params": _PARAMS,
    "parameters": _PARAMS,
    "grads": "; write {name: p.grad for name, p in module.named_parameters()}",
    "state": "; write algorithm.init(dict(module.named_parameters()))",
}


def mend_of(what: str, value: object) -> str:
    """What to write in place of a module, or of what its methods return.

    It is "" for anything else.

    >>> mend_of("params", torch.nn.Linear(1, 1)), mend_of("params", {})
    ('; write dict(module.named_parameters())', '')
    """
    return _MENDS.get(what, "") if _is_of_module(value) else ""


def no_tree(what: str, value: object) -> str:
    """A sentence on what cannot be a tree of tensors, such as a module; "" for a tree.

    >>> no_tree("params", torch.nn.Linear(1, 1))
    'expected params to be a tree of tensors, got Linear; write
    dict(module.named_parameters())'
    >>> no_tree("grads", 3)
    'expected grads to be a tree of tensors, got int; write update(state, grads, step)'
    """
    if isinstance(value, int):
        mend = "; write update(state, grads, step)" if what == "grads" else ""
    elif _is_of_module(value):
        mend = mend_of(what, value)
    else:
        return ""
    kind = "(name, tensor) pairs" if _is_pairs(value) else type(value).__name__
    return f"expected {what} to be a tree of tensors, got {kind}{mend}"


def check_tree(what: str, value: object) -> None:
    """Raise TypeError for what cannot be a tree of tensors.

    >>> check_tree("params", {"w": torch.ones(1)})
    """
    if error := no_tree(what, value):
        raise TypeError(error)


def warn_without_names(params: object) -> None:
    """Warn of a list of a module's parameters, as names tell which leaves stay dense by
    default.

    >>> warn_without_names(dict(torch.nn.Linear(1, 1).named_parameters()))
    """
    if (
        is_compiling()
        or not isinstance(params, list | tuple)
        or not params
        or hasattr(params, "_fields")
    ):
        return
    if all(isinstance(leaf, nn.Parameter) for leaf in params):
        warnings.warn(
            "init: a list of parameters has no names, which tell embeddings, norms "
            "and layers apart" + _PARAMS,
            UserWarning,
            stacklevel=5,
        )


def check_not_lazy(what: str, named: Iterable[tuple[str, object]]) -> None:
    """Raise ValueError for a parameter or buffer of a lazy layer that has no shape yet.

    >>> check_not_lazy("params", torch.nn.LazyLinear(2).named_parameters())
    Traceback (most recent call last):
        ...
    ValueError: expected params that have shapes, but lazy layers have not made
    'weight', 'bias' yet: run the module on a batch first
    """
    lazy = [
        repr(name)
        for name, value in named
        if isinstance(value, UninitializedParameter | UninitializedBuffer)
    ]
    if lazy:
        raise ValueError(
            f"expected {what} that have shapes, but lazy layers have not made "
            f"{', '.join(lazy)} yet: run the module on a batch first"
        )


def check_not_meta(call: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a tensor of the meta device, which has no values.

    >>> check_not_meta(
    ...     "inputs", torch.nn.Linear(1, 1, device="meta").named_parameters()
    ... )
    Traceback (most recent call last):
        ...
    ValueError: inputs: expected tensors with values, but 'weight' is on the meta
    device: load the weights of the model first, as model.to_empty(device="cpu") and
    then model.load_state_dict(saved) do
    """
    for name, value in named:
        if value.is_meta:
            raise ValueError(
                f"{call}: expected tensors with values, but {name!r} is on the meta "
                "device: load the weights of the model first, as "
                'model.to_empty(device="cpu") and then model.load_state_dict(saved) do'
            )


def _is_of_module(value: object) -> bool:
    return isinstance(value, nn.Module | Iterator | Optimizer) or _is_pairs(value)


def _is_pairs(value: object) -> bool:
    # As list(module.named_parameters()) has them.
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(
        type(pair) is tuple and len(pair) == 2 and isinstance(pair[0], str)
        for pair in value
    )
