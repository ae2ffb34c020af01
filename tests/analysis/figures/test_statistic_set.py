from __future__ import annotations

from collections.abc import Callable

import pytest
from experiment_folder import ExperimentFolder
from scipy import stats

from normexp.analysis import load_results
from normexp.analysis.figures import NotApplicable, plot_frame
from normexp.analysis.figures.statistic_set import frame

Make = Callable[..., ExperimentFolder]


def test_pairs_differ_in_the_norm_alone_and_carry_welch(grid: ExperimentFolder) -> None:
    data = frame(load_results(grid.path))
    assert len(data) == 4
    assert sorted(data["min_statistic_set"]) == [2, 8, 8, 32]
    row = data[data["min_statistic_set"] == 2].iloc[0]
    assert (row["cell"], row["cell_subtracted"]) == ("batch_norm-4-2", "group_norm-4-2")
    assert row["test/error_difference_mean"] == pytest.approx(0.5 - 0.125, abs=1e-15)
    theirs = stats.ttest_ind([0.51, 0.49], [0.135, 0.115], equal_var=False)
    interval = theirs.confidence_interval(0.95)
    assert row["test/error_difference_ci95_low"] == pytest.approx(interval.low, rel=1e-9)
    assert row["test/error_difference_ci95_high"] == pytest.approx(interval.high, rel=1e-9)


@pytest.mark.parametrize("norms", [("batch_norm", "layer_norm_chw"), ("no_such", "group_norm")])
def test_without_a_pair_it_is_one_panel_a_norm(
    make_experiment: Make, norms: tuple[str, str]
) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    for norm, area in zip(norms, (4, 16), strict=True):
        for size in (2, 8):
            cell = folder.add_cell(f"{norm}-{size}", {"norm": norm, "micro_batch_size": size})
            for seed in range(3):
                folder.add_run(cell, seed, 0.5, statistic_set=area * size)
    data = frame(load_results(folder.path))
    assert list(dict.fromkeys(data["panel_column"])) == list(norms)
    assert data["min_statistic_set"].tolist() == [8, 32, 32, 128]
    assert len(plot_frame("statistic_set", data).axes) == 2


def test_one_panel_a_contrast_where_group_norm_has_several_settings(
    make_experiment: Make,
) -> None:
    folder = make_experiment(["norm", "norm.num_groups", "micro_batch_size"])
    for norm, groups in (("batch_norm", None), ("group_norm", 2), ("group_norm", 4)):
        for size in (2, 8):
            factors = {"norm": norm, "norm.num_groups": groups, "micro_batch_size": size}
            cell = folder.add_cell(f"{norm}-{groups}-{size}", factors, seeds=[0, 1])
            for seed in (0, 1):
                folder.add_run(cell, seed, 0.5, statistic_set=4 * size)
    data = frame(load_results(folder.path))
    assert list(dict.fromkeys(data["panel_column"])) == ["num_groups=2", "num_groups=4"]


def test_no_norm_has_no_statistic_set_and_no_row(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "micro_batch_size"])
    for norm in ("no_norm", "batch_norm"):
        for size in (2, 8):
            cell = folder.add_cell(f"{norm}-{size}", {"norm": norm, "micro_batch_size": size}, [0])
            folder.add_run(cell, 0, 0.5, statistic_set=size if norm == "batch_norm" else None)
    assert set(frame(load_results(folder.path))["panel_column"]) == {"batch_norm"}


def test_one_size_is_no_figure(two_norms: ExperimentFolder) -> None:
    with pytest.raises(NotApplicable, match="does not vary within a norm"):
        frame(load_results(two_norms.path))


def test_diverged_runs_of_both_arms_are_counted(grid: ExperimentFolder) -> None:
    grid.add_run("batch_norm-4-2", 1, None, status="diverged", statistic_set=2)
    data = frame(load_results(grid.path))
    row = data[data["cell"] == "batch_norm-4-2"].iloc[0]
    assert (row["num_diverged"], row["num_seeds"], row["n_batch_norm"]) == (1, 4, 1)
    texts = [t.get_text() for axes in plot_frame("statistic_set", data).axes for t in axes.texts]
    assert texts == ["1/4"]
