"""The tables of an experiment: full numbers as CSV, readable ones as Markdown and LaTeX."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from normexp.analysis import cost
from normexp.analysis.aggregate import aggregate_cells, aggregate_convergence, summary_of
from normexp.analysis.display import (
    choose_score,
    metric_label,
    short_names,
    show_count,
    show_mean,
    show_notes,
    show_number,
    show_std,
    show_value,
)
from normexp.analysis.load import Results
from normexp.records.store import write_whole

FORMULAS = (
    "Mean over the completed runs with a finite value; std divides by n - 1; brackets hold the "
    "95% interval of the mean by Student's t; '-' where n is too small for it."
)


@dataclass(frozen=True)
class Table:
    """A table twice: every number (``frame``) and what fits on a page (``rows``)."""

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def build_tables(results: Results) -> list[Table]:
    """Return all tables of an experiment in the order of the report."""
    return [
        build_cells_table(results),
        build_convergence_table(results),
        cost_table(results, "timing"),
        cost_table(results, "memory"),
    ]


def build_cells_table(results: Results) -> Table:
    """Return the main table: one row a cell."""
    frame = aggregate_cells(results)
    metric = choose_score(results.metrics, "test").metric
    names = short_names(results.factors)
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
                show_notes(row, metric),
            )
        )
    label = metric_label(metric)
    return Table(
        name="cells",
        title="Result of each cell",
        caption=f"{FORMULAS} M: elements in the smallest statistic set of the model.",
        frame=frame,
        headers=(*names.values(), "M", "n", f"{label}: mean [95% t]", "std (n-1)", "notes"),
        rows=tuple(rows),
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
    labels = [f"{metric_label(metric)}: mean [95% t]" for metric in metrics]
    return Table(
        name="convergence",
        title="Convergence",
        caption=f"{FORMULAS} Evaluation k of all runs stands at the same share of the budget.",
        frame=frame,
        headers=(*names.values(), "k", "samples", "updates", "n", *labels),
        rows=tuple(rows),
    )


def cost_table(results: Results, name: str) -> Table:
    """Return the table of times or of memory, from the pass that measures cost alone."""
    if name == "timing":
        frame, show = cost.aggregate_timing(results), cost.show_timing
        title, caption = "Time", cost.timing_caption(results)
    else:
        frame, show = cost.aggregate_memory(results), cost.show_memory
        title, caption = "Memory", cost.memory_caption(results)
    names = short_names(results.factors)
    rows = []
    headers: tuple[str, ...] = ()
    for _, row in frame.iterrows():
        shown = show(row)
        headers = tuple(shown)
        rows.append((*(show_value(row[factor]) for factor in results.factors), *shown.values()))
    return Table(name, title, caption, frame, (*names.values(), *headers), tuple(rows))


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


def render_csv(frame: pd.DataFrame) -> str:
    """Return a frame as CSV with every digit: a float reads back as the same float.

    A null among factor values is written ``null``; a number that does not exist is empty.
    """
    shown = frame.copy()
    for name in shown.columns:
        if shown[name].dtype == object:
            shown[name] = pd.Series(
                [_csv_value(value) for value in frame[name]], index=shown.index, dtype=object
            )
    return shown.to_csv(index=False, lineterminator="\n", float_format=_csv_float)


def render_markdown(table: Table) -> str:
    """Return the readable rows as a Markdown table, columns aligned also as plain text."""
    if not table.rows:
        return "No rows.\n"
    cells = [[text.replace("|", "\\|") for text in row] for row in (table.headers, *table.rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(table.headers))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def render_latex(table: Table) -> str:
    """Return the readable rows as a LaTeX ``tabular`` that needs no package."""
    columns = "l" * max(1, len(table.headers))
    lines = [f"% {line}" for line in (table.title, table.caption)]
    lines += [f"\\begin{{tabular}}{{{columns}}}", "\\hline"]
    if table.rows:
        lines += [_latex_row(table.headers), "\\hline", *map(_latex_row, table.rows)]
    else:
        lines.append("No rows. \\\\")
    return "\n".join([*lines, "\\hline", "\\end{tabular}"]) + "\n"


def escape_latex(text: str) -> str:
    r"""Return text whose every character LaTeX prints as it is.

    Examples:
        >>> print(escape_latex("test_accuracy (%)"))
        test\_accuracy (\%)
    """
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
    }
    return "".join(
        special.get(character, f"\\{character}" if character in "&%$#_{}" else character)
        for character in text
    )


def _latex_row(cells: Sequence[str]) -> str:
    """Return one row; braces keep a leading bracket from being read as an option."""
    return " & ".join(f"{{{escape_latex(cell)}}}" for cell in cells) + " \\\\"


def _csv_float(value: Any) -> str:
    """Return the shortest text that reads back as the same float."""
    return repr(float(value))


def _csv_value(value: object) -> object:
    """Return an object as CSV text: null by name, containers as JSON, NaN empty."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return "" if math.isnan(value) else _csv_float(value)
    if isinstance(value, dict | list | tuple):
        return json.dumps(value)
    return show_value(value) if isinstance(value, bool) else value
