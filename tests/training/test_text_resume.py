"""A run on texts that was stopped goes on to the same numbers, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from small_texts import LABELS, LANGUAGE, TASKS

from normexp.config.schema import BudgetConfig, CellConfig, EvaluationConfig
from normexp.records import read_history, read_summary
from normexp.training import cell as cell_module
from normexp.training.cell import train_cell
from normexp.training.check import check_cell
from normexp.training.solo import SoloModule
from normexp.training.windows import Window

MakeCell = Callable[..., CellConfig]
# What may differ: how long it took, and that it was resumed.
UNSTEADY = ("wall_s", "resumed_from_update")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[SoloModule]:
    """Return the modules of all attempts."""
    prepared: list[SoloModule] = []
    real = cell_module._Run._prepare

    def prepare(run: Any) -> tuple[SoloModule, int]:
        found = real(run)
        prepared.append(found[0])
        return found

    monkeypatch.setattr(cell_module._Run, "_prepare", prepare)
    return prepared


def stop_at(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SoloModule.training_step

    def step(module: SoloModule, window: Window, batch_idx: int) -> None:
        if module.update >= update:
            raise KeyboardInterrupt
        real(module, window, batch_idx)

    monkeypatch.setattr(SoloModule, "training_step", step)


@pytest.mark.parametrize("at", [4, 10, 14])
@pytest.mark.parametrize("task", TASKS)
def test_stop_and_resume_is_bit_identical(
    make_text_cell: MakeCell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    modules: list[SoloModule],
    task: str,
    at: int,
) -> None:
    """In the first epoch, right at an evaluation, and in a later epoch."""
    cells = [
        make_text_cell(
            task,
            "batch_norm",
            allow_leak=task == LANGUAGE,
            output_root=str(tmp_path / name),
            budget=BudgetConfig(updates=20),
            probes=["running_statistics"],
        )
        for name in ("whole", "stopped")
    ]
    for config in cells:
        config.trainer.window_updates = 2
        config.trainer.checkpoint_interval_s = 1e-9
    whole, stopped = cells
    train_cell(whole)
    with monkeypatch.context() as patch:
        stop_at(at, patch)
        with pytest.raises(KeyboardInterrupt):
            train_cell(stopped)
    folders = [check_cell(config).run_dir(config, 0) for config in cells]
    partial = read_summary(folders[1])
    assert partial is not None
    assert (partial["status"], partial["totals"]["updates"]) == ("interrupted", at)
    train_cell(stopped)

    reference, resumed = (read_summary(folder) for folder in folders)
    assert reference is not None
    assert resumed is not None
    assert resumed["totals"]["resumed_from_update"] == at
    for summary in (reference, resumed):
        for name in UNSTEADY:
            del summary["totals"][name]
    assert resumed == reference
    # The totals are of the whole run, not of its last attempt.
    assert partial["totals"]["tokens"] < resumed["totals"]["tokens"]
    histories = [read_history(folder).drop(columns="wall_s") for folder in folders]
    pd.testing.assert_frame_equal(*histories, check_exact=True)
    first, _, last = (module.model.state_dict() for module in modules)
    assert any("running_var" in name for name in first)
    for name, tensor in first.items():
        assert torch.equal(last[name], tensor), name


@pytest.mark.parametrize("statistics", ["reestimated", "batch"])
def test_an_evaluation_that_was_interrupted_leaves_the_run_as_it_was(
    make_text_cell: MakeCell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    modules: list[SoloModule],
    statistics: str,
) -> None:
    evaluation = EvaluationConfig(statistics, "population", None, 13)
    cells = [
        make_text_cell(
            LABELS, "batch_norm", output_root=str(tmp_path / name), evaluation=evaluation
        )
        for name in ("whole", "stopped")
    ]
    for config in cells:
        config.trainer.checkpoint_interval_s = 1e-9
        config.trainer.window_updates = 4
    train_cell(cells[0])

    def stop(module: SoloModule, batch: object, batch_idx: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SoloModule, "validation_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train_cell(cells[1])
    train_cell(cells[1])
    whole, stopped = (
        read_history(check_cell(config).run_dir(config, 0)).drop(columns="wall_s")
        for config in cells
    )
    pd.testing.assert_frame_equal(stopped, whole, check_exact=True)
    first, last = modules[0].model.state_dict(), modules[-1].model.state_dict()
    assert all(torch.equal(first[name], last[name]) for name in first)
