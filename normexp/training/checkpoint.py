"""Checkpoints: Lightning writes the file, the run goes on from the update in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from normexp.training.solo import SoloModule


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
    module.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    module.update = checkpoint["progress"]["update"]
    module.evaluation = checkpoint["progress"]["evaluation"]
