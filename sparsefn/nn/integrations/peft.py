"""LoRA of peft that keeps the zeros of a pruned model."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsefn._engine.processes import check_plain

__all__ = ["keep_zeros"]
__dir__ = __all__.copy

# bool, True where the base may change; peft saves what has "lora_" in its name
_BUFFER = "sparsefn_kept"
# starts of init_lora_weights that change the base
_REWRITES = ("pissa", "olora", "corda", "loftq", "lora_ga")
_Model = TypeVar("_Model", bound=nn.Module)


def keep_zeros(model: _Model) -> _Model:
    """Make LoRA layers of a peft model add nothing where the weights beneath are zero.

    >>> base = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))
    >>> _ = base[0].weight.data.copy_(torch.eye(3, 4))
    >>> import peft
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> model = sf.integrations.peft.keep_zeros(peft.get_peft_model(base, config))
    >>> merged = model.merge_and_unload()
    >>> int(merged[0].weight.count_nonzero())
    3

    Args:
        model: What `get_peft_model` or `PeftModel.from_pretrained` returned, before
            training and before merging. Layers with a zero are changed in place, as
            peft itself does: each gets a buffer of one byte a weight, which is not
            saved.

    Returns:
        The model itself. Calling it twice changes nothing.

    Raises:
        TypeError: The model has no LoRA layers.
        ValueError: Zeros cannot be kept; the text names what loses them: no zero
            beneath any adapter; an `init_lora_weights` that rewrites the base; adapters
            that are merged already; DoRA and other variants; layers other than linear
            ones and convolutions of one group, such as quantised ones, and
            `target_parameters`, such as experts in one leaf, if they have zeros;
            weights of which one in a hundred or more are zero that train whole, or have
            copies in `modules_to_save`; DTensors. Adding such an adapter later, which
            leaves none of it, and a merge raise it, too.
        RuntimeError: In a merge, the base has other zeros than when `keep_zeros` was
            called.
        ModuleNotFoundError: peft is not installed.

    Each layer then computes x W' + x (mask * scale * B A)', the update that it merges.
    Training, `merge_and_unload`, `merge_adapter`, `unmerge_adapter`, batches of several
    adapters and the peft model's `add_adapter`, `load_adapter` and
    `add_weighted_adapter` all go through it; after transformers' own `add_adapter` call
    it again. What is merged has exactly the zeros of the base: where a weight and its
    update cancel out, it is the smallest number of its dtype. `save_pretrained` of the
    merged model saves the zeros; `save_pretrained` of the peft model saves A and B
    alone, so call `keep_zeros` again after they are loaded. `unload` and
    `merge_and_unload` leave the base's own layers. Dropout is peft's own. The update is
    a matrix of the weight's size for the time of a forward and backward pass.

    Hu et al. 2021, arXiv 2106.09685; the mask: Munoz et al. 2024, arXiv 2410.03750.
    """
    from peft.tuners.tuners_utils import BaseTuner

    layers = _layers(model)
    masks = {
        path: mask
        for path, layer in layers.items()
        if (mask := _mask(path, layer)) is not None
    }
    _check_whole(model)
    if not masks:
        raise ValueError(
            "keep_zeros: expected zeros beneath the adapters, got none: prune before "
            "they are added"
        )
    for path, mask in masks.items():
        layers[path].register_buffer(_BUFFER, mask, persistent=False)
        layers[path].lora_variant = _Everyone()
    for tuner in model.modules():
        # partials, of which copies and pickles of the model have their own
        if isinstance(tuner, BaseTuner):
            tuner.inject_adapter, tuner._check_merge_allowed = (
                partial(_inject, tuner),
                partial(_check_merge, tuner),
            )
    return model


def _layers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by path.

    Raises for adapters whose start fills zeros of the base.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(model, nn.Module):
        raise TypeError(
            f"keep_zeros: expected a peft model, got {type(model).__name__}"
        )
    layers = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    if not layers:
        raise TypeError(
            "keep_zeros: expected LoRA of peft.get_peft_model, got a "
            f"{type(model).__name__} without it"
        )
    for config in getattr(model, "peft_config", {}).values():
        start = str(getattr(config, "init_lora_weights", True))
        if start.lower().startswith(_REWRITES):
            raise ValueError(
                "keep_zeros: expected init_lora_weights that keep zeros, such as "
                f"True, got {start!r}"
            )
    return layers


def _inject(
    tuner: Any,
    model: nn.Module,
    adapter: str,
    *args: Any,
    **options: Any,
) -> None:
    """Add an adapter as peft does and mask it on all its layers, or leave none of it
    where zeros would be lost.
    """
    _layers(tuner)  # before the base is changed
    type(tuner).inject_adapter(tuner, model, adapter, *args, **options)
    try:
        keep_zeros(tuner)
    except ValueError:
        tuner.delete_adapter(adapter)
        raise


def _check_merge(tuner: Any) -> None:
    """Raise before a merge that would fill zeros which the masks do not know of."""
    type(tuner)._check_merge_allowed(tuner)
    _check_whole(tuner)
    for path, layer in _layers(tuner).items():
        if layer.merged or (mask := _mask(path, layer)) is None:
            continue
        kept = getattr(layer, _BUFFER, None)
        if _many(~mask) if kept is None else not torch.equal(kept, mask):
            raise RuntimeError(
                "merge: expected the zeros that keep_zeros saw, got others in "
                f"{path!r}: call it again"
            )


def _refuse(path: str, reason: str) -> NoReturn:
    raise ValueError(f"keep_zeros: cannot keep the zeros of {path!r}: {reason}")


def _mask(path: str, layer: Any) -> Tensor | None:
    """Where the base of a layer is not zero, or None if it has no zeros to keep, and
    had none.
    """
    from peft.tuners.lora.layer import Linear, _ConvNd

    base = layer.get_base_layer()
    # of `target_parameters`; other parameters of the base do not change
    target = getattr(layer, "parameter_name", None)
    if target is None:
        adapted = dict(base.named_parameters())
    else:
        adapted = {target: layer.get_param()}
    for name, parameter in adapted.items():
        check_plain("keep_zeros", f"{path}.{name}", parameter)
    if layer.merged:
        _refuse(path, "its adapters are merged: call unmerge_adapter() first")
    if not (
        hasattr(layer, _BUFFER) or any(_has_zeros(base, p) for p in adapted.values())
    ):
        return None
    if target is not None:
        _refuse(
            f"{path}.{target}",
            "target_parameters adapts it by an update that is not masked: leave it "
            "out of target_parameters, or prune it after the adapters are merged",
        )
    if not (isinstance(layer, Linear | _ConvNd) and base.weight.is_floating_point()):
        got = (
            f"{type(layer).__module__}.{type(layer).__name__} of "
            f"{next(base.parameters()).dtype}"
        )
        _refuse(
            path,
            "expected LoRA of a linear layer or a convolution, not quantised, got "
            f"{got}",
        )
    for adapter, variant in layer.lora_variant.items():
        _refuse(
            path, f"expected plain LoRA, got the {type(variant).__name__} {adapter!r}"
        )
    for adapter, bias in layer.lora_bias.items():
        if bias and base.bias is None:
            _refuse(
                path,
                f"expected a base with a bias for the lora_bias of {adapter!r}, got "
                "none",
            )
    if getattr(base, "groups", 1) > 1:
        _refuse(path, f"peft cannot merge a convolution of {base.groups} groups")
    mask: Tensor = base.weight.detach() != 0
    return mask


def _has_zeros(base: nn.Module, parameter: Tensor) -> bool:
    """Whether a parameter has zeros that are none by nature.

    Of quantised ones it is not known.
    """
    zeros = parameter.detach() == 0
    # a row of zeros is padding, and peft leaves it at zero
    if isinstance(base, nn.Embedding):
        zeros = zeros & ~zeros.all(1, keepdim=True)
    return parameter.ndim > 1 and (
        bool(zeros.any()) or not parameter.is_floating_point()
    )


def _many(zeros: Tensor) -> bool:
    """Whether zeros come from pruning: fewer than one in a hundred come from rounding,
    and a tensor of zeros alone is an initial value.
    """
    return 0.01 * zeros.numel() <= int(zeros.sum()) < zeros.numel()


def _check_whole(model: nn.Module) -> None:
    """Raise where a pruned weight itself trains, or where adapters have copies of it in
    `modules_to_save`, trained or loaded.
    """
    from peft.utils import ModulesToSaveWrapper

    wrappers = [
        m
        for m in model.modules()
        if isinstance(m, ModulesToSaveWrapper) and m.modules_to_save
    ]
    copied = {
        id(p) for wrapper in wrappers for p in wrapper.original_module.parameters()
    }
    for name, p in model.named_parameters():
        whole = id(p) in copied or (p.requires_grad and "lora_" not in name)
        if whole and p.ndim > 1 and _many(zeros := p.detach() == 0):
            _refuse(
                name,
                f"it trains whole, with {int(zeros.sum()):,}: freeze it or leave it "
                "out of modules_to_save",
            )


class _Everyone(dict[str, Any]):
    """The variants of a layer by adapter, as peft asks for them: the same for all
    adapters, later ones included.
    """

    def __contains__(self, adapter: object) -> bool:
        return True

    def __missing__(self, adapter: str) -> type[_Kept]:
        return _Kept

    def get(self, adapter: str, default: Any = None) -> Any:
        return _Kept


class _Kept:
    """What peft asks a variant of LoRA for; a layer's update is masked in all of it."""

    @staticmethod
    def supports_lora_conversion() -> bool:
        return False

    @staticmethod
    def init(module: Any, adapter_name: str, **options: Any) -> None:
        pass  # `_mask` refuses later, when peft can delete the adapter

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return _sum(module, orig_weight, _update(module, active_adapter))

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data.copy_(
            _sum(module, orig_weight, _update(module, active_adapter))
        )

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return _sum(module, orig_weight, -_update(module, active_adapter))

    @staticmethod
    def forward(
        module: Any,
        active_adapter: str,
        x: Tensor,
        result: Tensor,
        **options: Any,
    ) -> Tensor:
        update = _update(module, active_adapter)
        x = module.lora_dropout[active_adapter](x)
        bias = module.lora_B[active_adapter].bias
        if bias is not None:
            bias = bias * module.scaling[active_adapter]
        if update.ndim == 2:
            return result + functional.linear(
                x, update.T if module.fan_in_fan_out else update, bias
            )
        added: Tensor = module.get_base_layer()._conv_forward(x, update, bias)
        return result + added


def _update(module: Any, adapter: str) -> Tensor:
    """What an adapter adds to the weight of its layer."""
    kept: Tensor = getattr(module, _BUFFER)
    change: Tensor = torch.where(kept, module.get_delta_weight(adapter), 0.0)
    return change


def _sum(module: Any, weight: Tensor, update: Tensor) -> Tensor:
    """A weight and its update; where they cancel out, the smallest number, so that only
    pruned weights are zero.
    """
    total = weight.detach() + update.detach().to(weight.dtype)
    return torch.where(
        getattr(module, _BUFFER) & (total == 0), torch.finfo(total.dtype).tiny, total
    )
