"""The cost pass: which cells share a measurement, and bytes that can be told by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from normexp.config.schema import (
    AugmentConfig,
    BudgetConfig,
    CellConfig,
    DataConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from normexp.training import cost

MakeCell = Callable[..., CellConfig]


@pytest.mark.parametrize(
    "change",
    [
        {"budget": BudgetConfig(updates=7)},
        {"seeds": [8]},
        {"schedule": ScheduleConfig("constant")},
        {"optimizer": OptimizerConfig("sgd", 0.9, 0.0, [], {"momentum": 0.9})},
        {"data": DataConfig("digits", {"split_seed": 4}, AugmentConfig(2, True))},
    ],
)
def test_cells_that_differ_in_training_alone_are_measured_once(
    make_cell: MakeCell, change: dict[str, Any]
) -> None:
    assert cost.cost_key(make_cell()) == cost.cost_key(make_cell(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"norm": NormConfig("batch_norm")},
        {"model": ModelConfig("cifar_resnet", {"depth": 8, "width": 16})},
        {"micro_batch_size": 4},
        {"accumulation_steps": 2},
        {"optimizer": OptimizerConfig("adamw", 0.05, 5e-4)},
        {"data": DataConfig("digits", {"image_size": 16})},
        {"precision": "bf16-mixed"},
        {"probes": ["folding"]},
    ],
)
def test_cells_that_differ_in_cost_are_not(make_cell: MakeCell, change: dict[str, Any]) -> None:
    config = make_cell(**{k: v for k, v in change.items() if k != "norm"})
    config.norm = change.get("norm", config.norm)
    assert cost.cost_key(make_cell()) != cost.cost_key(config)


def test_cost_of_an_mlp_by_hand(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "ROUNDS", 2)
    monkeypatch.setattr(cost, "MIN_WINDOW_S", 1e-4)
    model = ModelConfig("mlp", {"num_hidden_layers": 1, "width": 10})
    config = make_cell("no_norm", model=model, accumulation_steps=2)
    config.placement = None
    (record,) = cost.measure_costs([config])
    # 64 inputs to 10 hidden to 10 classes, with biases, in float32.
    parameters = 64 * 10 + 10 + 10 * 10 + 10
    assert record["num_parameters"] == parameters
    memory = record["memory"]
    assert memory["parameter_bytes"] == memory["gradient_bytes"] == 4 * parameters
    assert memory["optimizer_bytes"] == 4 * parameters  # one momentum a weight
    assert memory["buffer_bytes"] == 0
    # Saved for backward beside the weights: the hidden activations (once: relu's output), the
    # log-probabilities, and cross-entropy's scalar total weight; 8 samples each.
    saved = 4 * (8 * 10 + 8 * 10)
    assert saved <= memory["saved_for_backward_bytes"] <= saved + 64
    assert memory["peak_allocated_bytes"] >= 3 * 4 * parameters
    timing = record["timing"]
    assert set(timing) == {"forward_ms", "forward_backward_ms", "update_ms", "prediction_ms"}
    assert 0 < timing["forward_ms"]["median"] < timing["forward_backward_ms"]["median"]
    assert record["conditions"]["num_threads"] == 1


def test_an_update_is_all_its_micro_batches_and_a_step(make_cell: MakeCell) -> None:
    subject = cost._build_subject(make_cell(accumulation_steps=3))
    passes: list[int] = []
    subject.model.register_forward_hook(lambda *_: passes.append(1))
    before = [p.detach().clone() for p in subject.model.parameters()]
    subject.actions()["update_ms"]()
    assert len(passes) == 3
    assert any((p != q).any() for p, q in zip(subject.model.parameters(), before, strict=True))
    subject.actions()["prediction_ms"]()
    subject.actions()["forward_ms"]()
    assert len(passes) == 5
    assert all(p.grad is None for p in subject.model.parameters())
    assert subject.model.training


def test_mixed_thread_counts_are_refused(make_cell: MakeCell) -> None:
    one, two = make_cell(), make_cell()
    two.trainer.num_threads = 2
    with pytest.raises(ValueError, match="one number of threads"):
        cost.measure_costs([one, two])


def test_the_folded_model_is_timed_where_the_probe_asks(
    make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "ROUNDS", 2)
    monkeypatch.setattr(cost, "MIN_WINDOW_S", 1e-4)
    plain, folding = make_cell("batch_norm"), make_cell("batch_norm", probes=["folding"])
    records = cost.measure_costs([plain, folding])
    assert "folded_prediction_ms" not in records[0]["timing"]
    assert records[1]["timing"]["folded_prediction_ms"]["median"] > 0
    # It is no part of the memory that training needs.
    assert records[0]["memory"] == records[1]["memory"]
    subject = cost._build_subject(folding)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in subject.folded.modules())
    assert any(isinstance(m, nn.BatchNorm2d) for m in subject.model.modules())
    subject.actions()["folded_prediction_ms"]()
    assert subject.model.training
