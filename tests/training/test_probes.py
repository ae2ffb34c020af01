"""The probe of initial gradients: what it reports, and that a run does not notice it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from normexp.config.schema import (
    BudgetConfig,
    CellConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
)
from normexp.data import IGNORED_TARGET, Split, TokenTask, load_dataset
from normexp.models import build_model, initialize
from normexp.norms import NormFactory
from normexp.records import read_history, read_summary
from normexp.training import solo, windows
from normexp.training.build import build_start
from normexp.training.cell import train_cell
from normexp.training.check import check_cell
from normexp.training.objective import sum_losses
from normexp.training.probes import GRADIENT_SAMPLES, run_initial_probes

MakeCell = Callable[..., CellConfig]
PROBES = ["initial_gradients"]
LAST = "initial_gradient/last_branch"


def summary_of(config: CellConfig) -> dict[str, Any]:
    summary = read_summary(check_cell(config).run_dir(config, 0))
    assert summary is not None
    return summary


def history_of(config: CellConfig) -> pd.DataFrame:
    return read_history(check_cell(config).run_dir(config, 0)).drop(columns="wall_s")


def texts(make_cell: MakeCell, **changes: Any) -> CellConfig:
    settings: dict[str, Any] = {
        "data": DataConfig("python_docs", {"context_length": 16}),
        "model": ModelConfig("transformer", {"depth": 2, "width": 8, "num_heads": 2}),
        "placement": PlacementConfig("pre"),
        "budget": BudgetConfig(updates=2),
    }
    config = make_cell("layer_norm", **{**settings, **changes})
    config.trainer.eval_batch_size = 1024
    return config


def test_the_report_is_of_the_first_samples_at_the_initial_weights(make_cell: MakeCell) -> None:
    config = make_cell("batch_norm", probes=PROBES, micro_batch_size=24)
    train_cell(config)
    data = load_dataset("digits", {})
    model = build_start(config, data, seed=0, lr=1.0).model.train()
    # As few whole micro-batches of 24 as hold 64 samples: a batch norm sees 24, never 16.
    inputs, targets = data.train.inputs[:72], data.train.targets[:72]
    losses = [sum_losses(model(inputs[i : i + 24]), targets[i : i + 24]) for i in (0, 24, 48)]
    loss = torch.stack(losses).sum() / 72
    loss.backward()
    summary = summary_of(config)
    report = summary["probes"]["initial_gradients"]
    assert (report["num_samples"], report["num_targets"]) == (72, 72)
    assert report["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    last = model.get_parameter("stages.2.0.conv2.weight").grad
    assert last is not None
    assert summary["metrics"][LAST] == pytest.approx(float(last.norm()), rel=1e-5)
    assert report["last_branch_weight"] == "stages.2.0.conv2.weight"
    assert [entry["name"] for entry in report["parameters"]] == [
        name for name, _ in model.named_parameters()
    ]
    squares = sum(entry["gradient_norm"] ** 2 for entry in report["parameters"])
    total = summary["metrics"]["initial_gradient/total"]
    assert total == pytest.approx(math.sqrt(squares), rel=1e-12)


def model_of_texts(*, is_language_modeling: bool) -> nn.Module:
    model = build_model(
        "transformer",
        {"depth": 2, "width": 8, "num_heads": 2},
        input_shape=(16,),
        num_classes=9,
        norm=NormFactory("layer_norm", {}, {}),
        placement="pre",
        tokens=TokenTask(9, is_language_modeling=is_language_modeling, has_padding=True),
    ).double()
    initialize(model, seed=0)
    return model


def padded_texts() -> torch.Tensor:
    """Texts of 3, 9, 2 and 5 tokens in 16 positions."""
    tokens = torch.randint(3, 9, (4, 16), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate((3, 9, 2, 5)):
        tokens[row, length:] = 0
    return tokens


def test_of_texts_the_gradient_is_that_of_the_mean_over_tokens() -> None:
    model, tokens = model_of_texts(is_language_modeling=True), padded_texts()
    targets = torch.where(tokens == 0, IGNORED_TARGET, tokens)
    metrics, reports = run_initial_probes(
        PROBES, model, Split(tokens, targets), micro_batch_size=2, is_trimmed=False
    )
    # 3 + 9 + 2 + 5 tokens; the split holds fewer than GRADIENT_SAMPLES.
    report = reports["initial_gradients"]
    assert (report["num_samples"], report["num_targets"]) == (4, 19)
    loss = sum_losses(model(tokens), targets) / 19
    assert report["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
    (grad,) = torch.autograd.grad(loss, [model.get_parameter("blocks.1.mlp.branch.down.weight")])
    assert metrics[LAST] == pytest.approx(float(grad.norm()), rel=1e-12)


def test_texts_are_cut_as_in_training() -> None:
    model, tokens = model_of_texts(is_language_modeling=False), padded_texts()
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    split = Split(tokens, torch.tensor([0, 1, 2, 0]))
    found = [
        run_initial_probes(PROBES, model, split, micro_batch_size=2, is_trimmed=is_trimmed)[0]
        for is_trimmed in (True, False)
    ]
    assert seen == [9, 5, 16, 16]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


@pytest.mark.parametrize("norm", ["batch_norm", "group_norm"])
def test_a_run_does_not_notice(make_cell: MakeCell, tmp_path: Path, norm: str) -> None:
    plain = make_cell(norm, output_root=str(tmp_path / "a"))
    probed = make_cell(norm, output_root=str(tmp_path / "b"), probes=PROBES)
    for config in (plain, probed):
        train_cell(config)
    pd.testing.assert_frame_equal(history_of(plain), history_of(probed), check_exact=True)
    first, second = (summary_of(config)["metrics"] for config in (plain, probed))
    assert second == {**first, **{k: v for k, v in second.items() if "initial_gradient" in k}}
    assert set(second) - set(first) == {LAST, "initial_gradient/total"}


def test_a_resumed_run_has_the_same_record(
    make_cell: MakeCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_cell("batch_norm", output_root=str(tmp_path / "whole"), probes=PROBES)
    stopped = make_cell("batch_norm", output_root=str(tmp_path / "stopped"), probes=PROBES)
    for config in (whole, stopped):
        config.trainer.window_updates = 4
        config.trainer.checkpoint_interval_s = 1e-9
    train_cell(whole)
    real = solo.SoloModule.training_step

    def step(module: solo.SoloModule, window: windows.Window, batch_idx: int) -> None:
        if module.update >= 8:
            raise KeyboardInterrupt
        real(module, window, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(solo.SoloModule, "training_step", step)
        with pytest.raises(KeyboardInterrupt):
            train_cell(stopped)
    assert LAST in summary_of(stopped)["metrics"]
    train_cell(stopped)
    resumed, reference = summary_of(stopped), summary_of(whole)
    assert resumed["totals"]["resumed_from_update"] == 8
    assert resumed["metrics"] == reference["metrics"]
    assert resumed["probes"] == reference["probes"]


def test_a_diverged_run_has_it_too(make_cell: MakeCell) -> None:
    optimizer = OptimizerConfig("sgd", 1e9, 0.0, ["weight"], {"momentum": 0.9})
    config = make_cell("no_norm", optimizer=optimizer, probes=PROBES)
    train_cell(config)
    summary = summary_of(config)
    assert summary["status"] == "diverged"
    assert summary["metrics"][LAST] > 0


def test_a_language_model_has_blocks(make_cell: MakeCell) -> None:
    config = texts(make_cell, probes=PROBES)
    train_cell(config)
    summary = summary_of(config)
    report = summary["probes"]["initial_gradients"]
    assert report["num_samples"] == GRADIENT_SAMPLES
    assert report["num_targets"] == GRADIENT_SAMPLES * 16
    assert {entry["block"] for entry in report["parameters"]} == {None, 0, 1}
    (last,) = [e for e in report["parameters"] if e["name"] == report["last_branch_weight"]]
    assert summary["metrics"][LAST] == last["gradient_norm"] > 0
