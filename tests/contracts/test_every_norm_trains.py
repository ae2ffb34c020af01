"""Every norm that a model family admits trains through the main path; the others are refused."""

from __future__ import annotations

import pytest

from normexp.config.schema import (
    BudgetConfig,
    CellConfig,
    DataConfig,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    PlacementConfig,
    ScheduleConfig,
)
from normexp.errors import UserError
from normexp.models import MODELS
from normexp.norms import NORMS
from normexp.records import read_summary
from normexp.training.cell import train_cell
from normexp.training.check import check_cell, resolve_cell

MODEL_PARAMS = {"mlp": {"num_hidden_layers": 2, "width": 32}, "cifar_resnet": {"width": 32}}
# Kinds of input that the norm layers of a family get.
MODEL_DIMS = {"mlp": {0}, "cifar_resnet": {2}}
PAIRS = [(model.name, norm.name) for model in MODELS for norm in NORMS]


def make_cell(folder, model, norm, params=None):
    return resolve_cell(
        CellConfig(
            name="every_norm",
            output_root=str(folder),
            seeds=[0],
            data=DataConfig("digits"),
            model=ModelConfig(model, dict(MODEL_PARAMS[model])),
            norm=NormConfig(norm, dict(params or {})),
            placement=PlacementConfig("res_post"),
            optimizer=OptimizerConfig("sgd", 0.01, 5e-4, ["weight"], {"momentum": 0.9}),
            schedule=ScheduleConfig("constant"),
            micro_batch_size=16,
            accumulation_steps=2,
            budget=BudgetConfig(updates=2),
            num_evaluations=1,
        )
    )


def is_admitted(model, norm):
    card = NORMS.get(norm).card
    return set(card.dims) >= MODEL_DIMS[model] and not card.takes_condition


@pytest.mark.parametrize(("model", "norm"), PAIRS)
def test_trains_or_is_refused_in_one_line(tmp_path, model, norm):
    config = make_cell(tmp_path, model, norm)
    if not is_admitted(model, norm):
        with pytest.raises(UserError, match=rf"^norm={norm}: [^\n]+$"):
            check_cell(config)
        assert not list(tmp_path.iterdir())
        return
    facts = check_cell(config)
    train_cell(config)
    summary = read_summary(facts.run_dir(config, 0))
    assert summary is not None
    assert (summary["status"], summary["reason"]) == ("completed", None)
    assert summary["totals"]["updates"] == 2
    assert 0.0 <= summary["metrics"]["test/accuracy"] <= 1.0
    names = {layer["name"] for layer in summary["model"]["norm_layers"]}
    assert names == {norm}


def test_most_pairs_are_admitted():
    admitted = [pair for pair in PAIRS if is_admitted(*pair)]
    assert len(admitted) > len(PAIRS) / 2
