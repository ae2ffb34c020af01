"""Evaluation with running, re-estimated or batch statistics: other numbers, the same training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from normexp.config.schema import BudgetConfig, CellConfig, EvaluationConfig, ModelConfig
from normexp.data import load_dataset
from normexp.errors import UserError
from normexp.measure import batch_statistics, reestimate_running_statistics
from normexp.records import read_history, read_summary
from normexp.training import cell as cell_module
from normexp.training.cell import train_cell
from normexp.training.check import check_cell
from normexp.training.resolve import resolve_cell
from normexp.training.solo import SoloModule

MakeCell = Callable[..., CellConfig]
WAYS = {
    "running": EvaluationConfig(),
    "reestimated": EvaluationConfig("reestimated", "population", 200, 32),
    "mean_of_batches": EvaluationConfig("reestimated", "mean_of_batches", None, 32),
    "batch": EvaluationConfig("batch", batch_size=64),
}


@pytest.fixture
def train(
    make_cell: MakeCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[CellConfig, nn.Module, dict[str, float]]]:
    """Return a function that trains a cell and returns it, its model and its final metrics."""
    modules: list[SoloModule] = []
    real = cell_module._Run._prepare

    def prepare(run: Any) -> tuple[SoloModule, int]:
        prepared = real(run)
        modules.append(prepared[0])
        return prepared

    monkeypatch.setattr(cell_module._Run, "_prepare", prepare)

    def run(
        way: str, norm: str = "batch_norm", **changes: Any
    ) -> tuple[CellConfig, nn.Module, dict[str, float]]:
        settings = {"num_evaluations": 3, "evaluation": WAYS[way], **changes}
        config = resolve_cell(make_cell(norm, output_root=str(tmp_path / way), **settings))
        train_cell(config)
        summary = read_summary(check_cell(config).run_dir(config, 0))
        assert summary is not None
        assert summary["status"] == "completed", summary["reason"]
        return config, modules[-1].model, summary["metrics"]

    return run


def test_training_does_not_depend_on_how_it_is_evaluated(train: Callable[..., Any]) -> None:
    reference_config, reference, metrics = train("running")
    rows = read_history(check_cell(reference_config).run_dir(reference_config, 0))
    losses = rows.query("split == 'train'").drop(columns="wall_s")
    for way in ("reestimated", "mean_of_batches", "batch"):
        config, model, other = train(way)
        # Buffers and their counts too.
        for (name, a), (_, b) in zip(
            reference.state_dict().items(), model.state_dict().items(), strict=True
        ):
            assert torch.equal(a, b), name
        found = read_history(check_cell(config).run_dir(config, 0))
        pd.testing.assert_frame_equal(
            found.query("split == 'train'").drop(columns="wall_s"), losses, check_exact=True
        )
        assert other["val/loss"] != metrics["val/loss"]
        assert other["test/loss"] != metrics["test/loss"]


def _loss(model: nn.Module, split: str) -> float:
    samples = getattr(load_dataset("digits", {}), split)
    with torch.no_grad():
        logits = model(samples.inputs)
    return float(nn.functional.cross_entropy(logits, samples.targets))


@pytest.mark.parametrize("way", ["reestimated", "mean_of_batches"])
def test_re_estimated_numbers_are_those_of_the_tool(train: Callable[..., Any], way: str) -> None:
    config, model, metrics = train(way)
    evaluation = config.evaluation
    model.eval()
    reestimate_running_statistics(
        model,
        load_dataset("digits", {}).train.inputs,
        batch_size=evaluation.batch_size,
        estimator=evaluation.estimator,
        num_samples=evaluation.num_samples,
    )
    for split in ("val", "test"):
        assert metrics[f"{split}/loss"] == pytest.approx(_loss(model, split), rel=1e-6)


def test_batches_are_whole_and_count_once(train: Callable[..., Any]) -> None:
    _, model, metrics = train("batch")
    val = load_dataset("digits", {}).val
    assert len(val) == 297  # 4 batches of 64 and 41 left, which 23 before them join
    with batch_statistics(model), torch.no_grad():
        parts = [model(val.inputs[start : start + 64]) for start in range(0, 256, 64)]
        parts.append(model(val.inputs[-64:])[-41:])
    logits = torch.cat(parts)
    loss = float(nn.functional.cross_entropy(logits, val.targets))
    assert metrics["val/loss"] == pytest.approx(loss, rel=1e-6)
    accuracy = float((logits.argmax(1) == val.targets).double().mean())
    assert metrics["val/accuracy"] == pytest.approx(accuracy, rel=1e-12)


@pytest.mark.parametrize("way", ["reestimated", "batch"])
def test_mixed_precision_is_that_of_training(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    real, seen = cell_module.evaluation_statistics, []

    def note(*arguments: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return real(*arguments)

    monkeypatch.setattr(cell_module, "evaluation_statistics", note)
    train(way, precision="bf16-mixed", budget=BudgetConfig(updates=4))
    assert seen == [True] * 4  # three evaluations and the test


def test_an_interrupted_evaluation_leaves_the_statistics(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SoloModule] = []
    before: list[dict[str, torch.Tensor]] = []
    start = SoloModule.on_validation_epoch_start

    def note(module: SoloModule) -> None:
        before.append({name: t.clone() for name, t in module.model.state_dict().items()})
        start(module)

    def stop(module: SoloModule, batch: object, batch_idx: int) -> None:
        seen.append(module)
        raise KeyboardInterrupt

    monkeypatch.setattr(SoloModule, "on_validation_epoch_start", note)
    monkeypatch.setattr(SoloModule, "validation_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train_cell(make_cell("batch_norm", evaluation=WAYS["reestimated"]))
    state = seen[0].model.state_dict()
    assert all(torch.equal(before[0][name], tensor) for name, tensor in state.items())


def test_keys_without_effect_are_null(make_cell: MakeCell) -> None:
    def resolved(norm: str, way: str) -> EvaluationConfig:
        config = make_cell(norm)
        config.evaluation = EvaluationConfig(**vars(WAYS[way]))
        return resolve_cell(config).evaluation

    nothing = EvaluationConfig("running", None, None, None)
    assert resolved("batch_norm", "running") == nothing
    assert resolved("batch_norm", "batch") == EvaluationConfig("batch", None, None, 64)
    assert resolved("batch_norm", "reestimated") == WAYS["reestimated"]
    # All samples are all samples.
    config = make_cell("batch_norm", evaluation=EvaluationConfig("reestimated", num_samples=1000))
    assert resolve_cell(config).evaluation.num_samples is None
    # A model without running statistics has one way to be evaluated, and frozen ones stay.
    for norm in ("group_norm", "frozen_batch_norm", "no_norm"):
        assert resolved(norm, "reestimated") == resolved(norm, "batch") == nothing


def test_probes_are_a_set(make_cell: MakeCell) -> None:
    config = make_cell("batch_norm", probes=["running_statistics", "folding", "folding"])
    assert resolve_cell(config).probes == ["folding", "running_statistics"]


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (EvaluationConfig("runing"), "evaluation.statistics=runing: did you mean running"),
        (EvaluationConfig("batch", "mean"), "evaluation.estimator=mean: "),
        (EvaluationConfig("batch", batch_size=0), "evaluation.batch_size=0: 1 or more"),
        (EvaluationConfig("batch", batch_size=None), "evaluation.batch_size=null: .*a number"),
        (EvaluationConfig("batch", batch_size=298), "validation split of digits has 297"),
        (EvaluationConfig("reestimated", None), "evaluation.estimator=null"),
        (
            EvaluationConfig("reestimated", num_samples=1001),
            "evaluation.num_samples=1001: the training split of digits has 1000",
        ),
        (
            EvaluationConfig("reestimated", num_samples=100),
            "evaluation.batch_size=128: 100 training samples are used",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_training(
    make_cell: MakeCell, evaluation: EvaluationConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_cell(make_cell("batch_norm", evaluation=evaluation))


def test_a_last_batch_of_one_value_is_refused(make_cell: MakeCell) -> None:
    model = ModelConfig("mlp", {"num_hidden_layers": 1, "width": 10})
    evaluation = EvaluationConfig("reestimated", num_samples=129)
    with pytest.raises(UserError, match=r"in a batch of 1 layer .* gets 1 value a channel"):
        check_cell(make_cell("batch_norm", model=model, placement=None, evaluation=evaluation))
    # With positions there are values enough.
    check_cell(make_cell("batch_norm", evaluation=evaluation))


def test_the_probe_of_folding(train: Callable[..., Any]) -> None:
    config, model, metrics = train("running", probes=["folding"], num_evaluations=1)
    # ResNet-8: the stem, three blocks of two, and two shortcuts with a norm of their own.
    assert metrics["folding/num_folded"] == 9
    assert metrics["folding/num_not_folded"] == 0
    assert 0 < metrics["folding/max_difference"] < 1e-10
    summary = read_summary(check_cell(config).run_dir(config, 0))
    assert summary is not None
    found = summary["probes"]["folding"]
    assert len(found) == 9
    assert all(entry["is_folded"] and entry["into"] for entry in found)
    # The model itself keeps its norms and its type.
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 9
    assert next(model.parameters()).dtype is torch.float32


def test_the_probe_says_why_other_norms_stay(train: Callable[..., Any]) -> None:
    config, _, metrics = train("running", norm="group_norm", probes=["folding"], num_evaluations=1)
    assert metrics["folding/num_folded"] == 0
    assert metrics["folding/max_difference"] == 0
    summary = read_summary(check_cell(config).run_dir(config, 0))
    assert summary is not None
    reasons = {entry["reason"] for entry in summary["probes"]["folding"]}
    assert reasons == {"group_norm computes its statistics from each input"}
