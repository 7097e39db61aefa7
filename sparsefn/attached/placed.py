"""A state whose weights lie in the parameters of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsefn.attached.gradients import dense_gradient
from sparsefn.attached.moments import check_moments, clear_moments, zeros_stay
from sparsefn.attached.optimizer_state import note_states, with_other_states
from sparsefn.attached.records import Record, address, trained_records
from sparsefn.attached.writes import check_kinds, hiding, taken_over
from sparsefn.engine.leaves import is_sparse, zeroed
from sparsefn.state import Algorithm, State, Step, masked_view
from sparsefn.tree import Leaves, Tree, flatten, leaves_of, opened, zipped


class Placed:
    """A state, and the records of the parameters that hold its weights.

    >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    >>> weights = {"w": Record("w", weight, torch.optim.SGD([weight], lr=0.1))}
    >>> algorithm = sf.static(0.5, init="magnitude")
    >>> placed = Placed(algorithm, weights)
    >>> with torch.no_grad():
    ...     placed.show(placed.state)
    >>> weight
    Parameter containing:
    tensor([[0., 2.]], requires_grad=True)

    Where the effective weights say all that the state's params do, the state's leaves are the parameters' own memory.
    """

    def __init__(self, algorithm: Algorithm, weights: Mapping[str, Record]) -> None:
        state = algorithm.init({name: record.parameter.detach() for name, record in weights.items()})
        if state.opt != ():
            raise ValueError("attach: expected an algorithm without with_optimizer: torch's own takes its place")
        self.algorithm, self.state = algorithm, state
        self.weights = {name: weights[name] for name in flatten(state.params)[0]}  # in the order of the leaves
        self.trained = trained_records(algorithm.view, state, self.weights)
        self.extra = [record for record in self.trained if record.beside]
        self.records = [*self.weights.values(), *self.extra]
        for record in self.weights.values():  # the weights that `show` is about to change
            if is_sparse(state.masks[record.name], record.parameter):
                record.found = record.parameter.detach().clone()
        self._dtypes = {record.parameter.dtype for record in self.records}

    def now(self, call: str) -> State:
        """The state, with what somebody has written since `show`; `call` begins the errors."""
        written = [record for record in self.weights.values() if record.is_written()]
        return taken_over(call, self.state, written) if written else self.state

    def take_over(self, call: str) -> None:
        """Let state and module have what somebody has written since `show`, masked."""
        if (state := self.now(call)) is not self.state:
            self.show(state, self.state)

    def seen(self, dense: Leaves, step: Step) -> list[Tensor]:
        """The gradient of each leaf that the algorithm trains, in their order, of the dense ones of the weights.

        >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
        >>> weights = {"w": Record("w", weight, torch.optim.SGD([weight], lr=0.1))}
        >>> Placed(sf.static(0.5, init="magnitude"), weights).seen({"w": torch.ones(1, 2)}, 0)
        [tensor([[0., 1.]])]
        """
        view = self.algorithm.view
        if view.grads is masked_view.grads:
            return zeroed([record.support for record in self.trained], list(dense.values()))
        return leaves_of(view.grads(self.state, dict(dense), step))

    def moved(self, stepped: Sequence[Optimizer]) -> State:
        """The state with what optimizers, and whoever else, made of the parameters since `settle`.

        The state itself where the parameters are its leaves, and are known to be zero where they are pruned.
        """
        state, view, records = self.state, self.algorithm.view, self.weights.values()
        written = [record for record in records if record.written or record.is_written()]
        is_plain = view.get(state) is state.params and not any(record.hidden for record in records)
        if is_plain and not written and stepped and all(zeros_stay(one, self._dtypes) for one in stepped):
            return state
        check_kinds("after_step", state, written)
        state = taken_over("after_step", state, [record for record in written if not record.trains])
        own = [record for record in records if record.trains and not record.hidden]
        state = state._replace(params=state.params | {r.name: r.parameter.detach() for r in own})
        if not is_plain:
            values = [record.parameter.detach() for record in self.trained]
            state = view.put(state, opened(view.get(state))[1](values))
        leaves = zeroed([state.masks[r.name] for r in own], [state.params[r.name] for r in own])
        state = state._replace(params=state.params | {r.name: leaf for r, leaf in zip(own, leaves, strict=True)})
        for record, value in zip(self.trained, leaves_of(view.get(state)), strict=True):
            if is_sparse(record.support, record.parameter):
                clear_moments(record, record.support, value)  # decay of weights that are not zero ends in momentum
        return state

    @torch.no_grad()
    def show(self, new: State, old: State | None = None) -> None:
        """Put the effective weights of a state into the module, and keep the params that those do not show.

        Leaves that are those of `old`, under its masks, are known to be zero where they are pruned.
        """
        params, records = dict(new.params), list(self.weights.values())
        held = {address(record.parameter) for record in self.records}
        fresh = [r for r in records if old is None or not _same(r.name, new, old)]
        some = [r for r in records if r.hidden or r in fresh]
        shows = zeroed([new.masks[r.name] for r in some], [params[r.name] for r in some])
        visible = params | {r.name: leaf for r, leaf in zip(some, shows, strict=True)}
        hiding(new, fresh, [visible[r.name] for r in fresh])
        for record in records:
            name, parameter, leaf = record.name, record.parameter, params[record.name]
            if record.hidden and address(leaf) in held:  # a map may hand on its latents
                params[name] = leaf.clone()
            if address(visible[name]) != address(parameter):
                parameter.copy_(visible[name])
            if not record.hidden:
                params[name] = parameter.detach()
            record.note()
            record.written = False
        rows, _ = zipped(self.trained, self.algorithm.view.get(new), self.algorithm.view.support(new))
        for record, leaf, support in rows:
            record.support = support
            if record.beside and address(leaf) != address(record.parameter):
                record.parameter.copy_(leaf)
        self.state = new._replace(params=params)

    def show_trained(self) -> None:
        """Let the module hold what trains, also where it is pruned: a step begins."""
        for record in self.weights.values():
            record.found = None
            if record.hidden and record.trains:
                with torch.no_grad():
                    record.parameter.copy_(self.state.params[record.name])
                record.note()

    def unmasked(self) -> dict[str, Tensor]:
        """The module's weights, or, where nobody has written to it since `attach` masked them, those before."""
        return {
            name: record.parameter.detach() if record.found is None or record.is_written() else record.found
            for name, record in self.weights.items()
        }

    def settle(self, optimizer: Optimizer, skipped: bool) -> None:
        """Just before an optimizer steps: mask the gradients and moments that somebody has written, and note weights.

        A step that is left out has no gradients.
        """
        for record in self.weights.values():
            record.written = record.written or record.is_written()
            if not record.trains:
                record.parameter.grad = None
        steps = [record for record in self.trained if record.optimizer is optimizer]
        new = with_other_states(steps)
        check_moments(optimizer, new)
        for record in steps:
            support = record.support
            is_masked = is_sparse(support, record.parameter)
            if skipped:
                record.give(None)
            elif is_masked and not record.has_given():
                record.give(zeroed([support], [dense_gradient(record.parameter, record.parameter)])[0])
        note_states(new)
        for record in new:
            if is_sparse(record.support, record.parameter):
                clear_moments(record, record.support)

    def leave(self, optimizer: Optimizer) -> None:
        """Note what an optimizer has written in its step."""
        moved = [record for record in self.records if record.optimizer is optimizer]
        for record in moved:
            record.note()
        if with_other_states(moved, grown=True):
            check_moments(optimizer, self.trained)
            note_states(moved)

    def own(self, tree: Tree) -> Tree:
        """The tree, with copies of the leaves whose memory later steps write."""
        held = {address(record.parameter) for record in self.records}
        leaves, rebuild = opened(tree)
        return rebuild([leaf.clone() if address(leaf) in held else leaf for leaf in leaves])


def _same(name: str, new: State, old: State) -> bool:
    return new.params[name] is old.params[name] and new.masks[name] is old.masks[name]
