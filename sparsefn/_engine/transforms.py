"""What compile, vmap, grad and modes hide, and what they let Python know: the one place
for torch's private names.

All but `torch.compiler.is_compiling` is private to torch, which may rename it; so
nothing else of the package uses it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _dispatch_keys, _is_tracing
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack as temporarily_clear_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import (
    is_in_torch_dispatch_mode as is_in_torch_dispatch_mode,
)

Array: TypeAlias = np.ndarray[Any, Any]
# `as_numpy`, or `as_numpy_inside` in an operator
See: TypeAlias = Callable[[Sequence[Tensor]], list[Array] | None]
Function = TypeVar("Function", bound=Callable[..., Any])

# A dense CPU tensor that nothing wraps and nothing is yet to be done to, made under
# autograd or under inference_mode.
_DENSE = DispatchKeySet(DispatchKey.CPU).add(DispatchKey.AutocastCPU)
_TRACKED = _DENSE.add(DispatchKey.ADInplaceOrView).add(DispatchKey.AutogradCPU)
_PLAIN = frozenset((_DENSE.raw_repr(), _TRACKED.raw_repr()))
# a subclass may mean something else by its memory
_TYPES = frozenset((Tensor, torch.nn.Parameter))
CAST = torch.ops.aten._to_copy  # what `Tensor.to` and autocast come to
# consecutive rows times a matrix each, as of experts
GROUPED = torch.ops.aten._grouped_mm
# many tensors as one row, and the parts of a row as views of given shapes
flatten_tensors = torch._C._nn.flatten_dense_tensors
unflatten_tensors = torch._C._nn.unflatten_dense_tensors
# a number to each of some tensors: the numbers are arguments of the launch
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_  # one launch for many tensors
foreach_add = torch._foreach_add
foreach_sub = torch._foreach_sub
foreach_maximum = torch._foreach_maximum
foreach_max = torch._foreach_max
foreach_mul = torch._foreach_mul
foreach_div = torch._foreach_div
foreach_sqrt_ = torch._foreach_sqrt_
_GRADIENTS = (TransformType.Grad, TransformType.Jvp)


def host_number(value: Any) -> Any:
    """The Python number in a 0-d CPU tensor, or None where something hides it.

    >>> host_number(torch.tensor(3)), host_number(2.5)
    (3, 2.5)

    Nothing waits for a device.
    """
    return (
        None
        if isinstance(value, Tensor) and value.device.type != "cpu"
        else read_number(value)
    )


def read_number(value: Any) -> Any:
    """The Python number in a 0-d tensor of any device, for which it waits.

    It is None where a transform hides it.

    >>> from sparsefn._engine.transforms import read_number
    >>> read_number(torch.tensor(3))
    3
    """
    if not isinstance(value, Tensor):
        return value
    if is_compiling():
        return None
    try:
        return value.item()
    except RuntimeError:  # batched by vmap, fake, or without memory
        return None


def as_constant(value: Any) -> Any:
    """The number itself.

    Compiled code then knows its value, and no longer computes with it.

    >>> as_constant(0.1), as_constant(3)
    (0.1, 3)
    """
    if not is_compiling():
        return value
    return float.fromhex(value.hex()) if isinstance(value, float) else len(range(value))


def is_compiled_without_grad(*results: Tensor) -> bool:
    """Whether this is compiled, and no gradient flows back from results.

    >>> from sparsefn._engine.transforms import is_compiled_without_grad
    >>> is_compiled_without_grad(torch.zeros(1))
    False

    What such code computes and does not select costs no pass over memory, and its NaN
    reaches no gradient. Ask of what was computed: under a transform the compiler does
    not say it of arguments.
    """
    return is_compiling() and not any(x.requires_grad for x in results)


def at_compile_time(fn: Function) -> Function:
    """Mark a function of Python values: compiled code calls it while it is traced and
    keeps the result.

    >>> at_compile_time(lambda word: len(word))("four")
    4

    As `torch.compiler.assume_constant_result`, which imports the compiler, and that
    takes a second.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def without_compiler(fn: Function) -> Function:
    """A function that compiled code calls without compiling it or what it calls.

    >>> without_compiler(len)([1, 2])
    2

    As `torch.compiler.disable`, which imports the compiler, and that takes a second.
    """

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return torch.compiler.disable(fn)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return fn(*args, **kwargs)

    return called  # type: ignore[return-value]


def transformed() -> bool:
    """Whether a transform of torch.func, or the compiler, is at work.

    >>> from sparsefn._engine.transforms import transformed
    >>> transformed()
    False
    """
    return is_compiling() or peek_interpreter_stack() is not None


class Onlooker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that looks on and changes no tensor and no result: the library does what
    it does without it.

    >>> from sparsefn._engine.transforms import Onlooker, in_mode
    >>> issubclass(Onlooker, TorchDispatchMode)
    True
    """


def in_mode() -> bool:
    """Whether a dispatch mode sees the operations, and may change them: fake tensors, a
    trace, a counter of FLOPs.

    >>> from sparsefn._engine.transforms import in_mode
    >>> in_mode()
    False
    """
    return is_in_torch_dispatch_mode() and not all(
        isinstance(mode, Onlooker) for mode in _get_current_dispatch_mode_stack()
    )


def is_eager() -> bool:
    """Whether operations run at once and nobody sees them: no transform, no compiler,
    no dispatch mode, no forward derivative.

    >>> from sparsefn._engine.transforms import is_eager
    >>> is_eager()
    True
    """
    return not (transformed() or in_mode() or forward_ad._current_level >= 0)


def outside_modes() -> contextlib.AbstractContextManager[object]:
    """A context of real tensors, also inside of dispatch modes.

    >>> from sparsefn._engine.transforms import outside_modes
    >>> with outside_modes():
    ...     torch.ones(1).item()
    1.0
    """
    return (
        _disable_current_modes()
        if is_in_torch_dispatch_mode()
        else contextlib.nullcontext()
    )


def differentiated(*tensors: Tensor) -> bool:
    """Whether someone may ask for a derivative.

    Compiled code is traced once for all who do.

    >>> from sparsefn._engine.transforms import differentiated
    >>> (
    ...     differentiated(torch.zeros(1)),
    ...     differentiated(torch.zeros(1, requires_grad=True)),
    ... )
    (False, True)
    """
    if is_compiling() or forward_ad._current_level >= 0:
        return True
    levels = get_interpreter_stack()
    if levels and any(level.key() in _GRADIENTS for level in levels):
        return True
    return True in [x.requires_grad for x in tensors]


def as_numpy(tensors: Sequence[Tensor]) -> list[Array] | None:
    """The memory of CPU tensors as arrays, shared; None where a transform, a mode or a
    device hides some of it.

    >>> from sparsefn._engine.transforms import as_numpy
    >>> as_numpy([torch.tensor([1.0, 2.0])])
    [array([1., 2.], dtype=float32)]
    >>> _ = torch.vmap(lambda x: print(as_numpy([x])) or x)(torch.ones(1, 2))
    None

    bfloat16, which numpy lacks, comes as int16 words. Gradients do not flow through an
    array, and it must not be written to unless the tensor was made for that.
    """
    if is_compiling() or in_mode() or _is_tracing():
        return None
    # Under grad or functionalize torch wraps what is made from any memory, so that
    # writing to it would not reach it.
    levels = get_interpreter_stack()
    if levels is not None and any(
        level.key() != TransformType.Vmap for level in levels
    ):
        return None
    return as_numpy_inside(tensors)


def as_numpy_inside(tensors: Sequence[Tensor]) -> list[Array] | None:
    """`as_numpy` inside an operator of this library, whose tensors are always real.

    >>> from sparsefn._engine.transforms import as_numpy_inside
    >>> as_numpy_inside([torch.tensor([1.0, 2.0])])
    [array([1., 2.], dtype=float32)]
    """
    seen = []
    for x in tensors:
        array = _memory(x)
        if array is None:
            return None
        seen.append(array)
    return seen


def constants(tensors: Sequence[Tensor]) -> list[Array] | None:
    """`as_numpy`, and None where a derivative of what is computed from the tensors may
    be asked for.

    >>> from sparsefn._engine.transforms import constants
    >>> constants([torch.ones(1)]), constants([torch.ones(1, requires_grad=True)])
    ([array([1.], dtype=float32)], None)
    """
    if is_compiling() or forward_ad._current_level >= 0:
        return None
    return (
        None
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        else as_numpy(tensors)
    )


def _memory(x: Tensor) -> Array | None:
    # A wrapped tensor has a `numpy()`, too, which may hand out memory that nobody wrote
    # to. So the tensor is asked first what handles its operations: only torch's dense
    # CPU kernels read the memory in its own layout.
    if type(x) not in _TYPES or _dispatch_keys(x).raw_repr() not in _PLAIN:
        return None
    try:
        return (x.detach() if x.requires_grad else x).numpy()
    except TypeError:  # a dtype that numpy lacks
        return (
            _memory(x.detach().view(torch.int16)) if x.dtype == torch.bfloat16 else None
        )
    except RuntimeError:  # detached under a transform, it is wrapped
        return None


def unwrapped(x: Tensor) -> Tensor:
    """The tensor inside the wrappers of torch.func's transforms.

    >>> from sparsefn._engine.transforms import unwrapped
    >>> _ = torch.vmap(lambda x: print(unwrapped(x)) or x)(torch.ones(2))
    tensor([1., 1.])
    """
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x
