"""What Hydra runs for one composed configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from normexp.config.compose import pins_one_cell
from normexp.errors import UserError
from normexp.records import read_summary

if TYPE_CHECKING:
    from normexp.launch.plan import Job, PlannedCell
    from normexp.launch.progress import SweepProgress


class TrainTask:
    """Hydra's task function: train the cell of a composed configuration.

    It also carries news back to the command line, since Hydra drops what a sweep returns.

    Attributes:
        folder: The experiment's folder, once the cells are checked.
        cells: The checked cells of the sweep.
        command: The command line, for the record.
    """

    __name__ = "normexp"

    def __init__(self, command: str = "") -> None:
        self.command = command
        self.folder: Path | None = None
        self.cells: Sequence[PlannedCell] = ()

    def __call__(self, composed: DictConfig) -> None:
        """Check one cell, and train its missing runs in this process.

        Args:
            composed: What Hydra composed.
        """
        from normexp.launch.check import check_sweep
        from normexp.launch.machine import training_share
        from normexp.launch.plan import missing_jobs, save_plan
        from normexp.launch.progress import SweepProgress
        from normexp.training.cell import train_cell

        planned = self.cells
        self.folder, self.cells = check_sweep([(composed, ())])
        (cell,) = self.cells
        experiment = cell.config.experiment
        if not planned and not pins_one_cell(experiment.grid, HydraConfig.get().overrides.task):
            expected = "is a grid of cells, and train takes one: normexp run experiment="
            raise UserError("experiment", experiment.name, f"{expected}{experiment.name}")
        save_plan(self.folder, self.cells, axes=[], command=self.command, is_addition=True)
        # A launcher that runs a sweep's jobs in this process leaves the sweep's cells in place.
        self.cells = planned or self.cells
        jobs = missing_jobs([cell])
        with training_share(), SweepProgress(jobs, total=len(cell.config.seeds)) as progress:
            for job in jobs:
                train_cell(
                    cell.config,
                    [job.seed],
                    on_progress=partial(_advance, progress, job),
                )
                summary = read_summary(job.folder)
                assert summary is not None
                progress.finish(job, summary["status"], summary["reason"])


def _advance(progress: SweepProgress, job: Job, _seed: int, update: int) -> None:
    progress.advance(job, update)
