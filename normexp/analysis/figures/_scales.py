"""Scales of the axes: log2 of sizes, linear or log of scores, and ticks as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from normexp.analysis.display import metric_label
from normexp.analysis.figures._panels import Panels

Floats = npt.NDArray[np.float64]

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


@dataclass(frozen=True)
class ScoreAxis:
    """The y axis of all panels of a figure, in the unit of its label.

    Attributes:
        kind: ``linear``, ``log``, or ``symlog``: linear within ``unit`` and log beyond.
        low: Lower end.
        high: Where numbers end: intervals are cut here.
        top: Upper end; crosses stand between ``high`` and it.
        factor: From the score to the unit of the axis.
        limit: What the score cannot exceed.
        unit: Half width of the linear part of ``symlog``.
        reason: Sentence for the caption: which scale, and why.
    """

    kind: Literal["linear", "log", "symlog"]
    low: float
    high: float
    top: float
    factor: float
    limit: float
    unit: float
    reason: str


def choose_score_axis(
    values: Floats, means: Floats, bounds: Floats, *, is_percent: bool, num_cross_rows: int
) -> ScoreAxis:
    """Return a linear or log axis whose ends the means and single runs decide.

    Args:
        values: Means and single runs that are drawn.
        means: The means alone.
        bounds: Ends of the intervals.
        is_percent: Whether scores are fractions shown in percent, so none is beyond 0 and 100.
        num_cross_rows: Rows of crosses that need room at the top.
    """
    factor, limit = (100.0, 100.0) if is_percent else (1.0, math.inf)
    values, means, bounds = values * factor, means * factor, bounds * factor
    room = _room(num_cross_rows)
    ratio = means.max() / means.min() if len(means) and means.min() > 0 else math.nan
    if ratio > LOG_FROM_RATIO and values.min() > 0:
        low, high = values.min() / 1.6, min(values.max() * 1.5, limit)
        top = high * (high / low) ** (room / (1 - room))
        reason = f"The vertical axis is logarithmic, as the means span {ratio:.3g}x (more than 8x)."
        return ScoreAxis("log", low, high, top, factor, limit, 1.0, reason)
    low, high = _linear_ends(values, bounds, limit if is_percent else 1.0, None)
    low = max(low, 0.0) if not len(values) or values.min() >= 0 else low
    high = min(high, limit)
    why = "the means span no more than 8x" if ratio <= LOG_FROM_RATIO else "a log axis has no zero"
    reason = f"The vertical axis is linear, as {why}." if len(means) else ""
    top = high + (high - low) * room / (1 - room)
    return ScoreAxis("linear", low, high, top, factor, limit, 1.0, reason)


def choose_difference_axis(
    values: Floats, bounds: Floats, *, is_percent: bool, num_cross_rows: int
) -> ScoreAxis:
    """Return a linear axis of differences, or one that is logarithmic beyond +-unit."""
    # One percentage point, or a tenth of a nat: below it a difference is near none.
    factor, limit, unit = (100.0, 100.0, 1.0) if is_percent else (1.0, math.inf, 0.1)
    values, bounds = np.append(values * factor, 0.0), bounds * factor
    room = _room(num_cross_rows)
    # An interval of a difference is read by whether it holds zero, so it may be far wider.
    reach = max(2.0 * float(np.abs(values).max()), 5 * unit)
    low, high = _linear_ends(values, bounds, unit, reach)
    low, high = max(low, -limit), min(high, limit)
    if np.abs(values).max() > 10 * unit:
        low, high = min(low, -unit), max(high, unit)
        reason = (
            f"The vertical axis is linear within ±{unit:g} and logarithmic beyond, as the largest "
            f"difference is above {10 * unit:g}."
        )
        top = high * 10 ** (4 * room)
        return ScoreAxis("symlog", low, high, top, factor, limit, unit, reason)
    reason = f"The vertical axis is linear, as no difference is above {10 * unit:g}."
    top = high + (high - low) * room / (1 - room)
    return ScoreAxis("linear", low, high, top, factor, limit, unit, reason)


def set_score_axis(panels: Panels, axis: ScoreAxis) -> None:
    """Give all panels an axis; where crosses need room above the limit, it ends below them."""
    for axes in panels.axes.values():
        if axis.kind == "log":
            axes.set_yscale("log", nonpositive="clip")
            _set_ticks(axes, [tick for tick in _decades() if tick <= axis.limit])
        elif axis.kind == "symlog":
            axes.set_yscale("symlog", linthresh=axis.unit, linscale=0.6)
            sizes = [t for t in _decades() if axis.unit * 0.99 <= t <= axis.limit]
            _set_ticks(axes, sorted([*sizes, 0.0, *(-size for size in sizes)]))
        elif axis.top > axis.limit:
            ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(axis.low, axis.high)
            _set_ticks(axes, [tick for tick in ticks if axis.low <= tick <= axis.high])
        axes.set_ylim(axis.low, axis.top)
        if axis.top > axis.limit:
            axes.spines["left"].set_bounds(axis.low, axis.high)


def choose_log_axis(values: Floats, bounds: Floats) -> ScoreAxis:
    """Return a log axis of positive numbers.

    Args:
        values: Means and single runs, of which the positive ones are inside.
        bounds: Ends of the intervals: they widen the axis by a factor of two at most.
    """
    values, bounds = values[values > 0], bounds.ravel()
    low, high = float(values.min()), float(values.max())
    inside = np.clip(bounds[bounds > 0], low / 2.0, high * 2.0)
    low, high = min([low, *inside]) / 1.15, max([high, *inside]) * 1.15
    # What is flat is to look flat: no axis shows less than a factor of four.
    widen = max(1.0, math.sqrt(4.0 * low / high))
    low, high = low / widen, high * widen
    return ScoreAxis("log", low, high, high, 1.0, math.inf, 1.0, "")


def set_log_axis(axes: Axes, axis: ScoreAxis) -> None:
    """Give one panel a log axis of numbers of any size."""
    axes.set_yscale("log", nonpositive="clip")
    digits = (1, 2, 5) if axis.high / axis.low < 100.0 else (1,)
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    step = 1 + len(powers) // 9
    _set_ticks(axes, [float(f"{d}e{p}") for p in powers if p % step == 0 for d in digits])
    axes.set_ylim(axis.low, axis.high)


def score_label(name: str, axis: ScoreAxis) -> str:
    """Return the label of an axis: score, unit, and the scale where it is not linear."""
    return metric_label(name) + (", log scale" if axis.kind == "log" else "")


def _room(num_cross_rows: int) -> float:
    """Return the share of a panel's height that rows of crosses need."""
    return 0.1 * num_cross_rows + 0.04 if num_cross_rows else 0.0


def _linear_ends(
    values: Floats, bounds: Floats, usual: float, reach: float | None
) -> tuple[float, float]:
    """Return the ends of a linear axis.

    Args:
        values: Means and single runs: all are inside.
        bounds: Ends of intervals: they widen the axis by ``reach`` at most.
        usual: Upper end when there is no value at all.
        reach: Half the largest value if None.
    """
    if not len(values):
        return 0.0, usual
    lowest, highest = float(values.min()), float(values.max())
    largest = max(abs(lowest), abs(highest))
    margin = 0.08 * (highest - lowest or largest or usual)
    reach = max(0.5 * largest if reach is None else reach, margin)
    low, high = lowest - margin, highest + margin
    if len(bounds):
        edge = 0.3 * margin
        low = min(low, max(float(bounds.min()) - edge, lowest - reach))
        high = max(high, min(float(bounds.max()) + edge, highest + reach))
    return low, high


def _decades() -> list[float]:
    """Return 1, 2 and 5 of every power of ten that a score can have."""
    return [float(f"{digit}e{power}") for power in range(-6, 7) for digit in (1, 2, 5)]


def _set_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Set the ticks of the y axis, written as plain numbers."""
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
