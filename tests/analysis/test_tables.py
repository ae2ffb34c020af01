from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results
from normexp.analysis.render import render_csv, render_latex, render_markdown
from normexp.analysis.tables import build_cells_table, build_tables, write_tables

Make = Callable[..., ExperimentFolder]

# 92 +- 4.302653 x 2 / sqrt(3) = 92 +- 4.97; three equal values have no spread at all.
GOLDEN = """\
| norm       | M   | n   | test accuracy (%): mean [95% t] | std (n-1) | notes |
|------------|-----|-----|---------------------------------|-----------|-------|
| batch_norm | 32  | 3   | 92.00 [87.03, 96.97]            | 2.00      |       |
| group_norm | 128 | 3   | 80.00 [80.00, 80.00]            | 0.00      |       |
"""


def test_golden_main_table(two_norms: ExperimentFolder) -> None:
    assert render_markdown(build_cells_table(load_results(two_norms.path))) == GOLDEN


def test_columns_are_factors_then_metric_and_statistic(two_norms: ExperimentFolder) -> None:
    header = render_csv(build_cells_table(load_results(two_norms.path)).frame).splitlines()[0]
    names = header.split(",")
    assert names[0] == "norm"
    wanted = {f"test/accuracy_{s}" for s in ("n", "mean", "std", "ci95_low", "ci95_high")}
    assert wanted | {"num_seeds", "min_statistic_set", "run_ids"} <= set(names)


def test_csv_floats_read_back_as_the_same_floats(two_norms: ExperimentFolder) -> None:
    frame = build_cells_table(load_results(two_norms.path)).frame
    rows = list(csv.DictReader(io.StringIO(render_csv(frame))))
    for column in ("test/accuracy_mean", "test/accuracy_std", "test/accuracy_ci95_low"):
        assert [float(row[column]) for row in rows] == frame[column].tolist()
    assert [row["min_statistic_set"] for row in rows] == ["32", "128"]


def test_null_is_a_word_and_an_absent_number_is_empty(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "norm.num_groups"])
    cell = folder.add_cell("a", {"norm": "no_norm", "norm.num_groups": None}, seeds=[0])
    folder.add_run(cell, 0, 0.5, statistic_set=None)
    table = build_cells_table(load_results(folder.path))
    row = next(csv.DictReader(io.StringIO(render_csv(table.frame))))
    assert row["norm.num_groups"] == "null"
    assert (row["test/accuracy_mean"], row["test/accuracy_std"]) == ("0.5", "")
    assert row["min_statistic_set"] == ""
    assert table.rows == (("no_norm", "null", "-", "1", "50.00 [-]", "-", ""),)


def test_a_cell_that_lost_runs_says_so(make_experiment: Make) -> None:
    folder = make_experiment()
    cell = folder.add_cell("a", {"norm": "batch_norm"}, seeds=[0, 1, 2, 3, 4])
    folder.add_run(cell, 0, 0.5)
    folder.add_run(cell, 1, "Infinity")
    folder.add_run(cell, 2, None, status="diverged")
    folder.add_run(cell, 3, None, status="failed", environment={"torch": "1.0"})
    row = build_cells_table(load_results(folder.path)).rows[0]
    assert row[2] == "1 of 5"
    assert row[-1] == "1 diverged; 1 failed; 1 not run; 1 without a finite value; mixed torch"


def test_a_cell_without_any_result_shows_marks(make_experiment: Make) -> None:
    folder = make_experiment()
    folder.add_cell("a", {"norm": "batch_norm"})
    row = build_cells_table(load_results(folder.path)).rows[0]
    assert row == ("batch_norm", "-", "0 of 3", "-", "-", "3 not run")


def test_losses_are_shown_where_there_is_no_accuracy(make_experiment: Make) -> None:
    folder = make_experiment()
    cell = folder.add_cell("a", {"norm": "batch_norm"})
    for seed in (0, 1, 2):
        folder.add_run(cell, seed, None, metrics={"test/loss": 1.25})
    table = build_cells_table(load_results(folder.path))
    assert table.headers[3] == "test loss (nats): mean [95% t]"
    assert table.rows[0][3] == "1.250 [1.250, 1.250]"


def test_two_seeds_have_an_interval_in_the_csv_alone(make_experiment: Make) -> None:
    folder = make_experiment()
    cell = folder.add_cell("a", {"norm": "batch_norm"}, seeds=[0, 1])
    for seed, accuracy in enumerate((0.4, 0.6)):
        folder.add_run(cell, seed, accuracy, curve=[(400, 1.0, accuracy)])
    tables = {table.name: table for table in build_tables(load_results(folder.path))}
    main = tables["cells"]
    # t of one degree of freedom is 12.7062: 50 +- 12.7062 x 14.142 / sqrt(2) is 50 +- 127.
    assert main.rows[0][3:5] == ("50.00 [-]", "14.14")
    row = next(csv.DictReader(io.StringIO(render_csv(main.frame))))
    assert float(row["test/accuracy_ci95_low"]) == pytest.approx(0.5 - 1.27062, abs=1e-5)
    assert float(row["test/accuracy_ci95_high"]) == pytest.approx(0.5 + 1.27062, abs=1e-5)
    assert "'-' where n < 3" in main.caption
    assert "the CSV file has it" in main.caption
    assert "50.00 [-]" in tables["convergence"].rows[0]


def test_the_same_records_give_the_same_bytes(grid: ExperimentFolder) -> None:
    def written() -> dict[str, bytes]:
        paths = write_tables(build_tables(load_results(grid.path)), grid.path / "tables")
        return {path.name: path.read_bytes() for path in paths}

    first = written()
    assert sorted(first) == sorted(
        f"{name}.{suffix}"
        for name in ("cells", "convergence", "timing", "memory")
        for suffix in ("csv", "md", "tex")
    )
    assert written() == first


def test_latex_rows_have_all_columns_and_nothing_unescaped(grid: ExperimentFolder) -> None:
    for table in build_tables(load_results(grid.path)):
        lines = render_latex(table).splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(r"\begin{tabular}"))
        assert all(line.startswith("% ") for line in lines[:start])
        assert lines[start] == rf"\begin{{tabular}}{{{'l' * len(table.headers)}}}"
        rows = [line for line in lines[start:] if line.endswith(r"\\")]
        assert len(rows) == 1 + len(table.rows)
        for row in rows:
            assert len(re.findall(r"(?<!\\)&", row)) == len(table.headers) - 1
            assert not re.search(r"(?<!\\)[%$#_]", row)
            assert row.count("{") == row.count("}")


@pytest.mark.parametrize("name", ["timing", "memory"])
def test_cost_that_was_not_measured_is_told(two_norms: ExperimentFolder, name: str) -> None:
    tables = {table.name: table for table in build_tables(load_results(two_norms.path))}
    assert tables[name].rows == ()
    assert tables[name].caption.startswith("Cost was not measured")
