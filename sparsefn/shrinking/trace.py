"""A model as a graph of ATen operations, as `torch.export` traces it; submodules that
are traced instead of it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from sparsefn.nn.modules import as_call, bake
from sparsefn.shrinking.values import (
    module_of,
    named_module,
    named_tensors,
    node_arguments,
    opname,
)

Module = TypeVar("Module", bound=nn.Module)
Example = Tensor | tuple[Any, ...] | Mapping[str, Any]  # what a model is called with
Call = tuple[tuple[Any, ...], dict[str, Any]]
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_OWN = logging.Filter("sparsefn")  # keeps records of this library alone


def traced(
    model: nn.Module,
    example: Example,
    *,
    train: bool = False,
    dynamic: bool = True,
) -> fx.GraphModule:
    """The ATen operations of a model, with parameters and buffers under their names.

    >>> program = traced(
    ...     torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()),
    ...     torch.ones(2, 3),
    ... )
    >>> [node.name for node in program.graph.nodes if node.op == "call_function"]
    ['linear', 'relu']
    >>> program(torch.ones(5, 3)).shape
    torch.Size([5, 4])

    Sizes of the example's tensors other than 1 may differ when it runs, where the
    model's code allows that; of tensors of four dimensions and more the first alone.
    With `dynamic=False` none may, and tracing takes half of the time or less. It holds
    the model's own tensors, and `node.meta["nn_module_stack"]` says of which modules an
    operation is. Nothing of the model changes. A model on the meta device is traced
    there, without memory.

    Raises TypeError for an example of another type, and ValueError for a model that
    does not run on it, for one that `torch.export` cannot follow, and for modules in
    train mode that compute otherwise in eval mode (batch norm, dropout): with `train`
    modules keep the modes that they are in.
    """
    _check_not_lazy(model)
    # of a slice of a larger tensor a clone has no gaps, for which it would be traced
    call = _mapped(Tensor.clone, where_it_lies(model, as_call(example)))
    busy = any(part.training for part in model.modules())
    program = _export(model, call, train, dynamic)
    program.meta["train"] = train and busy
    if (
        busy
        and not train
        and (node := _first_other(program, _export(model, call, True, dynamic)))
        is not None
    ):
        raise ValueError(
            "expected a model in eval mode, as model.eval() sets it: in train mode "
            f"{named_module(model, module_of(node))} computes otherwise"
        )
    return program


def _check_not_lazy(model: nn.Module) -> None:
    lazy = [repr(name) for name, x in model.named_parameters() if is_lazy(x)]
    if lazy:
        raise ValueError(
            f"expected parameters of the {type(model).__name__} that have shapes, but "
            f"lazy layers have not made {', '.join(lazy)} yet: run the module on a "
            "batch first"
        )


class Trace(NamedTuple):
    """A model's program, and the shapes of what it was called with."""

    program: fx.GraphModule
    shapes: Any

    def of(self, model: nn.Module, example: Example) -> fx.GraphModule:
        """The program with the tensors of a model of the same class and sizes.

        Raises ValueError for another model, and for an example of other shapes.
        """
        shapes = shapes_of(example)
        if shapes != self.shapes:
            raise ValueError(
                f"expected the groups of an example of these shapes, {shapes}, got "
                f"groups of {self.shapes}: make them of the example that shrink gets"
            )
        new: dict[str, Tensor] = {}
        for name, x in named_tensors(self.program).items():
            other = tensor_at(model, name)
            # a constant that the trace made
            if other is None and not isinstance(x, nn.Parameter):
                continue
            if other is None or _kind_of(other) != _kind_of(x):
                got = "no such tensor" if other is None else _kind_of(other)
                raise ValueError(
                    f"expected the groups of this model, whose {name!r} is {got}, got "
                    f"groups of a model where it is {_kind_of(x)}: make them of the "
                    "model as it is"
                )
            new[name] = other
        return with_tensors(self.program, new)


def tensor_at(model: nn.Module, name: str) -> Tensor | None:
    """The tensor of a model at a path, if there is one.

    >>> tensor_at(torch.nn.ReLU(), "weight") is None
    True
    """
    try:
        found = operator.attrgetter(name)(model)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def shapes_of(example: Example) -> Any:
    """What a model is called with, shapes and dtypes in place of tensors.

    >>> shapes_of(torch.ones(2, 3))
    (('float32 (2, 3)',), {})
    """
    return pytree.tree_map(
        lambda x: _shape_of(x) if isinstance(x, Tensor) else x, as_call(example)
    )


def _shape_of(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _kind_of(x: Tensor) -> str:
    return f"{_shape_of(x)} on {x.device}"


def where_it_lies(model: nn.Module, call: Call) -> Call:
    """The arguments of a call, on the meta device for a model that is there.

    >>> where_it_lies(torch.nn.Linear(1, 1, device="meta"), ((torch.ones(1, 1),), {}))[
    ...     0
    ... ][0].device
    device(type='meta')
    """
    meta = any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    if meta:
        return _mapped(lambda x: x.to("meta"), call)
    return call


def _mapped(fn: Callable[[Tensor], Tensor], call: Call) -> Call:
    made: Call = pytree.tree_map(lambda x: fn(x) if isinstance(x, Tensor) else x, call)
    return made


def _export(model: nn.Module, call: Call, train: bool, dynamic: bool) -> fx.GraphModule:
    errors: list[Exception] = []
    for most in _choices(call) if dynamic else [0]:
        own = with_tensors(model)  # in its attributes tracing may leave things
        # export notes on tensors which sizes may change
        call = _mapped(Tensor.detach, call)
        if not train:
            own.eval()
        _LOG.addFilter(_OWN)  # else it shows the traceback of what is told in one line
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                shapes: Any = _dynamic(call, most)
                program = torch.export.export(
                    own, *call, dynamic_shapes=shapes, strict=False
                )
                if _shares(program):
                    program = program.run_decompositions({})
                return _unchecked(guards_by_name(program, own).module())
        except Exception as error:  # the model's own code fails in any way
            errors.append(error)
        finally:
            _LOG.removeFilter(_OWN)
    raise _failed(model, call, errors[-1]) from errors[-1]


def guards_by_name(program: ExportedProgram, model: nn.Module) -> ExportedProgram:
    """The program, whose checks of inputs find what its model takes as `**kwargs`.

    torch 2.14 writes `L['kwargs']['x']` for an input that the program itself names `x`,
    and `program.module()` then fails with "name 'L' is not defined". Other releases
    write `L['x']`. Test: `test_a_program_does_not_find_its_keywords`.

    >>> program = torch.export.export(nn.ReLU(), (torch.ones(1),))
    >>> guards_by_name(program, nn.ReLU()) is program
    True
    """
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            guards = [
                guard.replace(f"L['{name}'][", "L[") for guard in program._guards_code
            ]
            program._guards_code = guards
    return program


def with_tensors(model: Module, tensors: Mapping[str, Tensor] | None = None) -> Module:
    """A copy of the modules of a model, with these parameters and buffers in place of
    its own, which it else shares.

    >>> layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> made = with_tensors(layer, {"weight": other.weight})
    >>> made is layer, made.weight is other.weight, made.bias is layer.bias
    (False, True, True)
    """
    parts = [(vars(part), part._parameters, part._buffers) for part in model.modules()]
    held = [
        x
        for some in parts
        for names in some
        for x in names.values()
        if isinstance(x, Tensor)
    ]
    memo: dict[int, Any] = {id(x): x for x in held}
    for name, x in named_tensors(model).items():
        memo[id(x)] = (tensors or {}).get(name, x)
    return copy.deepcopy(model, memo)


def _choices(call: Call) -> list[int | None]:
    # How many dimensions of a tensor may have another size: all, the first, none; each
    # as far as it is another choice.
    made: dict[Any, int | None] = {}
    for most in (None, 1, 0):
        made.setdefault(str([_open(x, most) for x in _tensors(call)]), most)
    return list(made.values())


def may_resize(example: Example) -> bool:
    """Whether a program of this example may take other sizes: the example has a
    dimension whose size is not 1.

    >>> may_resize(torch.ones(2, 3)), may_resize(torch.ones(1, 3, 8, 8))
    (True, False)
    """
    return any(_open(x, None) for x in _tensors(as_call(example)))


def _tensors(call: Call) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]


def _open(x: Tensor, most: int | None) -> list[int]:
    # The dimensions whose sizes may change. With symbols for the sides of images some
    # traces take minutes.
    few = most if x.ndim < 4 or most == 0 else 1
    return [d for d, n in enumerate(x.shape[:few]) if n > 1]


def _dynamic(call: Call, most: int | None) -> ShapesCollection | None:
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    found = _tensors(call)
    for x in found:
        shapes[x] = dict.fromkeys(_open(x, most), Dim.AUTO)
    return shapes if found and most != 0 else None


def _shares(program: ExportedProgram) -> bool:
    # Whether an operation writes into a tensor that another operation sees, too.
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for spec in schema.arguments if schema is not None else ():
            if spec.alias_info is None or not spec.alias_info.is_write:
                continue
            x = node_arguments(node)[spec.name]
            if isinstance(x, fx.Node) and (
                len(x.users) > 1 or (x.op != "placeholder" and _may_alias(x))
            ):
                return True
    return False


# They may give back their input, of which their signature says nothing.
_IDENTITIES = {
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "type_as",
}


def _may_alias(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or opname(node) in _IDENTITIES:
        return True
    return any(
        out.alias_info is not None and not out.alias_info.is_write
        for out in schema.returns
    )


def _unchecked(program: fx.GraphModule) -> fx.GraphModule:
    # Without the checks of dtype before casts, which a copy in another dtype would not
    # pass.
    for node in program.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        program.graph.erase_node(node)
    program.recompile()
    return program


def _first_other(a: fx.GraphModule, b: fx.GraphModule) -> fx.Node | None:
    # The first operation in which two programs of one model differ.
    for x, y in itertools.zip_longest(a.graph.nodes, b.graph.nodes):
        if x is None or y is None or _text(x) != _text(y):
            return y or x  # type: ignore[no-any-return]
    return None


def _text(node: fx.Node) -> str:
    given = node_arguments(node)
    if given.get("p") == 0:  # a dropout that drops nothing
        given = {**given, "train": None}
    return str((node.target, given or (node.args, node.kwargs)))


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Runs without gradients, and leaves the generators of random numbers as they were.

    >>> with isolated():
    ...     torch.is_grad_enabled()
    False
    """
    devices = list(range(torch.cuda.device_count()))
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        yield


def run_once(model: nn.Module, run: nn.Module, call: Call) -> Any:
    """What a copy of a model gives for a call.

    ValueError where the model does not run on it.

    >>> run_once(torch.nn.ReLU(), torch.nn.ReLU(), ((torch.ones(1),), {}))
    tensor([1.])
    """
    try:
        with isolated():
            args, kwargs = _mapped(Tensor.clone, call)
            return run(*args, **kwargs)
    except Exception as own:  # the model's own code fails in any way
        text = (
            f"expected an example that the {_kind(model)} can be called with: it "
            f"fails with {first_line(own)}"
        )
        raise ValueError(text) from own


def _failed(model: nn.Module, call: Call, error: Exception) -> ValueError:
    try:
        out = run_once(model, with_tensors(model).eval(), call)
    except ValueError as own:
        return own
    place = _PLACE.findall(str(error))
    at = f" (in {place[-1][2]} at {place[-1][0]}:{place[-1][1]})" if place else ""
    why = f"torch.export cannot follow the {_kind(model)}: {first_line(error)}{at}"
    for what, tree in (("arguments", call), ("outputs", out)):
        other = _other(tree)
        if other:
            return ValueError(
                f"{why}. Among its {what} is a {other}, which is no tensor: "
                f"{_without(model, call)}"
            )
    return ValueError(
        f"{why}. Name submodules that it can follow in only= of sf.shrinking.groups "
        "and of sf.shrink, or take out of forward what depends on the values of "
        "tensors"
    )


def _kind(model: nn.Module) -> str:
    return str(model._get_name())  # type: ignore[no-untyped-call]


_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# which torch.export takes
_PLAIN = (Tensor, int, float, complex, str, type(None), torch.dtype, torch.device)


def _other(tree: Any) -> str:
    # The type of the first object that torch.export does not take.
    return next(
        (
            type(x).__name__
            for x in pytree.tree_leaves(tree)
            if not isinstance(x, _PLAIN)
        ),
        "",
    )


def _without(model: nn.Module, call: Call) -> str:
    # How to call a model so that nothing but tensors go in and out.
    known = list(inspect.signature(model.forward).parameters)
    if "use_cache" not in known:
        return (
            "call it so that it takes and gives tensors alone, and tuples, lists and "
            "dicts of them"
        )
    given = {**dict(zip(known, call[0], strict=False)), **call[1]}
    names = [
        name
        for name, value in given.items()
        if name != "use_cache" and not _other(value)
    ]
    shown = ", ".join([*(f"{name!r}: ..." for name in names), "'use_cache': False"])
    return f"give use_cache=False in the example, as {{{shown}}}"


def first_line(error: BaseException) -> str:
    """What an exception says, in one line.

    >>> first_line(ValueError("no. See below"))
    'ValueError: no'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].split('. ')[0] if lines else ''}".rstrip(
        ".: "
    )


def matched(module: nn.Module, globs: Sequence[str]) -> list[str]:
    """The paths of the submodules that globs match, none of which is inside another.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.ReLU()
    ... )
    >>> matched(net, ["0*", "1"])
    ['0', '1']

    Raises TypeError for anything but globs, and ValueError for a glob that matches
    none, and for a submodule that shares a parameter with the rest.
    """
    wanted = "expected only to be globs of submodules such as 'layers.*.mlp'"
    if not isinstance(globs, Sequence) or any(
        not isinstance(glob, str) for glob in globs
    ):
        raise TypeError(
            f"{wanted}, got {globs!r}; which units go is what the masks say"
        )
    if not globs:
        raise ValueError(f"{wanted}, got none")
    names = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    lost = []
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            lost.append(repr(glob))
    if lost:
        raise ValueError(
            f"only: no path matches {', nor '.join(lost)}; the paths are "
            f"{', '.join(map(repr, names))}"
        )
    found: list[str] = []
    for path in names:  # a module comes before what is in it
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if not is_inside and any(fnmatchcase(path, glob) for glob in globs):
            found.append(path)
    for path in found:
        inside = {id(param) for param in module.get_submodule(path).parameters()}
        for name, param in module.named_parameters(remove_duplicate=False):
            if id(param) in inside and not name.startswith(f"{path}."):
                raise ValueError(
                    f"expected {path!r} to have its parameters alone, but it shares "
                    f"{name!r}"
                )
    return found


class Parts(nn.Module):
    """A module that runs some submodules instead of itself, each on its own call.

    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU()).eval()
    >>> Parts(net, ["0"])(torch.ones(3, 1))[0].shape
    torch.Size([3, 2])
    """

    def __init__(self, module: nn.Module, paths: Sequence[str]) -> None:
        super().__init__()
        self._called = list(paths)
        self._modules = module._modules
        self._parameters = module._parameters
        self._buffers = module._buffers

    def _get_name(self) -> str:
        return f"submodules {', '.join(map(repr, self._called))}"

    def forward(self, *calls: Example) -> list[Any]:
        """What each submodule gives for its call."""
        outs = []
        for path, example in zip(self._called, calls, strict=True):
            args, kwargs = as_call(example)
            outs.append(self.get_submodule(path)(*args, **kwargs))
        return outs


def calls_of(
    module: nn.Module, paths: Sequence[str], example: Example
) -> dict[str, Example]:
    """What each submodule is first called with when the module runs on an example.

    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU()).eval()
    >>> calls_of(net, ["1"], torch.ones(3, 1))["1"][0].shape
    torch.Size([3, 2])

    Raises ValueError for a submodule that is not called, and for arguments without a
    name beside arguments with one.
    """
    own = bake(module, {}, partial=True)  # a copy
    made: dict[str, Any] = {}
    for path in paths:

        def note(
            part: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            path: str = path,
        ) -> None:
            given: Any = (args, kwargs)
            if path not in made:
                made[path] = optree.tree_map(_cloned, given)

        own.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
    run_once(own, own, where_it_lies(module, as_call(example)))
    calls: dict[str, Example] = {}
    for path in paths:
        if path not in made:
            raise ValueError(
                f"expected the module to call {path!r} on the example, but it does not"
            )
        args, kwargs = made[path]
        calls[path] = args
        if kwargs:
            part = module.get_submodule(path)
            calls[path] = _by_name(part, path, args, kwargs)
    return calls


def _cloned(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _by_name(
    part: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    bound = inspect.signature(part.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind in (kind.VAR_POSITIONAL, kind.POSITIONAL_ONLY):
            raise ValueError(
                f"expected a forward of {path!r} all of whose arguments have names"
            )
        if kind is kind.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named
