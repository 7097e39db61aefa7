"""A state whose weights lie in the parameters of a module, and what other code wrote
there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsefn._engine.leaves import are_zeroed, either, is_sparse, zero_, zeroed
from sparsefn._engine.processes import full_tensors
from sparsefn.core.state import (
    Algorithm,
    State,
    Step,
    effective,
    has_optimizer,
    has_own_support,
    masked_view,
)
from sparsefn.core.tree import Leaves, Tree, flatten, leaves_of, opened, zipped
from sparsefn.nn.attach.optimizer_state import (
    HeldStates,
    check_moments,
    clear_moments,
    zeros_stay,
)
from sparsefn.nn.attach.parameters import (
    AGAIN,
    Record,
    address,
    addresses,
    dense_gradient,
    differ,
    note_all,
    set_gradients,
    trained_records,
    with_other_gradients,
    written_among,
)

TrainedRow = tuple[Record, Tensor, Tensor]


class ModuleState:
    """A state, and the records of the parameters that hold its weights.

    >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    >>> weights = {"w": Record("w", weight, torch.optim.SGD([weight], lr=0.1))}
    >>> algorithm = sf.static(0.5, init="magnitude")
    >>> module_state = ModuleState(algorithm, weights)
    >>> with torch.no_grad():
    ...     module_state.write(module_state.state)
    >>> weight
    Parameter containing:
    tensor([[0., 2.]], requires_grad=True)

    Where the effective weights say all that the state's params do, the state's leaves
    are the parameters' own memory.
    """

    def __init__(self, algorithm: Algorithm, weights: Mapping[str, Record]) -> None:
        state = algorithm.init(
            {name: record.parameter.detach() for name, record in weights.items()}
        )
        if has_optimizer(state):
            raise ValueError(
                "attach: expected an algorithm without with_optimizer: torch's own "
                "takes its place"
            )
        self.algorithm = algorithm
        self.state = state
        # what trained, where `settle` has put another state in its place
        self.unsettled: State | None = None
        # in the order of the leaves
        self.weights = {name: weights[name] for name in flatten(state.params)[0]}
        self.trained = trained_records(algorithm.view, state, self.weights)
        self.extra = [record for record in self.trained if record.added_for]
        self.records = [*self.weights.values(), *self.extra]
        self.optimizers = {r.optimizer: HeldStates(r.optimizers) for r in self.trained}
        # the weights that follow from what trains in their place
        self.following = [r for r in self.weights.values() if r.follows]
        # the weights of which the state has values that the module does not show, and
        # all other weights
        self.hidden: list[Record] = []
        self.shown: list[Record] = []
        # what `attach` found in the weights that it masks: until the first step
        self.found = {
            record.name: record.parameter.detach().clone()
            for record in self.weights.values()
            if is_sparse(state.masks[record.name], record.parameter)
        }
        # the weights that other code wrote since `write`, but for optimizers' steps
        self._written: set[str] = set()
        self._dtypes = {record.parameter.dtype for record in self.records}

    def accept_writes(self, call: str) -> None:
        """Take what other code wrote since `write` into state and module, masked.

        `call` begins the errors.
        """
        self.write(
            with_module_values(call, self.state, self.weights.values()), self.state
        )

    @torch.no_grad()
    def drop_writes(self) -> None:
        """Show again the weights that follow from something, despite writes."""
        masks = [self.state.masks[record.name] for record in self.following]
        leaves = [self.state.params[record.name] for record in self.following]
        for record, leaf in zip(self.following, zeroed(masks, leaves), strict=True):
            record.parameter.copy_(leaf)

    def begin_step(self) -> Collection[str]:
        """Take what other code wrote, as far as it reaches a step; names of weights
        that were not masked.

        torch counts most writes, but not writes through `.data`. What these writes
        leave at pruned entries waits for `read`, unless the state has values of its
        own there, or a view reads weights: until then it reaches nothing.
        """
        written = written_among(self.weights.values())
        if written:
            check_kinds("before_step", self.state, written)
            stained = nonzero_pruned(self.state, written)
            self.accept_writes("before_step")
            return stained
        if self.hidden and not self.shows(self.hidden):
            self.state = with_module_values("before_step", self.state, self.hidden)
        if self.algorithm.view is not masked_view:
            self.zero_pruned()
        return ()

    def check_following(self, call: str) -> None:
        """Raise RuntimeError where other code wrote to weights that follow from
        something.
        """
        if self.following and not self.shows(self.following):
            check_followers(call, self.state, self.following)

    def shows(self, records: Sequence[Record]) -> bool:
        """Whether the module surely has the effective weights: nothing is read from a
        device, or other processes.
        """
        values = [record.parameter.detach() for record in records]
        if any(type(value) is not Tensor or not value.is_cpu for value in values):
            return False
        masks = [self.state.masks[record.name] for record in records]
        return are_zeroed(
            masks, [self.state.params[record.name] for record in records], values
        )

    def zero_pruned(self) -> None:
        """Make weights zero in the module where they are pruned, unless the state has
        values of its own there.
        """
        masks = [self.state.masks[record.name] for record in self.shown]
        zero_(masks, [record.parameter for record in self.shown])

    def masked_gradients(self, dense: Leaves, step: Step) -> list[Tensor]:
        """The gradient of each leaf that the algorithm trains, in their order, made of
        the dense gradients of the weights.

        >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
        >>> weights = {"w": Record("w", weight, torch.optim.SGD([weight], lr=0.1))}
        >>> module_state = ModuleState(sf.static(0.5, init="magnitude"), weights)
        >>> module_state.masked_gradients({"w": torch.ones(1, 2)}, 0)
        [tensor([[0., 1.]])]
        """
        view = self.algorithm.view
        if view.grads is masked_view.grads:
            return zeroed(
                [record.support for record in self.trained], list(dense.values())
            )
        slopes = leaves_of(view.grads(self.state, dict(dense), step))
        return [slope.contiguous() for slope in slopes]  # LBFGS views them as rows

    def read(self, mixes: bool) -> State:
        """The state with the values of the parameters, which optimizers or other code
        have written since `before_optimizer`.

        It is the state itself where the parameters are its leaves, and their moments
        are known to be masked: not where an optimizer `mixes` entries.
        """
        state = self.state
        view = self.algorithm.view
        written = self.note_writes()
        if written:
            check_kinds("after_step", state, written)
        self.check_following("after_step")
        self.zero_pruned()
        trains_params = view.get is masked_view.get or view.get(state) is state.params
        is_plain = trains_params and not self.hidden
        if is_plain and not written and not mixes:
            return state
        state = with_module_values(
            "after_step", state, [record for record in written if not record.trains]
        )
        own = {r.name: r.parameter.detach() for r in self.shown if r.trains}
        state = state._replace(params=state.params | own)
        if not is_plain:
            values = [record.parameter.detach() for record in self.trained]
            state = view.put(state, opened(view.get(state))[1](values))
        for record, value in zip(self.trained, leaves_of(view.get(state)), strict=True):
            if is_sparse(record.support, record.parameter):
                # decay of weights that are not zero ends in momentum
                clear_moments(record, record.support, value)
        return state

    @torch.no_grad()
    def write(
        self,
        new: State,
        old: State | None = None,
        trained: Sequence[TrainedRow] | None = None,
    ) -> None:
        """Put the effective weights of a state into the module, and keep the params
        that these do not show.

        Leaves that are also in `old`, under the same masks, are known to be zero where
        they are pruned. `trained` are the rows of the new state, where they are known.
        """
        params = dict(new.params)
        records = list(self.weights.values())
        own = addresses([record.parameter for record in self.records])
        fresh = [r for r in records if old is None or not _same(r.name, new, old)]
        some = [r for r in records if r.hidden or r in fresh]
        shows = zeroed(
            [new.masks[r.name] for r in some], [params[r.name] for r in some]
        )
        effective = params | {r.name: leaf for r, leaf in zip(some, shows, strict=True)}
        set_hidden(new, fresh, [effective[r.name] for r in fresh])
        self.hidden = [r for r in records if r.hidden]
        self.shown = [r for r in records if not r.hidden]
        shown = addresses([effective[r.name] for r in records])
        places = zip(records, own[: len(records)], shown, strict=True)
        for record, mine, other in places:
            name = record.name
            leaf = params[name]
            if record.hidden and address(leaf) in own:  # a map may hand on its latents
                params[name] = leaf.clone()
            if other != mine:
                record.parameter.copy_(effective[name])
            if not record.hidden:
                params[name] = record.parameter.detach()
        self._written = set()
        note_all(records)
        for record, leaf, support in self.rows(new) if trained is None else trained:
            record.support = support
            if record.added_for and address(leaf) != address(record.parameter):
                record.parameter.copy_(leaf)
        self.state = new._replace(params=params)

    def rows(self, state: State) -> list[TrainedRow]:
        """What trains in a state: each record with its leaf and its support."""
        view = self.algorithm.view
        return zipped(self.trained, view.get(state), view.support(state))[0]

    def write_trained(self) -> None:
        """Let the module hold what trains, also where it is pruned: a step begins."""
        self.found = {}
        for record in self.weights.values():
            if record.hidden and record.trains:
                with torch.no_grad():
                    record.parameter.copy_(self.state.params[record.name])
                record.note()

    def unmasked(self) -> dict[str, Tensor]:
        """The module's weights; for a weight that no code has written to since
        `attach` masked it, its value before that.
        """
        weights = {
            name: record.parameter.detach() for name, record in self.weights.items()
        }
        found = {
            name: x
            for name, x in self.found.items()
            if not self.weights[name].is_written()
        }
        if found:
            # as `attach` did: `.data` hides writes from torch
            shown = effective(self.algorithm.init(weights | found))
            written = differ([(weights[name], shown[name]) for name in found])
            weights |= {
                name: x
                for (name, x), other in zip(found.items(), written, strict=True)
                if not other
            }
        return weights

    def before_optimizer(self, optimizer: Optimizer, skipped: bool) -> bool:
        """Just before an optimizer steps: mask the gradients and moments that other
        code wrote, and note weights; whether it may let entries reach other entries.

        A step that is left out has no gradients. Where entries may reach others,
        everything is masked.
        """
        self.note_writes()
        for record in self.weights.values():
            if not record.trains:
                record.parameter.grad = None
        records = [record for record in self.trained if record.optimizer is optimizer]
        trusts = zeros_stay(optimizer, self._dtypes)
        if not trusts:
            self.check_following("step")
            self.zero_pruned()
        self.mask_states(optimizer)
        if skipped:
            set_gradients(records, [None] * len(records))
        else:
            self._mask_gradients(with_other_gradients(records) if trusts else records)
        return not trusts

    def _mask_gradients(self, records: Sequence[Record]) -> None:
        masked = [r for r in records if r.support.ndim and r.parameter.grad is not None]
        if masked:
            grads = [dense_gradient(r.parameter, r.parameter) for r in masked]
            set_gradients(masked, zeroed([r.support for r in masked], grads))

    def note_writes(self) -> list[Record]:
        """Note the weights that other code wrote, and return all since `write`.

        Optimizers' steps are left out.
        """
        records = self.weights.values()
        for record in written_among(records):
            self._written.add(record.name)
        return [record for record in records if record.name in self._written]

    def mask_states(self, optimizer: Optimizer) -> None:
        """Mask the moments of an optimizer that has other states than after its last
        step, as by `load_state_dict`.
        """
        if not self.optimizers[optimizer].have_changed():
            return
        check_moments(optimizer, self.trained)
        for record in self.trained:
            is_its = record.optimizer is optimizer
            if is_its and is_sparse(record.support, record.parameter):
                clear_moments(record, record.support)

    def forget_states(self) -> None:
        """Let all moments be masked again before the next step."""
        for held in self.optimizers.values():
            held.states = None

    def after_optimizer(self, optimizer: Optimizer, mixes: bool) -> None:
        """Note what an optimizer has written in its step, which may let entries reach
        other entries (`mixes`).

        LBFGS moves all parameters along one vector. Where the vector is not finite,
        weights without a gradient change, too: weights that follow from something get
        their values back.
        """
        if mixes:
            self.drop_writes()
        moved = [record for record in self.records if record.optimizer is optimizer]
        note_all(moved)
        if self.optimizers[optimizer].have_changed():
            check_moments(optimizer, self.trained)

    def snapshot(self, tree: Tree) -> Tree:
        """The tree, with copies of the leaves whose memory later steps write."""
        held = set(addresses([record.parameter for record in self.records]))
        leaves, rebuild = opened(tree)
        rows = zip(leaves, addresses(leaves), strict=True)
        return rebuild([leaf.clone() if at in held else leaf for leaf, at in rows])

    @torch.no_grad()
    def settle(self) -> tuple[list[str], list[str]]:
        """Put the settled state in the place of the state, and its weights into the
        module.

        Returns the names of weights that stay, as they have another shape now, and of
        weights of which the settled mask alone keeps nothing.
        """
        if self.algorithm.settled is None:
            return [], []
        unsettled = self.snapshot(self.state)
        self.state = self.algorithm.settled(unsettled)
        self.unsettled = unsettled
        new = effective(self.state)
        old = effective(unsettled)
        moved = differ([(new[name], old[name]) for name in self.weights])
        names = [n for n, moves in zip(self.weights, moved, strict=True) if moves]
        unfit = [n for n in names if self.weights[n].parameter.shape != new[n].shape]
        for name in names:
            if name not in unfit:
                self.weights[name].parameter.copy_(new[name])
        kept = full_tensors([self.state.masks[name].count_nonzero() for name in names])
        return unfit, [n for n, count in zip(names, kept, strict=True) if not count]

    def release(self) -> None:
        """Keep a snapshot of the state, and no parameter."""
        self.state = self.snapshot(self.state)
        self.weights = {}
        self.extra = []
        self.records = []
        self.hidden = []
        self.found = {}


def _same(name: str, new: State, old: State) -> bool:
    return new.params[name] is old.params[name] and new.masks[name] is old.masks[name]


def set_hidden(
    state: State, records: Sequence[Record], shown: Sequence[Tensor]
) -> None:
    """Set `hidden` of records whose leaves have, or may come to have, values that the
    effective weights do not show.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> record = Record("w", weight, torch.optim.SGD([weight], lr=0.1))
    >>> state = State({"w": torch.ones(2)}, {"w": torch.tensor([True, False])})
    >>> set_hidden(state, [record], [torch.tensor([1.0, 0.0])])
    >>> record.hidden
    True
    """
    masked = []
    pairs = []
    for record, x in zip(records, shown, strict=True):
        record.hidden = bool(record.follows)
        if state.masks[record.name].ndim:
            masked.append(record)
            pairs.append((x, state.params[record.name]))
    hides = [True] * len(pairs) if has_own_support(state) else differ(pairs)
    for record, differs in zip(masked, hides, strict=True):
        record.hidden = record.hidden or differs


# ---- what other code wrote -----------------------------------------------------------


def fits(state: State, record: Record) -> bool:
    """Whether a parameter has the dtype, device and shape of its leaf of the state.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    >>> record = Record("w", weight, torch.optim.SGD([weight], lr=0.1))
    >>> fits(State({"w": torch.ones(2)}, {"w": torch.tensor(True)}), record)
    False
    """
    leaf = state.params[record.name]
    parameter = record.parameter
    return bool(
        leaf.dtype == parameter.dtype
        and leaf.device == parameter.device
        and leaf.shape == parameter.shape
    )


def check_kinds(call: str, state: State, records: Iterable[Record]) -> None:
    """Raise RuntimeError for a parameter that has another dtype, device or shape than
    its leaf of the state.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    >>> record = Record("w", weight, torch.optim.SGD([weight], lr=0.1))
    >>> check_kinds(
    ...     "before_step",
    ...     State({"w": torch.ones(2)}, {"w": torch.tensor(True)}),
    ...     [record],
    ... )
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: 'w' was torch.float32 on cpu of shape (2,) when it was
    attached, and is torch.float64 on cpu of shape (2,): call detach(), then attach
    again
    """
    for record in records:
        if not fits(state, record):
            both = (state.params[record.name], record.parameter)
            was, now = (
                f"{x.dtype} on {x.device} of shape {tuple(x.shape)}" for x in both
            )
            raise RuntimeError(
                f"{call}: {record.name!r} was {was} when it was attached, and is "
                f"{now}: {AGAIN}"
            )


def with_module_values(call: str, state: State, records: Collection[Record]) -> State:
    """The state with the values of some parameters of the module, which other code may
    have written.

    >>> weight = torch.nn.Parameter(torch.tensor([7.0, 8.0]))
    >>> state = State(
    ...     {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> with_module_values(
    ...     "before_step",
    ...     state,
    ...     [Record("w", weight, torch.optim.SGD([weight], lr=0.1))],
    ... ).params
    {'w': tensor([7., 0.])}

    Of a leaf whose pruned entries have values in the state alone (`hidden`), pruned
    entries are taken that are not zero in the module. Raises RuntimeError for a weight
    that other code wrote and that follows from what trains in its place.
    """
    check_kinds(call, state, records)
    check_followers(call, state, [record for record in records if record.follows])
    params = dict(state.params)
    taken = [record for record in records if not record.follows]
    for record in taken:
        name = record.name
        value = record.parameter.detach()
        if record.hidden:
            (params[name],) = either(
                [state.masks[name] | (value != 0)], [value], [params[name]]
            )
        else:
            (params[name],) = zeroed([state.masks[name]], [value])
    return state._replace(params=params)


def check_followers(call: str, state: State, records: Sequence[Record]) -> None:
    """Raise RuntimeError where the module has other values than the state, of weights
    that follow from something.

    >>> weight = torch.nn.Parameter(torch.tensor([7.0, 8.0]))
    >>> state = State(
    ...     {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> record = Record(
    ...     "w", weight, torch.optim.SGD([weight], lr=0.1), follows="scores"
    ... )
    >>> check_followers("before_step", state, [record])
    Traceback (most recent call last):
        ...
    RuntimeError: before_step: other code wrote to 'w', but its mask follows from
    scores, which the write does not reach: call detach(), write, and attach again, or
    load the state_dict() of what attach returned, which has the scores
    """
    shown = zeroed(
        [state.masks[r.name] for r in records], [state.params[r.name] for r in records]
    )
    pairs = [
        (record.parameter.detach(), leaf)
        for record, leaf in zip(records, shown, strict=True)
    ]
    for record, differs in zip(records, differ(pairs), strict=True):
        if differs:
            what = (
                "its mask follows"
                if record.follows == "scores"
                else "its values follow"
            )
            raise RuntimeError(
                f"{call}: other code wrote to {record.name!r}, but {what} from "
                f"{record.follows}, which the write does not reach: call detach(), "
                "write, and attach again, or load the state_dict() of what attach "
                f"returned, which has the {record.follows}"
            )


def nonzero_pruned(state: State, records: Iterable[Record]) -> dict[str, int]:
    """How many pruned entries of each weight are not zero in the module, for weights
    that have some.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> state = State({"w": torch.ones(3)}, {"w": torch.tensor([True, False, False])})
    >>> nonzero_pruned(state, [Record("w", weight, torch.optim.SGD([weight], lr=0.1))])
    {'w': 2}
    """
    masked = [r for r in records if is_sparse(state.masks[r.name], r.parameter)]
    counts = full_tensors(
        [(~((r.parameter.detach() == 0) | state.masks[r.name])).sum() for r in masked]
    )
    return {
        record.name: int(count)
        for record, count in zip(masked, counts, strict=True)
        if count
    }


def seen_in_module(state: State, records: Iterable[Record]) -> State:
    """The state that a module shows: its weights, and masks of its kept or nonzero
    entries.

    >>> weight = torch.nn.Parameter(torch.tensor([0.0, 1.0, 0.0]))
    >>> state = State({"w": torch.zeros(3)}, {"w": torch.tensor([True, False, False])})
    >>> seen_in_module(
    ...     state, [Record("w", weight, torch.optim.SGD([weight], lr=0.1))]
    ... ).masks
    {'w': tensor([ True,  True, False])}
    """
    params = dict(state.params)
    masks = dict(state.masks)
    for record in records:
        params[record.name] = value = record.parameter.detach()
        if is_sparse(masks[record.name], value):
            masks[record.name] = masks[record.name] | ~(value == 0)
    return state._replace(params=params, masks=masks)
