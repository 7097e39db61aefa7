"""What a program costs, exactly: parameters, FLOPs or bytes, as sums of products of the
sizes of its dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from sparsefn.engine.checks import check_int
from sparsefn.shrinking.analysis import Analysis, Cut
from sparsefn.shrinking.atoms import Atoms, Ids, Label
from sparsefn.shrinking.moves import MOVES
from sparsefn.shrinking.rules import parsed
from sparsefn.shrinking.values import Value, bind, opname, values_in

Dims = tuple[tuple[int, Label], ...]  # the size and the label of each


class Product(NamedTuple):
    """Multiplications and additions, one of each for all combinations of indices of
    some dimensions.
    """

    dims: Dims
    leaves: tuple[str, ...]  # parameters that are a factor as a whole

    @property
    def flops(self) -> int:
        """How many both are, before anything goes."""
        return 2 * math.prod(size for size, _ in self.dims)


Rule = Callable[[dict[str, Any], Value], list[Product]]


def products(analysis: Analysis) -> list[Product]:
    """The matrix products, convolutions and attention of a program, as
    `sf.report.flops` counts them.

    Besides, products with a vector and bilinear layers count, which torch's counter
    leaves out.
    """
    whole: dict[fx.Node, str] = {}
    found = []
    for node in analysis.graph.graph.nodes:
        if node.op == "get_attr" and isinstance(analysis.values[node], Value):
            whole[node] = str(analysis.values[node].name)
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        name = opname(node)
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if name in MOVES and source in whole and _as_many(analysis, node, source):
            whole[node] = whole[source]
        rule = _RULES.get(name)
        if rule is not None:
            arguments = bind(
                node.target,
                *fx.map_arg(
                    (node.args, node.kwargs), lambda n: _named(analysis, n, whole)
                ),
            )
            found += rule(arguments, values_in(analysis.values[node])[0])
    return found


def _as_many(analysis: Analysis, node: fx.Node, source: fx.Node) -> bool:
    # Whether a move of a leaf has all of its entries, once.
    made = [analysis.values[n] for n in (node, source)]
    one_input = len(node.all_input_nodes) == 1 and all(
        isinstance(value, Value) for value in made
    )
    return one_input and math.prod(made[0].shape) == math.prod(made[1].shape)


def _named(analysis: Analysis, node: fx.Node, whole: dict[fx.Node, str]) -> Any:
    value = analysis.values[node]
    return value._replace(name=whole.get(node)) if isinstance(value, Value) else value


def _dims(*values: Value) -> Dims:
    return tuple(
        pair for value in values for pair in zip(value.shape, value.labels, strict=True)
    )


def _product(dims: Dims, *factors: Value) -> Product:
    return Product(
        dims, tuple(value.name for value in factors if value.name is not None)
    )


def _linear(arguments: dict[str, Any], out: Value) -> list[Product]:
    x = arguments["input"]
    w = arguments["weight"]
    return [_product(_dims(x)[:-1] + _dims(w), x, w)]


def _matmul(arguments: dict[str, Any], out: Value) -> list[Product]:
    """Of two factors, after what is added to their product."""
    x, y = values_in(arguments)[-2:]
    return [_product(_dims(out) + _dims(x)[-1:], x, y)]


def _convolution(arguments: dict[str, Any], out: Value) -> list[Product]:
    x = arguments["input"]
    w = arguments["weight"]
    turned = arguments.get("transposed", "output_padding" in arguments)
    # without a batch dimension channels come first
    moved = x if turned else out
    at = len(x.shape) - len(w.shape) + 1
    dims = _dims(moved)
    return [_product(dims[:at] + dims[at + 1 :] + _dims(w), x, w)]


def _einsum(arguments: dict[str, Any], out: Value) -> list[Product]:
    (words, ins, right) = parsed(arguments)
    path = list(arguments.get("path") or ())
    sizes: dict[str, tuple[int, Label]] = {}
    for v, word in zip(ins, words, strict=True):
        sizes |= {
            c: pair
            for c, pair in zip(word, _dims(v), strict=True)
            if c not in sizes or pair[0] > 1
        }
    sides = [(word, v.name) for word, v in zip(words, ins, strict=True)]
    made = []
    # two at a time, by the path or from the left; what only one of them has is summed
    # before
    while len(sides) > 1:
        i, j = sorted((path.pop(0), path.pop(0))) if path else (0, 1)
        (b, y) = sides.pop(j)
        (a, x) = sides.pop(i)
        needed = set(right).union(*(word for word, _ in sides))
        letters = [
            c for c in dict.fromkeys(a + b) if c in needed or (c in a and c in b)
        ]
        factors = (name for name, word in ((x, a), (y, b)) if set(word) <= set(letters))
        # else it is no product of matrices
        if any(c not in needed and sizes[c][0] > 1 for c in letters):
            made.append(
                Product(
                    tuple(sizes[c] for c in letters),
                    tuple(name for name in factors if name is not None),
                )
            )
        word = "".join(c for c in letters if c in needed)
        sides = (
            [*sides, (word, None)] if arguments.get("path") else [(word, None), *sides]
        )
    return made


def _bilinear(arguments: dict[str, Any], out: Value) -> list[Product]:
    x, y, w = (arguments[name] for name in ("input1", "input2", "weight"))
    lead = _dims(x)[:-1]
    return [_product(lead + _dims(w), w), _product(lead + _dims(w)[:1] + _dims(y)[-1:])]


def _attention(arguments: dict[str, Any], out: Value) -> list[Product]:
    q, k, v = (_dims(arguments[name]) for name in ("query", "key", "value"))
    return [Product((*q, k[-2]), ()), Product((*q[:-1], k[-2], v[-1]), ())]


def _grouped_mm(arguments: dict[str, Any], out: Value) -> list[Product]:
    x, w = values_in(arguments)[:2]
    dims = _dims(x)[1:] if len(x.shape) > len(w.shape) else _dims(x)
    return [_product(dims + _dims(w)[-1:])]


def _recurrent(arguments: dict[str, Any], out: Value) -> list[Product]:
    lead = _dims(values_in(arguments)[0])[:-1]
    return [
        _product(lead + _dims(w), w) for w in arguments["params"] if len(w.shape) == 2
    ]


def _rules(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Rule] = {
    "linear": _linear,
    **_rules("mm matmul bmm mv dot addmm addmv baddbmm", _matmul),
    **_rules(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "convolution",
        _convolution,
    ),
    "einsum": _einsum,
    "bilinear": _bilinear,
    "scaled_dot_product_attention": _attention,
    **_rules("_grouped_mm grouped_mm_fallback", _grouped_mm),
    **_rules("lstm gru rnn_tanh rnn_relu", _recurrent),
}
__all__: Sequence[str] = ["Product", "products"]


UNITS = ("params", "flops", "bytes")


class Terms(NamedTuple):
    """A cost as a sum: a constant, and for each term a factor times the sizes of
    dimensions, by their places.
    """

    constant: int
    terms: tuple[tuple[int, tuple[int, ...]], ...]
    labels: tuple[Ids, ...]
    per: int  # how many of what is added up make one, rounded up

    def value(self, sizes: Sequence[int]) -> int:
        """The cost with these sizes of the dimensions."""
        total = self.constant
        for factor, at in self.terms:
            for place in at:
                factor *= sizes[place]
            total += factor
        return -(-total // self.per)


def cost(
    cut: Cut, unit: str = "params", *, bits: int | None = None, compressed: bool = False
) -> int:
    """What is left of a program after a cut, in parameters, FLOPs or bytes, as
    `Groups.cost` counts them.
    """
    terms = terms_of(cut.analysis, unit, bits, compressed)
    return terms.value([int(cut.kept(label).sum()) for label in terms.labels])


def terms_of(
    analysis: Analysis, unit: str, bits: int | None = None, compressed: bool = False
) -> Terms:
    """The cost of a program as a function of its dimensions; worked out once.

    ValueError for another unit, and for bits or compression of what is not counted in
    bytes.
    """
    key = ("costs", unit, bits, compressed)
    if key not in analysis.book.known:
        check_unit(unit, bits, compressed)
        if unit == "flops":
            found = [(2, product.dims) for product in products(analysis)]
        else:
            found = list(_sizes(analysis, unit, bits, compressed))
        analysis.book.known[key] = _collected(
            analysis, found, 8 if unit == "bytes" else 1
        )
    made: Terms = analysis.book.known[key]
    return made


def check_unit(unit: object, bits: int | None, compressed: bool) -> None:
    """Raise ValueError for a unit of costs that there is not."""
    if unit not in UNITS:
        raise ValueError(
            f"expected unit to be 'params', 'flops' or 'bytes', got {unit!r}"
        )
    if bits is not None:
        check_int("within", "bits", bits, 1)
    if unit != "bytes" and (bits is not None or compressed):
        raise ValueError(
            f"bits= and compressed= are for unit='bytes', got unit={unit!r}"
        )


def parameters(analysis: Analysis) -> dict[str, tuple[Value | None, Tensor]]:
    """Each parameter once, under its first name.

    It has its Value where the program reads it.
    """
    named = analysis.graph.named_parameters(remove_duplicate=False)
    known = {
        id(x): analysis.leaves[name] for name, x in named if name in analysis.leaves
    }
    return {
        name: (known.get(id(x)), x) for name, x in analysis.graph.named_parameters()
    }


def _sizes(
    analysis: Analysis, unit: str, bits: int | None, compressed: bool
) -> Iterable[tuple[int, Dims]]:
    for value, x in parameters(analysis).values():
        labels = (None,) * x.ndim if value is None else value.labels
        per = (bits or 8 * x.dtype.itemsize) if unit == "bytes" else 1
        yield per, tuple(zip(x.shape, labels, strict=True))
        if compressed and any(
            analysis.book.atoms.free(label) is not None for label in labels
        ):
            yield 8 * -(-x.numel() // 8), ()


def _collected(
    analysis: Analysis, found: Iterable[tuple[int, Dims]], per: int
) -> Terms:
    given = list(found)
    places = _places(
        (label for _, dims in given for _, label in dims), analysis.book.atoms
    )
    labels: list[Ids] = []
    constant = 0
    terms = dict[tuple[int, ...], int]()
    for factor, dims in given:
        at = []
        for size, label in dims:
            place, free = (-1, None) if label is None else places[id(label)]
            factor *= size if free is None else 1
            at += [] if free is None else [place]
            labels += [free] if free is not None and place == len(labels) else []
        if at:
            terms[tuple(sorted(at))] = terms.get(tuple(sorted(at)), 0) + factor
        else:
            constant += factor
    return Terms(
        constant,
        tuple((factor, at) for at, factor in terms.items()),
        tuple(labels),
        per,
    )


def distinct(values: Iterable[Value], atoms: Atoms) -> list[Ids]:
    """The labels of values whose indices may go, each once, without the atoms that
    stay.
    """
    places = _places((label for value in values for label in value.labels), atoms)
    return list(
        {place: label for place, label in places.values() if label is not None}.values()
    )


def _places(labels: Iterable[Label], atoms: Atoms) -> dict[int, tuple[int, Label]]:
    # By id: the number of what a label is without the atoms that stay, and that.
    places: dict[int, tuple[int, Label]] = {}
    known: dict[object, tuple[int, Ids]] = {}
    for label in labels:
        if label is not None and id(label) not in places:
            free = atoms.free(label)
            key = None if free is None else (free.shape, free.tobytes())
            places[id(label)] = (
                (-1, None)
                if free is None
                else known.setdefault(key, (len(known), free))
            )
    return places
