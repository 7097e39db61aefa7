"""An algorithm whose update `torch.compile` runs instead of reading it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn.algorithms.frame import framed, update_of
from sparsefn.compose.states import check_algorithm
from sparsefn.engine.checks import described
from sparsefn.engine.surroundings import HIDES_COMPILING, is_exporting
from sparsefn.state import Algorithm, State, Step
from sparsefn.tree import Tree, leaves_of, opened


@described
def nonstrict(algorithm: Algorithm) -> Algorithm:
    """The algorithm whose update `torch.compile` calls instead of reading: it compiles in about half of the time.

    >>> algorithm = sf.nonstrict(sf.with_optimizer(sf.rigl(0.5, when=sf.never()), sf.optimizers.adam(1e-3)))
    >>> update = torch.compile(algorithm.update, fullgraph=True, backend="aot_eager")
    >>> state = update(algorithm.init({"w": torch.ones(4, 4)}), {"w": torch.ones(4, 4)}, 0)
    >>> int(state.masks["w"].sum())
    8

    The bits are those of the algorithm. `torch.compile` reads the code of an update line by line, and checks at each
    call that every function it met is still the same. Here it calls the update once with tensors that have no values,
    as JAX does, and records the operations (torch calls this non-strict tracing). What is left to check at each call
    are the arguments.

    Whatever else the update reads must stay as it is: a value that a function of yours finds in a global variable or in
    an object while it is compiled is used at every later step. Tensors that the algorithm was made with, such as the
    key of `hard_concrete`, the batches of a score from data or the keys of algorithms in `phases`, are refused: the
    compiler raises its RuntimeError, which says so. Trees may be of dicts, lists, tuples and named tuples.

    Without `torch.compile`, in `torch.export` and with torch before 2.13 this does nothing. Put it outermost, around
    `with_optimizer`; `vmap` goes around the update, and `torch.compile` around that. TypeError for anything but an
    Algorithm and, in compiled code, for a tree of other containers.
    """
    check_algorithm("nonstrict", algorithm)
    own = update_of(algorithm)

    def traced(state: State, grads: Tree, step: Tensor) -> tuple[Tensor, ...]:
        try:
            return tuple(leaves_of(own.inner(_thawed(state), _thawed(grads), step)))
        except AssertionError as error:
            if "FakeTensor" not in str(error):
                raise
            raise ValueError(
                "nonstrict: expected an update that reads no tensors but those of its arguments, got one from "
                f"outside: {error}"
            ) from error

    # Dynamo tells such functions apart by their code alone, and would take one algorithm for another.
    traced.__code__ = traced.__code__.replace()
    in_graph: Callable[..., tuple[Tensor, ...]] = torch.compiler.allow_in_graph(traced)  # type: ignore[no-untyped-call]

    def update(state: State, grads: Tree, step: Step) -> State:
        if HIDES_COMPILING or not torch.compiler.is_compiling() or is_exporting():
            return (own.around or own.inner)(state, grads, step)
        for name, tree in (("state", state), ("grads", grads)):
            _check_containers(name, tree)
        return opened(state)[1](list(in_graph(state, grads, step)))  # type: ignore[no-any-return]

    return framed(algorithm.init, own._replace(around=update), algorithm.view, settled=algorithm.settled)


def _check_containers(name: str, node: Tree) -> None:
    if node is None or isinstance(node, Tensor):
        return
    kind = type(node)
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if not named and kind not in (dict, list, tuple):
        raise TypeError(f"nonstrict: expected dicts, lists, tuples and named tuples, got {kind.__name__} at {name!r}")
    keys = node if kind is dict else node._fields if named else range(len(node))
    for key, child in zip(keys, node.values() if kind is dict else node, strict=True):
        _check_containers(f"{name}.{key}", child)


def _thawed(node: Tree) -> Tree:
    # A graph holds dicts and lists of types of its own.
    if isinstance(node, dict):
        return {key: _thawed(child) for key, child in node.items()}
    if isinstance(node, list):
        return [_thawed(child) for child in node]
    if isinstance(node, tuple):
        children = [_thawed(child) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return node
