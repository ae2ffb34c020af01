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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from normexp.data import Split, TextBytes
from normexp.data.batches import UpdatePlan
from normexp.measure import check_finite_buffers
from normexp.training.objective import EvaluationSums, sum_losses
from normexp.training.optim import set_lr
from normexp.training.recorder import Recorder
from normexp.training.windows import MicroBatch, Window


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
        text_bytes: Of a language model: by split, the bytes that its targets stand for.

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
        text_bytes: Mapping[str, TextBytes | None] | None = None,
    ) -> None:
        super().__init__()
        self._text_bytes = text_bytes or {}
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
        self._sums = EvaluationSums(torch.device("cpu"))
        self._splits: dict[int, Split] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that the module was given."""
        return self.optimizer

    def split_on_device(self, split: Split) -> Split:
        """Return a split's tensors on the module's device, moved there once."""
        if id(split) not in self._splits:
            moved = split.to(self.device)
            if moved.inputs.is_floating_point():  # images have the type of the parameters
                dtype = next(self.model.parameters()).dtype
                moved = Split(moved.inputs.to(dtype), moved.targets)
            self._splits[id(split)] = moved
        return self._splits[id(split)]

    def training_step(self, window: Window, batch_idx: int) -> None:
        """Take the window's updates, then record their mean loss.

        The loss of an update is the mean over its samples, of a language model over its tokens,
        however they are split into micro-batches: each micro-batch adds its sum over the number
        of the whole update. An update that asks for no prediction has the loss 0.
        """
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        losses = []
        for num_targets, micro_batches in window.updates():
            set_lr(optimizer.optimizer, self.lr(self.update))
            scale = 1.0 / max(1, num_targets)
            parts = []
            for inputs, targets in micro_batches:
                loss = sum_losses(self.model(inputs), targets) * scale
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
        self._start_sums("val")

    def validation_step(self, batch: MicroBatch, batch_idx: int) -> None:
        """Add a batch to the sums of the evaluation."""
        self._add(batch)

    def on_validation_epoch_end(self) -> None:
        """Record the evaluation, weighted by predictions."""
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
        self._start_sums("test")

    def test_step(self, batch: MicroBatch, batch_idx: int) -> None:
        """Add a batch to the sums of the test."""
        self._add(batch)

    def on_test_epoch_end(self) -> None:
        """Record the test, weighted by predictions."""
        self._record_sums("test")

    def _start_sums(self, split: str) -> None:
        name = check_finite_buffers(self.model)
        if name is not None:
            raise Diverged(self.update, f"buffer {name} is not finite before evaluation")
        if self._evaluation_context is not None:
            with self.trainer.precision_plugin.forward_context():
                self._evaluating.enter_context(self._evaluation_context(self))
        self._sums = EvaluationSums(self.device, self._text_bytes.get(split))

    def _add(self, batch: MicroBatch) -> None:
        inputs, targets = batch
        # A batch that was filled up has more inputs than targets.
        self._sums.add(self.model(inputs)[-len(targets) :], targets)

    def end_evaluation(self) -> None:
        """End the context of an evaluation, if one was left open."""
        self._evaluating.close()

    def _record_sums(self, split: str) -> None:
        self.end_evaluation()
        values = self._sums.means()
        self.recorder.record(
            split,
            values,
            update=self.update,
            samples=self.samples,
            evaluation=self.evaluation,
        )
        loss = values["loss"]
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
