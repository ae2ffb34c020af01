"""Gradient norms before the first update: of the last branch against depth, and by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normexp.analysis.figures._gradients import NAME, frame
from normexp.analysis.figures._intervals import (
    MAX_BANDS,
    MIN_RUNS,
    draw_uncertainty,
    draw_whole,
    shown_bounds,
    shown_values,
)
from normexp.analysis.figures._layout import arm_looks
from normexp.analysis.figures._panels import draw_side_by_side
from normexp.analysis.figures._registry import FIGURES, FigureCard
from normexp.analysis.figures._scales import (
    ScoreAxis,
    choose_log_axis,
    set_log2_axis,
    set_log_axis,
    shift_of,
)
from normexp.analysis.figures._style import Look, level_looks


def notes(data: pd.DataFrame) -> list[str]:
    """Return the sentences of the caption that depend on the frame."""
    found = []
    fitted = data[data["exponent_n"] > 0].drop_duplicates("arm")
    if len(fitted):
        shown = "; ".join(
            f"{arm} {_show_exponent(row)}" for arm, row in fitted.set_index("arm").iterrows()
        )
        found.append(
            "Exponents: slope of the logarithm of the norm over that of the depth by least "
            f"squares for each seed, their mean [95% interval]: {shown}."
        )
    if "block" in set(data["kind"]) and data["depth"].notna().any():
        found.append(f"By block: the models of depth {data['depth'].max()}.")
    lost = data[~(data[f"{NAME}_mean"] > 0)]
    if len(lost):
        arms = ", ".join(dict.fromkeys(lost["arm"]))
        found.append(f"A norm of exactly 0 has no place on a logarithmic axis: {arms}.")
    if any(_is_cut(_positive(data, kind)) for kind in _shown_kinds(data)):
        found.append("A triangle marks an interval that goes on beyond the axis.")
    if (data[f"{NAME}_n"] < MIN_RUNS).any():
        found.append(
            f"Means of fewer than {MIN_RUNS} runs have no interval: small dots are the single runs."
        )
    return found


@FIGURES.register(
    "initial_gradient",
    FigureCard(
        frame=frame,
        title="Gradient before the first update",
        caption=(
            "L2 norm of the gradient of the mean loss over the first training samples, at the "
            "initial weights, in training mode: of the weights that the last branch ends with "
            "against depth (if it varies), and of all parameters of each block. Mean over seeds "
            "with its 95% interval (Student's t); all runs count, however they ended. The axis "
            "of depth and all axes of norms are logarithmic."
        ),
        notes=notes,
    ),
)
def plot(data: pd.DataFrame) -> Figure:
    """Return the figure of a frame: one line an arm."""
    kinds = _shown_kinds(data)
    is_by_norm = data["norm"].nunique() > 1
    looks = arm_looks(data) if is_by_norm else level_looks(dict.fromkeys(data["arm"]))
    figure, panels = draw_side_by_side(len(kinds), _legend(data, looks), panel_height_in=2.3)
    for kind, axes in zip(kinds, panels, strict=True):
        _draw_panel(axes, _positive(data, kind), kind, looks)
    return figure


def _draw_panel(axes: Axes, part: pd.DataFrame, kind: str, looks: Mapping[Any, Look]) -> None:
    """Draw the lines of one panel."""
    places = sorted(set(part[kind].astype(float)))
    axis = _choose_axis(part)
    set_log_axis(axes, axis)
    is_band = len(looks) <= MAX_BANDS
    # Bars of many lines at the same block would hide each other.
    step = 0.0 if is_band else 0.6 / len(looks)
    for i, (arm, look) in enumerate(looks.items()):
        line = part[part["arm"] == arm].sort_values(kind)
        x = line[kind].to_numpy(dtype=float)
        if kind == "depth":
            x = x * shift_of(i, len(looks), places)
        else:
            x = x + step * (i - (len(looks) - 1) / 2)
        draw_whole(axes, x, line[f"{NAME}_mean"], **look.line())
        draw_uncertainty(axes, x, line, NAME, look, axis, is_band=is_band)
    if kind == "depth":
        set_log2_axis(axes, places)
        axes.set_xlabel("depth, log scale")
        axes.set_ylabel("gradient norm of the last\nbranch's weights, log scale")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        depth = part["depth"].max()
        at = "" if pd.isna(depth) else f" (depth {depth})"
        axes.set_xlabel(f"block{at}")
        axes.set_ylabel("gradient norm of the block,\nlog scale")


def _positive(data: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the rows of a panel that a log axis can show."""
    return data[(data["kind"] == kind) & (data[f"{NAME}_mean"] > 0)]


def _choose_axis(part: pd.DataFrame) -> ScoreAxis:
    """Return the axis of the norms of a panel."""
    return choose_log_axis(shown_values(part, NAME), shown_bounds(part, NAME))


def _is_cut(part: pd.DataFrame) -> bool:
    """Return whether an interval goes on beyond the axis of its panel."""
    bounds, axis = shown_bounds(part, NAME), _choose_axis(part)
    return bool((bounds < axis.low).any() or (bounds > axis.high).any())


def _shown_kinds(data: pd.DataFrame) -> list[str]:
    """Return the panels that have something to show: norms against one depth do not."""
    kinds = [kind for kind in ("depth", "block") if len(_positive(data, kind))]
    is_one_depth = _positive(data, "depth")["depth"].nunique() < 2
    return ["block"] if len(kinds) == 2 and is_one_depth else kinds


def _legend(data: pd.DataFrame, looks: Mapping[Any, Look]) -> dict[str, Look]:
    """Return the looks by the text of the legend: arm and fitted exponent of depth."""
    fitted = data[data["exponent_n"] > 0].drop_duplicates("arm")
    exponents = dict(zip(fitted["arm"], fitted["exponent_mean"], strict=True))
    return {
        f"{arm}: depth^{exponents[arm]:.2f}" if arm in exponents else str(arm): look
        for arm, look in looks.items()
    }


def _show_exponent(row: pd.Series) -> str:
    """Return a fitted exponent with its interval, if there are runs enough for one."""
    text = f"{row['exponent_mean']:.2f}"
    if row["exponent_n"] < MIN_RUNS:
        return text
    return f"{text} [{row['exponent_ci95_low']:.2f}, {row['exponent_ci95_high']:.2f}]"
