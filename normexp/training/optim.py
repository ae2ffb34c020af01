"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normexp.errors import UserError, choices_hint
from normexp.models import parameter_roles
from normexp.registry import Registry

ROLES = ("weight", "bias", "norm", "skip")


@dataclass(frozen=True)
class OptimizerCard:
    """What is declared about an optimizer."""

    formula: str
    source: str


@dataclass(frozen=True)
class ScheduleCard:
    """What is declared about a schedule."""

    formula: str


OPTIMIZERS: Registry[OptimizerCard] = Registry("optimizer")
SCHEDULES: Registry[ScheduleCard] = Registry("schedule")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one role, which share a weight decay and a factor of the learning rate.

    Every parameter is in exactly one.
    """

    role: str
    weight_decay: float
    parameters: tuple[Tensor, ...]
    lr_factor: float = 1.0

    def describe(self) -> dict[str, Any]:
        """Return the group as the record of a run holds it."""
        return {
            "role": self.role,
            "weight_decay": self.weight_decay,
            "lr_factor": self.lr_factor,
            "num_parameters": sum(parameter.numel() for parameter in self.parameters),
            "num_tensors": len(self.parameters),
        }


def group_parameters(
    model: nn.Module,
    *,
    weight_decay: float,
    decay_roles: Sequence[str],
    lr_factors: Mapping[str, float] | None = None,
) -> list[ParameterGroup]:
    """Return the model's parameters by role.

    Args:
        model: A model that ``build_model`` built.
        weight_decay: Decay of the roles in ``decay_roles``; the others get 0.
        decay_roles: Some of weight, bias, norm, skip.
        lr_factors: What the learning rate is multiplied with, by role; 1 where it is silent.
    """
    factors = lr_factors or {}
    parameters = dict(model.named_parameters())
    by_role: dict[str, list[Tensor]] = defaultdict(list)
    for name, role in parameter_roles(model).items():
        by_role[role].append(parameters[name])
    return [
        ParameterGroup(
            role,
            weight_decay if role in decay_roles else 0.0,
            tuple(by_role[role]),
            factors.get(role, 1.0),
        )
        for role in ROLES
        if by_role[role]
    ]


def check_decay_roles(roles: Sequence[str]) -> None:
    """Raise unless every role is one of weight, bias, norm, skip."""
    for role in roles:
        if role not in ROLES:
            raise UserError("optimizer.decay_roles", role, choices_hint(role, ROLES))


def build_optimizer(
    name: str, groups: Sequence[ParameterGroup], *, lr: float, params: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer over parameter groups.

    Args:
        name: A registered optimizer.
        groups: From ``group_parameters``.
        lr: Peak learning rate, after scaling; a group has its factor's share of it.
        params: The optimizer's own parameters.
    """
    dicts = [
        {
            "params": list(group.parameters),
            "weight_decay": group.weight_decay,
            "lr": lr * group.lr_factor,
            "lr_factor": group.lr_factor,
        }
        for group in groups
    ]
    optimizer = OPTIMIZERS.get(name, key="optimizer").build(dicts, lr, **params)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


@OPTIMIZERS.register(
    "sgd",
    OptimizerCard(
        formula="v <- momentum v + g + decay w;  w <- w - lr v",
        source="Sutskever et al. 2013, in PyTorch's form",
    ),
)
def build_sgd(
    groups: list[dict[str, Any]], lr: float, *, momentum: float = 0.9, nesterov: bool = False
) -> torch.optim.Optimizer:
    """Return SGD with momentum; the weight decay is added to the gradient."""
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)


@OPTIMIZERS.register(
    "adamw",
    OptimizerCard(
        formula="w <- w - lr (m / (sqrt(v) + eps) + decay w)",
        source="Loshchilov and Hutter, ICLR 2019",
    ),
)
def build_adamw(
    groups: list[dict[str, Any]],
    lr: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Return AdamW; the weight decay is decoupled from the gradient."""
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, fused=True)


@SCHEDULES.register("constant", ScheduleCard(formula="1"))
def build_constant() -> Callable[[float], float]:
    """Return the schedule that stays at the peak."""
    return lambda _: 1.0


@SCHEDULES.register("cosine", ScheduleCard(formula="f + (1 - f) (1 + cos(pi t)) / 2"))
def build_cosine(*, final_fraction: float = 0.0) -> Callable[[float], float]:
    """Return half a cosine from 1 down to ``final_fraction``, over t in [0, 1]."""
    if not 0 <= final_fraction <= 1:
        raise ValueError("final_fraction is a share in [0, 1]")
    return lambda t: final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * t)) / 2


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of an update; a group has its factor's share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def build_lr(
    name: str,
    *,
    peak_lr: float,
    warmup_fraction: float,
    num_updates: int,
    params: Mapping[str, Any],
) -> Callable[[int], float]:
    """Return the learning rate as a pure function of the update, so nothing need be restored.

    The warm-up rises linearly and reaches the peak at its last update; the shape then runs over
    what is left of the budget.

    Args:
        name: A registered schedule.
        peak_lr: Rate at the peak.
        warmup_fraction: Share of the budget for the warm-up, in [0, 1).
        num_updates: Updates of the whole run.
        params: The schedule's own parameters.
    """
    shape = SCHEDULES.get(name, key="schedule").build(**params)
    warmup = round(warmup_fraction * num_updates)

    def lr(update: int) -> float:
        if update < warmup:
            return peak_lr * (update + 1) / warmup
        return float(peak_lr * shape((update - warmup) / max(1, num_updates - warmup)))

    return lr
