"""Optimizers, schedules and parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from normexp.config.schema import CellConfig, LrScalingConfig, OptimizerConfig
from normexp.data import load_dataset
from normexp.errors import UserError
from normexp.norms import NORMS
from normexp.training.check import build_cell_model
from normexp.training.optim import build_lr, build_optimizer, check_decay_roles, group_parameters


@pytest.mark.parametrize("norm", [entry.name for entry in NORMS if 2 in entry.card.dims])
@pytest.mark.parametrize("decay_roles", [["weight"], ["weight", "norm"], []])
def test_every_parameter_is_in_one_group_and_decays_by_its_role(
    make_cell: Callable[..., CellConfig], norm: str, decay_roles: list[str]
) -> None:
    model = build_cell_model(make_cell(norm), load_dataset("digits", {}))
    groups = group_parameters(model, weight_decay=0.1, decay_roles=decay_roles)
    grouped = [id(parameter) for group in groups for parameter in group.parameters]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert len(set(grouped)) == len(grouped)
    for group in groups:
        assert group.weight_decay == (0.1 if group.role in decay_roles else 0.0)
    roles = {group.role for group in groups}
    assert ("norm" in roles) == (norm != "no_norm")


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer.decay_roles=norms: did you mean norm\?"):
        check_decay_roles(["weight", "norms"])


def test_cosine_with_warmup() -> None:
    lr = build_lr("cosine", peak_lr=2.0, warmup_fraction=0.2, num_updates=10, params={})
    # Two updates of warm-up reach the peak at the second; eight of cosine start there again.
    assert [lr(0), lr(1), lr(2)] == [1.0, 2.0, 2.0]
    assert lr(6) == pytest.approx(1.0)
    assert lr(9) == pytest.approx(1 + math.cos(math.pi * 7 / 8))


def test_cosine_ends_at_its_final_fraction() -> None:
    params = {"final_fraction": 0.25}
    lr = build_lr("cosine", peak_lr=4.0, warmup_fraction=0.0, num_updates=10**6, params=params)
    assert lr(10**6 - 1) == pytest.approx(1.0, abs=1e-9)
    assert lr(500_000) == pytest.approx((4.0 + 1.0) / 2)
    assert lr(0) == 4.0


def test_constant() -> None:
    lr = build_lr("constant", peak_lr=0.5, warmup_fraction=0.5, num_updates=4, params={})
    assert [lr(update) for update in range(4)] == [0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("rule", "expected"), [("none", 0.1), ("linear", 0.1 * 64 / 16), ("sqrt", 0.1 * 2.0)]
)
def test_the_rate_follows_the_effective_batch(
    make_cell: Callable[..., CellConfig], rule: str, expected: float
) -> None:
    config = make_cell(
        optimizer=OptimizerConfig("sgd", 0.1, 0.0),
        lr_scaling=LrScalingConfig(rule, 16),
        micro_batch_size=16,
        accumulation_steps=4,
    )
    assert config.scaled_lr == pytest.approx(expected, rel=1e-15)


def reference_sgd(w: float, grads: list[float], lr: float, decay: float, momentum: float) -> float:
    v = 0.0
    for g in grads:
        v = momentum * v + g + decay * w
        w -= lr * v
    return w


def reference_adamw(w: float, grads: list[float], lr: float, decay: float) -> float:
    m = v = 0.0
    for t, g in enumerate(grads, start=1):
        w -= lr * decay * w
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        w -= lr * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizers_follow_their_formulas(name: str) -> None:
    model = torch.nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(0.7)
    grads = [0.3, -0.2, 0.5]
    from normexp.training.optim import ParameterGroup

    groups = [ParameterGroup("weight", 0.01, (model.weight,))]
    optimizer = build_optimizer(name, groups, lr=0.1, params={})
    for g in grads:
        model.weight.grad = torch.full_like(model.weight, g)
        optimizer.step()
    expected = (
        reference_sgd(0.7, grads, 0.1, 0.01, 0.9)
        if name == "sgd"
        else reference_adamw(0.7, grads, 0.1, 0.01)
    )
    assert float(model.weight.detach()) == pytest.approx(expected, rel=1e-12)
