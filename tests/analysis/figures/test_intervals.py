from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from experiment_folder import ExperimentFolder
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.markers import CARETDOWN, CARETUP

from normexp.analysis import load_results
from normexp.analysis.figures import FIGURES, plot_frame, write_figures

Make = Callable[..., ExperimentFolder]


def add_norm(
    folder: ExperimentFolder, norm: str, errors: Sequence[float], sizes: Sequence[int] = (2, 8)
) -> None:
    """Add a cell for each micro-batch whose runs have these errors, also along the curve."""
    for size in sizes:
        factors = {"norm": norm, "micro_batch_size": size}
        cell = folder.add_cell(f"{norm}-{size}", factors, seeds=range(len(errors)))
        for seed, error in enumerate(errors):
            curve = [(400 * k, 1.0, 1 - error) for k in (1, 2)]
            folder.add_run(cell, seed, 1 - error, curve=curve, statistic_set=4 * size)


def draw(folder: ExperimentFolder, name: str) -> list[Axes]:
    data = FIGURES.get(name, key="figures").card.frame(load_results(folder.path))
    return [axes for axes in plot_frame(name, data).axes if axes.get_visible()]


def caption(folder: ExperimentFolder, name: str) -> str:
    return write_figures(load_results(folder.path), folder.path / "figures", [name])[0].caption


def marks(axes: Axes, marker: object) -> list[tuple[float, float]]:
    found = [line for line in axes.lines if line.get_marker() == marker]
    return [(float(x), float(y)) for line in found for x, y in line.get_xydata()]


@pytest.mark.parametrize("name", ["micro_batch", "convergence"])
def test_two_runs_are_dots_without_an_interval(make_experiment: Make, name: str) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    add_norm(folder, "batch_norm", (0.2, 0.6))
    for axes in draw(folder, name):
        assert not axes.collections
        dots = [line for line in axes.lines if line.get_markersize() == 2.2]
        # Two runs at each of two points: micro-batches, or evaluations of a curve.
        num_lines = len(dots)
        heights = sorted(float(y) for line in dots for y in line.get_ydata())
        assert heights == pytest.approx([20.0] * 2 * num_lines + [60.0] * 2 * num_lines, abs=1e-9)
        low, high = axes.get_ylim()
        assert 0.0 <= low < 20.0
        assert 60.0 < high <= 100.0
    assert "fewer than 3 runs have no interval: small dots are the single runs" in caption(
        folder, name
    )


@pytest.mark.parametrize("name", ["micro_batch", "convergence"])
def test_a_huge_interval_is_cut_with_a_mark_at_the_limit(make_experiment: Make, name: str) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    # Mean 50, and t(2) = 4.30 times 0.4 / sqrt(3) is 99: the interval is -49 to 149.
    add_norm(folder, "batch_norm", (0.1, 0.5, 0.9))
    add_norm(folder, "group_norm", (0.94, 0.95, 0.96))
    for axes in draw(folder, name):
        # Intervals widen the axis by half the largest mean: 50 - 95 / 2.
        assert axes.get_ylim() == pytest.approx((2.5, 100.0), abs=1e-9)
        ups, downs = marks(axes, CARETUP), marks(axes, CARETDOWN)
        assert len(ups) == len(downs) > 0
        assert [y for _, y in ups] == [100.0] * len(ups)
        assert [y for _, y in downs] == pytest.approx([2.5] * len(downs), abs=1e-9)
    assert "A triangle marks an interval that goes on beyond the axis." in caption(folder, name)


def test_an_interval_within_the_axis_is_whole(two_norms: ExperimentFolder) -> None:
    (axes,) = draw(two_norms, "convergence")
    # Val errors .08 and .18 with std .02: 4.97 about the mean of 8 and 18.
    assert not marks(axes, CARETUP)
    assert "triangle" not in caption(two_norms, "convergence")
    assert "fewer than" not in caption(two_norms, "convergence")
    low, high = axes.get_ylim()
    assert 0.0 <= low < 8.0 - 4.97
    assert 30.0 < high <= 45.0


def test_crosses_stand_above_an_axis_that_ends_at_100(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    add_norm(folder, "batch_norm", (0.9, 0.91, 0.89))
    add_norm(folder, "group_norm", (0.2, 0.3, 0.4))
    folder.add_run("group_norm-2", 0, None, status="diverged", statistic_set=8)
    (axes,) = draw(folder, "micro_batch")
    assert axes.get_ylim()[1] > 100.0
    assert max(axes.get_yticks()) <= 100.0
    assert axes.spines["left"].get_bounds()[1] <= 100.0


def test_up_to_three_lines_have_bands_and_more_have_bars(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    for norm in ("batch_norm", "group_norm", "no_norm"):
        add_norm(folder, norm, (0.2, 0.3, 0.4))
    for axes in draw(folder, "convergence"):
        assert sum(isinstance(item, PolyCollection) for item in axes.collections) == 3
    assert "Intervals are bands." in caption(folder, "convergence")
    add_norm(folder, "instance_norm", (0.2, 0.3, 0.4))
    for axes in draw(folder, "convergence"):
        assert not any(isinstance(item, PolyCollection) for item in axes.collections)
        assert len(axes.collections) == 4
    assert "Intervals are bars, and lines are set apart sideways" in caption(folder, "convergence")


@pytest.mark.parametrize(
    ("errors", "scale", "words"),
    [
        (
            (0.81, 0.1),
            "log",
            "The vertical axis is logarithmic, as the means span 8.1x (more than 8x).",
        ),
        ((0.79, 0.1), "linear", "The vertical axis is linear, as the means span no more than 8x."),
        ((0.79, 0.0), "linear", "The vertical axis is linear, as a log axis has no zero."),
    ],
)
def test_the_caption_tells_the_scale_and_why(
    make_experiment: Make, errors: tuple[float, float], scale: str, words: str
) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    for norm, error in zip(("batch_norm", "no_norm"), errors, strict=True):
        add_norm(folder, norm, (error,) * 3)
    (axes,) = draw(folder, "micro_batch")
    assert axes.get_yscale() == scale
    assert ("log scale" in axes.get_ylabel()) == (scale == "log")
    assert words in caption(folder, "micro_batch")


def test_a_single_run_of_a_pair_is_the_difference_of_one_seed(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    add_norm(folder, "batch_norm", (0.30, 0.50))
    add_norm(folder, "group_norm", (0.25, 0.42))
    data = FIGURES.get("statistic_set", key="figures").card.frame(load_results(folder.path))
    assert set(data["test/error_difference_runs"]) == {"0.05 0.08"}
    (axes,) = plot_frame("statistic_set", data).axes
    assert not axes.collections
    assert "difference of its two runs of one seed" in caption(folder, "statistic_set")
