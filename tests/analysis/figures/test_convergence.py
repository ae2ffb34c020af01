from __future__ import annotations

from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results
from normexp.analysis.figures import FIGURES, NotApplicable, plot_frame
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


def test_the_legend_names_every_factor_in_which_arms_differ(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "norm.roles.stem", "placement", "micro_batch_size"])
    for norm, stem, placement in (
        ("group_norm", None, "res_post"),
        ("group_norm", "batch_norm", "res_pre"),
    ):
        for size in (2, 8):
            factors = {"norm": norm, "norm.roles.stem": stem, "placement": placement}
            cell = folder.add_cell(
                f"{placement}-{size}", {**factors, "micro_batch_size": size}, seeds=[0]
            )
            folder.add_run(cell, 0, 0.5, curve=[(400, 1.0, 0.5)], statistic_set=4 * size)
    results = load_results(folder.path)
    arms = [
        "group_norm, placement=res_post",
        "group_norm, stem=batch_norm, placement=res_pre",
    ]
    for name, column in (
        ("convergence", "line"),
        ("micro_batch", "arm"),
        ("statistic_set", "panel_column"),
    ):
        data = FIGURES.get(name, key="figures").card.frame(results)
        assert list(dict.fromkeys(data[column])) == arms
    figure = plot_frame("convergence", frame(results))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == arms


def test_a_rate_that_norm_and_micro_batch_decide_together_is_named(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size", "optimizer.lr", "accumulation_steps"])
    for norm, factor in (("batch_norm", 1), ("group_norm", 2)):
        for size in (2, 8):
            factors = {"norm": norm, "micro_batch_size": size, "optimizer.lr": factor * size}
            cell = folder.add_cell(f"{norm}-{size}", {**factors, "accumulation_steps": 16 // size})
            folder.add_run(cell, 0, 0.5, curve=[(400, 1.0, 0.5)])
    data = frame(load_results(folder.path))
    # The accumulation follows the micro-batch of the panel: arms do not differ in it.
    assert list(dict.fromkeys(data["line"])) == ["batch_norm, lr=2/8", "group_norm, lr=4/16"]


def test_panels_beside_an_empty_place_keep_their_tick_labels(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "model.num_stages", "micro_batch_size"])
    for stages, size in ((3, 2), (4, 2), (4, 8), (4, 32), (3, 32)):
        for norm in ("batch_norm", "group_norm"):
            factors = {"norm": norm, "model.num_stages": stages, "micro_batch_size": size}
            cell = folder.add_cell(f"{norm}-{stages}-{size}", factors, seeds=[0])
            folder.add_run(cell, 0, 0.5, curve=[(400, 1.0, 0.5), (800, 1.0, 0.6)])
    axes = plot_frame("convergence", frame(load_results(folder.path))).axes
    # 3-2 (hole) 3-32 above 4-2 4-8 4-32.
    is_shown = [
        [
            axis.get_tick_params()[key]
            for axis, key in ((a.xaxis, "labelbottom"), (a.yaxis, "labelleft"))
        ]
        for a in axes
        if a.get_visible()
    ]
    assert is_shown == [[False, True], [False, True], [True, True], [True, False], [True, False]]


def test_panels_above_an_empty_corner_keep_their_tick_labels(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "model.num_stages", "micro_batch_size"])
    for stages in range(5):
        for size in (2, 8):
            factors = {"norm": "n", "model.num_stages": stages, "micro_batch_size": size}
            cell = folder.add_cell(f"{stages}-{size}", factors, seeds=[0])
            folder.add_run(cell, 0, 0.5)
    data = FIGURES.get("micro_batch", key="figures").card.frame(load_results(folder.path))
    axes = [a for a in plot_frame("micro_batch", data).axes if a.get_visible()]
    shown = [a.xaxis.get_tick_params()["labelbottom"] for a in axes]
    assert shown == [False, False, True, True, True]
