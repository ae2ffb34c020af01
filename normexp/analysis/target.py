"""Which runs reach the target that an experiment set before it ran, and when."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from scipy import stats

from normexp.analysis.display import ABSENT, is_percent, metric_label
from normexp.analysis.load import Results
from normexp.config.metrics import TARGET_METRICS
from normexp.errors import UserError, choices_hint

# What ended, whatever the outcome. Interrupted runs and those not yet started have no outcome.
TRIALS = ("completed", "diverged", "failed")
CAPTION = (
    "Reached: completed runs that are at the target or beyond it at any evaluation, of the runs "
    "that ended; those that diverged or failed did not reach it, those interrupted or not run are "
    "not counted. Brackets: Wilson's 95% interval of the rate, in percent. Samples to target: at "
    "the first evaluation that reached it, the median over the same runs, infinite for one that "
    "did not; 'never' where that median is infinite."
)
HEADERS = ("reached target [95% Wilson] (%)", "samples to target: median")
Place = tuple[float, float]


@dataclass(frozen=True)
class Target:
    """What a run is to reach.

    Attributes:
        metric: A metric of the validation split.
        value: Its value.
    """

    metric: str
    value: float

    def is_reached_by(self, value: float) -> bool:
        """Return whether a value is at the target or beyond it; NaN never is."""
        if TARGET_METRICS[self.metric] == "down":
            return value <= self.value
        return value >= self.value


def find_target(results: Results) -> Target | None:
    """Return the target of the plan; None if it sets none, as plans of earlier versions.

    Raises:
        UserError: If the plan's target is none that can be judged.
    """
    found = results.plan.get("target")
    if not found:
        return None
    metric, value = found.get("metric"), found.get("value")
    where = str(results.directory / "experiment.json")
    if metric not in TARGET_METRICS:
        raise UserError(where, f"target.metric={metric}", choices_hint(metric, TARGET_METRICS))
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(where, f"target.value={value}", "a number is needed")
    return Target(metric, float(value))


def describe_target(results: Results) -> str:
    """Return the target in words, empty if there is none."""
    target = find_target(results)
    if target is None:
        return ""
    words, _, unit = metric_label(target.metric, results.metrics).partition(" (")
    unit = f" {unit.removesuffix(')')}" if unit and not is_percent(target.metric) else ""
    value = f"{100 * target.value:g}%" if is_percent(target.metric) else f"{target.value:g}{unit}"
    side = "below" if TARGET_METRICS[target.metric] == "down" else "above"
    text = (
        f"A run succeeds if it completes and its {words} is at or {side} {value} at any evaluation"
    )
    found = set(results.history["metric"])
    if target.metric in found or not found:
        return f"{text}."
    return f"{text}; no run has {target.metric}."


def count_reached(results: Results) -> dict[str, dict[str, Any]]:
    """Return the columns of each cell that say how many runs reach the target, none without one.

    ``samples_to_target`` and ``updates_to_target`` list the single runs in the order of their
    seeds: ``inf`` did not reach it, ``-`` has not ended.
    """
    target = find_target(results)
    if target is None:
        return {}
    first = _first_reached(results, target)
    found = {}
    for cell, runs in results.runs.groupby("cell", sort=False):
        places: list[Place | None] = []
        for seed, status in zip(runs["seed"], runs["status"], strict=True):
            never = (math.inf, math.inf) if status in TRIALS else None
            is_trained = status == "completed"
            places.append(first.get((cell, int(seed)), never) if is_trained else never)
        found[str(cell)] = _summarize(places)
    return found


def show_reached(row: Mapping[Any, Any] | pd.Series) -> tuple[str, str]:
    """Return (how many reached the target with Wilson's interval, median samples to it)."""
    if not row["num_trials"]:
        return ABSENT, ABSENT
    low, high = (100 * row[f"success_rate_ci95_{end}"] for end in ("low", "high"))
    median = row["samples_to_target_median"]
    return (
        f"{row['num_reached']} of {row['num_trials']} [{low:.0f}, {high:.0f}]",
        f"{median:,.0f}" if math.isfinite(median) else "never",
    )


def _first_reached(results: Results, target: Target) -> dict[tuple[Any, int], Place]:
    """Return (samples, updates) of the first evaluation at the target, by cell and seed."""
    history = results.history
    history = history[history["evaluation"].notna() & (history["metric"] == target.metric)]
    first: dict[tuple[Any, int], Place] = {}
    columns = (history[name] for name in ("cell", "seed", "value", "samples", "update"))
    for cell, seed, value, samples, update in zip(*columns, strict=True):
        if target.is_reached_by(float(value)):
            key, place = (cell, int(seed)), (float(samples), float(update))
            first[key] = min(first.get(key, place), place)
    return first


def _summarize(places: list[Place | None]) -> dict[str, Any]:
    """Return rate, interval and medians of a cell's runs; None has not ended."""
    trials = [place for place in places if place is not None]
    num_reached = sum(math.isfinite(samples) for samples, _ in trials)
    row: dict[str, Any] = {"num_trials": len(trials), "num_reached": num_reached}
    names = ("success_rate", "success_rate_ci95_low", "success_rate_ci95_high")
    row |= dict.fromkeys(names, math.nan)
    if trials:
        interval = stats.binomtest(num_reached, len(trials)).proportion_ci(0.95, method="wilson")
        numbers = (num_reached / len(trials), float(interval.low), float(interval.high))
        row |= dict(zip(names, numbers, strict=True))
    for position, unit in enumerate(("samples", "updates")):
        ended = [place[position] for place in trials]
        row[f"{unit}_to_target_median"] = statistics.median(ended) if ended else math.nan
        row[f"{unit}_to_target"] = " ".join(
            ABSENT if place is None else f"{place[position]:g}" for place in places
        )
    return row
