"""What every solver asks of its arguments, and the Cholesky factor that all need."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from sparsefn._engine.leaves import check_device, member_product
from sparsefn._engine.processes import check_plain
from sparsefn._engine.transforms import read_number
from sparsefn.core.checks import number
from sparsefn.masks.patterns.tied_sets import TiedPattern
from sparsefn.masks.patterns.units import Pattern, Units, units_of

BLOCK = 256  # columns of a Cholesky factor that are made together
USUAL = 0.01  # the damping of SparseGPT's authors, a share of the mean of the diagonal


def in_one_dtype(call: str, weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in the dtype to compute in: the wider of the two, float32 at least.

    >>> weight, hessian = in_one_dtype(
    ...     "obs", torch.ones(2, 3, dtype=torch.bfloat16), torch.eye(3)
    ... )
    >>> weight.dtype
    torch.float32

    Raises TypeError for what is not a floating-point tensor, ValueError for other
    shapes, devices, DTensors and for values that are not finite, where they are known.
    """
    for name, x in (("weight", weight), ("hessian", hessian)):
        check_floating(call, name, x)
        check_plain(call, name, x)
    if weight.ndim != 2:
        raise ValueError(
            f"{call}: expected a weight of shape (out, in), got "
            f"{tuple(weight.shape)}; give the weight of a convolution as "
            "weight.flatten(1)"
        )
    columns = weight.shape[1]
    if tuple(hessian.shape) != (columns, columns):
        raise ValueError(
            f"{call}: expected a hessian of shape ({columns}, {columns}) for a weight "
            f"of shape {tuple(weight.shape)}, got {tuple(hessian.shape)}"
        )
    check_device("weight and hessian", weight.device, hessian)
    check_finite(call, weight=weight, hessian=hessian)
    dtype = torch.promote_types(
        torch.promote_types(weight.dtype, hessian.dtype), torch.float32
    )
    return weight.detach().to(dtype), hessian.detach().to(dtype)


def check_floating(call: str, name: str, x: object) -> None:
    """Raise TypeError for what is not a floating-point tensor.

    >>> check_floating("obs", "weight", torch.tensor(1))
    Traceback (most recent call last):
        ...
    TypeError: obs: expected weight to be a floating-point tensor, got torch.int64
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"{call}: expected {name} to be a floating-point tensor, got {got}"
        )


def check_finite(call: str, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor with NaN or infinity, where values are known.

    >>> check_finite("obs", hessian=torch.tensor([1.0, float("nan")]))
    Traceback (most recent call last):
        ...
    ValueError: obs: expected a finite hessian, got 1 of 2 entries NaN or infinite
    """
    # one pass and one wait for all; a sum of finite numbers may be infinite, too
    totals = {name: x.detach().sum() for name, x in tensors.items()}
    together = read_number(sum(totals.values()))
    if together is not None and math.isfinite(together):
        return
    for name, x in tensors.items():
        total = read_number(totals[name])
        if total is None or math.isfinite(total):
            broken = 0
        else:
            broken = int((~x.detach().isfinite()).sum())
        if broken:
            raise ValueError(
                f"{call}: expected a finite {name}, got {broken} of {x.numel()} "
                "entries NaN or infinite"
            )


def check_kept(call: str, mask: Tensor, weight: Tensor) -> Tensor:
    """The mask itself, if it is a bool tensor of the weight's shape.

    >>> check_kept("refit", torch.ones(2), torch.ones(2, 3))
    Traceback (most recent call last):
        ...
    ValueError: refit: expected a bool mask of shape (2, 3), got torch.float32 of shape
    (2,)
    """
    if (
        not isinstance(mask, Tensor)
        or mask.dtype != torch.bool
        or mask.shape != weight.shape
    ):
        got = type(mask).__name__
        if isinstance(mask, Tensor):
            got = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise ValueError(
            f"{call}: expected a bool mask of shape {tuple(weight.shape)}, got {got}"
        )
    check_device("weight and mask", weight.device, mask)
    return mask


def check_damp(call: str, damp: float) -> float:
    """The damping as a float, if it is a number and not negative.

    >>> check_damp("obs", -0.1)
    Traceback (most recent call last):
        ...
    ValueError: obs: expected damp to be a number >= 0, got -0.1
    """
    share = number("damp", damp)
    if isinstance(share, Tensor) or share < 0:
        raise ValueError(f"{call}: expected damp to be a number >= 0, got {damp}")
    return share


def units_of_weight(call: str, pattern: object, weight: Tensor) -> Units:
    """The units of a pattern in a weight.

    >>> units_of_weight("obs", sf.patterns.nm(2, 4), torch.ones(2, 8)).group
    (1, 4)

    Raises TypeError for what is no pattern, ValueError for a pattern of several
    weights.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"{call}: expected pattern to be one such as sf.patterns.nm(2, 4), got "
            f"{pattern!r}"
        )
    if isinstance(pattern, TiedPattern):
        raise ValueError(f"{call}: expected a pattern of one weight, got {pattern}")
    return units_of(pattern, tuple(weight.shape))


def groups_in_rows(
    call: str, pattern: Pattern, weight: Tensor
) -> tuple[int, int | None]:
    """The width of a group of a pattern whose groups lie in rows, and how many weights
    of a group the pattern keeps, None where it does not say.

    >>> groups_in_rows("obs_exact", sf.patterns.nm(2, 4), torch.ones(2, 8))
    (4, 2)

    Raises ValueError for another pattern.
    """
    units = units_of(pattern, tuple(weight.shape))
    fixed = units.fixed
    single = units.single and units.pattern.allowed is None
    if not single or units.group[0] != 1 or isinstance(fixed, Tensor):
        raise ValueError(
            f"{call}: expected a pattern of single weights whose groups lie inside "
            f"rows, such as row_balanced() or nm(2, 4), got {pattern}"
        )
    return max(units.group[1], 1), fixed


def damp_in_place(call: str, hessian: Tensor, damp: float) -> Tensor:
    """Add damping to the diagonal, `damp` times its mean.

    Returns which inputs were always 0.

    >>> hessian = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    >>> damp_in_place("obs", hessian, 0.5), hessian
    (tensor([False,  True]), tensor([[4., 0.],
            [0., 2.]]))

    No weight of such an input changes any output. The solvers set it to 0, and the
    diagonal has 1 there. Raises ValueError where all inputs were always 0, so that no
    weight would be left.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    if len(dead) and read_number(dead.all()):
        raise ValueError(
            f"{call}: expected a hessian with an input that is not 0, got zeros "
            "alone, as of a layer that no data reached"
        )
    diagonal.masked_fill_(dead, 1.0)
    if damp:
        diagonal.add_(damp * diagonal.mean())
    return dead


def factor_in_place(call: str, hessian: Tensor, damp: float) -> Tensor:
    """Turn a hessian that has been damped into its lower Cholesky factor; what is above
    the diagonal has no meaning.

    >>> factor_in_place("refit", torch.tensor([[4.0, 2.0], [2.0, 5.0]]), 0.0).tril()
    tensor([[2., 0.],
            [1., 2.]])
    >>> factor_in_place("refit", torch.tensor([[4.0, 0.0], [0.0, 0.0]]), 0.0)
    Traceback (most recent call last):
        ...
    ValueError: refit: expected a positive definite hessian, got one with eigenvalues
    from 0 to 4, as of inputs that are linearly dependent or fewer than the columns;
    damp=0 is too small, damp=0.01 is enough

    Raises ValueError where there is none, and says how much damping is enough. Block by
    block this takes 0.5 to 0.75 of the time of `torch.linalg.cholesky`, most of which
    goes into zeros above the diagonal.
    """
    n = len(hessian)
    squares = []
    infos = []
    for a in range(0, n, BLOCK):
        b = min(a + BLOCK, n)
        panel = hessian[a:, a:b]
        squares.append(panel[: b - a].clone())
        if a:
            panel.sub_(member_product(hessian[a:, :a], hessian[a:b, :a].T))
        lower, info = torch.linalg.cholesky_ex(panel[: b - a])
        infos.append(info)
        panel[: b - a] = lower
        if b < n:
            # torch hands the result of this form back as the panel lies in memory
            below = panel[b - a :].T
            below.copy_(torch.linalg.solve_triangular(lower, below, upper=False))
    # a device is waited for once
    if infos and read_number(torch.stack(infos).any()):
        for a, square in zip(range(0, n, BLOCK), squares, strict=True):
            hessian[a : a + BLOCK, a : a + BLOCK] = square
        upper = hessian.triu(1)
        _singular(call, upper + upper.T + torch.diag(hessian.diagonal()), damp)
    return hessian


def _singular(call: str, hessian: Tensor, damp: float) -> NoReturn:
    values = torch.linalg.eigvalsh(hessian)
    low = float(values[0])
    high = float(values[-1])
    mean = float(hessian.diagonal().mean()) / (1 + damp)
    lacks = max(-low, 0.0) + 4 * len(hessian) * torch.finfo(hessian.dtype).eps * max(
        high, 0.0
    )
    enough = ""
    if mean > 0:
        enough = f", damp={_up(max(damp + lacks / mean, USUAL))} is enough"
    raise ValueError(
        f"{call}: expected a positive definite hessian, got one with eigenvalues from "
        f"{low:.3g} to {high:.3g}, as of inputs that are linearly dependent or fewer "
        f"than the columns; damp={damp:g} is too small{enough}"
    )


def _up(x: float) -> str:
    # Two digits, rounded up.
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return f"{math.ceil(x / unit - 1e-6) * unit:.2g}"
