from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results
from normexp.analysis.figures import NotApplicable, plot_frame
from normexp.analysis.figures.micro_batch import frame

Make = Callable[..., ExperimentFolder]


def test_one_row_a_cell_with_error_and_panel(grid: ExperimentFolder) -> None:
    data = frame(load_results(grid.path))
    assert len(data) == 8
    row = data[data["cell"] == "batch_norm-3-8"].iloc[0]
    assert (row["arm"], row["panel_column"], row["panel_row"]) == ("batch_norm", "num_stages=3", "")
    # The smallest set has 8 x 4 elements, and the fixture's error is one over it.
    assert row["test/error_mean"] == pytest.approx(1 / 32, abs=1e-15)
    assert row["test/error_ci95_low"] < 1 / 32 < row["test/error_ci95_high"]


def test_a_factor_that_follows_the_micro_batch_makes_no_panel(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size", "accumulation_steps"])
    for norm in ("batch_norm", "group_norm"):
        for size in (2, 4, 8):
            factors = {"norm": norm, "micro_batch_size": size, "accumulation_steps": 16 // size}
            folder.add_run(folder.add_cell(f"{norm}-{size}", factors, seeds=[0]), 0, 0.5)
    data = frame(load_results(folder.path))
    assert set(data["panel_column"]) == {""}


def test_settings_of_one_norm_are_arms_and_null_is_kept(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "norm.num_groups", "micro_batch_size"])
    for norm, groups in (("batch_norm", None), ("group_norm", 2), ("group_norm", 4)):
        for size in (2, 8):
            factors = {"norm": norm, "norm.num_groups": groups, "micro_batch_size": size}
            cell = folder.add_cell(f"{norm}-{groups}-{size}", factors, seeds=[0])
            folder.add_run(cell, 0, 0.5)
    data = frame(load_results(folder.path))
    assert list(dict.fromkeys(data["arm"])) == [
        "batch_norm",
        "group_norm, num_groups=2",
        "group_norm, num_groups=4",
    ]
    assert len(plot_frame("micro_batch", data).axes) == 1


def test_diverged_runs_are_crosses_with_their_count(grid: ExperimentFolder) -> None:
    for seed in (0, 1):
        grid.add_run("batch_norm-4-2", seed, None, status="diverged", statistic_set=2)
    data = frame(load_results(grid.path))
    row = data[data["cell"] == "batch_norm-4-2"].iloc[0]
    assert (row["num_diverged"], row["num_completed"]) == (2, 0)
    assert math.isnan(row["test/error_mean"])
    figure = plot_frame("micro_batch", data)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["2/2"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "batch_norm",
        "group_norm",
        "diverged runs",
    ]


def test_ticks_stand_at_the_sizes_that_were_run(grid: ExperimentFolder) -> None:
    figure = plot_frame("micro_batch", frame(load_results(grid.path)))
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert list(axes.get_xticks()) == [2.0, 8.0]


def test_one_size_is_no_figure_also_when_the_plan_names_it(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    folder.add_run(folder.add_cell("a", {"norm": "batch_norm", "micro_batch_size": 8}), 0, 0.5)
    with pytest.raises(NotApplicable, match="micro_batch_size does not vary"):
        frame(load_results(folder.path))
