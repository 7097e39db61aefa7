"""What an algorithm attached to a module must do, told as `with_optimizer` tells it,
with optimizers of torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import sparsefn as sf
from sparsefn._engine.leaves.leafwise import is_sparse
from sparsefn.core.state import has_own_support
from sparsefn.core.tree import Tree
from sparsefn.testing.harness import leaves

Gradients = Mapping[str, Tensor | None]


class Kind(NamedTuple):
    """A class of optimizers, and its options."""

    kind: type[Optimizer]
    options: dict[str, Any]

    def __call__(self, groups: Iterable[Any]) -> Optimizer:
        return self.kind(groups, **self.options)  # type: ignore[call-arg]


class Slot(NamedTuple):
    """A trained leaf: the parameter that stands for it, its optimizer's number, and the
    weight that it is, if any.
    """

    parameter: nn.Parameter
    owner: int
    weight: str | None


def loss(weights: Mapping[str, Tensor], slopes: Mapping[str, Tensor]) -> Tensor:
    """A loss whose gradients depend on the weights: those that have a slope."""
    parts = [
        (slope * weights[name] + 0.05 * weights[name] ** 2).sum()
        for name, slope in slopes.items()
    ]
    return torch.stack(parts).sum()


class Reference:
    """An algorithm and optimizers of torch as pure functions of weights and gradients.

    `groups` has for each optimizer its groups, as lists of names. Parameters of
    `algorithm` that are no weights join the group of the weight whose name ends their
    path, or come into one of their own with the options of `extra`.
    """

    def __init__(
        self,
        algorithm: sf.Algorithm,
        weights: Mapping[str, Tensor],
        groups: Sequence[Sequence[Sequence[str]]],
        kinds: Sequence[Kind],
        skip: sf.Trigger,
        reset: sf.Trigger,
        extra: dict[str, Any] | None,
    ) -> None:
        self.skip, self.reset, self.extra = skip, reset, extra
        self.own = {name: nn.Parameter(x.clone()) for name, x in weights.items()}
        self.kinds = kinds
        self.optimizers = [
            kind([{"params": [self.own[name] for name in group]} for group in some])
            for kind, some in zip(kinds, groups, strict=True)
        ]
        self.attach(algorithm, weights)

    def attach(self, algorithm: sf.Algorithm, weights: Mapping[str, Tensor]) -> None:
        """Begin with weights; the optimizers stay."""
        self.algorithm, self.last = algorithm, -1
        self.state = algorithm.init({name: x.clone() for name, x in weights.items()})
        names = {id(leaf): name for name, leaf in leaves(self.state.params).items()}
        self.slots, added = [], []
        self.led = set[str]()  # weights in whose place something else trains
        for path, leaf in leaves(algorithm.view.get(self.state)).items():
            if id(leaf) in names:
                name = names[id(leaf)]
                self.slots.append(
                    Slot(self.own[name], self._place(self.own[name])[0], name)
                )
                continue
            ends = sorted(
                (name for name in self.own if f".{path}".endswith(f".{name}")), key=len
            )
            near = self._place(self.own[ends[-1] if ends else next(iter(self.own))])
            self.led |= {*ends[-1:]}
            self.slots.append(Slot(nn.Parameter(leaf.clone()), near[0], None))
            added.append((self.slots[-1], near))
        self.led -= {slot.weight for slot in self.slots if slot.weight}
        for slot, (owner, group) in added:
            if self.extra is None:
                self.optimizers[owner].param_groups[group]["params"].append(
                    slot.parameter
                )
        if self.extra is not None:
            for owner in sorted({slot.owner for slot, _ in added}):
                new = [slot.parameter for slot, _ in added if slot.owner == owner]
                self.optimizers[owner].add_param_group({**self.extra, "params": new})

    def detach(self) -> None:
        """The optimizers without what is no weight."""
        own = {id(p) for p in self.own.values()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if id(p) not in own:
                        optimizer.state.pop(p, None)
                kept = [p for p in group["params"] if id(p) in own]
                if isinstance(optimizer, torch.optim.LBFGS) and len(kept) < len(
                    group["params"]
                ):
                    optimizer.state.clear()  # its vectors are all parameters end to end
                group["params"][:] = kept  # LBFGS holds the list itself
            optimizer.param_groups[:] = [
                group for group in optimizer.param_groups if group["params"]
            ]

    def _place(self, parameter: nn.Parameter) -> tuple[int, int]:
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                if any(p is parameter for p in group["params"]):
                    return i, j
        raise AssertionError("a parameter without an optimizer")

    # ---- one step --------------------------------------------------------------------

    def shown(self) -> dict[str, Tensor]:
        """The weights that the module shows between steps."""
        return leaves(sf.effective(self.state))

    def take(self, shown: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
        """Weights that other code wrote: the entries that are kept, and pruned ones
        where those have values.
        """
        params = dict(self.state.params)
        for name, x in now.items():
            mask = self.state.masks[name]
            written = ~same(x, shown[name])
            params[name] = torch.where(
                written if self.keeps(name) else written & mask, x, params[name]
            )
        self.state = self.state._replace(params=params)

    def keeps(self, name: str) -> bool:
        """Whether pruned entries of a weight have values."""
        mask, leaf = self.state.masks[name], self.state.params[name]
        return mask.ndim > 0 and (
            has_own_support(self.state) or bool((leaf[~mask] != 0).any())
        )

    def before(self, dense: Gradients, step: int) -> None:
        """The gradients that the optimizers see."""
        zeros = {name: torch.zeros_like(x) for name, x in self.state.params.items()}
        self.dense: dict[str, Tensor] = {
            name: zeros[name] if g is None else g.clone() for name, g in dense.items()
        }
        for parameter in self.parameters():
            parameter.grad = None
        self.skipped = bool(self.skip(step))
        if not self.skipped:
            seen = leaves(
                self.algorithm.view.grads(self.state, self.dense, step)
            ).values()
            for slot, grad in zip(self.slots, seen, strict=True):
                if slot.weight is None or dense[slot.weight] is not None:
                    # LBFGS views gradients as rows
                    slot.parameter.grad = grad.clone(
                        memory_format=torch.contiguous_format
                    )

    def write_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Other gradients for all parameters; they are masked again."""
        supports = leaves(self.algorithm.view.support(self.state)).values()
        masks = {
            id(slot.parameter): x for slot, x in zip(self.slots, supports, strict=True)
        }
        for parameter, grad in zip(self.parameters(), grads, strict=True):
            mask = None if self.skipped else masks.get(id(parameter))
            parameter.grad = (
                None
                if grad is None or mask is None
                else torch.where(mask, grad, 0.0).to(grad.dtype)
            )

    @torch.no_grad()
    def step(self, owner: int, closure: Callable[[], Tensor] | None = None) -> None:
        """One of the optimizers steps."""
        view = self.algorithm.view
        values = list(leaves(view.get(self.state)).values())
        self._tidy(list(leaves(view.support(self.state)).values()), values)
        for slot, leaf in zip(self.slots, values, strict=True):
            slot.parameter.copy_(leaf)
        self.optimizers[owner].step(closure)  # type: ignore[call-overload]
        self._put(owner)

    def _put(self, owner: int) -> None:
        view = self.algorithm.view
        old = leaves(view.get(self.state)).values()
        new = [
            s.parameter.detach().clone() if s.owner == owner else x
            for s, x in zip(self.slots, old, strict=True)
        ]
        tree = optree.tree_unflatten(optree.tree_structure(view.get(self.state)), new)
        self.state = view.put(self.state, tree)

    def closure(self, slopes: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        """What the only optimizer calls to have the loss and gradients of the weights
        that it has made.
        """

        def evaluate() -> Tensor:
            with torch.no_grad():
                self._put(0)
            weights = {
                name: x.clone().requires_grad_() for name, x in self.shown().items()
            }
            with torch.enable_grad():
                value = loss(weights, slopes)
            value.backward()
            self.before({name: x.grad for name, x in weights.items()}, self.last + 1)
            return value

        return evaluate

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Masks, and moments."""
        view, old, self.last = self.algorithm.view, self.state, step
        new = self.algorithm.update(old, self.dense, step)
        if not all(bool(x.isfinite().all()) for x in self.dense.values()):
            new = old
        rows = zip(
            *(
                leaves(f(x)).values()
                for f in (view.support, view.get)
                for x in (new, old)
            ),
            strict=True,
        )
        live = [
            now & was & same(x, y) if now.ndim or was.ndim else now
            for now, was, x, y in rows
        ]
        self._tidy(live, list(leaves(view.get(new)).values()))
        self.state = new
        if self.reset(step):
            for slot in self.slots:
                optimizer = self.optimizers[slot.owner]
                optimizer.state.pop(slot.parameter, None)
                if isinstance(optimizer, torch.optim.LBFGS):
                    optimizer.state.clear()

    def _tidy(self, live: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for slot, keep, value in zip(self.slots, live, values, strict=True):
            optimizer = self.optimizers[slot.owner]
            group = next(
                g
                for g in optimizer.param_groups
                if any(p is slot.parameter for p in g["params"])
            )
            first = {
                (torch.optim.Rprop, "step_size"): "lr",
                (torch.optim.Adagrad, "sum"): "initial_accumulator_value",
            }
            if not is_sparse(keep, slot.parameter):
                continue
            if isinstance(optimizer, torch.optim.LBFGS):
                self._forget(optimizer, slot.parameter, keep)
                continue
            for name, moment in optimizer.state.get(slot.parameter, {}).items():
                if isinstance(moment, Tensor) and moment.shape == keep.shape:
                    option = first.get((type(optimizer), name))
                    # an average of the weights
                    if (type(optimizer), name) == (torch.optim.ASGD, "ax"):
                        moment.copy_(torch.where(keep, moment, value))
                        continue
                    moment.masked_fill_(
                        ~keep, 0 if option is None else float(group[option])
                    )

    @staticmethod
    def _forget(
        optimizer: torch.optim.LBFGS, parameter: nn.Parameter, keep: Tensor
    ) -> None:
        """LBFGS begins anew where its history has entries that do not train."""
        (group,) = optimizer.param_groups
        entries = [
            ~keep if p is parameter else torch.zeros_like(p, dtype=torch.bool)
            for p in group["params"]
        ]
        gone = torch.cat([x.flatten() for x in entries])
        for state in list(optimizer.state.values()):
            vectors = [state.get("d"), state.get("prev_flat_grad")]
            vectors += [*(state.get("old_dirs") or ()), *(state.get("old_stps") or ())]
            if any(x is not None and bool((x[gone] != 0).any()) for x in vectors):
                optimizer.state.clear()

    # ---- the optimizers --------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order of the optimizers and their groups."""
        return [
            p
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the options of other optimizers of the same groups."""
        for mine, theirs in zip(self.optimizers, optimizers, strict=True):
            for group, other in zip(
                mine.param_groups, theirs.param_groups, strict=True
            ):
                group.update({name: x for name, x in other.items() if name != "params"})

    def saved(self) -> Any:
        """All that a run goes on from."""
        return (
            self.state,
            self.last,
            copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers]),
        )

    def load_optimizers(self, saved: Any) -> None:
        for optimizer, found in zip(
            self.optimizers, copy.deepcopy(saved[2]), strict=True
        ):
            optimizer.load_state_dict(found)

    def load_state(self, saved: Any) -> None:
        self.state, self.last = saved[:2]


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors are equal; NaN equals NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def assert_same_moments(
    mine: Sequence[Optimizer], reference: Reference, live_alone: bool = False
) -> None:
    """The states of optimizers are those of a reference; perhaps only of entries that
    train.
    """
    supports = leaves(reference.algorithm.view.support(reference.state)).values()
    moving = {
        id(slot.parameter): support
        for slot, support in zip(reference.slots, supports, strict=True)
    }
    places = [(o, p) for o in mine for group in o.param_groups for p in group["params"]]
    for i, ((optimizer, p), own) in enumerate(
        zip(places, reference.parameters(), strict=True)
    ):
        found = optimizer.state.get(p, {})
        wanted = next(
            (o.state[own] for o in reference.optimizers if own in o.state), {}
        )
        assert set(found) == set(wanted), (
            f"moments {sorted(found)} of parameter {i}, expected {sorted(wanted)}"
        )
        for name, value in wanted.items():
            if isinstance(value, Tensor):
                # Adamax adds its eps to moments of zero
                least = 1e-8 if name == "exp_inf" else -torch.inf
                equal = same(found[name].clamp_min(least), value.clamp_min(least))
                shaped = value.shape == own.shape and is_sparse(
                    moving.get(id(own), value.new_ones(())), own
                )
                # where pruned, the learning rate of some time
                if name == "step_size" or (live_alone and shaped):
                    equal = equal | ~moving[id(own)]
                assert bool(equal.all()), (
                    f"another {name} of parameter {i}:\n{found[name]}\n{value}"
                )


def step_of_reference(reference: Reference, dense: Tree, step: int) -> sf.State:
    """One whole step with a single optimizer."""
    reference.before(dense, step)
    reference.step(0)
    reference.after(step)
    return reference.state
