"""What Hydra runs for one composed configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

if TYPE_CHECKING:
    from normexp.launch.plan import PlannedCell


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

    def __call__(self, composed: DictConfig) -> list[str]:
        """Check and train one cell with all its seeds in this process.

        Args:
            composed: What Hydra composed.

        Returns:
            The run ids.
        """
        from normexp.launch.plan import save_plan
        from normexp.launch.sweeper import check_sweep
        from normexp.training.cell import train_cell

        planned = self.cells
        folder = check_sweep(self, [(composed, ())])
        save_plan(folder, self.cells, axes=[], command=self.command, is_addition=True)
        config = self.cells[0].config
        # A launcher that runs a sweep's jobs in this process leaves the sweep's cells in place.
        self.cells = planned or self.cells
        return train_cell(config)
