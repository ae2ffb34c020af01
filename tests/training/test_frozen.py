"""Batch norms whose statistics are averages or constants, through the main path of training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from normexp.config.schema import BudgetConfig, CellConfig, NormConfig
from normexp.data import load_dataset
from normexp.data.batches import IndexStream
from normexp.norms.freezing import freeze_norms
from normexp.norms.frozen_batch_norm import FrozenBatchNorm
from normexp.records import read_history, read_summary
from normexp.training import cell as cell_module
from normexp.training.build import build_start
from normexp.training.cell import train_cell
from normexp.training.check import check_cell
from normexp.training.solo import SoloModule
from normexp.training.windows import Window

MakeCell = Callable[..., CellConfig]
Buffers = dict[str, Tensor]
FREEZE_AFTER = 10


def _buffers(model: nn.Module) -> Buffers:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


def _are_equal(a: Buffers, b: Buffers) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Buffers]]:
    """Return (updates done, buffers) after every window and every evaluation of all runs."""
    seen: list[tuple[int, Buffers]] = []
    step, end = SoloModule.training_step, SoloModule.on_validation_epoch_end

    def noting_step(module: SoloModule, window: Window, batch_idx: int) -> None:
        step(module, window, batch_idx)
        seen.append((module.update, _buffers(module.model)))

    def noting_end(module: SoloModule) -> None:
        end(module)
        seen.append((module.update, _buffers(module.model)))

    monkeypatch.setattr(SoloModule, "training_step", noting_step)
    monkeypatch.setattr(SoloModule, "on_validation_epoch_end", noting_end)
    return seen


def _frozen_cell(make_cell: MakeCell, root: Path, **params: Any) -> CellConfig:
    config = make_cell(output_root=str(root), budget=BudgetConfig(updates=30), num_evaluations=5)
    config.norm = NormConfig("frozen_batch_norm", params)
    config.trainer.window_updates = 1
    config.trainer.checkpoint_interval_s = 1e-9
    return config


def test_statistics_move_until_they_freeze_and_never_after(
    make_cell: MakeCell, tmp_path: Path, journal: list[tuple[int, Buffers]]
) -> None:
    train_cell(_frozen_cell(make_cell, tmp_path, freeze_after_micro_batches=FREEZE_AFTER))
    assert len(journal) == 30 + 5
    frozen = next(buffers for update, buffers in journal if update == FREEZE_AFTER)
    assert frozen
    for (before, old), (update, new) in pairwise(journal):
        is_still = before == update or before >= FREEZE_AFTER
        assert _are_equal(old, new) == is_still, (before, update)
    assert _are_equal(journal[-1][1], frozen)


def test_statistics_that_are_frozen_from_the_start(
    make_cell: MakeCell, tmp_path: Path, journal: list[tuple[int, Buffers]]
) -> None:
    train_cell(_frozen_cell(make_cell, tmp_path))
    for _, buffers in journal:
        for name, buffer in buffers.items():
            assert (buffer == (0.0 if "mean" in name else 1.0)).all()


@pytest.mark.parametrize("at", [4, 13, 22])
def test_a_resumed_run_is_frozen_where_the_whole_one_is(
    make_cell: MakeCell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    journal: list[tuple[int, Buffers]],
    at: int,
) -> None:
    """Stopped before the freeze, right behind it, and between two later evaluations."""
    options = {"freeze_after_micro_batches": FREEZE_AFTER}
    whole = _frozen_cell(make_cell, tmp_path / "whole", **options)
    stopped = _frozen_cell(make_cell, tmp_path / "stopped", **options)
    train_cell(whole)
    reference = list(journal)
    journal.clear()
    noting = SoloModule.training_step

    def step(module: SoloModule, window: Window, batch_idx: int) -> None:
        if module.update == at:
            raise KeyboardInterrupt
        noting(module, window, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(SoloModule, "training_step", step)
        with pytest.raises(KeyboardInterrupt):
            train_cell(stopped)
    train_cell(stopped)
    summary = read_summary(check_cell(stopped).run_dir(stopped, 0))
    assert summary is not None
    assert summary["totals"]["resumed_from_update"] == at
    assert [update for update, _ in journal] == [update for update, _ in reference]
    for (_, ours), (_, theirs) in zip(journal, reference, strict=True):
        assert _are_equal(ours, theirs)
    histories = [
        read_history(check_cell(config).run_dir(config, 0)).drop(columns="wall_s")
        for config in (whole, stopped)
    ]
    pd.testing.assert_frame_equal(*histories, check_exact=True)


def test_a_model_that_was_frozen_by_hand_trains_on_with_its_statistics(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, journal: list[tuple[int, Buffers]]
) -> None:
    """As in fine-tuning: gains and shifts move, statistics do not."""
    real = cell_module._Run._build
    starts: list[nn.Module] = []

    def build(run: Any) -> SoloModule:
        module = real(run)
        with torch.no_grad():
            module.model.train()(run.data.train.inputs[:64])
        assert len(freeze_norms(module.model)) == 9
        starts.append(module.model)
        journal.append((0, _buffers(module.model)))
        return module

    monkeypatch.setattr(cell_module._Run, "_build", build)
    train_cell(make_cell("batch_norm", num_evaluations=3))
    assert all(_are_equal(journal[0][1], buffers) for _, buffers in journal)
    gains = [m.weight for m in starts[0].modules() if isinstance(m, FrozenBatchNorm)]
    assert not any((gain == 1).all() for gain in gains)


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_without_a_momentum_all_micro_batches_of_an_epoch_count_alike(
    make_cell: MakeCell, journal: list[tuple[int, Buffers]], accumulation_steps: int
) -> None:
    config = make_cell(
        micro_batch_size=25,
        accumulation_steps=accumulation_steps,
        budget=BudgetConfig(epochs=1.0),
        precision="64-true",
    )
    config.norm = NormConfig("batch_norm", {"momentum": None})
    # So small that no weight moves: the stem's output is the same function in all updates.
    config.optimizer.lr, config.optimizer.weight_decay = 1e-300, 0.0
    train_cell(config)
    data, plan = load_dataset("digits", {}), check_cell(config).plan
    model = build_start(config, data, seed=0, lr=0.1)[0]
    stem = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    norm = next(n for n, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    indices = torch.from_numpy(IndexStream(plan, 0).indices(0, plan.num_updates)).reshape(40, 25)
    with torch.no_grad():
        outputs = [stem(data.train.inputs[batch].double()) for batch in indices]
    means = torch.stack([y.mean((0, 2, 3)) for y in outputs])
    variances = torch.stack([y.var((0, 2, 3), correction=1) for y in outputs])
    found = journal[-1][1]
    for name, values in (("running_mean", means), ("running_var", variances)):
        expected = values.mean(0)
        torch.testing.assert_close(found[f"{norm}.{name}"], expected, rtol=1e-10, atol=1e-12)
