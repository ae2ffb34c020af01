from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results, write_report
from normexp.analysis.selection import EDGE, is_at_edge, select_cells
from normexp.analysis.tables import build_selection_table

Make = Callable[..., ExperimentFolder]


@pytest.fixture
def tuned(make_experiment: Make) -> ExperimentFolder:
    """Two arms by three rates; val is best at .1 and .3, test at others."""
    select = {"factor": "optimizer.lr", "metric": "val/accuracy"}
    folder = make_experiment(["norm", "optimizer.lr"], select=select)
    add(folder, "no_norm", [(0.03, 0.5, 0.9), (0.1, 0.7, 0.6), (0.3, 0.6, 0.8)])
    add(folder, "batch_norm", [(0.03, 0.5, 0.9), (0.1, 0.6, 0.8), (0.3, 0.7, 0.75)])
    return folder


def add(folder: ExperimentFolder, norm: str, levels: Sequence[tuple[float, float, float]]) -> None:
    for rate, val, test in levels:
        cell = folder.add_cell(f"{norm}-{rate}", {"norm": norm, "optimizer.lr": rate}, [0, 1])
        for seed in (0, 1):
            folder.add_run(cell, seed, test, metrics={"val/accuracy": val})


def test_validation_chooses_and_test_is_reported(tuned: ExperimentFolder) -> None:
    best = select_cells(load_results(tuned.path))
    assert best["norm"].tolist() == ["no_norm", "batch_norm"]
    assert best["optimizer.lr"].tolist() == [0.1, 0.3]
    assert best["test/accuracy_mean"].tolist() == [0.6, 0.75]
    assert best["num_levels"].tolist() == [3, 3]
    assert best["selection_note"].tolist() == ["", EDGE]


def test_a_level_that_lost_a_run_is_no_choice(tuned: ExperimentFolder) -> None:
    tuned.add_run("no_norm-0.1", 1, None, status="diverged")
    best = select_cells(load_results(tuned.path))
    assert best["optimizer.lr"].tolist() == [0.3, 0.3]


def test_an_arm_without_a_whole_level_has_no_choice(tuned: ExperimentFolder) -> None:
    for rate in ("0.03", "0.1", "0.3"):
        tuned.add_run(f"no_norm-{rate}", 1, None, status="failed")
    row = build_selection_table(load_results(tuned.path)).rows[0]
    note = "no optimizer.lr at which every run completed"
    assert row == ("no_norm", "-", "-", "-", "3", note)


def test_of_losses_the_smallest_is_chosen(tuned: ExperimentFolder) -> None:
    tuned.plan["select"]["metric"] = "val/loss"
    tuned.write_plan()
    for rate, loss in (("0.03", 0.3), ("0.1", 0.1), ("0.3", 0.2)):
        for seed in (0, 1):
            tuned.add_run(f"no_norm-{rate}", seed, 0.8, metrics={"val/loss": loss})
    best = select_cells(load_results(tuned.path))
    assert best["optimizer.lr"].tolist()[0] == 0.1


def test_a_plan_that_chooses_on_test_has_no_choice_and_says_so(tuned: ExperimentFolder) -> None:
    tuned.plan |= {"select": {"factor": "optimizer.lr", "metric": "test/loss"}}
    tuned.plan["figures"] = ["micro_batch"]
    tuned.write_plan()
    assert select_cells(load_results(tuned.path)).empty
    write_report(tuned.path)
    text = (tuned.path / "REPORT.md").read_text()
    reason = "test/loss must not choose, only val/accuracy or val/loss"
    assert f"Best level of each arm: {reason}." in text
    assert "## Best lr of each arm" not in text


def test_the_caption_tells_what_the_choice_does_to_the_numbers(tuned: ExperimentFolder) -> None:
    caption = build_selection_table(load_results(tuned.path)).caption
    assert "chosen on the same seeds that are reported" in caption
    assert "validation number of the chosen level is optimistic" in caption
    assert "The test split has no part in the choice." in caption


def test_the_report_has_the_table(tuned: ExperimentFolder) -> None:
    tuned.plan["figures"] = ["micro_batch"]
    tuned.write_plan()
    write_report(tuned.path)
    assert "## Best lr of each arm" in (tuned.path / "REPORT.md").read_text()
    assert (tuned.path / "tables" / "selection.csv").is_file()


def test_a_factor_that_does_not_vary_chooses_nothing(tuned: ExperimentFolder) -> None:
    tuned.plan["select"]["factor"] = "optimizer.weight_decay"
    tuned.write_plan()
    assert build_selection_table(load_results(tuned.path)).rows == ()


def test_only_numbers_have_an_edge() -> None:
    assert is_at_edge(0.1, [0.1, 0.2, 0.3])
    assert not is_at_edge(0.2, [0.1, 0.2, 0.3])
    assert not is_at_edge("b", ["a", "b"])
    assert not is_at_edge(0.1, [0.1])
