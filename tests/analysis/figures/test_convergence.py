from __future__ import annotations

from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results
from normexp.analysis.figures import NotApplicable, plot_frame
from normexp.analysis.figures._layout import split_panels
from normexp.analysis.figures.convergence import frame

Make = Callable[..., ExperimentFolder]


def test_points_are_means_with_their_n(two_norms: ExperimentFolder) -> None:
    data = frame(load_results(two_norms.path))
    first = data[data["arm"] == "batch_norm"]
    assert first["samples"].tolist() == [400, 800]
    assert first["val/error_mean"].tolist() == pytest.approx([0.18, 0.08], abs=1e-15)
    assert first["val/error_n"].tolist() == [3, 3]


def test_panels_are_rows_and_columns_of_the_other_factors(grid: ExperimentFolder) -> None:
    data = frame(load_results(grid.path))
    assert set(data["panel_row"]) == {"num_stages=3", "num_stages=4"}
    assert set(data["panel_column"]) == {"micro_batch_size=2", "micro_batch_size=8"}
    assert len(plot_frame("convergence", data).axes) == 4


def test_lines_follow_the_micro_batch_where_the_norm_does_not_vary(
    make_experiment: Make,
) -> None:
    folder = make_experiment(["micro_batch_size"])
    for size in (2, 8):
        cell = folder.add_cell(f"a-{size}", {"micro_batch_size": size}, seeds=[0])
        folder.add_run(cell, 0, 0.5, curve=[(400, 1.0, 0.5)])
    data = frame(load_results(folder.path))
    assert data["line"].tolist() == ["micro_batch_size=2", "micro_batch_size=8"]
    assert len(plot_frame("convergence", data).axes) == 1


def test_a_curve_stops_where_a_completed_run_has_no_value(two_norms: ExperimentFolder) -> None:
    curve = [(400, 1.0, 0.84), (800, 0.5, float("nan"))]
    two_norms.add_run("batch_norm-aaaaaaaa", 2, 0.94, curve=curve)
    data = frame(load_results(two_norms.path))
    assert data["val/error_n"].tolist() == [3, 2, 3, 3]
    line = plot_frame("convergence", data).axes[0].lines[0]
    assert list(line.get_xdata()) == [400.0]


def test_diverged_runs_are_counted_where_they_ended(two_norms: ExperimentFolder) -> None:
    curve = [(400, 9.0, 0.1)]
    two_norms.add_run("batch_norm-aaaaaaaa", 2, None, status="diverged", curve=curve, updates=60)
    data = frame(load_results(two_norms.path))
    cross = data[data["kind"] == "diverged"].iloc[0]
    assert (cross["samples"], cross["num_diverged"]) == (480, 1)
    figure = plot_frame("convergence", data)
    assert [text.get_text() for text in figure.axes[0].texts] == ["1/3"]


def test_without_any_curve_it_does_not_apply(make_experiment: Make) -> None:
    folder = make_experiment()
    folder.add_run(folder.add_cell("a", {"norm": "batch_norm"}, seeds=[0]), 0, 0.5)
    with pytest.raises(NotApplicable, match="no completed run has a validation curve"):
        frame(load_results(folder.path))


def test_a_grid_with_holes_is_a_list_of_panels_that_all_have_names(make_experiment: Make) -> None:
    folder = make_experiment(["model", "model.num_stages"])
    for model, stages in (("mlp", None), ("cifar_resnet", 3), ("cifar_resnet", 4)):
        factors = {"model": model, "model.num_stages": stages}
        cell = folder.add_cell(f"{model}-{stages}", factors, seeds=[0])
        folder.add_run(cell, 0, 0.5, curve=[(400, 1.0, 0.5)])
    data = split_panels(load_results(folder.path).cells, ["model", "model.num_stages"])
    assert set(data["panel_row"]) == {""}
    assert data["panel_column"].tolist() == [
        "model=mlp, num_stages=null",
        "model=cifar_resnet, num_stages=3",
        "model=cifar_resnet, num_stages=4",
    ]


def test_each_row_of_panels_is_named_at_its_last_panel(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "model.num_stages", "micro_batch_size"])
    for norm in ("batch_norm", "group_norm"):
        for stages, size in ((3, 2), (3, 8), (4, 2)):
            factors = {"norm": norm, "model.num_stages": stages, "micro_batch_size": size}
            cell = folder.add_cell(f"{norm}-{stages}-{size}", factors, seeds=[0])
            folder.add_run(cell, 0, 0.5, curve=[(400, 1.0, 0.5)])
    figure = plot_frame("convergence", frame(load_results(folder.path)))
    labels = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert labels == [[], ["num_stages=3"], ["num_stages=4"], []]
