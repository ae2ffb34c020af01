"""Test error against the smallest statistic set: does M decide, or the micro-batch?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normexp.analysis.aggregate import aggregate_cells, named_statistics, summary_of
from normexp.analysis.display import (
    UNITS,
    choose_score,
    is_percent,
    metric_label,
    show_value,
)
from normexp.analysis.figures._intervals import (
    MIN_RUNS,
    draw_uncertainty,
    draw_whole,
    final_runs,
    interval_notes,
    shown_bounds,
    shown_values,
    write_runs,
)
from normexp.analysis.figures._layout import (
    add_differences,
    arm_factors,
    describe_arm,
    name_arms,
    score_name,
)
from normexp.analysis.figures._panels import (
    crossed_lines,
    draw_crosses,
    draw_panels,
    label_axes,
)
from normexp.analysis.figures._registry import FIGURES, FigureCard, NotApplicable
from normexp.analysis.figures._scales import (
    ScoreAxis,
    choose_difference_axis,
    choose_score_axis,
    score_label,
    set_log2_axis,
    set_score_axis,
    shift_of,
)
from normexp.analysis.figures._style import Look, level_looks
from normexp.analysis.load import Results
from normexp.analysis.statistics import Summary, compute_welch_difference

FIRST, SECOND = "batch_norm", "group_norm"


def frame(results: Results) -> pd.DataFrame:
    """Return one row a cell, or a pair of cells where batch_norm can be set against group_norm.

    A pair is two cells that differ in the norm alone; M is that of batch_norm.

    Raises:
        NotApplicable: If no norm has cells with two different M.
    """
    cells = aggregate_cells(results)
    known = results.cells.set_index("cell").loc[cells["cell"]]
    for name in ("norm", "micro_batch_size"):
        cells[name] = pd.Series(known[name].tolist(), dtype=object)
    cells = cells[cells["min_statistic_set"].notna()]
    if FIRST in set(cells["norm"]) and SECOND in set(cells["norm"]):
        data = pd.DataFrame(_pairs(results, cells))
    else:
        data = pd.DataFrame(_levels(results, cells))
    if data.empty or data.groupby("panel_column")["min_statistic_set"].nunique().max() < 2:
        raise NotApplicable("the smallest statistic set M does not vary within a norm")
    return data


def score_axis(data: pd.DataFrame) -> ScoreAxis:
    """Return the axis of the score or difference of a frame."""
    name = score_name(data)
    base = name.removesuffix("_difference")
    values, bounds = shown_values(data, name), shown_bounds(data, name)
    crosses = len(crossed_lines(data, "micro_batch_size"))
    percent = is_percent(base)
    if base != name:
        return choose_difference_axis(values, bounds, is_percent=percent, num_cross_rows=crosses)
    means = data[f"{name}_mean"].dropna().to_numpy(dtype=float)
    return choose_score_axis(values, means, bounds, is_percent=percent, num_cross_rows=crosses)


def notes(data: pd.DataFrame) -> list[str]:
    """Return the sentences of the caption that depend on the frame."""
    name = score_name(data)
    found = interval_notes(data, name, score_axis(data))
    if name.endswith("_difference") and (data[f"{name}_n"] < MIN_RUNS).any():
        found.append("A single run of a pair is the difference of its two runs of one seed.")
    return found


@FIGURES.register(
    "statistic_set",
    FigureCard(
        frame=frame,
        title="Error or loss against the smallest statistic set",
        caption=(
            "M is the number of elements that share one mean and variance in the layer where it "
            "is smallest. Bars are 95% intervals: Welch's for a difference of two arms, Student's "
            "t for a mean. Lines join the averages of the points at one M. A cross at the top "
            "counts diverged runs of all runs of the cell or pair: they are in no mean."
        ),
        notes=notes,
    ),
)
def plot(data: pd.DataFrame) -> Figure:
    """Return the figure of a frame: one line a micro-batch, one panel a norm or contrast."""
    name = score_name(data)
    axis = score_axis(data)
    looks = level_looks(sorted(set(data["micro_batch_size"])))
    crossed = crossed_lines(data, "micro_batch_size")
    panels = draw_panels(
        data,
        looks,
        panel_height_in=2.1,
        legend_title="micro-batch (samples)",
        has_crosses=bool(crossed),
    )
    sizes = data["min_statistic_set"].tolist()
    shifts = {size: shift_of(i, len(looks), sizes) for i, size in enumerate(looks)}
    for (_, column), axes in panels.axes.items():
        part = data[data["panel_column"] == column]
        for size, look in looks.items():
            points = part[part["micro_batch_size"] == size]
            draw_line(axes, points, name, axis, shifts[size], look)
        set_log2_axis(axes, sizes)
    draw_crosses(
        panels,
        data,
        lambda row: (
            row["min_statistic_set"] * shifts[row["micro_batch_size"]],
            f"{row['num_diverged']}/{row['num_seeds']}",
        ),
        looks,
        "micro_batch_size",
    )
    set_score_axis(panels, axis)
    if name.endswith("_difference"):
        for axes in panels.axes.values():
            axes.axhline(0.0, color="#666666", linewidth=0.8, zorder=0.5)
    label_axes(panels, "smallest statistic set M (elements)", _label_score(name, axis))
    return panels.figure


def _label_score(name: str, axis: ScoreAxis) -> str:
    """Return the label of the score or difference."""
    base = name.removesuffix("_difference")
    if base == name:
        return score_label(name, axis)
    units = ["percentage points" if is_percent(base) else UNITS[base.rpartition("/")[2]]]
    if axis.kind == "symlog":
        units.append(f"log scale beyond ±{axis.unit:g}")
    words = metric_label(base).partition(" (")[0]
    return f"{words}: {FIRST} - {SECOND}\n({', '.join(units)})"


def draw_line(
    axes: Axes, points: pd.DataFrame, name: str, axis: ScoreAxis, shift: float, look: Look
) -> None:
    """Draw the points of one micro-batch with bars, and a line through their averages."""
    x = points["min_statistic_set"].astype(float) * shift
    mean = points[f"{name}_mean"] * axis.factor
    draw_whole(axes, x, mean, **{**look.line(), "linestyle": "none"})
    draw_uncertainty(axes, x, points, name, look, axis)
    joined = mean.groupby(x).mean().dropna()
    axes.plot(joined.index, joined.to_numpy(), color=look.colour, linestyle=look.dashes)


def _levels(results: Results, cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one row a cell, one panel an arm."""
    score = choose_score(results.metrics, "test")
    runs = final_runs(results, score)
    arms = name_arms(cells, results.factors, ["micro_batch_size"])
    return [
        {
            "panel_row": "",
            "panel_column": arm,
            **_place(row),
            **named_statistics(score.name, score.convert(summary_of(row, score.metric))),
            f"{score.name}_runs": write_runs(runs[row["cell"]]),
            "num_seeds": int(row["num_seeds"]),
            "num_diverged": int(row["num_diverged"]),
            "cell": row["cell"],
        }
        for arm, (_, row) in zip(arms, cells.iterrows(), strict=True)
    ]


def _pairs(results: Results, cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one row a pair of cells that differ in the norm alone, one panel a contrast."""
    score = choose_score(results.metrics, "test")
    arms = arm_factors(results.factors)
    others = [factor for factor in results.factors if factor not in arms]
    runs = final_runs(results, score)
    rows = []
    for _, first in cells[cells["norm"] == FIRST].iterrows():
        key = [show_value(first[factor]) for factor in others]
        for _, second in cells[cells["norm"] == SECOND].iterrows():
            if [show_value(second[factor]) for factor in others] != key:
                continue
            names = [describe_arm(row, results.factors) for row in (first, second)]
            summaries = [score.convert(summary_of(row, score.metric)) for row in (first, second)]
            rows.append(
                {
                    "panel_row": "",
                    "panel_column": _name_contrast(*names),
                    **_place(first),
                    **{factor: first[factor] for factor in others},
                    **_difference(f"{score.name}_difference", *summaries),
                    f"{score.name}_difference_runs": write_runs(
                        _subtract(runs[first["cell"]], runs[second["cell"]])
                    ),
                    "num_seeds": int(first["num_seeds"]) + int(second["num_seeds"]),
                    "num_diverged": int(first["num_diverged"]) + int(second["num_diverged"]),
                    "cell": first["cell"],
                    "cell_subtracted": second["cell"],
                }
            )
    known = pd.DataFrame(rows, columns=["micro_batch_size", *others] if not rows else None)
    named = add_differences(
        known,
        [row["panel_column"] for row in rows],
        [factor for factor in others if factor != "micro_batch_size"],
        ["micro_batch_size"],
    )
    return [{**row, "panel_column": name} for row, name in zip(rows, named, strict=True)]


def _name_contrast(first: str, second: str) -> str:
    """Return the settings of both arms; nothing when the axis label says all."""
    settings = second.removeprefix(f"{SECOND}, ") if second != SECOND else ""
    return settings if first == FIRST else f"{first}, {second}"


def _difference(name: str, first: Summary, second: Summary) -> dict[str, Any]:
    """Return mean and interval of a difference as columns, with both n."""
    welch = compute_welch_difference(first, second)
    return {
        f"{name}_n": welch.n,
        f"{name}_mean": welch.mean,
        f"{name}_sem": welch.std,
        f"{name}_ci95_low": welch.ci95_low,
        f"{name}_ci95_high": welch.ci95_high,
        f"n_{FIRST}": first.n,
        f"n_{SECOND}": second.n,
    }


def _subtract(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """Return the differences of the seeds that both have."""
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def _place(row: pd.Series) -> dict[str, Any]:
    """Return where a cell stands on the axis and which line it is on."""
    return {
        "min_statistic_set": int(row["min_statistic_set"]),
        "micro_batch_size": row["micro_batch_size"],
    }
