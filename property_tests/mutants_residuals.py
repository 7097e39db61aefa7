"""Planted bugs in how residual layers are found, counted and removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from property_tests.mutants_shrinking import Place, planted
from sparsefn.shrinking import depth, removal, residuals
from sparsefn.shrinking.depth import Layers, ResidualLayer
from sparsefn.shrinking.values import node_arguments, tensors_of
from tests.shrinking.residual_nets import check_without_layers, residual_nets


class ResidualMutant(NamedTuple):
    """Random residual networks, of all kinds of blocks or of these, must notice these
    changes.
    """

    bug: str
    places: tuple[Place, ...]
    kinds: tuple[str, ...] = ()


class _Noticed(Exception):
    pass


def noticed(mutant: ResidualMutant, count: int = 40) -> str:
    """What goes wrong with the first random network that notices the bug, and holds
    without it; nothing where none does.
    """

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(residual_nets(mutant.kinds), st.integers(0, 99))
    def run(net: nn.Module, seed: int) -> None:
        check_without_layers(net, seed)
        try:
            with planted(mutant.places):
                check_without_layers(net, seed)
        except Exception as error:  # a bug may do anything
            raise _Noticed(f"{type(error).__name__}: {error}") from error

    try:
        run()
    except _Noticed as found:
        return str(found)
    return ""


def _both_ways(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    given = node_arguments(node) if node.op == "call_function" else {}
    a = given.get("self")
    b = given.get("other")
    if node.target not in residuals._SUMS or a is b:
        return
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        yield a, b
        yield b, a


def _all_zero(program: Any, nodes: Sequence[fx.Node], masks: Any) -> list[bool]:
    return [True for _ in nodes]


def _moves_one_zero(node: fx.Node, zero: set[fx.Node]) -> bool:
    return any(one in zero for one in node.all_input_nodes)


def _with_all_before(
    branch: fx.Node, sum: fx.Node, place: Any, unread: Any
) -> frozenset[fx.Node]:
    (skip,) = {*sum.all_input_nodes} - {branch}
    return frozenset(_before(branch) - _before(skip))


def _before(last: fx.Node) -> set[fx.Node]:
    found = set[fx.Node]()
    queue = [last]
    while queue:
        node = queue.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            queue += node.all_input_nodes
    return found


def _read_at_all(program: fx.GraphModule, nodes: frozenset[fx.Node]) -> list[str]:
    held = tensors_of(program)
    inputs = {one for node in nodes for one in node.all_input_nodes}
    read = {id(held[str(one.target)]) for one in inputs if one.op == "get_attr"}
    return [name for name, x in program.named_parameters() if id(x) in read]


def _inside_none(unit: Any, units: Any) -> ResidualLayer:
    return _LAYER(unit, units)._replace(inside=frozenset())


def _cost_of_all(self: Layers, lost: Any) -> Any:
    return _LIVE(self, set())


_LAYER, _LIVE = depth._layer, Layers._live

RESIDUALS = [
    ResidualMutant(
        "x may be either summand, with a factor or a sign",
        ((residuals, "_summands", _both_ways),),
        ("reversed", "twice x"),
    ),
    ResidualMutant(
        "every branch is 0 where its parameters are",
        ((depth, "are_zero", _all_zero), (removal, "are_zero", _all_zero)),
        ("not zero", "plain"),
    ),
    ResidualMutant(
        "what moves one tensor of zeros gives zeros",
        ((residuals, "_stays_zero", _moves_one_zero),),
        ("half", "plain"),
    ),
    ResidualMutant(
        "a branch owns the operations that others read, too",
        ((residuals, "_own", _with_all_before),),
        ("read outside", "plain"),
    ),
    ResidualMutant(
        "what nothing reads counts as a reader",
        ((residuals, "unread", lambda program, sums: set()),),
        ("attention", "not read"),
    ),
    ResidualMutant(
        "a branch owns the parameters that others read, too",
        ((depth, "own_leaves", _read_at_all), (removal, "own_leaves", _read_at_all)),
        ("plain", "minus"),
    ),
    ResidualMutant(
        "no layer is inside another one", ((depth, "_layer", _inside_none),)
    ),
    ResidualMutant("what goes costs nothing less", ((Layers, "_live", _cost_of_all),)),
    ResidualMutant(
        "the program keeps what nothing reads",
        ((residuals, "_read", lambda program: set()),),
        ("two", "plain"),
    ),
]

if __name__ == "__main__":
    for mutant in RESIDUALS:
        lines = noticed(mutant).splitlines()
        print(f"{mutant.bug}: {lines[0] if lines else 'not noticed'}", flush=True)
