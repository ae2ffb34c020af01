from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results, write_report
from normexp.errors import UserError


@pytest.fixture
def troubled(grid: ExperimentFolder) -> ExperimentFolder:
    """The grid with a diverged, a failed and an interrupted run and one outside the plan."""
    grid.add_run(
        "batch_norm-4-2", 1, None, status="diverged", reason="loss is nan at 7", statistic_set=2
    )
    grid.add_run(
        "group_norm-4-2", 1, None, status="failed", reason="killed <b>&amp;", statistic_set=16
    )
    (grid.run_dir("group_norm-3-2", 1) / "summary.json").unlink()
    grid.run_dir("gone-cccccccc", 3)
    return grid


def only_figures(folder: ExperimentFolder, *names: str) -> None:
    folder.plan["figures"] = list(names)
    folder.write_plan()


def test_the_same_records_give_the_same_files(troubled: ExperimentFolder) -> None:
    only_figures(troubled, "micro_batch")

    def files() -> dict[str, bytes]:
        assert write_report(troubled.path) == troubled.path / "report.html"
        found = [path for path in troubled.path.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(troubled.path)): path.read_bytes()
            for path in found
            if "runs" not in path.parts
        }

    first = files()
    assert {"REPORT.md", "report.html", "tables/cells.csv", "figures/micro_batch.pdf"} <= set(first)
    assert files() == first
    # Files that appear whole leave no temporary ones behind.
    assert not [name for name in first if Path(name).name.startswith(".")]


def test_html_needs_nothing_from_anywhere(troubled: ExperimentFolder) -> None:
    text = write_report(troubled.path).read_text()
    assert text.startswith("<!doctype html>")
    links = re.findall(r"(?:src|href)=\"([^\"]*)\"", text)
    assert links
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"<link|@import|url\(|fetch\(|https?:", re.sub(r"data:[^\"]*", "", text))
    assert text.count("data:image/svg+xml;base64,") == 3


def test_html_escapes_what_records_say(troubled: ExperimentFolder) -> None:
    only_figures(troubled, "micro_batch")
    text = write_report(troubled.path).read_text()
    assert "killed &lt;b&gt;&amp;amp;" in text
    assert "killed <b>" not in text


def test_markdown_tells_what_happened_and_under_which_conditions(
    troubled: ExperimentFolder,
) -> None:
    only_figures(troubled, "micro_batch")
    write_report(troubled.path)
    text = (troubled.path / "REPORT.md").read_text()
    assert "**Question.** Which norm is better?" in text
    assert "`normexp run experiment=grid`" in text
    assert "13 completed, 1 diverged, 1 failed, 1 interrupted" in text
    assert re.search(r"\| batch_norm +\| 4 +\| 2 +\| 1 +\| diverged +\| loss is nan at 7", text)
    assert "stopped before its end, or still running" in text
    assert "gone-cccccccc/seed=3" in text
    assert "Example CPU" in text
    assert "threads a run: 1" in text
    assert "f" * 64 in text
    assert "this is not a timing" in text
    assert "Peak memory: the device does not count it." in text
    run_id = load_results(troubled.path).runs["run_id"].iloc[0]
    assert str(run_id) in text
    for link in re.findall(r"\]\(([^)]*)\)", text):
        assert (troubled.path / link).is_file()


def test_uncommitted_changes_and_mixed_commits_are_told(grid: ExperimentFolder) -> None:
    only_figures(grid, "micro_batch")
    other = {"commit": "b" * 40, "is_dirty": True}
    grid.add_run("batch_norm-4-2", 1, 0.5, statistic_set=2, environment=other)
    write_report(grid.path)
    text = (grid.path / "REPORT.md").read_text()
    assert f"{'b' * 40} with uncommitted changes (1 runs)" in text
    assert "The runs mix conditions (commit, is_dirty)" in text
    assert "uncommitted changes in the code" in text


def test_few_seeds_are_told(grid: ExperimentFolder) -> None:
    only_figures(grid, "micro_batch")
    write_report(grid.path)
    text = (grid.path / "REPORT.md").read_text()
    assert "8 of 8 cells have fewer than 5 completed runs" in text


def test_figures_of_the_plan_and_reasons_of_the_others(two_norms: ExperimentFolder) -> None:
    only_figures(two_norms, "micro_batch")
    write_report(two_norms.path)
    text = (two_norms.path / "REPORT.md").read_text()
    assert "Figure micro_batch: micro_batch_size does not vary." in text
    assert "Time and memory: the cost pass was not run." in text
    assert not (two_norms.path / "figures").exists()


def test_an_experiment_that_has_not_started_has_a_report(two_norms: ExperimentFolder) -> None:
    two_norms.path.joinpath("runs").rename(two_norms.path / "elsewhere")
    text = write_report(two_norms.path).read_text()
    assert "<strong>6</strong> not run" in text


def test_a_folder_that_is_no_experiment_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_cell_without_factors_has_a_report(make_experiment: Callable[..., Any]) -> None:
    folder = make_experiment([])
    folder.add_run(folder.add_cell("a", {}, seeds=[0]), 0, 0.5, curve=[(400, 1.0, 0.5)])
    text = write_report(folder.path).read_text()
    assert text.count("data:image/svg+xml;base64,") == 1


def test_settings_beside_the_factors_are_told(two_norms: ExperimentFolder) -> None:
    for cell in two_norms.plan["cells"]:
        is_group_norm = cell["factors"]["norm"] == "group_norm"
        cell["settings"] = {
            "norm": cell["factors"]["norm"],
            "model.depth": 8,
            "norm.eps": 1e-6 if is_group_norm else 1e-5,
            "budget.samples": None,
            "probes": [],
            **({"norm.num_groups": 4} if is_group_norm else {}),
        }
    two_norms.write_plan()
    write_report(two_norms.path)
    text = (two_norms.path / "REPORT.md").read_text()
    section = text.partition("## Settings beside the factors")[2].partition("##")[0]
    shown = [line for line in section.splitlines() if line]
    assert shown == [
        "- model.depth: 8",
        "- norm.eps: 1e-05 (batch_norm); 1e-06 (group_norm)",
        "- norm.num_groups: 4 (group_norm)",
    ]


def test_a_sweep_of_which_no_run_completed_has_a_report(
    make_experiment: Callable[..., Any],
) -> None:
    folder = make_experiment(["norm"])
    folder.add_cell("batch_norm-1", {"norm": "batch_norm"}, [0])
    folder.add_run(
        "batch_norm-1",
        0,
        None,
        status="interrupted",
        reason="stopped",
        summary={"metrics": {"train/loss": 1.0}},
    )
    folder.write_plan()
    text = write_report(folder.path).read_text()
    assert "interrupted" in text
