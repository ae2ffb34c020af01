"""Panels, axes, marks and legend: the parts that all figures are drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from normexp.analysis.figures._style import COLUMN_IN, PAGE_IN, Look, new_figure

LEGEND_ROW_IN = 0.17
# Rough width of a character of the legend and of a title, for what fits beside what.
CHARACTER_IN = 0.063


@dataclass(frozen=True)
class Panels:
    """A figure with its panels by (row label, column label)."""

    figure: Figure
    axes: dict[tuple[str, str], Axes]
    num_rows: int
    num_columns: int


def draw_panels(
    frame: pd.DataFrame,
    looks: Mapping[Any, Look],
    *,
    panel_height_in: float,
    legend_title: str = "",
    has_crosses: bool = False,
) -> Panels:
    """Return a figure with one panel for each ``panel_row`` and ``panel_column`` of a frame.

    One row of many columns is wrapped. Axes are shared, so panels compare. The legend stands
    above the panels, where no data can be.
    """
    rows, columns = (
        list(dict.fromkeys(frame["panel_row"])),
        list(dict.fromkeys(frame["panel_column"])),
    )
    is_wrapped = len(rows) == 1 and len(columns) > 3
    width = _wrap(len(columns)) if is_wrapped else len(columns)
    height = math.ceil(len(columns) / width) if is_wrapped else len(rows)
    longest = max(len(str(name)) for name in looks)
    is_narrow = width == 1 and len(looks) <= 4 and CHARACTER_IN * longest + 0.5 < COLUMN_IN
    width_in = COLUMN_IN if is_narrow else PAGE_IN if width <= 4 else 1.75 * width
    labels = [str(name) for name in looks] + (["diverged runs"] if has_crosses else [])
    num_in_row = _legend_columns(labels, width_in)
    legend_in = LEGEND_ROW_IN * (math.ceil(len(labels) / num_in_row) + bool(legend_title))
    figure = new_figure(width_in, panel_height_in * height + legend_in + 0.55)
    grid = figure.subplots(height, width, sharex=True, sharey=True, squeeze=False)
    used = set(zip(frame["panel_row"], frame["panel_column"], strict=True))
    axes: dict[tuple[str, str], Axes] = {}
    for place in range(height * width):
        i, j = divmod(place, width)
        at = place if is_wrapped else j
        key = (rows[0] if is_wrapped else rows[i], columns[at] if at < len(columns) else "")
        if at >= len(columns) or key not in used:
            grid[i, j].set_visible(False)
            continue
        axes[key] = grid[i, j]
        if is_wrapped or i == 0:
            grid[i, j].set_title(_wrap_text(key[1], width_in / width))
    for i, label in enumerate([] if is_wrapped or rows == [""] else rows):
        last = max(j for j, column in enumerate(columns) if (label, column) in used)
        _label_row(grid[i, last], _wrap_text(label, panel_height_in))
    _show_outer_ticks(grid)
    _draw_legend(figure, looks, num_in_row, legend_title, has_crosses)
    return Panels(figure, axes, height, width)


def draw_side_by_side(
    num_panels: int, looks: Mapping[Any, Look], *, panel_height_in: float
) -> tuple[Figure, list[Axes]]:
    """Return a figure whose panels have axes of their own, with one legend above them.

    Args:
        num_panels: Panels, one or two.
        looks: Looks by the text of the legend.
        panel_height_in: Height of the panels in inches.
    """
    longest = CHARACTER_IN * max(len(str(name)) for name in looks) + 0.5
    width_in = COLUMN_IN if num_panels == 1 and longest < COLUMN_IN else PAGE_IN
    num_in_row = _legend_columns([str(name) for name in looks], width_in)
    legend_in = LEGEND_ROW_IN * math.ceil(len(looks) / num_in_row)
    figure = new_figure(width_in, panel_height_in + legend_in + 0.3)
    axes = figure.subplots(1, num_panels, squeeze=False)
    _draw_legend(figure, looks, num_in_row, "", has_crosses=False)
    return figure, list(axes[0])


def label_axes(panels: Panels, x: str, y: str) -> None:
    """Write the axis labels once for all panels, beside the axes where there is one."""
    first = next(iter(panels.axes.values()))
    if panels.num_rows == 1:
        first.set_ylabel(y)
    else:
        panels.figure.supylabel(y, fontsize=8)
    if panels.num_columns == 1:
        list(panels.axes.values())[-1].set_xlabel(x)
    else:
        panels.figure.supxlabel(x, fontsize=8)


def draw_crosses(
    panels: Panels,
    frame: pd.DataFrame,
    place: Callable[[pd.Series], tuple[float, str]],
    looks: Mapping[Any, Look],
    line: str,
) -> None:
    """Mark diverged runs by a cross at the top of their panel, one row of crosses a line.

    Args:
        panels: The figure.
        frame: Rows with ``panel_row``, ``panel_column``, ``num_diverged`` and the column ``line``.
        place: Returns position on the x axis and text of a row's cross.
        looks: Looks by line.
        line: Name of the column that tells lines apart.
    """
    positions = {name: position for position, name in enumerate(crossed_lines(frame, line))}
    for _, row in frame[frame["num_diverged"] > 0].iterrows():
        axes = panels.axes[row["panel_row"], row["panel_column"]]
        x, text = place(row)
        y = 0.95 - 0.09 * positions[row[line]]
        where = axes.get_xaxis_transform()
        colour = looks[row[line]].colour
        axes.plot([x], [y], "x", color=colour, transform=where, markeredgewidth=1.6)
        axes.annotate(
            text,
            (x, y),
            xycoords=where,
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
            color=colour,
        )


def crossed_lines(frame: pd.DataFrame, line: str) -> list[Any]:
    """Return the lines that have diverged runs, in the order of the frame."""
    return list(dict.fromkeys(frame.loc[frame["num_diverged"] > 0, line]))


def _draw_legend(
    figure: Figure,
    looks: Mapping[Any, Look],
    num_in_row: int,
    title: str,
    has_crosses: bool,
) -> None:
    """Put the legend above the panels."""
    handles = [Line2D([], [], label=str(name), **look.line()) for name, look in looks.items()]
    if has_crosses:
        cross: dict[str, Any] = {"color": "#444444", "marker": "x", "linestyle": "none"}
        handles.append(Line2D([], [], label="diverged runs", **cross))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=num_in_row,
        title=title or None,
        title_fontsize=7.5,
        handlelength=2.8,
        columnspacing=1.4,
    )


def _legend_columns(labels: Sequence[str], width_in: float) -> int:
    """Return how many entries of a legend stand in one row."""
    widths = [CHARACTER_IN * len(label) + 0.5 for label in labels]
    if sum(widths) <= width_in:
        return len(labels)
    return max(1, int(width_in / max(widths)))


def _wrap(num_panels: int) -> int:
    """Return how many panels of one kind stand in one row."""
    return 2 if num_panels == 4 else 3 if num_panels in (5, 6, 9) else 4


def _wrap_text(text: str, width_in: float) -> str:
    """Return a title broken at its commas where it is wider than its panel."""
    return text if len(text) * CHARACTER_IN < width_in - 0.3 else text.replace(", ", ",\n")


def _show_outer_ticks(grid: Any) -> None:
    """Label the ticks of every panel that has an empty place below it or to its left."""
    height, width = grid.shape
    for i in range(height):
        for j in range(width):
            if i + 1 == height or not grid[i + 1, j].get_visible():
                grid[i, j].tick_params(labelbottom=True)
            if j == 0 or not grid[i, j - 1].get_visible():
                grid[i, j].tick_params(labelleft=True)


def _label_row(axes: Axes, text: str) -> None:
    """Write the label of a row of panels at its right end."""
    axes.annotate(
        text,
        (1.0, 0.5),
        xycoords="axes fraction",
        xytext=(5, 0),
        textcoords="offset points",
        rotation=-90,
        ha="left",
        va="center",
    )
