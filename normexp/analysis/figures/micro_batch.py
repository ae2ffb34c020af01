"""Test error or loss against the micro-batch: the figure of Wu and He (2018)."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normexp.analysis.aggregate import aggregate_cells, named_statistics, summary_of
from normexp.analysis.display import choose_score, is_percent, show_value
from normexp.analysis.figures._intervals import (
    draw_uncertainty,
    draw_whole,
    final_runs,
    interval_notes,
    shown_bounds,
    shown_values,
    write_runs,
)
from normexp.analysis.figures._layout import (
    arm_looks,
    name_arms,
    panel_factors,
    score_name,
    split_panels,
)
from normexp.analysis.figures._panels import crossed_lines, draw_crosses, draw_panels, label_axes
from normexp.analysis.figures._registry import FIGURES, FigureCard, NotApplicable
from normexp.analysis.figures._scales import (
    ScoreAxis,
    choose_score_axis,
    score_label,
    set_log2_axis,
    set_score_axis,
    shift_of,
)
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
    runs = final_runs(results, score)
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
                f"{score.name}_runs": write_runs(runs[row["cell"]]),
                **{name: int(row[name]) for name in COUNTS},
                "cell": row["cell"],
            }
        )
    return pd.DataFrame(rows)


def score_axis(data: pd.DataFrame) -> ScoreAxis:
    """Return the axis of the score of a frame."""
    name = score_name(data)
    return choose_score_axis(
        shown_values(data, name),
        data[f"{name}_mean"].dropna().to_numpy(dtype=float),
        shown_bounds(data, name),
        is_percent=is_percent(name),
        num_cross_rows=len(crossed_lines(data, "arm")),
    )


def notes(data: pd.DataFrame) -> list[str]:
    """Return the sentences of the caption that depend on the frame."""
    return interval_notes(data, score_name(data), score_axis(data))


@FIGURES.register(
    "micro_batch",
    FigureCard(
        frame=frame,
        title="Test error or loss against the micro-batch",
        caption=(
            "Mean over the completed runs of each cell; bars are the 95% interval of the mean "
            "(Student's t). A cross at the top counts diverged runs of all runs of the cell: they "
            "are in no mean. The arms of one micro-batch are set apart sideways by a little."
        ),
        notes=notes,
    ),
)
def plot(data: pd.DataFrame) -> Figure:
    """Return the figure of a frame: one line an arm, one panel for each other setting."""
    name = score_name(data)
    axis = score_axis(data)
    looks = arm_looks(data)
    crossed = crossed_lines(data, "arm")
    panels = draw_panels(data, looks, panel_height_in=1.9, has_crosses=bool(crossed))
    sizes = data["micro_batch_size"].tolist()
    shifts = {arm: shift_of(i, len(looks), sizes) for i, arm in enumerate(looks)}
    for (row, column), axes in panels.axes.items():
        part = data[(data["panel_row"] == row) & (data["panel_column"] == column)]
        for arm, look in looks.items():
            draw_arm(axes, part[part["arm"] == arm], name, axis, shifts[arm], look)
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
    set_score_axis(panels, axis)
    label_axes(panels, "micro-batch (samples)", score_label(name, axis))
    return panels.figure


def draw_arm(
    axes: Axes, part: pd.DataFrame, name: str, axis: ScoreAxis, shift: float, look: Look
) -> None:
    """Draw one line with its bars."""
    ordered = part.sort_values("micro_batch_size")
    x = ordered["micro_batch_size"] * shift
    draw_whole(axes, x, ordered[f"{name}_mean"] * axis.factor, **look.line())
    draw_uncertainty(axes, x, ordered, name, look, axis)
