"""LoRA of peft that keeps the zeros of a pruned model."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsefn.engine.processes import check_plain
from sparsefn.tree.chosen import default_where

__all__ = ["keep_zeros"]
__dir__ = __all__.copy

_BUFFER = "sparsefn_kept"  # bool, True where the base may change; peft saves what has "lora_" in its name
_Model = TypeVar("_Model", bound=nn.Module)


def keep_zeros(model: _Model) -> _Model:
    """Make the LoRA layers of a peft model add nothing where the weights beneath them are zero; returns the model.

    >>> base = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))
    >>> _ = base[0].weight.data.copy_(torch.eye(3, 4))
    >>> import peft
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> model = sf.integrations.peft.keep_zeros(peft.get_peft_model(base, config))
    >>> merged = model.merge_and_unload()
    >>> int(merged[0].weight.count_nonzero())
    3

    Call it on what `get_peft_model` or `PeftModel.from_pretrained` returned, before training and before merging: each
    layer then computes x W' + x (mask * scale * B A)', the update that it merges. Training, `merge_and_unload`,
    `merge_adapter`, `unmerge_adapter`, batches of several adapters and adapters that are added later all go through it.
    `save_pretrained` of the merged model has the zeros; that of the peft model saves A and B alone, as ever, so call
    `keep_zeros` again after they are loaded. Dropout is peft's own. Calling it twice changes nothing.

    It changes the layers in place, as peft itself does: each gets a buffer of one byte a weight, which is not saved,
    and the update is a matrix of the weight's size for the time of a forward and backward pass. Layers without a zero
    are left alone. `unload` and `merge_and_unload` leave the base's own layers.

    Raises TypeError for a model without LoRA layers. Raises ValueError where zeros cannot be kept, naming the layer: no
    zero in any of them, as after an `init_lora_weights` that rewrites the base; adapters that are merged already; DoRA
    and other variants; layers other than linear ones and convolutions of one group, such as quantised ones, if they
    have zeros; weights with zeros that train whole, as with `modules_to_save`; DTensors. Needs peft.
    Hu et al. 2021, arXiv 2106.09685; the mask: Munoz et al. 2024, arXiv 2410.03750.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(model, nn.Module):
        raise TypeError(f"keep_zeros: expected a peft model, got {type(model).__name__}")
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}
    if not layers:
        raise TypeError(
            f"keep_zeros: expected a model with LoRA layers, as peft.get_peft_model returns it, got a "
            f"{type(model).__name__} without"
        )
    masks = {path: mask for path, layer in layers.items() if (mask := _mask(path, layer)) is not None}
    if not masks:
        raise ValueError(
            "keep_zeros: expected zeros in the weights beneath the adapters, got none: prune the model before the "
            "adapters are added, with an init_lora_weights that leaves it as it is (True)"
        )
    _check_whole(model, layers)
    for path, mask in masks.items():
        layers[path].register_buffer(_BUFFER, mask, persistent=False)
        layers[path].lora_variant = _Everyone()
    return model


def _refuse(path: str, reason: str) -> NoReturn:
    raise ValueError(f"keep_zeros: cannot keep the zeros of {path!r}: {reason}")


def _mask(path: str, layer: Any) -> Tensor | None:
    """Where the base of a layer is not zero, or None if it has no zeros to keep."""
    from peft.tuners.lora.layer import Linear, _ConvNd

    base, kind = layer.get_base_layer(), type(layer).__name__
    for name, parameter in base.named_parameters():
        check_plain("keep_zeros", f"{path}.{name}", parameter)
    if not any(_has_zeros(base, p) for p in base.parameters()):
        return None
    if not (isinstance(layer, Linear | _ConvNd) and base.weight.is_floating_point()):
        _refuse(path, f"expected LoRA of a linear layer or a convolution, not quantised, got {kind}")
    if layer.merged:
        _refuse(path, "its adapters are merged: call unmerge_adapter() first")
    if not isinstance(layer.lora_variant, _Everyone):
        for adapter, variant in layer.lora_variant.items():
            _refuse(path, f"expected plain LoRA, got the {type(variant).__name__} {adapter!r}")
        for adapter in layer.lora_bias:
            _Kept.init(layer, adapter)
    if getattr(base, "groups", 1) > 1:
        _refuse(path, f"peft cannot merge a convolution of {base.groups} groups")
    mask: Tensor = base.weight.detach() != 0
    return mask


def _has_zeros(base: nn.Module, parameter: Tensor) -> bool:
    """Whether a parameter has zeros that are none by nature; of quantised ones it is not known."""
    if parameter.ndim < 2:
        return False
    zeros = parameter.detach() == 0
    if isinstance(base, nn.Embedding):  # a row of zeros is padding, and peft leaves it at zero
        zeros = zeros & ~zeros.all(1, keepdim=True)
    return bool(zeros.any()) or not parameter.is_floating_point()


def _check_whole(model: nn.Module, layers: dict[str, Any]) -> None:
    """Raise where a weight with zeros trains as it is."""
    adapters = {
        id(p) for layer in layers.values() for n, p in layer.named_parameters() if not n.startswith("base_layer")
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in adapters and default_where(name, parameter):
            zeros = int((parameter.detach() == 0).sum())
            if 0 < zeros < parameter.numel():
                _refuse(name, f"it trains whole, and has {zeros:,}: freeze it, or leave it out of modules_to_save")


class _Everyone(dict[str, Any]):
    """The variants of a layer by adapter, as peft asks for them: the same for all, those of later included."""

    def __contains__(self, adapter: object) -> bool:
        return True

    def __missing__(self, adapter: str) -> type[_Kept]:
        return _Kept

    def get(self, adapter: str, default: Any = None) -> Any:
        return _Kept

    def __setitem__(self, adapter: str, variant: Any) -> None:
        raise ValueError(
            f"keep_zeros: expected adapters of plain LoRA, got the {type(variant).__name__} {adapter!r}: the zeros of "
            "the layer would be lost"
        )


class _Kept:
    """What peft asks a variant of LoRA for; a layer's update is masked in all of it."""

    @staticmethod
    def supports_lora_conversion() -> bool:
        return False

    @staticmethod
    def init(module: Any, adapter_name: str, **options: Any) -> None:
        if module.lora_bias[adapter_name] and module.get_base_layer().bias is None:
            raise ValueError(f"keep_zeros: expected a base with a bias for lora_bias in {adapter_name!r}, got none")

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + _merged(module, active_adapter, orig_weight)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += _merged(module, active_adapter, orig_weight)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight.data - _merged(module, active_adapter, orig_weight)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **options: Any) -> Tensor:
        update, x = _update(module, active_adapter), module.lora_dropout[active_adapter](x)
        bias = module.lora_B[active_adapter].bias
        bias = None if bias is None else bias * module.scaling[active_adapter]
        if update.ndim == 2:
            return result + functional.linear(x, update.T if module.fan_in_fan_out else update, bias)
        added: Tensor = module.get_base_layer()._conv_forward(x, update, bias)
        return result + added


def _update(module: Any, adapter: str) -> Tensor:
    """What an adapter adds to the weight of its layer."""
    kept: Tensor = getattr(module, _BUFFER)
    change: Tensor = torch.where(kept, module.get_delta_weight(adapter), 0.0)
    return change


def _merged(module: Any, adapter: str, weight: Tensor) -> Tensor:
    """The update in the dtype of the weight; RuntimeError where the weight has zeros in other places than before."""
    if bool((weight.detach() != 0)[~getattr(module, _BUFFER)].any()):
        raise RuntimeError("merge: a layer's base has other zeros than when keep_zeros was called: call it again first")
    change: Tensor = _update(module, adapter).detach()
    return change.to(weight.dtype)
