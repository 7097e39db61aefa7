"""The analysis of a traced program: a label for every dimension of every tensor; and
what stays of it where some atoms go.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from sparsefn.shrinking import moves, norms, rules
from sparsefn.shrinking.atoms import Atoms, Flags, Ids, Label, product
from sparsefn.shrinking.probe import of_leaf, pointwise, tried
from sparsefn.shrinking.values import (
    Book,
    Step,
    Value,
    bind,
    blank,
    by_name,
    replaced,
    run_op,
    tensors_of,
    values_in,
)

Rule = Callable[[Step], Any]


class Analysis(NamedTuple):
    """What is known of a program: of each node the Values of its outputs, and of each
    leaf its Value.
    """

    graph: fx.GraphModule
    values: dict[fx.Node, Any]
    leaves: dict[str, Value]
    book: Book

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters of the program, under all of their names."""
        return dict(self.graph.named_parameters(remove_duplicate=False))


def analyse(
    graph: fx.GraphModule,
    masks: Mapping[str, Tensor] | None = None,
    *,
    counted: bool = False,
    equal_parts: bool = True,
) -> Analysis:
    """Follow a program from `torch.export` through all of its operations.

    An atom that is not frozen in the end may go, with all indices that are made of it.
    Without `masks` it may go once it is masked in all parameters that hold it; with
    masks it may go as they are, and what the layers that read a constant have to add to
    their biases is in `book.folds`.
    """
    book = Book(Atoms(), counted, equal_parts, masks)
    made = Analysis(graph, {}, {}, book)
    held = tensors_of(graph)
    seen = dict[int, Value]()
    reads = Counter[int]()
    for node in graph.graph.find_nodes(op="get_attr"):
        leaf = held[str(node.target)]
        reads[id(leaf)] += len(node.users)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            made.values[node] = _leaf(made, name, held[name], reads, seen)
        else:
            made.values[node] = _of_node(made, node)
    return _settled(made)


def labels_of(analysis: Analysis) -> list[Ids]:
    """The labels of all dimensions in a program, each once, without empty ones."""
    found: dict[int, Ids] = {}
    for value in values_in([analysis.leaves, list(analysis.values.values())]):
        for label in value.labels:
            if label is not None and len(label):
                found[id(label)] = label
    return list(found.values())


def _settled(made: Analysis) -> Analysis:
    # With the labels as they are in the end, of which equal ones are one array.
    ends = dict[int, Ids]()
    known = dict[Any, Ids]()
    for label in labels_of(made):
        end = made.book.atoms.resolve(label)
        key = (end.shape, end.tobytes())
        ends[id(label)] = known.setdefault(key, end)

    def resolved(value: Value) -> Value:
        labels = [ends.get(id(label)) for label in value.labels]
        return value.along(labels, value.gone)

    def settle(tree: Any) -> Any:
        return replaced(tree, map(resolved, values_in(tree)))

    values = {node: settle(tree) for node, tree in made.values.items()}
    return made._replace(values=values, leaves=settle(made.leaves))


def _leaf(
    made: Analysis,
    name: str,
    leaf: Any,
    reads: Mapping[int, int],
    seen: dict[int, Value],
) -> Any:
    if not isinstance(leaf, Tensor):
        return None
    if id(leaf) not in seen:
        book = made.book
        if book.masks is None:
            mask = None
        else:
            mask = book.masks.get(name)
        if mask is not None and not mask.ndim:  # the leaf is dense
            mask = None
        real = None if leaf.is_meta else leaf.detach()
        if real is not None and mask is not None:
            real = real * mask
        # What nothing reads stays whole.
        read = reads[id(leaf)]
        labels: list[Label] = []
        gone = []
        for d, n in enumerate(leaf.shape):
            labels.append(book.atoms.new(n) if n > 1 and read else None)
            gone.append(of_leaf(book, leaf, real, mask, d))
        seen[id(leaf)] = Value(
            tuple(leaf.shape),
            leaf.dtype,
            tuple(labels),
            tuple(gone),
            real,
            name,
            mask,
            read,
            whole=name,
        )
    made.leaves[name] = seen[id(leaf)]
    return seen[id(leaf)]


def _of_node(made: Analysis, node: fx.Node) -> Any:
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made.values[n])
    ins = values_in([args, kwargs])
    if node.op == "output":
        for value in ins:
            for label in value.labels:
                made.book.atoms.freeze(label, "it is an output of the model")
        return None
    outs = blank(node.meta.get("val"))
    if node.op != "call_function" or not values_in(outs):
        return outs
    if node.target is operator.getitem:
        values, place = args
        return values[place]
    if not hasattr(node.target, "_schema"):
        step = Step(node, {}, outs, made.book)
        step.freeze_all(ins, "is a program of its own")
        return outs
    step = Step(node, bind(node.target, args, kwargs), outs, made.book)
    rule = _rule(step)
    outs = _known(step, ins, rule(step))
    if node.target._schema.is_mutable:
        for read in node.all_input_nodes:
            if isinstance(made.values.get(read), Value):
                made.values[read] = outs
                break
    return outs


def _rule(step: Step) -> Rule:
    if step.name in _RULES:
        return _RULES[step.name]
    overload = step.target._overloadname
    if step.name in moves.MOVES and overload not in ("dtype", "self_Tensor"):
        tied = step.name in _PARTS and step.book.equal_parts
        return _parts if tied else moves.move
    if torch.Tag.pointwise in step.target.tags or step.name in _POINTWISE:
        return pointwise
    return tried


def _known(step: Step, ins: list[Value], out: Any) -> Any:
    # With the numbers of integers that do not depend on inputs, such as indices, and
    # with the leaf all of whose entries a move has.
    if not ins or not isinstance(out, Value):
        return out
    known = []
    for value in ins:
        if value.real is not None and not value.dtype.is_floating_point:
            known.append(value.real)
    if len(known) == len(ins) and not out.dtype.is_floating_point:
        real = run_op(step.target, step.arguments, known)[0]
        out = out._replace(real=real)
    if step.name in moves.MOVES and len(ins) == 1:
        whole = None
        if math.prod(out.shape) == math.prod(ins[0].shape):
            whole = ins[0].whole
        out = out._replace(whole=whole)
    return out


def _parts(step: Step) -> Any:
    # The parts of a chunk lose the same entries, so that code that cuts in equal parts
    # runs as it is.
    outs = moves.move(step)
    parts = values_in(outs)
    whole = values_in(step.arguments)[0]
    for d, size in enumerate(whole.shape):
        sizes = {part.shape[d] for part in parts}
        if len(sizes) == 1 and not sizes <= {1, size}:
            step.join(*(part.labels[d] for part in parts))
    return outs


def _uniform(step: Step) -> Any:
    """Tensors of one number: any of their indices may go, as the size is an
    argument.
    """
    fills = {"zeros": 0.0, "new_zeros": 0.0, "ones": 1.0, "new_ones": 1.0}
    fill = fills.get(step.name, step.arguments.get("fill_value"))
    out: Value = step.outs
    labels = list(out.labels)
    gone = list(out.gone)
    plain = isinstance(fill, int | float) and out.dtype.is_floating_point
    # sizes of batches and sequences are symbols
    for d, size in enumerate(step.node.meta["val"].shape):
        n = out.shape[d]
        if n > 1 and isinstance(size, int):
            labels[d] = step.atoms.new(n)
        if n > 1 and plain:
            gone[d] = np.full(n, float(fill))  # type: ignore[arg-type]
    return out.along(labels, gone)


def _arange(step: Step) -> Any:
    args = step.node.args
    known = all(isinstance(x, int | bool | None) for x in args)
    if not known or step.outs.dtype.is_floating_point:
        return step.outs
    return step.outs._replace(real=torch.arange(*args, device="cpu"))  # type: ignore[arg-type]


def _dropout(step: Step) -> Any:
    x = values_in(step.arguments)[0]
    drops = step.arguments["train"] and step.arguments["p"]
    gone = []
    for some in x.gone:
        if some is not None and drops:
            some = np.where(some == 0, 0.0, np.nan)
        gone.append(some)
    outs = values_in(step.outs)
    return replaced(step.outs, [out.along(x.labels, gone) for out in outs])


def _shuffle(step: Step) -> Any:
    """Channels (groups, n) as (n, groups): any group, and any place in all groups, may
    go.
    """
    x = step.arguments["self"]
    groups = step.arguments["groups"]
    size = x.shape[1] // groups
    group, place = moves.divided(step, x.labels[1], groups, size)
    step.book.groups[step.node] = group
    labels = list(x.labels)
    gone = list(x.gone)
    labels[1] = product(place, size, group, groups)
    if gone[1] is not None:
        gone[1] = gone[1].reshape(groups, size).T.reshape(-1)
    return step.outs.along(labels, gone)


_PARTS = frozenset(
    [
        "chunk",
        "split",
        "tensor_split",
        "split_with_sizes",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
    ]
)
_POINTWISE = frozenset(["to", "_to_copy", "type_as", "masked_fill"])
_RULES: dict[str, Rule] = by_name(
    {
        "linear": rules.linear_layer,
        "addmm": rules.addmm,
        "matmul mm bmm mv dot addmv baddbmm": rules.matmul,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "convolution": rules.convolution,
        "einsum": rules.einsum,
        "bilinear": rules.bilinear,
        "_grouped_mm grouped_mm_fallback": rules.grouped_mm,
        "scaled_dot_product_attention": rules.attention,
        "lstm gru rnn_tanh rnn_relu": rules.recurrent,
        "embedding": moves.embedding,
        "index": moves.index,
        "index_select": moves.index_select,
        "pad constant_pad_nd": moves.pad,
        "layer_norm rms_norm": norms.layer_norm,
        "group_norm": norms.group_norm,
        "batch_norm _native_batch_norm_legit_no_training": norms.batch_norm,
        "mean": norms.mean_over,
        "full zeros ones empty new_zeros new_ones new_full new_empty": _uniform,
        "arange": _arange,
        "dropout": _dropout,
        "channel_shuffle": _shuffle,
    }
)


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A program of which some atoms go."""

    analysis: Analysis
    alive: Flags  # by atom
    known: dict[int, tuple[Ids, Flags, Tensor | None]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def kept(self, label: Label, size: int = 0) -> Flags:
        """Which indices of a dimension stay; of one without label all of them."""
        if label is None:
            return np.ones(size, bool)
        return self._places(label)[1]

    def _places(self, label: Ids) -> tuple[Ids, Flags, Tensor | None]:
        # The indices that stay, as flags and as numbers (None: all), known by id of the
        # label, which is held.
        if id(label) not in self.known:
            atoms = self.analysis.book.atoms.resolve(label)
            keep = np.asarray(self.alive[atoms].all(1))
            places = None
            if not keep.all():
                places = torch.from_numpy(keep).nonzero().flatten()
            self.known[id(label)] = (label, keep, places)
        return self.known[id(label)]

    def _numbers(self, label: Label) -> Tensor | None:
        if label is None:
            return None
        return self._places(label)[2]

    def loses(self, value: Value) -> bool:
        """Whether any dimension loses indices."""
        return any(self._numbers(label) is not None for label in value.labels)

    def size(self, value: Value) -> list[int]:
        """The shape of a tensor after the cut."""
        return [int(keep.sum()) for keep in map(self.kept, value.labels, value.shape)]

    def indices(self, name: str) -> tuple[Tensor | None, ...]:
        """Of a leaf the indices that stay along each dimension; None: all."""
        value = self.analysis.leaves.get(name)
        if value is None:
            return ()
        return tuple(map(self._numbers, value.labels))

    def take(self, name: str, x: Tensor) -> Tensor:
        """A leaf without the entries that go, in memory of its own."""
        return taken(x, self.indices(name))

    def mask(self, name: str) -> Tensor:
        """The mask of a leaf: an entry stays if its index along every dimension
        does.
        """
        value = self.analysis.leaves[name]
        made = torch.ones(value.shape, dtype=torch.bool, device="cpu")
        for d, keep in enumerate(map(self.kept, value.labels, value.shape)):
            if not keep.all():
                later = [1] * (made.ndim - d - 1)
                made &= torch.from_numpy(keep).reshape(-1, *later)
        return made


def taken(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """The entries of a tensor at indices along each dimension (None: all), in memory of
    their own.

    >>> taken(torch.tensor([[1, 2], [3, 4]]), (None, torch.tensor([1])))
    tensor([[2],
            [4]])
    """
    made = x.detach()
    for d, some in enumerate(indices):
        if some is not None:
            made = made.index_select(d, some.to(x.device))
    if all(some is None for some in indices):
        return made.clone()
    return made


def free(analysis: Analysis) -> Cut:
    """Without any atom that may go; but one index of each dimension stays."""
    atoms = analysis.book.atoms
    stays = atoms.reason[: atoms.count] > 0
    return one_stays(Cut(analysis, stays))


def one_stays(cut: Cut) -> Cut:
    """A cut that leaves the first index of a dimension all of whose indices would
    go.
    """
    alive = cut.alive.copy()
    for label in labels_of(cut.analysis):
        if not alive[label].all(1).any():
            alive[label[:1]] = True
    return Cut(cut.analysis, alive)


def folded_biases(cut: Cut, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The biases that take in what constants give whose inputs go, in float64: a proof
    sees no rounding of the biases.
    """
    made: dict[str, Tensor] = {}
    for fold in cut.analysis.book.folds:
        gone = ~cut.kept(fold.label)
        known = gone & np.isfinite(fold.constants)
        constants = np.where(known, fold.constants, 0.0)
        if constants.any():
            groups, _, inputs = fold.weights.shape
            shift = (
                (fold.weights * constants.reshape(groups, 1, inputs)).sum(2).reshape(-1)
            )
            bias = made.get(fold.bias, params[fold.bias])
            taken_in = torch.from_numpy(shift).to(bias.device)
            made[fold.bias] = bias.double() + taken_in
    return made
