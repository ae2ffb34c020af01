"""Where the numbers come from: conditions, runs without a result, what was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from normexp.analysis import cost
from normexp.analysis.aggregate import mixed_conditions
from normexp.analysis.display import ABSENT, short_names, show_number, show_value
from normexp.analysis.figures import WrittenFigure
from normexp.analysis.leaks import MEANING, mark_table
from normexp.analysis.load import STATUSES, Results
from normexp.analysis.render import Table
from normexp.analysis.selection import explain_no_selection

# Fewer seeds give intervals so wide, and so dependent on normality, that they say little.
FEW_SEEDS = 5
SHOWN_CONDITIONS = (
    ("device", "device"),
    ("cpu", "processor"),
    ("num_cores", "cores"),
    ("num_threads", "threads a run"),
    ("precision", "precision"),
    ("platform", "platform"),
    ("commit", "commit"),
    ("normexp", "normexp"),
    ("numerics_version", "numerics version"),
    ("python", "Python"),
    ("torch", "torch"),
    ("torchvision", "torchvision"),
    ("lightning", "Lightning"),
    ("numpy", "NumPy"),
    ("data_fingerprint", "data fingerprint"),
)


def count_statuses(results: Results) -> list[tuple[str, int]]:
    """Return what became of the planned runs, in words, without statuses that no run has."""
    counts = results.runs["status"].value_counts()
    return [
        (status.replace("_", " "), int(counts.get(status, 0)))
        for status in STATUSES
        if counts.get(status, 0) or status == "completed"
    ]


def list_warnings(results: Results) -> list[str]:
    """Return what a reader must know before comparing rows."""
    warnings = []
    completed = results.runs[results.runs["status"] == "completed"]
    sizes = completed.groupby("cell")["seed"].size()
    few = sum(int(sizes.get(cell, 0)) < FEW_SEEDS for cell in results.cells["cell"])
    if few:
        cells = f"{few} of {len(results.cells)} cells have"
        warnings.append(f"{cells} fewer than {FEW_SEEDS} completed runs: intervals are wide.")
    mixed = mixed_conditions(results.runs, results.factors)
    if mixed:
        warnings.append(
            f"The runs mix conditions ({', '.join(mixed)}): rows compare only so far as these "
            "do not matter. The column notes marks cells that mix them within."
        )
    if results.runs["is_dirty"].eq(True).any():
        warnings.append("Some runs were made with uncommitted changes in the code.")
    leaking = int(results.cells["is_leaking"].eq(True).sum())
    if leaking:
        warnings.append(f"{leaking} of {len(results.cells)} cells leak. {MEANING}")
    company = cost.warn_of_company(results)
    if company:
        warnings.append(company)
    if results.extra_runs:
        shown = ", ".join(results.extra_runs[:5]) + (", ..." if len(results.extra_runs) > 5 else "")
        warnings.append(
            f"Runs on disk that are not in the plan, and so in no number here: "
            f"{len(results.extra_runs)} ({shown})."
        )
    return warnings


def describe_missing(results: Results) -> str:
    """Return one sentence on runs that are in no mean, empty if all are."""
    counts = [(words, n) for words, n in count_statuses(results) if words != "completed" and n]
    if not counts:
        return ""
    listed = ", ".join(f"{n} {words}" for words, n in counts)
    total = sum(n for _, n in counts)
    return f"Not in the means: {total} of {len(results.runs)} runs ({listed})."


def list_unfinished(results: Results) -> Table:
    """Return one row for each run that did not complete, with the reason it left."""
    runs = results.runs[results.runs["status"] != "completed"]
    names = short_names(results.factors)
    rows = tuple(
        (
            *(show_value(row[factor]) for factor in results.factors),
            str(row["seed"]),
            row["status"].replace("_", " "),
            " ".join(str(row["reason"] or _default_reason(row["status"])).split()),
            str(row["run_id"] or ABSENT),
        )
        for _, row in runs.iterrows()
    )
    table = Table(
        name="unfinished",
        title="Runs that did not complete",
        caption="They are counted in the notes of their cell and are in no mean.",
        frame=runs,
        headers=(*names.values(), "seed", "status", "reason", "run id"),
        rows=rows,
    )
    return mark_table(results, table)


def list_settings(results: Results) -> list[tuple[str, str]]:
    """Return the settings that are no factor: what was held fixed, and what went with a factor.

    A setting that differs along with a choice, as the eps of two norms, names the choices; so
    does a parameter that only some cells have. Settings that are null or empty are left out.
    """
    cells = [cell.get("settings", {}) for cell in results.plan["cells"]]
    keys = dict.fromkeys(key for cell in cells for key in cell)
    shown = []
    for key in keys:
        if key in results.factors:
            continue
        values: dict[str, dict[str, None]] = {}
        for cell in cells:
            if cell.get(key) not in (None, []):
                values.setdefault(show_value(cell[key]), {})[_choice_of(key, cell, results)] = None
        holders = sum(cell.get(key) not in (None, []) for cell in cells)
        if len(values) == 1 and holders == len(cells):
            shown.append((key, next(iter(values))))
        elif values:
            listed = "; ".join(f"{value} ({', '.join(of)})" for value, of in values.items())
            shown.append((key, listed))
    return shown


def _choice_of(key: str, cell: Mapping[str, Any], results: Results) -> str:
    """Return what a setting goes with: its group's choice, or else the cell's factors."""
    group = key.rpartition(".")[0]
    if group in results.factors:
        return str(cell.get(group))
    return " ".join(f"{factor}={show_value(cell.get(factor))}" for factor in results.factors)


def list_conditions(results: Results) -> list[tuple[str, str]]:
    """Return name and value of each recorded condition; several values with their counts."""
    shown = []
    runs = results.runs
    for name, words in SHOWN_CONDITIONS:
        values = runs[name].map(lambda value: None if value is None else show_value(value))
        if name == "commit":
            dirty = runs["is_dirty"].eq(True)
            values = values.where(~dirty, values.astype(str) + " with uncommitted changes")
        counts = values.dropna().value_counts(sort=False)
        if len(counts) == 1:
            shown.append((words, str(counts.index[0])))
        elif len(counts) > 1:
            several = "; ".join(f"{value} ({n} runs)" for value, n in sorted(counts.items()))
            shown.append((words, several))
    return shown


def list_not_measured(results: Results, figures: Sequence[WrittenFigure]) -> list[str]:
    """Return what a reader might look for here in vain, and why."""
    missing = []
    costs = results.costs
    if costs.empty:
        missing.append("Time and memory: the cost pass was not run.")
    else:
        absent = len(results.cells) - len(costs)
        if absent:
            missing.append(
                f"Time and memory of {absent} cells: the cost pass has not reached them."
            )
        if costs["peak_allocated_bytes"].isna().all():
            missing.append("Peak memory: the device does not count it.")
    no_selection = explain_no_selection(results)
    if no_selection:
        missing.append(f"Best level of each arm: {no_selection}.")
    missing += [f"Figure {f.name}: {f.skipped}." for f in figures if f.skipped]
    missing.append(
        "Whether two cells differ: intervals are of each cell's mean, not of differences, "
        "except where a figure says so."
    )
    return missing


def describe_wall_time(results: Results) -> str:
    """Return the time that training took, and that it is no timing."""
    total = float(results.runs["wall_s"].sum())
    return (
        f"Training took {show_number(total, digits=3)} s in sum over all runs, evaluation "
        "included. Runs may have trained side by side, so this is not a timing; cost comes from "
        "the cost pass alone."
    )


def build_sources_table(results: Results, cells: pd.DataFrame) -> Table:
    """Return seeds and run ids of each cell: from which records each row comes."""
    names = short_names(results.factors)
    rows = tuple(
        (
            *(show_value(row[factor]) for factor in results.factors),
            row["seeds"],
            row["run_ids"],
            row["cell"],
        )
        for _, row in cells.iterrows()
    )
    table = Table(
        name="sources",
        title="Seeds and run ids",
        caption="In the same order; '-' is a run without a record. The cell is a folder of runs/.",
        frame=cells,
        headers=(*names.values(), "seeds", "run ids", "cell"),
        rows=rows,
    )
    return mark_table(results, table)


def _default_reason(status: str) -> str:
    """Return why a run without a summary has no result."""
    return {
        "interrupted": "stopped before its end, or still running",
        "not_run": "has not started",
    }.get(status, "no reason was recorded")
