"""Share of the runs that reach the experiment's target, by one factor and arm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normexp.analysis.aggregate import aggregate_cells
from normexp.analysis.display import short_names, show_value
from normexp.analysis.figures._intervals import draw_whole
from normexp.analysis.figures._layout import (
    arm_factors,
    arm_looks,
    describe_panel,
    name_arms,
    panel_factors,
    split_panels,
)
from normexp.analysis.figures._panels import draw_panels, label_axes
from normexp.analysis.figures._registry import FIGURES, FigureCard, NotApplicable
from normexp.analysis.figures._style import Look, level_looks
from normexp.analysis.leaks import mark_name
from normexp.analysis.load import Results
from normexp.analysis.target import describe_target, find_target

# What success is asked against first; else the first factor that is none of the arm.
PREFERRED = ("schedule.warmup_fraction", "model.depth", "optimizer.lr", "micro_batch_size")
COLUMNS = (
    *("num_trials", "num_reached", "success_rate"),
    *("success_rate_ci95_low", "success_rate_ci95_high", "samples_to_target_median"),
)


def frame(results: Results) -> pd.DataFrame:
    """Return one row a cell: panel, line, level on the axis, and how many runs succeeded.

    Raises:
        NotApplicable: If there is no target, or no run has ended.
    """
    if find_target(results) is None:
        raise NotApplicable("the experiment sets no target")
    cells = aggregate_cells(results)
    if not cells["num_trials"].sum():
        raise NotApplicable("no run has ended yet")
    known = results.cells.set_index("cell").loc[cells["cell"]]
    cells["norm"] = pd.Series(known["norm"].tolist(), dtype=object)
    factor = _choose_factor(cells, results.factors)
    along = [factor] if factor else []
    open_factors = panel_factors(cells, results.factors, along)
    lines = arms = name_arms(cells, results.factors, [*along, *open_factors])
    if len(set(arms)) == 1 and open_factors:
        key = "placement" if "placement" in open_factors else open_factors[0]
        open_factors = [name for name in open_factors if name != key]
        lines = [
            mark_name(describe_panel(row, [key]), row["is_leaking"]) for _, row in cells.iterrows()
        ]
    levels = cells[factor].map(show_value) if factor else ""
    panels = split_panels(cells, open_factors).assign(arm=arms, line=lines, level=levels)
    shown = ["panel_row", "panel_column", "norm", "arm", "line", "level", *COLUMNS, "cell"]
    name = short_names(results.factors)[factor] if factor else ""
    target = describe_target(results)
    return panels[shown].assign(factor=name, target=target).reset_index(drop=True)


def notes(data: pd.DataFrame) -> list[str]:
    """Return the sentences of the caption that depend on the frame."""
    return [str(data["target"].iloc[0])]


@FIGURES.register(
    "success",
    FigureCard(
        frame=frame,
        title="Runs that reach the target",
        caption=(
            "Share of the runs that reached the target, of those that ended; bars are Wilson's 95% "
            "interval of the share. Runs that diverged or failed did not reach it; interrupted "
            "and missing runs are not counted. The lines of one level are set apart sideways by a "
            "little."
        ),
        notes=notes,
    ),
)
def plot(data: pd.DataFrame) -> Figure:
    """Return the figure of a frame: one line an arm, one panel for each other setting."""
    is_by_norm = data["line"].equals(data["arm"])
    looks = arm_looks(data) if is_by_norm else level_looks(dict.fromkeys(data["line"]))
    panels = draw_panels(data, looks, panel_height_in=1.6)
    levels = list(dict.fromkeys(data["level"]))
    step = 0.4 / len(looks)
    for (row, column), axes in panels.axes.items():
        part = data[(data["panel_row"] == row) & (data["panel_column"] == column)]
        for i, (line, look) in enumerate(looks.items()):
            shift = step * (i - (len(looks) - 1) / 2)
            _draw_line(axes, part[part["line"] == line], levels, shift, look)
        axes.set_xticks(range(len(levels)), levels)
        axes.set_xlim(-0.5, len(levels) - 0.5)
        axes.set_ylim(0.0, 100.0)
    label_axes(panels, data["factor"].iloc[0].replace("_", " "), "runs that reach the target (%)")
    return panels.figure


def _draw_line(
    axes: Axes, part: pd.DataFrame, levels: Sequence[str], shift: float, look: Look
) -> None:
    """Draw the shares of one line with their intervals."""
    known = part[part["num_trials"] > 0]
    known = known.sort_values("level", key=lambda names: names.map(levels.index))
    x = known["level"].map(levels.index).to_numpy(dtype=float) + shift
    share, low, high = (
        100.0 * known[f"success_rate{end}"].to_numpy(dtype=float)
        for end in ("", "_ci95_low", "_ci95_high")
    )
    draw_whole(axes, x, share, **look.line())
    # Rounding may set an end of Wilson's interval beyond a share of 0 or 1 by some 1e-14.
    reach = np.maximum([share - low, high - share], 0.0)
    axes.errorbar(x, share, yerr=reach, fmt="none", ecolor=look.colour, elinewidth=0.9)


def _choose_factor(cells: pd.DataFrame, factors: Sequence[str]) -> str:
    """Return the factor of the axis, empty if nothing varies beside the arm."""
    varying = [
        name
        for name in factors
        if name not in arm_factors(factors) and cells[name].map(show_value).nunique() > 1
    ]
    return next((name for name in (*PREFERRED, *varying) if name in varying), "")
