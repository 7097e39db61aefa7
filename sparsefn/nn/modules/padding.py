"""Padding in the ids that a language model is called with, as its config tells it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from sparsefn.nn.modules.wrappers import inner_module

_INTEGERS = (torch.int32, torch.int64)


def padding_in(model: Any, batches: Iterable[object]) -> str:
    """Words on the padding at the ends of the rows of ids, "" where there is none or
    the model does not say.

    >>> class Config:
    ...     pad_token_id = 0
    >>> model = torch.nn.Embedding(9, 2)
    >>> model.config = Config()
    >>> padding_in(model, [torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])])
    '2 of 8 ids, at the ends of rows, are 0, the pad_token_id of the model'
    >>> padding_in(model, [torch.tensor([[5, 0, 0, 7], [5, 6, 7, 0]])])
    ''

    One id alone at an end may be the end of a text, which is often the same id. Without
    a `pad_token_id` the `eos_token_id` is looked for, with which people pad then.
    """
    name, known = _padding_ids(model)
    if known:
        tensors = [ids for ids in batches if _are_rows(ids)]
    else:
        tensors = []
    count = sum(_padded(ids, known) for ids in tensors)
    if not count:
        return ""
    total = sum(ids.numel() for ids in tensors)
    shown = " or ".join(map(str, known))
    return (
        f"{count} of {total} ids, at the ends of rows, are {shown}, the {name} of the "
        "model"
    )


def _are_rows(ids: object) -> TypeGuard[Tensor]:
    return (
        isinstance(ids, Tensor)
        and ids.ndim == 2
        and not ids.is_meta
        and ids.dtype in _INTEGERS
    )


def _padded(ids: Tensor, known: list[int]) -> int:
    pads = torch.stack([ids == pad for pad in known]).any(0).long()
    first = pads.cumprod(1).sum(1)
    # a row of padding alone counts once
    last = pads.flip(1).cumprod(1).sum(1) * (first < ids.shape[1])
    runs = torch.cat([first, last])
    return int(runs[runs > 1].sum())


def _padding_ids(model: Any) -> tuple[str, list[int]]:
    config = getattr(
        inner_module(model) if isinstance(model, torch.nn.Module) else model,
        "config",
        None,
    )
    text = getattr(config, "get_text_config", None)
    for one in (config, text() if callable(text) else None):
        for name in ("pad_token_id", "eos_token_id"):
            known = _as_ids(getattr(one, name, None))
            if known:
                return name, known
    return "pad_token_id", []


def _as_ids(found: object) -> list[int]:
    several = found if isinstance(found, list | tuple) else [found]
    # some configs have -1 for none
    return [one for one in several if isinstance(one, int) and one >= 0]
