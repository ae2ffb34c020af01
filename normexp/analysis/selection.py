"""Which level of a tuned factor stands for an arm: chosen on validation, reported on test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from normexp.analysis.aggregate import aggregate_cells
from normexp.analysis.display import show_value
from normexp.analysis.load import Results
from normexp.config.metrics import TARGET_METRICS

EDGE = "at the edge of the grid"
DEFAULT_CHOOSER = "val/accuracy"
# Nothing of the test split may choose: its numbers are for the report.
CHOOSERS = (DEFAULT_CHOOSER, "val/loss")
CAPTION = (
    "The level is chosen on the same seeds that are reported, so the validation number of the "
    "chosen level is optimistic: it was picked for being the best. The test split has no part in "
    "the choice."
)


def select_cells(results: Results) -> pd.DataFrame:
    """Return the best cell of each arm, or no row if the plan selects nothing.

    An arm is what cells share beside the tuned factor. Only cells whose runs all completed can
    be chosen: a level at which runs are lost is no choice, however good the rest. Nothing but
    validation decides; of equal levels the first of the plan is taken.

    Returns:
        The rows of ``aggregate_cells`` with ``num_levels`` tried and ``selection_note``. An arm
        without a cell to choose keeps a row with null for the factor.
    """
    factor, metric = selection_of(results)
    cells = aggregate_cells(results)
    if explain_no_selection(results):
        return cells.iloc[:0].assign(num_levels=[], selection_note=[])
    others = [name for name in results.factors if name != factor]
    arms: dict[tuple[str, ...], list[int]] = {}
    for index, row in cells.iterrows():
        arms.setdefault(tuple(show_value(row[name]) for name in others), []).append(int(str(index)))
    rows = []
    for indices in arms.values():
        tried = cells.loc[indices]
        whole = tried[tried[f"{metric}_n"] == tried["num_seeds"]]
        values: dict[str, Any] = dict.fromkeys(cells.columns, math.nan)
        if whole.empty:
            values |= {factor: None, **{name: tried.iloc[0][name] for name in others}}
            note = f"no {factor} at which every run completed"
        else:
            means = whole[f"{metric}_mean"] * (-1 if TARGET_METRICS[metric] == "down" else 1)
            best = whole.iloc[int(means.to_numpy().argmax())]
            values |= {name: best[name] for name in cells.columns}
            note = EDGE if is_at_edge(best[factor], tried[factor].tolist()) else ""
        rows.append({**values, "num_levels": len(tried), "selection_note": note})
    return pd.DataFrame(
        {name: pd.Series([row[name] for row in rows], dtype=object) for name in rows[0]}
    )


def selection_of(results: Results) -> tuple[str, str]:
    """Return the tuned factor and the metric that chooses, empty if nothing is tuned."""
    select = results.plan.get("select") or {}
    factor = short_factor(str(select.get("factor", "")))
    return factor, str(select.get("metric", DEFAULT_CHOOSER))


def short_factor(key: str) -> str:
    """Return a configuration key as plans name their factors.

    Examples:
        >>> short_factor("model.params.depth"), short_factor("norm.name")
        ('model.depth', 'norm')
    """
    return key.replace(".params.", ".").removesuffix(".name")


def explain_no_selection(results: Results) -> str:
    """Return why no level can be chosen though the plan asks for it, empty if one can."""
    if not results.plan.get("select"):
        return ""
    factor, metric = selection_of(results)
    if factor not in results.factors:
        return f"{factor} does not vary"
    if metric not in CHOOSERS:
        return f"{metric} must not choose, only {' or '.join(CHOOSERS)}"
    return "" if metric in results.metrics else f"no run has {metric}"


def is_at_edge(level: object, levels: Sequence[object]) -> bool:
    """Return whether a numeric level is the smallest or largest tried, so more may be better."""
    numbers = [x for x in levels if isinstance(x, int | float) and not isinstance(x, bool)]
    return len(numbers) > 1 and level in (min(numbers), max(numbers))
