"""How far the running statistics of each cell stand from what they stand for, over its runs."""

from __future__ import annotations

import pandas as pd

from normexp.analysis.aggregate import STATISTICS, aggregate_cells, summary_of
from normexp.analysis.display import ABSENT, show_count, show_mean, show_notes
from normexp.analysis.load import STATUSES, Results

# Name in the records, and above its column.
METRICS = {
    "running_statistic_mean_error": "mean error [95% t]",
    "running_statistic_mean_error_max": "mean error, worst layer [95% t]",
    "running_statistic_var_ratio_error": "variance-ratio error [95% t]",
    "running_statistic_var_ratio_error_max": "variance-ratio error, worst layer [95% t]",
}
NO_VALUE = "no value"
CAPTION = (
    "Distance of a layer's running mean and running variance from the mean and (biased) variance "
    "of its population: all that enters the layer when the trained network, in eval mode, sees "
    "the whole training set once, without augmentation. Mean error: sqrt of the mean over "
    "channels of (running mean - mean)^2 / (variance + eps), so 1 is one standard deviation. "
    "Variance-ratio error: mean over channels of |ln((running variance + eps) / (variance + "
    "eps))|, so 0.1 is a factor of about 1.1, up or down. 0 is exact for both. A run counts with "
    "the mean over its layers, or with the largest of its layers (worst layer). "
    f"'{NO_VALUE}': no completed run has a finite one, as with norms that keep no running "
    "statistics."
)


def aggregate_running_statistics(results: Results) -> pd.DataFrame:
    """Return one row a planned cell with the errors that any run has; no column if none has."""
    cells = aggregate_cells(results)
    metrics = recorded_metrics(results)
    counts = ["num_seeds", *(f"num_{status}" for status in STATUSES)]
    names = [f"{metric}_{statistic}" for metric in metrics for statistic in STATISTICS]
    return cells[[*results.factors, *counts, *names, "mixed", "is_leaking", "cell"]]


def recorded_metrics(results: Results) -> list[str]:
    """Return the errors of running statistics that any run has, in table order."""
    return [metric for metric in METRICS if metric in results.metrics]


def show_running_statistics(row: pd.Series, metrics: list[str]) -> dict[str, str]:
    """Return the readable part of a row: n, each error, notes."""
    least = min(metrics, key=lambda metric: int(row[f"{metric}_n"]))
    n, completed = int(row[f"{least}_n"]), int(row["num_completed"])
    count, notes = show_count(n, int(row["num_seeds"])), show_notes(row, least)
    if completed and all(int(row[f"{metric}_n"]) == 0 for metric in metrics):
        # Nothing was lost where there is nothing to measure.
        others = show_notes(pd.Series({**row, f"{least}_n": completed}), least)
        count, notes = ABSENT, "; ".join(filter(None, (NO_VALUE, others)))
    values = {METRICS[metric]: show_mean(summary_of(row, metric), metric) for metric in metrics}
    return {"n": count, **values, "notes": notes}
