"""Result folders made by hand: numbers whose mean, std and interval are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from experiment_folder import ExperimentFolder


@pytest.fixture
def make_experiment(tmp_path: Path) -> Callable[..., ExperimentFolder]:
    """Return a function that makes an empty experiment with some factors."""

    def make(
        factors: Sequence[str] = ("norm",), name: str = "example", **plan: Any
    ) -> ExperimentFolder:
        return ExperimentFolder(tmp_path / name, factors, **plan)

    return make


@pytest.fixture
def two_norms(make_experiment: Callable[..., ExperimentFolder]) -> ExperimentFolder:
    """Two cells of three seeds: accuracies .90 .92 .94 and .80 .80 .80, curves of two points."""
    folder = make_experiment()
    for norm, accuracies, size in (
        ("batch_norm", (0.90, 0.92, 0.94), 32),
        ("group_norm", (0.80, 0.80, 0.80), 128),
    ):
        cell = folder.add_cell(f"{norm}-aaaaaaaa", {"norm": norm})
        for seed, accuracy in enumerate(accuracies):
            curve = [(400, 1.0, accuracy - 0.1), (800, 0.5, accuracy)]
            folder.add_run(cell, seed, accuracy, statistic_set=size, curve=curve)
    return folder


@pytest.fixture
def grid(make_experiment: Callable[..., ExperimentFolder]) -> ExperimentFolder:
    """Two norms x two stages x two micro-batches, two seeds each; error of batch_norm is 1/M."""
    folder = make_experiment(["norm", "model.num_stages", "micro_batch_size"], name="grid")
    for norm in ("batch_norm", "group_norm"):
        for stages, area in ((3, 4), (4, 1)):
            for size in (2, 8):
                is_batch = norm == "batch_norm"
                elements = size * area if is_batch else 16 * area
                factors = {"norm": norm, "model.num_stages": stages, "micro_batch_size": size}
                cell = folder.add_cell(f"{norm}-{stages}-{size}", factors, seeds=[0, 1])
                error = 1 / elements if is_batch else 0.125
                for seed in (0, 1):
                    accuracy = 1 - error + (0.01 if seed else -0.01)
                    curve = [(400, 1.0, accuracy - 0.1), (800, 0.5, accuracy)]
                    folder.add_run(cell, seed, accuracy, statistic_set=elements, curve=curve)
                folder.add_cost(cell)
    return folder
