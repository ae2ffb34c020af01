"""Measure what cells cost, one after the other, while nothing else runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console

from normexp.config.compose import load_plugins
from normexp.config.schema import CellConfig
from normexp.launch.machine import whole_machine
from normexp.launch.plan import PlannedCell
from normexp.launch.pool import fork_server
from normexp.records import read_json, write_json
from normexp.records.schema import COST_FILE

# Cells measured in turn share a machine's mood; more at a time would hold too many models.
_GROUP_SIZE = 12


def measure_missing_costs(cells: Sequence[PlannedCell]) -> bool:
    """Write ``cost.json`` into the folder of every cell that has none.

    Args:
        cells: The checked cells of a sweep whose training has ended.

    Returns:
        Whether every cell has one now.
    """
    from normexp.training.cost import cost_key

    by_key: dict[str, list[PlannedCell]] = defaultdict(list)
    for cell in cells:
        path = cell.folder / COST_FILE
        key = cost_key(cell.config)
        if not path.exists() or read_json(path)["cost_key"] != key:
            by_key[key].append(cell)
    if not by_key:
        return True
    num_cells = sum(len(same) for same in by_key.values())
    console = Console(stderr=True)
    is_complete = True
    with whole_machine():
        console.print(f"measuring the cost of {num_cells} cells, nothing beside it")
        for group in _groups([same[0] for same in by_key.values()]):
            folders = [
                [str(cell.folder / COST_FILE) for cell in by_key[cost_key(first.config)]]
                for first in group
            ]
            code = _run_alone([cell.config for cell in group], folders)
            if code:
                is_complete = False
                console.print(f"cost pass: exit code {code}; timing and memory lack some cells")
    return is_complete


def _run_alone(configs: Sequence[CellConfig], folders: Sequence[Sequence[str]]) -> int:
    """Measure cells in a process of their own, and return its exit code."""
    process = fork_server().Process(target=_measure, args=(configs, folders))
    process.start()
    try:
        process.join()
    except BaseException:
        process.kill()
        raise
    return process.exitcode or 0


def _groups(cells: Sequence[PlannedCell]) -> list[list[PlannedCell]]:
    """Return cells in groups of equal device, threads and precision; arms of a norm together."""
    by_conditions: dict[tuple[object, ...], list[PlannedCell]] = defaultdict(list)
    for cell in cells:
        config = cell.config
        conditions = (config.trainer.accelerator, config.trainer.num_threads, config.precision)
        by_conditions[conditions].append(cell)
    groups = []
    for same in by_conditions.values():
        same.sort(key=lambda cell: (cell.config.micro_batch_size, str(cell.config.model)))
        groups += [same[i : i + _GROUP_SIZE] for i in range(0, len(same), _GROUP_SIZE)]
    return groups


def _measure(configs: Sequence[CellConfig], folders: Sequence[Sequence[str]]) -> None:
    """Measure cells in this process and write their records."""
    from pathlib import Path

    from normexp.launch.worker import die_with_parent
    from normexp.training.cost import measure_costs

    die_with_parent()
    for config in configs:
        load_plugins(config.plugins)
    for record, paths in zip(measure_costs(configs), folders, strict=True):
        for path in paths:
            write_json(Path(path), record)
