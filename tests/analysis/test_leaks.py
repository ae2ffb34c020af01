"""Rows of cells that see later tokens are marked wherever they stand."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder
from rich.console import Console

from normexp.analysis import load_results, print_summary, write_report
from normexp.analysis.figures import FIGURES, NotApplicable, plot_frame, write_figures
from normexp.analysis.leaks import MARK, MEANING
from normexp.analysis.provenance import build_sources_table, list_unfinished
from normexp.analysis.render import render_csv, render_latex, render_markdown
from normexp.analysis.tables import build_cells_table, build_tables

Make = Callable[..., ExperimentFolder]


def leaky(grid: ExperimentFolder) -> ExperimentFolder:
    """The grid, in which all cells of batch_norm leak and one of its runs failed."""
    grid.plan["select"] = {"factor": "micro_batch_size", "metric": "val/accuracy"}
    grid.write_plan()
    for cell in grid.plan["cells"]:
        for seed in (0, 1):
            model = {
                "num_parameters": 5,
                "min_statistic_set": 2 * cell["factors"]["micro_batch_size"],
                "is_leaking": cell["factors"]["norm"] == "batch_norm",
            }
            is_failed = (cell["cell"], seed) == ("batch_norm-3-2", 1)
            grid.add_run(
                cell["cell"],
                seed,
                0.5,
                status="failed" if is_failed else "completed",
                metrics={"val/accuracy": 0.5, "running_statistic_mean_error": 0.1},
                curve=[(400, 1.0, 0.4), (800, 0.5, 0.5)],
                summary={"model": model},
            )
    return grid


def test_every_table_marks_the_rows_and_says_what_it_means(grid: ExperimentFolder) -> None:
    results = load_results(leaky(grid).path)
    tables = build_tables(results)
    names = {"cells", "selection", "running_statistics", "convergence", "timing", "memory"}
    assert {table.name for table in tables} == names
    sources = build_sources_table(results, build_cells_table(results).frame)
    for table in (*tables, list_unfinished(results), sources):
        place = table.headers.index("norm")
        levels = {row[place] for row in table.rows}
        assert f"batch_norm {MARK}" in levels, table.name
        assert levels <= {f"batch_norm {MARK}", "group_norm"}, table.name
        assert MEANING in table.caption, table.name
        for row in csv.DictReader(io.StringIO(render_csv(table.frame))):
            assert row["is_leaking"] == str(row["norm"] == "batch_norm"), table.name
        assert f"batch_norm {MARK}" in render_markdown(table)
        assert rf"batch\_norm {MARK}" in render_latex(table)
        assert MEANING in render_latex(table)


def test_without_a_leak_there_is_no_mark(grid: ExperimentFolder) -> None:
    # Records of earlier versions do not even have the key.
    results = load_results(grid.path)
    for table in build_tables(results):
        assert MARK not in table.caption
        assert MARK not in render_markdown(table)
        assert not table.frame["is_leaking"].any()
        assert table.frame["is_leaking"].dtype == bool
    for figure in write_figures(results, grid.path / "figures"):
        assert MARK not in figure.caption


def test_report_and_console_warn(grid: ExperimentFolder) -> None:
    leaky(grid)
    grid.plan["figures"] = ["micro_batch"]
    grid.write_plan()
    write_report(grid.path)
    text = (grid.path / "REPORT.md").read_text()
    assert f"- **Note.** 4 of 8 cells leak. {MEANING}" in text
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_summary(load_results(grid.path), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "4 of 8 cells leak. (leaks): sees later tokens" in printed
    rows = [line for line in printed.splitlines() if line.strip().startswith("batch_norm")]
    assert len(rows) == 4
    assert all(MARK in row for row in rows)


@pytest.mark.parametrize("name", ["convergence", "micro_batch"])
def test_legends_mark_the_arm(grid: ExperimentFolder, name: str) -> None:
    results = load_results(leaky(grid).path)
    data = FIGURES.get(name, key="figure").card.frame(results)
    legend = plot_frame(name, data).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [f"batch_norm {MARK}", "group_norm"]
    (written,) = write_figures(results, grid.path / "figures", [name])
    assert written.caption.endswith(MEANING)


def test_lines_of_the_only_arm_are_marked(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    for size in (2, 8):
        cell = folder.add_cell(str(size), {"norm": "batch_norm", "micro_batch_size": size}, [0])
        model = {"min_statistic_set": size, "num_parameters": 1, "is_leaking": True}
        folder.add_run(cell, 0, 0.5, curve=[(80, 1.0, 0.5)], summary={"model": model})
    data = FIGURES.get("convergence", key="figure").card.frame(load_results(folder.path))
    assert set(data["line"]) == {f"micro_batch_size=2 {MARK}", f"micro_batch_size=8 {MARK}"}


def test_panels_of_the_statistic_set_are_marked(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    for size in (2, 8):
        cell = folder.add_cell(str(size), {"norm": "batch_norm", "micro_batch_size": size}, [0])
        model = {"min_statistic_set": size, "num_parameters": 1, "is_leaking": True}
        folder.add_run(cell, 0, 0.5, summary={"model": model})
    entry = FIGURES.get("statistic_set", key="figure")
    assert set(entry.card.frame(load_results(folder.path))["panel_column"]) == {
        f"batch_norm {MARK}"
    }
    with pytest.raises(NotApplicable):
        FIGURES.get("initial_gradient", key="figure").card.frame(load_results(folder.path))
