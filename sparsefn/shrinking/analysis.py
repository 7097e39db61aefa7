"""The analysis of a traced program: a label for every dimension of every tensor; and
what stays of it where some atoms go.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from sparsefn.shrinking import moves, norms, rules
from sparsefn.shrinking.atoms import Atoms, Flags, Ids, Label, product
from sparsefn.shrinking.moves import MOVES, divided, move, pad
from sparsefn.shrinking.probe import of_leaf, pointwise, tried
from sparsefn.shrinking.values import (
    Book,
    Step,
    Value,
    bind,
    blank,
    module_of,
    opname,
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


def analyse(
    graph: fx.GraphModule,
    masks: Mapping[str, Tensor] | None = None,
    *,
    counted: bool = False,
    equal_parts: bool = True,
) -> Analysis:
    """Follow a program from `torch.export` through all of its operations.

    An atom that is not frozen in the end may go, with all indices that are made of it.
    Without `masks` that holds once it is masked wherever it lies in parameters; with
    masks it holds as they are, and what the layers that read a constant have to add to
    their biases is in `book.folds`.
    """
    book = Book(Atoms(), counted, equal_parts, masks)
    made = Analysis(graph, {}, {}, book)
    held = tensors_of(graph)
    seen = dict[int, Value]()
    reads = Counter(
        id(held[str(node.target)])
        for node in graph.graph.find_nodes(op="get_attr")
        for _ in node.users
    )
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            made.values[node] = _leaf(
                made, str(node.target), held[str(node.target)], reads, seen
            )
        else:
            made.values[node] = _of_node(made, node)
    return _settled(made)


def labels_of(analysis: Analysis) -> list[Ids]:
    """The labels of all dimensions in a program, each once, without empty ones."""
    values = values_in([analysis.leaves, list(analysis.values.values())])
    labels = (
        label
        for value in values
        for label in value.labels
        if label is not None and len(label)
    )
    return list({id(label): label for label in labels}.values())


def _settled(made: Analysis) -> Analysis:
    # With the labels as they are in the end, of which equal ones are one array.
    ends = dict[int, Ids]()
    known = dict[Any, Ids]()
    for label in labels_of(made):
        end = made.book.atoms.resolve(label)
        ends[id(label)] = known.setdefault((end.shape, end.tobytes()), end)

    def resolved(value: Value) -> Value:
        labels = tuple(ends.get(id(label)) for label in value.labels)
        return value._replace(labels=labels)

    def settle(tree: Any) -> Any:
        return replaced(tree, [resolved(value) for value in values_in(tree)])

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
        mask = None if made.book.masks is None else made.book.masks.get(name)
        # a 0-d mask is that of a dense leaf
        mask = None if mask is None or not mask.ndim else mask
        real = None if leaf.is_meta else leaf.detach()
        if real is not None and mask is not None:
            real = real * mask
        # What nothing reads stays whole.
        labels = tuple(
            made.book.atoms.new(n) if n > 1 and reads[id(leaf)] else None
            for n in leaf.shape
        )
        constants = tuple(
            of_leaf(made.book, leaf, real, mask, d) for d in range(leaf.ndim)
        )
        shape = tuple(leaf.shape)
        seen[id(leaf)] = Value(
            shape, leaf.dtype, labels, constants, real, name, mask, reads[id(leaf)]
        )
    made.leaves[name] = seen[id(leaf)]
    return seen[id(leaf)]


def _of_node(made: Analysis, node: fx.Node) -> Any:
    atoms = made.book.atoms
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made.values[n])
    if node.op == "output":
        for value in values_in(args):
            for label in value.labels:
                atoms.freeze(label, "it is an output of the model")
        return None
    outs = blank(node.meta.get("val"))
    if node.op != "call_function" or not values_in(outs):
        return outs
    if node.target is operator.getitem:
        return args[0][args[1]]
    name = opname(node)
    where = f"{name} at {module_of(node)!r}" if module_of(node) else name
    if not hasattr(node.target, "_schema"):
        for value in values_in([args, kwargs]):
            for label in value.labels:
                atoms.freeze(label, f"{where} is a program of its own")
        return outs
    step = Step(node, name, where, bind(node.target, args, kwargs), outs, made.book)
    outs = _rule(step)(step)
    if node.target._schema.is_mutable:
        written = [
            n for n in node.all_input_nodes if isinstance(made.values.get(n), Value)
        ][:1]
        made.values.update(dict.fromkeys(written, outs))
    return _known(step, outs)


def _rule(step: Step) -> Rule:
    own = _RULES.get(step.name)
    if own is not None:
        return own
    if step.name in MOVES and step.target._overloadname not in ("dtype", "self_Tensor"):
        return move if step.name not in _PARTS or not step.book.equal_parts else _parts
    return (
        pointwise
        if torch.Tag.pointwise in step.target.tags or step.name in _POINTWISE
        else tried
    )


def _known(step: Step, outs: Any) -> Any:
    # Integers that do not depend on inputs, such as indices.
    ins = values_in(step.arguments)
    known = [
        value.real
        for value in ins
        if value.real is not None and not value.dtype.is_floating_point
    ]
    if (
        not ins
        or len(known) < len(ins)
        or not isinstance(outs, Value)
        or outs.dtype.is_floating_point
    ):
        return outs
    return outs._replace(real=run_op(step.target, step.arguments, known)[0])


def _parts(step: Step) -> Any:
    # The parts of a chunk lose the same entries, so that code that cuts in equal parts
    # runs as it is.
    outs = move(step)
    some = values_in(outs)
    whole = values_in(step.arguments)[0]
    for d, size in enumerate(whole.shape):
        if len({part.shape[d] for part in some}) == 1 and some[0].shape[d] not in (
            size,
            1,
        ):
            step.join(*(part.labels[d] for part in some))
    return outs


def _uniform(step: Step) -> Any:
    """Tensors of one number: any of their indices may go, as the size is an
    argument.
    """
    fills = {"zeros": 0.0, "new_zeros": 0.0, "ones": 1.0, "new_ones": 1.0}
    fill = fills.get(step.name, step.arguments.get("fill_value"))
    out: Value = step.outs
    sizes = step.node.meta["val"].shape  # those of batches and sequences are symbols
    labels = tuple(
        step.atoms.new(n) if n > 1 and isinstance(size, int) else None
        for n, size in zip(out.shape, sizes, strict=True)
    )
    plain = isinstance(fill, int | float) and out.dtype.is_floating_point
    gone = tuple(
        np.full(n, float(fill)) if plain and n > 1 else None  # type: ignore[arg-type]
        for n in out.shape
    )
    return out._replace(labels=labels, gone=gone)


def _fixed(step: Step) -> Any:
    out = step.outs
    numbers = all(isinstance(x, int | bool | None) for x in step.node.args)
    if (
        isinstance(out, Value)
        and numbers
        and step.name == "arange"
        and not out.dtype.is_floating_point
    ):
        return out._replace(real=torch.arange(*step.node.args, device="cpu"))  # type: ignore[arg-type]
    return out


def _dropout(step: Step) -> Any:
    ins = values_in(step.arguments)
    outs = values_in(step.outs)
    gone = ins[0].gone
    if step.arguments["train"] and step.arguments["p"]:
        gone = tuple(
            None if some is None else np.where(some == 0, 0.0, np.nan) for some in gone
        )
    return replaced(
        step.outs, [out._replace(labels=ins[0].labels, gone=gone) for out in outs]
    )


def _shuffle(step: Step) -> Any:
    """Channels (groups, n) as (n, groups): any group, and any place in all groups, may
    go.
    """
    x = step.arguments["self"]
    groups = step.arguments["groups"]
    size = x.shape[1] // groups
    group, place = divided(step, x.labels[1], groups, size)
    step.book.groups[step.node] = group
    gone = None if x.gone[1] is None else x.gone[1].reshape(groups, size).T.reshape(-1)
    labels = (x.labels[0], product(place, size, group, groups), *x.labels[2:])
    return step.outs._replace(labels=labels, gone=(x.gone[0], gone, *x.gone[2:]))


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
_RULES: dict[str, Rule] = {
    "linear": rules.linear_layer,
    "addmm": lambda step: rules.addmm(step) or rules.matmul(step),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "baddbmm"), rules.matmul),
    **dict.fromkeys(
        (f"conv{turned}{n}d" for turned in ("", "_transpose") for n in (1, 2, 3)),
        rules.convolution,
    ),
    "convolution": rules.convolution,
    "einsum": rules.einsum,
    "bilinear": rules.bilinear,
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), rules.grouped_mm),
    "scaled_dot_product_attention": rules.attention,
    "embedding": moves.embedding,
    "index": moves.index,
    "index_select": moves.index_select,
    **dict.fromkeys(("layer_norm", "rms_norm"), norms.layer_norm),
    "group_norm": norms.group_norm,
    **dict.fromkeys(
        ("batch_norm", "_native_batch_norm_legit_no_training"), norms.batch_norm
    ),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    "mean": norms.mean_over,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), rules.recurrent),
    **dict.fromkeys(
        [
            "full",
            "zeros",
            "ones",
            "empty",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
        ],
        _uniform,
    ),
    **dict.fromkeys(
        [
            "arange",
            "linspace",
            "eye",
            "scalar_tensor",
            "rand",
            "randn",
            "randint",
            "randperm",
        ],
        _fixed,
    ),
    "dropout": _dropout,
    "channel_shuffle": _shuffle,
}


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
        return np.ones(size, bool) if label is None else self._places(label)[1]

    def _places(self, label: Ids) -> tuple[Ids, Flags, Tensor | None]:
        # The indices that stay, as flags and as numbers (None: all), known by id of the
        # label, which is held.
        if id(label) not in self.known:
            keep = np.asarray(
                self.alive[self.analysis.book.atoms.resolve(label)].all(1)
            )
            self.known[id(label)] = (
                label,
                keep,
                None if keep.all() else torch.from_numpy(keep).nonzero().flatten(),
            )
        return self.known[id(label)]

    def loses(self, value: Value) -> bool:
        """Whether any dimension loses indices."""
        return any(
            label is not None and self._places(label)[2] is not None
            for label in value.labels
        )

    def size(self, value: Value) -> list[int]:
        """The shape of a tensor after the cut."""
        return [int(keep.sum()) for keep in map(self.kept, value.labels, value.shape)]

    def indices(self, name: str) -> tuple[Tensor | None, ...]:
        """Of a leaf the indices that stay along each dimension; None: all."""
        value = self.analysis.leaves.get(name)
        labels = () if value is None else value.labels
        return tuple(
            None if label is None else self._places(label)[2] for label in labels
        )

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
                made &= torch.from_numpy(keep).reshape(
                    [-1 if e == d else 1 for e in range(made.ndim)]
                )
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
        made = made if some is None else made.index_select(d, some.to(x.device))
    return made.clone() if all(some is None for some in indices) else made


def free(analysis: Analysis) -> Cut:
    """Without any atom that may go; but one index of each dimension stays."""
    atoms = analysis.book.atoms
    return one_stays(Cut(analysis, atoms.reason[: atoms.count] > 0))


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
    sees no rounding of theirs.
    """
    made: dict[str, Tensor] = {}
    for fold in cut.analysis.book.folds:
        gone = ~cut.kept(fold.label)
        constants = np.where(gone & np.isfinite(fold.constants), fold.constants, 0.0)
        if constants.any():
            groups, _, inputs = fold.weights.shape
            shift = (
                (fold.weights * constants.reshape(groups, 1, inputs)).sum(2).reshape(-1)
            )
            bias = made.get(fold.bias, params[fold.bias])
            made[fold.bias] = bias.double() + torch.from_numpy(shift).to(bias.device)
    return made
