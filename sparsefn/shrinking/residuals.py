"""Residual branches of a traced program: sums x + f(x), found by what their operations
read, whatever the modules are called.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.reindexing import MOVES
from sparsefn.shrinking.trace import with_tensors
from sparsefn.shrinking.values import (
    Value,
    module_of,
    node_arguments,
    opname,
    tensors_of,
)

_aten = torch.ops.aten
_SUMS = {
    _aten.add.Tensor: _aten.add.Tensor,
    _aten.add_.Tensor: _aten.add.Tensor,
    _aten.sub.Tensor: _aten.sub.Tensor,
    _aten.sub_.Tensor: _aten.sub.Tensor,
}
# They give what they take, in eval mode.
PASSES = frozenset(
    [
        "to",
        "_to_copy",
        "clone",
        "contiguous",
        "alias",
        "detach",
        "dropout",
        "feature_dropout",
        "lift_fresh_copy",
    ]
)


class Residual(NamedTuple):
    """A sum x + f(x) of a program.

    `skip` is the summand x, with what was added to it before, `branch` the summand
    f(x), and `own` are the operations and parameters that nothing but f reads, with
    what is computed from these and nothing reads.
    """

    sum: fx.Node
    skip: fx.Node
    branch: fx.Node
    own: frozenset[fx.Node]

    def __str__(self) -> str:
        path = module_of(self.branch)
        name = opname(self.branch)
        return f"{name} at {path!r}" if path else name

    @property
    def place(self) -> str:
        """The module that adds the branch, for errors."""
        path = module_of(self.sum)
        return repr(path) if path else "the module itself"


def residuals(program: fx.GraphModule) -> list[Residual]:
    """The sums x + f(x) of a program, in its order.

    >>> from sparsefn.shrinking.trace import traced
    >>> class Twice(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.f, self.g = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    ...
    ...     def forward(self, x):
    ...         x = x + self.f(x)
    ...         return x - self.g(x).tanh()
    >>> [one.branch.name for one in residuals(traced(Twice(), torch.ones(2, 3)))]
    ['linear', 'tanh']

    x may have passed other such sums on its way, and casts: x + f(x) + g(x) has the
    branches f and g. f may read other tensors too.
    """
    nodes = list(program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    before: list[int] = []  # the nodes that each node depends on, as bits
    known: dict[fx.Node, Residual] = {}
    for node in nodes:
        bits = 0
        for one in node.all_input_nodes:
            bits |= before[place[one]] | 1 << place[one]
        before.append(bits)
        for skip, branch in _summands(node):
            reached = before[place[branch]]
            if any(reached >> place[x] & 1 for x in _stream(skip, known)):
                known[node] = Residual(node, skip, branch, frozenset())
                break
    idle = unread(program, known)
    return [
        one._replace(own=_own(one.branch, one.sum, place, idle))
        for one in known.values()
    ]


def unread(program: fx.GraphModule, sums: Container[fx.Node]) -> set[fx.Node]:
    """The operations that no output needs, such as the mean of attention weights that a
    block drops.

    A sum x + f(x) is none, as it is a layer that may go by itself.

    >>> from sparsefn.shrinking.trace import traced
    >>> class Mean(torch.nn.Module):
    ...     def forward(self, x):
    ...         x.mean()
    ...         return x + 1
    >>> [node.name for node in unread(traced(Mean(), torch.ones(2, 3)), [])]
    ['mean']
    """
    found = set[fx.Node]()
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or node in sums:
            continue
        if found.issuperset(node.users) and not node.is_impure():
            found.add(node)
    return found


def _summands(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    # What may be x, and f(x) then, where the sum is x if f(x) is 0.
    if node.op != "call_function" or node.target not in _SUMS:
        return
    given = node_arguments(node)
    a = given["self"]
    b = given["other"]
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return
    if _is_like(a, node):
        yield a, b
    is_sum = opname(node) == "add" and given["alpha"] == 1
    if is_sum and _is_like(b, node):
        yield b, a


def _is_like(x: fx.Node, sum: fx.Node) -> bool:
    a = x.meta.get("val")
    b = sum.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.is_floating_point() and a.dtype == b.dtype and a.shape == b.shape


def _stream(x: fx.Node, known: Mapping[fx.Node, Residual]) -> Iterator[fx.Node]:
    # x, what it was cast from, and what it was before branches were added.
    while True:
        yield x
        if x in known:
            x = known[x].skip
        elif passes(x):
            x = x.all_input_nodes[0]
        else:
            return


def passes(node: fx.Node) -> bool:
    """Whether an operation gives what it takes, but for the dtype."""
    if node.op != "call_function" or opname(node) not in PASSES:
        return False
    given = node_arguments(node)
    drops = given.get("train") and given.get("p") != 0
    return not drops and len(node.all_input_nodes) == 1


def _own(
    branch: fx.Node,
    sum: fx.Node,
    place: Mapping[fx.Node, int],
    idle: Set[fx.Node],
) -> frozenset[fx.Node]:
    # From the last node back: one whose users are all among them, or unread ones, which
    # are then among them, too. x is read by the sum.
    own = set[fx.Node]()
    queue = [-place[branch]]
    nodes = {place[branch]: branch}
    while queue:
        node = nodes[-heapq.heappop(queue)]
        readers = node.users.keys() - idle
        if node is branch:
            readers.discard(sum)
        if node.op == "placeholder" or not own.issuperset(readers):
            continue
        own.add(node)
        for one in (*node.all_input_nodes, *(node.users.keys() & idle)):
            if place[one] not in nodes:
                nodes[place[one]] = one
                heapq.heappush(queue, -place[one])
    return frozenset(own)


def own_leaves(program: fx.GraphModule, nodes: frozenset[fx.Node]) -> list[str]:
    """The parameters that some operations of a program read, and no other ones do, by
    their first names.
    """
    held = tensors_of(program)
    readers: dict[int, list[fx.Node]] = {}
    for node in program.graph.find_nodes(op="get_attr"):
        readers.setdefault(id(held[str(node.target)]), []).append(node)
    return [
        name
        for name, x in program.named_parameters()
        if id(x) in readers and nodes.issuperset(readers[id(x)])
    ]


def reads_parameters(program: fx.GraphModule, one: Residual) -> bool:
    """Whether a branch has parameters, which others may read, too, by any name.

    >>> from sparsefn.shrinking.trace import traced
    >>> class Block(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return x + super().forward(x)
    >>> program = traced(Block(2, 2), torch.ones(3, 2))
    >>> reads_parameters(program, *residuals(program))
    True
    """
    held = tensors_of(program)
    known = {id(x) for x in program.parameters()}
    inputs = {node for own in one.own for node in own.all_input_nodes}
    return any(
        node.op == "get_attr" and id(held[str(node.target)]) in known for node in inputs
    )


def are_zero(
    program: fx.GraphModule,
    nodes: Sequence[fx.Node],
    masks: Mapping[str, Tensor],
) -> list[bool]:
    """Which tensors of a program are zero under masks, whatever its inputs are.

    They are found as constants are, and follow through products and moves: an operation
    of which nothing is known may give anything.
    """
    copied = with_tensors(program)
    twins = dict(zip(program.graph.nodes, copied.graph.nodes, strict=True))
    # what is written into a tensor is not known from then on
    for node in copied.graph.nodes:
        node.target = _SUMS.get(node.target, node.target)
    found = analyse(copied, masks, counted=True)
    zero = set[fx.Node]()
    for node in copied.graph.nodes:
        if _is_zero(found.values[node]) or _stays_zero(node, zero):
            zero.add(node)
    return [twins[node] in zero for node in nodes]


def _stays_zero(node: fx.Node, zero: set[fx.Node]) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if opname(node) == "mul":
        return any(one in zero for one in node.all_input_nodes)
    moves = opname(node) in MOVES or passes(node)
    return moves and zero.issuperset(node.all_input_nodes)


def _is_zero(value: Any) -> bool:
    if not isinstance(value, Value) or not math.prod(value.shape):
        return False
    return any(value.zero(d).all() for d in range(value.ndim))


def without_branches(
    program: fx.GraphModule, found: Sequence[Residual]
) -> fx.GraphModule:
    """A copy of a program without some branches, and without the parameters and buffers
    that it then does not read.

    Tensors that the program did not read either stay, and so do operations that nothing
    read, and all names of a tensor that it reads by one of them, each with its node.
    Without branches to remove it is the program itself.
    """
    if not found:
        return program
    made = with_tensors(program)
    twins = dict(zip(program.graph.nodes, made.graph.nodes, strict=True))
    ends = {twins[node] for node in program.graph.nodes if not node.users}
    gone = set[fx.Node]()
    for one in reversed(found):
        if one.sum in gone:  # inside a branch that is gone
            continue
        twins[one.sum].replace_all_uses_with(twins[one.skip])
        for node in (one.sum, *sorted(one.own - gone, reverse=True)):
            gone.add(node)
            if node.op != "get_attr":
                made.graph.erase_node(twins[node])
    # masks and sizes are found by the first name of a tensor, which may have no reader
    made.graph.eliminate_dead_code(
        lambda node: node.op == "get_attr" or node in ends or node.is_impure()
    )
    unread = _read(program) - _read(made)
    held = tensors_of(made)
    for node in made.graph.find_nodes(op="get_attr"):
        if id(held[str(node.target)]) in unread:
            made.graph.erase_node(node)
            path, _, last = str(node.target).rpartition(".")
            delattr(made.get_submodule(path), last)
    made.recompile()
    return made


def _read(program: fx.GraphModule) -> set[int]:
    # The tensors that operations read, whichever of their names they read.
    held = tensors_of(program)
    nodes = program.graph.find_nodes(op="get_attr")
    read = [held[str(node.target)] for node in nodes if node.users]
    return {id(x) for x in read if isinstance(x, Tensor)}
