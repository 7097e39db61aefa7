"""Layers as units: the residual branches of a model, and the pattern that prunes whole
ones.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import torch
from torch import Tensor, fx, nn

from sparsefn.masks.budgets import UnitCosts
from sparsefn.masks.patterns import Pattern, tied
from sparsefn.nn.modules import inner_module
from sparsefn.shrinking.analysis import Analysis, analyse
from sparsefn.shrinking.groups import Groups, originals_in
from sparsefn.shrinking.plan import (
    Terms,
    check_unit,
    collected,
    left_of,
    summands,
)
from sparsefn.shrinking.residuals import (
    Residual,
    are_zero,
    own_leaves,
    reads_parameters,
    residuals,
)
from sparsefn.shrinking.trace import Example, Trace, shapes_of, traced
from sparsefn.shrinking.values import module_of, tensors_of
from sparsefn.typing import Reduce

By = Literal["branch", "module"]


class ResidualLayer(NamedTuple):
    """A unit of depth: the residual branches that go together."""

    path: str  # of the module that adds them up
    leaves: tuple[str, ...]  # the parameters that these branches alone read
    entries: int  # of these parameters
    inside: frozenset[int]  # the numbers of the layers that this one is a part of
    branches: tuple[Residual, ...]  # the sums in the traced program

    def __str__(self) -> str:
        modules = dict.fromkeys(leaf.rpartition(".")[0] for leaf in self.leaves)
        shown = ", ".join([*modules][:4])
        more = len(modules) - 4
        if more > 0:
            shown += f" and {more} more"
        where = f" at {self.path!r}" if self.path else ""
        text = f"{self.entries} weights{where}: {shown}"
        if self.inside:
            text += f"; inside {', '.join(map(str, sorted(self.inside)))}"
        return text


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """The residual layers of a model, and why other sums are none.

    >>> class Block(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    ...
    ...     def forward(self, x):
    ...         return x + self.down(self.up(x).relu())
    >>> net = torch.nn.Sequential(Block(), Block(), Block()).eval()
    >>> layers = sf.shrinking.layers(net, torch.ones(2, 4))
    >>> len(layers), layers[1].path, layers[1].entries
    (3, '1', 76)
    >>> layers.cost({1}), layers.cost({1}, "flops")
    (152, 512)
    >>> small = sf.shrink(
    ...     net,
    ...     sf.State(sf.modules.params_of(net), layers.masks({1})),
    ...     torch.ones(2, 4),
    ... )
    >>> len(small)
    2

    Attributes:
        layers: The layers by number. Of each, `path` is the module that adds it to its
            input, `leaves` are the parameters that it alone reads, `entries` is how
            many numbers these have, `inside` are the numbers of layers that it is a
            part of, and `branches` the sums of the traced program.
        stays: Why other sums x + f(x) are no layers, a line each.
        analysis: What is known of the traced program.
        widths: The groups of units that compete with the layers, if any.
        trace: The program, with the shapes of the example; None for groups of
            submodules.
        dense: The parameters that weights are computed from, which get no masks.
    """

    layers: tuple[ResidualLayer, ...]
    stays: tuple[str, ...]
    analysis: Analysis = dataclasses.field(repr=False)
    widths: Groups | None = dataclasses.field(default=None, repr=False)
    trace: Trace | None = dataclasses.field(default=None, repr=False)
    dense: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)

    def __getitem__(self, i: int) -> ResidualLayer:
        return self.layers[i]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[ResidualLayer]:
        return iter(self.layers)

    def __str__(self) -> str:
        whole = self.cost(unit="flops")
        lines = []
        for i, layer in enumerate(self.layers):
            head, _, rest = str(layer).partition(" weights")
            flops = whole - self._cost_without({i}, "flops")
            lines.append(f"{i}: {head} weights and {flops} FLOPs{rest}")
        if self.stays:
            lines.append("stays:")
        return "\n".join([*lines, *(f"  {line}" for line in self.stays)])

    def pattern(
        self, only: Sequence[int] | None = None, *, reduce: Reduce = "mean"
    ) -> Pattern:
        """The pattern for algorithms that prune whole layers.

        Args:
            only: Numbers of the layers that may go. Default: all.
            reduce: How the scores of a layer's weights become its score, as in
                `sf.patterns.tied`.

        Returns:
            An `sf.patterns.tied` pattern in which all layers are one set, of which at
            least one stays, and after the sets of `widths`, if there are any. A layer
            that goes takes along the layers inside it.

        Raises:
            TypeError: `only` is no sequence, or a number is not an int.
            ValueError: There is none of such a number, or `only` is empty.
        """
        sets: list[Any] = []
        if self.widths is not None:
            for i in self._width_names().values():
                sets.append(self.widths[i].tied(self.analysis.parameters))
        units = []
        for unit, i in enumerate(self._chosen(only)):
            units += [[leaf, None, unit] for leaf in self.layers[i].leaves]
        return tied([*sets, units], reduce)

    def _width_names(self) -> dict[str, int]:
        # The numbers of the groups in the pattern, by the names of their sets.
        if self.widths is None:
            return {}
        preferred = [i for i, group in enumerate(self.widths) if group.preferred]
        names = self.widths.priced("params", None, False, preferred).sizes
        return dict(zip(names, preferred, strict=True))

    def _chosen(self, only: Sequence[int] | None) -> list[int]:
        if only is None:
            return list(range(len(self)))
        if isinstance(only, str) or not isinstance(only, Iterable):
            raise TypeError(
                f"layers: expected only to be a sequence of numbers of layers, got "
                f"{only!r}"
            )
        numbers = {self._number(i) for i in only}
        if not numbers:
            raise ValueError("layers: expected the number of a layer in only, got none")
        return sorted(numbers)

    def _number(self, i: object) -> int:
        if not isinstance(i, SupportsIndex) or isinstance(i, bool):
            raise TypeError(
                f"layers: expected the number of a layer to be an int, got {i!r}"
            )
        if not 0 <= int(i) < len(self):
            raise ValueError(
                f"layers: expected numbers of the model's {len(self)} layers, from 0, "
                f"got {i}"
            )
        return int(i)

    def _gone(self, gone: Iterable[int]) -> set[int]:
        # The layers that go, with what is inside them.
        if isinstance(gone, str) or not isinstance(gone, Iterable):
            raise TypeError(
                f"layers: expected the numbers of the layers that go, got {gone!r}"
            )
        if isinstance(gone, Tensor) and gone.dtype == torch.bool:
            raise TypeError(
                "layers: expected the numbers of the layers that go, got a bool "
                "tensor: pass gone.nonzero().flatten().tolist()"
            )
        numbers = {self._number(i) for i in gone}
        inner = {i for i, layer in enumerate(self.layers) if layer.inside & numbers}
        if len(numbers | inner) == len(self):
            raise ValueError(
                f"layers: expected at least one of the model's {len(self)} layers to "
                "stay, but all go"
            )
        return numbers | inner

    def masks(self, gone: Iterable[int]) -> dict[str, Tensor]:
        """The masks of all parameters without some layers.

        Args:
            gone: The numbers of the layers that go.

        Returns:
            Bool tensors on the CPU by name, of the shape of the parameter, or 0-d for
            one that a weight is computed from.

        Raises:
            TypeError: A number is not an int.
            ValueError: There is no such layer, or all go.
        """
        lost = {leaf for i in self._gone(gone) for leaf in self.layers[i].leaves}
        masks = {}
        for name, x in self.analysis.graph.named_parameters():
            # a parameter that a weight is computed from gets no mask
            shape = () if name in self.dense else x.shape
            masks[name] = torch.full(shape, name not in lost, device="cpu")
        return masks

    def alive(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Which layers stay under some masks: all of which an entry is kept.

        Args:
            masks: Masks of the parameters by name: bool tensors.

        Returns:
            A bool tensor of the layers, on the CPU.

        Raises:
            ValueError: The mask of a leaf is missing.
        """
        kept = []
        for layer in self.layers:
            missing = [leaf for leaf in layer.leaves if leaf not in masks]
            if missing:
                raise ValueError(
                    "layers: expected masks of the layers' parameters, but none of "
                    f"{missing[0]!r}"
                )
            kept.append(any(bool(masks[leaf].any()) for leaf in layer.leaves))
        return torch.tensor(kept, device="cpu")

    def cost(
        self,
        gone: Iterable[int] = (),
        unit: str = "params",
        *,
        bits: int | None = None,
    ) -> int:
        """What the model costs without some layers.

        Args:
            gone: The numbers of the layers that go. Default: none.
            unit: "params", "flops" of one call on the example, or "bytes" of the
                parameters.
            bits: For bytes, how many bits each weight has. Default: as its dtype has.

        Returns:
            The exact number.

        Raises:
            TypeError: A number, or `bits`, is not an int.
            ValueError: `unit` is another one, there is no such layer, or all go.
        """
        check_unit(unit, bits, False)
        return self._cost_without(self._gone(gone), unit, bits)

    def _cost_without(self, lost: Set[int], unit: str, bits: int | None = None) -> int:
        saved = self._live(set()) - self._live(lost)
        found = [
            (n, dims)
            for key, n, dims in summands(self.analysis, unit, bits)
            if key not in saved
        ]
        whole = collected(self.analysis, found, 8 if unit == "bytes" else 1)
        return whole.value([len(label) for label in whole.labels])

    def _live(self, lost: Set[int]) -> set[fx.Node | str]:
        # The operations that are left without some layers, and the parameters that
        # these read, by their first names: layers may share them. An operation that
        # nothing reads stays, with what it reads, unless a layer that goes owns it.
        graph = self.analysis.graph
        first = {id(x): name for name, x in graph.named_parameters()}
        held = tensors_of(graph)
        branches = [one for i in lost for one in self.layers[i].branches]
        skips = {one.sum: one.skip for one in branches}
        owned = frozenset[fx.Node]().union(*(one.own for one in branches))
        live = set[fx.Node | str]()
        for node in reversed(graph.graph.nodes):
            is_end = not node.users and node.op != "get_attr" and node not in owned
            if node not in live and not is_end:
                continue
            if node.op == "get_attr":
                name = first.get(id(held[str(node.target)]))
                live |= set() if name is None else {name}
            live.update([skips[node]] if node in skips else node.all_input_nodes)
        return live

    def _layers_of(self, key: fx.Node | str) -> set[int]:
        # The layers with which an operation or parameter goes: its own layer, and the
        # layers that hold this layer.
        own = self._owners.get(key)
        if own is None:
            return set()
        return {own, *self.layers[own].inside}

    @property
    def _owners(self) -> dict[fx.Node | str, int]:
        # The innermost layer of each operation and parameter.
        known = self.analysis.log.known
        key = ("layers", self.layers)
        if key not in known:
            owners: dict[fx.Node | str, int] = {}
            outer_first = sorted(
                range(len(self)), key=lambda i: len(self.layers[i].inside)
            )
            for i in outer_first:
                layer = self.layers[i]
                own = [node for branch in layer.branches for node in branch.own]
                owners.update(dict.fromkeys([*layer.leaves, *own], i))
            known[key] = owners
        made: dict[fx.Node | str, int] = known[key]
        return made

    def priced(
        self,
        unit: str,
        bits: int | None,
        compressed: bool,
        only: Sequence[int] | None,
    ) -> UnitCosts:
        """The cost by numbers of kept units, for `sf.budgets.within`.

        Args:
            unit: As for `cost`.
            bits: As for `cost`.
            compressed: As for `Groups.cost`.
            only: As for `pattern`.

        Returns:
            The costs by the sets of `pattern(only)`. Of so many kept layers it is the
            most that any choice of them costs: with the dearest ones.
        """
        chosen = self._chosen(only)
        names = self._width_names()
        sizes = {}
        channels = []
        width_scores: Callable[[], Mapping[str, Any]] | None = None
        if self.widths is not None:
            base = self.widths.priced("params", None, False, list(names.values()))
            sizes = dict(base.sizes)
            width_scores = base.scores
            channels = [self.widths.channels[i] for i in names.values()]
        own_name = self._set_name(chosen, sizes)
        check_unit(unit, bits, compressed)
        parts = defaultdict[int, list[Any]](list)
        for key, n, dims in summands(self.analysis, unit, bits, compressed):
            held = self._layers_of(key)
            # by the innermost layer that may go; -1 for what stays in any case
            may_go = sorted(held & {*chosen}, key=lambda i: len(self.layers[i].inside))
            parts[may_go[-1] if may_go else -1].append((n, dims))
        terms = {i: collected(self.analysis, found) for i, found in parts.items()}
        left = {
            i: left_of(self.analysis, channels, some.labels)
            for i, some in terms.items()
        }
        per = 8 if unit == "bytes" else 1

        def value(i: int, kept: Sequence[int]) -> int:
            some: Terms | None = terms.get(i)
            return 0 if some is None else some.value(left[i](kept))

        def cost(kept: Sequence[int]) -> int:
            *narrow, deep = kept
            each = sorted((value(i, narrow) for i in chosen), reverse=True)
            total = value(-1, narrow) + sum(each[:deep])
            return -(-total // per)

        def scores() -> dict[str, Any]:
            known = dict(self.analysis.graph.named_parameters())
            means = []
            for i in chosen:
                leaves = [known[leaf].detach() for leaf in self.layers[i].leaves]
                size = sum(float(x.abs().double().sum()) for x in leaves)
                means.append(size / sum(x.numel() for x in leaves))
            of_widths = {} if width_scores is None else width_scores()
            return {**of_widths, own_name: np.array(means)}

        return UnitCosts({**sizes, own_name: len(chosen)}, cost, scores)

    def _set_name(self, chosen: Sequence[int], others: Mapping[str, int]) -> str:
        first = self.layers[chosen[0]].leaves[0]
        name = first
        number = 1
        while name in others:
            name = f"{first}:{number}"
            number += 1
        return name


def layers(
    model: nn.Module,
    example: Example,
    *,
    by: By = "branch",
    widths: Groups | None = None,
) -> Layers:
    """The residual layers x + f(x) of a model, each of which can go as a whole.

    >>> encoder = torch.nn.TransformerEncoderLayer(
    ...     8, 2, 16, batch_first=True, norm_first=True
    ... )
    >>> model = torch.nn.TransformerEncoder(
    ...     encoder, 4, enable_nested_tensor=False
    ... ).eval()
    >>> layers = sf.shrinking.layers(model, torch.ones(2, 3, 8), by="module")
    >>> print(layers[0])
    600 weights at 'layers.0': layers.0.self_attn, layers.0.self_attn.out_proj, ...
    >>> algorithm = sf.one_shot(0.25, pattern=layers.pattern())
    >>> params = sf.modules.params_of(model)
    >>> pruned = algorithm.update(algorithm.init(params), params, 0)
    >>> len(sf.shrink(model, pruned, torch.ones(2, 3, 8)).layers)
    3

    Args:
        model: The module, which does not change. One on the meta device is analysed
            there.
        example: What the model is called with: a tensor, a tuple of arguments or a dict
            of keyword arguments.
        by: What one unit is. "branch" is one f, such as an attention or an MLP.
            "module" is all branches that one item of a `Sequential` or `ModuleList`
            adds up, such as a layer of a transformer.
        widths: Groups of this model and example, of `sf.shrinking.groups`, whose units
            compete at the same time. The model is then not traced again.

    Returns:
        The layers in the order of the program. A branch is found by what its operations
        read, and not by names: behind norms and gates, beside other branches, inside
        other branches. Masks of its parameters make it exactly 0. Its `stays` says of
        each other sum x + f(x) why it is none, as where f has no parameters of its own
        or ends in an operation that does not give 0.

    Raises:
        TypeError: `example` is of another type, or `widths` are no groups.
        ValueError: There is no such layer, or `by` is another one. The model does not
            run on the example, `torch.export` cannot trace it, or it is in train mode
            and computes otherwise in eval mode. `widths` are of another model or
            example.

    Whole layers were pruned by Men et al. 2024, "ShortGPT", arXiv 2403.03853, and
    Gromov et al. 2024, arXiv 2403.17887.
    """
    if by not in ("branch", "module"):
        raise ValueError(f"layers: expected by to be 'branch' or 'module', got {by!r}")
    if not isinstance(widths, Groups | None):
        raise TypeError(
            "layers: expected widths as sf.shrinking.groups makes them, got "
            f"{type(widths).__name__}"
        )
    own = inner_module(model)
    if widths is None:
        graph = traced(own, example, dynamic=False)
        analysis = analyse(graph)
        trace: Trace | None = Trace(graph, shapes_of(example))
    else:
        if widths.trace is not None:
            widths.trace.of(own, example)
        analysis = widths.analysis
        trace = widths.trace
    originals = originals_in(own)
    found, stays = _branches(analysis.graph, originals)
    if not found:
        reasons = "".join(f"\n  {line}" for line in stays)
        raise ValueError(
            "layers: expected a model that adds to a tensor what it computes from it, "
            f"x + f(x), got none of such layers in the {type(own).__name__}"
            + (f":{reasons}" if reasons else "")
        )
    units = _together(own, found) if by == "module" else [[one] for one in found]
    made = tuple(_layer(unit, units) for unit in units)
    return Layers(made, stays, analysis, widths, trace, frozenset(originals))


class _Branch(NamedTuple):
    residual: Residual
    leaves: tuple[str, ...]
    entries: int


def _branches(
    graph: fx.GraphModule, originals: Mapping[str, str]
) -> tuple[list[_Branch], tuple[str, ...]]:
    # The branches that their masks make 0, and why others are none.
    every = residuals(graph)
    known = dict(graph.named_parameters())
    levels: dict[int, list[_Branch]] = defaultdict(list)
    stays = {}
    for one in every:
        leaves = own_leaves(graph, one.own)
        usable = [leaf for leaf in leaves if known[leaf].numel() and known[leaf].ndim]
        computed = [leaf for leaf in usable if leaf in originals]
        if computed:
            stays[one] = originals[computed[0]]
        elif usable:
            entries = sum(known[leaf].numel() for leaf in usable)
            level = sum(one.sum in other.own for other in every)
            levels[level].append(_Branch(one, tuple(usable), entries))
        elif reads_parameters(graph, one):
            stays[one] = "it has no parameters that it alone reads"
    found = []
    for some in levels.values():
        masks = {}
        for branch in some:
            for leaf in branch.leaves:
                masks[leaf] = torch.zeros_like(
                    known[leaf], dtype=torch.bool, device="cpu"
                )
        zero = are_zero(graph, [branch.residual.branch for branch in some], masks)
        for branch, is_zero in zip(some, zero, strict=True):
            if is_zero:
                found.append(branch)
            else:
                stays[branch.residual] = (
                    "it is not known to be 0 where the parameters that it alone reads "
                    "are 0"
                )
    order = {one: i for i, one in enumerate(every)}
    found = sorted(found, key=lambda branch: order[branch.residual])
    lines = [f"{one} is added in {one.place}, but {why}" for one, why in stays.items()]
    return found, tuple(dict.fromkeys(lines))


def _together(model: nn.Module, found: Sequence[_Branch]) -> list[list[_Branch]]:
    # The branches that one item of a list of modules adds up.
    items = {
        f"{path}.{name}".removeprefix(".")
        for path, part in model.named_modules(remove_duplicate=False)
        if isinstance(part, nn.Sequential | nn.ModuleList)
        for name in part._modules
    }
    units: dict[object, list[_Branch]] = {}
    for i, branch in enumerate(found):
        path = _up(module_of(branch.residual.sum), items)
        if path is None:
            ways = [leaf.split(".")[:-1] for leaf in branch.leaves]
            shared = []
            for names in zip(*ways, strict=False):
                if len({*names}) > 1:
                    break
                shared.append(names[0])
            path = _up(".".join(shared), items)
        units.setdefault(i if path is None else path, []).append(branch)
    return list(units.values())


def _up(path: str, items: Set[str]) -> str | None:
    # The innermost item of a list of modules that holds a module.
    while path and path not in items:
        path = path.rpartition(".")[0]
    return path or None


def _layer(
    unit: Sequence[_Branch], units: Sequence[Sequence[_Branch]]
) -> ResidualLayer:
    inside = set()
    for i, other in enumerate(units):
        own = frozenset[fx.Node]().union(*(one.residual.own for one in other))
        if other is not unit and all(one.residual.sum in own for one in unit):
            inside.add(i)
    leaves = dict.fromkeys(leaf for one in unit for leaf in one.leaves)
    return ResidualLayer(
        module_of(unit[0].residual.sum),
        tuple(leaves),
        sum(one.entries for one in unit),
        frozenset(inside),
        tuple(one.residual for one in unit),
    )
