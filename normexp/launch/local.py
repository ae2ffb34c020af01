"""Hydra's launcher for one machine: each run in its own process, within the cores."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from normexp.errors import UserError
from normexp.launch.task import TrainTask


class LocalLauncher(Launcher):
    """Train the missing runs of a sweep.

    Args:
        num_jobs: Runs at a time; by default as many as the cores hold, given each run's threads,
            or one where a GPU trains.
        fail_fast: Stop at the first run that fails.
    """

    def __init__(self, num_jobs: int | None = None, fail_fast: bool = False) -> None:
        self.num_jobs = num_jobs
        self.fail_fast = fail_fast

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands to a launcher."""
        del hydra_context, config
        assert isinstance(task_function, TrainTask)
        self.task = task_function
        if self.num_jobs is not None and self.num_jobs < 1:
            raise UserError("hydra.launcher.num_jobs", self.num_jobs, "1 or more is needed")

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Train every run of the sweep's cells that is not yet on disk.

        Args:
            job_overrides: One list of overrides for each cell, as the sweeper checked them.
            initial_job_idx: Hydra's number of the first job.

        Returns:
            One return for each cell; how its runs ended is on disk.
        """
        cells = self.task.cells
        if not cells:
            raise UserError("hydra/sweeper", "", "the local launcher needs hydra/sweeper=grid")
        from normexp.launch.plan import missing_jobs
        from normexp.launch.pool import run_jobs
        from normexp.records import count_cores

        threads = max(cell.config.trainer.num_threads for cell in cells)
        uses_gpu = any(cell.config.trainer.accelerator == "gpu" for cell in cells)
        num_jobs = self.num_jobs or (1 if uses_gpu else max(1, count_cores() // threads))
        total = sum(len(cell.config.seeds) for cell in cells)
        run_jobs(missing_jobs(cells), num_jobs=num_jobs, total=total, fail_fast=self.fail_fast)
        return [
            JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
            for overrides in job_overrides
        ]
