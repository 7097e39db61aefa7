"""Perplexity of a causal language model on a text."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsefn.core.checks import check_int
from sparsefn.nn.modules.calls import left_as_it_was
from sparsefn.nn.modules.padding import padding_in

IGNORED = -100  # what transformers writes into labels for tokens that do not count
_Window = tuple[Tensor, Tensor]  # tokens, and the token to predict at each of them


def perplexity(
    model: Callable[[Tensor], object],
    tokens: Tensor,
    window: int,
    *,
    stride: int | None = None,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    chunk_size: int = 1,
) -> float:
    """The exponential of the mean negative log-likelihood of the tokens of a text.

    >>> def model(
    ...     tokens,
    ... ):  # a half for the token that was, and the rest for the three others
    ...     return torch.where(
    ...         torch.nn.functional.one_hot(tokens, 4) == 1, 1 / 2, 1 / 6
    ...     ).log()
    >>> sf.report.perplexity(
    ...     model, torch.tensor([0, 0, 0, 0, 1]), window=5
    ... )  # (2 * 2 * 2 * 6) ** (1 / 4)
    2.632...
    >>> sf.report.perplexity(
    ...     model, torch.tensor([0, 0, 0, 0, 1]), window=3
    ... )  # without 0 -> 0 between windows
    2.884...
    >>> sf.report.perplexity(
    ...     model, torch.tensor([0, 0, 0, 0, 1]), window=3, stride=1
    ... )  # each token once
    2.632...

    Args:
        model: A causal language model. It gets the tokens of a window but for the last,
            without padding, and gives logits of shape (windows, tokens, vocabulary), or
            an object with `logits`, as the models of transformers. A module has to be
            in eval mode, and stays as it is. No gradients are kept.
        tokens: Integers, a text of shape (tokens,), or several of shape (texts,
            tokens).
        window: Tokens in a window, 2 or more. The last window of a text is as long as
            what is left.
        stride: Windows begin every so many tokens. None: `window`; then the first token
            of each is not predicted, as in most papers. With a smaller stride every
            token but the first of a text counts once, in the first window that predicts
            it, given `window - stride` tokens or more before it.
        attention_mask: Tensor of the shape of `tokens`, 0 for padding, which is cut off
            before the model sees it. Without it a UserWarning tells of texts that begin
            or end with padding by the config of the model.
        labels: The tokens to predict, of the shape of `tokens`; -100 does not count.
            None: `tokens`.
        chunk_size: How many windows the model gets at a time, at most.

    Returns:
        The perplexity. The mean is over tokens, not over windows. Log-likelihoods are
        float32 (float64 for float64 logits), and their sums float64.

    Raises:
        TypeError: `tokens` are no integers, a size is not an int, or the model gives no
            logits.
        ValueError: A text is too short to predict a token or has padding inside, labels
            or logits have another shape, labels are outside of the vocabulary, a module
            is in train mode, a size is too small, or `stride` is above `window`.

    Each token is predicted from the tokens before it.
    """
    check_int("perplexity", "window", window, 2)
    check_int("perplexity", "chunk_size", chunk_size, 1)
    if stride is None:
        stride = window
    check_int("perplexity", "stride", stride, 1)
    if stride > window:
        raise ValueError(
            "perplexity: expected stride <= window, or tokens are left out, got "
            f"{stride} > {window}"
        )
    if isinstance(model, nn.Module) and model.training:
        raise ValueError(
            "perplexity: expected a model in eval mode, got one in train mode: call "
            "model.eval()"
        )
    if (
        attention_mask is None
        and labels is None
        and (padding := padding_in(model, [tokens]))
    ):
        warnings.warn(
            f"perplexity: {padding}, and count as text: give attention_mask",
            UserWarning,
            stacklevel=2,
        )
    windows = [
        part
        for text in _texts(tokens, attention_mask, labels)
        for part in _windows(*text, window, stride)
    ]
    counted = sum(int((wanted != IGNORED).sum()) for _, wanted in windows)
    if not counted:
        raise ValueError(
            "perplexity: expected a text of two tokens or more, of which some count, "
            f"got {tokens.numel()} tokens of shape {tuple(tokens.shape)}, and nothing "
            "to predict"
        )
    total = 0.0
    as_it_was = (
        left_as_it_was(model)
        if isinstance(model, nn.Module)
        else contextlib.nullcontext()
    )
    with torch.no_grad(), as_it_was:
        for inside, wanted in _stacked(windows, chunk_size):
            total += _surprise(_logits(model, inside), wanted)
    mean = total / counted
    return math.exp(mean) if not mean > 709 else math.inf  # beyond float64


def _texts(
    tokens: Tensor, mask: Tensor | None, labels: Tensor | None
) -> Iterator[_Window]:
    # Each text without its padding, and its labels.
    if (
        not isinstance(tokens, Tensor)
        or tokens.is_floating_point()
        or tokens.dtype == torch.bool
    ):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(
            f"perplexity: expected tokens to be a tensor of integers, got {got}"
        )
    if tokens.ndim not in (1, 2):
        raise ValueError(
            "perplexity: expected tokens of shape (tokens,) or (texts, tokens), got "
            f"{(*tokens.shape,)}"
        )
    for name, given in (("attention_mask", mask), ("labels", labels)):
        if given is not None and given.shape != tokens.shape:
            shapes = f"{tuple(tokens.shape)}, got {tuple(given.shape)}"
            raise ValueError(
                f"perplexity: expected {name} of the shape of tokens, {shapes}"
            )
    wanted = tokens if labels is None else labels
    real = torch.ones_like(tokens) if mask is None else mask
    lines = []
    for x in (tokens, wanted, real != 0):
        if x.ndim == 2:
            lines.append(x)
        else:
            lines.append(x[None])
    for number, (text, own, inside) in enumerate(zip(*lines, strict=True)):
        places = inside.nonzero()[:, 0]
        if len(places) and int(places[-1] - places[0]) + 1 != len(places):
            raise ValueError(
                "perplexity: expected padding at the ends of a text, got some inside "
                f"of text {number}"
            )
        yield text[inside], own[inside]


def _windows(
    text: Tensor, labels: Tensor, window: int, stride: int
) -> Iterator[_Window]:
    # What was predicted before does not count again.
    done = 1
    for first in range(0, len(text), stride):
        end = min(first + window, len(text))
        wanted = labels[first + 1 : end].long().clone()
        wanted[: max(0, done - first - 1)] = IGNORED
        if (wanted != IGNORED).any():
            yield text[first : end - 1], wanted
        done = end
        if end == len(text):
            return


def _stacked(windows: list[_Window], size: int) -> Iterator[_Window]:
    # So many windows in a row of one length.
    for _, group in itertools.groupby(windows, key=lambda window: len(window[0])):
        alike = list(group)
        for start in range(0, len(alike), size):
            tokens, wanted = zip(*alike[start : start + size], strict=True)
            yield torch.stack(tokens), torch.stack(wanted)


def _logits(model: Callable[[Tensor], object], tokens: Tensor) -> Tensor:
    out = model(tokens)
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor):
        raise TypeError(
            "perplexity: expected a model that gives logits, or .logits, got "
            f"{type(out).__name__}"
        )
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise ValueError(
            f"perplexity: expected logits {(*tokens.shape, 'vocabulary')}, got "
            f"{tuple(logits.shape)}"
        )
    return logits


def _surprise(logits: Tensor, wanted: Tensor) -> float:
    # The sum of the negative log-likelihoods of the tokens that count.
    known = wanted != IGNORED
    chosen = wanted[known].to(logits.device)
    size = logits.shape[-1]
    if bool(((chosen < 0) | (chosen >= size)).any()):
        raise ValueError(
            f"perplexity: expected labels below {size}, or {IGNORED}, got "
            f"{chosen.tolist()[:4]}"
        )
    kept = logits[known.to(logits.device)]
    if kept.dtype != torch.float64:
        kept = kept.float()
    return float(
        functional.cross_entropy(kept, chosen, reduction="none").double().sum()
    )
