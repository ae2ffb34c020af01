"""The tables of an experiment: full numbers as CSV, readable ones as Markdown and LaTeX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from normexp.analysis import cost, running_statistics, selection, target
from normexp.analysis.aggregate import aggregate_cells, aggregate_convergence, summary_of
from normexp.analysis.display import (
    ABSENT,
    choose_score,
    is_language_model,
    metric_label,
    short_names,
    show_average,
    show_count,
    show_mean,
    show_notes,
    show_number,
    show_std,
    show_value,
)
from normexp.analysis.leaks import mark_table
from normexp.analysis.load import Results
from normexp.analysis.render import Table, render_csv, render_latex, render_markdown
from normexp.analysis.selection import select_cells, selection_of
from normexp.records.store import write_whole

FORMULAS = (
    "Mean over the completed runs with a finite value; std divides by n - 1; brackets hold the "
    "95% interval of the mean by Student's t, '-' where n < 3: the interval of two values is too "
    "wide to say anything (the CSV file has it)."
)


def build_tables(results: Results) -> list[Table]:
    """Return all tables of an experiment in the order of the report."""
    tables = [
        build_cells_table(results),
        build_convergence_table(results),
        cost_table(results, "timing"),
        cost_table(results, "memory"),
    ]
    if running_statistics.recorded_metrics(results):
        tables.insert(1, build_running_statistics_table(results))
    if results.plan.get("select"):
        tables.insert(1, build_selection_table(results))
    return tables


def build_cells_table(results: Results) -> Table:
    """Return the main table: one row a cell."""
    frame = aggregate_cells(results)
    metric = choose_score(results.metrics, "test").metric
    names = short_names(results.factors)
    has_target = target.find_target(results) is not None
    others = _other_scores(results)
    rows = []
    for _, row in frame.iterrows():
        summary = summary_of(row, metric)
        rows.append(
            (
                *(show_value(row[factor]) for factor in results.factors),
                show_number(row["min_statistic_set"]),
                show_count(summary.n, int(row["num_seeds"])),
                show_mean(summary, metric),
                show_std(summary, metric),
                *(show_average(summary_of(row, other), other) for other in others),
                *(target.show_reached(row) if has_target else ()),
                show_notes(row, metric),
            )
        )
    label = metric_label(metric, results.metrics)
    reached = target.HEADERS if has_target else ()
    captions = [FORMULAS, "M: elements in the smallest statistic set of the model."]
    captions += [f"{target.describe_target(results)} {target.CAPTION}"] if has_target else []
    table = Table(
        name="cells",
        title="Result of each cell",
        caption=" ".join(captions),
        frame=frame,
        headers=(
            *(*names.values(), "M", "n", f"{label}: mean [95% t]", "std (n-1)"),
            *(f"{metric_label(other)}: mean" for other in others),
            *(*reached, "notes"),
        ),
        rows=tuple(rows),
    )
    return mark_table(results, table)


def build_selection_table(results: Results) -> Table:
    """Return the best level of the tuned factor for each arm, chosen on validation."""
    frame = select_cells(results)
    factor, chooser = selection_of(results)
    metric = choose_score(results.metrics, "test").metric
    names = short_names(results.factors)
    rows = []
    for _, row in frame.iterrows():
        is_chosen = isinstance(row["cell"], str)
        shown = [
            ABSENT if name == factor and not is_chosen else show_value(row[name])
            for name in results.factors
        ]
        for name in (chooser, metric):
            shown.append(show_mean(summary_of(row, name), name) if is_chosen else ABSENT)
        rows.append((*shown, show_number(row["num_levels"]), row["selection_note"]))
    labels = [f"{metric_label(name, results.metrics)}: mean [95% t]" for name in (chooser, metric)]
    table = Table(
        name="selection",
        title=f"Best {names.get(factor, factor)} of each arm",
        caption=(
            f"Chosen by the mean of {chooser} among the levels at which every run completed; the "
            f"same levels were open to every arm if their numbers agree. {selection.CAPTION} "
            f"{FORMULAS}"
        ),
        frame=frame,
        headers=(*names.values(), *labels, "levels tried", "notes"),
        rows=tuple(rows),
    )
    return mark_table(results, table)


def build_running_statistics_table(results: Results) -> Table:
    """Return the error of running statistics, for an experiment that measured it: a row a cell."""
    frame = running_statistics.aggregate_running_statistics(results)
    metrics = running_statistics.recorded_metrics(results)
    show = functools.partial(running_statistics.show_running_statistics, metrics=metrics)
    caption = f"{running_statistics.CAPTION} {FORMULAS}"
    return _table_of(
        results, "running_statistics", "Error of running statistics", caption, frame, show
    )


def build_convergence_table(results: Results) -> Table:
    """Return the curves as a table: one row a cell and evaluation."""
    frame = aggregate_convergence(results)
    names = short_names(results.factors)
    metrics = [name.removesuffix("_mean") for name in frame.columns if name.endswith("_mean")]
    rows = []
    for _, row in frame.iterrows():
        summaries = [summary_of(row, metric) for metric in metrics]
        n = min((summary.n for summary in summaries), default=0)
        rows.append(
            (
                *(show_value(row[factor]) for factor in results.factors),
                show_number(row["evaluation"]),
                show_number(row["samples"]),
                show_number(row["updates"]),
                show_count(n, int(row["num_completed"])),
                *map(show_mean, summaries, metrics),
            )
        )
    labels = [f"{metric_label(metric, results.metrics)}: mean [95% t]" for metric in metrics]
    table = Table(
        name="convergence",
        title="Convergence",
        caption=f"{FORMULAS} Evaluation k of all runs stands at the same share of the budget.",
        frame=frame,
        headers=(*names.values(), "k", "samples", "updates", "n", *labels),
        rows=tuple(rows),
    )
    return mark_table(results, table)


def cost_table(results: Results, name: str) -> Table:
    """Return the table of times or of memory, from the pass that measures cost alone."""
    if name == "timing":
        frame, show = cost.aggregate_timing(results), cost.show_timing
        title, caption = "Time", cost.timing_caption(results)
    else:
        frame, show = cost.aggregate_memory(results), cost.show_memory
        title, caption = "Memory", cost.memory_caption(results)
    return _table_of(results, name, title, caption, frame, show)


def write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write every table as ``.csv``, ``.md`` and ``.tex``; files appear whole.

    Args:
        tables: What ``build_tables`` returned.
        folder: Where to write; made if missing.

    Returns:
        The paths written.
    """
    written = []
    for table in tables:
        for suffix, text in (
            ("csv", render_csv(table.frame)),
            ("md", f"{render_markdown(table)}\n{table.caption}\n"),
            ("tex", render_latex(table)),
        ):
            path = folder / f"{table.name}.{suffix}"
            write_whole(path, text)
            written.append(path)
    return written


def _table_of(
    results: Results,
    name: str,
    title: str,
    caption: str,
    frame: pd.DataFrame,
    show: Callable[[pd.Series], dict[str, str]],
) -> Table:
    """Return a table whose readable columns are the factors and what ``show`` makes of a row."""
    names = short_names(results.factors)
    rows = []
    headers: tuple[str, ...] = ()
    for _, row in frame.iterrows():
        shown = show(row)
        headers = tuple(shown)
        rows.append((*(show_value(row[factor]) for factor in results.factors), *shown.values()))
    headers = (*names.values(), *headers)
    return mark_table(results, Table(name, title, caption, frame, headers, tuple(rows)))


def _other_scores(results: Results) -> list[str]:
    """Return what the main table shows beside the loss of a language model."""
    if not is_language_model(results.metrics):
        return []
    return [name for name in ("test/perplexity", "test/bits_per_byte") if name in results.metrics]
