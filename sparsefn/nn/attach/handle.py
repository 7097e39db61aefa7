"""What `attach` returns: the handle of an algorithm that trains in a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsefn.core.state import State, Trigger, update_of
from sparsefn.core.timetable import changes_once, unfinished
from sparsefn.core.tree import Tree, all_finite, identical
from sparsefn.nn.attach import files, loop
from sparsefn.nn.attach.loop import IN_STEP, Loop, ParameterLinks, Position
from sparsefn.nn.attach.module_state import (
    ModuleState,
    check_kinds,
    fits,
    nonzero_pruned,
    seen_in_module,
    with_module_values,
)
from sparsefn.nn.attach.optimizer_state import clear_changed, joins, restart
from sparsefn.nn.attach.parameters import (
    are_untouched,
    dense_gradients,
    give,
    gradients_of,
    take_out,
    warn_of_zeros,
)
from sparsefn.nn.modules.averages import dropped_of


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

    Attributes:
        changes: How many updates wrote masks.

    The module holds the effective weights. Where the state's params have no other
    values, the state has no copy of them. Until the first step the weights from before
    `attach` masked them are kept, for `load_state_dict`. Only parameters that require a
    gradient are read or written.

    Copy or pickle it with its module and optimizers, as in
    `copy.deepcopy((model, optimizer, sparse))`.
    """

    changes: int

    def __init__(
        self,
        model: nn.Module,
        module_state: ModuleState,
        skip: Trigger | None,
        reset: Trigger,
        hooks: bool,
    ) -> None:
        self._model = model
        self._module_state = module_state
        self._skip = skip
        self._reset = reset
        self._hooks = hooks
        self._position = Position()
        self._warned: set[str] = set()  # what there was a warning of
        self.changes = 0
        module_state.write(module_state.state)
        self._watch()

    # ---- in the loop -----------------------------------------------------------------

    def before_step(self, step: int | None = None) -> None:
        """Make each `p.grad` the gradient that the optimizer sees.

        Call it after backward, before gradients are clipped. An optimizer that is given
        a closure calls it after the closure.

        Args:
            step: Number that `after_step` will get, if it is not the next: only `skip`
                and terms that change with the step read it.

        Raises:
            RuntimeError: No parameter has a new gradient; it is a second call without
                `after_step` between; parameters were replaced; or other code wrote
                weights that follow from latents or scores.
            TypeError: `step` is not an int.
            ValueError: `step` is not after the last step.

        The dense gradients are kept for `after_step`. A parameter without a gradient
        stays without one; the algorithm sees zeros. Other weights that other code wrote
        since `after_step` are taken over and masked.
        """
        position = self._position
        position.check_ready("before_step")
        now = (
            position.last + 1
            if step is None
            else loop.later("before_step", step, position.last)
        )
        module_state = self._module_state
        self._links.check_module()
        if new := self._links.new_members():
            self._warn("dense", self._left_dense(new))
        records = module_state.weights.values()
        dense = dense_gradients(records)
        if stained := module_state.begin_step():
            self._warn("gradient", loop.unmasked_loss(stained))
        skipped = self._skips(now)
        grads = [] if skipped else module_state.masked_gradients(dense, now)
        module_state.write_trained()
        give(records, module_state.trained, grads, dense)
        self._position = position.begin(now, dense, skipped)

    def after_step(self, step: int) -> None:
        """Update the masks, and put the effective weights into the module.

        Call it after the optimizer's step.

        Args:
            step: Number of the step, an int. Steps only rise.

        Raises:
            RuntimeError: `before_step` was not called; weights moved though the
                optimizer did not step; or other code wrote weights that follow from
                latents or scores.
            TypeError: `step` is not an int.
            ValueError: `step` is not after the last step, or `before_step` took another
                number for it, and `skip` or the gradients depend on the number.

        Pruned weights are zeroed, also if other code wrote them; other weights, and
        moments, are written where masks changed. A step whose gradients are not finite,
        such as one that a GradScaler skips, changes no mask.
        """
        position = self._position
        position.check_in_step()
        step = loop.later("after_step", step, position.last)
        dense = position.gradients
        module_state = self._module_state
        algorithm = module_state.algorithm
        old = module_state.state
        if step != position.number and (
            self._skips(step) != position.skipped or files.reads_step(algorithm)
        ):
            raise ValueError(
                f"after_step: before_step took this for step {position.number}, got "
                f"{step}: give it {step}, too"
            )
        stays = position.loop is Loop.GRADIENTS_MASKED and not position.skipped
        if stays and bool(all_finite(dense)):
            self._warn("order", loop.without_step(module_state.note_writes()))
        if step > position.last + 1:
            self._warn("steps", loop.left_out(algorithm, position.last, step))
        stepped = module_state.read(position.mixes)
        self._position = Position(last=step)
        for record in module_state.trained:
            record.given = (None, -1)
        try:
            new = update_of(algorithm).inner(stepped, dense, step)
            if new is not stepped and not (
                identical(new, stepped) or bool(all_finite(dense))
            ):
                new = stepped
        except BaseException:
            module_state.write(stepped)
            raise
        if new is not old:
            rows = module_state.rows(new)
            clear_changed(rows, algorithm.view.get(stepped))
            if not identical(new.masks, old.masks):
                self.changes += 1
                warn_of_zeros(dense, step)
            module_state.write(new, stepped, rows)
        if bool(self._reset(step)):
            restart(module_state.trained)

    # ---- what the hooks of the optimizers call ---------------------------------------

    def enter_step(self, optimizer: Optimizer, closes: bool) -> None:
        """Check the order of the calls, and, unless a closure will, that gradients and
        moments are masked.
        """
        position = self._position
        if optimizer in position.stepped:
            raise RuntimeError(
                "step: the optimizer has stepped since before_step: call after_step "
                "before the next one"
            )
        if position.moving is not None:  # of a step that raised
            self._position = position._replace(moving=None)
        if closes:
            if joins(optimizer):  # LBFGS reads its history before it calls the closure
                self._module_state.mask_states(optimizer)
            return
        if position.loop not in IN_STEP and self._hooks:
            self.before_step()
        position = self._position
        if position.loop not in IN_STEP:
            raise RuntimeError(loop.STEP_ALONE)
        mixes = self._module_state.before_optimizer(optimizer, position.skipped)
        self._position = position.enter(optimizer, mixes)

    def leave_step(self, optimizer: Optimizer) -> None:
        """Note what the optimizer has written."""
        position = self._position
        if position.loop in IN_STEP:  # else its closure skipped the batch
            self._position = position.leave(optimizer)
            self._module_state.after_optimizer(optimizer, position.mixes)
            if self._hooks:
                self.end_step()

    def end_step(self) -> None:
        """Call `after_step` where a step has begun, also one that a GradScaler left
        out.
        """
        if self._position.loop in IN_STEP:
            self.after_step(self._position.number)

    def around_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call a closure that makes gradients: with effective weights, and
        `before_step` after it.

        A closure that returns None and leaves no gradients has skipped its batch, as
        Lightning's closures do: nothing moves. A closure that returns None after
        `before_step` and leaves all gradients alone, as Lightning's wrapper has it,
        does nothing.
        """
        module_state = self._module_state
        position = self._position
        if position.moving is optimizer:  # it has moved the weights since the last call
            module_state.after_optimizer(optimizer, position.mixes)
            position = self._position = position._replace(moving=None)
        in_step = position.loop in IN_STEP
        before = gradients_of(self._model) if in_step else None
        self._begin_again()
        result = closure()
        skips = result is None and all(p.grad is None for p in self._model.parameters())
        untouched = before is not None and are_untouched(self._model, before)
        if untouched and result is None and self._position.loop is Loop.READY:
            module_state.write_trained()
            self._position = position
        if self._position.loop not in IN_STEP and not skips:
            self.before_step()
        position = self._position
        left_out = position.loop not in IN_STEP or skips or position.skipped
        mixes = module_state.before_optimizer(optimizer, left_out)
        self._position = position.enter(optimizer, mixes)
        return result

    def _skips(self, step: int) -> bool:
        return self._skip is not None and bool(self._skip(step))

    def _left_dense(self, new: list[Tensor]) -> str:
        return loop.left_dense(self._module_state.algorithm, self._model, new)

    def _begin_again(self) -> None:
        # Back to before `before_step`, with the present weights, and effective weights
        # in the module.
        module_state = self._module_state
        position = self._position
        if position.loop in IN_STEP:
            moved = module_state.read(position.mixes)
            self._position = position.begin_again()
            module_state.write(moved)
        else:
            module_state.accept_writes("step")

    # ---- the state -------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether `detach` has not been called."""
        return self._position.loop is not Loop.DETACHED

    @property
    def masks(self) -> Tree:
        """The masks of the state, without a copy: read them only."""
        return self._module_state.state.masks

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
        module_state = self._module_state
        state = module_state.state
        if self._position.loop not in IN_STEP:
            state = with_module_values("state", state, module_state.weights.values())
        return module_state.snapshot(state)  # type: ignore[no-any-return]

    def apply_masks(self) -> None:
        """Mask what other code wrote to the module: call it after a write between the
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

        Raises:
            RuntimeError: It is called between `before_step` and `after_step`, or other
                code wrote weights that follow from latents or scores.

        Entries that are kept take the values that were written. So do pruned ones that
        have values in the state, as under `ste`.
        """
        self._position.check_ready("apply_masks")
        self._module_state.accept_writes("apply_masks")

    def check(self, average: nn.Module | Mapping[str, Tensor] | None = None) -> None:
        """Check that pruned weights are zero in the module, in one pass over them.

        Args:
            average: Average of the module's weights, as `sf.modules.mask_average` takes
                it, to look at in place of the module. Default: the module.

        Raises:
            RuntimeError: Pruned weights are not zero, naming the first that are not, or
                it is called between `before_step` and `after_step`.
        """
        self._position.check_ready("check")
        if average is not None:
            self._check_average(average)
            return
        module_state = self._module_state
        counts = nonzero_pruned(module_state.state, module_state.weights.values())
        if counts:
            name = next(iter(counts))
            raise RuntimeError(
                f"check: {counts[name]} pruned entries of {name!r} are not zero in the "
                "module: other code wrote them since after_step: call apply_masks()"
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
        steps = self._position.last + 1
        if not steps:
            return []
        return unfinished(self._module_state.algorithm, steps, "the {} steps so far")

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
        """A snapshot of what the module holds.

        Returns:
            State of the module's weights, and of masks of the entries that are kept or
            not zero. `sf.report.summary` of what `attach` returned summarises it.
        """
        return seen_in_module(self.state, self._module_state.weights.values())

    def state_dict(self) -> dict[str, object]:
        """What `load_state_dict` needs: tensors by path, the last step, the algorithm's
        name and its arguments.

        Returns:
            Dict with "algorithm", "arguments", "step" and "tensors". Weights that the
            module has are left out: save the state dicts of the module and of the
            optimizer beside it.

        Raises:
            RuntimeError: It is called between `before_step` and `after_step`.
        """
        self._position.check_between("state_dict")
        module_state = self._module_state
        shown = [
            name for name, record in module_state.weights.items() if not record.hidden
        ]
        state = module_state.unsettled
        if state is None:
            state = with_module_values(
                "state_dict", module_state.state, module_state.hidden
            )
        return files.saved(
            module_state.algorithm,
            state,
            self._position.last,
            shown,
            module_state.snapshot,
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Go on from a `state_dict`: masks, scores and step, and effective weights into
        the module.

        Args:
            state_dict: What `state_dict` returned.
            strict: Whether the algorithm has to have the same arguments.

        Raises:
            ValueError: The state is of another algorithm, naming both, with `strict` of
                one with other arguments, naming the argument, or has tensors that do
                not fit, naming the path. Then nothing is changed.
            RuntimeError: `detach` was called, or a parameter has another dtype, device
                or shape than it had.

        Load the module and the optimizer as torch has it, before or after `attach` and
        this; but an optimizer that got new parameters from `attach`, as for
        `supermask`, after it.
        """
        self._position.check_attached()
        module_state = self._module_state
        records = module_state.weights.values()
        check_kinds("load_state_dict", module_state.state, records)
        state, last = files.loaded(
            module_state.algorithm,
            state_dict,
            module_state.state,
            module_state.unmasked(),
            strict,
        )
        self._position = Position(last=last)
        module_state.write(state)
        module_state.forget_states()  # they may be of other masks

    def detach(self) -> None:
        """Leave an ordinary module with the weights to evaluate it with.

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

        Raises:
            RuntimeError: `detach` was called before.

        The weights are the effective ones of `sf.settled`: masks and gates that are
        drawn or soft in training, as in `sf.methods.maskllm`, are hard now. `state` and
        `masks` are the settled ones, too. To train on later, attach again and load the
        `state_dict`, which has what trained, also after `detach`.

        The optimizer is as it was. Warnings say where masks changed once, as the
        algorithm does not know the length of the run, where a settled mask keeps
        nothing, and which weights have another shape now and stay as they are.
        """
        self._position.check_attached()
        module_state = self._module_state
        steps = self._position.last + 1
        for sentence in changes_once(module_state.algorithm, steps, f"{steps} steps"):
            self._warn("once", f"detach: {sentence}")
        records = module_state.weights.values()
        # else there is none to show
        if all(fits(module_state.state, record) for record in records):
            module_state.drop_writes()
            self._begin_again()
        unfit, empty = module_state.settle()
        for name in unfit:
            self._warn(
                f"unfit {name}",
                f"detach: {name!r} has another shape than it had, and keeps the "
                "weights of training: the settled ones are in "
                "sf.effective(sparse.state)",
            )
        for name in empty:
            self._warn(
                f"empty {name}",
                f"detach: the settled mask of {name!r} keeps none of its weights "
                f"after {steps} steps, and they are zeros now: to train on, attach "
                "again and load the state_dict(), which has what trained",
            )
        self._unwatch()
        take_out(module_state.extra)
        module_state.release()
        self._position = Position(Loop.DETACHED, steps - 1)

    # ---- checks and copies -----------------------------------------------------------

    def _warn(self, what: str, sentence: str) -> None:
        if sentence and what not in self._warned:
            self._warned.add(what)
            warnings.warn(sentence, stacklevel=3)

    def _watch(self) -> None:
        module_state = self._module_state
        self._links = ParameterLinks(
            self._model, module_state.weights.values(), module_state.trained
        )
        self._unwatch = loop.watch(self, module_state.records, self._hooks)

    def __getstate__(self) -> dict[str, object]:
        self._position.check_between("copy")
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_links", "_unwatch")
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        for record in self._module_state.weights.values():
            record.noted = (-1, -1)  # of another tensor
        self._watch()
