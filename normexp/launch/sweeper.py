"""Hydra's sweeper for grids: every cell is checked before the first one trains."""

from __future__ import annotations

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from normexp.analysis import check_request
from normexp.config.compose import expand_grid
from normexp.launch.check import check_sweep
from normexp.launch.plan import make_folder, save_plan, short_key
from normexp.launch.task import TrainTask
from normexp.records import hold_lock


class GridSweeper(Sweeper):
    """Expand an experiment's grid and the command line's sweeps into cells, and launch them."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra hands to a sweeper."""
        self.config_loader = hydra_context.config_loader
        self.base = config
        self.task = task_function
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Check all cells, write the plan, launch.

        Args:
            arguments: Overrides of the command line, sweeps among them.

        Returns:
            The launcher's job returns.

        Raises:
            UserError: If any cell cannot work; nothing has been trained then.
        """
        experiment = OmegaConf.to_container(self.base.experiment, resolve=True)
        assert isinstance(experiment, dict)
        jobs, axes = expand_grid(experiment["grid"], arguments, self.config_loader)
        composed = [
            (self.config_loader.load_sweep_config(self.base, list(overrides)), tuple(overrides))
            for overrides in jobs
        ]
        assert isinstance(self.task, TrainTask)
        folder, self.task.cells = check_sweep(composed)
        self.task.folder = folder
        # A command line that pins an axis of the grid leaves it a factor that may be asked for.
        factors = dict.fromkeys([*axes, *(key for block in experiment["grid"] for key in block)])
        check_request(
            experiment["figures"],
            self.task.cells[0].config.experiment.plain_select(),
            [short_key(key) for key in factors],
        )
        held = "another sweep is writing there; wait for it, or choose another name"
        make_folder(folder)
        with hold_lock(folder / ".lock", key="name", held=held, timeout_s=5.0):
            save_plan(folder, self.task.cells, axes=axes, command=self.task.command)
            overrides = [list(cell.overrides) for cell in self.task.cells]
            return self.launcher.launch(overrides, initial_job_idx=0)
