"""Params and masks of modules that torch's own pruning tools pruned."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sparsefn.core.state import everywhere
from sparsefn.nn.checkpoint.states import as_dense, check_values
from sparsefn.nn.modules.calls import check_shape
from sparsefn.nn.modules.wrappers import tensors_by_name, without_wrappers

_AO = "parametrizations"


def from_pruned(
    module: nn.Module, checkpoint: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Params and masks of a module that torch's own tools pruned, or of its checkpoint.

    >>> from torch.nn.utils import prune
    >>> layer = prune.l1_unstructured(
    ...     torch.nn.Linear(2, 1, bias=False), "weight", amount=1
    ... )
    >>> params, masks = sf.modules.from_pruned(layer)
    >>> list(params), masks["weight"].sum()
    (['weight'], tensor(1))
    >>> params, masks = sf.modules.from_pruned(
    ...     torch.nn.Linear(2, 1, bias=False), layer.state_dict()
    ... )
    >>> masks["weight"].sum()
    tensor(1)

    Args:
        module: The module, pruned or not. It tells which names are params.
        checkpoint: Dict of tensors by name, from which all values come. Other keys are
            ignored. `state_dict` of a module that torch.ao pruned lacks the masks,
            which are buffers: add `named_buffers`. Default: the values of the module.

    Returns:
        Dict of params and dict of masks, by the names of the module without pruning.
        Params are unmasked (`*_orig`, or the originals of the parametrizations that a
        sparsifier of torch.ao attaches in `prepare`); a parameter that is not pruned
        has the 0-d mask True.

    Raises:
        TypeError: Names are no strings, weights are not floating-point, or a value is
            no dense tensor.
        ValueError: A mask holds anything but 0 and 1, the checkpoint lacks a param or a
            mask or has it in another shape, or torch.ao prunes a weight by rows, or the
            weight has another parametrization besides.

    The tools are `torch.nn.utils.prune` and `torch.ao.pruning`.
    """
    own = tensors_by_name(module)
    buffers = tensors_by_name(module, "buffers")
    _check_parametrizations(module)
    if checkpoint is None:
        tensors = {**own, **buffers}
    else:
        tensors = without_wrappers(module, checkpoint)
    params: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for path, param in own.items():
        name = _plain_name(path, buffers)
        key, mask_key = _keys(name, tensors)
        weight = _fitting("a tensor", key, tensors[key], param)
        if param.is_floating_point() and not weight.is_floating_point():
            raise TypeError(
                f"expected floating-point weights at {key!r}, got {weight.dtype}"
            )
        params[name] = weight.clone()
        masks[name] = everywhere(params[name])
        if mask_key:
            mask = check_values(
                "the masks",
                mask_key,
                _fitting("a mask", mask_key, tensors[mask_key], param),
            )
            if not bool(((mask == 0) | (mask == 1)).all()):
                raise ValueError(f"expected a mask of zeros and ones at {mask_key!r}")
            masks[name] = mask != 0
    return params, masks


def _fitting(what: str, key: str, found: object, like: Tensor) -> Tensor:
    # Checked before any memory is asked for: an expanded tensor of another shape may
    # stand for any amount.
    tensor = as_dense("the checkpoint", key, found)
    check_shape(what, key, tensor, like)
    return tensor


def _names(name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    # The names under which the two tools keep a weight and its mask.
    head, dot, leaf = name.rpartition(".")
    inside = f"{head}{dot}{_AO}.{leaf}."
    return (name + "_orig", name + "_mask"), (inside + "original", inside + "0.mask")


def _plain_name(path: str, buffers: Mapping[str, Tensor]) -> str:
    head, _, leaf = path.removesuffix(".original").rpartition(".")
    owner = head.removesuffix(_AO)
    for name in (path.removesuffix("_orig"), owner + leaf):
        if any(path == weight and mask in buffers for weight, mask in _names(name)):
            return name
    return path


def _keys(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    (orig, mask), (original, fake) = _names(name)
    for key, mask_key in ((orig, mask), (original, fake)):
        if key in tensors and mask_key in tensors:
            return key, mask_key
    if name in tensors:
        return name, ""
    if original in tensors:
        raise ValueError(
            f"expected a checkpoint with the mask {fake!r} beside {original!r}; "
            "torch.ao leaves masks out of state_dict: add them as "
            "{**model.state_dict(), **dict(model.named_buffers())}"
        )
    raise ValueError(f"expected a checkpoint with {name!r}, or {orig!r} and {mask!r}")


def _check_parametrizations(module: nn.Module) -> None:
    # By name, as importing torch.ao takes a second; modules that it pruned have
    # imported it.
    for path, layer in module.named_modules():
        for name, parts in (
            layer.parametrizations.items() if is_parametrized(layer) else ()
        ):
            kinds = [type(part).__name__ for part in parts]
            at = f"{path}.{name}".lstrip(".")
            if "FakeStructuredSparsity" in kinds:
                raise ValueError(
                    f"expected a mask for each weight at {at!r}, got "
                    "FakeStructuredSparsity, which prunes rows; take the model that "
                    "pruner.prune() gives"
                )
            if "FakeSparsity" in kinds and len(kinds) > 1:
                raise ValueError(
                    f"expected FakeSparsity to be the one parametrization of {at!r}, "
                    f"got {', '.join(kinds)}; take the others off with "
                    "torch.nn.utils.parametrize.remove_parametrizations before "
                    "sparsifier.prepare"
                )
