"""The verb status: how the runs of an experiment stand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from normexp.errors import UserError
from normexp.records import read_history, read_plan, read_summary, shorten_hashes
from normexp.records.schema import RUNS_FOLDER
from normexp.records.store import encode

WORDS = ("completed", "diverged", "failed", "interrupted", "running", "not run")


def show_status(folder: Path, *, as_json: bool) -> int:
    """Print one row a cell with how its runs stand, or one object a run.

    Args:
        folder: The experiment's folder.
        as_json: Print a JSON list of runs.

    Returns:
        The exit code.

    Raises:
        UserError: If the folder holds no experiment.
    """
    plan = read_plan(folder)
    if plan is None:
        raise UserError("folder", folder, "holds no experiment.json; name the folder of a sweep")
    runs = [_describe_run(folder, cell, seed) for cell in plan["cells"] for seed in cell["seeds"]]
    if as_json:
        print(json.dumps(encode(runs), indent=1))
        return 0
    table = Table(title=f"{plan['name']}: {len(runs)} runs")
    for factor in plan["factors"]:
        table.add_column(factor, no_wrap=True)
    # One column for all words: it alone may wrap where a terminal is narrow.
    table.add_column("runs")
    for cell in plan["cells"]:
        counts = Counter(run["status"] for run in runs if run["cell"] == cell["cell"])
        values = [
            "-" if value is None else shorten_hashes(str(value))
            for value in cell["factors"].values()
        ]
        ends = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
        table.add_row(*values, ends)
    Console().print(table)
    for run in runs:
        if run["reason"]:
            print(f"{run['status']}: {run['cell']} seed {run['seed']}: {run['reason']}")
    return 0


def _describe_run(folder: Path, cell: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return where one run stands."""
    path = folder / RUNS_FOLDER / cell["cell"] / f"seed={seed}"
    run = {"cell": cell["cell"], **cell["factors"], "seed": seed, "reason": None}
    summary = read_summary(path)
    if summary is not None:
        return {
            **run,
            "run_id": summary["run_id"],
            "status": summary["status"],
            "reason": summary["reason"],
            "updates": summary["totals"]["updates"],
            "metrics": summary["metrics"],
        }
    history = read_history(path) if path.exists() else None
    updates = int(history["update"].max()) if history is not None and len(history) else 0
    word = "not run"
    if path.exists():
        word = "running" if _is_locked(path) else "interrupted"
    return {**run, "run_id": None, "status": word, "updates": updates, "metrics": {}}


def _is_locked(path: Path) -> bool:
    """Tell whether a live process holds the run's lock."""
    from filelock import FileLock, Timeout

    lock = path / ".lock"
    if not lock.exists():  # and is not made here: looking changes nothing
        return False
    try:
        with FileLock(str(lock), timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # records of somebody else, only to be read
        return False
