"""From composed configurations to checked cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from normexp.config.compose import load_plugins, to_cell
from normexp.launch.plan import PlannedCell, common_folder


def check_sweep(
    composed: Sequence[tuple[DictConfig, tuple[str, ...]]],
) -> tuple[Path, list[PlannedCell]]:
    """Check every cell before the first one trains.

    Configurations that differ only in their seeds are one cell with all of them.

    Args:
        composed: Composed configurations with the overrides that made them.

    Returns:
        (the experiment's folder, the checked cells).

    Raises:
        UserError: On the first cell that cannot work; nothing has been written then.
    """
    from normexp.training.check import check_cell
    from normexp.training.resolve import resolve_cell

    cells: list[PlannedCell] = []
    for config, overrides in composed:
        cell = to_cell(config)
        load_plugins(cell.plugins)
        cell = resolve_cell(cell)
        facts = check_cell(cell)
        cells.append(PlannedCell(cell, facts, overrides))
    folder = common_folder(cells)
    unique: dict[str, PlannedCell] = {}
    for planned in cells:
        kept = unique.setdefault(planned.facts.cell, planned)
        if kept is not planned:
            kept.config.seeds = list(dict.fromkeys([*kept.config.seeds, *planned.config.seeds]))
            seeds = ",".join(map(str, kept.config.seeds))
            others = [word for word in kept.overrides if not word.startswith("seeds=")]
            merged = replace(kept, overrides=(*others, f"seeds=[{seeds}]"))
            unique[planned.facts.cell] = merged
    return folder, list(unique.values())
