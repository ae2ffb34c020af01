"""From the folders of an experiment to data frames: every planned run, or a loud reason."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.analysis import _records
from normexp.errors import UserError
from normexp.records.identity import identity_of
from normexp.records.schema import STATUSES as ENDED
from normexp.records.schema import HistoryRow

STATUSES = (*ENDED, "not_run")
TOTALS = (
    "samples",
    "updates",
    "micro_steps",
    "epochs",
    "dropped_samples",
    "effective_batch_size",
    "wall_s",
)
ENVIRONMENT = (
    "commit",
    "is_dirty",
    "normexp",
    "python",
    "torch",
    "torchvision",
    "lightning",
    "numpy",
    "platform",
    "cpu",
    "num_cores",
    "device",
    "num_threads",
    "precision",
    "data_fingerprint",
    "numerics_version",
    "started_at",
)
# Of texts alone, and not in records of earlier versions.
TEXT_TOTALS = ("tokens", "targets", "padded_share")
# Read from the configuration also when they do not vary: figures need them.
BASE_COLUMNS = ("norm", "micro_batch_size", "accumulation_steps")
METRIC_ORDER = (
    *("test/accuracy", "test/loss", "test/perplexity", "test/bits_per_byte"),
    *("val/accuracy", "val/loss", "val/perplexity", "val/bits_per_byte"),
    "train/loss",
)
# What every run has at its end.
USUAL_METRICS = ("test/accuracy", "test/loss", "val/accuracy", "val/loss", "train/loss")


@dataclass(frozen=True)
class Results:
    """All records of one experiment, by its plan.

    Attributes:
        directory: The experiment's folder.
        plan: Content of ``experiment.json``.
        factors: Dotted keys that vary over the cells, in the order of the plan.
        metrics: Names of the final metrics that any run has, in table order.
        cells: One row a planned cell: ``cell``, the factors and the columns figures need.
        runs: One row a planned run, whether it exists or not; ``status`` says which.
        history: Rows of all planned runs that have a history, with ``cell`` and ``seed``.
        costs: One row a cell that was measured apart from training.
        gradients: One row a parameter of each run with the probe of initial gradients.
        extra_runs: Runs on disk that the plan does not name; they are in no table.
    """

    directory: Path
    plan: dict[str, Any]
    factors: tuple[str, ...]
    metrics: tuple[str, ...]
    cells: pd.DataFrame
    runs: pd.DataFrame
    history: pd.DataFrame
    costs: pd.DataFrame
    gradients: pd.DataFrame
    extra_runs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the experiment's folder, as its plan has it."""
        return str(self.plan.get("name", self.directory.name))


def load_results(experiment_dir: Path | str) -> Results:
    """Return all records of an experiment, one row a planned run.

    Args:
        experiment_dir: Folder that holds ``experiment.json`` and ``runs/``.

    Raises:
        UserError: If the folder has no plan, a file cannot be read, or records of one cell
            contradict each other (two configurations, a seed twice, another cell's record).
    """
    directory = Path(experiment_dir)
    plan = _records.read_plan(directory)
    planned = _check_plan(plan, directory)
    records = [
        _records.read_run(directory, cell["cell"], seed)
        for cell in planned
        for seed in cell["seeds"]
    ]
    base = {cell["cell"]: _base_values(cell, records) for cell in planned}
    factors = tuple(plan["factors"])
    metrics = _metric_names(records)
    runs = _runs_frame(records, base, metrics)
    if len(runs) != sum(len(cell["seeds"]) for cell in planned):
        raise AssertionError("a planned run was lost while loading")
    known = {(record.cell, record.seed) for record in records}
    extra = [run for run in _records.find_runs(directory) if run not in known]
    return Results(
        directory=directory,
        plan=plan,
        factors=factors,
        metrics=metrics,
        cells=_object_frame([{"cell": cell, **values} for cell, values in base.items()]),
        runs=runs,
        history=_history_frame(records),
        costs=_records.costs_frame(directory, list(base)),
        gradients=_gradients_frame(records),
        extra_runs=tuple(f"{cell}/seed={seed}" for cell, seed in sorted(extra)),
    )


def _check_plan(plan: Mapping[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Return the planned cells after checking that names, labels and seeds are unique."""
    where = str(directory / "experiment.json")
    cells: list[dict[str, Any]] = plan["cells"]
    labels: dict[str, str] = {}
    for cell in cells:
        name, seeds = cell["cell"], cell["seeds"]
        if len(set(seeds)) != len(seeds):
            raise UserError(where, f"{name} seeds={seeds}", "each seed of a cell once")
        missing = [key for key in plan["factors"] if key not in cell["factors"]]
        if missing:
            raise UserError(where, name, f"the cell needs a value for {', '.join(missing)}")
        label = json.dumps([cell["factors"][key] for key in plan["factors"]], sort_keys=True)
        if label in labels:
            raise UserError(
                where, f"{labels[label]} and {name}", "factors that tell the two cells apart"
            )
        labels[label] = name
    if len({cell["cell"] for cell in cells}) != len(cells):
        raise UserError(where, "cells", "each cell once")
    return cells


def _base_values(cell: Mapping[str, Any], records: Sequence[_records.Run]) -> dict[str, Any]:
    """Return a cell's factor values and what figures need of its one configuration."""
    configs = [record.config for record in records if record.cell == cell["cell"] and record.config]
    distinct = {json.dumps(identity_of(config), sort_keys=True, default=str) for config in configs}
    if len(distinct) > 1:
        raise UserError(cell["cell"], f"{len(distinct)} configurations", "one for all its seeds")
    # A value that does not vary is the same in every cell, so any run can tell it.
    anywhere = configs or [record.config for record in records if record.config]
    values = {key: _plain(cell["factors"][key]) for key in cell["factors"]}
    for key in BASE_COLUMNS:
        found = anywhere[0].get(key) if anywhere else None
        values.setdefault(key, found.get("name") if isinstance(found, Mapping) else found)
    models = [
        record.summary.get("model") or {} for record in records if record.cell == cell["cell"]
    ]
    values["is_leaking"] = any(model.get("is_leaking") is True for model in models)
    return values


def _plain(value: object) -> object:
    """Return a value that can be compared and printed: containers become JSON text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def _metric_names(records: Sequence[_records.Run]) -> tuple[str, ...]:
    """Return all final metrics found: the known ones first, the others by name."""
    found = {name for record in records for name in record.summary.get("metrics") or {}}
    if not any(name.startswith("test/") for name in found):
        found |= set(USUAL_METRICS)  # no run has come to its end; these it will have
    known = [name for name in METRIC_ORDER if name in found]
    return (*known, *sorted(found - set(known)))


def _runs_frame(
    records: Sequence[_records.Run],
    base: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[str],
) -> pd.DataFrame:
    """Return one row a planned run."""
    rows = []
    for record in records:
        summary, environment = record.summary, record.environment
        values = summary.get("metrics") or {}
        totals, model = summary.get("totals") or {}, summary.get("model") or {}
        rows.append(
            {
                "cell": record.cell,
                "seed": record.seed,
                "status": record.status,
                "reason": summary.get("reason"),
                "run_id": summary.get("run_id"),
                **{name: environment.get(name) for name in ENVIRONMENT},
                **base[record.cell],
                **{name: values.get(name) for name in metrics},
                **{name: totals.get(name) for name in (*TOTALS, *TEXT_TOTALS)},
                "min_statistic_set": model.get("min_statistic_set"),
                "num_parameters": model.get("num_parameters"),
            }
        )
    frame = _object_frame(rows)
    for name in (*metrics, "epochs", "wall_s", *TEXT_TOTALS):
        frame[name] = pd.to_numeric(frame[name]).astype("float64")
    whole = [name for name in TOTALS if name not in ("epochs", "wall_s")]
    for name in ("seed", *whole, "min_statistic_set", "num_parameters"):
        frame[name] = frame[name].astype("Int64")
    return frame


def _history_frame(records: Sequence[_records.Run]) -> pd.DataFrame:
    """Return the rows of all histories with the cell and seed they belong to."""
    parts = [
        record.history.assign(cell=record.cell, seed=record.seed)
        for record in records
        if record.history is not None and len(record.history)
    ]
    columns = ["cell", "seed", *HistoryRow._fields]
    if not parts:
        return pd.DataFrame({name: [] for name in columns})
    return pd.concat(parts, ignore_index=True)[columns]


def _gradients_frame(records: Sequence[_records.Run]) -> pd.DataFrame:
    """Return what the probe of initial gradients reports, with the cell and seed it is of."""
    columns = ("name", "role", "block", "num_elements", "gradient_norm", "weight_norm")
    rows = []
    for record in records:
        report = (record.summary.get("probes") or {}).get("initial_gradients") or {}
        rows += [
            {"cell": record.cell, "seed": record.seed, **{key: entry[key] for key in columns}}
            for entry in report.get("parameters", ())
        ]
    frame = pd.DataFrame(rows, columns=["cell", "seed", *columns])
    return frame.astype({"block": "Int64", "gradient_norm": "float64", "weight_norm": "float64"})


def _object_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame of plain objects, so that null stays null and 2 stays 2."""
    names = list(rows[0]) if rows else ["cell"]
    return pd.DataFrame(
        {name: pd.Series([row.get(name) for row in rows], dtype=object) for name in names}
    )
