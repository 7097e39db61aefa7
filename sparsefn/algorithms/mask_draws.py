"""What the algorithms share that learn masks of frozen weights by draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsefn._engine.numbers import folded
from sparsefn._engine.transforms import read_number
from sparsefn.core.checks import is_number
from sparsefn.core.state import Algorithm, State
from sparsefn.core.tree import Leaves, Tree, flatten
from sparsefn.core.tree.mends import no_tree

_EDGE = 1e-6  # draws stay this far from 0 and 1, where the noise is infinite


def priors_of(name: str, prior: Tree | None) -> Leaves | None:
    """The prior masks by path; None where there are none.

    >>> priors_of("maskllm", {"w": torch.tensor([True, False])})
    {'w': tensor([ True, False])}
    >>> priors_of("maskllm", sf.State({}, {}))
    Traceback (most recent call last):
        ...
    TypeError: maskllm: expected prior to be a masks tree, got a State: write
    prior=state.masks

    Raises TypeError for what is no tree of tensors.
    """
    if prior is None:
        return None
    expected = f"{name}: expected prior to be a masks tree, got"
    if isinstance(prior, State):
        raise TypeError(f"{expected} a State: write prior=state.masks")
    if isinstance(prior, Algorithm):
        raise TypeError(
            f"{expected} an Algorithm: write prior=algorithm.init(params).masks, or "
            "the masks after its update"
        )
    if no_tree("prior", prior) or isinstance(prior, float | str):
        raise TypeError(
            f"{expected} {type(prior).__name__}: write prior=state.masks, of the state "
            "of another method"
        )
    return flatten(prior)[0]


def prior_of(name: str, path: str, leaf: Tensor, priors: Leaves) -> Tensor:
    """The prior mask of a leaf, on the device of the leaf.

    >>> prior_of("maskllm", "w", torch.ones(2), {"w": torch.tensor([True, False])})
    tensor([ True, False])

    Raises ValueError where there is none, or one of another shape, and TypeError for
    what is no bool tensor.
    """
    shape = tuple(leaf.shape)
    expected = f"{name}: expected a prior mask of shape {shape} at {path!r}, got"
    choose = "choose the same leaves by where="
    if path not in priors:
        others = ", ".join(map(repr, list(priors)[:3])) or "none at all"
        raise ValueError(
            f"{expected} none: {choose}, and name them alike; the masks of prior are "
            f"at {others}"
        )
    prior = priors[path]
    if not isinstance(prior, Tensor) or prior.dtype != torch.bool:
        is_tensor = isinstance(prior, Tensor)
        got = prior.dtype if is_tensor else type(prior).__name__
        raise TypeError(
            f"{name}: expected a bool prior mask at {path!r}, got {got}: for pruned "
            "weights write {path: x != 0 for path, x in prior.items()}"
        )
    if prior.shape != leaf.shape:
        why = "" if prior.ndim else ", which keeps the leaf whole"
        raise ValueError(f"{expected} {tuple(prior.shape)}{why}: {choose}")
    return prior.to(leaf.device)


def check_prunes(name: str, priors: Leaves) -> None:
    """Raise ValueError where prior masks keep everything, so that none may lead.

    >>> check_prunes("leap", {"w": torch.tensor([True, False])})

    The masks of a leaf alone may: others compete with it. Nothing is read where a
    transform hides values.
    """
    keeps = [read_number(mask.all()) for mask in priors.values()]
    if keeps and all(whole is True for whole in keeps):
        raise ValueError(
            f"{name}: expected prior masks that prune some weights, got masks that "
            f"keep all weights of {', '.join(map(repr, priors))}: give the masks of a "
            "pruned state, settled where they were learned, or prior=None"
        )


def check_strength(name: str, strength: object) -> None:
    """Raise ValueError for what is no finite number.

    >>> check_strength("maskllm", 3.0)
    """
    if not is_number(strength) or not math.isfinite(strength):
        raise ValueError(f"{name}: expected a finite strength, got {strength!r}")


def check_sparsity_given(name: str, sparsity: object) -> None:
    """Raise TypeError where no sparsity is given, though no pattern has one.

    >>> check_sparsity_given("leap", 0.5)
    """
    if sparsity is None:
        raise TypeError(
            f"{name}: expected sparsity to be a float in [0, 1] or a schedule, got "
            "None: masks of n of m, which have a sparsity of their own, are learned by "
            "sf.methods.maskllm"
        )


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from float64 draws of [0, 1).

    >>> gumbel(torch.tensor([0.5], dtype=torch.float64))
    tensor([0.3665], dtype=torch.float64)
    """
    return -torch.log(-torch.log(uniform * (1 - 2 * _EDGE) + _EDGE))


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, which becomes the first one.

    >>> softmax(torch.zeros(1, 2)).shape
    torch.Size([2, 1])

    Its sums have one order for every layout of memory, so that bits are the same.
    """
    x = logits.movedim(-1, 0)
    exp = torch.exp(x - x.detach().amax(0))
    return exp / folded(exp)
