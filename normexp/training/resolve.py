"""A cell in its one spelling, so that one computation is one cell."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normexp.config.schema import CellConfig
from normexp.config.validate import check_fields
from normexp.data import DATASETS, load_dataset
from normexp.models import MODELS
from normexp.models import RESERVED as MODEL_RESERVED
from normexp.norms import NORMS, RESERVED, describe_norm_layers
from normexp.registry import Registry
from normexp.training.check import build_cell_model, placement_of, tell_leak
from normexp.training.evaluation import complete_evaluation
from normexp.training.optim import OPTIMIZERS, SCHEDULES


def resolve_cell(config: CellConfig) -> CellConfig:
    """Return the cell in its one spelling, so that one computation is one cell.

    A model without residual branches has no placement, "auto" becomes the device that is here,
    defaults are written out, probes stand in one order, and a leak is allowed only where there
    is one.

    Args:
        config: A composed cell; changed in place.

    Raises:
        UserError: On an unknown choice or parameter.
    """
    if placement_of(config) is None:
        config.placement = None
    if config.trainer.accelerator == "auto":
        config.trainer.accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    kinds: list[tuple[str, Registry[Any], Any, frozenset[str]]] = [
        ("data", DATASETS, config.data, frozenset()),
        ("model", MODELS, config.model, MODEL_RESERVED),
        ("norm", NORMS, config.norm, RESERVED),
        ("optimizer", OPTIMIZERS, config.optimizer, frozenset()),
        ("schedule", SCHEDULES, config.schedule, frozenset()),
    ]
    for key, registry, choice, reserved in kinds:
        entry = registry.get(choice.name, key=key)
        entry.check_params(choice.params, key=f"{key}.params", reserved=reserved)
        choice.params = entry.complete_params(choice.params, reserved=reserved)
    config.probes = sorted(set(config.probes))
    _resolve_by_model(config)
    return config


def _resolve_by_model(config: CellConfig) -> None:
    """Null or switch off what has no effect on this model; it is built where there may be some."""
    check_fields(config)
    model = nn.Module()
    if config.evaluation.statistics != "running" or config.allow_leak:
        data = load_dataset(config.data.name, config.data.params)
        with torch.device("meta"):
            model = build_cell_model(config, data)
        if config.evaluation.num_samples == len(data.train):
            config.evaluation.num_samples = None
        if config.allow_leak:
            layers = describe_norm_layers(model, data.input_shape, config.micro_batch_size)
            config.allow_leak = tell_leak(config, data, layers, model)
    complete_evaluation(config.evaluation, model)
