"""Scales of the axes: log2 of sizes, linear or log of scores, and ticks as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from normexp.analysis.figures._panels import Panels

# Means that span more than this are shown on a log axis, else the small ones are one line.
LOG_FROM_RATIO = 8.0


def shift_of(position: int, num_lines: int, sizes: Iterable[float]) -> float:
    """Return the factor that sets a line apart sideways on a log2 axis, by as little as shows."""
    logs = np.log2(sorted(sizes))
    step = min(0.02 * max(1.0, float(logs[-1] - logs[0])), 0.45 / num_lines)
    return float(2.0 ** (step * (position - (num_lines - 1) / 2)))


def set_log2_axis(axes: Axes, sizes: Iterable[float]) -> None:
    """Give an axis of sizes a log2 scale with ticks at the sizes that were run."""
    ticks = sorted({float(size) for size in sizes})
    kept: list[float] = []
    for tick in ticks:
        if not kept or tick / kept[-1] > 1.3:
            kept.append(tick)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    margin = 2.0 ** (0.25 + 0.06 * math.log2(ticks[-1] / ticks[0]))
    axes.set_xlim(ticks[0] / margin, ticks[-1] * margin)


def set_score_axis(
    panels: Panels, means: pd.Series, *, is_percent: bool, num_cross_rows: int = 0
) -> str:
    """Choose a linear or log axis for scores and return the words that tell which.

    Args:
        panels: Where the scores are drawn already.
        means: All means drawn, in the unit of the axis.
        is_percent: Whether nothing can lie above 100.
        num_cross_rows: Rows of crosses that need room at the top.
    """
    known = means.dropna()
    is_log = bool(len(known)) and known.min() > 0 and known.max() / known.min() > LOG_FROM_RATIO
    room = 0.1 * num_cross_rows + (0.04 if num_cross_rows else 0.0)
    for axes in panels.axes.values():
        if is_log:
            low, high = known.min() / 1.6, known.max() * 1.5
            axes.set_yscale("log", nonpositive="clip")
            axes.set_ylim(low, high * (high / low) ** (room / (1 - room)))
            _set_ticks(axes, [t for t in _decades() if not (is_percent and t > 100)])
        else:
            low, high = axes.get_ylim()
            low = max(low, 0.0) if len(known) and known.min() >= 0 else low
            axes.set_ylim(low, high + (high - low) * room / (1 - room))
    return ", log scale" if is_log else ""


def set_difference_axis(
    panels: Panels, means: pd.Series, *, unit: float, limit: float, num_cross_rows: int
) -> str:
    """Choose a linear axis or one that is logarithmic beyond +-unit, and return its words."""
    largest = float(means.abs().max())
    is_log = largest > 10 * unit
    room = 0.1 * num_cross_rows + (0.04 if num_cross_rows else 0.0)
    low, high = next(iter(panels.axes.values())).get_ylim()
    for axes in panels.axes.values():
        axes.axhline(0.0, color="#666666", linewidth=0.8, zorder=0.5)
        if is_log:
            axes.set_yscale("symlog", linthresh=unit, linscale=0.6)
            ticks = [
                sign * t for t in _decades() for sign in (-1, 1) if unit * 0.99 <= t <= limit * 1.01
            ]
            _set_ticks(axes, sorted([*ticks, 0.0]))
            low, high = min(low, -unit), max(high, unit)
            axes.set_ylim(low, high * 10 ** (4 * room))
        else:
            axes.set_ylim(low, high + (high - low) * room / (1 - room))
    return f"log scale beyond ±{unit:g}" if is_log else ""


def _decades() -> list[float]:
    """Return 1, 2 and 5 of every power of ten that a score can have."""
    return [float(f"{digit}e{power}") for power in range(-6, 7) for digit in (1, 2, 5)]


def _set_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Set the ticks of the y axis, written as plain numbers."""
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
