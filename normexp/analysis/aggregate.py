"""From runs to one row a cell: how many of what became, and mean, spread and interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from normexp.analysis.load import STATUSES, TEXT_TOTALS, Results
from normexp.analysis.statistics import Summary, summarize
from normexp.analysis.target import count_reached
from normexp.errors import UserError

STATISTICS = ("n", "mean", "std", "ci95_low", "ci95_high")
# What makes numbers of two runs no longer alike, or no longer traceable to one program.
CONDITIONS = (
    "commit",
    "is_dirty",
    "normexp",
    "torch",
    "numpy",
    "platform",
    "cpu",
    "device",
    "num_threads",
    "precision",
    "data_fingerprint",
    "numerics_version",
)


def aggregate_cells(results: Results) -> pd.DataFrame:
    """Return one row a planned cell, in the order of the plan.

    Means are over the completed runs with a finite value; ``<metric>_n`` says how many those
    are, and the ``num_`` columns say what became of all others. Runs of texts have their tokens,
    the targets among them and the share of padding as means over the completed runs.
    """
    reached = count_reached(results)
    totals = [name for name in TEXT_TOTALS if results.runs[name].notna().any()]
    rows = []
    for cell, runs in _by_cell(results):
        counts = {status: int((runs["status"] == status).sum()) for status in STATUSES}
        completed = runs[runs["status"] == "completed"]
        row: dict[str, Any] = {"num_seeds": len(runs)}
        row |= {f"num_{status}": count for status, count in counts.items()}
        for name in ("min_statistic_set", "num_parameters", "effective_batch_size"):
            row[name] = _only(runs[name].dropna(), cell, name)
        row |= reached.get(cell, {})
        for metric in results.metrics:
            row |= named_statistics(metric, summarize(completed[metric]))
        for name in totals:
            row[f"{name}_mean"] = summarize(completed[name]).mean
        row["seeds"] = " ".join(str(seed) for seed in runs["seed"])
        row["run_ids"] = " ".join(str(run_id or "-") for run_id in runs["run_id"])
        row["mixed"] = " ".join(mixed_conditions(runs))
        row["cell"] = cell
        rows.append(row)
    frame = _with_factors(results, rows)
    for name in ("min_statistic_set", "num_parameters", "effective_batch_size"):
        frame[name] = frame[name].astype("Int64")
    _check_counts(frame, results)
    return frame


def aggregate_convergence(results: Results) -> pd.DataFrame:
    """Return one row a cell and evaluation: where it stands and the validation metrics there.

    Only completed runs enter, so that a curve never jumps because a run left it; ``_n`` is
    the number of finite values at the point.
    """
    columns = ["evaluation", "samples", "updates", "epoch"]
    history = results.history[results.history["evaluation"].notna()]
    history = history[history["split"] == "val"]
    metrics = _in_order(history["metric"].unique(), results.metrics)
    # Cell names are never null, so grouping by them loses nothing.
    by_cell = dict(tuple(history.groupby("cell")))
    rows = []
    for cell, runs in _by_cell(results):
        seeds = set(runs.loc[runs["status"] == "completed", "seed"])
        part = by_cell.get(cell, history.iloc[:0])
        part = part[part["seed"].isin(seeds)]
        for evaluation in sorted(part["evaluation"].unique()):
            point = part[part["evaluation"] == evaluation]
            row: dict[str, Any] = {"evaluation": int(evaluation)}
            for name, column in zip(columns[1:], ("samples", "update", "epoch"), strict=True):
                row[name] = _only(point[column], cell, f"{name} at evaluation {evaluation}")
            for metric in metrics:
                values = point.loc[point["metric"] == metric, "value"]
                row |= named_statistics(metric, summarize(values))
            rows.append({**row, "num_completed": len(seeds), "cell": cell})
    if not rows:
        return pd.DataFrame(columns=[*results.factors, *columns, "num_completed", "cell"])
    return _with_factors(results, rows)


def named_statistics(metric: str, summary: Summary) -> dict[str, Any]:
    """Return a summary as columns ``<metric>_<statistic>``."""
    return {f"{metric}_{name}": value for name, value in asdict(summary).items()}


def summary_of(row: pd.Series, metric: str) -> Summary:
    """Return what ``named_statistics`` wrote into a row."""
    n, *numbers = (row[f"{metric}_{name}"] for name in STATISTICS)
    return Summary(int(n), *(float(number) for number in numbers))


def mixed_conditions(runs: pd.DataFrame, factors: Sequence[str] = ()) -> list[str]:
    """Return the conditions that differ among runs, unless they differ by design.

    Args:
        runs: Rows of ``Results.runs``; those without records are passed over.
        factors: Keys that vary by plan; conditions that they set are not reported.
    """
    last_words = {factor.rpartition(".")[2] for factor in factors}
    # Another data set has another fingerprint; that is no fault of the records.
    if any(factor == "data" or factor.startswith("data.") for factor in factors):
        last_words.add("data_fingerprint")
    if "accelerator" in last_words:
        last_words.add("device")
    return [
        name
        for name in CONDITIONS
        if name not in last_words and runs[name].dropna().astype(str).nunique() > 1
    ]


def _by_cell(results: Results) -> Iterable[tuple[str, pd.DataFrame]]:
    """Yield every planned cell with its runs; grouping by factors would drop null values."""
    for cell in results.cells["cell"]:
        yield cell, results.runs[results.runs["cell"] == cell]


def _with_factors(results: Results, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame whose first columns are the factors of their cell."""
    frame = pd.DataFrame(list(rows))
    by_cell = results.cells.set_index("cell")
    for position, name in enumerate(results.factors):
        values = [by_cell.at[cell, name] for cell in frame["cell"]]
        frame.insert(position, name, pd.Series(values, dtype=object))
    leaking = [bool(by_cell.at[cell, "is_leaking"]) for cell in frame["cell"]]
    frame.insert(list(frame.columns).index("cell"), "is_leaking", leaking)
    return frame


def _only(values: pd.Series, cell: str, name: str) -> Any:
    """Return the one value that all runs of a cell share, or None when there is none."""
    distinct = values.unique()
    if len(distinct) > 1:
        found = ", ".join(str(value) for value in distinct)
        raise UserError(cell, f"{name} of {found}", "one value for all its seeds")
    return distinct[0] if len(distinct) else None


def _in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Return names in the order of the tables, unknown ones last."""
    rank = {name: position for position, name in enumerate(order)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def _check_counts(frame: pd.DataFrame, results: Results) -> None:
    """Stop unless every planned run is counted once and under one status."""
    statuses = sum(int(frame[f"num_{status}"].sum()) for status in STATUSES)
    if not int(frame["num_seeds"].sum()) == statuses == len(results.runs):
        raise AssertionError("cells do not account for every planned run")
