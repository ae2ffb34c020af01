"""Learning curves against the samples seen."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from normexp.analysis.aggregate import aggregate_convergence, named_statistics, summary_of
from normexp.analysis.display import Score, choose_score, is_percent
from normexp.analysis.figures._intervals import (
    MAX_BANDS,
    curve_runs,
    draw_uncertainty,
    draw_whole,
    interval_notes,
    shown_bounds,
    shown_values,
    write_runs,
)
from normexp.analysis.figures._layout import (
    add_differences,
    arm_looks,
    describe_panel,
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
    set_score_axis,
)
from normexp.analysis.figures._style import Look, level_looks
from normexp.analysis.leaks import mark_name
from normexp.analysis.load import Results


def frame(results: Results) -> pd.DataFrame:
    """Return the points of all curves, and the diverged runs of cells in rows of their own.

    ``kind`` is ``mean`` for a point of a curve (completed runs) or ``diverged`` for the count
    of a cell's diverged runs at the last samples that any of them reached.

    Raises:
        NotApplicable: If no run has a validation curve.
    """
    points = aggregate_convergence(results)
    metrics = [name.removesuffix("_mean") for name in points.columns if name.endswith("_mean")]
    # A curve of losses alone does not tell whether they are of tokens; the final metrics do.
    others = [metric for metric in results.metrics if not metric.startswith("val/")]
    score = choose_score([*metrics, *others], "val")
    if points.empty or score.metric not in metrics:
        raise NotApplicable("no completed run has a validation curve")
    cells = _label_cells(results).set_index("cell")
    runs = curve_runs(results, score)
    rows = []
    for _, point in points.iterrows():
        summary = score.convert(summary_of(point, score.metric))
        rows.append(
            {
                **cells.loc[point["cell"]].to_dict(),
                "kind": "mean",
                "evaluation": int(point["evaluation"]),
                "samples": int(point["samples"]),
                **named_statistics(score.name, summary),
                f"{score.name}_runs": write_runs(
                    runs.get((point["cell"], int(point["evaluation"])), {})
                ),
                "num_completed": int(point["num_completed"]),
                "num_diverged": 0,
                "cell": point["cell"],
            }
        )
    rows += _diverged_rows(results, cells, score)
    order = {cell: place for place, cell in enumerate(results.cells["cell"])}
    data = pd.DataFrame(rows)
    return data.sort_values("cell", key=lambda names: names.map(order), kind="stable").reset_index(
        drop=True
    )


def score_axis(data: pd.DataFrame) -> ScoreAxis:
    """Return the axis of the score of a frame."""
    name = score_name(data)
    return choose_score_axis(
        shown_values(data, name),
        data[f"{name}_mean"].dropna().to_numpy(dtype=float),
        shown_bounds(data, name),
        is_percent=is_percent(name),
        num_cross_rows=len(crossed_lines(data, "line")),
    )


def has_bands(data: pd.DataFrame) -> bool:
    """Return whether so few lines share each panel that their bands can be told apart."""
    means = data[data["kind"] == "mean"]
    lines = means.groupby(["panel_row", "panel_column"])["line"].nunique()
    return bool(lines.max() <= MAX_BANDS)


def notes(data: pd.DataFrame) -> list[str]:
    """Return the sentences of the caption that depend on the frame."""
    marks = (
        "Intervals are bands."
        if has_bands(data)
        else "Intervals are bars, and lines are set apart sideways by a little, as more than "
        f"{MAX_BANDS} share a panel."
    )
    name = score_name(data)
    is_any = len(shown_bounds(data, name)) > 0
    return [*([marks] if is_any else []), *interval_notes(data, name, score_axis(data))]


@FIGURES.register(
    "convergence",
    FigureCard(
        frame=frame,
        title="Convergence",
        caption=(
            "Validation against training samples seen: mean over the completed runs with its 95% "
            "interval (Student's t). A curve stops where a completed run has no finite value. "
            "Crosses stand where diverged runs ended and count them, of all runs of their cell; "
            "they are in no mean."
        ),
        notes=notes,
    ),
)
def plot(data: pd.DataFrame) -> Figure:
    """Return the figure of a frame: one curve an arm, one panel for each other setting."""
    name = score_name(data)
    axis = score_axis(data)
    is_by_norm = data["line"].equals(data["arm"])
    looks = arm_looks(data) if is_by_norm else level_looks(dict.fromkeys(data["line"]))
    crossed = crossed_lines(data, "line")
    panels = draw_panels(data, looks, panel_height_in=1.6, has_crosses=bool(crossed))
    is_band = has_bands(data)
    # Bars of many lines at the same samples would hide each other.
    step = 0.0 if is_band else 0.006 * float(data["samples"].max())
    for (row, column), axes in panels.axes.items():
        part = data[(data["panel_row"] == row) & (data["panel_column"] == column)]
        for i, (line, look) in enumerate(looks.items()):
            shift = step * (i - (len(looks) - 1) / 2)
            draw_curve(axes, part[part["line"] == line], name, axis, look, shift, is_band)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    draw_crosses(
        panels,
        data,
        lambda row: (row["samples"], f"{row['num_diverged']:.0f}/{row['num_seeds']:.0f}"),
        looks,
        "line",
    )
    set_score_axis(panels, axis)
    label_axes(panels, "training samples seen", score_label(name, axis))
    return panels.figure


def draw_curve(
    axes: Axes,
    part: pd.DataFrame,
    name: str,
    axis: ScoreAxis,
    look: Look,
    shift: float,
    is_band: bool,
) -> None:
    """Draw one curve with its band or bars."""
    curve = part[part["kind"] == "mean"].sort_values("evaluation")
    # Going on with fewer runs would show who is left, not how training goes.
    is_whole = (curve[f"{name}_n"] == curve["num_completed"]).cumprod().astype(bool)
    curve = curve[is_whole]
    x = curve["samples"].to_numpy(dtype=float) + shift
    mean = curve[f"{name}_mean"].to_numpy(dtype=float) * axis.factor
    draw_whole(axes, x, mean, **{**look.line(), "markersize": 3})
    draw_uncertainty(axes, x, curve, name, look, axis, is_band=is_band)


def _label_cells(results: Results) -> pd.DataFrame:
    """Return the cells with panel, arm and line; lines follow the micro-batch if arms do not."""
    cells, factors = results.cells, results.factors
    open_factors = panel_factors(cells, factors, [])
    arms = name_arms(cells, factors, open_factors)
    lines = arms
    if len(set(arms)) == 1 and open_factors:
        key = "micro_batch_size" if "micro_batch_size" in open_factors else open_factors[-1]
        open_factors = [factor for factor in open_factors if factor != key]
        named = [
            mark_name(describe_panel(row, [key]), row["is_leaking"]) for _, row in cells.iterrows()
        ]
        rest = [factor for factor in factors if factor not in (key, *open_factors)]
        lines = add_differences(cells, named, rest, open_factors)
    panels = split_panels(cells, open_factors).assign(arm=arms, line=lines)
    return panels[["cell", "panel_row", "panel_column", "norm", "arm", "line"]]


def _diverged_rows(results: Results, cells: pd.DataFrame, score: Score) -> list[dict[str, object]]:
    """Return one row for each cell with diverged runs."""
    rows: list[dict[str, object]] = []
    diverged = results.runs[results.runs["status"] == "diverged"]
    for cell, runs in diverged.groupby("cell", sort=False):
        ends = runs["samples"].dropna()
        rows.append(
            {
                **{str(key): value for key, value in cells.loc[cell].items()},
                "kind": "diverged",
                "samples": int(ends.max()) if len(ends) else 0,
                "num_diverged": len(runs),
                "num_seeds": int((results.runs["cell"] == cell).sum()),
                f"{score.name}_mean": float("nan"),
                "cell": cell,
            }
        )
    return rows
