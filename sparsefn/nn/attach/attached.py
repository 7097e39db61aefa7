"""An algorithm at work in a module: gradients out, effective weights in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn.core.state import State, Trigger, update_of
from sparsefn.core.timetable import changes_once, unfinished
from sparsefn.core.tree import Tree, all_finite, identical
from sparsefn.nn.attach import files, gradients, moments, order, writes
from sparsefn.nn.attach.optimizer_state import joins
from sparsefn.nn.attach.placed import Placed
from sparsefn.nn.attach.records import same_objects, take_out
from sparsefn.nn.modules.averages import dropped_of

_CALL_AFTER = (
    "call after_step after every before_step, also where the optimizer skipped its step"
)


class _Begun(NamedTuple):
    # A step between before_step and after_step: its number, the dense gradients, and
    # whether the optimizer's step is left out.
    number: int
    dense: dict[str, Tensor]
    skipped: bool


class Attached:
    """What `attach` returns: call its two methods around the optimizer's step.

    They are `before_step` and `after_step`.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> sparse = sf.attach(sf.static(0.5, where="weight"), layer, optimizer)
    >>> layer(torch.ones(2)).sum().backward()
    >>> sparse.before_step()
    >>> optimizer.step()
    >>> sparse.after_step(0)
    >>> int(layer.weight.count_nonzero())
    1

    The module holds the effective weights. Where the state's params have no other
    values, the state has no copy of them. Until the first step the weights from before
    `attach` masked them are kept, for `load_state_dict`. Only parameters that require a
    gradient are read or written. `changes` counts the updates that wrote masks.

    Copy or pickle it with its module and optimizers, as in
    `copy.deepcopy((model, optimizer, sparse))`.
    """

    changes: int
    # the optimizers' parameters at the last look, whether each trained, and the ids of
    # all that were seen to train beside the algorithm's
    _members: list[Tensor]
    _train: list[bool]
    _known: set[int]

    def __init__(
        self,
        model: nn.Module,
        placed: Placed,
        skip: Trigger | None,
        reset: Trigger,
        hooks: bool,
    ) -> None:
        self._model = model
        self._placed = placed
        self._skip = skip
        self._reset = reset
        self._hooks = hooks
        self._begun: _Begun | None = None
        # the optimizers that have stepped since after_step
        self._stepped: list[Optimizer] = []
        self._told: set[str] = set()  # what there was a warning of
        self._last = -1
        self.changes = 0
        placed.show(placed.state)
        self._watch()

    # ---- in the loop -----------------------------------------------------------------

    def before_step(self, step: int | None = None) -> None:
        """Make each `p.grad` the gradient that the optimizer sees.

        Call after backward, before gradients are clipped. The dense gradients are kept
        for `after_step`. A parameter without a gradient stays without one; the
        algorithm sees zeros. `step` is the step that `after_step` will get, if it is
        not the next; only `skip` and terms that change with the step read it. Raises
        RuntimeError where no parameter has a new gradient, for a second call without
        `after_step` between, for parameters that were replaced, and for weights that
        somebody wrote though they follow from latents or scores. Other weights that
        somebody wrote since `after_step` are taken over and masked. An optimizer that
        is given a closure calls it after the closure.
        """
        self._check_attached()
        self._check_between("before_step")
        now = (
            self._last + 1
            if step is None
            else order.later("before_step", step, self._last)
        )
        placed = self._placed
        records = self._placed.weights.values()
        writes.check_links(self._links)
        if new := self._new_members():
            self._tell("dense", writes.left_dense(placed.algorithm, self._model, new))
        dense = gradients.dense_gradients(records)
        if stained := placed.begin_step():
            self._tell("gradient", writes.gradient_of_others(stained))
        skipped = self._skips(now)
        grads = [] if skipped else placed.masked_gradients(dense, now)
        placed.show_trained()
        gradients.give(records, placed.trained, grads, dense)
        self._begun = _Begun(now, dense, skipped)

    def after_step(self, step: int) -> None:
        """Update the masks, and put the effective weights into the module.

        Call after the optimizer's step. Steps only rise. Pruned weights are zeroed,
        also if other code wrote them; other weights, and moments, are written where
        masks changed. A step whose gradients are not finite, such as one that a
        GradScaler skips, changes no mask. Raises RuntimeError without `before_step`,
        where weights moved though the optimizer did not step, and where somebody wrote
        to weights that follow from latents or scores.
        """
        self._check_attached()
        begun = self._begun
        if begun is None:
            raise RuntimeError(
                "after_step: call before_step first, between backward and the "
                "optimizer's step"
            )
        step = order.later("after_step", step, self._last)
        now, dense, skipped = begun
        placed = self._placed
        old = placed.state
        if step != now and (
            self._skips(step) != skipped or files.reads_step(placed.algorithm)
        ):
            raise ValueError(
                f"after_step: before_step took this for step {now}, got {step}: "
                f"give it {step}, too"
            )
        if not (self._stepped or skipped):
            self._tell("order", writes.check_order(placed.weights.values(), dense))
        if step > self._last + 1:
            self._tell("steps", order.left_out(placed.algorithm, self._last, step))
        stepped = placed.moved()
        self._begun = None
        self._stepped = []
        self._last = step
        for record in placed.trained:
            record.given = None
        try:
            new = update_of(placed.algorithm).inner(stepped, dense, step)
            if new is not stepped and not (
                identical(new, stepped) or bool(all_finite(dense))
            ):
                new = stepped
        except BaseException:
            placed.show(stepped)
            raise
        if new is not old:
            rows = placed.rows(new)
            moments.clear_changed(rows, placed.algorithm.view.get(stepped))
            if not identical(new.masks, old.masks):
                self.changes += 1
                gradients.warn_of_zeros(dense, step)
            placed.show(new, stepped, rows)
        if bool(self._reset(step)):
            moments.restart(placed.trained)

    # ---- what the hooks of the optimizers call ---------------------------------------

    def enter_step(self, optimizer: Optimizer, closes: bool) -> None:
        """Check the order of the calls, and, unless a closure will, that gradients and
        moments are masked.
        """
        if any(one is optimizer for one in self._stepped):
            raise RuntimeError(
                "step: the optimizer has stepped since before_step: call after_step "
                "before the next one"
            )
        self._placed.moving = None  # a step that raised may have left it
        if closes:
            if joins(optimizer):  # LBFGS reads its history before it calls the closure
                self._placed.mask_states(optimizer)
            return
        if self._begun is None and self._hooks:
            self.before_step()
        if self._begun is None:
            raise RuntimeError(order.STEP_ALONE)
        self._placed.settle(optimizer, self._begun.skipped)

    def leave_step(self, optimizer: Optimizer) -> None:
        """Note what the optimizer has written."""
        if self._begun is not None:  # else its closure skipped the batch
            self._stepped.append(optimizer)
            self._placed.leave(optimizer)
            if self._hooks:
                self.end_step()

    def end_step(self) -> None:
        """Call `after_step` where a step has begun, also one that a GradScaler left
        out.
        """
        if self._begun is not None:
            self.after_step(self._begun.number)

    def around_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call a closure that makes gradients: with effective weights, and
        `before_step` after it.

        A closure that returns None and leaves no gradients has skipped its batch, as
        Lightning's closures do: nothing moves. A closure that returns None after
        `before_step` and leaves all gradients alone, as Lightning's wrapper has it,
        does nothing.
        """
        # this optimizer has moved the weights since the last call
        if self._placed.moving is optimizer:
            self._placed.leave(optimizer)
        begun = self._begun
        before = None if begun is None else gradients.gradients_of(self._model)
        self._reopen()
        result = closure()
        skips = result is None and all(p.grad is None for p in self._model.parameters())
        untouched = before is not None and gradients.are_untouched(self._model, before)
        if untouched and result is None and self._begun is None:
            self._placed.show_trained()
            self._begun = begun
        if self._begun is None and not skips:
            self.before_step()
        left_out = self._begun is None or skips or self._begun.skipped
        self._placed.settle(optimizer, left_out)
        return result

    def _new_members(self) -> list[Tensor]:
        # The parameters that the optimizers train since the last look. They are looked
        # at one by one where they, or whether they train, differ.
        members = writes.members_of(self._placed.optimizers)
        train = [parameter.requires_grad for parameter in members]
        if same_objects(members, self._members) and train == self._train:
            return []
        new = writes.check_members(self._placed.trained, members, self._known)
        self._members = members
        self._train = train
        self._known |= {id(parameter) for parameter in new}
        return new

    def _skips(self, step: int) -> bool:
        return self._skip is not None and bool(self._skip(step))

    def _reopen(self) -> None:
        # Back to before `before_step`, with the present weights, and effective weights
        # in the module.
        if self._begun is not None:
            moved = self._placed.moved()
            self._begun = None
            self._placed.show(moved)
        else:
            self._placed.take_over("step")

    # ---- the state -------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether `detach` has not been called."""
        return bool(self._placed.weights)

    @property
    def masks(self) -> Tree:
        """The masks of the state, without a copy: read them only."""
        return self._placed.state.masks

    @property
    def state(self) -> State:
        """The algorithm's pure state: a snapshot, which later steps do not change.

        >>> layer = torch.nn.Linear(2, 1)
        >>> sparse = sf.attach(
        ...     sf.static(0.5, where="weight"),
        ...     layer,
        ...     torch.optim.Adam(layer.parameters()),
        ... )
        >>> sf.masks.sparsity(sparse.state.masks)
        0.5

        `opt` is (): moments are the optimizer's. Read it after `after_step`.
        """
        placed = self._placed
        state = self._placed.state
        if self._begun is None:
            state = writes.taken_over("state", state, placed.weights.values())
        return placed.own(state)  # type: ignore[no-any-return]

    def apply_masks(self) -> None:
        """Mask what somebody wrote to the module: call it after a write between the
        steps, and before the loss.

        >>> layer = torch.nn.Linear(2, 1)
        >>> sparse = sf.attach(
        ...     sf.static(0.5, where="weight"),
        ...     layer,
        ...     torch.optim.Adam(layer.parameters()),
        ... )
        >>> layer.weight.data.copy_(torch.ones(1, 2))
        tensor([[1., 1.]])
        >>> sparse.apply_masks()
        >>> int(layer.weight.count_nonzero())
        1

        Entries that are kept take the values that were written. So do pruned ones that
        have values in the state, as under `ste`. Raises RuntimeError for weights that
        follow from latents or scores.
        """
        self._check_attached()
        self._check_between("apply_masks")
        self._placed.take_over("apply_masks")

    def check(self, average: nn.Module | Mapping[str, Tensor] | None = None) -> None:
        """Raise RuntimeError unless pruned weights are zero in the module, naming the
        first that are not.

        One pass over the weights, between the steps. With an average of the module's
        weights, as `sf.modules.mask_average` takes it, they have to be zero there.
        """
        self._check_attached()
        self._check_between("check")
        if average is not None:
            self._check_average(average)
            return
        placed = self._placed
        stains = writes.stains(placed.state, placed.weights.values())
        if stains:
            name = next(iter(stains))
            raise RuntimeError(
                f"check: {stains[name]} pruned entries of {name!r} are not zero in the "
                "module: somebody wrote them since after_step: call apply_masks()"
            )

    @property
    def notes(self) -> list[str]:
        """Sentences on the schedules and triggers of the algorithm for which the steps
        so far are too few.

        >>> layer = torch.nn.Linear(2, 1)
        >>> sparse = sf.attach(
        ...     sf.rigl(0.5), layer, torch.optim.SGD(layer.parameters(), lr=0.1)
        ... )
        >>> sparse.notes
        []

        `sf.report.summary` has them at its end.
        """
        steps = self._last + 1
        return (
            unfinished(self._placed.algorithm, steps, "the {} steps so far")
            if steps
            else []
        )

    def _check_average(self, average: nn.Module | Mapping[str, Tensor]) -> None:
        for row in dropped_of(average, self.masks).rows:
            if row.weights:
                raise RuntimeError(
                    f"check: {row.weights} pruned entries of {row.path!r} are not "
                    f"zero in the average, {row.norm:.2%} of its norm: masks have "
                    "changed since it began; sf.modules.mask_average(average, "
                    "sparse.masks) makes it sparse"
                )

    def in_module(self) -> State:
        """A snapshot of what the module holds: its weights, and masks of the entries
        that are kept or not zero.

        `sf.report.summary` of what `attach` returned is the summary of this state.
        """
        return writes.in_module(self.state, self._placed.weights.values())

    def state_dict(self) -> dict[str, object]:
        """What `load_state_dict` needs: tensors by path, the last step, the algorithm's
        name and its arguments.

        Weights that the module has are left out: save the state dicts of the module and
        of the optimizer beside it. Raises RuntimeError between `before_step` and
        `after_step`.
        """
        self._check_between("state_dict")
        placed = self._placed
        visible = [name for name, record in placed.weights.items() if not record.hidden]
        state = writes.taken_over("state_dict", placed.state, placed.hidden)
        return files.saved(placed.algorithm, state, self._last, visible, placed.own)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Go on from a `state_dict`: masks, scores and step, and effective weights into
        the module.

        Load the module and the optimizer as torch has it, before or after `attach` and
        this; but an optimizer that got new parameters from `attach`, as for
        `supermask`, after it. Raises ValueError for the state of another algorithm,
        naming both, for one with other arguments unless `strict` is False, naming the
        argument, and for tensors that do not fit, naming the path; then nothing is
        changed.
        """
        self._check_attached()
        placed = self._placed
        writes.check_kinds("load_state_dict", placed.state, placed.weights.values())
        state, self._last = files.loaded(
            placed.algorithm, state_dict, placed.state, placed.unmasked(), strict
        )
        self._begun = None
        self._stepped = []
        placed.show(state)
        placed.forget_states()  # they may be of other masks

    def detach(self) -> None:
        """Leave an ordinary module with its effective weights.

        The optimizer is as it was, and `state` stays. Warns where masks changed once,
        as the algorithm does not know the length of the run.

        >>> layer = torch.nn.Linear(2, 1)
        >>> sparse = sf.attach(
        ...     sf.static(0.5, where="weight"),
        ...     layer,
        ...     torch.optim.Adam(layer.parameters()),
        ... )
        >>> sparse.detach()
        >>> sparse.before_step()
        Traceback (most recent call last):
            ...
        RuntimeError: this algorithm was detached: attach it again
        """
        self._check_attached()
        placed = self._placed
        for sentence in changes_once(
            placed.algorithm, self._last + 1, f"{self._last + 1} steps"
        ):
            self._tell("once", f"detach: {sentence}")
        # else there is none to show
        if all(writes.fits(placed.state, record) for record in placed.weights.values()):
            placed.drop_writes()
            self._reopen()
        self._unwatch()
        take_out(placed.extra)
        placed.state = placed.own(placed.state)
        self._begun = None
        placed.weights = {}
        placed.extra = []
        placed.records = []

    # ---- checks and copies -----------------------------------------------------------

    def _tell(self, what: str, sentence: str) -> None:
        if sentence and what not in self._told:
            self._told.add(what)
            warnings.warn(sentence, stacklevel=3)

    def _check_attached(self) -> None:
        if not self.is_attached:
            raise RuntimeError("this algorithm was detached: attach it again")

    def _check_between(self, call: str) -> None:
        if self._begun is not None:
            raise RuntimeError(
                f"{call}: called between before_step and after_step: {_CALL_AFTER}"
            )

    def _watch(self) -> None:
        self._links = writes.links_of(self._model, self._placed.weights.values())
        self._members = []
        self._train = []
        self._known = set()
        self._new_members()
        self._unwatch = order.watch(self, self._placed.records, self._hooks)

    def __getstate__(self) -> dict[str, object]:
        self._check_between("copy")
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_links", "_members", "_train", "_known", "_unwatch")
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        for record in self._placed.weights.values():
            record.noted = (-1, -1)  # of another tensor
        self._watch()
