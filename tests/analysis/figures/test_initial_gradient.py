"""The figure of gradients before the first update: arms, exponents, blocks, what it cannot show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from experiment_folder import ExperimentFolder

from normexp.analysis import load_results
from normexp.analysis.figures import FIGURES, NotApplicable, plot_frame, write_figures
from normexp.analysis.figures._gradients import frame

Make = Callable[..., ExperimentFolder]
FACTORS = ["placement", "model.depth", "schedule.warmup_fraction", "norm"]
CARD = FIGURES.get("initial_gradient", key="figure").card


def report(block_norms: Sequence[float]) -> dict[str, Any]:
    """Two parameters a block, of which the norm by block is 5/4 of the first: 3-4-5 triangles."""
    entries = [
        {
            "name": f"blocks.{block}.{part}",
            "role": "weight",
            "block": block,
            "num_elements": 4,
            "gradient_norm": norm * share,
            "weight_norm": 1.0,
        }
        for block, norm in enumerate(block_norms)
        for part, share in (("up", 0.8), ("down", 0.6))
    ]
    outside = {**entries[0], "name": "embedding", "block": None, "gradient_norm": 99.0}
    parameters = [outside, *entries]
    return {"probes": {"initial_gradients": {"num_samples": 64, "parameters": parameters}}}


def add(
    folder: ExperimentFolder,
    factors: dict[str, Any],
    last: Sequence[float],
    *,
    depth: int,
    status: str = "completed",
    **changes: Any,
) -> None:
    """One cell with a run for each norm of the last branch; block b of a run has (b + 1) x it."""
    name = "-".join(str(value) for value in factors.values())
    cell = folder.add_cell(name, factors, list(range(len(last))))
    for seed, norm in enumerate(last):
        metrics = {"initial_gradient/last_branch": norm, "initial_gradient/total": 9.0}
        blocks = report([norm * (b + 1) for b in range(depth)])
        summary = {**blocks, **changes}
        folder.add_run(cell, seed, 0.5, status=status, metrics=metrics, summary=summary)


def pre_and_post(make: Make, warmups: Sequence[float] = (0.0, 0.5)) -> ExperimentFolder:
    """pre falls as depth^-0.5, post is flat; seeds differ by a factor, so not in the exponent."""
    folder = make(FACTORS)
    for placement, power in (("pre", -0.5), ("post", 0.0)):
        for depth in (2, 4, 8):
            for warmup in warmups:
                values = (placement, depth, warmup, "layer_norm")
                factors = dict(zip(FACTORS, values, strict=True))
                last = [scale * depth**power for scale in (1.0, 2.0, 3.0)]
                add(folder, factors, last, depth=depth)
    return folder


def test_exponents_are_those_of_the_data(make_experiment: Make) -> None:
    data = frame(load_results(pre_and_post(make_experiment).path))
    by_depth = data[data["kind"] == "depth"]
    assert by_depth["arm"].tolist() == ["pre"] * 3 + ["post"] * 3
    assert by_depth["depth"].tolist() == [2, 4, 8] * 2
    assert by_depth["gradient_norm_mean"].tolist() == pytest.approx(
        [2 / math.sqrt(2), 1.0, 2 / math.sqrt(8), 2.0, 2.0, 2.0], rel=1e-12
    )
    # Student's t of two degrees of freedom is 4.302653; the standard deviation of 1, 2, 3 is 1.
    low = 2.0 - 4.302652729911275 / math.sqrt(3)
    assert by_depth["gradient_norm_ci95_low"].tolist()[-1] == pytest.approx(low, rel=1e-9)
    exponents = by_depth.drop_duplicates("arm")
    assert exponents["exponent_mean"].tolist() == pytest.approx([-0.5, 0.0], abs=1e-12)
    assert exponents["exponent_n"].tolist() == [3, 3]
    assert "pre -0.50 [-0.50, -0.50]; post 0.00 [0.00, 0.00]" in " ".join(CARD.notes(data))


def test_a_warm_up_makes_no_arm_and_no_run_more(make_experiment: Make) -> None:
    data = frame(load_results(pre_and_post(make_experiment).path))
    assert set(data["gradient_norm_n"]) == {3}
    assert set(data["arm"]) == {"pre", "post"}


@pytest.mark.parametrize(
    ("factor", "levels", "is_split"),
    [
        ("optimizer.lr", (0.1, 0.2), False),
        ("optimizer", ("sgd", "adamw"), False),
        ("accumulation_steps", (1, 2), False),
        ("budget.epochs", (1.0, 2.0), False),
        ("model.width", (8, 16), True),
        ("micro_batch_size", (4, 8), True),
        ("norm.eps", (1e-5, 1e-3), True),
        ("norm", ("layer_norm", "rms_norm"), True),
    ],
)
def test_what_can_matter_splits_arms(
    make_experiment: Make, factor: str, levels: Sequence[Any], is_split: bool
) -> None:
    names = ["norm", "model.depth", factor] if factor != "norm" else ["norm", "model.depth"]
    folder = make_experiment(names)
    for level in levels:
        for depth in (2, 4):
            factors = {"norm": "layer_norm", "model.depth": depth, factor: level}
            add(folder, {name: factors[name] for name in names}, [1.0], depth=depth)
    arms = dict.fromkeys(frame(load_results(folder.path))["arm"])
    assert len(arms) == (2 if is_split else 1)
    words = factor.rpartition(".")[2]
    assert all(words in arm or factor == "norm" for arm in arms) == is_split


def test_blocks_are_those_of_the_deepest_model(make_experiment: Make) -> None:
    data = frame(load_results(pre_and_post(make_experiment).path))
    blocks = data[(data["kind"] == "block") & (data["arm"] == "post")]
    assert set(data.loc[data["kind"] == "block", "depth"]) == {8}
    assert blocks["block"].tolist() == list(range(1, 9))
    # All parameters of a block together, what stands outside of blocks in none: mean of 1, 2, 3.
    wanted = [2.0 * (b + 1) for b in range(8)]
    assert blocks["gradient_norm_mean"].tolist() == pytest.approx(wanted, rel=1e-12)
    # Where the norm falls with depth, one of a shallower model would be told from it.
    falling = data[(data["kind"] == "block") & (data["arm"] == "pre")]
    wanted = [2.0 * (b + 1) / math.sqrt(8) for b in range(8)]
    assert falling["gradient_norm_mean"].tolist() == pytest.approx(wanted, rel=1e-12)


def test_all_runs_count_however_they_ended(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "model.depth"])
    for depth, status in ((2, "completed"), (4, "diverged")):
        factors = {"norm": "layer_norm", "model.depth": depth}
        add(folder, factors, [1.0, 2.0], depth=depth, status=status)
    data = frame(load_results(folder.path))
    assert data.loc[data["kind"] == "depth", "gradient_norm_n"].tolist() == [2, 2]


def test_two_panels_with_labels_and_log_axes(make_experiment: Make) -> None:
    figure = plot_frame("initial_gradient", frame(load_results(pre_and_post(make_experiment).path)))
    left, right = figure.axes
    assert [left.get_xscale(), left.get_yscale(), right.get_yscale()] == ["log"] * 3
    assert list(left.get_xticks()) == [2.0, 4.0, 8.0]
    assert right.get_xscale() == "linear"
    assert right.get_xlabel() == "block (depth 8)"
    assert "gradient norm" in left.get_ylabel()
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text.split("^")[0] for text in texts] == ["pre: depth", "post: depth"]
    assert texts[0] == "pre: depth^-0.50"


def test_what_is_flat_looks_flat(make_experiment: Make) -> None:
    folder = make_experiment(["norm", "model.depth"])
    for depth, last in ((2, 1.0), (4, 1.01), (8, 0.99)):
        factors = {"norm": "layer_norm", "model.depth": depth}
        add(folder, factors, [last], depth=1)
    low, high = plot_frame("initial_gradient", frame(load_results(folder.path))).axes[0].get_ylim()
    assert high / low >= 4.0
    assert low < 0.99 < 1.01 < high


def test_a_norm_of_zero_is_told_not_drawn(make_experiment: Make) -> None:
    folder = make_experiment(["placement", "model.depth", "norm"])
    for placement, norm in (("pre", 1.0), ("rezero_pre", 0.0)):
        for depth in (2, 4):
            factors = {"placement": placement, "model.depth": depth, "norm": "layer_norm"}
            add(folder, factors, [norm] * 3, depth=depth)
    data = frame(load_results(folder.path))
    (written,) = write_figures(load_results(folder.path), folder.path / "f", ["initial_gradient"])
    assert "no place on a logarithmic axis: rezero_pre." in written.caption
    left = plot_frame("initial_gradient", data).axes[0]
    assert left.get_ylim()[0] > 0.1


def test_one_depth_has_blocks_alone(make_experiment: Make) -> None:
    folder = make_experiment(["norm"])
    add(folder, {"norm": "layer_norm"}, [1.0, 2.0, 3.0], depth=4)
    data = frame(load_results(folder.path))
    figure = plot_frame("initial_gradient", data)
    assert [axes.get_xlabel() for axes in figure.axes] == ["block"]
    assert set(data["exponent_n"]) == {0}


def test_single_runs_are_told(make_experiment: Make) -> None:
    folder = make_experiment(["norm"])
    add(folder, {"norm": "layer_norm"}, [1.0, 2.0], depth=2)
    notes = " ".join(CARD.notes(frame(load_results(folder.path))))
    assert "fewer than 3 runs have no interval" in notes


def test_an_arm_that_leaks_is_marked(make_experiment: Make) -> None:
    folder = make_experiment(["norm"])
    model = {"is_leaking": True, "num_parameters": 1, "min_statistic_set": 8}
    add(folder, {"norm": "batch_norm"}, [1.0], depth=2, model=model)
    assert set(frame(load_results(folder.path))["arm"]) == {"batch_norm (leaks)"}


def test_long_names_stay_inside_of_the_figure(make_experiment: Make) -> None:
    names = ["norm", "norm.a_long_parameter", "model.a_long_factor", "model.depth"]
    folder = make_experiment(names)
    for norm in ("partial_rms_norm", "layer_norm_std_outside"):
        for level in ("one_long_level", "another_long_level"):
            for depth in (2, 4):
                values = dict(zip(names, (norm, 0.0625, level, depth), strict=True))
                add(folder, values, [1.0, 2.0, 3.0], depth=depth)
    figure = plot_frame("initial_gradient", frame(load_results(folder.path)))
    figure.draw_without_rendering()
    width = figure.get_figwidth() * figure.dpi
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= width


def test_without_the_probe_there_is_no_figure(grid: ExperimentFolder) -> None:
    with pytest.raises(NotApplicable, match="no run has the probe initial_gradients"):
        frame(load_results(grid.path))
