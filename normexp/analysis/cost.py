"""Time and memory of each cell, from the pass that measures cost with nothing else running."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pandas as pd

from normexp.analysis._records import MEMORY, OPTIONAL_TIMINGS, TIMINGS
from normexp.analysis.display import show_number, show_spread, show_value
from normexp.analysis.load import Results

MIB = 1024.0**2
# Conditions that differ by what was measured or when, not by how.
UNREMARKABLE = ("measured_at", "foreign_cpu_share")
# Other processes make times longer, not memory larger.
ONLY_OF_TIME = ("is_alone",)
IS_ALONE, FOREIGN_SHARE = "conditions.is_alone", "conditions.foreign_cpu_share"
NOT_MEASURED = "Cost was not measured: no cell has a cost.json."


def aggregate_timing(results: Results) -> pd.DataFrame:
    """Return one row a measured cell: times, what follows from them, and the conditions.

    ``samples_per_s`` is the effective batch over the median update; ``train_s_estimated`` is
    the median update times the updates of a completed run, evaluation not included.
    """
    costs = results.costs
    names = (*TIMINGS, *(name for name in OPTIONAL_TIMINGS if f"{name}_median" in costs))
    columns = [f"{name}_{part}" for name in names for part in ("median", "q25", "q75")]
    rows = []
    for _, cost in costs.iterrows():
        update_s = float(cost["update_ms_median"]) / 1000.0
        batch = cost["effective_batch_size"]
        updates = _updates_of(results, cost["cell"])
        row: dict[str, Any] = {name: cost[name] for name in columns}
        row["samples_per_s"] = math.nan if pd.isna(batch) else int(batch) / update_s
        row["updates"] = updates
        row["train_s_estimated"] = math.nan if updates is None else updates * update_s
        others = ("prediction_batch_size", "effective_batch_size", "norm_kernel")
        row |= {name: cost[name] for name in others}
        row |= {name: cost[name] for name in costs.columns if name.startswith("conditions.")}
        rows.append({**row, "cell": cost["cell"]})
    frame = _with_factors(results, rows)
    for name in ("updates", "prediction_batch_size", "effective_batch_size"):
        if name in frame:
            frame[name] = frame[name].astype("Int64")
    return frame


def aggregate_memory(results: Results) -> pd.DataFrame:
    """Return one row a measured cell: parameters, and bytes by part also in MiB."""
    rows = []
    for _, cost in results.costs.iterrows():
        row: dict[str, Any] = {"num_parameters": cost["num_parameters"]}
        row |= {name: cost[name] for name in MEMORY}
        for name in MEMORY:
            size = cost[name]
            mib = name.replace("_bytes", "_mib")
            row[mib] = math.nan if pd.isna(size) else int(size) / MIB
        row |= {
            name: cost[name]
            for name in results.costs.columns
            if name.removeprefix("conditions.")
            in ("device", "precision", "memory_format", "is_deterministic")
        }
        rows.append(
            {**row, "micro_batch_size_measured": cost["micro_batch_size"]} | {"cell": cost["cell"]}
        )
    frame = _with_factors(results, rows)
    for name in (*MEMORY, "num_parameters", "micro_batch_size_measured"):
        if name in frame:
            frame[name] = frame[name].astype("Int64")
    return frame


def show_timing(row: pd.Series) -> dict[str, str]:
    """Return the readable part of a row of times."""
    folded = {
        f"{name.removesuffix('_ms').replace('_', ' ')} (ms)": show_spread(row, name)
        for name in OPTIONAL_TIMINGS
        if f"{name}_median" in row
    }
    return {
        "forward (ms)": show_spread(row, "forward_ms"),
        "forward+backward (ms)": show_spread(row, "forward_backward_ms"),
        "update (ms)": show_spread(row, "update_ms"),
        "prediction (ms)": show_spread(row, "prediction_ms"),
        **folded,
        "samples/s": show_number(float(f"{row['samples_per_s']:.3g}")),
        "training (s, estimated)": show_number(row["train_s_estimated"], digits=3),
        "norm kernel": row["norm_kernel"] or "-",
        "notes": _describe_company(row),
    }


def show_memory(row: pd.Series) -> dict[str, str]:
    """Return the readable part of a row of memory, in MiB."""
    words = {name: name.removesuffix("_bytes").replace("_", " ") for name in MEMORY}
    shown = {"parameters": show_number(row["num_parameters"])}
    for name, word in words.items():
        mib = row[name.replace("_bytes", "_mib")]
        shown[f"{word} (MiB)"] = show_number(mib, digits=3)
    return shown


def timing_caption(results: Results) -> str:
    """Return how times were taken, with what differs between cells marked."""
    if results.costs.empty:
        return NOT_MEASURED
    sizes = sorted({int(size) for size in results.costs["prediction_batch_size"].dropna()})
    batch = f" of {sizes[0]} samples" if len(sizes) == 1 else ""
    folded = (
        "Folded prediction: the same with every batch norm that can be folded into the layer "
        "beside it. "
        if f"{OPTIONAL_TIMINGS[0]}_median" in results.costs
        else ""
    )
    return (
        "Median [lower, upper quartile] of timed windows, measured apart from training"
        f"{_claim_of_company(results)}. Forward and forward+backward: one micro-batch. Update: all "
        f"its micro-batches and the optimizer's step. Prediction: one batch{batch}, in eval mode. "
        f"{folded}Samples/s: the effective batch over the median update. Training (s, estimated): "
        "what one run would take by its updates alone, that is the median update times the "
        "updates of a completed run, without evaluation and without preparing the data; '-' where "
        f"no run completed. Norm kernel: whether what computes the norms here is one fused kernel "
        "each way or a composite of several; between the two, times compare code as much as "
        f"methods. {conditions_text(results)}"
    )


def memory_caption(results: Results) -> str:
    """Return what the columns of memory mean."""
    if results.costs.empty:
        return NOT_MEASURED
    return (
        "1 MiB is 1024 x 1024 bytes. Saved for backward: bytes that the forward pass of one "
        "micro-batch keeps; '-' where the device does not count. "
        + conditions_text(results, without=ONLY_OF_TIME)
    )


def warn_of_company(results: Results) -> str:
    """Return a warning if times were measured beside other processes, empty if not."""
    rows = [row for _, row in results.costs.iterrows() if _describe_company(row)]
    if not rows:
        return ""
    shares = [float(row[FOREIGN_SHARE]) for row in rows if not pd.isna(row.get(FOREIGN_SHARE))]
    used = f" (up to {100 * max(shares):.0f}% of the cores)" if shares else ""
    return (
        f"Time was not measured alone in {len(rows)} of {len(results.costs)} measured cells: other "
        f"processes ran beside it{used}. Times of these cells may be too long; the notes in the "
        "table of times mark them."
    )


def conditions_text(results: Results, *, without: Collection[str] = ()) -> str:
    """Return the conditions that all cells share, and a warning for those that differ."""
    names = [name for name in results.costs.columns if name.startswith("conditions.")]
    same, mixed = [], []
    for name in names:
        word = name.removeprefix("conditions.")
        values = results.costs[name].dropna().map(show_value).unique()
        if word in UNREMARKABLE or word in without or not len(values):
            continue
        if len(values) == 1:
            same.append(f"{word} {values[0]}")
        else:
            mixed.append(f"{word} ({' | '.join(sorted(values))})")
    text = f"Conditions: {', '.join(same)}." if same else ""
    if mixed:
        text += f" MIXED, so rows do not compare: {', '.join(mixed)}."
    return text.strip()


def _describe_company(row: pd.Series) -> str:
    """Return the note of a row that was timed beside other processes, empty for the others."""
    is_alone, share = row.get(IS_ALONE), row.get(FOREIGN_SHARE)
    # A record that does not say is not accused.
    if is_alone is None or is_alone:
        return ""
    used = "other processes used"
    if pd.isna(share):
        return f"not alone: how much {used} is not known"
    return f"not alone: {used} {100 * float(share):.0f}% of the cores"


def _claim_of_company(results: Results) -> str:
    """Return what can be said of all rows on other processes beside the measurement."""
    found = list(results.costs.get(IS_ALONE, [None]))
    if False in found:
        return ", but not always with nothing else running (see the notes)"
    if None in found:
        return "; whether anything else ran beside it is not known"
    shares = [float(share) for share in results.costs.get(FOREIGN_SHARE, ()) if not pd.isna(share)]
    percent = f"{100 * max(shares, default=0.0):.0f}%"
    most = f" (other processes used at most {percent} of the cores)" if shares else ""
    return f" with nothing else running{most}"


def _updates_of(results: Results, cell: str) -> int | None:
    """Return the updates of a completed run of the cell."""
    runs = results.runs
    of_cell = runs[(runs["cell"] == cell) & (runs["status"] == "completed")]
    updates = of_cell["updates"].dropna()
    return int(updates.iloc[0]) if len(updates) else None


def _with_factors(results: Results, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows with the factors of their cell in front, by the order of the plan."""
    by_cell = results.cells.set_index("cell")
    factors = list(results.factors)
    table = [{**{f: by_cell.at[row["cell"], f] for f in factors}, **row} for row in rows]
    names = list(table[0]) if table else [*factors, "cell"]
    columns = {}
    for name in names:
        values = [row[name] for row in table]
        is_text = name in factors or name == "cell" or name.startswith("conditions.")
        columns[name] = pd.Series(values, dtype=object) if is_text else pd.Series(values)
    return pd.DataFrame(columns)
