"""Train one seed of a cell with Lightning.

Lightning's unit of work, its "batch", is here a window of consecutive updates: a small update
costs less than the Trainer's bookkeeping around it. A window ends at the latest at the next
evaluation; scalars leave the device and the journal is written once a window.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.data import Split
from normexp.data.batches import UpdatePlan
from normexp.measure import check_finite_buffers
from normexp.training.optim import set_lr
from normexp.training.recorder import Recorder
from normexp.training.windows import Window


class Diverged(Exception):
    """Training produced a number that is not finite.

    Args:
        update: Updates done when it was found, the offending one included.
        reason: One line for the record.
    """

    def __init__(self, update: int, reason: str) -> None:
        super().__init__(reason)
        self.update = update
        self.reason = reason


class SoloModule(pl.LightningModule):
    """One seed of a cell, with manual optimization so that the accounting is exact.

    Args:
        model: Initialised model.
        plan: Accounting of the run.
        optimizer: Built over the model's parameters.
        lr: Learning rate of an update.
        clip: Clips the gradients of a whole update, right before the optimizer takes them; None
            for no clipping.
        evaluation_context: Makes the context of an evaluation, which ends with it.

    Attributes:
        recorder: Takes the rows; set before training.
        update: Updates done.
        evaluation: Evaluations done.
    """

    recorder: Recorder

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: UpdatePlan,
        optimizer: torch.optim.Optimizer,
        lr: Callable[[int], float],
        clip: Callable[[], None] | None = None,
        evaluation_context: Callable[[SoloModule], AbstractContextManager[None]] | None = None,
    ) -> None:
        super().__init__()
        self._evaluation_context = evaluation_context
        self._evaluating = contextlib.ExitStack()
        self.automatic_optimization = False
        self.model = model
        self.plan = plan
        self.lr = lr
        self.update = 0
        self.evaluation = 0
        self.optimizer = optimizer
        self.clip = clip
        self._sums: dict[str, Tensor | int] = {}
        self._splits: dict[int, Split] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that the module was given."""
        return self.optimizer

    def split_on_device(self, split: Split) -> Split:
        """Return a split's tensors on the module's device, moved there once."""
        if id(split) not in self._splits:
            self._splits[id(split)] = Split(
                split.inputs.to(self.device, self.dtype_of_inputs), split.targets.to(self.device)
            )
        return self._splits[id(split)]

    @property
    def dtype_of_inputs(self) -> torch.dtype:
        """Floating type of the images: that of the parameters."""
        return next(self.model.parameters()).dtype

    def training_step(self, window: Window, batch_idx: int) -> None:
        """Take the window's updates, then record their mean loss.

        The loss of an update is the mean over its samples, however they are split into
        micro-batches: each micro-batch adds its sum over the effective batch size.
        """
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        scale = 1.0 / self.plan.effective_batch_size
        losses = []
        for inputs, targets in zip(window.inputs.unbind(), window.targets.unbind(), strict=True):
            set_lr(optimizer.optimizer, self.lr(self.update))
            parts = []
            for micro_inputs, micro_targets in zip(inputs.unbind(), targets.unbind(), strict=True):
                logits = self.model(micro_inputs)
                loss = F.cross_entropy(logits, micro_targets, reduction="sum") * scale
                self.manual_backward(loss)
                parts.append(loss.detach())
            if self.clip is not None:
                self.clip()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum())
            self.update += 1
        self._record_losses(torch.stack(losses))

    def _record_losses(self, losses: Tensor) -> None:
        """Record a window's mean loss; a loss that is not finite ends the run."""
        values = losses.double().cpu()
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            update = self.update = self.update - len(values) + first + 1
            raise Diverged(update, f"training loss is {float(values[first])} at update {update}")
        self.recorder.record(
            "train", {"loss": float(values.mean())}, update=self.update, samples=self.samples
        )

    @property
    def samples(self) -> int:
        """Training samples consumed."""
        return self.update * self.plan.effective_batch_size

    def on_validation_epoch_start(self) -> None:
        """Start the sums of an evaluation; buffers that are not finite end the run."""
        self._start_sums()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the sums of the evaluation."""
        self._add(batch)

    def on_validation_epoch_end(self) -> None:
        """Record the evaluation, weighted by samples."""
        self.evaluation += 1
        self.recorder.record(
            "train",
            {"loss": self.recorder.mean_train_loss()},
            update=self.update,
            samples=self.samples,
            evaluation=self.evaluation,
        )
        self._record_sums("val")

    def on_test_epoch_start(self) -> None:
        """Start the sums of the test."""
        self._start_sums()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the sums of the test."""
        self._add(batch)

    def on_test_epoch_end(self) -> None:
        """Record the test, weighted by samples."""
        self._record_sums("test")

    def _start_sums(self) -> None:
        name = check_finite_buffers(self.model)
        if name is not None:
            raise Diverged(self.update, f"buffer {name} is not finite before evaluation")
        if self._evaluation_context is not None:
            with self.trainer.precision_plugin.forward_context():
                self._evaluating.enter_context(self._evaluation_context(self))
        self._sums = {"loss": torch.zeros((), dtype=torch.float64, device=self.device)}
        self._sums["correct"] = torch.zeros((), dtype=torch.int64, device=self.device)
        self._sums["count"] = 0

    def _add(self, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        # A batch that was filled up has more inputs than targets.
        logits = self.model(inputs)[-len(targets) :]
        losses = F.cross_entropy(logits, targets, reduction="none")
        self._sums["loss"] += losses.double().sum()
        self._sums["correct"] += (logits.argmax(dim=1) == targets).sum()
        self._sums["count"] += len(targets)

    def end_evaluation(self) -> None:
        """End the context of an evaluation, if one was left open."""
        self._evaluating.close()

    def _record_sums(self, split: str) -> None:
        self.end_evaluation()
        count = int(self._sums["count"])
        loss = float(self._sums["loss"]) / count
        values = {"loss": loss, "accuracy": float(self._sums["correct"]) / count}
        self.recorder.record(
            split,
            values,
            update=self.update,
            samples=self.samples,
            evaluation=self.evaluation,
        )
        if not math.isfinite(loss):
            raise Diverged(self.update, f"{split} loss is {loss} at update {self.update}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add where the run stands; plain types only, so that any torch loads it."""
        checkpoint["progress"] = {"update": self.update, "evaluation": self.evaluation}


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's remarks on devices and loaders out of a sweep's console.

    Lightning also replaces signal handlers and, after Ctrl-C, ignores the signal for good; what
    stood before is put back.
    """
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.pytorch.*")
            yield
    finally:
        logger.setLevel(level)
        if in_main_thread:
            for number, handler in handlers.items():
                signal.signal(number, handler)
