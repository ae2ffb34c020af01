from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder
from hypothesis import given, settings
from hypothesis import strategies as st

from normexp.analysis import load_results
from normexp.analysis.aggregate import (
    aggregate_cells,
    aggregate_convergence,
    mixed_conditions,
)
from normexp.errors import UserError

Make = Callable[..., ExperimentFolder]
# Half width for n = 3 and std .02: t of 2 degrees of freedom in closed form, 4.302653.
HALF = 0.95 * math.sqrt(2 / (1 - 0.95**2)) * 0.02 / math.sqrt(3)


def test_numbers_by_hand(two_norms: ExperimentFolder) -> None:
    row = aggregate_cells(load_results(two_norms.path)).iloc[0]
    assert (row["num_seeds"], row["num_completed"], row["test/accuracy_n"]) == (3, 3, 3)
    assert row["test/accuracy_mean"] == pytest.approx(0.92, abs=1e-15)
    assert row["test/accuracy_std"] == pytest.approx(0.02, rel=1e-12)
    assert row["test/accuracy_ci95_low"] == pytest.approx(0.92 - HALF, rel=1e-12)
    assert row["test/accuracy_ci95_high"] == pytest.approx(0.92 + HALF, rel=1e-12)
    assert (row["min_statistic_set"], row["num_parameters"]) == (32, 1234)
    assert row["effective_batch_size"] == 8
    assert row["seeds"] == "0 1 2"
    assert len(set(row["run_ids"].split())) == 3


def test_means_are_over_completed_runs_and_the_others_are_counted(make_experiment: Make) -> None:
    folder = make_experiment()
    cell = folder.add_cell("a-1", {"norm": "batch_norm"}, seeds=range(7))  # type: ignore[arg-type]
    folder.add_run(cell, 0, 0.5)
    folder.add_run(cell, 1, 0.7)
    folder.add_run(cell, 2, "NaN")
    # A test score taken after divergence is no result, however good it looks.
    folder.add_run(cell, 3, 0.99, status="diverged")
    folder.add_run(cell, 4, "Infinity", status="failed")
    folder.run_dir(cell, 5)
    row = aggregate_cells(load_results(folder.path)).iloc[0]
    counts = ("seeds", "completed", "diverged", "failed", "interrupted", "not_run")
    assert [row[f"num_{name}"] for name in counts] == [7, 3, 1, 1, 1, 1]
    assert row["test/accuracy_n"] == 2
    assert row["test/accuracy_mean"] == pytest.approx(0.6, abs=1e-15)
    assert row["run_ids"].split()[5:] == ["-", "-"]


def test_null_factors_lose_no_row(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "norm.num_groups"])
    for norm, groups in (("batch_norm", None), ("group_norm", 8), ("no_norm", None)):
        cell = folder.add_cell(norm, {"norm": norm, "norm.num_groups": groups})
        for seed in range(3):
            folder.add_run(cell, seed, 0.5)
    cells = aggregate_cells(load_results(folder.path))
    assert cells["norm"].tolist() == ["batch_norm", "group_norm", "no_norm"]
    assert cells["num_seeds"].sum() == 9


# Writing files takes as long as the disk likes, hence no deadline.
@settings(max_examples=15, deadline=None)
@given(
    statuses=st.lists(
        st.sampled_from(["completed", "diverged", "failed", "interrupted", "folder", "nothing"]),
        min_size=1,
        max_size=6,
    )
)
def test_no_run_is_ever_lost(tmp_path_factory: object, statuses: list[str]) -> None:
    root = tmp_path_factory.mktemp("lost")  # type: ignore[attr-defined]
    folder = ExperimentFolder(root / "example", ["norm"])
    cell = folder.add_cell("a-1", {"norm": None}, seeds=range(len(statuses)))  # type: ignore[arg-type]
    for seed, status in enumerate(statuses):
        if status == "folder":
            folder.run_dir(cell, seed)
        elif status != "nothing":
            folder.add_run(cell, seed, 0.5, status=status)
    row = aggregate_cells(load_results(folder.path)).iloc[0]
    assert row["num_seeds"] == len(statuses)
    assert row["num_completed"] == statuses.count("completed")
    assert row["num_interrupted"] == statuses.count("interrupted") + statuses.count("folder")
    assert row["num_not_run"] == statuses.count("nothing")


def test_two_sizes_in_a_cell_are_refused(two_norms: ExperimentFolder) -> None:
    two_norms.add_run("batch_norm-aaaaaaaa", 2, 0.94, statistic_set=64)
    with pytest.raises(UserError, match="min_statistic_set of 32, 64"):
        aggregate_cells(load_results(two_norms.path))


def test_convergence_by_hand(two_norms: ExperimentFolder) -> None:
    points = aggregate_convergence(load_results(two_norms.path))
    assert points["evaluation"].tolist() == [1, 2, 1, 2]
    assert points["samples"].tolist() == [400, 800, 400, 800]
    assert points["updates"].tolist() == [50, 100, 50, 100]
    assert points["val/accuracy_n"].tolist() == [3] * 4
    assert points["val/accuracy_mean"].tolist() == pytest.approx([0.82, 0.92, 0.7, 0.8], abs=1e-15)
    assert points["val/accuracy_std"].iloc[1] == pytest.approx(0.02, rel=1e-12)


def test_a_run_that_ends_early_moves_no_mean(two_norms: ExperimentFolder) -> None:
    # If it entered while it lasted, the mean would jump where it ends.
    two_norms.add_run("batch_norm-aaaaaaaa", 2, None, status="diverged", curve=[(400, 9.0, 0.0)])
    points = aggregate_convergence(load_results(two_norms.path))
    assert points["val/accuracy_n"].tolist() == [2, 2, 3, 3]
    assert points["val/accuracy_mean"].tolist()[:2] == pytest.approx([0.81, 0.91], abs=1e-15)


def test_a_value_that_was_not_logged_is_not_counted(two_norms: ExperimentFolder) -> None:
    curve = [(400, None, float("nan")), (800, 0.5, 0.94)]
    two_norms.add_run("batch_norm-aaaaaaaa", 2, 0.94, curve=curve)
    points = aggregate_convergence(load_results(two_norms.path))
    assert points["val/accuracy_n"].tolist() == [2, 3, 3, 3]
    assert points["val/loss_n"].tolist() == [2, 3, 3, 3]
    assert points["num_completed"].tolist() == [3] * 4


def test_curves_on_two_grids_are_refused(two_norms: ExperimentFolder) -> None:
    two_norms.add_run("batch_norm-aaaaaaaa", 2, 0.94, curve=[(408, 1.0, 0.5), (800, 0.5, 0.94)])
    with pytest.raises(UserError, match="samples at evaluation 1 of 400, 408"):
        aggregate_convergence(load_results(two_norms.path))


def test_mixed_conditions_are_marked_in_their_cell(two_norms: ExperimentFolder) -> None:
    other = {"commit": "b" * 40, "cpu": "x"}
    two_norms.add_run("group_norm-aaaaaaaa", 0, 0.8, statistic_set=128, environment=other)
    assert aggregate_cells(load_results(two_norms.path))["mixed"].tolist() == ["", "commit cpu"]


def test_conditions_that_vary_by_plan_are_not_mixed(two_norms: ExperimentFolder) -> None:
    two_norms.add_run("group_norm-aaaaaaaa", 0, 0.8, environment={"precision": "bf16-mixed"})
    runs = load_results(two_norms.path).runs
    assert mixed_conditions(runs) == ["precision"]
    assert mixed_conditions(runs, ["norm", "precision"]) == []
