"""The figure of success rates: what stands on its axis, in its lines and panels."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results
from normexp.analysis.figures import NotApplicable, plot_frame, write_figures
from normexp.analysis.figures.success import frame

Make = Callable[..., ExperimentFolder]
TARGET = {"metric": "val/loss", "value": 1.0}
FACTORS = ["placement", "model.depth", "schedule.warmup_fraction", "norm"]


@pytest.fixture
def warmed(make_experiment: Make) -> ExperimentFolder:
    """Four runs a cell: pre always reaches the target, post does with 1, 2 of 4 by warm-up."""
    folder = make_experiment(FACTORS, target=TARGET)
    for placement, depth, warmup in itertools.product(("pre", "post"), (2, 4), (0.0, 0.5)):
        values = (placement, depth, warmup, "layer_norm")
        name = f"{placement}-{depth}-{warmup}"
        cell = folder.add_cell(name, dict(zip(FACTORS, values, strict=True)), [0, 1, 2, 3])
        num_reached = 4 if placement == "pre" else 2 if warmup else 1
        for seed in range(4):
            loss = 0.9 if seed < num_reached else 1.1
            folder.add_run(cell, seed, 0.5, curve=[(80, loss, 0.5)])
    return folder


def test_shares_by_warm_up_line_and_panel(warmed: ExperimentFolder) -> None:
    data = frame(load_results(warmed.path))
    assert set(data["factor"]) == {"warmup_fraction"}
    rows = data[data["panel_column"] == "depth=4"]
    assert rows["line"].tolist() == ["placement=pre"] * 2 + ["placement=post"] * 2
    assert rows["level"].tolist() == ["0", "0.5"] * 2
    assert rows["success_rate"].tolist() == [1.0, 1.0, 0.25, 0.5]


def test_drawn_are_percents_within_their_intervals(warmed: ExperimentFolder) -> None:
    figure = plot_frame("success", frame(load_results(warmed.path)))
    assert len(figure.axes) == 2
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "0.5"]
    drawn = [line.get_ydata().tolist() for line in axes.lines if line.get_linestyle() != "None"]
    assert [100.0, 100.0] in drawn
    assert [25.0, 50.0] in drawn
    ends = [segment[:, 1] for bars in axes.collections for segment in bars.get_segments()]
    assert len(ends) == 4
    assert all(0 <= low < high <= 100 + 1e-9 for low, high in ends)


def test_norms_are_the_lines_where_they_vary(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "optimizer.lr"], target=TARGET)
    for norm, rate in itertools.product(("layer_norm", "no_norm"), (0.1, 0.2)):
        cell = folder.add_cell(f"{norm}-{rate}", {"norm": norm, "optimizer.lr": rate}, [0])
        status = "diverged" if norm == "no_norm" else "completed"
        folder.add_run(cell, 0, 0.5, status=status, curve=[(80, 0.5, 0.5)])
    data = frame(load_results(folder.path))
    assert set(data["line"]) == {"layer_norm", "no_norm"}
    assert set(data["factor"]) == {"lr"}
    assert data["success_rate"].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_cell_without_a_trial_has_no_point(warmed: ExperimentFolder) -> None:
    for seed in range(4):
        warmed.add_run("pre-2-0.0", seed, None, status="interrupted", curve=[(80, 0.5, 0.5)])
    figure = plot_frame("success", frame(load_results(warmed.path)))
    drawn = [line.get_ydata().tolist() for line in figure.axes[0].lines]
    assert [100.0] in drawn


def test_the_caption_says_what_the_target_is(warmed: ExperimentFolder) -> None:
    (written,) = write_figures(load_results(warmed.path), warmed.path / "f", ["success"])
    assert "val loss is at or below 1 nats at any evaluation" in written.caption


def test_without_target_or_runs_there_is_no_figure(
    two_norms: ExperimentFolder, make_experiment: Make
) -> None:
    with pytest.raises(NotApplicable, match="sets no target"):
        frame(load_results(two_norms.path))
    folder = make_experiment(name="empty", target=TARGET)
    folder.add_cell("a", {"norm": "layer_norm"})
    with pytest.raises(NotApplicable, match="no run has ended"):
        frame(load_results(folder.path))
