"""Models without some experts, with the outputs of never routing to them."""

from __future__ import annotations

import copy
import math
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sparsefn.core.state import State
from sparsefn.core.tree import flatten
from sparsefn.masks.patterns import Pattern, tied_members
from sparsefn.nn.modules import bake, inner_module
from sparsefn.shrinking.attributes import TRIES, Guess, Trial, search
from sparsefn.shrinking.groups import Member
from sparsefn.shrinking.plan import taken
from sparsefn.shrinking.proof import Progress, Proof
from sparsefn.shrinking.rebuild import with_configs
from sparsefn.shrinking.shrink import Kept, Smaller
from sparsefn.shrinking.trace import Example

# where experts lie in a leaf, and which of its indices there are not routed to
Router = tuple[Member, Tensor]

_aten = torch.ops.aten
# Where the factors of products begin among the arguments.
_FACTORS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}


class RouterLog(NamedTuple):
    """What was seen of routers while a model ran."""

    products: set[str]  # the leaves that something was multiplied by
    # by leaf, to how many experts a token was routed after such a product
    most: dict[str, int]


def never_routed(
    model: nn.Module, routers: Sequence[Router]
) -> tuple[nn.Module, RouterLog]:
    """A copy that runs with logits -inf of some rows of routers, and what is seen of
    these whenever it or a copy runs.

    >>> model, gone = torch.nn.Linear(2, 3), torch.tensor([False, True, False])
    >>> router = Member("weight", 0, np.arange(3))
    >>> copied, seen = never_routed(model, [(router, gone)])
    >>> copied(torch.ones(1, 2)).isinf(), seen.products
    (tensor([[False,  True, False]]), {'weight'})
    """
    seen = RouterLog(set(), {})

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Logits(self, routers, seen):
            return type(self).forward(self, *args, **kwargs)

    made = copy.deepcopy(model)
    # of a copy of the copy it is the copy's
    made.forward = types.MethodType(forward, made)
    return made, seen


class _Logits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills the outputs of products with some rows of routers with -inf; a router is
    known by its storage.
    """

    def __init__(
        self, module: nn.Module, routers: Sequence[Router], seen: RouterLog
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = [
            (module.get_parameter(member.leaf), member, gone)
            for member, gone in routers
        ]
        self.known: dict[StorageWeakRef, tuple[Tensor, Member, Tensor]] = {
            _storage(router[0]): router for router in own
        }
        self.seen = seen
        self.last = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and fill its output if it is a product with a router."""
        out = func(*args, **(kwargs or {}))
        op = func.overloadpacket
        if op is _aten._to_copy:  # what Tensor.to and autocast come to
            self.follow(args[0], out)
        elif op in _FACTORS:
            for axis, x in enumerate(args[_FACTORS[op] :][:2], -2):
                self.fill(out, axis, x)
        elif op is _aten.topk and self.last:
            self.seen.most[self.last] = args[1]
            self.last = ""
        return out

    def follow(self, x: Tensor, out: Tensor) -> None:
        """A cast of a router is that router."""
        router = self.known.get(_storage(x))
        if router is not None:
            leaf = router[0]
            if x.shape == leaf.shape and x.stride() == leaf.stride():
                self.known[_storage(out)] = (out, *router[1:])

    def fill(self, out: Tensor, axis: int, x: Tensor) -> None:
        """Fill the outputs of a product along this axis, if its factor x has the rows
        of a router along it.
        """
        router = self.known.get(_storage(x))
        if router is None:
            return
        leaf, member, gone = router
        same = x.shape[axis] == leaf.shape[member.dim]
        if same and x.stride(axis) == leaf.stride(member.dim):
            places = gone.nonzero().flatten().to(out.device)
            out.index_fill_(out.ndim + axis, places, -math.inf)
            self.seen.products.add(member.leaf)
            self.last = member.leaf


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def without_experts(
    module: nn.Module, state: State, example: Example, pattern: Pattern
) -> Smaller:
    """A smaller copy of the module without the experts that masks prune.

    >>> class Mixture(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.router, self.experts = (
    ...             torch.nn.Linear(3, 4),
    ...             torch.nn.Parameter(torch.randn(4, 2, 3)),
    ...         )
    ...
    ...     def forward(self, x):
    ...         weights, index = self.router(x).softmax(-1).topk(2)
    ...         return torch.einsum("tk,tkoi,ti->to", weights, self.experts[index], x)
    >>> model, x = Mixture().eval(), torch.randn(5, 3)
    >>> pattern = sf.patterns.tied(
    ...     [["router.weight", 0], ["router.bias", 0], ["experts", 0]]
    ... )
    >>> state = sf.static(0.25, pattern=pattern).init(sf.modules.params_of(model))
    >>> small = sf.shrinking.without_experts(model, state, x, pattern).module
    >>> small.router, small.experts.shape
    (Linear(in_features=3, out_features=3, bias=True), torch.Size([3, 2, 3]))

    Args:
        module: The module, which does not change.
        state: State whose masks say what goes: an expert, with its rows of routers, if
            all of its entries are masked. Masked entries of other leaves are 0 in the
            copy.
        example: What the module is called with: a tensor, a tuple of arguments or a
            dict of keyword arguments.
        pattern: An `sf.patterns.tied` one, each set of which ties the experts of a
            layer: leaves of at least three dimensions, such as [experts, out, in], and
            leaves of the router, one of which has two, [experts, in].

    Returns:
        What `sf.shrinking.smaller` does, with a copy of the same class. Whole numbers
        that modules keep and that are the number of experts become the new one where
        the proof needs it, and so do such numbers of a config where a new model from it
        equals the copy, as when all layers lose as many experts; `notes` says where
        not, and `stays` where an expert is masked in some leaves alone.

    Raises:
        TypeError: `state` is no State, or `example` is of another type.
        ValueError: The pattern has no such sets, a set loses all experts, or no product
            is seen with a router. The proof fails: fewer experts stay than a token is
            routed to, logits are among the outputs, or routers choose by something else
            too, such as a bias that is added to the probabilities. Masks are as
            `sf.modules.bake` refuses.

    A masked row of a router gives the logit 0, which a softmax counts, so the outputs
    differ from the masked module's: they equal its outputs when the logits of removed
    experts are -inf, so that the softmax is over the experts that stay. That is proven
    as in `sf.shrink`: both modules run in float64 and eval mode on `example` and on
    other inputs of its shapes, and differ by at most 1e-10.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"without_experts: expected a State, got {type(state).__name__}"
        )
    masked = inner_module(bake(module, state))
    sets = _sets(pattern, state)
    routers = [
        (member, ~experts.flags(member))
        for experts in sets.values()
        for member in experts.routers
        if experts.lost
    ]
    reference, seen = never_routed(masked, routers)
    small = _cut(masked, sets)
    before = dict(masked.named_parameters())
    why = ""
    proof = Proof(reference, example, Progress("without_experts"))

    def works(some: nn.Module) -> bool:
        nonlocal why
        why = proof.differs(some)
        return not why

    numbers = _numbers(small, sets)
    found = search(lambda _: numbers, lambda: Trial((0, 0), works(small), why), TRIES)
    for name, experts in sets.items():
        leaves = [member.leaf for member in experts.routers]
        if experts.lost and not seen.products & {*leaves}:
            raise ValueError(
                f"without_experts: expected a router among the leaves of {name!r} "
                "that its inputs are multiplied by, but no product was seen with "
                f"{', '.join(leaves) or 'any of them'}"
            )
    if not found.done:
        hints = "".join(
            f"; {hint}" for hint in (*_few(sets, seen), *_left_out(masked, sets))
        )
        raise ValueError(
            f"without_experts: the smaller {type(masked).__name__} {found.why}{hints} "
            "(the masked one is that whose router gives -inf for what is removed)"
        )
    notes = with_configs(
        small,
        masked,
        [(len(e.kept), int(e.kept.sum())) for e in sets.values()],
        numbers,
        works,
    )
    kept = {
        name: Kept(tuple(x.shape), _indices(name, x.ndim, sets))
        for name, x in before.items()
    }
    kept |= {
        name: Kept(tuple(x.shape), (None,) * x.ndim)
        for name, x in masked.named_buffers()
    }
    stays = [
        f"{experts.part} experts of {name!r} are masked in some of their leaves, and "
        "stay"
        for name, experts in sets.items()
        if experts.part
    ]
    return Smaller(small, kept, "class", tuple(stays), notes)


class _Experts(NamedTuple):
    members: tuple[Member, ...]
    routers: tuple[Member, ...]  # of the leaves that may be routers'
    kept: npt.NDArray[np.bool_]
    part: int  # of those how many have leaves that are masked whole

    @property
    def lost(self) -> bool:
        """Whether any expert goes."""
        return not self.kept.all()

    def flags(self, member: Member) -> Tensor:
        """Which indices of a leaf stay."""
        of_no_expert = [True]  # is at -1
        kept = np.append(self.kept, of_no_expert)
        return torch.from_numpy(kept[member.units])


def _sets(pattern: Pattern, state: State) -> dict[str, _Experts]:
    # The experts of each tied set, and which of them have an entry that is not masked.
    wanted = (
        "without_experts: expected a pattern such as "
        "sf.patterns.tied([['*.gate.weight', 0], ['*.experts.down_proj', 0]])"
    )
    found = {}
    if isinstance(pattern, Pattern):
        found = tied_members(pattern, state.params)
    if not found:
        raise ValueError(f"{wanted}, got {pattern}")
    leaves = flatten(state.params)[0]
    masks = flatten(state.masks)[0]
    made = {}
    for name, places in found.items():
        members = [Member(leaf, dim, units.numpy()) for leaf, dim, units in places]
        if not any(leaves[member.leaf].ndim > 2 for member in members):
            raise ValueError(
                f"{wanted}, but the set of {name!r} has no leaf of experts [experts, "
                "out, in]"
            )
        by_leaf: dict[str, npt.NDArray[np.bool_]] = {}
        for member in members:
            mask = masks[member.leaf].expand(leaves[member.leaf].shape)
            here = _kept_units(member, mask)
            by_leaf[member.leaf] = here | by_leaf.get(member.leaf, False)
        kept = np.logical_or.reduce(list(by_leaf.values()))
        if not kept.any():
            raise ValueError(
                f"without_experts: expected at least one expert of {name!r} to stay, "
                "but all are masked"
            )
        everywhere = np.logical_and.reduce(list(by_leaf.values()))
        routers = [member for member in members if leaves[member.leaf].ndim == 2]
        part = int((kept & ~everywhere).sum())
        made[name] = _Experts(tuple(members), tuple(routers), kept, part)
    return made


def _kept_units(member: Member, mask: Tensor) -> npt.NDArray[np.bool_]:
    # Which units have an entry of a leaf that is not masked.
    units = member.units
    kept = np.zeros(units.max() + 1, bool)
    rows = mask.movedim(member.dim, 0).reshape(len(units), -1).any(1).cpu().numpy()
    np.logical_or.at(kept, units[units >= 0], rows[units >= 0])
    return kept


def _few(sets: Mapping[str, _Experts], seen: RouterLog) -> Iterator[str]:
    for experts in sets.values():
        routers = [member.leaf for member in experts.routers]
        left = experts.kept.sum()
        for path, most in seen.most.items():
            if path in routers and most > left:
                yield (
                    f"a token of {path!r} is routed to {most} experts, of which {left} "
                    "stay: keep more"
                )


def _left_out(masked: nn.Module, sets: Mapping[str, _Experts]) -> Iterator[str]:
    # Tensors that have an entry for each expert, too, and are in no set.
    known = {member.leaf for experts in sets.values() for member in experts.members}
    for experts in sets.values():
        if experts.lost:
            beside = {member.leaf.rpartition(".")[0] for member in experts.members}
        else:
            beside = set()
        for name, x in (*masked.named_parameters(), *masked.named_buffers()):
            if (
                name not in known
                and name.rpartition(".")[0] in beside
                and len(experts.kept) in x.shape
            ):
                yield (
                    f"{name!r} of shape {tuple(x.shape)} is no member of the set, and "
                    "stays"
                )


def _indices(
    name: str, ndim: int, sets: Mapping[str, _Experts]
) -> tuple[Tensor | None, ...]:
    # What stays of a leaf along each dimension; None: all.
    made: list[Tensor | None] = [None] * ndim
    for experts in sets.values():
        for member in experts.members:
            if member.leaf == name and experts.lost:
                made[member.dim] = experts.flags(member).nonzero().flatten()
    return tuple(made)


def _cut(masked: nn.Module, sets: Mapping[str, _Experts]) -> nn.Module:
    memo: dict[int, Any] = {}
    for path in {
        member.leaf for experts in sets.values() for member in experts.members
    }:
        x = masked.get_parameter(path)
        memo[id(x)] = type(x)(
            taken(x.detach(), _indices(path, x.ndim, sets)), x.requires_grad
        )
    small = copy.deepcopy(masked, memo)
    for layer in small.modules():
        if isinstance(layer, nn.Linear) and id(layer.weight) in {
            id(x) for x in memo.values()
        }:
            layer.out_features, layer.in_features = layer.weight.shape
    return small


def _numbers(small: nn.Module, sets: Mapping[str, _Experts]) -> list[Guess]:
    # Whole numbers that are the number of experts, in modules that hold these or their
    # routers, and in those around.
    owners: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for experts in sets.values():
        for member in experts.members:
            path = member.leaf
            size = (len(experts.kept), int(experts.kept.sum()))
            while path:
                path = path.rpartition(".")[0]
                owners[path].add(size)
    alike: dict[Any, dict[str, tuple[int, int]]] = defaultdict(dict)
    for path, sizes in owners.items():
        layer = small.get_submodule(path)
        if type(layer).__module__.startswith("torch.nn."):
            continue
        for key, value in vars(layer).items():
            became = [size for size in sizes if size[0] == value]
            if isinstance(value, int) and len(became) == 1 and became[0][1] != value:
                alike[type(layer), key][path] = became[0]
    made = []
    for (_, key), members in alike.items():
        held = {path: vars(small.get_submodule(path)) for path in members}
        old, new = zip(*members.values(), strict=True)
        made.append(Guess(held, key, None, [new, old], 1))
        made[-1].take(0)
    return made
