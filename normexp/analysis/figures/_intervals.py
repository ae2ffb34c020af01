"""Intervals as bars or bands, cut visibly at the axis, and single runs where runs are too few."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.markers import CARETDOWN, CARETUP

from normexp.analysis.display import Score
from normexp.analysis.figures._scales import ScoreAxis
from normexp.analysis.figures._style import Look
from normexp.analysis.load import Results

Floats = npt.NDArray[np.float64]

# With two runs Student's factor is 12.7: the interval says nothing that two dots do not.
MIN_RUNS = 3
# More bands than this in one panel mix to a colour that is nobody's.
MAX_BANDS = 3


def final_runs(results: Results, score: Score) -> dict[str, dict[int, float]]:
    """Return the finite scores of the completed runs by cell and seed, as figures show them."""
    found: dict[str, dict[int, float]] = {cell: {} for cell in results.cells["cell"]}
    completed = results.runs[results.runs["status"] == "completed"]
    for cell, seed, value in zip(
        completed["cell"], completed["seed"], completed[score.metric], strict=True
    ):
        if math.isfinite(value):
            found[cell][int(seed)] = 1.0 - value if score.is_error else float(value)
    return found


def curve_runs(results: Results, score: Score) -> dict[tuple[str, int], dict[int, float]]:
    """Return the same as ``final_runs`` for each cell and evaluation of the curves."""
    ended = results.runs[results.runs["status"] == "completed"]
    completed = set(zip(ended["cell"], ended["seed"].astype(int), strict=True))
    history = results.history
    history = history[history["evaluation"].notna() & (history["metric"] == score.metric)]
    found: dict[tuple[str, int], dict[int, float]] = {}
    columns = (history[name] for name in ("cell", "evaluation", "seed", "value"))
    for cell, evaluation, seed, value in zip(*columns, strict=True):
        if (cell, int(seed)) in completed and not pd.isna(value) and math.isfinite(value):
            runs = found.setdefault((cell, int(evaluation)), {})
            runs[int(seed)] = 1.0 - value if score.is_error else float(value)
    return found


def write_runs(runs: Mapping[int, float]) -> str:
    """Return single runs as one text of a frame, in the order of their seeds."""
    return " ".join(f"{runs[seed]:.12g}" for seed in sorted(runs))


def read_runs(text: object) -> list[float]:
    """Return what ``write_runs`` wrote; nothing where there is no text."""
    return [float(word) for word in text.split()] if isinstance(text, str) else []


def shown_values(data: pd.DataFrame, name: str) -> Floats:
    """Return all means, and the single runs of rows that are too few for an interval."""
    few = data[data[f"{name}_n"] < MIN_RUNS]
    singles = [value for text in few[f"{name}_runs"] for value in read_runs(text)]
    return np.array([*data[f"{name}_mean"].dropna(), *singles], dtype=float)


def shown_bounds(data: pd.DataFrame, name: str) -> Floats:
    """Return both ends of the intervals of a frame, one row an interval."""
    many = data[data[f"{name}_n"] >= MIN_RUNS]
    bounds = many[[f"{name}_ci95_low", f"{name}_ci95_high"]].dropna()
    return bounds.to_numpy(dtype=float)


def draw_whole(axes: Axes, x: Iterable[float], y: Iterable[float], **style: Any) -> None:
    """Draw a line whose marks stay whole at the edge of the axes: a mean of 0 or 100% is there."""
    (line,) = axes.plot(list(x), list(y), clip_on=False, **style)
    # Marks have no room of their own in the layout, else it takes them for labels.
    line.set_in_layout(False)


def draw_uncertainty(
    axes: Axes,
    x: Iterable[float],
    part: pd.DataFrame,
    name: str,
    look: Look,
    axis: ScoreAxis,
    *,
    is_band: bool = False,
) -> None:
    """Draw the interval of each row, a triangle where the axis cuts it, or dots for few runs.

    Args:
        axes: Where to draw.
        x: Position of each row.
        part: Rows of a frame.
        name: Name of the score.
        look: Look of the line that the rows are on.
        axis: The axis of the score, whose limits cut.
        is_band: Whether intervals are one band instead of bars.
    """
    at = np.asarray(list(x), dtype=float)
    bounds = part[[f"{name}_ci95_low", f"{name}_ci95_high"]].to_numpy(dtype=float) * axis.factor
    is_known = (part[f"{name}_n"].to_numpy() >= MIN_RUNS) & np.isfinite(bounds).all(axis=1)
    places, bounds = at[is_known], bounds[is_known]
    low, high = np.clip(bounds, axis.low, axis.high).T
    if is_band and len(places):
        axes.fill_between(places, low, high, color=look.colour, alpha=0.15, linewidth=0)
    elif len(places):
        # The middle is no mean here: bars are cut on either side by themselves.
        middle, half = (low + high) / 2, (high - low) / 2
        axes.errorbar(places, middle, yerr=half, fmt="none", ecolor=look.colour, elinewidth=0.9)
    for end, caret, is_cut in (
        (axis.low, CARETDOWN, bounds[:, 0] < axis.low),
        (axis.high, CARETUP, bounds[:, 1] > axis.high),
    ):
        if is_cut.any():
            cut = places[is_cut]
            axes.plot(
                cut,
                np.full(len(cut), end),
                linestyle="none",
                marker=caret,
                markersize=5,
                color=look.colour,
                markeredgewidth=0,
            )
    _draw_singles(axes, at[part[f"{name}_n"].to_numpy() < MIN_RUNS], part, name, look, axis)


def interval_notes(data: pd.DataFrame, name: str, axis: ScoreAxis) -> list[str]:
    """Return the sentences of the caption about cut intervals and single runs, where any are."""
    bounds = shown_bounds(data, name) * axis.factor
    notes = [axis.reason]
    if (bounds < axis.low).any() or (bounds > axis.high).any():
        notes.append("A triangle marks an interval that goes on beyond the axis.")
    if (data[f"{name}_n"] < MIN_RUNS).any():
        notes.append(
            f"Means of fewer than {MIN_RUNS} runs have no interval: small dots are the single runs."
        )
    return notes


def _draw_singles(
    axes: Axes, at: Floats, part: pd.DataFrame, name: str, look: Look, axis: ScoreAxis
) -> None:
    """Draw the single runs of the rows that are too few for an interval."""
    texts = part.loc[part[f"{name}_n"] < MIN_RUNS, f"{name}_runs"]
    points = [
        (place, value * axis.factor)
        for place, text in zip(at, texts, strict=True)
        for value in read_runs(text)
    ]
    if points:
        x, y = zip(*points, strict=True)
        style: dict[str, Any] = {"marker": "o", "markersize": 2.2, "linestyle": "none"}
        draw_whole(axes, x, y, color=look.colour, alpha=0.7, markeredgewidth=0, **style)
