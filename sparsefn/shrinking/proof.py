"""Whether a smaller model gives the masked model's outputs: both run in float64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparsefn.core.tree import flatten
from sparsefn.nn.modules import as_call
from sparsefn.shrinking.trace import Call, Example, first_line, isolated
from sparsefn.shrinking.values import in_its_order, module_of
from sparsefn.typing import Tree

EVERY = 10.0  # seconds


def check_loaded(call: str, model: nn.Module, **trees: Tree) -> None:
    """Raise ValueError for a parameter, a buffer or a leaf of a tree on the meta
    device, which has no values.

    >>> check_loaded("permute", torch.nn.Linear(1, 1, device="meta"))
    Traceback (most recent call last):
        ...
    ValueError: permute: expected tensors with values, but 'weight' is on the meta
    device: load the weights of the model first, as model.to_empty(device="cpu") and
    then model.load_state_dict(saved) do

    `core.tree.check_not_meta` says the same elsewhere.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for what, tree in trees.items():
        for path, leaf in flatten(tree)[0].items():
            named[f"{what}.{path}"] = leaf
    for name, value in named.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"{call}: expected tensors with values, but {name!r} is on the meta "
                "device: load the weights of the model first, as "
                'model.to_empty(device="cpu") and then model.load_state_dict(saved) do'
            )


class Progress:
    """Says on stderr what a call does, at most one line in EVERY seconds, and none in
    the first ones.

    >>> tell = Progress("shrink")
    >>> tell("traces the model")
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = self.last = time.monotonic()

    def __call__(self, doing: str) -> None:
        now = time.monotonic()
        if now - self.last > EVERY:
            self.last = now
            print(
                f"{self.name}: {now - self.start:.0f} s so far, {doing}",
                file=sys.stderr,
                flush=True,
            )


TOLERANCE = 1e-10  # of the largest value of an output, in float64
_NEAR = 1e-4  # in float32
_ON_OTHERS = " on other inputs of the example's shapes"
_WIDER = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}


class Proof:
    """The outputs that the smaller models of a masked model have to give.

    >>> proof = Proof(torch.nn.ReLU(), torch.ones(1))
    >>> proof.differs(torch.nn.ReLU())
    ''
    >>> proof.differs(torch.nn.Tanh())
    'gives another output than the masked one, by 24 % of its largest value, first in
    the module itself'

    A smaller model runs twice, each time as a copy in eval mode and without gradients:

    - in float64 on the example, in which even what the code casts to float32 stays.
      This finds every bug that `property_tests/mutants_shrinking.py` plants in the
      analysis;
    - in float32 on another input of the example's shapes and like values, which finds
      code for which the example is special, or that fails in float32. Where that is no
      proof, it runs twice more: in its own dtype on the example, where it must not
      fail, and in float64 on the other input.

    The masked model runs once for each of these inputs and dtypes, whatever the number
    of smaller models.

    Floating-point outputs may differ by 1e-10 of the largest in float64, and by 1e-4 in
    float32, but are infinite or NaN in the same places, and other outputs are equal.
    Outputs are in tuples, lists, mappings, dataclasses and all that torch's pytrees
    know.

    Raises TypeError for an example of another type, and ValueError for models on the
    meta device, and for a masked model that does not run on the example or gives no
    floating-point tensors.
    """

    def __init__(
        self, masked: nn.Module, example: Example, tell: Progress | None = None
    ) -> None:
        self.masked = masked
        self.tell = tell or Progress("shrink")
        self.example = as_call(example)
        draw = torch.Generator().manual_seed(0)
        self._other: Call = pytree.tree_map(lambda x: _like(x, draw), self.example)
        self._wanted: dict[tuple[bool, bool], dict[str, Any] | None] = {}

    def differs(
        self, small: nn.Module, exact: Mapping[str, Tensor] | None = None
    ) -> str:
        """How the outputs of a smaller model differ, and in which module first; nothing
        where they do not.

        `exact` has parameters of the smaller model in float64, by name, of which it
        holds the rounded ones.
        """
        reason = self.reason(small, exact)
        if not reason:
            return ""
        call = self.example
        if reason.endswith(_ON_OTHERS):
            call = self._other
        return reason + _first(self.masked, _exactly(small, exact), call)

    def reason(
        self, small: nn.Module, exact: Mapping[str, Tensor] | None = None
    ) -> str:
        """How the outputs of a smaller model differ, without the module."""
        for model in (self.masked, small):
            check_loaded(self.tell.name, model)
        self.tell("runs a smaller model")
        reason = self._compared(_exactly(small, exact), self.example)
        if reason:
            return reason
        own = copy.deepcopy(small).eval()
        narrow = any(p.dtype == torch.float32 for p in small.parameters())
        if (
            narrow
            and self._outputs(self._other, False)
            and not self._compared(own, self._other, wide=False)
        ):
            return ""
        reason = _fails(self.masked, own, self.example)
        if reason:
            return reason
        reason = self._compared(_exactly(small, exact), self._other)
        return reason and reason + _ON_OTHERS

    def _compared(self, copied: nn.Module, call: Call, wide: bool = True) -> str:
        wanted = self._outputs(call, wide)
        if wanted is None:
            return ""
        try:
            got = _run(copied, call, wide)
        except Exception as error:  # the model's own code fails in any way
            on = " on the example" if call is self.example else ""
            return f"fails{on}: {first_line(error)}"
        return _difference(wanted, got, TOLERANCE if wide else _NEAR)

    def _outputs(self, call: Call, wide: bool) -> dict[str, Any] | None:
        # What the masked model gives, from one run; None where it does not take the
        # other input.
        key = call is self.example, wide
        if key in self._wanted:
            return self._wanted[key]
        kind = type(self.masked).__name__
        self.tell(f"runs the masked model{' in float64' if wide else ''}")
        if wide:
            masked = _double(self.masked)
        else:
            masked = copy.deepcopy(self.masked).eval()
        try:
            made = _run(masked, call, wide)
        except Exception as error:  # the model's own code fails in any way
            if call is not self.example:
                self._wanted[key] = None
                return None
            text = (
                f"expected an example that the {kind} can be called with, got "
                f"{first_line(error)}"
            )
            raise ValueError(text) from error
        if not any(
            isinstance(x, Tensor) and x.is_floating_point() for x in made.values()
        ):
            raise ValueError(
                f"expected the {kind} to return floating-point tensors on the "
                "example, in tuples, mappings or dataclasses, by which to compare it"
            )
        self._wanted[key] = made
        return made


def _fails(masked: nn.Module, copied: nn.Module, call: Call) -> str:
    # In its own dtype, in which the masked model may fail as well.
    try:
        _run(copied, call, wide=False)
    except Exception as error:  # the model's own code fails in any way
        with contextlib.suppress(Exception):
            _run(copy.deepcopy(masked).eval(), call, wide=False)
            return f"fails on the example: {first_line(error)}"
    return ""


def _exactly(small: nn.Module, exact: Mapping[str, Tensor] | None) -> nn.Module:
    # In float64, with the parameters that it holds rounded as they are.
    made = _double(small)
    for name, x in (exact or {}).items():
        made.get_parameter(name).data = x
    return made


def _double(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model).double().eval()
    for part in made.modules():
        for name, x in vars(part).items():
            if isinstance(x, Tensor) and x.dtype in _WIDER:
                vars(part)[name] = x.to(_WIDER[x.dtype])
    return made


class _Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Casts to shorter floats give float64."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        writes = func._schema.is_mutable

        def wide(x: Any) -> Any:
            if isinstance(x, torch.dtype):
                return _WIDER.get(x, x)
            if isinstance(x, Tensor) and x.dtype in _WIDER and not writes:
                return x.to(_WIDER[x.dtype])
            return x

        kwargs = kwargs or {}
        run = func
        if func is torch.ops.aten._grouped_mm.default:
            run = _grouped_mm
        if func is not torch.ops.aten.view.dtype:
            args, kwargs = pytree.tree_map(wide, (args, kwargs))
        out = run(*args, **kwargs)
        return pytree.tree_map(wide, out)


def _grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Tensor:
    # torch has none in float64.
    if bias is not None or (offs is not None and (x.ndim, w.ndim) != (2, 3)):
        raise NotImplementedError("a grouped product of this form in float64")
    if offs is None:
        return x @ w
    start = 0
    parts = []
    for end, part in zip(offs.tolist(), w, strict=True):
        parts.append(x[start:end] @ part)
        start = end
    of_no_expert = x.new_zeros(len(x) - start, w.shape[-1])
    return torch.cat([*parts, of_no_expert])


def _like(x: Any, draw: torch.Generator) -> Any:
    """Other values of the kind that an input has: numbers of its scale; of a mask the
    same rows in another order.
    """
    if not isinstance(x, Tensor) or not x.numel():
        return x
    old = x.detach().cpu()
    if len(torch.unique(old)) < 3 or not old.isfinite().all() or old.is_complex():
        new = old
        if old.ndim:
            order = torch.randperm(len(old), generator=draw, device="cpu")
            new = old[order]
    elif old.is_floating_point():
        noise = torch.randn(x.shape, generator=draw, device="cpu", dtype=torch.float64)
        new = noise * old.double().std() + old.double().mean()
        if (old >= 0).all():
            new = new.abs()
    else:
        least = int(old.min())
        most = int(old.max())
        new = torch.randint(least, most + 1, x.shape, generator=draw, device="cpu")
    return new.to(x)


def _own(x: Any, wide: bool = True) -> Any:
    if not isinstance(x, Tensor):
        return copy.deepcopy(x)
    dtype = x.dtype
    if wide:
        dtype = _WIDER.get(x.dtype, x.dtype)
    return x.detach().to(dtype, copy=True)


def _run(model: Callable[..., Any], call: Call, wide: bool = True) -> dict[str, Any]:
    args, kwargs = pytree.tree_map(lambda x: _own(x, wide), call)
    mode = _Wide() if wide else contextlib.nullcontext()  # type: ignore[no-untyped-call]
    with isolated(), mode:
        torch.manual_seed(0)
        out = model(*args, **kwargs)
        return dict(_leaves("", out))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of an output by their places."""
    if isinstance(value, Tensor | int | float | complex | str | None):
        yield path, value
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple | list):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [(name, getattr(value, name)) for name in names]
    elif type(value) in pytree.SUPPORTED_NODES:
        children, _ = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        parts = enumerate(children)
    for name, part in parts:
        yield from _leaves(f"{path}.{name}".lstrip("."), part)


def _difference(
    wanted: Mapping[str, Any], got: Mapping[str, Any], tolerance: float = TOLERANCE
) -> str:
    if list(wanted) != list(got):
        return f"gives outputs {list(got)}, where the masked one gives {list(wanted)}"
    for path, a in wanted.items():
        name = f"output at {path!r}" if path else "output"
        b = got[path]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or not (a == b or a != a):
                return f"gives the {name} {b!r}, not {a!r} as the masked one"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"gives an {name} of {_kind(b)}, not {_kind(a)} as the masked one"
        size = _distance(a, b)
        if size > tolerance:
            return (
                f"gives another {name} than the masked one, by {100 * size:.2g} % of "
                "its largest value"
            )
    return ""


def _kind(x: Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{tuple(x.shape)} and {dtype}"


def _distance(a: Tensor, b: Tensor) -> float:
    # The largest difference over the largest finite value; infinite where one of the
    # two is not finite, or no float.
    both_nan = (a != a) & (b != b)
    differs = ~((a == b) | both_nan)
    if not differs.any():
        return 0.0
    if not a.is_floating_point() and not a.is_complex():
        return math.inf
    largest = torch.where(a.isfinite(), a, 0).abs().max()
    difference = (a[differs] - b[differs]).abs().max()
    size = float(difference / largest)
    if math.isnan(size):
        return math.inf
    return size


def _first(masked: nn.Module, small: nn.Module, call: Call) -> str:
    # Which module is the first whose outputs differ, or in which the smaller model
    # fails.
    wanted, _ = _followed(masked, call)
    got, within = _followed(small, call)
    for place, outputs in wanted.items():
        if place not in got:
            continue
        alike = _shapes(outputs) == _shapes(got[place])
        if alike and _difference(outputs, got[place]):
            path, _ = place
            return f", first in {_module(path)}"
    if within is None:
        return ""
    return f", in {_module(within)}"


def _shapes(outputs: Mapping[str, Any]) -> list[torch.Size | None]:
    return [getattr(x, "shape", None) for x in outputs.values()]


def _module(path: str) -> str:
    return f"the module {path!r}" if path else "the module itself"


def _followed(
    model: nn.Module, call: Call
) -> tuple[dict[tuple[str, int], dict[str, Any]], str | None]:
    """The outputs of modules by path and number of the call, in the order of their
    ends; and where the run ended.
    """
    made: dict[tuple[str, int], dict[str, Any]] = {}
    inside: list[str] = []
    run = _double(model)
    calls = dict.fromkeys(dict(model.named_modules()), 0)
    if isinstance(run, fx.GraphModule):
        walk = _Walk(run)

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            return walk.run(*in_its_order(run, (args, kwargs)))

        with contextlib.suppress(Exception):
            _run(interpreted, call)
        return walk.made, walk.within

    def enter(path: str, *_: Any) -> None:
        inside.append(path)

    def leave(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        inside.pop()
        leaves = _leaves("", output)
        made[path, calls[path]] = {name: _own(x) for name, x in leaves}
        calls[path] += 1

    for path, part in run.named_modules():
        part.register_forward_pre_hook(partial(enter, path))
        part.register_forward_hook(partial(leave, path))
    with contextlib.suppress(Exception):
        _run(run, call)
    return made, inside[-1] if inside else None


class _Walk(fx.Interpreter):
    """A program's run: the last tensor that was made in each module, and where the run
    ended.
    """

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__(program)
        self.made: dict[tuple[str, int], dict[str, Any]] = {}
        self.within: str | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.within = module_of(n)
        out = super().run_node(n)
        up = len(n.meta.get("nn_module_stack") or {})
        if isinstance(out, Tensor):
            for i in range(up):
                self.made[module_of(n, i), 0] = {"": out.clone()}
        if n.op == "output":
            self.made["", 0] = dict(_leaves("", out))
            self.within = None
        return out
