"""Reading the files that runs leave on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from normexp.errors import UserError
from normexp.records import store
from normexp.records.schema import (
    CONFIG_FILE,
    COST_FILE,
    ENVIRONMENT_FILE,
    PLAN_FILE,
    RUNS_FOLDER,
    SUMMARY_FILE,
)

TIMINGS = ("forward_ms", "forward_backward_ms", "update_ms", "prediction_ms")
# Measured only where a cell asks for it.
OPTIONAL_TIMINGS = ("folded_prediction_ms",)
MEMORY = (
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "saved_for_backward_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
)
SIZES = (
    "prediction_batch_size",
    "micro_batch_size",
    "accumulation_steps",
    "effective_batch_size",
    "num_parameters",
)

# The safe loader in C reads a thousand configurations in a second, the other in ten.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Run:
    """The files of one planned run; empty where there are none yet."""

    cell: str
    seed: int
    status: str
    summary: dict[str, Any]
    environment: dict[str, Any]
    config: dict[str, Any]
    history: pd.DataFrame | None


def read_plan(experiment_dir: Path) -> dict[str, Any]:
    """Return the plan of an experiment.

    Raises:
        UserError: If the folder holds no readable plan.
    """
    path = experiment_dir / PLAN_FILE
    plan = _read_json(path)
    if not plan:
        raise UserError(
            "folder", experiment_dir, f"holds no {PLAN_FILE}; name the folder of a sweep"
        )
    missing = [key for key in ("cells", "factors") if key not in plan]
    if missing:
        raise UserError(str(path), ", ".join(missing), "a plan needs these keys")
    return plan


def find_runs(experiment_dir: Path) -> list[tuple[str, int]]:
    """Return cell and seed of every run folder, planned or not, sorted."""
    found = []
    for folder in store.find_runs(experiment_dir):
        number = folder.name.removeprefix("seed=")
        if number.lstrip("-").isdigit():
            found.append((folder.parent.name, int(number)))
    return sorted(found)


def read_run(experiment_dir: Path, cell: str, seed: int) -> Run:
    """Return what one planned run left on disk.

    Raises:
        UserError: If a file is damaged or the summary belongs to another run.
    """
    folder = experiment_dir / RUNS_FOLDER / cell / f"seed={seed}"
    summary = _read_json(folder / SUMMARY_FILE)
    if summary and (summary.get("cell"), summary.get("seed")) != (cell, seed):
        found = f"{summary.get('cell')}/seed={summary.get('seed')}"
        raise UserError(str(folder / SUMMARY_FILE), found, f"a record of {cell}/seed={seed}")
    absent = "interrupted" if folder.is_dir() else "not_run"
    return Run(
        cell=cell,
        seed=seed,
        status=summary.get("status", absent),
        summary=summary,
        environment=_read_json(folder / ENVIRONMENT_FILE),
        config=_read_yaml(folder / CONFIG_FILE),
        history=_read_history(folder),
    )


def costs_frame(experiment_dir: Path, cells: Sequence[str]) -> pd.DataFrame:
    """Return one flat row for each cell whose cost was measured.

    Times keep their names with ``_median``, ``_q25`` and ``_q75``; the conditions of the
    measurement keep theirs after ``conditions.``.
    """
    rows = []
    for cell in cells:
        cost = _read_json(experiment_dir / RUNS_FOLDER / cell / COST_FILE)
        if not cost:
            continue
        row: dict[str, Any] = {"cell": cell, **{name: cost.get(name) for name in SIZES}}
        row["norm_kernel"] = cost.get("norm_kernel")
        timings = cost.get("timing") or {}
        for name in (*TIMINGS, *(name for name in OPTIONAL_TIMINGS if name in timings)):
            timing = timings.get(name) or {}
            row |= {f"{name}_{part}": timing.get(part) for part in ("median", "q25", "q75")}
        row |= {name: (cost.get("memory") or {}).get(name) for name in MEMORY}
        for name, value in (cost.get("conditions") or {}).items():
            plain = json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
            row[f"conditions.{name}"] = plain
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["cell"]
    frame = pd.DataFrame(
        {name: pd.Series([row.get(name) for row in rows], dtype=object) for name in names}
    )
    for name in (name for name in names if name in SIZES or name in MEMORY):
        frame[name] = frame[name].astype("Int64")
    for name in (name for name in names if name.endswith(("_median", "_q25", "_q75"))):
        frame[name] = pd.to_numeric(frame[name]).astype("float64")
    return frame


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON record, empty when there is none."""
    if not path.is_file():
        return {}
    try:
        content = store.read_json(path)
    except OSError as error:  # a damaged record is a UserError already, and names its file
        raise UserError(str(path), type(error).__name__, f"a JSON record; {error}") from error
    if not isinstance(content, dict):
        raise UserError(str(path), type(content).__name__, "a JSON object")
    return content


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return a resolved configuration, empty when there is none."""
    if not path.is_file():
        return {}
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(str(path), type(error).__name__, "a YAML configuration") from error
    return content if isinstance(content, dict) else {}


def _read_history(folder: Path) -> pd.DataFrame | None:
    """Return a run's rows with metrics named ``<split>/<quantity>``, None without a folder."""
    if not folder.is_dir():
        return None
    try:
        frame = store.read_history(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(str(folder), type(error).__name__, "a history; it is damaged") from error
    names = zip(frame["split"], frame["metric"], strict=True)
    frame["metric"] = [m if "/" in m else f"{split}/{m}" for split, m in names]
    return frame
