"""Success: which runs reach the target of the plan, when, and how sure the rate is."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from experiment_folder import ExperimentFolder
from rich.console import Console

from normexp.analysis import load_results, print_summary, write_report
from normexp.analysis.render import render_csv
from normexp.analysis.tables import build_cells_table
from normexp.analysis.target import count_reached, describe_target
from normexp.errors import UserError

Make = Callable[..., ExperimentFolder]
LOSS = {"metric": "val/loss", "value": 0.5}


def add(
    folder: ExperimentFolder, losses: Sequence[Sequence[float | None]], statuses: Sequence[str] = ()
) -> None:
    """One cell with a run for each list of losses at 80, 160, ... samples."""
    cell = folder.add_cell("a", {"norm": "layer_norm"}, list(range(len(losses))))
    for seed, values in enumerate(losses):
        status = statuses[seed] if statuses else "completed"
        curve = [(80 * k, loss, 0.5) for k, loss in enumerate(values, start=1)]
        folder.add_run(cell, seed, 0.5, status=status, curve=curve)


def reached(folder: ExperimentFolder) -> dict[str, Any]:
    return count_reached(load_results(folder.path))["a"]


def test_at_any_evaluation_and_at_the_value_itself(make_experiment: Make) -> None:
    folder = make_experiment(target=LOSS)
    # Reached at the first, in between and not held, exactly, and missed.
    add(folder, [[0.4, 0.3, 0.2], [0.9, 0.45, 0.8], [0.9, 0.6, 0.5], [0.9, 0.6, 0.501]])
    row = reached(folder)
    assert (row["num_trials"], row["num_reached"], row["success_rate"]) == (4, 3, 0.75)
    # 8 samples an update.
    assert row["samples_to_target"] == "80 160 240 inf"
    assert row["updates_to_target"] == "10 20 30 inf"
    # Between the second and the third of four, that did not all reach it.
    assert row["samples_to_target_median"] == 200.0
    assert row["updates_to_target_median"] == 25.0


def test_accuracies_count_upwards(make_experiment: Make) -> None:
    folder = make_experiment(target={"metric": "val/accuracy", "value": 0.8})
    cell = folder.add_cell("a", {"norm": "layer_norm"}, [0, 1])
    folder.add_run(cell, 0, 0.5, curve=[(80, 1.0, 0.8)])
    folder.add_run(cell, 1, 0.5, curve=[(80, 1.0, 0.79)])
    assert reached(folder)["samples_to_target"] == "80 inf"


def test_only_what_ended_is_a_trial_and_only_what_completed_succeeds(
    make_experiment: Make,
) -> None:
    folder = make_experiment(target=LOSS)
    good = [0.4, 0.3]
    add(folder, [good] * 4, ["completed", "diverged", "failed", "interrupted"])
    folder.plan["cells"][0]["seeds"].append(4)  # not run
    folder.write_plan()
    row = reached(folder)
    assert (row["num_trials"], row["num_reached"]) == (3, 1)
    assert row["samples_to_target"] == "80 inf inf - -"
    assert row["samples_to_target_median"] == math.inf


def test_a_value_that_is_not_there_reaches_nothing(make_experiment: Make) -> None:
    folder = make_experiment(target={"metric": "val/accuracy", "value": 0.1})
    cell = folder.add_cell("a", {"norm": "layer_norm"}, [0])
    folder.add_run(cell, 0, 0.5, curve=[(80, 1.0, None), (160, 1.0, math.nan)])
    assert reached(folder)["num_reached"] == 0


@pytest.mark.parametrize(("num_reached", "num_trials"), [(0, 5), (3, 5), (5, 5), (1, 1)])
def test_wilson_by_hand(make_experiment: Make, num_reached: int, num_trials: int) -> None:
    folder = make_experiment(target=LOSS)
    add(folder, [[0.1]] * num_reached + [[0.9]] * (num_trials - num_reached))
    row = reached(folder)
    # Wilson (1927): the rates p with (share - p)^2 = z^2 p (1 - p) / n.
    z, n, share = 1.959963984540054, num_trials, num_reached / num_trials
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    assert row["success_rate_ci95_low"] == pytest.approx(middle - half, abs=1e-12)
    assert row["success_rate_ci95_high"] == pytest.approx(middle + half, abs=1e-12)


def test_the_tables_show_it(make_experiment: Make) -> None:
    folder = make_experiment(target=LOSS)
    add(folder, [[0.4], [0.4], [0.9]])
    table = build_cells_table(load_results(folder.path))
    shown = dict(zip(table.headers, table.rows[0], strict=True))
    assert shown["reached target [95% Wilson] (%)"] == "2 of 3 [21, 94]"
    assert shown["samples to target: median"] == "80"
    assert "those interrupted or not run are not counted" in table.caption
    row = next(csv.DictReader(io.StringIO(render_csv(table.frame))))
    assert (row["num_trials"], row["num_reached"]) == ("3", "2")
    assert float(row["success_rate"]) == 2 / 3
    assert row["samples_to_target"] == "80 80 inf"
    folder.add_run("a", 0, None, status="diverged")
    table = build_cells_table(load_results(folder.path))
    assert "never" in table.rows[0]
    assert csv.DictReader(io.StringIO(render_csv(table.frame))).fieldnames is not None


def test_nothing_is_shown_where_nothing_ended(make_experiment: Make) -> None:
    folder = make_experiment(target=LOSS)
    folder.add_cell("a", {"norm": "layer_norm"})
    table = build_cells_table(load_results(folder.path))
    assert table.rows[0] == ("layer_norm", "-", "0 of 3", "-", "-", "-", "-", "3 not run")
    assert math.isnan(reached(folder)["success_rate"])


def test_without_a_target_no_column(two_norms: ExperimentFolder) -> None:
    results = load_results(two_norms.path)
    assert count_reached(results) == {}
    table = build_cells_table(results)
    assert not [name for name in table.frame if "reached" in name or "success" in name]
    assert "reached" not in table.caption
    assert describe_target(results) == ""


def test_report_and_console_say_it_in_words(make_experiment: Make) -> None:
    folder = make_experiment(target=LOSS, figures=["convergence"])
    add(folder, [[0.4], [0.4], [0.9]])
    sentence = (
        "A run succeeds if it completes and its val loss is at or below 0.5 nats at any evaluation."
    )
    write_report(folder.path)
    text = (folder.path / "REPORT.md").read_text()
    assert f"**Target, set before the runs.** {sentence}" in text
    assert sentence in (folder.path / "report.html").read_text()
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_summary(load_results(folder.path), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "at or below 0.5 nats" in printed
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 100


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"metric": "val/accuracy", "value": 0.8}, "val accuracy is at or above 80% at any"),
        ({"metric": "val/perplexity", "value": 9.5}, "val perplexity is at or below 9.5 at any"),
        ({"metric": "val/loss", "value": 2.2}, "val loss is at or below 2.2 nats a token at any"),
        ({"metric": "val/bits_per_byte", "value": 2}, "at any evaluation; no run has val/bits_per"),
    ],
)
def test_words_have_units(make_experiment: Make, target: dict[str, Any], words: str) -> None:
    folder = make_experiment(target=target)
    cell = folder.add_cell("a", {"norm": "layer_norm"}, [0])
    metrics = {"val/loss": 2.0, "val/perplexity": 7.4}
    path = folder.add_run(cell, 0, 0.5, metrics=metrics, curve=[(80, 2.0, 0.5)])
    if target["metric"] == "val/perplexity":
        (path / "history.parquet").unlink()
    assert words in describe_target(load_results(folder.path))


@pytest.mark.parametrize(
    "target", [{"metric": "test/loss", "value": 1.0}, {"metric": "val/loss", "value": "low"}]
)
def test_a_plan_with_a_target_that_is_none_is_refused(make_experiment: Make, target: Any) -> None:
    folder = make_experiment(target=target)
    add(folder, [[0.4]])
    with pytest.raises(UserError, match="target"):
        build_cells_table(load_results(folder.path))
