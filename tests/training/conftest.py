from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_texts

from normexp.config.schema import (
    BudgetConfig,
    CellConfig,
    DataConfig,
    LrScalingConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    PlacementConfig,
    ScheduleConfig,
)

MakeCell = Callable[..., CellConfig]


@pytest.fixture
def make_cell(tmp_path: Path) -> MakeCell:
    """Return a function that builds a small cell of ResNet-8 on digits in a fresh folder."""

    def make(norm: str = "group_norm", **changes: Any) -> CellConfig:
        settings: dict[str, Any] = {
            "name": "test",
            "output_root": str(tmp_path / "results"),
            "seeds": [0],
            "data": DataConfig("digits"),
            "model": ModelConfig("cifar_resnet", {"depth": 8, "width": 8}),
            "norm": NormConfig(norm),
            "placement": PlacementConfig("res_post"),
            "optimizer": OptimizerConfig("sgd", 0.05, 5e-4, ["weight"], {"momentum": 0.9}),
            "schedule": ScheduleConfig("cosine"),
            "lr_scaling": LrScalingConfig("none", 32),
            "micro_batch_size": 8,
            "budget": BudgetConfig(updates=20),
            "num_evaluations": 1,
        }
        return CellConfig(**{**settings, **changes})

    return make


@pytest.fixture
def make_text_cell(tmp_path: Path) -> MakeCell:
    """Return a function that builds a cell of a tiny Transformer in a fresh folder."""
    small_texts.register_small_texts()

    def make(task: str, norm: str | NormConfig = "layer_norm", **changes: Any) -> CellConfig:
        return small_texts.make_text_cell(tmp_path, task, norm, **changes)

    return make
