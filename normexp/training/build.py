"""A cell's model and optimizer at their first update: the same to train and to time."""

from __future__ import annotations

from torch import nn, optim

from normexp.config.schema import CellConfig
from normexp.data import Dataset
from normexp.models import initialize
from normexp.training.check import build_cell_model
from normexp.training.optim import ParameterGroup, build_optimizer, group_parameters


def build_start(
    config: CellConfig, data: Dataset, *, seed: int, lr: float
) -> tuple[nn.Module, list[ParameterGroup], optim.Optimizer]:
    """Return what a run starts from, on the CPU and in the cell's precision.

    Args:
        config: A checked cell.
        data: Its data set.
        seed: Seed of the initial weights.
        lr: Learning rate of the optimizer until another is set.

    Returns:
        (initialised model, its parameters by role, optimizer over them).
    """
    model = build_cell_model(config, data)
    initialize(model, seed)
    if config.precision == "64-true":
        model.double()
    groups = group_parameters(
        model,
        weight_decay=config.optimizer.weight_decay,
        decay_roles=config.optimizer.decay_roles,
    )
    optimizer = build_optimizer(
        config.optimizer.name, groups, lr=lr, params=config.optimizer.params
    )
    return model, groups, optimizer
