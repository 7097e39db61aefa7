"""Workarounds for torch, in one place: what torch does, and what ends each.

For each stands here the issue upstream, where one was found, and the test that fails
once torch is mended, in `tests/test_upstream.py`. Then the workaround goes.

Workarounds that cannot leave the code around them:

- `algorithms/combine/descent.py`, `_prime`: TorchOpt's sgd treats the first call of
  its life apart. Test: `test_torchopts_sgd_treats_the_first_call_of_its_life_apart`.
- `core/tree/operations.py`, `fix_sizes`, and `transforms.as_constant`: compiled code
  holds sizes and floats as symbols. Test:
  `test_a_compiled_number_is_symbolic_where_shapes_are_dynamic`.
- `core/tree/leaves.py`, `flatten`: optree refuses a dict without tensors in compiled
  code. Test: `test_optree_refuses_a_dict_without_tensors_in_compiled_code`.
- `numbers/elementary.py`, `sqrt`: on CPUs torch's is one ulp off here and there. Test:
  `test_square_roots_are_not_rounded_right`.
- `numbers/elementary.py`, `_smooth`: an operator of one's own has no forward mode, and
  none in `grad`. Tests: `test_an_operator_of_ones_own_has_no_forward_mode_...`,
  `test_an_operator_with_a_backward_is_refused_by_grad`.
- `processes/lines.py`, `GATHER`; `nn/modules/wrappers.py`, `_has_subclasses`;
  `algorithms/memory.py`, a comparison by `is`; `leaves/matrix_products.py`, a question
  that torch 2.11 does not compile: torch 2.11 and 2.12. Test:
  `test_workarounds_for_old_releases_go_with_them`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparsefn._engine.transforms import transformed

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


# ---- old releases --------------------------------------------------------------------

# Test: `test_workarounds_for_old_releases_go_with_them`.

OLD = torch.__version__ < "2.12"
# Before 2.13 torch has no vmap rule for `Tensor.view(dtype)`:
# https://github.com/pytorch/pytorch/issues/180727
VMAP_REINTERPRETS = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::view.dtype", "FuncTorchBatched"
)


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`; in compiled code torch 2.11 always says yes.

    >>> from sparsefn._engine.torch_limits import is_exporting
    >>> is_exporting()
    False

    https://github.com/pytorch/pytorch/issues/176347
    """
    return torch.compiler._is_exporting_flag if OLD else torch.compiler.is_exporting()


def replaceable(cls: Class) -> Class:
    """Mark a named tuple that compiled code returns: what `_replace` made comes out of
    the compiler of 2.11 empty.

    >>> from typing import NamedTuple
    >>> from sparsefn._engine.torch_limits import replaceable
    >>> Pair = replaceable(NamedTuple("Pair", [("a", int), ("b", int)]))
    >>> Pair(1, 2)._replace(b=3)
    Pair(a=1, b=3)
    """
    if OLD:
        setattr(cls, "_replace", _replace)  # noqa: B010 (types know of no such name)
    return cls


def _replace(self: Any, **fields: Any) -> Any:
    values = [
        fields.pop(name) if name in fields else value
        for name, value in zip(self._fields, self, strict=True)
    ]
    if fields:
        raise ValueError(f"Got unexpected field names: {list(fields)!r}")
    return type(self)(*values)


def differentiating(fn: Function) -> Function:
    """Mark a function that asks torch.func for derivatives: in inference mode the
    derivatives of torch 2.11 are zeros, so the mode is left.

    >>> from sparsefn._engine.torch_limits import differentiating
    >>> with torch.inference_mode():
    ...     differentiating(torch.func.grad(torch.sin))(torch.tensor(0.0))
    tensor(1.)

    https://github.com/pytorch/pytorch/issues/177318
    """
    if not OLD:
        return fn

    @functools.wraps(fn)
    def without_inference_mode(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not torch.is_inference_mode_enabled():
            return fn(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return fn(*args, **kwargs)

    return without_inference_mode  # type: ignore[return-value]


def reinterpreted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of a tensor as another dtype of the same size: `x.view(dtype)`, for
    which older torch has no vmap rule.

    >>> from sparsefn._engine.torch_limits import reinterpreted
    >>> reinterpreted(torch.tensor([1.0]), torch.int32)
    tensor([1065353216], dtype=torch.int32)
    """
    direct = VMAP_REINTERPRETS or not transformed() or is_exporting()
    return x.view(dtype) if direct else _reinterpreted(x, dtype)


@torch.library.custom_op("sparsefn::reinterpreted", mutates_args=())
def _reinterpreted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.contiguous().view(dtype).clone()


@_reinterpreted.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@_reinterpreted.register_vmap
def _(
    info: object, in_dims: tuple[int, None], x: Tensor, dtype: torch.dtype
) -> tuple[Tensor, int]:
    return _reinterpreted(x, dtype), in_dims[0]


# ---- compiled code -------------------------------------------------------------------


def with_own_code(fn: Function) -> Function:
    """The function with a code object of its own, which is named `update`.

    >>> from sparsefn._engine.torch_limits import with_own_code
    >>> with_own_code(lambda: 3)()
    3

    The compiler makes 8 graphs of one code object at most, and would leave the ninth
    algorithm of a process eager. Test:
    `test_compiled_algorithms_of_one_process_are_as_many_as_wanted`.
    """
    if is_compiling():
        return fn
    assert isinstance(fn, FunctionType)
    code = fn.__code__.replace(co_name="update", co_qualname="update")
    return FunctionType(code, fn.__globals__, closure=fn.__closure__)  # type: ignore[return-value]


def computed_once(x: Tensor) -> Tensor:
    """The tensor; compiled code has it in memory, and does not compute it again in
    every loop that reads it.

    >>> from sparsefn._engine.torch_limits import computed_once
    >>> computed_once(torch.tensor(0.5))
    tensor(0.5000)

    inductor makes a view of sizes and strides of memory alone, and keeps other tensors
    as what they are computed from. Test:
    `test_compiled_loops_compute_a_number_again`.
    """
    if is_compiling() and not is_exporting():
        return x.as_strided(x.shape, x.stride())
    return x


def widened(x: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if its dtype is as wide; rounded to its dtype
    in compiled code, too.

    >>> from sparsefn._engine.torch_limits import widened
    >>> widened(torch.ones((), dtype=torch.bfloat16)).dtype
    torch.float32

    Where a graph computes x, inductor leaves out the rounding between that and what
    follows, by design: https://github.com/pytorch/pytorch/pull/131595. Test:
    `test_compiled_code_does_not_round_to_sixteen_bits`.
    """
    if is_compiling() and x.element_size() == 2:
        made: Tensor = _widened(x)
        return made
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op("sparsefn::widened", mutates_args=())
def _widened(x: Tensor) -> Tensor:
    """Opaque to the compiler."""
    return x.to(torch.float32)


@_widened.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


@_widened.register_vmap
def _(info: object, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return _widened(x), in_dims[0]


# ---- bools in compiled code ----------------------------------------------------------

# On CPUs inductor's loops load and store bools one by one, and bytes sixteen at a time.
# Test: `test_compiled_loops_load_bools_one_by_one`.


def is_below(x: Tensor, limit: int | Tensor) -> Tensor:
    """`x < limit` of int64 whose difference is one.

    >>> from sparsefn._engine.torch_limits import is_below
    >>> is_below(torch.tensor([1, 2]), 2)
    tensor([ True, False])

    Compiled code makes it of the sign of the difference: three times as fast on CPUs.
    """
    if not is_compiling():
        return x < limit
    return reinterpreted((((x - limit) >> 63) & 1).to(torch.uint8), torch.bool)


def from_bytes(masks: Sequence[Tensor]) -> list[Tensor]:
    """The masks, which code that is compiled for a CPU computes from their bytes,
    wherever they are read.

    >>> from sparsefn._engine.torch_limits import from_bytes
    >>> from_bytes([torch.tensor([True, False]), torch.tensor(True)])
    [tensor([ True, False]), tensor(True)]

    A view takes no memory where inductor compiles; other compilers copy the bytes, a
    byte an entry, so call it once for all that reads them.
    """
    if not is_compiling() or is_exporting():
        return list(masks)
    slow = [
        mask.ndim > 0 and mask.device.type == "cpu" and type(mask) is Tensor
        for mask in masks
    ]
    if not any(slow):
        return list(masks)
    bools = [mask for mask, is_slow in zip(masks, slow, strict=True) if is_slow]
    seen = iter(_mask_bytes(bools))
    # Compared as floats: the compiler compares bytes one by one, too.
    return [
        next(seen).to(torch.float32) != 0 if is_slow else mask
        for mask, is_slow in zip(masks, slow, strict=True)
    ]


# Opaque to the compiler, which takes a view of other dtype for the bools that it is of.
# Defined by hand: what `torch.library.custom_op` does around a call takes as long as
# the copies of a small network's masks.
_LIBRARY = torch.library.Library("sparsefn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("mask_bytes(Tensor[] masks) -> Tensor[]")  # type: ignore[no-untyped-call]


@torch.library.impl(_LIBRARY, "mask_bytes", "CPU")
def _copied(masks: Sequence[Tensor]) -> list[Tensor]:
    return [mask.view(torch.uint8).clone() for mask in masks]


@torch.library.register_fake("sparsefn::mask_bytes", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(masks: Sequence[Tensor]) -> list[Tensor]:
    if "torch._inductor.lowering" in sys.modules:
        _view_in_inductor()
    return [torch.empty_like(mask, dtype=torch.uint8) for mask in masks]


_mask_bytes = torch.ops.sparsefn.mask_bytes


@torch.library.register_vmap("sparsefn::mask_bytes", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(
    info: object, in_dims: tuple[list[int | None]], masks: Sequence[Tensor]
) -> tuple[list[Tensor], list[int | None]]:
    return _mask_bytes(masks), in_dims[0]


@functools.cache
def _view_in_inductor() -> None:
    # A view that inductor calls, as it calls views whose dtype has another size: it
    # knows whose memory they share.
    with contextlib.suppress(ImportError):
        from torch._inductor.lowering import fallback_handler, register_lowering

        view = fallback_handler(torch.ops.aten.view.dtype)  # type: ignore[no-untyped-call]
        lower = register_lowering(_mask_bytes.default, type_promotion_kind=None)
        lower(lambda masks: [view(mask, torch.uint8) for mask in masks])
