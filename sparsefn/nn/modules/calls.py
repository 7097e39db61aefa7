"""Calls of a module with other weights and buffers, which leave it unchanged."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsefn.core.state import State, effective
from sparsefn.core.tree import Tree, flatten, mend_of
from sparsefn.nn.modules.originals import check_masked
from sparsefn.nn.modules.wrappers import (
    Named,
    OwnTensors,
    check_not_parallel,
    check_not_sharded,
    mend_of_names,
    own_tensors,
)

# torch's checkpointing without re-entrance consists of autograd's hooks on saved
# tensors.
_CHECKPOINTED = (
    "sf.modules.call cannot run a forward with activation checkpointing, or other "
    "hooks on saved tensors, as it would run again in the backward with the module's "
    "own weights: turn it off, or call under torch.no_grad()"
)


Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(example: Example) -> Call:
    """The positional and keyword arguments that an example input stands for.

    >>> sf.modules.as_call((1, 2)), sf.modules.as_call({"x": 1})
    (((1, 2), {}), ((), {'x': 1}))

    Args:
        example: What a model is called with: a tensor as the only argument, a tuple of
            positional arguments, or a dict of keyword arguments.

    Returns:
        A tuple and a dict, for `model(*args, **kwargs)`.

    Raises:
        TypeError: `example` is of another type.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Tensor) or type(example) is tuple:
        return example if isinstance(example, tuple) else (example,), {}
    raise TypeError(
        "expected example to be what the model is called with: a tensor, a tuple of "
        f"arguments or a dict of keyword arguments, got {type(example).__name__}"
    )


def call(
    module: nn.Module,
    state_or_params: State | Tree,
    *args: Tree,
    buffers: Mapping[str, Tensor] | None = None,
    partial: bool = False,
    **kwargs: Tree,
) -> Tree:
    """Run the module with other weights: a state's effective ones, or params as given.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> state = sf.State(
    ...     {"weight": torch.tensor([[3.0, 5.0]])},
    ...     {"weight": torch.tensor([[True, False]])},
    ... )
    >>> (
    ...     sf.modules.call(layer, state, torch.ones(2)),
    ...     sf.modules.call(layer, state.params, torch.ones(2)),
    ... )
    (tensor([3.]), tensor([8.]))

    Args:
        module: The module. It is left as it was: attributes that the forward or one of
            its hooks sets are put back.
        state_or_params: A State, or any tree of tensors whose dotted paths are the
            names of the module's parameters.
        *args: Arguments of the forward.
        buffers: Tensors by name, of which the forward gets copies. Default: the
            module's own.
        partial: Whether names may be missing. The module's own parameters take their
            place, as constants.
        **kwargs: Keyword arguments of the forward.

    Returns:
        What the forward returns.

    Raises:
        TypeError: `module` is not a module, or weights or buffers are no tree of
            tensors.
        ValueError: Names are unknown or missing, a tensor has another shape, a weight
            is computed from a masked parameter, or the module is inside of
            `DistributedDataParallel` or sharded by `fully_shard`.
        RuntimeError: The forward has activation checkpointing where a gradient may be
            asked for, looks up an embedding with `max_norm` under `vmap` over inputs,
            or writes into a parameter: then the one that it was given is changed.

    A forward that changes buffers (BatchNorm in train mode) changes the copies, which
    are dropped with a UserWarning: `call_with_buffers` returns them, and says what such
    buffers need under `vmap`. So it is with the table of an embedding with `max_norm`,
    whose rows the forward scales down: what it looks up is right, and params stay as
    they were.

    Works under `grad`, `vmap` and `torch.compile`, where nothing warns and only a part
    with hooks is put back. Writes into the memory of `param.data` alone, as
    `param.data.mul_(2)`, are not seen; outside of `grad`, torch does not count them.
    """
    out, _, dropped = _run(module, state_or_params, buffers, partial, args, kwargs)
    if dropped:
        warnings.warn(
            f"the forward changed buffers, {', '.join(map(repr, dropped))}, and "
            "sf.modules.call drops the changes: use sf.modules.call_with_buffers, or "
            "module.eval()",
            UserWarning,
            stacklevel=2,
        )
    return out


def call_with_buffers(
    module: nn.Module,
    state_or_params: State | Tree,
    buffers: Mapping[str, Tensor],
    *args: Tree,
    partial: bool = False,
    **kwargs: Tree,
) -> tuple[Tree, dict[str, Tensor]]:
    """Run the module as `call` does, and return its buffers after the forward, too.

    >>> norm, x = torch.nn.BatchNorm1d(1, momentum=0.5), torch.tensor([[0.0], [4.0]])
    >>> out, buffers = sf.modules.call_with_buffers(
    ...     norm, sf.modules.params_of(norm), sf.modules.buffers_of(norm), x
    ... )
    >>> buffers["running_mean"], buffers["num_batches_tracked"], norm.running_mean
    (tensor([1.]), tensor(1), tensor([0.]))

    Args:
        module: As in `call`.
        state_or_params: As in `call`.
        buffers: Tensors by name, as `buffers_of` has them. They are not changed.
        *args: Arguments of the forward.
        partial: As in `call`.
        **kwargs: Keyword arguments of the forward.

    Returns:
        What the forward returns, and a dict of the buffers after it. Under `grad`
        return the dict as the auxiliary output.

    Raises:
        TypeError: As in `call`.
        ValueError: As in `call`.
        RuntimeError: As in `call`.

    Under `vmap` over members every member needs its own buffers: stack them
    (`sf.ensemble.stack([buffers] * B)`) and map over them, as batched values cannot be
    written into an unbatched buffer.
    """
    return _run(module, state_or_params, buffers, partial, args, kwargs)[:2]


def quiet_call(
    named: Named,
    weights: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] | None = None,
) -> Callable[[Call], Tree]:
    """What a module returns with other weights and buffers, as a function of calls,
    with no word on what it changes.

    >>> layer = Named.of(torch.nn.Linear(2, 1, bias=False))
    >>> quiet_call(layer, {"weight": torch.ones(1, 2)})(((torch.ones(2),), {}))
    tensor([2.])

    It may write into the weights that `limited_tables` names.
    """
    given = {name: (at, weights[name]) for name, (at, _) in named.own.items()}
    tensors = _prepared(named.module, given, buffers)
    return lambda call: _called(named.module, *tensors, *call)[0]


def limited_tables(module: nn.Module) -> list[str]:
    """The paths of the weights that a forward of the module writes: tables of
    embeddings with `max_norm`.

    >>> limited_tables(
    ...     torch.nn.Sequential(
    ...         torch.nn.Embedding(2, 2), torch.nn.Embedding(2, 2, max_norm=1.0)
    ...     )
    ... )
    ['1.weight']
    """
    tables = _limited(module)
    own = own_tensors(module, "parameters") if tables else {}
    return [at for at, tensor in own.values() if _is_among(tensor, tables)]


def _is_among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _limited(module: nn.Module) -> list[Tensor]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    layers = [
        part
        for part in module.modules()
        if isinstance(part, kinds) and part.max_norm is not None
    ]
    tables = [layer._parameters.get("weight") for layer in layers]
    # what a parametrization computes is no parameter
    return [table for table in tables if table is not None]


@contextlib.contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """While it is entered the module itself runs; then what its forward writes, buffers
    and tables, is put back.

    >>> norm = torch.nn.BatchNorm1d(1)
    >>> with left_as_it_was(norm):
    ...     out = norm(torch.tensor([[0.0], [4.0]]))
    >>> norm.running_mean
    tensor([0.])
    """
    written = [
        x for x in (*module.buffers(), *_limited(module)) if not x.is_inference()
    ]
    before = [x.detach().clone() for x in written]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, old in zip(written, before, strict=True):
                x.copy_(old)


def _run(
    module: nn.Module,
    params: Tree,
    buffers: Mapping[str, Tensor] | None,
    partial: bool,
    args: Tree,
    kwargs: Tree,
) -> tuple[Tree, dict[str, Tensor], list[str]]:
    weights = tensors_for(module, "parameters", params, partial)
    written = limited_tables(module)
    tables = {
        name: (at, table.clone())
        for name, (at, table) in weights.items()
        if at in written
    }
    tensors = _prepared(module, weights | tables, buffers)
    result = _called(module, *tensors, args, kwargs)
    scaled = [
        name
        for name, (_, table) in tables.items()
        if module.training and _changed(table, table)
    ]
    if scaled:
        warnings.warn(
            f"the forward scaled rows of {', '.join(map(repr, scaled))} down to "
            "max_norm, and sf.modules.call drops that: to train, scale them after "
            "each step, params[name] = torch.renorm(params[name], 2, 0, max_norm); "
            "else call module.eval()",
            UserWarning,
            stacklevel=3,
        )
    return result


def _prepared(
    module: nn.Module, weights: OwnTensors, buffers: Mapping[str, Tensor] | None
) -> tuple[OwnTensors, OwnTensors]:
    check_not_sharded("sf.modules.call", module)
    if buffers is None:
        given = tensors_for(module, "buffers", {}, True)
    else:
        given = tensors_for(module, "buffers", buffers)
    # there are wrappers
    if any(name != at for named in (weights, given) for name, (at, _) in named.items()):
        check_not_parallel(module)
    return weights, given


def _called(
    module: nn.Module,
    weights: OwnTensors,
    given: OwnTensors,
    args: Tree,
    kwargs: Tree,
) -> tuple[Tree, dict[str, Tensor], list[str]]:
    copies = {name: (at, buffer.clone()) for name, (at, buffer) in given.items()}
    # functional_call writes buffers that the forward replaced into the dict it was
    # given.
    tensors = dict([*weights.values(), *copies.values()])
    tables = limited_tables(module)
    watched = {name: x for name, (at, x) in weights.items() if at not in tables}
    with _unwritten(module, watched), _unchanged(module), _without_checkpointing():
        out = torch.func.functional_call(module, tensors, args, kwargs)
    changed = [
        name
        for name, (at, copied) in copies.items()
        if module.training and _changed(copied, tensors[at])
    ]
    return out, {name: tensors[at] for name, (at, _) in copies.items()}, changed


def _changed(copied: Tensor, left: Tensor) -> bool:
    # A fresh copy has version 0. No value is read, as that would wait for a device.
    if torch.compiler.is_compiling():
        return False
    return left is not copied or not (copied.is_inference() or copied._version == 0)


@contextlib.contextmanager
def _unwritten(module: nn.Module, watched: Mapping[str, Tensor]) -> Iterator[None]:
    # Raises where the forward wrote into a parameter, which is the caller's; also where
    # it failed after that.
    if torch.compiler.is_compiling():
        before = {}
    else:
        before = {name: _trace(x) for name, x in watched.items()}
    try:
        yield
    except RuntimeError as error:
        if "embedding_renorm_" not in str(error):
            raise
        raise RuntimeError(
            "sf.modules.call: under vmap over inputs, a table with max_norm needs a "
            "copy for each member, as torch scales its rows in place: scale it "
            "before, torch.renorm(table, 2, 0, max_norm), and set max_norm = None"
        ) from error
    finally:
        written = [
            repr(name)
            for name, trace in before.items()
            if _is_written(trace, _trace(watched[name]))
        ]
        if written:
            raise RuntimeError(
                f"sf.modules.call: the forward of the {type(module).__name__} wrote "
                f"into {', '.join(written)}, which changed the params that it was "
                "given: have it compute a new tensor and use that, as "
                "torch.nn.functional.linear(x, self.weight - mean), and take params "
                "from before the call"
            )


def _trace(x: Tensor) -> tuple[int, int]:
    # What a write changes: the count of writes, or the memory, as `param.data = x`
    # does.
    version = 0 if x.is_inference() else x._version
    try:
        return version, x.data_ptr()
    except RuntimeError:
        # a transform's, which has no memory of its own; there torch refuses writes to
        # `.data`
        return version, 0


def _is_written(before: tuple[int, int], after: tuple[int, int]) -> bool:
    # Both change where recurrent layers move their weights into one memory, with the
    # same values.
    return (before[0] != after[0]) != (before[1] != after[1])


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    # functional_call puts back parameters and buffers; hooks such as weight_norm's set
    # attributes. Compiled code would be compiled again whenever an attribute that is
    # read here has changed, so it reads only attributes of hooked parts.
    compiling = torch.compiler.is_compiling()
    parts = [
        part
        for part in module.modules()
        if not compiling or part._forward_pre_hooks or part._forward_hooks
    ]
    before = [(part, dict(vars(part))) for part in parts]
    # Of a module that is registered under two names functional_call puts back its own
    # copies.
    held: list[tuple[dict[str, Any], dict[str, Any]]]
    held = [
        (own, dict(own))
        for part in parts
        if not compiling
        for own in (part._parameters, part._buffers)
    ]
    try:
        yield
    finally:
        for own, tensors in held:
            own.update(tensors)
        for part, old in before:
            now = vars(part)
            if len(now) == len(old) and all(
                map(operator.is_, now.values(), old.values())
            ):
                continue
            for name in [name for name in now if name not in old]:
                delattr(part, name)
            for name, value in old.items():
                if now.get(name) is not value:
                    setattr(part, name, value)


@contextlib.contextmanager
def _without_checkpointing() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # hooks around the call go with the backward, and do no harm
            with contextlib.suppress(RuntimeError):
                stack.enter_context(
                    torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTED)
                )
        yield


def tensors_for(
    module: nn.Module,
    kind: str,
    given: Tree,
    partial: bool = False,
    own: OwnTensors | None = None,
) -> OwnTensors:
    """`{name: (dotted path in the module, tensor)}` of the "parameters" or "buffers"
    that a module runs with.

    >>> tensors_for(
    ...     torch.nn.Linear(1, 1),
    ...     "parameters",
    ...     {"bias": torch.zeros(1), "weight": torch.ones(1, 1)},
    ... )
    {'weight': ('weight', tensor([[1.]])), 'bias': ('bias', tensor([0.]))}

    `given` is a State or a tree; with `partial` the module's own tensors fill in for
    missing ones, and with `own` they have the names of `own`. Raises as `call` does.
    """
    if own is None:
        own = own_tensors(module, kind)
    if isinstance(given, State):
        places = {name: at for name, (at, _) in own.items()}
        check_masked("masks", module, places, flatten(given.masks)[0])
    # which torch.compile cannot flatten
    nothing = isinstance(given, dict) and not given
    if nothing:
        tensors = {}
    else:
        tensors = flatten(effective(given) if isinstance(given, State) else given)[0]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not name:
            wanted = "a State or a tree of tensors"
            if kind == "buffers":
                wanted = "a dict of tensors"
            at = f" at {name!r}" if name else ""
            mend = mend_of(kind, given)
            raise TypeError(
                f"expected the {kind} as {wanted}, got "
                f"{type(tensor).__name__}{at}{mend}"
            )
    if partial:
        missing = []
    else:
        missing = [name for name in own if name not in tensors]
    unknown = [name for name in tensors if name not in own]
    if missing or unknown:
        first = {id(tensor): name for name, (_, tensor) in own.items()}
        tied = {
            name: first[id(tensor)]
            for name, (_, tensor) in own_tensors(module, kind, tied=True).items()
        }
        raise ValueError(
            f"expected the {kind} of the {type(module).__name__}, but missing are "
            f"{missing} and unknown {unknown}"
            + "".join(
                f"; {name!r} is tied to {tied[name]!r}"
                for name in unknown
                if name in tied
            )
            + mend_of_names(unknown, own)
        )
    for name, (_, tensor) in own.items():
        check_shape(kind, name, tensors.get(name, tensor), tensor)
    return {
        name: (at, tensors[name] if name in tensors else tensor.detach())
        for name, (at, tensor) in own.items()
    }


def check_state(call: str, state: object, place: str = "") -> None:
    """Raise TypeError for anything but a State.

    >>> check_state("commit", {}, " second")
    Traceback (most recent call last):
        ...
    TypeError: commit: expected a State second, as algorithm.init(params) gives it, got
    dict
    """
    if not isinstance(state, State):
        kind = f"{type(state).__name__}{mend_of('state', state)}"
        raise TypeError(
            f"{call}: expected a State{place}, as algorithm.init(params) gives it, "
            f"got {kind}"
        )


def check_shape(what: str, name: str, given: Tensor, like: Tensor) -> None:
    """Raise ValueError where a tensor has another shape.

    >>> check_shape("a mask", "w", torch.zeros(2), torch.zeros(3))
    Traceback (most recent call last):
        ...
    ValueError: expected a mask of shape (3,) at 'w', got (2,)
    """
    if given.shape != like.shape:
        raise ValueError(
            f"expected {what} of shape {tuple(like.shape)} at {name!r}, got "
            f"{tuple(given.shape)}"
        )
