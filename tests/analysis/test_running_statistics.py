from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results, write_report
from normexp.analysis.render import Table
from normexp.analysis.tables import build_tables

Make = Callable[..., ExperimentFolder]


@pytest.fixture
def probed(make_experiment: Make) -> ExperimentFolder:
    """Errors .1 .2 .3 of batch_norm, three times that in the worst layer; group_norm has none."""
    folder = make_experiment(figures=["micro_batch"])
    batch = folder.add_cell("batch_norm-a", {"norm": "batch_norm"})
    group = folder.add_cell("group_norm-a", {"norm": "group_norm"})
    for seed, error in enumerate((0.1, 0.2, 0.3)):
        folder.add_run(batch, seed, 0.9, metrics=errors(error))
        folder.add_run(group, seed, 0.9)
    return folder


def errors(error: float | str) -> dict[str, float | str]:
    worst = error if isinstance(error, str) else 3 * error
    return {
        "running_statistic_mean_error": error,
        "running_statistic_mean_error_max": worst,
        "running_statistic_var_ratio_error": 0.5,
        "running_statistic_var_ratio_error_max": 0.75,
    }


def table_of(folder: ExperimentFolder) -> Table:
    tables = build_tables(load_results(folder.path))
    return next(table for table in tables if table.name == "running_statistics")


def test_errors_by_hand(probed: ExperimentFolder) -> None:
    table = table_of(probed)
    assert table.headers == (
        "norm",
        "n",
        "mean error [95% t]",
        "mean error, worst layer [95% t]",
        "variance-ratio error [95% t]",
        "variance-ratio error, worst layer [95% t]",
        "notes",
    )
    # .2 +- 4.302653 x .1 / sqrt(3) = .2 +- .2484, and three times that.
    assert table.rows == (
        (
            "batch_norm",
            "3",
            "0.2000 [-0.04841, 0.4484]",
            "0.6000 [-0.1452, 1.345]",
            "0.5000 [0.5000, 0.5000]",
            "0.7500 [0.7500, 0.7500]",
            "",
        ),
        ("group_norm", "-", "-", "-", "-", "-", "no value"),
    )


def test_without_the_probe_there_is_no_table(two_norms: ExperimentFolder) -> None:
    names = [table.name for table in build_tables(load_results(two_norms.path))]
    assert "running_statistics" not in names


def test_lost_runs_are_told(probed: ExperimentFolder) -> None:
    probed.add_run("batch_norm-a", 1, 0.9, metrics=errors("Infinity"))
    probed.add_run("batch_norm-a", 2, None, status="diverged")
    probed.add_run("group_norm-a", 2, None, status="diverged")
    batch, group = table_of(probed).rows
    assert batch[1:3] == ("1 of 3", "0.1000 [-]")
    assert batch[-1] == "1 diverged; 1 without a finite value"
    assert group[-1] == "no value; 1 diverged"


def test_a_cell_that_has_not_run_has_not_lost_its_norm(probed: ExperimentFolder) -> None:
    probed.add_cell("other_norm-a", {"norm": "other_norm"})
    row = table_of(probed).rows[-1]
    assert row == ("other_norm", "0 of 3", "-", "-", "-", "-", "3 not run")


def test_both_reports_show_it_with_its_definition(probed: ExperimentFolder) -> None:
    write_report(probed.path)
    for name in ("REPORT.md", "report.html"):
        text = (probed.path / name).read_text()
        assert "Error of running statistics" in text
        assert "0.2000 [-0.04841, 0.4484]" in text
        assert "(running mean - mean)^2 / (variance + eps)" in text
        assert "a factor of about 1.1, up or down" in text
    for suffix in ("md", "tex"):
        assert (probed.path / "tables" / f"running_statistics.{suffix}").is_file()
    text = (probed.path / "tables" / "running_statistics.csv").read_text()
    row = next(csv.DictReader(io.StringIO(text)))
    assert float(row["running_statistic_mean_error_mean"]) == pytest.approx(0.2, rel=1e-15)
    assert row["running_statistic_mean_error_n"] == "3"
    assert (row["norm"], row["cell"]) == ("batch_norm", "batch_norm-a")
