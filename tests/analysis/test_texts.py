"""Scores of language models: losses of tokens with their units, perplexity, bits, tokens."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest
from experiment_folder import ExperimentFolder
from rich.console import Console

from normexp.analysis import load_results, print_summary
from normexp.analysis.display import Score, choose_score, metric_label, show_average
from normexp.analysis.figures import plot_frame
from normexp.analysis.figures.convergence import frame
from normexp.analysis.render import render_csv
from normexp.analysis.statistics import Summary
from normexp.analysis.tables import build_cells_table, build_convergence_table

Make = Callable[..., ExperimentFolder]
TOTALS = {"samples": 80, "updates": 10, "epochs": 1.0, "effective_batch_size": 8, "wall_s": 1.0}


def language_model(make: Make, **totals: Any) -> ExperimentFolder:
    folder = make()
    cell = folder.add_cell("a", {"norm": "layer_norm"})
    for seed, loss in enumerate((1.25, 1.5, 1.75)):
        metrics = {
            "test/loss": loss,
            "test/perplexity": 12345.6,
            "test/bits_per_byte": 2.5,
            "val/loss": loss,
            "val/perplexity": 3.5,
        }
        own = {name: values[seed] for name, values in totals.items()}
        folder.add_run(
            cell,
            seed,
            0.4,
            metrics=metrics,
            curve=[(40, loss + 1, 0.2), (80, loss, 0.4)],
            summary={"totals": {**TOTALS, **own}},
        )
    return folder


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_score_is_the_loss_of_tokens(split: str) -> None:
    quantities = ("accuracy", "loss", "perplexity", "bits_per_byte")
    score = choose_score([f"{split}/{quantity}" for quantity in quantities], split)
    assert score == Score(f"{split}/loss", f"{split}/loss_per_token")
    assert not score.is_error
    summary = Summary(3, 2.0, 0.1, 1.9, 2.1)
    assert score.convert(summary) is summary
    assert (score.scale, score.label) == (1.0, f"{split} loss (nats a token)")


def test_a_classifier_of_texts_has_an_error() -> None:
    assert choose_score(["test/accuracy", "test/loss"], "test").name == "test/error"


def test_units_are_told() -> None:
    metrics = ["val/loss", "val/perplexity"]
    assert metric_label("val/loss", metrics) == "val loss (nats a token)"
    assert metric_label("val/loss") == "val loss (nats)"
    assert metric_label("val/perplexity", metrics) == "val perplexity"
    assert metric_label("val/bits_per_byte") == "val loss (bits a byte)"


@pytest.mark.parametrize(
    ("value", "text"),
    [(8.125, "8.125"), (123.456, "123.5"), (12345.6, "12,346"), (3.2e7, "3.200e+07")],
)
def test_perplexities(value: float, text: str) -> None:
    assert show_average(Summary(1, value, 0.0, 0.0, 0.0), "test/perplexity") == text


def test_the_tables_show_loss_perplexity_and_bits(make_experiment: Make) -> None:
    results = load_results(language_model(make_experiment).path)
    table = build_cells_table(results)
    shown = dict(zip(table.headers, table.rows[0], strict=True))
    # 1.5 +- 4.302653 x 0.25 / sqrt(3).
    assert shown["test loss (nats a token): mean [95% t]"] == "1.500 [0.8790, 2.121]"
    assert shown["test perplexity: mean"] == "12,346"
    assert shown["test loss (bits a byte): mean"] == "2.500"
    headers = build_convergence_table(results).headers
    assert "val loss (nats a token): mean [95% t]" in headers
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_summary(results, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in lines) <= 100


def test_the_curve_is_the_loss(make_experiment: Make) -> None:
    data = frame(load_results(language_model(make_experiment).path))
    assert data["val/loss_per_token_mean"].tolist() == [2.5, 1.5]
    assert data["val/loss_per_token_runs"].tolist() == ["2.25 2.5 2.75", "1.25 1.5 1.75"]
    figure = plot_frame("convergence", data)
    words = [figure.get_supylabel(), *(axes.get_ylabel() for axes in figure.axes)]
    assert "val loss (nats a token)" in words


def test_tokens_are_means_over_completed_runs(make_experiment: Make) -> None:
    folder = language_model(
        make_experiment,
        tokens=[100, 200, 600],
        targets=[90, 190, 590],
        padded_share=[0.1, 0.2, 0.6],
    )
    results = load_results(folder.path)
    row = next(csv.DictReader(io.StringIO(render_csv(build_cells_table(results).frame))))
    assert (float(row["tokens_mean"]), float(row["targets_mean"])) == (300.0, 290.0)
    assert float(row["padded_share_mean"]) == pytest.approx(0.3, rel=1e-12)


def test_records_without_tokens_have_no_such_column(two_norms: ExperimentFolder) -> None:
    names = list(build_cells_table(load_results(two_norms.path)).frame)
    assert not {"tokens_mean", "targets_mean", "padded_share_mean"} & set(names)


def test_runs_that_have_not_ended_make_no_language_model(make_experiment: Make) -> None:
    folder = make_experiment()
    folder.add_cell("a", {"norm": "batch_norm"})
    results = load_results(folder.path)
    assert choose_score(results.metrics, "test").metric == "test/accuracy"
