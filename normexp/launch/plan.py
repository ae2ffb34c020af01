"""The plan of a sweep: which cells, which seeds, what varies; and what is left to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normexp.config.schema import CellConfig
from normexp.errors import UserError
from normexp.records import (
    FINAL_STATUSES,
    SCHEMA_VERSION,
    experiment_dir,
    hold_lock,
    identity_of,
    read_plan,
    read_summary,
    write_plan,
)

if TYPE_CHECKING:
    from normexp.training.check import CellFacts

# Groups whose choice is not their name: the other keys of an evaluation go with its statistics.
_CHOICES = {"evaluation": "evaluation.statistics"}

# Shown in every table, whether or not they vary.
CORE_FACTORS = ("norm", "micro_batch_size")


@dataclass(frozen=True)
class PlannedCell:
    """A checked cell of a sweep."""

    config: CellConfig
    facts: CellFacts
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder that holds the cell's runs."""
        return self.facts.run_dir(self.config, 0).parent


@dataclass(frozen=True)
class Job:
    """A run that is still to do."""

    cell: PlannedCell
    seed: int

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.cell.facts.run_dir(self.cell.config, self.seed)

    @property
    def num_updates(self) -> int:
        """Updates of the run."""
        return self.cell.facts.plan.num_updates

    @property
    def work(self) -> float:
        """How long the run takes, roughly and in no unit.

        A forward and backward pass costs much the same for few pixels, where launching kernels
        is most of it, and grows with them then. The constant is from residual networks on two
        cores: images of 8x8 double the cost at some 24 samples, of 28x28 at 2.
        """
        facts = self.cell.facts
        pixels = facts.plan.micro_batch_size * math.prod(facts.input_shape[1:])
        return self.num_updates * facts.plan.accumulation_steps * (1 + pixels / 1500)


def missing_jobs(cells: Iterable[PlannedCell]) -> list[Job]:
    """Return the runs that did not end as completed or diverged, the longest first."""
    jobs = []
    for cell in cells:
        for seed in cell.config.seeds:
            job = Job(cell, seed)
            summary = read_summary(job.folder)
            if summary is None or summary["status"] not in FINAL_STATUSES:
                jobs.append(job)
    return sorted(jobs, key=lambda job: -job.work)


def common_folder(cells: Sequence[PlannedCell]) -> Path:
    """Return the experiment's folder.

    Raises:
        UserError: If the cells belong to several folders, or the folder holds another
            experiment.
    """
    for key in ("name", "output_root"):
        values = {getattr(cell.config, key) for cell in cells}
        if len(values) > 1:
            raise UserError(key, ",".join(sorted(values)), "one value for the whole sweep")
    config = cells[0].config
    folder = experiment_dir(config.output_root, config.name)
    plan = read_plan(folder)
    if plan is not None and plan["experiment"] != config.experiment.name:
        held = plan["experiment"] or "runs of no experiment"
        raise UserError(
            "name", config.name, f"{folder} holds {held}; choose another name or output_root"
        )
    return folder


def make_folder(folder: Path) -> None:
    """Make an experiment's folder.

    Raises:
        UserError: If it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{folder} cannot be made: {error.strerror}"
        raise UserError("output_root", folder.parent, reason) from error


def save_plan(
    folder: Path,
    cells: Sequence[PlannedCell],
    *,
    axes: Sequence[str],
    command: str,
    is_addition: bool = False,
) -> None:
    """Write the plan of a sweep, the folder with it.

    An experiment's plan replaces the one before; runs of no experiment are added to it, so that
    single runs can be compared.

    Args:
        folder: The experiment's folder.
        cells: All cells of the sweep.
        axes: Override keys that vary, in order.
        command: The command line, for the report.
        is_addition: Keep the cells of the plan before, also those of an experiment.

    Raises:
        UserError: If the folder cannot be made.
    """
    make_folder(folder)
    held = "another process is writing its plan"
    with hold_lock(folder / ".plan.lock", key="name", held=held, timeout_s=20.0):
        _write(folder, cells, axes=axes, command=command, is_addition=is_addition)


def _write(
    folder: Path,
    cells: Sequence[PlannedCell],
    *,
    axes: Sequence[str],
    command: str,
    is_addition: bool,
) -> None:
    """Write the plan; nobody else does meanwhile."""
    experiment = cells[0].config.experiment
    entries: list[dict[str, Any]] = [
        {
            "cell": cell.facts.cell,
            "seeds": list(cell.config.seeds),
            "overrides": list(cell.overrides),
            "settings": flatten(identity_of(cell.config.to_plain())),
        }
        for cell in cells
    ]
    before = read_plan(folder)
    if before is not None and (is_addition or experiment.name is None):
        entries = _merge(before["cells"], entries)
        axes = [*before["factors"], *axes]
        commands = [] if is_addition and experiment.name else [command]
        command = " && ".join(dict.fromkeys([*before["command"].split(" && "), *commands]))
    settings = [entry["settings"] for entry in entries]
    factors = find_factors(settings, [short_key(axis) for axis in axes])
    for entry in entries:
        entry["factors"] = {factor: entry["settings"].get(factor) for factor in factors}
    write_plan(
        folder,
        {
            "schema_version": SCHEMA_VERSION,
            "name": cells[0].config.name,
            "experiment": experiment.name,
            "title": experiment.title,
            "question": experiment.question,
            "expected": experiment.expected,
            "figures": list(experiment.figures),
            "select": experiment.plain_select(),
            "target": experiment.plain_target(),
            "command": command,
            "factors": factors,
            "cells": entries,
        },
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as short dotted keys, ``model.params.depth`` as ``model.depth``.

    Args:
        config: Plain containers.
        prefix: Key of ``config`` itself.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, dotted))
        elif not isinstance(value, Mapping):
            flat[short_key(dotted)] = value
    return flat


def short_key(key: str) -> str:
    """Return a configuration key as tables name it.

    Examples:
        >>> short_key("model.params.num_stages"), short_key("norm.name"), short_key("+seeds")
        ('model.num_stages', 'norm', 'seeds')
    """
    return key.lstrip("+").replace(".params.", ".").removesuffix(".name")


def find_factors(settings: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> list[str]:
    """Return the keys by which cells differ: the sweep's axes, then others, then the core ones.

    A parameter that merely comes and goes with its group's choice, such as the number of groups
    when the norm varies, is no factor.

    Args:
        settings: Flattened settings of all cells.
        axes: Short keys of the sweep's axes.
    """
    keys = dict.fromkeys([*axes, *(key for cell in settings for key in cell)])
    factors = [key for key in keys if _varies(key, settings)]
    return [*factors, *(core for core in CORE_FACTORS if core not in factors)]


def _varies(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether cells differ in a key while their group's choice is the same."""
    group = _CHOICES.get(key.rpartition(".")[0], key.rpartition(".")[0])
    group = "" if group == key else group
    values: dict[str, set[str]] = {}
    for cell in settings:
        choice = str(cell.get(group)) if group else ""
        values.setdefault(choice, set()).add(repr(cell.get(key)))
    return any(len(found) > 1 for found in values.values())


def _merge(
    before: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the cells of both plans; a cell in both keeps all its seeds."""
    # The same settings under another name are of other data or an older numerics version: the
    # new cell takes the old one's place, as nothing in the table would tell the two apart.
    renewed = [entry["settings"] for entry in entries]
    names = {entry["cell"] for entry in entries}
    merged = {
        entry["cell"]: dict(entry)
        for entry in before
        if entry["cell"] in names or entry["settings"] not in renewed
    }
    for entry in entries:
        known = merged.get(entry["cell"], {"seeds": []})
        seeds = sorted({*known["seeds"], *entry["seeds"]})
        overrides = known.get("overrides") or entry["overrides"]
        merged[entry["cell"]] = {**entry, "overrides": overrides, "seeds": seeds}
    return list(merged.values())
