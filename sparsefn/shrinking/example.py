"""Whether a smaller module gives the outputs of the masked one on an example."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


def as_call(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, by position and by name: a tensor is the only argument, a mapping has names.

    >>> as_call((1, 2)), as_call({"x": 1})
    (((1, 2), {}), ((), {'x': 1}))

    Raises TypeError for anything else.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Tensor) or type(example) is tuple:
        return example if isinstance(example, tuple) else (example,), {}
    raise TypeError(
        "shrink: expected example to be what the module is called with: a tensor, a tuple of arguments or a dict of "
        f"keyword arguments, got {type(example).__name__}"
    )


def check_example(masked: Callable[[], nn.Module], small: nn.Module, example: Example) -> None:
    """Raise ValueError where the outputs of a smaller module and of the masked one differ by more than rounding.

    >>> check_example(torch.nn.ReLU, torch.nn.ReLU(), torch.ones(1))
    >>> check_example(torch.nn.ReLU, torch.nn.Tanh(), torch.ones(1))
    Traceback (most recent call last):
        ...
    ValueError: shrink: on the example the smaller Tanh gives another output than the masked one, by 24 % of its ...

    All run in eval mode, without gradients, on copies of the example, from one random state. The measure is the largest
    difference over the largest value of an output. Rounding is measured, too: by what it changes in the masked module
    to move each weight by the precision of its dtype, up or down; it counts as that of float32 at least.
    """
    wanted = _outputs(masked(), example)
    if any(x.is_meta for x in wanted.values()):
        raise ValueError("shrink: expected an example whose outputs have values to compare, got some on meta")
    moved = _outputs(_moved(masked()), example)
    try:
        got = _outputs(copy.deepcopy(small), example)  # a forward may change buffers and attributes
    except Exception as error:  # the module's own code fails on sizes in any way
        raise _different(small, f"fails on the example: {error}") from error
    if list(wanted) != list(got):
        raise _different(small, f"gives outputs {list(got)} on the example, where the masked one gives {list(wanted)}")
    for path, a in wanted.items():
        name, b = f"output at {path!r}" if path else "output", got[path]
        if a.shape != b.shape:
            shapes = f"of shape {tuple(b.shape)} on the example, not {tuple(a.shape)} as the masked one"
            raise _different(small, f"gives an {name} {shapes}")
        rounding = _difference(a, moved[path]) if path in moved and moved[path].shape == a.shape else 0.0
        bound = 10 * max(torch.finfo(torch.float32).eps, rounding if math.isfinite(rounding) else 0.0)
        difference = _difference(a, b)
        if not difference <= bound:
            sizes = f"{100 * difference:.2g} % of its largest value; ten times the rounding is {100 * bound:.2g} %"
            raise ValueError(
                f"shrink: on the example the smaller {type(small).__name__} gives another {name} than the masked one, "
                f"by {sizes}. {_MEND}"
            )


_MEND = (
    "The code between the layers may keep their old sizes, such as a number of heads in an attribute: leave these "
    "units out of only=, or let that code take the sizes from its tensors, as x.view(*x.shape[:-1], -1, width) does"
)


def _different(small: nn.Module, what: str) -> ValueError:
    return ValueError(f"shrink: the smaller {type(small).__name__} {what}. {_MEND}")


def _moved(module: nn.Module) -> nn.Module:
    # Each weight moved by the precision of its dtype, up or down.
    for param in module.parameters():
        if param.is_floating_point():
            draw = torch.rand(param.shape, device=param.device, generator=torch.Generator(param.device).manual_seed(0))
            sign = torch.where(draw < 0.5, -1, 1).to(param.dtype)
            param.data.mul_(1 + torch.finfo(param.dtype).eps * sign)
    return module


def _outputs(module: nn.Module, example: Example) -> dict[str, Tensor]:
    def own(x: Any) -> Any:
        return x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)

    called: Any = as_call(example)
    args, kwargs = optree.tree_map(own, called)
    with torch.no_grad(), torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        made = dict(_tensors("", module.eval()(*args, **kwargs)))
    found = {path: x for path, x in made.items() if x.is_floating_point()}
    if not found:
        raise ValueError(
            f"shrink: expected the {type(module).__name__} to return floating-point tensors on the example, in tuples "
            "or mappings, by which to compare it"
        )
    return found


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping | tuple | list):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(f"{path}.{name}".lstrip("."), part)


def _difference(a: Tensor, b: Tensor) -> float:
    # The largest difference over the largest finite value; infinite where one of the two is not finite.
    apart = ~((a == b) | ((a != a) & (b != b)))
    if not apart.any():
        return 0.0
    largest = torch.where(a.isfinite(), a, 0).abs().max().double()
    difference = float((a[apart].double() - b[apart].double()).abs().max() / largest)
    return difference if math.isfinite(difference) else math.inf
