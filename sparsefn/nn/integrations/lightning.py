"""An algorithm in a run of Lightning's Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparsefn.core.state import Trigger
from sparsefn.core.triggers import never
from sparsefn.nn.attach import Attached, attach
from sparsefn.nn.integrations.resuming import (
    Saved,
    Source,
    check_plain_model,
    check_same_run,
    check_source,
    made,
)

try:
    from lightning import Callback
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    Callback = object

if TYPE_CHECKING:
    from lightning import LightningModule, Trainer
    from torch.optim import Optimizer

__all__ = ["SparsityCallback"]
__dir__ = __all__.copy


class SparsityCallback(Callback):
    """Attach an algorithm when `Trainer.fit` begins, and save its state in checkpoints.

    >>> callback = sf.integrations.lightning.SparsityCallback(sf.rigl(0.8, steps=100))
    >>> callback.sparse is None  # until `Trainer(callbacks=[callback]).fit(...)`
    True

    Args:
        algorithm: An Algorithm, or a function that makes it from
            `trainer.estimated_stepping_batches`.
        extra_group: As in `sf.attach`.
        skip: As in `sf.attach`.
        reset: As in `sf.attach`.

    Raises:
        ValueError: In `fit`, there are several optimizers, the model has DTensors, or
            the checkpoint lacks the callback's state, has the state of other weights
            or steps, or was written after `detach`, and masks are made of parameters
            that the optimizer no longer had; and as in `sf.attach`.
        TypeError: `algorithm` is neither an Algorithm nor a function, and as in
            `sf.attach`.
        ModuleNotFoundError: lightning is not installed.

    `callback.sparse` is what `attach` returned. The module has zeros in its weights
    from `on_fit_start` on, so also in the validation before training. After `fit`,
    `callback.sparse.detach()` leaves an ordinary module for a loop of your own; masks
    and gates that are soft or drawn in training are hard only after it. Beside
    Lightning's `WeightAveraging`, which writes its average into the module when `fit`
    ends, `sf.modules.mask_average(module, callback.sparse.masks)` makes the sparse
    copy; a UserWarning says so.

    A step of the algorithm is a step of the optimizer, however many batches are
    accumulated, and however many steps manual optimization makes of a batch. A batch
    that `training_step` skips by returning None is no step, though
    `trainer.global_step` counts it. `gradient_clip_val` clips masked gradients. A
    second `fit` goes on where the first ended, with the new optimizer that Lightning
    makes, and `fit(ckpt_path=...)` where the checkpoint was written, with the same
    bits.
    """

    sparse: Attached | None

    def __init__(
        self,
        algorithm: Source,
        *,
        extra_group: Mapping[str, object] | None = None,
        skip: Trigger | None = None,
        reset: Trigger = never(),
    ) -> None:
        if Callback is object:
            raise ModuleNotFoundError(
                "SparsityCallback needs lightning: pip install lightning"
            )
        check_source(algorithm)
        self._algorithm = algorithm
        self._options: dict[str, Any] = {
            "extra_group": extra_group,
            "skip": skip,
            "reset": reset,
        }
        self._loaded: Saved | None = None
        self._done = 0
        self.sparse = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the algorithm, once optimizers and weights are there.

        Args:
            trainer: The Trainer, with its optimizer.
            pl_module: The module to attach to.
        """
        check_plain_model(pl_module)
        if len(trainer.optimizers) != 1:
            raise ValueError(
                "SparsityCallback: expected one optimizer, got "
                f"{len(trainer.optimizers)}: in on_fit_start of a callback of your "
                "own, call sf.attach(..., hooks=True) for each and the part of the "
                "module that it has"
            )
        loaded = self._loaded
        self._loaded = None
        saved = loaded
        goes_on = self.sparse is not None and self.sparse.is_attached
        if saved is None and goes_on:
            saved = self.state_dict()
        # before `detach`, as settled weights may have other zeros than trained ones
        if saved is not None:
            check_same_run(pl_module, saved["sparse"], saved["sparse"]["step"])
        # to the optimizer of another fit
        if self.sparse is not None and goes_on:
            if loaded is not None:
                self.sparse.load_state_dict(loaded["sparse"])
            self.sparse.detach()
        algorithm = made(
            self._algorithm, lambda: int(trainer.estimated_stepping_batches)
        )
        (optimizer,) = trainer.optimizers
        own = _n_parameters(optimizer)
        self.sparse = attach(
            algorithm, pl_module, optimizer, hooks=True, **self._options
        )
        self._done = 0
        if saved is not None:
            if saved.get("detached", False) and _n_parameters(optimizer) > own:
                self.sparse.detach()
                raise ValueError(
                    "SparsityCallback: the checkpoint was written after detach(), so "
                    "that it lacks the optimizer's state of the parameters that masks "
                    "are made of: save it before callback.sparse.detach()"
                )
            self._load(saved)

    def _load(self, saved: Saved) -> None:
        assert self.sparse is not None
        self.sparse.load_state_dict(saved["sparse"])
        # 0.2.0 saved no count
        self._done = saved.get("done", saved["sparse"]["step"] + 1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the run goes on where the state was saved.

        Args:
            trainer: The Trainer, which counts the steps that were made.
            pl_module: The module.
        """
        # some strategies load checkpoints after on_fit_start
        if self._loaded is not None:
            self._load(self._loaded)
            self._loaded = None
        if trainer.global_step != self._done:
            raise ValueError(
                f"SparsityCallback: the run begins after {trainer.global_step} steps, "
                f"and the masks are those after {self._done}: a new run needs a "
                "callback of its own, and fit(ckpt_path=...) a checkpoint that was "
                "written with this callback"
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Mask the gradients, which are complete and not clipped yet; the step's own
        hook updates the masks.

        Args:
            trainer: The Trainer.
            pl_module: The module, whose parameters have the gradients.
            optimizer: The optimizer that is about to step.
        """
        assert self.sparse is not None
        self.sparse.end_step()  # one that a GradScaler left out
        if any(p.grad is not None for p in pl_module.parameters()):
            self.sparse.before_step()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        """Note how many steps the trainer counts.

        Args:
            trainer: The Trainer.
            *args: The module, outputs, batch and index, which are not used.
        """
        assert self.sparse is not None
        self.sparse.end_step()
        self._done = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn where the module has left its masks, as where a callback has written an
        average into it.

        Args:
            trainer: The Trainer.
            pl_module: The module.
        """
        assert self.sparse is not None
        try:
            self.sparse.check()
        except RuntimeError as error:
            warnings.warn(
                f"SparsityCallback: after fit, {error}. Of an average, such as "
                "WeightAveraging writes, sf.modules.mask_average(module, "
                "callback.sparse.masks) makes a sparse copy",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint has of the callback.

        Returns:
            Dict of the state of `sparse`, of the number of steps, and of whether
            `detach` was called; empty before `fit`.
        """
        if self.sparse is None:
            return {}
        return {
            "sparse": self.sparse.state_dict(),
            "done": self._done,
            "detached": not self.sparse.is_attached,
        }

    def load_state_dict(self, state_dict: Saved) -> None:
        """Take what a checkpoint has.

        Args:
            state_dict: What `state_dict` returned. It is put into the module when the
                algorithm is attached.
        """
        self._loaded = state_dict


def _n_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
