"""Every norm that a model family admits trains through the main path; the others are refused."""

from __future__ import annotations

import math

import pytest
from small_texts import LABELS, LANGUAGE, TASKS, make_text_cell, register_small_texts

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
from normexp.training.check import check_cell
from normexp.training.resolve import resolve_cell

MODEL_PARAMS = {"mlp": {"num_hidden_layers": 2, "width": 32}, "cifar_resnet": {"width": 32}}
# Kinds of input that the norm layers of a family get.
MODEL_DIMS = {"mlp": {0}, "cifar_resnet": {2}}
PAIRS = [(model, norm.name) for model in MODEL_DIMS for norm in NORMS]
TEXT_PAIRS = [(task, norm.name) for task in TASKS for norm in NORMS]


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


def test_every_model_is_here():
    assert set(MODELS.names()) == {*MODEL_DIMS, "transformer"}


def test_most_pairs_are_admitted():
    admitted = [pair for pair in PAIRS if is_admitted(*pair)]
    assert len(admitted) > len(PAIRS) / 2


def make_cell_on_texts(folder, task, norm, **changes):
    register_small_texts()
    # Channels for the groups of group_norm, and batches that leave a variance to every ghost.
    config = make_text_cell(
        folder,
        task,
        norm,
        model_params={"width": 32},
        micro_batch_size=16,
        accumulation_steps=2,
        budget=BudgetConfig(updates=2),
        num_evaluations=1,
        **changes,
    )
    return resolve_cell(config)


def refusal_on_texts(task, norm):
    """Return the line with which a norm is refused; None if the family admits it on its own."""
    card = NORMS.get(norm).card
    if 1 not in card.dims:
        return f"norm={norm}: not defined for sequences"
    if norm.startswith("evo_norm"):
        return f"norm={norm}: its statistics belong to an activation"
    if card.takes_condition:
        return f"norm={norm}: a condition goes in with every input"
    sets = card.statistic_sets[1]
    if task == LANGUAGE:
        is_mixing = card.mixes_positions or any("position" in axes for axes in sets)
        return f"norm={norm}: layer .* allow_leak=true" if is_mixing else None
    if sets == (("position",),) and card.is_centring and card.takes_mask:
        return f"norm={norm}: layer final_norm centres each channel"
    if card.mixes_positions and not card.takes_mask:
        return f"norm={norm}: layer .* model.params.mask_norms=false"
    return None


@pytest.mark.parametrize(("task", "norm"), TEXT_PAIRS)
def test_trains_on_texts_or_is_refused_in_one_line(tmp_path, task, norm):
    changes = {}
    refusal = refusal_on_texts(task, norm)
    if refusal is not None:
        with pytest.raises(UserError, match=rf"^{refusal}[^\n]*$"):
            check_cell(make_cell_on_texts(tmp_path, task, norm))
        assert not list(tmp_path.iterdir())
        if "allow_leak" not in refusal:
            return
        # It trains all the same, and the record says so.
        changes = {"allow_leak": True}
    config = make_cell_on_texts(tmp_path, task, norm, **changes)
    facts = check_cell(config)
    train_cell(config)
    summary = read_summary(facts.run_dir(config, 0))
    assert summary is not None
    assert (summary["status"], summary["reason"]) == ("completed", None)
    assert summary["totals"]["micro_steps"] == 4
    assert math.isfinite(summary["metrics"]["test/loss"])
    assert {layer["name"] for layer in summary["model"]["norm_layers"]} <= {norm}
    assert summary["model"]["is_leaking"] == bool(changes)


def test_most_norms_train_on_texts():
    admitted = dict.fromkeys(TASKS, 0)
    for task, norm in TEXT_PAIRS:
        admitted[task] += refusal_on_texts(task, norm) is None
    # Of 30 norms: those a token in a causal model; with a mask nearly all others too.
    assert admitted[LANGUAGE] >= 10
    assert admitted[LABELS] >= 20
