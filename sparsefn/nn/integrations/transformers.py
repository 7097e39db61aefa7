"""An algorithm in a run of the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

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
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    TrainerCallback = object

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["SparsityCallback"]
__dir__ = __all__.copy

_FILE = "sparse.pt"  # beside the weights, in the folder of each checkpoint


class SparsityCallback(TrainerCallback):
    """Attach an algorithm when `Trainer.train` begins, and checkpoint its state.

    >>> callback = sf.integrations.transformers.SparsityCallback(
    ...     lambda steps: sf.rigl(0.8, steps=steps)
    ... )
    >>> callback.sparse is None  # until `Trainer(..., callbacks=[callback]).train()`
    True

    Args:
        algorithm: An Algorithm, or a function that makes it from the number of
            optimizer steps.
        resume_from: Folder of the checkpoint that `train(resume_from_checkpoint=...)`
            goes on from. Give it where that checkpoint is not in the `output_dir` of
            the run.
        extra_group: As in `sf.attach`.
        skip: As in `sf.attach`.
        reset: As in `sf.attach`.

    Raises:
        ValueError: In `train`, the checkpoint lacks the file `sparse.pt` or has the
            file of other weights, the model has DTensors, and as in `sf.attach`.
        RuntimeError: A second `train` starts from step 0.
        TypeError: `algorithm` is neither an Algorithm nor a function, and as in
            `sf.attach`.
        ModuleNotFoundError: transformers is not installed.

    `callback.sparse` is what `attach` returned; its `state` stays when training ends,
    and the model is then an ordinary one with zeros in its weights. Masks and gates
    that are soft or drawn in training are hard then, and not in the checkpoints of the
    run: save the model after `train`. A step of the algorithm is a step of the
    optimizer, however many batches are accumulated. `Trainer` clips before the
    gradients are masked.

    Each checkpoint gets a file `sparse.pt`, and a resumed run goes on with the same
    bits. With `load_best_model_at_end` the masks are the best checkpoint's. An
    algorithm that trains tensors beside the weights, such as `supermask`, cannot go on
    in a new process, where the optimizer is loaded before it is attached (torch raises
    an error): call `sf.attach` before `train` for that.
    """

    sparse: Attached | None

    def __init__(
        self,
        algorithm: Source,
        *,
        resume_from: str | Path | None = None,
        extra_group: Mapping[str, object] | None = None,
        skip: Trigger | None = None,
        reset: Trigger = never(),
    ) -> None:
        if TrainerCallback is object:
            raise ModuleNotFoundError(
                "SparsityCallback needs transformers: pip install transformers"
            )
        check_source(algorithm)
        self._algorithm = algorithm
        self._folder = resume_from
        self._options: dict[str, Any] = {
            "extra_group": extra_group,
            "skip": skip,
            "reset": reset,
        }
        self._optimizer: Optimizer | None = None
        self._steps = 0
        self.sparse = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Optimizer,
        **kwargs: object,
    ) -> None:
        """Attach the algorithm.

        Args:
            args: Arguments of the Trainer, with its `output_dir`.
            state: State of the Trainer, which counts the steps.
            control: Not used.
            model: The model to attach to.
            optimizer: The optimizer, or accelerate's wrapper of it.
            **kwargs: Not used.

        A run that goes on from a checkpoint gets its masks.
        """
        check_plain_model(model)
        if self._steps and not state.global_step:
            raise RuntimeError(
                f"SparsityCallback: it has made {self._steps} steps, and this run "
                "begins at step 0: train with resume_from_checkpoint to go on, or make "
                "another callback; sf.static(None, init='from_zeros') keeps the "
                "zeros that there are"
            )
        saved = None
        if state.global_step:
            saved = self._saved(self._folder or _folder(args, state))
        if saved is not None:
            check_same_run(model, saved, state.global_step - 1)
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it again
        if (
            self.sparse is not None
            and self.sparse.is_attached
            and inner is not self._optimizer
        ):
            if saved is not None:
                # the weights that `sparse` left are not in the module now
                self.sparse.load_state_dict(saved)
            self.sparse.detach()
        if self.sparse is None or not self.sparse.is_attached:
            algorithm = made(self._algorithm, lambda: state.max_steps)
            self.sparse = attach(
                algorithm, model, inner, steps=state.max_steps, **self._options
            )
            self._optimizer = inner
        if saved is not None:
            self.sparse.load_state_dict(saved)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Mask the gradients.

        Args:
            args: Arguments of the Trainer, not used.
            state: State of the Trainer, which counts the steps.
            control: Not used.
            **kwargs: Not used.
        """
        assert self.sparse is not None
        self.sparse.before_step(state.global_step)

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Update the masks.

        Args:
            args: Arguments of the Trainer, not used.
            state: State of the Trainer, which counts the steps.
            control: Not used.
            **kwargs: Not used.
        """
        assert self.sparse is not None
        self.sparse.after_step(state.global_step)
        self._steps = state.global_step + 1

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Save the state of the algorithm beside the weights.

        Args:
            args: Arguments of the Trainer, with its `output_dir`.
            state: State of the Trainer, which says which process writes.
            control: Not used.
            **kwargs: Not used.
        """
        if (
            state.is_world_process_zero
            and self.sparse is not None
            and self.sparse.is_attached
        ):
            torch.save(self.sparse.state_dict(), _folder(args, state) / _FILE)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Leave an ordinary model, with the masks of the weights that it ends with.

        Args:
            args: Arguments of the Trainer, with `load_best_model_at_end`.
            state: State of the Trainer, which names the best checkpoint.
            control: Not used.
            **kwargs: Not used.
        """
        assert self.sparse is not None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.sparse.load_state_dict(self._saved(state.best_model_checkpoint))
        self.sparse.detach()

    def _saved(self, folder: str | Path) -> Saved:
        file = Path(folder) / _FILE
        if not file.is_file():
            raise ValueError(
                f"SparsityCallback: expected {file}, as the checkpoint of a run with "
                "this callback has it, got none: where the checkpoint is in another "
                "folder, give it as resume_from"
            )
        saved: Saved = torch.load(file, map_location="cpu", weights_only=True)
        return saved


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
