"""A cell's model and optimizer at their first update: the same to train and to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

from torch import nn, optim

from normexp.config.schema import CellConfig
from normexp.data import Dataset
from normexp.models import initialize
from normexp.training.check import build_cell_model
from normexp.training.clipping import build_adaptive_clip
from normexp.training.optim import ParameterGroup, build_optimizer, group_parameters


class Start(NamedTuple):
    """What a run starts from.

    Attributes:
        model: The initialised model.
        groups: Its parameters by role.
        optimizer: The optimizer over them.
        clip: Clips the gradients of an update; None for no clipping.
    """

    model: nn.Module
    groups: list[ParameterGroup]
    optimizer: optim.Optimizer
    clip: Callable[[], None] | None


def build_start(config: CellConfig, data: Dataset, *, seed: int, lr: float) -> Start:
    """Return what a run starts from, on the CPU and in the cell's precision.

    Args:
        config: A checked cell.
        data: Its data set.
        seed: Seed of the initial weights.
        lr: Learning rate of the optimizer until another is set.
    """
    model = build_cell_model(config, data)
    initialize(model, seed)
    if config.precision == "64-true":
        model.double()
    groups = group_parameters(
        model,
        weight_decay=config.optimizer.weight_decay,
        decay_roles=config.optimizer.decay_roles,
        lr_factors=asdict(config.optimizer.lr_factors),
    )
    optimizer = build_optimizer(
        config.optimizer.name, groups, lr=lr, params=config.optimizer.params
    )
    limit = config.optimizer.adaptive_clip
    clip = None if limit is None else build_adaptive_clip(model, limit)
    return Start(model, groups, optimizer, clip)
