"""Test error against the micro-batch: the figure of Wu and He (2018)."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normexp.analysis.aggregate import aggregate_cells, named_statistics, summary_of
from normexp.analysis.display import choose_score, is_percent, metric_label, show_value
from normexp.analysis.figures._layout import (
    arm_looks,
    name_arms,
    panel_factors,
    score_name,
    score_scale,
    split_panels,
)
from normexp.analysis.figures._panels import crossed_lines, draw_crosses, draw_panels, label_axes
from normexp.analysis.figures._registry import FIGURES, FigureCard, NotApplicable
from normexp.analysis.figures._scales import set_log2_axis, set_score_axis, shift_of
from normexp.analysis.figures._style import Look
from normexp.analysis.load import Results

COUNTS = ("num_seeds", "num_completed", "num_diverged", "num_failed", "num_interrupted")


def frame(results: Results) -> pd.DataFrame:
    """Return one row a cell: arm, panel, micro-batch, error and what became of its runs.

    Raises:
        NotApplicable: If the micro-batch does not vary.
    """
    if results.cells["micro_batch_size"].map(show_value).nunique() < 2:
        raise NotApplicable("micro_batch_size does not vary")
    cells = aggregate_cells(results)
    known = results.cells.set_index("cell").loc[cells["cell"]]
    cells["norm"] = pd.Series(known["norm"].tolist(), dtype=object)
    if not cells["num_completed"].sum() and not cells["num_diverged"].sum():
        raise NotApplicable("no run has ended yet")
    score = choose_score(results.metrics, "test")
    factors = results.factors
    open_factors = panel_factors(cells, factors, ["micro_batch_size"])
    arms = name_arms(cells, factors, ["micro_batch_size", *open_factors])
    panels = split_panels(cells, open_factors).assign(arm=arms)
    rows = []
    for _, row in panels.iterrows():
        summary = score.convert(summary_of(row, score.metric))
        rows.append(
            {
                "panel_row": row["panel_row"],
                "panel_column": row["panel_column"],
                "norm": row["norm"],
                "arm": row["arm"],
                "micro_batch_size": int(row["micro_batch_size"]),
                **named_statistics(score.name, summary),
                **{name: int(row[name]) for name in COUNTS},
                "cell": row["cell"],
            }
        )
    return pd.DataFrame(rows)


@FIGURES.register(
    "micro_batch",
    FigureCard(
        frame=frame,
        title="Test error against the micro-batch",
        caption=(
            "Mean over the completed runs of each cell; bars are the 95% interval of the mean "
            "(Student's t). A cross at the top counts diverged runs of all runs of the cell: they "
            "are in no mean. The arms of one micro-batch are set apart sideways by a little."
        ),
    ),
)
def plot(data: pd.DataFrame) -> Figure:
    """Return the figure of a frame: one line an arm, one panel for each other setting."""
    name = score_name(data)
    scale = score_scale(name)
    looks = arm_looks(data)
    crossed = crossed_lines(data, "arm")
    panels = draw_panels(data, looks, panel_height_in=1.9, has_crosses=bool(crossed))
    sizes = data["micro_batch_size"].tolist()
    shifts = {arm: shift_of(i, len(looks), sizes) for i, arm in enumerate(looks)}
    for (row, column), axes in panels.axes.items():
        part = data[(data["panel_row"] == row) & (data["panel_column"] == column)]
        for arm, look in looks.items():
            draw_arm(axes, part[part["arm"] == arm], name, scale, shifts[arm], look)
        set_log2_axis(axes, sizes)
    draw_crosses(
        panels,
        data,
        lambda row: (
            row["micro_batch_size"] * shifts[row["arm"]],
            f"{row['num_diverged']}/{row['num_seeds']}",
        ),
        looks,
        "arm",
    )
    scale_words = set_score_axis(
        panels,
        data[f"{name}_mean"] * scale,
        is_percent=is_percent(name),
        num_cross_rows=len(crossed),
    )
    label_axes(panels, "micro-batch (samples)", metric_label(name) + scale_words)
    return panels.figure


def draw_arm(
    axes: Axes, part: pd.DataFrame, name: str, scale: float, shift: float, look: Look
) -> None:
    """Draw one line with its bars."""
    ordered = part.sort_values("micro_batch_size")
    mean = ordered[f"{name}_mean"] * scale
    below = (mean - ordered[f"{name}_ci95_low"] * scale).fillna(0.0)
    above = (ordered[f"{name}_ci95_high"] * scale - mean).fillna(0.0)
    x = ordered["micro_batch_size"] * shift
    axes.errorbar(x, mean, yerr=[below, above], elinewidth=0.9, **look.line())
