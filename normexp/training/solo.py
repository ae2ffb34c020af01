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
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.data import AugmentDraws, Dataset, Split, augment, draw_augmentation
from normexp.data.batches import IndexStream, UpdatePlan
from normexp.measure import check_finite_buffers
from normexp.training.recorder import Recorder

# A window holds at most this many samples, so that its gathered inputs stay small.
_WINDOW_SAMPLES = 8192


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


class Window(NamedTuple):
    """Ready micro-batches of consecutive updates.

    Attributes:
        inputs: Shape ``(updates, accumulation_steps, micro_batch_size, C, H, W)``.
        targets: Shape ``(updates, accumulation_steps, micro_batch_size)``.
    """

    inputs: Tensor
    targets: Tensor


class WindowSource:
    """Windows from the update that the module has reached to its next evaluation.

    Args:
        module: Tells where training stands and on which device.
        stream: Sample indices of every update.
        data: Data set of the run.
        augment_params: ``crop_padding`` and ``horizontal_flip``.
        window_updates: Most updates of a window.
    """

    def __init__(
        self,
        module: SoloModule,
        stream: IndexStream,
        data: Dataset,
        augment_params: dict[str, Any],
        window_updates: int,
    ) -> None:
        self.module = module
        self.stream = stream
        self.train = data.train
        self.augment_params = augment_params
        self.is_augmented = any(augment_params.values())
        size = stream.plan.effective_batch_size
        self.window_updates = max(1, min(window_updates, _WINDOW_SAMPLES // size))

    def __iter__(self) -> Iterator[Window]:
        plan = self.stream.plan
        end = plan.evaluation_updates[self.module.evaluation]
        update = self.module.update
        while update < end:
            count = min(self.window_updates, end - update)
            yield self.window(update, count)
            update += count

    def window(self, first_update: int, num_updates: int) -> Window:
        """Return the micro-batches of ``num_updates`` updates from ``first_update`` on."""
        plan, seed = self.stream.plan, self.stream.seed
        device = self.module.device
        split = self.module.split_on_device(self.train)
        indices = self.stream.indices(first_update, num_updates).reshape(-1)
        index = torch.from_numpy(indices).to(device)
        inputs, targets = split.inputs[index], split.targets[index]
        if self.is_augmented:
            draws = [
                draw_augmentation(seed, update, plan.effective_batch_size, **self.augment_params)
                for update in range(first_update, first_update + num_updates)
            ]
            inputs = augment(inputs, AugmentDraws.concatenate(draws).to(device))
        shape = (num_updates, plan.accumulation_steps, plan.micro_batch_size)
        return Window(inputs.reshape(*shape, *inputs.shape[1:]), targets.reshape(shape))


class EvaluationSource:
    """The batches of a split, in order, all samples once.

    Args:
        module: Tells the device.
        split: Samples to evaluate.
        batch_size: Samples of one forward pass; it does not change the numbers but their
            last digits.
    """

    def __init__(self, module: SoloModule, split: Split, batch_size: int) -> None:
        self.module = module
        self.split = split
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        split = self.module.split_on_device(self.split)
        yield from zip(
            torch.split(split.inputs, self.batch_size),
            torch.split(split.targets, self.batch_size),
            strict=True,
        )


class SoloModule(pl.LightningModule):
    """One seed of a cell, with manual optimization so that the accounting is exact.

    Args:
        model: Initialised model.
        plan: Accounting of the run.
        optimizer: Built over the model's parameters.
        lr: Learning rate of an update.

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
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.plan = plan
        self.lr = lr
        self.update = 0
        self.evaluation = 0
        self._optimizer = optimizer
        self._sums: dict[str, Tensor | int] = {}
        self._splits: dict[int, Split] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that the module was given."""
        return self._optimizer

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
            rate = self.lr(self.update)
            for group in optimizer.param_groups:
                group["lr"] = rate
            parts = []
            for micro_inputs, micro_targets in zip(inputs.unbind(), targets.unbind(), strict=True):
                logits = self.model(micro_inputs)
                loss = F.cross_entropy(logits, micro_targets, reduction="sum") * scale
                self.manual_backward(loss)
                parts.append(loss.detach())
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
        self._sums = {"loss": torch.zeros((), dtype=torch.float64, device=self.device)}
        self._sums["correct"] = torch.zeros((), dtype=torch.int64, device=self.device)
        self._sums["count"] = 0

    def _add(self, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        logits = self.model(inputs)
        losses = F.cross_entropy(logits, targets, reduction="none")
        self._sums["loss"] += losses.double().sum()
        self._sums["correct"] += (logits.argmax(dim=1) == targets).sum()
        self._sums["count"] += len(targets)

    def _record_sums(self, split: str) -> None:
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


class TimedCheckpoint(pl.Callback):
    """Write a checkpoint now and then, whole or not at all.

    Lightning's own resume point in the middle of an epoch is not exact; here a checkpoint is
    written between two windows, and windows are functions of the update alone.

    Args:
        path: Where the checkpoint stands.
        interval_s: Least seconds between two checkpoints.
    """

    def __init__(self, path: Path, interval_s: float) -> None:
        self.path = path
        self.interval_s = interval_s
        self._last = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Write, unless an evaluation is due first."""
        assert isinstance(pl_module, SoloModule)
        if pl_module.update < pl_module.plan.evaluation_updates[pl_module.evaluation]:
            self._write(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write after an evaluation, unless it was the last."""
        assert isinstance(pl_module, SoloModule)
        if pl_module.evaluation < pl_module.plan.num_evaluations:
            self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        if time.monotonic() - self._last < self.interval_s:
            return
        temporary = self.path.with_suffix(".partial")
        trainer.save_checkpoint(temporary)
        temporary.replace(self.path)
        self._last = time.monotonic()


def restore(module: SoloModule, path: Path) -> None:
    """Bring a module and its optimizer to where a checkpoint stands.

    Args:
        module: Module with the optimizer of the same configuration.
        path: The checkpoint.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    module.load_state_dict(checkpoint["state_dict"])
    module._optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    module.update = checkpoint["progress"]["update"]
    module.evaluation = checkpoint["progress"]["evaluation"]


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
